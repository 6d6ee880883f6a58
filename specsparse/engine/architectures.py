"""The architectures: one table of how the families of models differ from the plain Llama.

A row is all that the engine knows of a family. The forward pass, the reader of GGUF files, the converter and the tiny
models of the tests read it, and nobody asks for a family by its name. The names and the facts are llama.cpp's
(src/llama-model.cpp and src/models), which wrote the GGUF files that there are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from specsparse.engine.gguf.reader import GGUFFile, show
from specsparse.errors import UserError

Pairing = Literal["norm", "neox"]
Gating = Literal["softmax", "sigmoid", "chosen"]


@dataclass(frozen=True)
class Routing:
    """How layers choose their experts."""

    # experts are chosen by the softmax of all logits, by the sigmoid of each, or by the logits themselves, and then a
    # softmax of the chosen ones gives the weights ("chosen"). None: a key of the file says which
    gating: Gating | None = "softmax"
    normalised: bool = True  # the weights are divided by their sum
    # the router reads the residual stream that enters the layer, not the normalised input of the FFN
    early: bool = False


@dataclass(frozen=True)
class Architecture:
    """How a family of models differs from the plain Llama. "Every n-th layer" are layers n - 1, 2 n - 1, ..."""

    pairing: Pairing  # which elements RoPE turns together: neighbours ("norm") or the two halves ("neox")
    biases: tuple[str, ...] = ()  # projections that must have a bias; any other may, unless `post_norms` follow it
    activation: str = "silu"  # of the FFN in a dense file
    sparse_activation: str = "relu"  # of the FFN in a PowerInfer file
    routing: Routing | None = None  # of models with experts; None: the FFN is dense
    # an RMS norm of queries and keys before RoPE, over each "head" or over the "whole" row; "": none
    qk_norm: Literal["", "head", "whole"] = ""
    sinks: bool = False  # each head has a learned logit beside its scores that only takes weight from them
    ffn_norm: str = "ffn_norm"  # GGUF name of the norm before the FFN
    # matrices of a layer whose rows a file has in one tensor, by its name
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    pre_norms: bool = True  # an RMS norm before attention and FFN
    # an RMS norm over the outputs of attention and FFN, before they are added to the residual stream
    post_norms: bool = False
    multipliers: bool = False  # a file may scale embeddings, scores, what layers add to the residual stream, and logits
    scaled_embedding: bool = False  # embeddings are multiplied by sqrt(D)
    # whether a file says how many tokens a layer sees ("never", "may", "must")
    window: Literal["never", "may", "must"] = "never"
    only_window: int = 0  # the one window that files may have, if llama.cpp takes no other; 0: any
    full_every: int = 0  # with a window, every n-th layer sees all tokens; 0: no layer does
    from_first: bool = False  # "every n-th layer" are layers 0, n, 2 n, ... of this family
    # theta of the layers with a window if a file does not say it; None: that of all layers
    local_rope_base: float | None = None
    # every n-th layer has no RoPE, with `full_every` only in a file with a window; 0: all have it
    unrotated_every: int = 0
    rounds_yarn: bool = True  # YaRN's ramp begins and ends at whole pairs, as in llama.cpp
    # number of layers of the one size whose queries are divided by sqrt(D / H), not sqrt(d)
    width_scaled_layers: int = 0

    def is_nth(self, layer: int, n: int) -> bool:
        """Whether a layer, from 0, is one of "every n-th"; none is with n = 0."""
        return n > 0 and (layer + (not self.from_first)) % n == 0


class LayerKind(NamedTuple):
    """How a layer's attention differs from another's of the same model."""

    window: int = 0  # tokens that a row sees, itself among them; 0: all before it
    table: int = 0  # index in `ModelConfig.ropes` of the rotation of queries and keys


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("norm", window="may"),  # Mistral's files are of this one
    "qwen2": Architecture("neox", ("attn_q", "attn_k", "attn_v")),
    "qwen3": Architecture("neox", qk_norm="head"),
    "granite": Architecture("norm", multipliers=True),
    "olmo2": Architecture("neox", qk_norm="whole", pre_norms=False, post_norms=True),
    "phi3": Architecture(
        "neox",
        fused={"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")},
        window="may",
    ),
    "smollm3": Architecture("norm", unrotated_every=4),
    "gemma3": Architecture(
        "neox",
        activation="gelu_tanh",
        qk_norm="head",
        post_norms=True,
        scaled_embedding=True,
        window="must",
        full_every=6,
        local_rope_base=10000.0,
        width_scaled_layers=62,
    ),
    "bamboo": Architecture("norm", activation="drelu", sparse_activation="drelu"),
    "qwen3moe": Architecture("neox", qk_norm="head", routing=Routing()),
    "olmoe": Architecture("neox", qk_norm="whole", routing=Routing(normalised=False)),
    "smallthinker": Architecture(
        "neox",
        activation="relu",
        routing=Routing(None, early=True),
        window="may",
        only_window=4096,
        full_every=4,
        from_first=True,
        unrotated_every=4,
    ),
    "gpt-oss": Architecture(
        "neox",
        biases=(
            "attn_q", "attn_k", "attn_v", "attn_output",
            "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps",
        ),
        activation="clamped_swiglu",
        routing=Routing("chosen", normalised=False),
        sinks=True,
        ffn_norm="post_attention_norm",
        window="must",
        full_every=2,
        rounds_yarn=False,
    ),
}
"""`general.architecture` -> how it differs."""

DRAFT_HEADS = {"eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark"}
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
