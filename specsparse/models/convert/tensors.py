"""Tensors of transformers under their GGUF names, norms and rows of queries and keys as GGUF has them."""

from collections.abc import Callable, Iterator

import numpy as np

from specsparse.engine.architectures import ARCHITECTURES, Architecture
from specsparse.engine.rope import interleaved
from specsparse.errors import UserError
from specsparse.models.convert.checkpoint import Checkpoint
from specsparse.models.convert.hf_config import HfConfig
from specsparse.models.convert.hf_rope import said

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of a layer's tensors, by those of a GGUF file."""
QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IGNORED = ("rotary_emb.inv_freq", "masked_bias")

Source = tuple[str, tuple[int, ...], Callable[[], np.ndarray]]
"""Name in the GGUF file, shape, and what loads the values as float32."""


def gguf_name(name: str, family: Architecture = ARCHITECTURES["llama"]) -> str | None:
    """The GGUF name of a tensor of transformers; None for one that nothing reads, or an unknown one."""
    names = LAYER | (QK_NORMS if family.qk_norm else {}) | (_POST_NORMS if family.post_norms else {})
    stem, _, kind = name.rpartition(".")
    if stem in _MODEL:
        return f"{_MODEL[stem]}.{kind}"
    prefix, _, rest = stem.removeprefix("model.layers.").partition(".")
    known = stem.startswith("model.layers.") and prefix.isdecimal() and rest in names
    return f"blk.{int(prefix)}.{names[rest]}.{kind}" if known and kind in ("weight", "bias") else None


def sources(checkpoint: Checkpoint, config: HfConfig) -> Iterator[Source]:
    """Every tensor of the new file, in the order of the layers.

    Raises:
        UserError: a tensor that its architecture does not have (it would be lost), or heads that do not divide the
            rows.
    """
    named, family = {}, config.form.family
    for name in checkpoint.shapes:
        target = gguf_name(name, family)
        if target is not None:
            named[target] = name
        elif not name.endswith(_IGNORED):
            raise UserError(
                f"{checkpoint.folder}: tensor {name} is none of a {config.architecture}; this model cannot be converted"
            )
    if config.tied and not own_output(checkpoint):
        named.pop("output.weight", None)
    for target in sorted(named, key=_place):
        yield target, checkpoint.shapes[named[target]], _loader(checkpoint, config, named[target], target)
    factors = said(config.rope).factors
    if factors is not None:
        yield "rope_freqs.weight", factors.shape, lambda: factors


def own_output(checkpoint: Checkpoint) -> bool:
    """Whether an output matrix is stored that is not the embedding, whatever the config says of tied weights."""
    output, embedding = "lm_head.weight", "model.embed_tokens.weight"
    shapes = [checkpoint.shapes.get(name) for name in (output, embedding)]
    return shapes[0] is not None and (
        shapes[0] != shapes[1] or not np.array_equal(checkpoint.load(output), checkpoint.load(embedding))
    )


def _place(name: str) -> tuple[int, int, str]:
    """Embedding, layers, output."""
    layer = name.split(".")[1]
    if name.startswith("blk."):
        return 1, int(layer), name
    return (0 if name.startswith("token_embd") else 2), 0, name


def _loader(checkpoint: Checkpoint, config: HfConfig, name: str, target: str) -> Callable[[], np.ndarray]:
    if config.form.norms_from_one and target.endswith("norm.weight"):
        return lambda: checkpoint.load(name) + np.float32(1)
    heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}.get(target.split(".")[-2])
    if heads is None or config.form.family.pairing != "norm":
        return lambda: checkpoint.load(name)
    if heads < 1 or checkpoint.shapes[name][0] % (2 * heads):
        raise UserError(f"{checkpoint.folder}: tensor {name} has {checkpoint.shapes[name][0]} rows for {heads} heads")
    return lambda: interleaved(checkpoint.load(name), heads)
