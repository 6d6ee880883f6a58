"""Tables of sums beside integer products, as `bench --ablation lut`: matrices of four-bit weights.

A matrix is cold where several copies are gone through in turn, and warm where one is used again and again, from the
cache if it fits. The calls of a case are one program; each adds to the result of the one before it, which keeps order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as GGML
from gguf.quants import dequantize
from rich.console import Console

from specsparse.errors import UserError
from specsparse.kernels import peaks
from specsparse.kernels.native import cpu
from specsparse.kernels.packing.pack import pack_qtensor
from specsparse.kernels.packing.planes import BitPlanes, pack_planes
from specsparse.kernels.packing.random_blocks import random_quantised
from specsparse.kernels.qtensor import QTensor
from specsparse.measure.trials import paired_ratio, summary
from specsparse.runtime import manifest
from specsparse.support import terminal
from specsparse.support.files import Json
from specsparse.support.interleaved import interleaved, seconds
from specsparse.tools.bench.copies import BLOCK_MADE_BYTES, need_room, packed_bytes
from specsparse.tools.bench.ffn import copied, kernels_on
from specsparse.tools.bench.lut import native as lut
from specsparse.tools.bench.lut.reference import SUMS

TYPES = ("Q4_0", "Q4_1")
PRODUCT = "product"
KERNELS = (PRODUCT, *SUMS)
STATES = ("cold", "warm")
_ERROR_ROWS = 64
"""Rows of the matrix whose results are compared with float64."""


@dataclass(frozen=True)
class LutPlan:
    """What to measure.

    Attributes:
        shapes: (rows, cols) of the matrices.
        ns: tokens of a call.
        types: GGUF types, of `TYPES`.
        repeats: timings of each case.
        cold_bytes: least bytes of all copies of a matrix together; a warm one is used as often.
        most_copies: of a matrix, however small.
    """

    shapes: tuple[tuple[int, int], ...] = ((2048, 2048), (4096, 11008))
    ns: tuple[int, ...] = (1, 4)
    types: tuple[str, ...] = TYPES
    repeats: int = 5
    cold_bytes: int = 256 << 20
    most_copies: int = 256

    def validate(self) -> None:
        """UserError where the plan cannot be run."""
        for name in self.types:
            if name not in TYPES:
                raise UserError(f"--ablation lut has no type {name!r}; there are {', '.join(TYPES)}")
        for rows, cols in self.shapes:
            if rows < 1 or cols < 32 or cols % 32:
                raise UserError(f"--shapes {rows}x{cols}: columns are a multiple of 32")

    def check_room(self) -> None:
        """UserError where the memory that is available does not hold a matrix and its copies."""
        for name in self.types:
            for rows, cols in self.shapes:
                each = packed_bytes(name, rows, cols)
                copies = min(self.most_copies, -(-self.cold_bytes // each))
                needed = BLOCK_MADE_BYTES * rows * cols + 2 * copies * each  # both kernels' own
                need_room("--shapes", rows, cols, name, needed)


@dataclass(frozen=True)
class LutCase:
    """One timing; `kernel` is "product" or the kind of sums in the tables."""

    kind: str
    shape: tuple[int, int]
    n: int
    state: str
    kernel: str


def cases(plan: LutPlan, kind: str, shape: tuple[int, int]) -> list[LutCase]:
    """All of a matrix; what is compared stands together."""
    return [LutCase(kind, shape, n, state, name) for n in plan.ns for state in STATES for name in KERNELS]


def _turned(todo: Sequence[LutCase], repeat: int) -> Iterator[LutCase]:
    """The same with another kernel in front: who comes first finds other things in the cache."""
    count = len(KERNELS)
    for start in range(0, len(todo), count):
        for i in range(count):
            yield todo[start + (i + repeat) % count]


def _program(kernel: str) -> Callable:
    """(matrices, x_RD, n_valid) -> the sum of all products."""

    def run(matrices, x, n_valid):
        y = None
        for w in matrices:
            if kernel == PRODUCT:
                (y,) = cpu.linear(x, (w,), n_valid=n_valid, residual=y)
            else:
                y = lut.lut_linear(x, w, sums=kernel, residual=y)
        return y

    return jax.jit(run)


@dataclass(frozen=True)
class _Matrix:
    """Copies of one matrix as both kernels read it, and its first rows in float64."""

    codes: Sequence[QTensor]
    planes: Sequence[BitPlanes]
    dense: np.ndarray

    def of(self, case: LutCase) -> list[QTensor | BitPlanes]:
        """What the calls of a case read, one after the other."""
        found = self.codes if case.kernel == PRODUCT else self.planes
        return list(found) if case.state == "cold" else [found[0]] * len(found)


def _make(plan: LutPlan, kind: str, shape: tuple[int, int]) -> _Matrix:
    raw = random_quantised(kind, *shape, 1, std=0.02, edges=False)
    codes = pack_qtensor(raw, GGML[kind], shape)
    planes, more = pack_planes(codes), min(plan.most_copies, -(-plan.cold_bytes // codes.nbytes)) - 1
    dense = dequantize(raw[:_ERROR_ROWS], GGML[kind]).astype(np.float64)
    return _Matrix(
        [codes, *(copied(codes) for _ in range(more))], [planes, *(copied(planes) for _ in range(more))], dense
    )


def _rows(case: LutCase) -> np.ndarray:
    """Activations float32[n, cols]."""
    return np.random.default_rng(case.n).normal(size=(case.n, case.shape[1])).astype(np.float32)


def _once(case: LutCase, program: Callable, matrices: Sequence[QTensor | BitPlanes]) -> float:
    """Seconds of one product."""
    x, n_valid = jnp.asarray(_rows(case)), jnp.full((1,), case.n, jnp.int32)
    jax.block_until_ready((x, n_valid))
    return seconds(lambda: jax.block_until_ready(program(matrices, x, n_valid))) / len(matrices)


def _error(case: LutCase, program: Callable, matrix: _Matrix) -> float:
    """Root of the mean square error over that of the exact product."""
    x = _rows(case)
    n_valid = jnp.full((1,), case.n, jnp.int32)
    got = np.asarray(program(matrix.of(case)[:1], jnp.asarray(x), n_valid))
    exact = x.astype(np.float64) @ matrix.dense.T
    return float(np.sqrt(np.mean((got[:, : len(matrix.dense)] - exact) ** 2) / np.mean(exact**2)))


def measure(plan: LutPlan, done: Callable[[], None]) -> tuple[list[Json], list[float]]:
    """A row for each case; also the read bandwidth of each repeat, bytes per second. `done` follows each timing."""
    buffer, reads, rows = peaks.ReadBuffer(), [], []
    programs = {name: _program(name) for name in KERNELS}
    for kind in plan.types:
        for shape in plan.shapes:
            matrix, todo = _make(plan, kind, shape), cases(plan, kind, shape)
            taken = interleaved(
                {case: partial(_once, case, programs[case.kernel], matrix.of(case)) for case in todo},
                repeats=plan.repeats, order=_turned, before=lambda: reads.append(buffer.rate()), done=done,
            )  # fmt: skip
            for case in todo:
                base = taken[LutCase(case.kind, case.shape, case.n, case.state, PRODUCT)]
                error = _error(case, programs[case.kernel], matrix)
                rows.append(_row(case, taken[case], base, matrix.codes[0].nbytes, error))
    return rows, reads


def _row(case: LutCase, seconds: list[float], product: list[float], nbytes: int, error: float) -> Json:
    ms = summary([1e3 * s for s in seconds])
    return {
        "type": case.kind,
        "rows": case.shape[0],
        "cols": case.shape[1],
        "n": case.n,
        "state": case.state,
        "kernel": case.kernel,
        "ms": ms,
        "bytes": nbytes,
        "bytes_per_second": nbytes / (1e-3 * ms["median"]),
        "over_product": paired_ratio(seconds, product),
        "relative_error": error,
    }


def run(plan: LutPlan, out: Console, *, threads: int | None = None) -> Json:
    """Measures and returns the report: the plan, `rows`, the read bandwidth and the manifest.

    Raises:
        UserError: a plan that cannot be run, or kernels that are not there.
    """
    plan.validate()
    plan.check_room()
    kernels_on("native", threads)
    total = (plan.repeats + 1) * sum(len(cases(plan, kind, s)) for kind in plan.types for s in plan.shapes)
    with terminal.counting(out, "timing products", total) as progress:
        rows, reads = measure(plan, lambda: progress.advance(progress.task_ids[0]))
    return {
        "bench": "specsparse lut",
        "plan": {name: getattr(plan, name) for name in plan.__dataclass_fields__},
        "rows": rows,
        "read_bytes_per_second": summary(reads),
        "manifest": manifest.build({}, None),
    }
