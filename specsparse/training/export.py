"""A trained head as the tensors of its file, and a file's as what is trained."""

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.kernels import QTensor
from specsparse.kernels.packing.dequant import dequantize
from specsparse.speculative.drafters.heads import head_file
from specsparse.speculative.drafters.heads.head_source import HeadParams
from specsparse.training.head import HeadWeights
from specsparse.training.layer import LayerWeights


def tensors(weights: HeadWeights) -> dict[str, np.ndarray]:
    """float32 tensors by their names in the file."""
    host = jax.tree.map(lambda x: np.asarray(x, np.float32), weights)
    layer = {f"blk.0.{name}.weight": getattr(host.layer, name) for name in head_file.LAYER_MATRICES}
    norms = {f"blk.0.{name}.weight": getattr(host.layer, name) for name in ("attn_norm", "ffn_norm")}
    own = {f"{name}.weight": getattr(host, name) for name in (*head_file.NORMS, "fc_hidden", "fc_token")}
    if host.fc_below is not None:
        own |= {"own_norm.weight": host.own_norm, "fc_own.weight": host.fc_own}
        parts = np.split(host.fc_below, len(host.below_norm), axis=1)
        for i, (norm, matrix) in enumerate(zip(host.below_norm, parts, strict=True)):
            own |= {f"below_norm.{i}.weight": norm, f"fc_below.{i}.weight": matrix}
    return {**own, **layer, **norms}


def weights(params: HeadParams) -> HeadWeights:
    """What a file holds, as float32 arrays."""

    def matrix(w: QTensor) -> jax.Array:
        return jnp.array(dequantize(w), jnp.float32)

    def vector(x: jax.Array) -> jax.Array:
        return jnp.array(x, jnp.float32, copy=True)  # a step donates them

    layer = {name: matrix(getattr(params.layer, name)) for name in head_file.LAYER_MATRICES}
    norms = {name: vector(getattr(params.layer, name)) for name in ("attn_norm", "ffn_norm")}
    alone = HeadWeights(
        hidden_norm=vector(params.hidden_norm),
        fc_hidden=matrix(params.fc_hidden),
        token_norm=vector(params.token_norm),
        fc_token=matrix(params.fc_token),
        layer=LayerWeights(**layer, **norms),
        output_norm=vector(params.output_norm),
    )
    if params.own is None:
        return alone
    return alone._replace(
        below_norm=jnp.stack([vector(x.norm) for x in params.below]),
        fc_below=jnp.concatenate([matrix(x.matrix) for x in params.below], axis=1),
        own_norm=vector(params.own.norm),
        fc_own=matrix(params.own.matrix),
    )
