"""FFNs of chosen neurons, and all layers of a forward pass in one call, by the C++ kernels behind `jax.ffi`."""

import jax.numpy as jnp
import numpy as np

from specsparse.kernels.native import cpu
from specsparse.kernels.native.cpu import given
from specsparse.kernels.neurons import SparseStats
from specsparse.kernels.reference import sparse

MOST_CHOSEN_ROWS = 64
"""Rows of a call whose neurons are chosen: bits of a mask in the kernels."""
_RULES = ("all", "scores", "signs")
_ACTS = {None: 0, "silu": 1, "relu": 2, "relu2": 3, "fatrelu": 4}
_NORMS = ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm")
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_MATRICES = (*_ATTENTION, "ffn_gate", "ffn_up", "ffn_down")


def _act(act) -> tuple[np.int64, np.float32]:
    """Number and threshold of an activation as `reference.sparse.sparse_ffn` takes it."""
    name, threshold = act if isinstance(act, tuple) else (act, 0.0)
    return np.int64(_ACTS[name]), np.float32(threshold)


def sparse_ffn(
    x_RD, keep_RF, gate, up, down_t, *,
    n_valid, norm=None, eps=0.0, act=None, up_act=None, residual=None, least=None,
):  # fmt: skip
    """`reference.sparse.sparse_ffn` by the C++ kernels."""
    sparse.check(x_RD, keep_RF, gate, up, down_t, act, up_act)
    counts, one = (x_RD.shape[:1], jnp.int32), ((), jnp.int32)
    (kind, threshold), (up_kind, up_threshold) = _act(act), _act(up_act)
    y_RD, *stats = cpu.call(
        "sparse_ffn",
        [(x_RD.shape, jnp.float32), counts, one, counts, one],
        x_RD,
        keep_RF,
        given(None if gate is None else gate.data, jnp.uint8),
        up.data,
        down_t.data,
        given(norm),
        given(residual),
        n_valid,
        jnp.zeros((), jnp.float32) if least is None else least,
        description=cpu.describe(*(w for w in (up, down_t, gate) if w is not None)),
        act=kind,
        threshold=threshold,
        up_act=up_kind,
        up_threshold=up_threshold,
        eps=np.float32(eps),
    )
    return y_RD, SparseStats(*stats)


def signbit_keep(x_RD, signs, *, threshold, n_valid):
    """`reference.sparse.signbit_keep` by the C++ kernels; the same neurons."""
    assert x_RD.shape[1] == signs.shape[1], (x_RD.shape, signs.shape)
    shape = (x_RD.shape[0], signs.shape[0])
    return cpu.call("signbit_keep", (shape, jnp.uint8), x_RD, signs.data, n_valid, jnp.asarray(threshold, jnp.float32))


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
    operands, matrices, results, aliases = [], [], [(x.shape, jnp.float32)], {}
    none = [None] * len(weights)
    for layer, k, v, more, ffn in zip(weights, cache_k, cache_v, skip or none, chosen or none, strict=True):
        names = _MATRICES if ffn is None else _ATTENTION
        own, biases = [getattr(layer, name) for name in names], [layer.biases.get(name) for name in names]
        if ffn is not None and ffn.choice.rule == "scores":
            own, biases = [*own, ffn.choice.first, ffn.choice.second], [*biases, None, None]
        matrices += own
        norms = [getattr(layer, name) for name in _NORMS]
        operands += [*map(given, norms), *(w.data for w in own), *map(given, biases), k, v]
        for back, cache in ((2, k), (1, v)):
            aliases[6 + len(operands) - back] = len(results)
            results.append((cache.shape, cache.dtype))
        if more is not None:
            operands += [more.up.data, more.down]
        if ffn is not None:  # in the order in which ffi.cc reads them
            c = ffn.choice
            packed = [None if w is None else w.data for w in (ffn.gate, ffn.up, ffn.down_t, c.signs)]
            operands += [given(a, jnp.uint8) for a in packed] + [given(a) for a in (c.threshold, c.least, c.norm)]
    if skip is not None:
        results += [((len(skip), x.shape[0]), jnp.int32), ((len(skip),), jnp.int32)]
    if chosen is not None:
        results += [((len(chosen), *s), jnp.int32) for s in ((x.shape[0],), ()) * 2]
    if features:
        results.append(((x.shape[0], len(features) * x.shape[1]), jnp.float32))
    if chosen:
        cpu.register("specsparse_predicted_layers")
        first, ((kind, least), (up_kind, up_least)) = chosen[0], (_act(act), _act(up_act))
        head = [_RULES.index(first.choice.rule), first.choice.relu, kind, up_kind, first.gate is not None]
        rows = [cpu.describe(f.up, f.down_t, f.gate or f.up) for f in chosen]
        target, thresholds = "predicted_layers", np.array([least, up_least], np.float32)
        own = {"neurons": np.concatenate([np.array(head, np.int64), *rows]), "thresholds": thresholds}
    else:
        target, own = "layers", {"act": np.int64(cpu.ACTS[act]), "skip": np.int64(skip is not None)}
    out, *rest = cpu.call(
        target,
        results,
        x,
        cos,
        sin,
        length,
        n_valid,
        given(parents, jnp.int32),
        *operands,
        aliases=aliases,
        description=np.append(cpu.describe(*matrices), np.array(features, np.int64)),  # the layers kept follow
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
