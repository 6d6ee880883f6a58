"""One FFN of a given shape, sparse and dense, as `bench --ffn-shape 4096x11008 --active 0.05,0.1,1.0`.

Several copies of the weights are gone through in turn, so that none is in a cache when its turn comes back. Each token
keeps a random set of neurons of its own. Predictors are paid for and their verdict is not used: the share stays exact.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as GGML
from gguf.constants import GGML_QUANT_SIZES
from rich.console import Console

from specsparse import kernels
from specsparse.errors import UserError
from specsparse.kernels import Kernels, peaks
from specsparse.kernels.neurons import NeuronRows, pack_neurons
from specsparse.kernels.packing.pack import SUPPORTED, aligned_empty, pack_qtensor
from specsparse.kernels.packing.random_blocks import random_quantised
from specsparse.kernels.packing.signbits import SignRows, pack_signs
from specsparse.kernels.qtensor import QTensor
from specsparse.measure.trials import paired_ratio, summary
from specsparse.runtime import manifest
from specsparse.support import terminal
from specsparse.support.files import Json
from specsparse.support.interleaved import interleaved
from specsparse.tools.bench.copies import MADE_BYTES, bounded, need_room, packed_bytes

VARIANTS = ("ffn", "ffn+mlp", "ffn+signbit")
"""Which neurons are kept is given; predicted by a two-layer MLP; predicted from sign bits."""
_EPS = 1e-5
_STD = 0.02


@dataclass(frozen=True)
class FfnPlan:
    """What to measure.

    Attributes:
        width, neurons: of the FFN, D and F.
        active: shares of neurons that a token keeps, each in (0, 1].
        ns: tokens of a call.
        types: GGUF types of the weights, the predictor's too.
        rank: of the MLP predictor.
        repeats: timings of each case.
        cold_bytes: least bytes of all copies of the weights together, as far as `copies.bounded` lets them.
    """

    width: int
    neurons: int
    active: tuple[float, ...]
    ns: tuple[int, ...] = (1, 2, 4, 8)
    types: tuple[str, ...] = ("F16", "Q4_0")
    rank: int = 1024
    repeats: int = 5
    cold_bytes: int = 1 << 30

    def validate(self) -> None:
        """UserError where the plan cannot be run."""
        known = {t.name for t in SUPPORTED}
        for name in self.types:
            if name not in known:
                raise UserError(f"type {name!r} does not exist; there are {', '.join(sorted(known))}")
        for share in self.active:
            if not 0 < share <= 1:
                raise UserError(f"--active {share:g}: shares lie above 0 and up to 1")
        block = max(GGML_QUANT_SIZES[GGML[name]][0] for name in self.types)
        if any(size % block for size in (self.width, self.neurons, self.rank)):
            raise UserError(
                f"--ffn-shape {self.width}x{self.neurons}: multiples of {block} fit {', '.join(self.types)}"
            )

    def check_room(self) -> None:
        """UserError where the memory that is available does not hold the weights and their copies."""
        D, F = self.width, self.neurons
        for kind in self.types:
            rows = packed_bytes(kind, F, D)
            predictor = packed_bytes(kind, self.rank, D) + packed_bytes(kind, F, self.rank) + D * F // 8
            copies = bounded(self.cold_bytes, 3 * rows)
            each = 5 * rows + packed_bytes(kind, D, F) + predictor + 10 * max(self.ns) * F  # of a copy, with its masks
            needed = MADE_BYTES * max(D * F, self.rank * max(D, F)) + copies * each
            need_room("--ffn-shape", D, F, kind, needed)


@dataclass(frozen=True)
class _Weights:
    """One copy of all weights; a pytree would do as well, but jit takes its fields by name."""

    norm: jax.Array
    gate: NeuronRows
    up: NeuronRows
    down_t: NeuronRows
    dense_gate: QTensor
    dense_up: QTensor
    dense_down: QTensor
    fc1: QTensor
    fc2: QTensor
    signs: SignRows


jax.tree_util.register_dataclass(_Weights, list(_Weights.__dataclass_fields__), [])


def _make(plan: FfnPlan, kind: str) -> _Weights:
    qtype, shape = GGML[kind], (plan.neurons, plan.width)
    raws = [random_quantised(kind, *shape, seed, std=_STD, edges=False) for seed in range(2)]
    gate, up = (pack_neurons(raw, qtype, shape) for raw in raws)
    wide, narrow = (plan.rank, plan.width), (plan.neurons, plan.rank)
    turned = (plan.width, plan.neurons)
    return _Weights(
        norm=jnp.ones((plan.width,), jnp.float32),
        gate=gate,
        up=up,
        down_t=copied(gate),
        dense_gate=pack_qtensor(raws[0], qtype, shape),
        dense_up=pack_qtensor(raws[1], qtype, shape),
        dense_down=pack_qtensor(random_quantised(kind, *turned, 2, std=_STD, edges=False), qtype, turned),
        fc1=pack_qtensor(random_quantised(kind, *wide, 3, std=_STD, edges=False), qtype, wide),
        fc2=pack_qtensor(random_quantised(kind, *narrow, 4, std=_STD, edges=False), qtype, narrow),
        signs=pack_signs(np.random.default_rng(5).normal(size=shape).astype(np.float32)),
    )


Weights = TypeVar("Weights")


def copied(weights: Weights) -> Weights:
    """The same values in memory of their own, so that reading one leaves nothing of the other in a cache."""

    def move(a: jax.Array) -> jax.Array:
        if a.dtype != jnp.uint8:
            return a
        to = aligned_empty(*a.shape)
        to[...] = np.asarray(a)
        return jax.device_put(to)

    return jax.tree.map(move, weights)


def _programs(kernels_: Kernels) -> dict[str, Callable]:
    """By name, (copies, x_RD, keep_CRF, n_valid) -> (x_RD, neurons read by each copy)."""

    def dense(w: _Weights, x, keep, n_valid):
        options = {"norm": w.norm, "eps": _EPS, "n_valid": n_valid}
        (h,) = kernels_.linear(x, (w.dense_gate, w.dense_up), act="silu", **options)
        return kernels_.linear(h, (w.dense_down,), residual=x, n_valid=n_valid)[0], jnp.int32(keep.shape[1])

    def ffn(w: _Weights, x, keep, n_valid):
        y, stats = kernels_.sparse_ffn(
            x, keep, w.gate, w.up, w.down_t, norm=w.norm, eps=_EPS, n_valid=n_valid, act="silu", residual=x
        )
        return y, stats.union

    def mlp(w: _Weights, x, keep, n_valid):
        (h,) = kernels_.linear(x, (w.fc1,), n_valid=n_valid)
        (score,) = kernels_.linear(jnp.maximum(h, jnp.float32(0)), (w.fc2,), n_valid=n_valid)
        return ffn(w, x, keep | (score >= jnp.float32(jnp.inf)).astype(jnp.uint8), n_valid)

    def signbit(w: _Weights, x, keep, n_valid):
        return ffn(w, x, keep | kernels_.signbit_keep(x, w.signs, threshold=jnp.inf, n_valid=n_valid), n_valid)

    def over_copies(one):
        def run(copies, x, keep_CRF, n_valid):
            read = []
            for w, keep in zip(copies, keep_CRF, strict=True):
                x, count = one(w, x, keep, n_valid)
                read.append(count)
            return x, jnp.stack(read)

        return jax.jit(run)

    return {"dense": over_copies(dense), **dict(zip(VARIANTS, map(over_copies, (ffn, mlp, signbit)), strict=True))}


@dataclass(frozen=True)
class FfnCase:
    """One timing: a type, a number of tokens, a share (1.0 for dense) and a program's name."""

    kind: str
    n: int
    share: float
    program: str


def cases(plan: FfnPlan, kind: str) -> Iterator[FfnCase]:
    """All of a type; what is compared stands together."""
    for n in plan.ns:
        yield FfnCase(kind, n, 1.0, "dense")
        for share in plan.active:
            for program in VARIANTS:
                yield FfnCase(kind, n, share, program)


@dataclass(frozen=True)
class TimedFfn:
    """Timings of a case: seconds of one FFN in each repeat, neurons and bytes that one reads."""

    case: FfnCase
    seconds: tuple[float, ...]
    neurons_read: float
    bytes_read: float


def measure(plan: FfnPlan, chosen: Kernels, done: Callable[[], None]) -> tuple[list[TimedFfn], list[float]]:
    """Times every case in turn, `repeats` times; also the read bandwidth of each repeat, bytes per second."""
    buffer, reads, found = peaks.ReadBuffer(), [], []
    programs = _programs(chosen)
    for kind in plan.types:
        first = _make(plan, kind)
        each = 3 * first.gate.nbytes
        copies = [first, *(copied(first) for _ in range(bounded(plan.cold_bytes, each) - 1))]
        calls = {
            case: partial(_once, plan, case, programs[case.program], copies, itertools.count())
            for case in cases(plan, kind)
        }
        taken = interleaved(calls, repeats=plan.repeats, before=lambda: reads.append(buffer.rate()), done=done)
        for case, timed in taken.items():
            read = float(np.mean([neurons for _, neurons in timed]))
            seconds = tuple(spent / len(copies) for spent, _ in timed)
            found.append(TimedFfn(case, seconds, read, _bytes(case, first, read)))
    return found, reads


def _once(
    plan: FfnPlan, case: FfnCase, program: Callable, copies: Sequence[_Weights], seeds: Iterator[int]
) -> tuple[float, float]:
    """Seconds of one pass over the copies, and the neurons that a copy read on average."""
    rng = np.random.default_rng([next(seeds), case.n])
    x = jnp.asarray(rng.normal(size=(case.n, plan.width)).astype(np.float32))
    keep = jnp.asarray((rng.random((len(copies), case.n, plan.neurons)) < case.share).astype(np.uint8))
    n_valid = jnp.full((1,), case.n, jnp.int32)
    jax.block_until_ready((x, keep, n_valid))
    start = time.perf_counter()
    read = jax.block_until_ready(program(copies, x, keep, n_valid))[1]
    spent = time.perf_counter() - start
    return spent, plan.neurons if case.program == "dense" else float(np.mean(read))


def _bytes(case: FfnCase, w: _Weights, neurons: float) -> float:
    """Weight bytes that one FFN reads, those of its predictor too."""
    if case.program == "dense":
        return sum(m.nbytes for m in (w.dense_gate, w.dense_up, w.dense_down))
    extra = {"ffn": 0, "ffn+mlp": w.fc1.nbytes + w.fc2.nbytes, "ffn+signbit": w.signs.nbytes}[case.program]
    return neurons * 3 * w.gate.data.shape[1] + extra


def kernels_on(backend: str | None, threads: int | None) -> kernels.Kernels:
    """The kernels of that name (the best there is) on so many threads (as many as before).

    Raises:
        UserError: they are not there.
    """
    chosen = kernels.get(backend)
    if threads is not None:
        kernels.set_threads(threads)
    return chosen


def run(plan: FfnPlan, out: Console, *, threads: int | None = None, backend: str | None = None) -> Json:
    """Measures and returns the report: the plan, `rows`, the read bandwidth and the manifest.

    Raises:
        UserError: a plan that cannot be run, or kernels that are not there.
    """
    plan.validate()
    plan.check_room()
    chosen = kernels_on(backend, threads)
    total = (plan.repeats + 1) * sum(1 for kind in plan.types for _ in cases(plan, kind))
    with terminal.counting(out, "timing FFNs", total) as progress:
        timed, reads = measure(plan, chosen, lambda: progress.advance(progress.task_ids[0]))
    bandwidth = summary(reads)
    dense = {(t.case.kind, t.case.n): t for t in timed if t.case.program == "dense"}
    return {
        "bench": "specsparse ffn",
        "backend": chosen.name,
        "plan": {name: getattr(plan, name) for name in plan.__dataclass_fields__},
        "rows": [_row(t, dense[t.case.kind, t.case.n], bandwidth["median"]) for t in timed],
        "read_bytes_per_second": bandwidth,
        "manifest": manifest.build({}, None),
    }


def _row(timed: TimedFfn, dense: TimedFfn, bandwidth: float) -> Json:
    case, ms = timed.case, summary([1e3 * s for s in timed.seconds])
    return {
        "type": case.kind,
        "n": case.n,
        "active": case.share,
        "what": case.program,
        "ms": ms,
        "over_dense": paired_ratio(timed.seconds, dense.seconds),
        "neurons_read": timed.neurons_read,
        "bytes": timed.bytes_read,
        "bytes_per_second": 1e3 * timed.bytes_read / ms["median"],
        "over_bandwidth": ms["median"] / (1e3 * timed.bytes_read / bandwidth),
    }
