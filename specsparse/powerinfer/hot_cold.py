"""A sparse FFN whose hot and cold neurons lie apart, on one device or on two.

    y = x + (cold partial + hot partial), in that order wherever the two are computed

so that one device and two give equal bits for one placement. Inside a part neurons are added up in ascending order.

On two devices attention, predictors and hot neurons run on one, cold neurons on the other, overlapped. The host steps
through the layers. For each it starts three programs: on the first device the attention and the predictor, then the hot
neurons there while a thread runs the cold ones on the second. The second device is the host's CPU if the first is an
accelerator, and a second CPU device (`jax_num_cpu_devices=2`) if it is not.

Three ways were measured (docs/decisions/0008-two-devices-by-threads.md): programs with transfers between them, as here;
a host callback inside one program; and `compute_on("device_host")`, which on a CPU runs one part after the other.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse import kernels as kernel_api
from specsparse.engine.architectures import LayerKind
from specsparse.engine.cache import KVCache
from specsparse.engine.config import ModelConfig, parse_activation
from specsparse.engine.devices import Devices
from specsparse.engine.gguf.reader import TensorInfo
from specsparse.engine.llama import (
    ForwardFn,
    ForwardOut,
    Want,
    make_attention,
    make_embed,
    make_output,
    places,
    side_by_side,
)
from specsparse.engine.pytree import ABSENT, Pytree
from specsparse.engine.weights import Layer, PackFFN, Params
from specsparse.errors import UserError
from specsparse.kernels import Kernels, NeuronRows, QTensor, SparseStats, pack_neurons
from specsparse.kernels.native import cpu
from specsparse.kernels.packing.dequant import pack_float
from specsparse.kernels.packing.pack import pack_qtensor
from specsparse.kernels.reference.dense import activate
from specsparse.powerinfer.modes import GivenDevices

_ALL = Want()


class Part(NamedTuple):
    """Rows of some neurons, [neurons, D] each; `gate` is None if the FFN has none."""

    gate: NeuronRows | None
    up: NeuronRows
    down_t: NeuronRows

    @property
    def nbytes(self) -> int:
        return sum(m.nbytes for m in self if m is not None)


class Predictors(NamedTuple):
    """PowerInfer's predictor of one layer with its outputs apart: fc1 [rank, D], fc2 [neurons, rank], threshold f32[].

    fc2 is None for a part that is not predicted.
    """

    fc1: QTensor
    fc2_hot: QTensor | None
    fc2_cold: QTensor | None
    threshold: jax.Array


class HotCold(NamedTuple):
    """The sparse weights of one layer; a part is None if it has no neuron.

    `cold_norm` f32[D] is the layer's `ffn_norm` again, if the cold part lies on a device of its own.
    """

    predictor: Predictors
    hot: Part | None
    cold: Part | None
    cold_norm: jax.Array | None = None


class HotColdStats(NamedTuple):
    """`SparseStats` of both parts, and int32[R], hot neurons among those kept."""

    kept: jax.Array
    union: jax.Array
    nonzero: jax.Array
    hot: jax.Array


def packer(hot: Sequence[np.ndarray], threshold: float, *, floats: bool, dense_hot: bool = False) -> PackFFN:
    """A `pack_ffn` for `engine.weights.load_params` that keeps hot and cold rows of a PowerInfer file apart.

    `hot` is L masks bool[F]. `floats` makes predictors float32, for kernels that compute so; with `dense_hot`, hot
    neurons are not predicted.
    """

    def matrix(tensor: TensorInfo, ids: np.ndarray) -> QTensor:
        """Some rows, packed for the dense kernels."""
        if floats:
            return pack_float(jnp.asarray(tensor.dequantize()[ids]), "f32")
        return pack_qtensor(tensor.raw[ids], tensor.type, (len(ids), tensor.shape[1]))

    def part(own: dict[str, TensorInfo], ids: np.ndarray) -> Part | None:
        def rows(t: TensorInfo) -> NeuronRows:
            return pack_neurons(t.raw[ids], t.type, (len(ids), t.shape[1]))

        if not len(ids):
            return None
        gate = own.get("ffn_gate")
        return Part(None if gate is None else rows(gate), rows(own["ffn_up"]), rows(own["ffn_down_t"]))

    def pack(own: dict[str, TensorInfo]) -> dict[str, Pytree]:
        mask = hot[int(own["ffn_up"].name.split(".")[1])]
        hot_ids, cold_ids = np.flatnonzero(mask), np.flatnonzero(~mask)
        predictor = Predictors(
            fc1=matrix(own["fc1"], np.arange(own["fc1"].shape[0])),
            fc2_hot=matrix(own["fc2"], hot_ids) if len(hot_ids) and not dense_hot else None,
            fc2_cold=matrix(own["fc2"], cold_ids) if len(cold_ids) else None,
            threshold=jnp.float32(threshold),
        )
        sparse = HotCold(predictor, part(own, hot_ids), part(own, cold_ids))
        return {"ffn_gate": None, "ffn_up": None, "ffn_down": None, "sparse": sparse}

    return pack


def predict(kernels: Kernels, w: Predictors, x_RD, n_valid_B) -> tuple[jax.Array | None, jax.Array | None]:
    """PowerInfer's rule, (fc2 relu(fc1 x))_j >= threshold, on the residual x before ffn_norm.

    Returns uint8[R, neurons] of the hot and of the cold part, None if all are kept; the kernels mask the rows that do
    not count.
    """
    (h_RK,) = kernels.linear(x_RD, (w.fc1,), n_valid=n_valid_B)
    h_RK, keep = activate(h_RK, "relu"), []
    for fc2 in (w.fc2_hot, w.fc2_cold):
        scores = None if fc2 is None else kernels.linear(h_RK, (fc2,), n_valid=n_valid_B)[0]
        keep.append(None if scores is None else (scores >= w.threshold).astype(jnp.uint8))
    return keep[0], keep[1]


PartFn = Callable[..., tuple[jax.Array, SparseStats]]


def part_ffn(config: ModelConfig, kernels: Kernels) -> PartFn:
    """part(rows, norm, x_RD, keep, n_valid_B) -> (f32[R, D] partial sum without the residual, SparseStats).

    No PowerInfer file has an FFN with biases.
    """
    assert not any(name.startswith("ffn_") for name in config.biases)
    act, up_act = parse_activation(config.activation)

    def part(rows: Part, norm, x_RD, keep_RF, n_valid_B):
        if keep_RF is None:
            keep_RF = jnp.ones((x_RD.shape[0], rows.up.shape[0]), jnp.uint8)
        return kernels.sparse_ffn(
            x_RD, keep_RF, rows.gate, rows.up, rows.down_t,
            norm=norm, eps=config.norm_eps, n_valid=n_valid_B, act=act, up_act=up_act,
        )  # fmt: skip

    return part


def combine(x_RD, cold_RD, hot_RD):
    """x + (cold + hot); a part that is None adds nothing."""
    if cold_RD is None or hot_RD is None:
        only = cold_RD if hot_RD is None else hot_RD
        return x_RD if only is None else x_RD + only
    return x_RD + (cold_RD + hot_RD)


def stats_of(cold: SparseStats | None, hot: SparseStats | None) -> HotColdStats:
    """A layer's statistics from its parts'; at least one is there."""
    parts = [p for p in (cold, hot) if p is not None]
    kept, union, nonzero, _ = (sum(each[1:], each[0]) for each in zip(*parts))
    return HotColdStats(kept, union, nonzero, jnp.zeros_like(kept) if hot is None else hot.kept)


def hot_cold_ffn(config: ModelConfig, kernels: Kernels) -> Callable:
    """ffn(layer, x_RD, n_valid_B) -> (y_RD, HotColdStats) for `engine.llama.make_forward`: both parts on one device."""
    part = part_ffn(config, kernels)

    def ffn(layer: Layer, x_RD, n_valid_B):
        w: HotCold = layer.sparse
        keep = predict(kernels, w.predictor, x_RD, n_valid_B)
        (hot_RD, hot), (cold_RD, cold) = (
            (None, None) if rows is None else part(rows, layer.ffn_norm, x_RD, mask, n_valid_B)
            for rows, mask in zip((w.hot, w.cold), keep)
        )
        return combine(x_RD, cold_RD, hot_RD), stats_of(cold, hot)

    return ffn


class DevicePair(NamedTuple):
    """The devices of hot and of cold neurons; both may be the same one."""

    hot: jax.Device
    cold: jax.Device


def two_devices(given: GivenDevices = 2) -> DevicePair:
    """The two of these names, or the accelerator and the host's CPU, or two CPU devices; UserError without them."""
    if isinstance(given, int):
        first = jax.default_backend()
        given = ("cpu:0", "cpu:1") if first == "cpu" else (first, "cpu")
    found = []
    for name in given:  # such as "cuda:0"; "cpu" is the first of its kind
        kind, _, number = str(name).partition(":")
        try:
            if not (number := number or "0").isdecimal():  # int() also reads "-1", " 0" and "0_0"
                raise ValueError
            found.append(jax.devices(kind)[int(number)])
        except (RuntimeError, ValueError, IndexError):
            here = ", ".join(f"{d.platform}:{d.id}" for d in {*jax.devices(), *jax.devices("cpu")})
            more = "more CPU devices with JAX_NUM_CPU_DEVICES=2"
            raise UserError(f"device {name!r} is not here: there are {here}; {more}") from None
    return DevicePair(*found)


def host_kernels() -> Kernels:
    """The best kernels for a CPU, even if there is an accelerator."""
    return kernel_api.get("native" if cpu.available() else "reference")


def kernels_beside(hot: jax.Device, kernels: Kernels) -> Kernels:
    """The kernels of the second device: the same beside a CPU, the CPU's own beside an accelerator."""
    return kernels if hot.platform == "cpu" else host_kernels()


Span = tuple[str, int, float, float]
"""A watched piece of work: part, layer, begin and end in seconds of `time.perf_counter`."""


def waiting(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds that each device waits for the other's part of an FFN, by "hot" and "cold", in layers that have both."""
    ends = defaultdict[tuple[str, int], list[float]](list)
    for part, layer, _, end in sorted(spans, key=lambda span: span[3]):
        ends[part, layer].append(end)
    late = [c - h for layer in {layer for _, layer in ends} for h, c in zip(ends["hot", layer], ends["cold", layer])]
    return {"hot": sum(max(s, 0.0) for s in late), "cold": sum(max(-s, 0.0) for s in late)}


class _Residual(NamedTuple):
    """x, and the partial sums that the next program adds to it."""

    x_RD: jax.Array
    cold_RD: jax.Array | None = None
    hot_RD: jax.Array | None = None


class _DevicePrograms:
    def __init__(self, config: ModelConfig, kernels: Kernels):
        attention, part = make_attention(config, kernels), part_ffn(config, kernels)
        output = make_output(config, kernels)

        def attend(layer, predictor, tables, residual: _Residual, k, v, length, n_valid_B, parents_Bn, kind: LayerKind):
            x_RD, k, v = attention(layer, tables, combine(*residual), k, v, length, n_valid_B, parents_Bn, kind)
            return x_RD, predict(kernels, predictor, x_RD, n_valid_B), k, v

        def finish(params, residual: _Residual, n_valid_B, *, want: Want):
            x_RD = combine(*residual)
            x_BnD = x_RD.reshape(n_valid_B.shape[0], -1, x_RD.shape[-1])
            return ForwardOut(output(params, x_BnD, n_valid_B, want), x_BnD if want.hidden is True else None)

        self.embed = jax.jit(make_embed(config, kernels))
        self.attend = jax.jit(attend, donate_argnums=(4, 5), static_argnums=9)
        self.part = jax.jit(part)
        self.finish = jax.jit(finish, static_argnames="want")


class TwoDevices(Devices):
    """Two devices of a model with hot and cold neurons. The host steps through `forward`: no program may contain it.

    Attributes:
        devices: the two.
        overlap: whether both parts of an FFN run at the same time; the bits are the same.
        watch: called with each `Span`, from two threads, or None. Watching waits for each piece.
        crossed: bytes that went over so far, without weights, by the device that they went to.
    """

    one_program = False

    def __init__(
        self, config: ModelConfig, kernels: Kernels, devices: DevicePair, *, host_layers: frozenset[int] = frozenset(),
        output_on_host: bool = False,
    ):  # fmt: skip
        self.config, self.devices, self.overlap = config, devices, True
        self.watch: Callable[..., None] | None = None
        self.crossed, self._lock = {"hot": 0, "cold": 0}, threading.Lock()  # two threads count
        self._home = [devices.cold if i in host_layers else devices.hot for i in range(config.n_layers)]
        self._last = devices.cold if output_on_host else devices.hot
        self._programs = {devices.cold: _DevicePrograms(config, kernels_beside(devices.hot, kernels))}
        self._programs[devices.hot] = _DevicePrograms(config, kernels)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cold")

    def make_forward(self, config: ModelConfig, kernels: Kernels, ffn: Callable | None) -> ForwardFn:
        """`forward`; config and kernels are those it was made with, and the FFN is that of hot and cold neurons."""
        return self.forward

    def jit(self, function: Callable, **options) -> Callable:
        return function  # it starts compiled pieces

    def compile(self, function: Callable, *args: Pytree, donate: tuple[int, ...] = ()) -> Callable:
        return function

    def place(self, params: Params) -> Params:
        """The weights, each on the device that reads it; cold neurons and the embedding on the second."""
        layers = []
        for home, layer in zip(self._home, params.layers, strict=True):
            w: HotCold = layer.sparse
            cold, norm = jax.device_put((w.cold, layer.ffn_norm), self.devices.cold)
            rest = jax.device_put(layer._replace(sparse=w._replace(cold=None)), home)
            layers.append(rest._replace(sparse=rest.sparse._replace(cold=cold, cold_norm=norm)))
        return params._replace(
            embedding=jax.device_put(params.embedding, self.devices.cold),
            layers=tuple(layers),
            output_norm=jax.device_put(params.output_norm, self._last),
            output=jax.device_put(params.output, self._last),
        )

    def forward(
        self, params: Params, tokens_Bn, cache: KVCache, *, n_valid_B=None, parents_Bn=None, want: Want = _ALL
    ) -> tuple[ForwardOut, KVCache]:
        """As `engine.llama.make_forward`'s; keys and values of `cache` are donated."""
        batch, n = tokens_Bn.shape
        if n_valid_B is None:
            n_valid_B = np.full((batch,), n, np.int32)
        n_valid = {d: _to(d, n_valid_B) for d in self._programs}
        tables = params._replace(embedding=ABSENT, layers=(), output_norm=ABSENT, output=ABSENT)
        shared = {d: _to(d, (tables, cache.length, parents_Bn)) for d in {*self._home}}
        tokens_R = _to(self.devices.cold, np.reshape(np.asarray(tokens_Bn), -1))  # the host's, as the embedding
        residual = _Residual(self._programs[self.devices.cold].embed(params.embedding, tokens_R))
        keys, values, stats, kept = list(cache.k), list(cache.v), [], {}
        which = range(self.config.n_layers) if want.layers is None else want.layers
        features = places(want.hidden, which, self.config.n_layers)
        for place, i in enumerate(which):
            kept |= {place: residual} if place in features else {}
            residual, keys[i], values[i], stat = self._layer(
                i, params.layers[i], residual, keys[i], values[i], *shared[self._home[i]], n_valid=n_valid
            )
            stats.append(stat)
        last = params._replace(embedding=ABSENT, layers=(), cos=None, sin=None)
        args = self.moved(self._last, (residual, n_valid_B))
        out = _to(self.devices.hot, self._programs[self._last].finish(last, *args, want=want))
        if features:
            kept[len(which)] = residual
            rows, valid = self.moved(self.devices.hot, ([kept[place] for place in features], n_valid_B))
            width = len(rows) * self.config.d_model
            out = out._replace(hidden=_side_by_side(rows, valid).reshape(len(valid), -1, width))
        if stats:  # (cold, hot) of every layer, stacked over the layers
            parts = [_stacked(part) if any(s is not None for s in part) else None for part in zip(*stats)]
            out = out._replace(stats=_both(*self.moved(self.devices.hot, parts)))
        return out, KVCache(tuple(keys), tuple(values), cache.length)

    def _layer(
        self, i: int, layer: Layer, residual: _Residual, k, v, tables: Params, length_B, parents_Bn, n_valid: dict
    ) -> tuple[_Residual, jax.Array, jax.Array, tuple]:
        """Attention and both parts of the FFN; the next program adds the parts to the residual."""
        home, w = self._home[i], layer.sparse
        residual, k, v = self.moved(home, (residual, k, v))
        x_RD, keep, k, v = self._timed(
            "attention", i, self._programs[home].attend, layer._replace(sparse=None), w.predictor, tables, residual,
            k, v, length_B, n_valid[home], parents_Bn, self.config.kind(i),
        )  # fmt: skip
        cold_job = partial(self._part, "cold", i, w.cold, w.cold_norm, self.devices.cold, x_RD, keep[1], n_valid)
        if self.overlap and w.cold is not None and w.hot is not None:
            pending = self._worker.submit(cold_job)
        else:
            pending = Future()
            pending.set_result(cold_job())
        hot_RD, hot = self._part("hot", i, w.hot, layer.ffn_norm, self.devices.hot, x_RD, keep[0], n_valid)
        cold_RD, cold = pending.result()
        return _Residual(x_RD, cold_RD, hot_RD), k, v, (cold, hot)

    def _part(self, name: str, i: int, rows, norm, device: jax.Device, x_RD, keep_RF, n_valid: dict):
        """Partial sum on the device of attention, and statistics, or (None, None) if there is no such neuron."""
        if rows is None:
            return None, None
        x_RD, keep_RF = self.moved(device, (x_RD, keep_RF))
        out_RD, stats = self._timed(name, i, self._programs[device].part, rows, norm, x_RD, keep_RF, n_valid[device])
        return self.moved(self._home[i], out_RD), stats

    def _timed(self, name: str, i: int, program: Callable, *args):
        if self.watch is None:
            return program(*args)
        begin = time.perf_counter()
        out = jax.block_until_ready(program(*args))
        self.watch(name, i, begin, time.perf_counter())
        return out

    def moved(self, device: jax.Device, tree: Pytree) -> Pytree:
        """`tree` as arguments of a program of a device; bytes from the other one are counted in `crossed`.

        What lies elsewhere becomes an array of the host, which waits for it: a copy from one CPU device to another
        would be queued behind what runs there.
        """
        other = self.devices.cold if device == self.devices.hot else self.devices.hot
        if other != device:
            nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if _is_on(other, leaf))
            with self._lock:
                self.crossed["hot" if device == self.devices.hot else "cold"] += nbytes
        return jax.tree.map(lambda leaf: leaf if _is_on(device, leaf) else np.asarray(leaf), tree)


@jax.jit
def _side_by_side(kept: list[_Residual], n_valid_B) -> jax.Array:
    return side_by_side([combine(*residual) for residual in kept], n_valid_B)


@jax.jit
def _stacked(stats: tuple[SparseStats | None, ...]) -> SparseStats:
    """Statistics of one device's part, stacked over the layers; zeros for a layer without that part."""
    nothing = jax.tree.map(jnp.zeros_like, next(s for s in stats if s is not None))
    return jax.tree.map(lambda *each: jnp.stack(each), *(nothing if s is None else s for s in stats))


_both = jax.jit(stats_of)


def _to(device: jax.Device, tree: Pytree) -> Pytree:
    """`tree` on a device; leaves that are there already stay."""
    return jax.tree.map(lambda leaf: leaf if _is_on(device, leaf) else jax.device_put(np.asarray(leaf), device), tree)


def _is_on(device: jax.Device, leaf: object) -> bool:
    return getattr(leaf, "device", None) == device
