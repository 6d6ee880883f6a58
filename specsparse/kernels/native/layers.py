"""All layers of a forward pass in one native call."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.kernels.native import cpu, sparse
from specsparse.kernels.neurons import ChosenFfn

MOST_CHOSEN_ROWS = 64
"""Rows of a call whose neurons are chosen: bits of a mask in the kernels."""
_RULES = ("all", "scores", "signs")
_CHOSEN_TARGET = "specsparse_predicted_layers"

_NORMS = ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm")
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_MATRICES = (*_ATTENTION, "ffn_gate", "ffn_up", "ffn_down")


def layers(
    x, weights, cache_k, cache_v, *,
    cos, sin, length, n_valid, parents=None, pairing="norm", eps=0.0, act="silu", skip=None, features=(),
    kinds=None, chosen=None, up_act=None,
):  # fmt: skip
    """All of `weights` applied to rows f32[R, D] in one call: what `linear` and `attend` compute, bit for bit.

    Args:
        x: rows of all sequences, as `linear` takes them.
        weights: the layers in order, objects with the fields of `engine.weights.Layer`; head size a multiple of 16.
        cache_k, cache_v: of each of these layers; updated in place where the caller donates them.
        cos, sin, length, n_valid, parents, pairing: as `attend` takes them.
        eps: of all norms.
        act: of the gate.
        skip: of each of the layers a `stripes.SkipWeights`: the same bits, and where one row counts, neurons that the
            gate closes are not read. `act` is "relu" or "relu2".
        features: places in `weights` of layers whose incoming rows are kept; `len(weights)` for the rows that come out.
        kinds: (window, table) of each of the layers, as `attend` takes them; None: (0, 0).
        chosen: of each of the layers a `ChosenFfn`, in place of its dense matrices: what `sparse_ffn` gives for those
            neurons, bit for bit, with `act` and `up_act` as it takes them; at most `MOST_CHOSEN_ROWS` rows.

    Returns:
        Rows f32[R, D], the caches' keys, their values; with `chosen` also the four arrays of `SparseStats`, stacked
        over the layers; with `skip` (int32[L, R], int32[L]): neurons of each row that are not zero, neurons that are so
        in any row; with `features` also f32[R, len(features) * D], those rows side by side, 0 where a row does not
        count.
    """
    empty = jnp.zeros((0,), jnp.float32)
    operands, matrices, shapes, aliases = [], [], [jax.ShapeDtypeStruct(x.shape, jnp.float32)], {}
    none = [None] * len(weights)
    for layer, k, v, more, ffn in zip(weights, cache_k, cache_v, skip or none, chosen or none, strict=True):
        names = _MATRICES if ffn is None else _ATTENTION
        own, biases = [getattr(layer, name) for name in names], [layer.biases.get(name, empty) for name in names]
        if ffn is not None and ffn.choice.rule == "scores":
            own, biases = [*own, ffn.choice.first, ffn.choice.second], [*biases, empty, empty]
        matrices += own
        norms = [getattr(layer, name) for name in _NORMS]
        operands += [*(empty if norm is None else norm for norm in norms), *(w.data for w in own), *biases, k, v]
        for back, cache in ((2, k), (1, v)):
            aliases[6 + len(operands) - back] = len(shapes)
            shapes.append(jax.ShapeDtypeStruct(cache.shape, cache.dtype))
        if more is not None:
            operands += [more.up.data, more.down]
        if ffn is not None:
            operands += _operands_of(ffn)
    if skip is not None:
        shapes += [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((len(skip), x.shape[0]), (len(skip),))]
    if chosen is not None:
        shapes += [jax.ShapeDtypeStruct((len(chosen), *s), jnp.int32) for s in ((x.shape[0],), ()) * 2]
    if features:
        shapes.append(jax.ShapeDtypeStruct((x.shape[0], len(features) * x.shape[1]), jnp.float32))
    if chosen:
        cpu.register(_CHOSEN_TARGET)
        target, own = _CHOSEN_TARGET, _described(chosen, act, up_act)
    else:
        target, own = "specsparse_layers", {"act": np.int64(cpu.ACTS[act]), "skip": np.int64(skip is not None)}
    out, *rest = cpu._call(target, shapes, input_output_aliases=aliases)(
        x,
        cos,
        sin,
        length,
        n_valid,
        jnp.zeros((0,), jnp.int32) if parents is None else parents,
        *operands,
        description=np.append(cpu.describe(tuple(matrices)), np.array(features, np.int64)),  # the layers kept follow
        kinds=np.array(kinds or [(0, 0)] * len(weights), np.int64).reshape(-1),
        eps=np.float32(eps),
        neox=np.int64(pairing == "neox"),
        **own,
    )
    n = 2 * len(cache_k)
    found = (out, rest[:n:2], rest[1:n:2])
    if skip is not None:
        found = (*found, tuple(rest[n : n + 2]))
    if chosen is not None:
        found = (*found, tuple(rest[n : n + 4]))
    return (*found, rest[-1]) if features else found


def _operands_of(ffn: ChosenFfn) -> list:
    """The arrays of a layer's chosen FFN, in the order in which ffi.cc reads them; empty ones for what is not there."""
    c, floats = ffn.choice, jnp.zeros((0,), jnp.float32)
    signs = jnp.zeros((0,), jnp.uint8) if c.signs is None else c.signs.data
    gate = jnp.zeros((0,), jnp.uint8) if ffn.gate is None else ffn.gate.data
    others = (floats if a is None else a for a in (c.threshold, c.least, c.norm))
    return [gate, ffn.up.data, ffn.down_t.data, signs, *others]


def _described(chosen: Sequence[ChosenFfn], act, up_act) -> dict[str, np.ndarray]:
    """Attributes of a call: what all layers share, each one's up, down and gate (23 integers a matrix), thresholds."""
    (kind, least), (up_kind, up_least) = sparse.act_of(act), sparse.act_of(up_act)
    first = chosen[0]
    head = [_RULES.index(first.choice.rule), first.choice.relu, kind, up_kind, first.gate is not None]
    parts = [sparse.describe(f.up, f.down_t, f.up if f.gate is None else f.gate) for f in chosen]
    neurons = np.concatenate([np.array(head, np.int64), *parts])
    return {"neurons": neurons, "thresholds": np.array([least, up_least], np.float32)}
