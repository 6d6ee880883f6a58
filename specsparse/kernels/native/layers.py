"""The functions of `reference.sparse`, and all layers of a forward pass in one call, by the C++ kernels."""

import jax.numpy as jnp
import numpy as np

from specsparse.kernels.native import cpu
from specsparse.kernels.native.cpu import given
from specsparse.kernels.native.descriptor import FFN, LAYER, NORMS, PROJECTIONS
from specsparse.kernels.neurons import SparseStats
from specsparse.kernels.reference import sparse
from specsparse.kernels.reference.dense import LANES
from specsparse.kernels.reference.q8_cache import head_size

MOST_CHOSEN_ROWS = 64
"""Rows of a call whose neurons are chosen: bits of a mask in the kernels."""
_RULES = ("all", "scores", "signs")
_ACTS = {None: 0, "silu": 1, "relu": 2, "relu2": 3, "fatrelu": 4}


def _act(act) -> tuple[np.int64, np.float32]:
    """Number and threshold of an activation as `reference.sparse.sparse_ffn` takes it."""
    name, threshold = act if isinstance(act, tuple) else (act, 0.0)
    return np.int64(_ACTS[name]), np.float32(threshold)


def sparse_ffn(
    x_RD, keep_RF, gate, up, down_t, *,
    n_valid, norm=None, eps=0.0, act=None, up_act=None, residual=None, least=None,
):  # fmt: skip
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
        matrices=cpu.describe(*(w for w in (up, down_t, gate) if w is not None)),
        act=kind,
        threshold=threshold,
        up_act=up_kind,
        up_threshold=up_threshold,
        eps=np.float32(eps),
    )
    return y_RD, SparseStats(*stats)


def signbit_keep(x_RD, signs, *, threshold, n_valid):
    assert x_RD.shape[1] == signs.shape[1], (x_RD.shape, signs.shape)
    shape = (x_RD.shape[0], signs.shape[0])
    return cpu.call("signbit_keep", (shape, jnp.uint8), x_RD, signs.data, n_valid, jnp.asarray(threshold, jnp.float32))


def layers(
    x, weights, cache_k, cache_v, *,
    cos, sin, length, n_valid, parents=None, shift=None, pairing="norm", eps=0.0, act="silu", skip=None, features=(),
    kinds=None, chosen=None, up_act=None, mass=False,
):  # fmt: skip
    """All of `weights` applied to rows f32[R, D] in one call, with the bits of `linear` and `attend`.

    Args:
        x: rows of all sequences, as `linear` takes them.
        weights: the layers in order, objects with the fields of `engine.weights.Layer`; head size a multiple of 16.
        cache_k, cache_v: of each of these layers; updated in place if the caller donates them.
        cos, sin, length, n_valid, parents, shift, pairing, mass: as `attend` takes them.
        eps: of all norms.
        act: of the gate.
        skip: `SkipWeights` of each of the layers: the same bits, and if a single row counts, neurons that the gate
            closes are not read. `act` is "relu" or "relu2".
        features: places in `weights` of layers whose incoming rows are kept; `len(weights)` for the rows that come out.
        kinds: (window, table) of each of the layers, as `attend` takes them; None: (0, 0).
        chosen: `ChosenFfn` of each of the layers, in place of its dense matrices: the bits of `sparse_ffn` for those
            neurons, with `act` and `up_act` as it takes them; at most `MOST_CHOSEN_ROWS` rows. With `blocks` the
            dense matrices are read too, if rows keep many neurons; `act` is then "silu", "relu" or "relu2", and of the
            choice `least` is None.

    Returns:
        Rows f32[R, D], the caches' keys, their values; with `chosen` also the four arrays of `SparseStats`, stacked
        over the layers; with `skip` (int32[L, R], int32[L]): neurons of each row that are not zero, neurons that are so
        in any row; with `mass` also f32[L, B, H, C/16]; with `features` also f32[R, len(features) * D], those rows side
        by side, 0 where a row does not count.
    """
    operands, matrices, places = cpu.Operands(), [], []

    def matrix(w, bias=None) -> int:
        """Adds a matrix and returns its place; -1 for None."""
        if w is None:
            return -1
        matrices.append(w)
        places.append((operands.place(w.data), operands.place(bias)))
        return len(matrices) - 1

    masked = bool(chosen) and chosen[0].blocks is not None
    described = np.full(len(weights), -1, LAYER)
    for i, (d, layer) in enumerate(zip(described, weights, strict=True)):
        for name in NORMS:
            d[name] = operands.place(getattr(layer, name))
        for name in PROJECTIONS if chosen and not masked else (*PROJECTIONS, *FFN):
            d[name] = matrix(getattr(layer, name), layer.biases.get(name))
        d["keys"], d["values"] = operands.place(cache_k[i]), operands.place(cache_v[i])
        d["window"], d["table"] = kinds[i] if kinds else (0, 0)
        if skip is not None:
            d["up_rows"], d["down_blocks"] = operands.place(skip[i].up.data), operands.place(skip[i].down)
        if chosen:
            ffn, choice = chosen[i], chosen[i].choice
            if masked:
                d["gate_rows"], d["up_rows"] = operands.place(ffn.gate.data), operands.place(ffn.up.data)
                d["down_blocks"] = operands.place(ffn.blocks)
            else:
                d["ffn_gate"], d["ffn_up"], d["ffn_down"] = matrix(ffn.gate), matrix(ffn.up), matrix(ffn.down_t)
            if choice.rule == "scores":
                d["first"], d["second"] = matrix(choice.first), matrix(choice.second)
            d["signs"] = operands.place(None if choice.signs is None else choice.signs.data)
            d["threshold"], d["least"] = operands.place(choice.threshold), operands.place(choice.least)
            d["predictor_norm"] = operands.place(choice.norm)
    rows, width, aliases = *x.shape, {}
    results = [(x.shape, jnp.float32)]
    for d in described:
        for field in ("keys", "values"):
            cache = operands[d[field]]
            aliases[7 + int(d[field])] = len(results)
            results.append((cache.shape, cache.dtype))
    if skip is not None:
        results += [((len(skip), rows), jnp.int32), ((len(skip),), jnp.int32)]
    if chosen:
        results += [((len(chosen), rows), jnp.int32), ((len(chosen),), jnp.int32)] * 2
    if mass:
        batch, _, capacity, _ = cache_v[0].shape
        heads = weights[0].attn_q.shape[0] // head_size(cache_v[0])
        results.append(((len(weights), batch, heads, capacity // LANES), jnp.float32))
    if features:
        results.append(((rows, len(features) * width), jnp.float32))
    kind, threshold = _act(act) if chosen else (np.int64(cpu.ACTS[act]), np.float32(0))
    up_kind, up_threshold = _act(up_act)
    out, *rest = cpu.call(
        "layers",
        results,
        x,
        cos,
        sin,
        length,
        n_valid,
        given(parents, jnp.int32),
        given(shift, jnp.int32),
        *operands,
        aliases=aliases,
        matrices=cpu.describe(*matrices, places=places),
        layers=described.view(np.int64),
        features=np.array(features, np.int64),
        ffns=np.int64(3 if masked else 2 if chosen else skip is not None),
        act=kind,
        threshold=threshold,
        up_act=up_kind,
        up_threshold=up_threshold,
        choice=np.int64(_RULES.index(chosen[0].choice.rule) if chosen else 0),
        relu=np.int64(chosen[0].choice.relu if chosen else 0),
        masses=np.int64(mass),
        eps=np.float32(eps),
        neox=np.int64(pairing == "neox"),
    )
    n = 2 * len(cache_k)
    found = (out, rest[:n:2], rest[1:n:2])
    if skip is not None:
        found = (*found, tuple(rest[n : n + 2]))
    if chosen:
        found = (*found, tuple(rest[n : n + 4]))
    if mass:
        found = (*found, rest[-2 if features else -1])
    return (*found, rest[-1]) if features else found
