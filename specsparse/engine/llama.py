"""The forward pass: embedding, attention and FFN of each layer, output. The kernels are injected.

`ModelConfig.family` says how a layer differs from the plain Llama's (`engine.architectures`).
"""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.architectures import LayerKind
from specsparse.engine.cache import KVCache
from specsparse.engine.config import ModelConfig, parse_activation
from specsparse.engine.experts import experts_ffn
from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer, Params
from specsparse.kernels import ChosenFfn, Kernels, QTensor, SkipWeights, SparseStats
from specsparse.kernels.native.layers import MOST_CHOSEN_ROWS
from specsparse.kernels.reference.dense import activate

WhichLogits = Literal["all", "last", "none"]


@dataclass(frozen=True)
class Want:
    """The results that a forward pass is asked for. Static under jit."""

    logits: WhichLogits = "all"  # of "all" rows, of the "last" valid row of each sequence, or "none"
    # also hidden rows: True for those before the output norm, or ids of layers for the rows (the residual stream, not
    # normalised) that enter these layers, side by side; the number of layers is the id of the rows before the output
    # norm
    hidden: bool | tuple[int, ...] = False
    layers: tuple[int, ...] | None = None  # the layers to run, or None for all; a layer-skip draft names a part
    mass: bool = False  # whether attention's weights are summed for `ForwardOut.mass`
    zeros: bool = True  # whether logits of rows that do not count are 0; they need not be written if nobody reads them


class ForwardOut(NamedTuple):
    # f32[B, n, V], f32[B, 1, V] for "last", None for "none". Rows that do not count are 0, unless `Want.zeros` is false
    logits: Any  # not `jax.Array | None`: callers know by their own `Want` which one it is
    # f32[B, n, D], f32[B, n, len(ids) * D] for ids of layers, or None. Rows that do not count are 0. Granite's are
    # divided by the factor of what its layers add (`residual_scale` of its files)
    hidden: Any = None
    stats: Pytree = None  # of a sparse FFN, or the `ChosenExperts` of rows, arrays stacked over the layers; or None
    # f32[L, B, G, C/16], attention's weights of each sequence's first row, summed over the heads of a key/value head
    # and over blocks of sixteen slots, of each layer that ran; or None
    mass: Any = None


class ChosenNeurons(abc.ABC):
    """An injected FFN whose neurons a predictor chooses, and which native kernels can compute in their one call."""

    acts: tuple  # of gate and up (of up and None without a gate), as `sparse_ffn` takes them

    @abc.abstractmethod
    def __call__(self, layer: Layer, x_RD, n_valid_B) -> tuple[jax.Array, SparseStats]:
        """Returns (x_RD, `SparseStats`), as `make_forward` wants it."""

    @abc.abstractmethod
    def of_layer(self, layer: Layer) -> ChosenFfn:
        """The choice as the kernels' one call takes it."""

    @abc.abstractmethod
    def seen(self, stats: SparseStats) -> SparseStats:
        """The statistics that `__call__` returns, from those that `sparse_ffn` counted."""


_PLAIN_KIND = LayerKind()

ForwardFn = Callable[..., tuple[ForwardOut, KVCache]]
"""forward(params, tokens_Bn, cache, *, n_valid_B, parents_Bn=None, want=Want()) -> (ForwardOut, KVCache)."""


def block_end(config: ModelConfig, kernels: Kernels) -> Callable:
    """end(layer, name, h_RI, x_RD, n_valid_B, post) -> x + matrix `name` times h, f32[R, D].

    If `post` is not None, it normalises the product before it is added.
    """

    def end(layer: Layer, name: str, h_RI, x_RD, n_valid_B, post):
        matrix, biases = (getattr(layer, name),), layer.bias(name)
        residual = x_RD if post is None else None
        (y_RD,) = kernels.linear(h_RI, matrix, biases=biases, residual=residual, n_valid=n_valid_B)
        if post is None:
            return y_RD
        return kernels.add_normed(x_RD, y_RD, post, n_valid=n_valid_B, eps=config.norm_eps)

    return end


def dense_ffn(config: ModelConfig, kernels: Kernels) -> Callable:
    """The FFN of a dense model: x + down(act(gate(norm x)) * up(norm x)), f32[R, D] to f32[R, D]; no statistics."""
    act, up_act = parse_activation(config.activation)
    fused = config.gated and up_act is None and isinstance(act, str)
    end = block_end(config, kernels)

    def ffn(layer: Layer, x_RD, n_valid_B):
        names = ("ffn_gate", "ffn_up") if config.gated else ("ffn_up",)
        matrices, act_here = tuple(getattr(layer, name) for name in names), config.activation if fused else None
        h_RF, *ups = kernels.linear(  # with an activation: act(gate z) * up z
            x_RD,
            matrices,
            norm=layer.ffn_norm,
            eps=config.norm_eps,
            biases=layer.bias(*names),
            n_valid=n_valid_B,
            act=act_here,
        )
        if not fused:
            h_RF = activate(h_RF, act)
            h_RF = h_RF * activate(ups[0], up_act) if config.gated else h_RF
        return end(layer, "ffn_down", h_RF, x_RD, n_valid_B, layer.post_ffw_norm), None

    return ffn


def make_attention(config: ModelConfig, kernels: Kernels) -> Callable:
    """attention(layer, params, x_RD, k, v, length, n_valid_B, parents_Bn, kind) -> (x_RD, k, v), its residual added.

    `kind` is the layer's `ModelConfig.kind`; `shift` and `mass` are those of `kernels.attend`, whose fourth result then
    comes too.
    """
    end = block_end(config, kernels)

    def attention(
        layer: Layer, params: Params, x_RD, k, v, length, n_valid_B, parents_Bn, kind: LayerKind = _PLAIN_KIND,
        shift=None, mass=False,
    ):  # fmt: skip
        q_RHd, k_RGd, v_RGd = kernels.linear(
            x_RD,
            (layer.attn_q, layer.attn_k, layer.attn_v),
            norm=layer.attn_norm,
            eps=config.norm_eps,
            biases=layer.bias("attn_q", "attn_k", "attn_v"),
            n_valid=n_valid_B,
        )
        norms = {"q_norm": layer.attn_q_norm, "k_norm": layer.attn_k_norm}
        if config.family.qk_norm == "whole":
            q_RHd = kernels.normalise(q_RHd, norms.pop("q_norm"), eps=config.norm_eps)
            k_RGd = kernels.normalise(k_RGd, norms.pop("k_norm"), eps=config.norm_eps)
        out_RHd, *more = kernels.attend(
            q_RHd, k_RGd, v_RGd, k, v, cos=params.cos, sin=params.sin, length=length, n_valid=n_valid_B,
            parents=parents_Bn, shift=shift, pairing=config.rope.pairing, eps=config.norm_eps, window=kind.window,
            table=kind.table, sinks=layer.attn_sinks, mass=mass, **norms,
        )  # fmt: skip
        return end(layer, "attn_output", out_RHd, x_RD, n_valid_B, layer.post_attention_norm), *more

    return attention


def make_embed(config: ModelConfig, kernels: Kernels) -> Callable:
    """embed(embedding, tokens_R) -> f32[R, D], the rows that enter the first layer."""

    def embed(embedding: QTensor, tokens_R):
        x_RD = kernels.embed(embedding, tokens_R)
        return x_RD if config.embedding_scale == 1.0 else x_RD * jnp.float32(config.embedding_scale)

    return embed


def make_output(config: ModelConfig, kernels: Kernels) -> Callable:
    """output(params, x_BnD, n_valid_B, want) -> logits as `want` says, or None."""

    def output(params: Params, x_BnD, n_valid_B, want: Want):
        if want.logits == "none":
            return None
        if want.logits == "last":
            last = jnp.maximum(n_valid_B - 1, 0)
            x_BnD = jnp.take_along_axis(x_BnD, last[:, None, None], axis=1)
            n_valid_B = jnp.minimum(n_valid_B, 1)
        batch, n, width = x_BnD.shape
        (logits_RV,) = kernels.linear(
            x_BnD.reshape(batch * n, width),
            (params.output,),
            norm=params.output_norm,
            eps=config.norm_eps,
            n_valid=n_valid_B,
            zeros=want.zeros,
        )
        return logits_RV.reshape(batch, n, -1)

    return output


def make_layers(config: ModelConfig, kernels: Kernels, ffn: Callable | None = None) -> Callable:
    """run(params, x_RD, cache, n_valid_B, parents_Bn, which, features, mass), which gives x_RD, cache, stats,
    features_RE and mass_LBHc.

    It runs the layers `which`, in order. `features` are places in `which`: the rows that enter these layers come side
    by side, E = len(features) D; place `len(which)` names the rows that come out. Rows that do not count are 0, and
    `features_RE` is None without places. `mass_LBHc` is that of `kernels.attend` if it is asked for, else None. Of
    `params` it reads `layers`, `cos` and `sin`. `ffn` as for `make_forward`.
    """
    plain = config.gated and config.activation in ("silu", "gelu_tanh", "relu", "relu2")
    chooser = ffn if isinstance(ffn, ChosenNeurons) else None
    plain &= not config.n_experts and config.family.qk_norm != "whole"
    layers_call = kernels.layers if (chooser or (ffn is None and plain)) and config.head_dim % 16 == 0 else None
    if config.n_experts:
        of_layer = ffn or experts_ffn(config, kernels)
    else:
        given = ffn or dense_ffn(config, kernels)
        of_layer = lambda layer, x_RD, n_valid_B, _: given(layer, x_RD, n_valid_B)  # noqa: E731
    attention = make_attention(config, kernels)

    def one_by_one(params: Params, x_RD, cache: KVCache, n_valid_B, parents_Bn, which, features=(), mass=False):
        keys, values, stats, kept, masses = list(cache.k), list(cache.v), [], {}, []
        for place, i in enumerate(which):
            layer, kept[place] = params.layers[i], x_RD
            with jax.named_scope(f"layer{i}/attention"):
                x_RD, keys[i], values[i], *own = attention(
                    layer, params, x_RD, keys[i], values[i], cache.length, n_valid_B, parents_Bn, config.kind(i),
                    shift=cache.shift, mass=mass,
                )  # fmt: skip
                masses += own
            with jax.named_scope(f"layer{i}/ffn"):
                x_RD, stat = of_layer(layer, x_RD, n_valid_B, kept[place])
                stats.append(stat)
        stacked = jax.tree.map(lambda *each: jnp.stack(each), *stats) if stats else None
        kept[len(which)] = x_RD
        cache = cache._replace(k=tuple(keys), v=tuple(values))
        features_RE = side_by_side([kept[place] for place in features], n_valid_B) if features else None
        return x_RD, cache, stacked, features_RE, jnp.stack(masses) if masses else None

    if layers_call is None:
        return one_by_one

    def together(params: Params, x_RD, cache: KVCache, n_valid_B, parents_Bn, which, features=(), mass=False):
        if not len(which) or (chooser and x_RD.shape[0] > MOST_CHOSEN_ROWS):
            return one_by_one(params, x_RD, cache, n_valid_B, parents_Bn, which, features, mass)
        keys, values = list(cache.k), list(cache.v)
        layers = [params.layers[i] for i in which]
        skip = [layer.sparse for layer in layers]
        skips = not chooser and all(isinstance(w, SkipWeights) for w in skip)
        how: dict[str, Any] = {"act": config.activation, "skip": skip if skips else None}
        if chooser:
            acts = dict(zip(("act", "up_act"), chooser.acts, strict=True))
            how = {**acts, "chosen": [chooser.of_layer(layer) for layer in layers]}
        with jax.named_scope("layers"):
            x_RD, new_k, new_v, *more = layers_call(
                x_RD, layers, [keys[i] for i in which], [values[i] for i in which],
                cos=params.cos, sin=params.sin, length=cache.length, n_valid=n_valid_B, parents=parents_Bn,
                shift=cache.shift, pairing=config.rope.pairing, eps=config.norm_eps, features=features, mass=mass,
                kinds=[config.kind(i) for i in which], **how,
            )  # fmt: skip
        for i, k, v in zip(which, new_k, new_v, strict=True):
            keys[i], values[i] = k, v
        stats = None
        if chooser:
            stats = chooser.seen(SparseStats(*more.pop(0)))
        elif skips:
            nonzero, active = more.pop(0)
            stats = SparseStats(kept=nonzero, union=active, nonzero=nonzero, active=active)
        mass_LBHc = more.pop(0) if mass else None
        return x_RD, cache._replace(k=tuple(keys), v=tuple(values)), stats, more[0] if more else None, mass_LBHc

    return together


def side_by_side(rows: Sequence[jax.Array], n_valid_B: jax.Array) -> jax.Array:
    """f32[R, len(rows) * D] of one or more f32[R, D], 0 for rows that do not count."""
    n = rows[0].shape[0] // n_valid_B.shape[0]
    counts_R = (jnp.arange(n, dtype=jnp.int32)[None] < n_valid_B[:, None]).reshape(-1)
    return jnp.where(counts_R[:, None], jnp.concatenate(rows, axis=1), jnp.float32(0))


def places(wanted: bool | tuple[int, ...], which: Sequence[int], n_layers: int) -> tuple[int, ...]:
    """The places of the rows of `Want.hidden` in the layers `which` that run, of `n_layers`."""
    if isinstance(wanted, bool):
        return ()
    at = {layer: place for place, layer in reversed(list(enumerate(which)))} | {n_layers: len(which)}
    return tuple(at[layer] for layer in wanted)


def make_forward(config: ModelConfig, kernels: Kernels, ffn: Callable | None = None) -> ForwardFn:
    """The forward function of a model (contract C1: a row's bits depend on its own path only).

    `ffn(layer, x_RD, n_valid_B) -> (x_RD, stats)` replaces the dense one, or `experts_ffn`, which takes
    the rows that entered the layer too; `stats` is a pytree of arrays or None, and `ForwardOut.stats` stacks it
    over the layers that ran. A dense model on kernels that have `layers` runs all of them in one call; if
    `layer.sparse` is `kernels.SkipWeights`, that call skips the zeros of a ReLU model: the same bits, and
    `SparseStats`. A `ChosenNeurons` runs in that call too, with the bits of its own.
    """
    embed, run, output = make_embed(config, kernels), make_layers(config, kernels, ffn), make_output(config, kernels)

    def forward(params: Params, tokens_Bn, cache: KVCache, *, n_valid_B=None, parents_Bn=None, want: Want = Want()):
        batch, n = tokens_Bn.shape
        if n_valid_B is None:
            n_valid_B = jnp.full((batch,), n, jnp.int32)
        with jax.named_scope("embed"):
            x_RD = embed(params.embedding, tokens_Bn.reshape(-1))
        which = range(config.n_layers) if want.layers is None else want.layers
        features = places(want.hidden, which, config.n_layers)
        x_RD, cache, stats, features_RE, mass = run(
            params, x_RD, cache, n_valid_B, parents_Bn, which, features, want.mass
        )
        if mass is not None:
            mass = jnp.sum(mass.reshape(*mass.shape[:2], config.n_kv_heads, -1, mass.shape[3]), axis=3)
        x_BnD = x_RD.reshape(batch, n, -1)
        with jax.named_scope("output"):
            logits = output(params, x_BnD, n_valid_B, want)
        hidden = x_BnD if want.hidden is True else None if not features else features_RE.reshape(batch, n, -1)
        return ForwardOut(logits, hidden, stats, mass), cache

    return forward
