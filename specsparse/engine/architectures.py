"""The architectures: one table of how the families of models differ from the plain Llama.

A row is all that the engine knows of a family. The forward pass, the reader of GGUF files, the converter and the tiny
models of the tests read it, and nobody asks for a family by its name. The names and the facts are llama.cpp's
(src/llama-model.cpp and src/models), which wrote the GGUF files that there are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from specsparse.engine.gguf.reader import GGUFFile, show
from specsparse.errors import UserError

Pairing = Literal["norm", "neox"]


@dataclass(frozen=True)
class Architecture:
    """How a family of models differs from the plain Llama. "Every n-th layer" are layers n - 1, 2 n - 1, ...

    Attributes:
        pairing: which elements RoPE turns together: neighbours ("norm") or the two halves ("neox").
        biases: projections that must have a bias; any other may, unless `post_norms` follow it.
        activation: of the FFN in a dense file.
        sparse_activation: of the FFN in a PowerInfer file.
        qk_norm: an RMS norm over each head of queries and keys, before RoPE.
        post_norms: an RMS norm over the outputs of attention and FFN, before they are added to the residual stream.
        scaled_embedding: embeddings are multiplied by sqrt(D).
        window: whether a file says how many tokens a layer sees ("never", "may", "must").
        full_every: with a window, every n-th layer sees all tokens; 0: no layer does.
        local_rope_base: theta of the layers with a window if a file does not say it; None: that of all layers.
        unrotated_every: every n-th layer has no RoPE; 0: all have it.
        width_scaled_layers: number of layers of the one size whose queries are divided by sqrt(D / H), not sqrt(d).
    """

    pairing: Pairing
    biases: tuple[str, ...] = ()
    activation: str = "silu"
    sparse_activation: str = "relu"
    qk_norm: bool = False
    post_norms: bool = False
    scaled_embedding: bool = False
    window: Literal["never", "may", "must"] = "never"
    full_every: int = 0
    local_rope_base: float | None = None
    unrotated_every: int = 0
    width_scaled_layers: int = 0


class LayerKind(NamedTuple):
    """How a layer's attention differs from another's of the same model.

    Attributes:
        window: tokens that a row sees, itself among them; 0: all before it.
        table: index in `ModelConfig.ropes` of the rotation of queries and keys.
    """

    window: int = 0
    table: int = 0


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("norm", window="may"),  # Mistral's files are of this one
    "qwen2": Architecture("neox", ("attn_q", "attn_k", "attn_v")),
    "qwen3": Architecture("neox", qk_norm=True),
    "smollm3": Architecture("norm", unrotated_every=4),
    "gemma3": Architecture(
        "neox",
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        scaled_embedding=True,
        window="must",
        full_every=6,
        local_rope_base=10000.0,
        width_scaled_layers=62,
    ),
    "bamboo": Architecture("norm", activation="drelu", sparse_activation="drelu"),
}
"""`general.architecture` -> how it differs."""

DRAFT_HEADS = {"eagle3": "EAGLE-3", "dflash": "DFlash"}
"""Architectures of GGUF files that hold a draft head and no model, and their names."""


def supported_architecture(f: GGUFFile) -> str:
    """The architecture of an open file; raises UserError, with the parts of it that are not built here, for another."""
    arch = f.get("general.architecture", "str")
    if arch in ARCHITECTURES:
        return arch
    parts = ["experts"] if f"{arch}.expert_count" in f.metadata else []
    keys = (f"{arch}.ssm.", f"{arch}.wkv.", f"{arch}.shortconv.")
    if any(key.startswith(keys) for key in f.metadata) or any(".ssm_" in name for name in f.tensors):
        parts.append("recurrent layers")
    about = f" (a model with {' and '.join(parts)})" if parts else ""
    if arch in ("opt", "falcon"):  # PowerInfer's other architectures
        about = " (LayerNorm, no gate: PowerInfer runs it)"
    problem = f"architecture {show(arch)}{about} is not supported; supported are {', '.join(ARCHITECTURES)}"
    if arch in DRAFT_HEADS:
        problem = f"is a draft head ({DRAFT_HEADS[arch]}) of a target, not a model"
    raise UserError(f"{f.path}: {problem}")
