"""Products by type of weights, as `bench --products Q4_0,Q8_0`: what decoding, verifying and prompts are made of.

Weights come from memory, where several copies are gone through in turn, or from the last cache, where those fit it.
Every time stands beside what the machine read and multiplied in the same repeat. The calls of a case are one program;
each adds to the result of the one before it, which keeps order.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as GGML
from gguf.constants import GGML_QUANT_SIZES
from rich.console import Console
from rich.table import Table

from specsparse.errors import UserError
from specsparse.kernels import peaks
from specsparse.kernels.native import cpu
from specsparse.kernels.packing.pack import KINDS, pack_qtensor
from specsparse.kernels.packing.random_blocks import random_quantised
from specsparse.kernels.qtensor import QTensor
from specsparse.measure.trials import MachinePeaks, paired_ratio, summary
from specsparse.runtime import manifest
from specsparse.support import tables, terminal
from specsparse.support.files import Json
from specsparse.support.interleaved import interleaved, seconds
from specsparse.tools.bench.copies import BLOCK_MADE_BYTES, bounded, need_room, packed_bytes
from specsparse.tools.bench.ffn import copied, kernels_on

MEMORY, CACHE = "memory", "cache"
_PROMPT = 16
"""Rows from which on computing takes so long that it does not matter where weights come from."""


@dataclass(frozen=True)
class ProductsPlan:
    """What to measure.

    Attributes:
        types: GGUF types.
        shape: (rows, cols) of a matrix.
        ns: rows of activations, ascending; 1 first, which v(n) divides by.
        repeats: timings of each case.
        memory_bytes: least bytes of all copies of a matrix that come from memory.
        cache_bytes: most bytes of those that stay in the last cache.
    """

    types: tuple[str, ...]
    shape: tuple[int, int] = (1536, 1536)
    ns: tuple[int, ...] = (1, 4, 8, 64, 256)
    repeats: int = 15
    memory_bytes: int = 160 << 20
    cache_bytes: int = 20 << 20

    def validate(self) -> None:
        """UserError where the plan cannot be run."""
        for name in self.types:
            if name not in GGML.__members__ or GGML[name] not in KINDS:
                raise UserError(f"--products has no type {name!r}; there are {', '.join(t.name for t in KINDS)}")
            if self.shape[1] % GGML_QUANT_SIZES[GGML[name]][0]:
                block = GGML_QUANT_SIZES[GGML[name]][0]
                raise UserError(
                    f"--shapes {self.shape[0]}x{self.shape[1]}: columns of {name} are a multiple of {block}"
                )

    def check_room(self) -> None:
        """UserError where the memory that is available does not hold a matrix and its copies."""
        rows, cols = self.shape
        for name in self.types:
            each = packed_bytes(name, rows, cols)
            copies = max(self.copies(state, each) for state in (MEMORY, CACHE))
            needed = BLOCK_MADE_BYTES * rows * cols + copies * each + 8 * max(self.ns) * (rows + cols)
            need_room("--shapes", rows, cols, name, needed)

    def cases(self) -> list[tuple[str, int]]:
        """(where weights come from, rows of activations) of a type."""
        few = [(state, n) for state in (MEMORY, CACHE) for n in self.ns if n <= _PROMPT]
        return few + [(CACHE, n) for n in self.ns if n > _PROMPT]

    def copies(self, state: str, nbytes: int) -> int:
        """How many of a matrix of `nbytes`."""
        if state == MEMORY:
            return bounded(self.memory_bytes, nbytes)
        return min(max(1, self.cache_bytes // nbytes), bounded(self.cache_bytes, nbytes))


@jax.jit
def _chain(matrices: Sequence[QTensor], x: jax.Array, n_valid: jax.Array) -> jax.Array | None:
    y = None
    for w in matrices:
        (y,) = cpu.linear(x, (w,), n_valid=n_valid, residual=y)
    return y


def _once(matrices: Sequence[QTensor], n: int) -> float:
    """Seconds of one product."""
    x = jnp.asarray(np.random.default_rng(n).normal(size=(n, matrices[0].shape[1])).astype(np.float32))
    n_valid = jnp.full((1,), n, jnp.int32)
    jax.block_until_ready((x, n_valid))
    return seconds(lambda: jax.block_until_ready(_chain(matrices, x, n_valid))) / len(matrices)


def _measure(plan: ProductsPlan, name: str, buffer: peaks.ReadBuffer, done: Callable[[], None]) -> list[Json]:
    """A row for each case of a type."""
    made = pack_qtensor(random_quantised(name, *plan.shape, 1, std=0.02, edges=False), GGML[name], plan.shape)
    cases, machine = plan.cases(), MachinePeaks()
    wanted = max(plan.copies(state, made.nbytes) for state, _ in cases)
    matrices = [made, *(copied(made) for _ in range(wanted - 1))]
    taken = interleaved(
        {(state, n): partial(_once, matrices[: plan.copies(state, made.nbytes)], n) for state, n in cases},
        repeats=plan.repeats, before=lambda: machine.measure(buffer), done=done,
    )  # fmt: skip
    return [_row(name, state, n, made, taken, machine) for state, n in cases]


def _row(
    name: str, state: str, n: int, w: QTensor, taken: dict[tuple[str, int], list[float]], at_best: MachinePeaks
) -> Json:
    times, macs = taken[state, n], n * w.shape[0] * w.shape[1]
    one = taken.get((state, 1))
    return {
        "type": name,
        "weights": state,
        "n": n,
        "ms": summary([1e3 * s for s in times]),
        "bytes": w.nbytes,
        "v": paired_ratio(times, one) if one else None,
        "share_of_read": paired_ratio([w.nbytes / s for s in times], at_best.read),
        "macs_per_second": macs / statistics.median(times),
        "share_of_int8": paired_ratio([macs / s for s in times], at_best.int8),
        "read_bytes_per_second": statistics.median(at_best.read),
        "int8_macs_per_second": statistics.median(at_best.int8),
    }


def run(plan: ProductsPlan, out: Console, *, threads: int | None = None) -> Json:
    """Measures and returns the report: the plan, `rows` and the manifest.

    Raises:
        UserError: a plan that cannot be run, or kernels that are not there.
    """
    plan.validate()
    plan.check_room()
    kernels_on("native", threads)
    buffer, rows = peaks.ReadBuffer(), []
    with terminal.counting(
        out, "timing products", (plan.repeats + 1) * len(plan.cases()) * len(plan.types)
    ) as progress:
        for name in plan.types:
            rows += _measure(plan, name, buffer, lambda: progress.advance(progress.task_ids[0]))
    chosen = {field: getattr(plan, field) for field in plan.__dataclass_fields__}
    return {"bench": "specsparse products", "plan": chosen, "rows": rows, "manifest": manifest.build({}, None)}


def table(report: Json) -> Table:
    """One row for each case, medians; shares are of what the machine did in the same repeat."""
    made = tables.new(
        "type", "weights from", "rows", "ms", "v(n)", "GB/s", "of read", "GMAC/s", "of int8", left=(0, 1), close=True
    )
    for row in report["rows"]:
        ms = row["ms"]["median"]
        made.add_row(
            row["type"],
            row["weights"],
            str(row["n"]),
            f"{ms:.3f}",
            f"{row['v']['median']:.2f}" if row["v"] else "",
            f"{1e-6 * row['bytes'] / ms:.1f}",
            f"{row['share_of_read']['median']:.0%}",
            f"{row['macs_per_second'] / 1e9:.0f}",
            f"{row['share_of_int8']['median']:.0%}",
        )
    return made


def summary_line(report: Json) -> str:
    """What the table was measured on."""
    found, rows, shape = report["manifest"], report["rows"], report["plan"]["shape"]
    read, int8 = ([row[key] / 1e9 for row in rows] for key in ("read_bytes_per_second", "int8_macs_per_second"))
    return (
        f"{found['kernels']['isa']} kernels, {found['kernels']['threads']} threads, {found['cpu']['model']}; "
        f"reads {min(read):.1f} to {max(read):.1f} GB/s, int8 peak {min(int8):.0f} to {max(int8):.0f} GMAC/s; "
        f"matrices of {shape[0]} x {shape[1]}"
    )
