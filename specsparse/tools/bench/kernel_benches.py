"""`bench products`, `bench ffn`, `bench experts`, `bench lut`: kernels on random weights, without a model.

All time the same way. Weights of one type are made and copied; a case is one program that goes through the copies, so
that none is in a cache when its turn comes back; cases are interleaved, and the machine's own speed is measured between
repeats. The products of a program add to one another, which keeps their order.
"""

import abc
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as GGML
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from matplotlib.figure import Figure as Canvas
from rich.console import Console
from rich.table import Table

from specsparse import kernels
from specsparse.engine.cache import init
from specsparse.engine.config import ModelConfig
from specsparse.engine.llama import make_layers
from specsparse.engine.pytree import Pytree
from specsparse.engine.rope import RopeConfig, model_tables
from specsparse.engine.weights import Layer, Params
from specsparse.errors import UserError, refuse
from specsparse.kernels import Experts, Kernels, processor, skipping
from specsparse.kernels.native import cpu
from specsparse.kernels.neurons import pack_signs
from specsparse.kernels.packing.dequant import pack_float
from specsparse.kernels.packing.pack import KINDS, SUPPORTED, aligned_empty, pack_qtensor
from specsparse.kernels.packing.random_blocks import random_quantised
from specsparse.kernels.qtensor import BLOCK, QTensor
from specsparse.measure import manifest
from specsparse.measure.trials import MachinePeaks, paired_ratio, summary
from specsparse.powerinfer.fewer import by_neuron
from specsparse.powerinfer.sparse_ffn import make_ffn, maskable, runs_densely
from specsparse.predictors import FFN
from specsparse.predictors.scored import Factors, Mlp, SignBit, SignBitWeights, mlp_weights, settled
from specsparse.report import plots
from specsparse.report.plots import FAINT, Figure, Row
from specsparse.support import tables, terminal
from specsparse.support.files import Json, need_memory
from specsparse.support.interleaved import alternating, interleaved, seconds
from specsparse.tools.bench.lut_product import SUMS, BitPlanes, Sums, lut_linear, pack_planes

MADE_BYTES, BLOCK_MADE_BYTES = 12, 4
"""Most bytes a weight while it is made: as a float64 and its float32; as codes, whose scales alone are floats."""
_SAMPLE = 16, 256  # rows and columns that every type packs, in whole groups and blocks

Weights = TypeVar("Weights")


def bounded(total: int, each: int) -> int:
    """Copies of `each` bytes that make up `total`, or as many as compile in seconds.

    A copy costs a hundredth of a second or more to compile, so there are 16 of small weights and else one for every
    1,800 bytes of each: 1 GiB in copies of 1.4 MB or more is reached. Smaller ones stay in a cache in part.
    """
    return max(1, min(-(-total // each), max(16, each // 1800)))


random_raw = partial(random_quantised, std=0.02, edges=False)
"""(type, rows, columns, seed) -> random weights as a file has them."""


def random_packed(kind: str, shape: tuple[int, int], seed: int = 0) -> QTensor:
    """Random weights as the kernels read them."""
    return pack_qtensor(random_raw(kind, *shape, seed), GGML[kind], shape)


def packed_bytes(kind: str, rows: int, cols: int) -> int:
    """Bytes of a matrix of a GGUF type as the kernels read it, about; nothing of its size is made."""
    group, block = _SAMPLE
    return random_packed(kind, _SAMPLE).nbytes * -(-rows // group) * -(-cols // block)


def copies_of(weights: Weights, count: int) -> list[Weights]:
    """The weights `count` times, each in memory of its own: reading one leaves nothing of another in a cache."""

    def copy(a: jax.Array) -> jax.Array:
        if a.dtype != jnp.uint8:
            return a
        to = aligned_empty(*a.shape)
        to[...] = np.asarray(a)
        return jax.device_put(to)

    return [weights, *(jax.tree.map(copy, weights) for _ in range(count - 1))]


def random_rows(n: int, cols: int, seed: int | list[int]) -> tuple[jax.Array, jax.Array]:
    """Activations float32[n, cols] and how many rows are valid, int32[1]: all."""
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(n, cols)).astype(np.float32))
    return jax.block_until_ready((x, jnp.full((1,), n, jnp.int32)))


def product_seconds(program: Callable, matrices: Sequence[QTensor | BitPlanes], n: int) -> float:
    """Seconds of one product with n rows in a program that goes through the matrices."""
    x, n_valid = random_rows(n, matrices[0].shape[1], n)
    return seconds(lambda: jax.block_until_ready(program(matrices, x, n_valid))) / len(matrices)


def chained(product: Callable[[Any, jax.Array, jax.Array, jax.Array | None], jax.Array]) -> Callable:
    """(matrices, x_RD, n_valid) -> the sum of all products, compiled; product(matrix, x, n_valid, sum so far)."""

    def run(matrices, x, n_valid):
        y = None
        for w in matrices:
            y = product(w, x, n_valid, y)
        return y

    return jax.jit(run)


def _by_tables(sums: Sums, w: BitPlanes, x: jax.Array, n_valid: jax.Array, y: jax.Array | None) -> jax.Array:
    return lut_linear(x, w, sums=sums, residual=y)


PRODUCTS = {
    "product": chained(lambda w, x, n_valid, y: cpu.linear(x, (w,), n_valid=n_valid, residual=y)[0]),
    **{sums: chained(partial(_by_tables, sums)) for sums in SUMS},
}
"""The native product, and those by look-up tables, named after their `SUMS`."""


@dataclass(frozen=True, kw_only=True)
class KernelBench(abc.ABC):
    """A bench of kernels: its fields are its options, its methods the parts of `run`."""

    title: ClassVar[str]
    known: ClassVar[tuple[str, ...]]  # types that can be measured
    shape_option: ClassVar[str]  # the option that gives a shape, for messages

    types: tuple[str, ...]  # GGUF types of the weights
    ns: tuple[int, ...]  # rows of a call (tokens)
    repeats: int  # timings of each case
    threads: int | None = None  # of the kernels; None is as many as before
    backend: str | None = "native"  # None is the best there is

    @abc.abstractmethod
    def all_shapes(self) -> Sequence[tuple[int, int]]:
        """(rows, columns) of the matrices to be timed."""

    def block_lengths(self, shape: tuple[int, int]) -> Sequence[int]:
        """Lengths that must be whole blocks of a type."""
        return shape[1:]

    @abc.abstractmethod
    def bytes_of(self, kind: str, shape: tuple[int, int]) -> int:
        """Most memory that the copies of a matrix take."""

    @abc.abstractmethod
    def make(self, kind: str, shape: tuple[int, int]) -> Any:
        """Weights of one shape, with copies enough to be read from memory each time."""

    @abc.abstractmethod
    def cases(self) -> Sequence[Hashable]:
        """The cases of each matrix; those that are compared stand together."""

    def order(self, cases: Sequence[Any], repeat: int) -> Iterator[Any]:
        return alternating(cases, repeat)

    @abc.abstractmethod
    def once(self, chosen: Kernels, weights: Any, case: Any) -> Any:
        """Runs a case once, and returns what `row` is given of it."""

    @abc.abstractmethod
    def row(self, weights: Any, case: Any, taken: Mapping[Any, list[Any]], machine: MachinePeaks) -> Json:
        """A case in the report: `taken` are the results of `once` by case, `machine` its speed meanwhile."""

    @abc.abstractmethod
    def table(self, report: Json) -> Table:
        """The table of a report, whose times are medians."""

    def about(self) -> str:
        """The end of the line under the table."""
        return ""

    def plan(self) -> Json:
        return asdict(self)

    def check(self) -> None:
        for name in self.types:
            if name not in self.known:
                raise UserError(f"bench {self.title} has no type {name!r}; there are {', '.join(self.known)}")
        for kind, shape in itertools.product(self.types, self.all_shapes()):
            block, given = GGML_QUANT_SIZES[GGML[kind]][0], f"{self.shape_option} {shape[0]}x{shape[1]}"
            if any(size % block for size in self.block_lengths(shape)):
                raise UserError(f"{given}: multiples of {block} fit {kind}")
            need_memory(f"{given} in {kind}", self.bytes_of(kind, shape), "give a smaller shape, such as 4096x11008")

    def run(self, out: Console) -> Json:
        """The report: the plan, `rows`, the machine's read bandwidth, and the manifest."""
        chosen = kernels.get(self.backend)
        if self.threads is not None:
            kernels.set_threads(self.threads)
        subjects = [(kind, shape) for kind in self.types for shape in self.all_shapes()]
        total = (self.repeats + 1) * len(self.cases()) * len(subjects)
        buffer, rows, reads = processor.ReadBuffer(), [], []
        with terminal.counting(out, f"timing {self.title}", total) as step:
            for subject in subjects:
                weights, machine = self.make(*subject), MachinePeaks()
                taken = interleaved(
                    {case: partial(self.once, chosen, weights, case) for case in self.cases()},
                    repeats=self.repeats, order=self.order, before=partial(machine.measure, buffer),
                    done=step,
                )  # fmt: skip
                rows += [{"type": subject[0], **self.row(weights, case, taken, machine)} for case in taken]
                reads += machine.read
        return {
            "bench": f"specsparse {self.title}", "backend": chosen.name, "plan": self.plan(), "rows": rows,
            "read_bytes_per_second": summary(reads), "manifest": manifest.build({}, None),
        }  # fmt: skip

    def parts(self, report: Json) -> Iterator[Table | str]:
        """The table, and a line with kernels and machine."""
        yield self.table(report)
        found, read = report["manifest"], report["read_bytes_per_second"]
        yield (
            f"{report['backend']} {found['kernels']['isa']} kernels, {found['kernels']['threads']} threads, "
            f"{found['cpu']['model']}; reads {read['median'] / 1e9:.1f} GB/s "
            f"({read['min'] / 1e9:.1f} to {read['max'] / 1e9:.1f}){self.about()}"
        )


MEMORY, CACHE = "memory", "cache"
_PROMPT = 16  # rows from which on computing takes so long that it does not matter where weights come from


@dataclass(frozen=True, kw_only=True)
class ProductsBench(KernelBench):
    """Products by type of weights: the work of decoding, verifying and prompts.

    Weights come from memory, or from the last cache, which their copies fit. Every time stands beside the machine's
    read bandwidth and multiply-add rate in the same repeat.
    """

    title = "products"
    known = tuple(kind.name for kind in KINDS)
    shape_option = "--shape"

    ns: tuple[int, ...] = (1, 4, 8, 64, 256)  # ascending; 1 first, which v(n) divides by
    repeats: int = 15
    shape: tuple[int, int] = (1536, 1536)  # (rows, columns) of a matrix
    memory_bytes: int = 160 << 20  # least bytes of all copies of a matrix that come from memory
    cache_bytes: int = 20 << 20  # most bytes of those that stay in the last cache

    def all_shapes(self) -> Sequence[tuple[int, int]]:
        return (self.shape,)

    def copies(self, state: str, nbytes: int) -> int:
        if state == MEMORY:
            return bounded(self.memory_bytes, nbytes)
        return min(max(1, self.cache_bytes // nbytes), bounded(self.cache_bytes, nbytes))

    def bytes_of(self, kind: str, shape: tuple[int, int]) -> int:
        each = packed_bytes(kind, *shape)
        copies = max(self.copies(state, each) for state, _ in self.cases())
        return BLOCK_MADE_BYTES * prod(shape) + copies * each + 8 * max(self.ns) * sum(shape)

    def make(self, kind: str, shape: tuple[int, int]) -> list[QTensor]:
        made = random_packed(kind, shape, 1)
        return copies_of(made, max(self.copies(state, made.nbytes) for state, _ in self.cases()))

    def cases(self) -> list[tuple[str, int]]:
        """(where weights come from, rows of activations)."""
        few = [(state, n) for state in (MEMORY, CACHE) for n in self.ns if n <= _PROMPT]
        return few + [(CACHE, n) for n in self.ns if n > _PROMPT]

    def once(self, chosen: Kernels, weights: list[QTensor], case: tuple[str, int]) -> float:
        state, n = case
        return product_seconds(PRODUCTS["product"], weights[: self.copies(state, weights[0].nbytes)], n)

    def row(
        self, weights: list[QTensor], case: tuple[str, int], taken: Mapping[Any, list[float]], machine: MachinePeaks
    ) -> Json:
        (state, n), times, w = case, taken[case], weights[0]
        macs, one = n * prod(w.shape), taken.get((state, 1))
        return {
            "weights": state, "n": n, "ms": summary([1e3 * s for s in times]), "bytes": w.nbytes,
            "v": paired_ratio(times, one) if one else None,
            "share_of_read": paired_ratio([w.nbytes / s for s in times], machine.read),
            "macs_per_second": macs / statistics.median(times),
            "share_of_int8": paired_ratio([macs / s for s in times], machine.int8),
            "read_bytes_per_second": statistics.median(machine.read),
            "int8_macs_per_second": statistics.median(machine.int8),
        }  # fmt: skip

    def table(self, report: Json) -> Table:
        """A row a case; shares are of the machine's rates in the same repeat."""
        columns = ("type", "weights from", "rows", "ms", "v(n)", "GB/s", "of read", "GMAC/s", "of int8")
        made = tables.new(*columns, left=(0, 1), close=True)
        for row in report["rows"]:
            ms, v = row["ms"]["median"], f"{row['v']['median']:.2f}" if row["v"] else ""
            read = (f"{1e-6 * row['bytes'] / ms:.1f}", f"{row['share_of_read']['median']:.0%}")
            int8 = (f"{row['macs_per_second'] / 1e9:.0f}", f"{row['share_of_int8']['median']:.0%}")
            made.add_row(row["type"], row["weights"], str(row["n"]), f"{ms:.3f}", v, *read, *int8)
        return made

    def about(self) -> str:
        return f"; matrices of {self.shape[0]} x {self.shape[1]}"


VARIANTS = ("ffn", "ffn+mlp", "ffn+signbit")
"""Neurons are chosen by an MLP of a rank so small that it costs next to nothing; of the bench's rank; by sign bits."""
_LEAST_RANK = 32
_HEAD = 16  # of attention, which has one
_SEEDS = itertools.count()  # of activations, and so of the neurons that are kept: others in each call


class _FfnWeights(NamedTuple):
    layers: list[Layer]  # the copies, without a predictor
    predictors: dict[str, list[Pytree]]  # of each copy, by variant
    thresholds: dict[tuple[str, float], jax.Array]  # that keep a share of the neurons
    program: Callable  # of a variant


def active_share(report: Json) -> Figure:
    """A panel a type, a line for each number of tokens, over the dense FFN of as many; dashed: the neurons read."""
    plan = report["plan"]
    rows = tuple(
        {
            "type": r["type"], "tokens": r["n"], "active": r["active"], "read": r["neurons_read"] / plan["neurons"],
            "ms": r["ms"]["median"], "value": r["over_dense"]["median"],
            "low": r["over_dense"]["min"], "high": r["over_dense"]["max"],
        }
        for r in report["rows"] if r["what"] == "ffn"
    )  # fmt: skip
    caption = (
        "Time of a layer with a sparse FFN and an MLP of rank 32 as its predictor, over that of the dense one with as "
        "many tokens (medians, whiskers from the fastest to the slowest); dashed: share of the neurons that some token "
        "of the pass keeps, which the time would be if bytes were all."
    )
    title = f"FFN of {plan['width']} x {plan['neurons']}: time against active share"
    return Figure("active_share", title, caption, rows, _draw_shares, size=(4.6 * len(plan["types"]), 4.2))


def _draw_shares(canvas: Canvas, rows: Sequence[Row]) -> None:
    for axes, kind, here in plots.panels(canvas, rows, "type"):
        for n, colour, own in plots.series(here, "tokens", x="active"):
            at, spread = [r["active"] for r in own], list(zip(*map(plots.whiskers, own)))
            axes.errorbar(at, [r["value"] for r in own], spread, color=colour, marker="o", markersize=4, capsize=2,
                          label=f"{n} token{'s' * (n > 1)}")  # fmt: skip
            axes.plot(at, [r["read"] for r in own], color=colour, linestyle="--", linewidth=1)
        axes.axhline(1, color=FAINT, linewidth=0.8)
        axes.set(title=kind, xlabel="active share of the neurons of a token", ylabel="time / dense")
        axes.set_ylim(0)
        plots.legend_below(axes)


@dataclass(frozen=True, kw_only=True)
class FfnBench(KernelBench):
    """One layer, its FFN sparse and dense, by the share of neurons that a token keeps.

    The layer runs as a model's does: in one native call, with attention of one small head, and the predictor's verdict
    is what it computes; so the share is kept on the average. Predictors are random, and rows choose independently.
    """

    title = "ffn"
    known = tuple(sorted(kind.name for kind in SUPPORTED))
    shape_option = "bench ffn"
    figure = staticmethod(active_share)

    shape: tuple[int, int]  # width and neurons, D and F
    active: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 1.0)  # shares of neurons that a token keeps, each in (0, 1]
    ns: tuple[int, ...] = (1, 2, 4, 8)
    types: tuple[str, ...] = ("F16", "Q4_0")  # the predictor's too
    rank: int = 1024  # of the MLP predictor
    repeats: int = 5
    cold_bytes: int = 1 << 30  # least bytes of all copies of the weights together, as far as `bounded` lets them
    backend: str | None = None

    def all_shapes(self) -> Sequence[tuple[int, int]]:
        return (self.shape,)

    def plan(self) -> Json:
        return {**asdict(self), "width": self.shape[0], "neurons": self.shape[1]}

    def block_lengths(self, shape: tuple[int, int]) -> Sequence[int]:
        return (*shape, self.rank)

    def bytes_of(self, kind: str, shape: tuple[int, int]) -> int:
        D, F = shape
        rows, down = packed_bytes(kind, F, D), packed_bytes(kind, D, F)
        predictor = packed_bytes(kind, self.rank, D) + packed_bytes(kind, F, self.rank) + D * F // 8
        each = 4 * rows + down + max(2 * D * F, down) + 2 * predictor  # of a copy; rows of down are F16, Q8_0 or blocks
        return MADE_BYTES * max(D * F, self.rank * max(D, F)) + bounded(self.cold_bytes, 3 * rows) * each

    def make(self, kind: str, shape: tuple[int, int]) -> _FfnWeights:
        D, F = shape
        chosen, rng = kernels.get(self.backend), np.random.default_rng(5)
        query, key, value = (random_packed(kind, (_HEAD, D), seed) for seed in range(3))
        gate, up = (random_packed(kind, (F, D), seed) for seed in (3, 4))
        # What is added is small: thresholds mean the same in each copy as long as the residual stays as large as it is.
        down = pack_qtensor(random_quantised(GGML[kind], D, F, 5, std=2e-4, edges=False), GGML[kind], (D, F))
        output = pack_float(jnp.full((D, _HEAD), 1e-3, jnp.float32), "f16")
        norm = jnp.ones((D,), jnp.float32)
        layer = Layer(norm, query, key, value, output, norm, gate, up, down, biases={})
        config = self._config(1)
        ffn = FFN.from_config(config, chosen)
        codes = settled(Mlp(ffn), layer).codes

        def mlp(rank: int) -> Factors:
            fc1, fc2 = (rng.normal(size=size).astype(np.float32) for size in ((rank, D), (F, rank)))
            # Without its mean: what all ReLUs have in common would choose the same neurons for all rows.
            return mlp_weights(fc1, fc2 - fc2.mean(axis=1, keepdims=True), codes=codes)

        signs = SignBitWeights(pack_signs(rng.normal(size=(F, D)).astype(np.float32)), jnp.float32(0))
        own = dict(zip(VARIANTS, (mlp(_LEAST_RANK), mlp(self.rank), signs), strict=True))
        x, _ = random_rows(64, D, 7)
        thresholds = {
            (name, share): self._predictor(name, ffn, share=share).on_text(own[name], layer, x).threshold
            for name, share in itertools.product(VARIANTS, self.active)
        } | {(name, 1.0): jnp.float32(-jnp.inf) for name in VARIANTS}
        params = Params(gate, (layer,), norm, gate)
        masked = maskable(params, config, chosen, Mlp(ffn))
        (layer,) = by_neuron(params, [None], masked=masked).layers
        count = bounded(self.cold_bytes, sum(m.nbytes for m in layer.dense if m is not None))
        copies = copies_of((layer, own), count)
        predictors = {name: [of_copy[name] for _, of_copy in copies] for name in VARIANTS}
        programs = {name: self._program(name, count, chosen) for name in ("dense", *VARIANTS)}
        return _FfnWeights([layer for layer, _ in copies], predictors, thresholds, programs.__getitem__)

    def _config(self, layers: int) -> ModelConfig:
        D, F = self.shape
        return ModelConfig("llama", layers, D, 1, 1, _HEAD, F, 1, max(self.ns), 1e-5, RopeConfig(1e4, _HEAD, "norm"))

    @staticmethod
    def _predictor(name: str, ffn: FFN, **options: Any) -> SignBit | Mlp:
        return SignBit(ffn, **options) if name == "ffn+signbit" else Mlp(ffn, **options)

    def _program(self, name: str, layers: int, chosen: Kernels) -> Callable:
        """(params, x_RD, cache, n_valid_B) -> (x_RD, `SparseStats` or None)."""
        config = self._config(layers)
        predictor = self._predictor(name, FFN.from_config(config, chosen))
        run = make_layers(config, chosen, None if name == "dense" else make_ffn(config, chosen, predictor))

        def program(params, x_RD, cache, n_valid_B):
            x_RD, _, stats, *_ = run(params, x_RD, cache, n_valid_B, None, range(layers))
            return x_RD, stats

        return jax.jit(program)

    def cases(self) -> list[tuple[int, float, str]]:
        """(tokens, share, program); the dense one has share 1."""
        sparse = list(itertools.product(self.active, VARIANTS))
        return [(n, share, program) for n in self.ns for share, program in [(1.0, "dense"), *sparse]]

    def once(self, chosen: Kernels, weights: _FfnWeights, case: tuple[int, float, str]) -> tuple[float, float, float]:
        """Seconds of a layer, and the means over the copies of the neurons that a row keeps and that all rows read."""
        n, share, name = case
        (D, F), count = self.shape, len(weights.layers)
        layers = weights.layers
        if name != "dense":
            kept = [w._replace(threshold=weights.thresholds[name, share]) for w in weights.predictors[name]]
            sparse = [layer.sparse._replace(predictor=w) for layer, w in zip(layers, kept, strict=True)]
            layers = [layer._replace(sparse=w) for layer, w in zip(layers, sparse, strict=True)]
        cache = init(layers=count, batch=1, kv_heads=1, capacity=max(self.ns), head_dim=_HEAD)
        cos, sin = map(jnp.asarray, model_tables(self._config(count).ropes, cache.capacity))
        params = Params(layers[0].attn_q, tuple(layers), cos, layers[0].attn_q, cos, sin)  # the layers alone are read
        x, n_valid = random_rows(n, D, [next(_SEEDS), n])
        start = time.perf_counter()
        _, stats = jax.block_until_ready(weights.program(name)(params, x, cache, n_valid))
        spent = (time.perf_counter() - start) / count
        if stats is None:
            return spent, F, F
        return spent, float(np.mean(stats.kept)), float(np.mean(stats.union))

    def row(
        self, weights: _FfnWeights, case: tuple[int, float, str], taken: Mapping[Any, list[tuple[float, float, float]]],
        machine: MachinePeaks,
    ) -> Json:  # fmt: skip
        (n, share, name), layer, (D, F) = case, weights.layers[0], self.shape
        times, dense = ([s for s, *_ in taken[key]] for key in (case, (n, 1.0, "dense")))
        kept, neurons = (float(np.mean([of[i] for of in taken[case]])) for i in (1, 2))
        w, union, ms = layer.sparse, neurons / F, summary([1e3 * s for s in times])
        if name == "dense" or runs_densely(w, n, kept / F):
            path, nbytes = "dense", sum(m.nbytes for m in layer.dense if m is not None)
        elif w.blocks is None:
            path, nbytes = "rows", union * (w.gate.nbytes + w.up.nbytes + w.down_t.nbytes)
        else:  # of a block's scales all, unless it has no neuron
            down = union * D * F // 2 + (1 - (1 - union) ** BLOCK) * (w.blocks.nbytes - D * F // 2)
            path, nbytes = "neurons", union * (w.gate.nbytes + w.up.nbytes) + down
        if name != "dense":
            nbytes += sum(leaf.nbytes for leaf in jax.tree.leaves(weights.predictors[name][0]))
        return {
            "n": n, "active": share, "what": name, "path": path, "ms": ms, "over_dense": paired_ratio(times, dense),
            "kept": kept, "neurons_read": neurons, "bytes": nbytes, "bytes_per_second": 1e3 * nbytes / ms["median"],
            "over_bandwidth": ms["median"] / (1e3 * nbytes / statistics.median(machine.read)),
        }  # fmt: skip

    def table(self, report: Json) -> Table:
        """A row a type, number of tokens and active share.

        "path" is what the call took: the rows of single neurons, neurons under a mask on the dense matrices, or these.
        "union" is the neurons that some token keeps, "of bandwidth" the share of the measured read bandwidth; the last
        three columns are times over the dense layer of as many tokens, making the mask among them: by next to no
        predictor, by the MLP, by sign bits.
        """
        columns = ("type", "tokens", "active", "kept", "union", "path", "ms", "GB/s", "of bandwidth", "x dense", "+mlp",
                   "+signbit")  # fmt: skip
        made, plan = tables.new(*columns, close=True), report["plan"]
        rows = {(r["type"], r["n"], r["active"], r["what"]): r for r in report["rows"]}
        for kind, n, share in itertools.product(plan["types"], plan["ns"], (None, *plan["active"])):
            programs = ("dense",) if share is None else VARIANTS
            row, *_ = found = [rows[kind, n, 1.0 if share is None else share, name] for name in programs]
            ratios = [f"{r['over_dense']['median']:.2f}" for r in found] + [""] * (3 - len(found))
            shares = [f"{row[key] / plan['neurons']:.1%}" for key in ("kept", "neurons_read")]
            rates = (f"{row['bytes_per_second'] / 1e9:.1f}", f"{1 / row['over_bandwidth']:.0%}")
            cells = (*shares, row["path"], f"{row['ms']['median']:.3f}", *rates, *ratios)
            made.add_row(kind, str(n), "dense" if share is None else f"{share:.0%}", *cells)
        return made

    def about(self) -> str:
        return f"; {self.shape[0]}x{self.shape[1]}, predictor rank {self.rank}"


@dataclass(frozen=True, kw_only=True)
class ExpertsBench(KernelBench):
    """The experts of a layer by rows of a pass, each of which chooses its own at random.

    Bytes are those of the experts that some row chose; what they predict, time over that of one row, stands beside what
    was measured.
    """

    title = "experts"
    known = tuple(sorted(kind.name for kind in SUPPORTED))
    shape_option = "--shape"

    shape: tuple[int, int] = (1536, 768)  # width and neurons of an expert, D and F
    experts: int = 32
    chosen: int = 4  # of each row
    idle: float = 0.0  # share of neurons that a row's gate closes, which are then left out and read in turn
    ns: tuple[int, ...] = (1, 2, 4, 8)  # ascending; 1 first, which v(n) divides by
    types: tuple[str, ...] = ("Q4_0",)
    repeats: int = 15
    memory_bytes: int = 512 << 20  # least bytes of all copies of the layer

    def all_shapes(self) -> Sequence[tuple[int, int]]:
        return (self.shape,)

    def block_lengths(self, shape: tuple[int, int]) -> Sequence[int]:
        return shape

    def check(self) -> None:
        idle = f"--idle {self.idle}: from 0.5 on, as half of random neurons are idle, and with Q4_0 alone"
        refuse({
            f"--chosen {self.chosen}: a row chooses at most --experts {self.experts}": self.chosen > self.experts,
            "--widths: v(n) divides by the time of one row: begin with 1": self.ns[0] != 1,
            idle: self.idle and (self.types != ("Q4_0",) or self.idle < 0.5),
        })  # fmt: skip
        super().check()

    def bytes_of(self, kind: str, shape: tuple[int, int]) -> int:
        D, F = shape
        each = self.experts * (2 * packed_bytes(kind, F, D) + packed_bytes(kind, D, F))
        return MADE_BYTES * D * F + each + bounded(self.memory_bytes, each) * each * (2 if self.idle else 1)

    def make(self, kind: str, shape: tuple[int, int]) -> list[Experts]:
        (D, F), rng = shape, np.random.default_rng(0)
        gated = rng.random((F, 1)) >= 2 * self.idle - 1  # half of these are idle; a gate of zeros always is

        def matrices(rows: int, cols: int, seed: int) -> QTensor:
            raw = random_raw(kind, rows, cols, seed)
            one = pack_qtensor(raw * gated if seed == 0 else raw, GGML[kind], (rows, cols))
            data = aligned_empty(self.experts, *one.data.shape)
            data[...] = np.asarray(one.data)
            return replace(one, data=jax.device_put(data))

        made = Experts(matrices(F, D, 0), matrices(F, D, 1), matrices(D, F, 2), "relu")
        made = skipping(made) if self.idle else made
        return copies_of(made, bounded(self.memory_bytes, _bytes_of(made)))

    def cases(self) -> Sequence[tuple[int, bool]]:
        """(rows, whether idle neurons are left out)."""
        return list(itertools.product(self.ns, (False, True) if self.idle else (False,)))

    def once(self, chosen: Kernels, weights: list[Experts], case: tuple[int, bool]) -> tuple[float, float]:
        """Seconds of a layer, and the experts that it read on average."""
        (n, skip), seed = case, next(_SEEDS)
        rng, x = np.random.default_rng([seed, n]), random_rows(n, self.shape[0], [seed, n])[0]
        weights = weights if skip else [replace(layer, skip=None) for layer in weights]
        order = rng.random((len(weights), n, self.experts)).argsort(axis=-1)[..., : self.chosen].astype(np.int32)
        routed = jax.block_until_ready((jnp.asarray(order), jnp.full(order.shape[1:], 1 / self.chosen, jnp.float32)))
        spent = seconds(lambda: jax.block_until_ready(_through_experts(chosen)(weights, x, *routed))) / len(weights)
        return spent, float(np.mean([len(np.unique(layer)) for layer in order]))

    def row(
        self, weights: list[Experts], case: tuple[int, bool], taken: Mapping[Any, list[tuple[float, float]]],
        machine: MachinePeaks,
    ) -> Json:  # fmt: skip
        (n, skip), each = case, _bytes_of(weights[0]) / self.experts
        results = (taken[key] for key in (case, (self.ns[0], skip), (n, False)))
        (times, woken), (one, woken_by_one), (whole, _) = (zip(*found, strict=True) for found in results)
        predicted = [a / b for a, b in zip(woken, woken_by_one, strict=True)]
        v = [a / b for a, b in zip(times, one, strict=True)]
        rates = [each * w / s for w, s in zip(woken, times, strict=True)]
        return {
            "n": n, "skip": skip, "woken": summary(woken), "bytes": each * statistics.fmean(woken),
            "ms": summary([1e3 * s for s in times]), "share_of_read": paired_ratio(rates, machine.read),
            "v": summary(v), "v_over_bytes": paired_ratio(v, predicted), "over_reading_all": paired_ratio(times, whole),
        }  # fmt: skip

    def table(self, report: Json) -> Table:
        """A row a case.

        Rates are of the experts that were chosen, whole; "/ bytes" is v(n) over what their bytes predict, "x all" time
        over that of leaving nothing out.
        """
        columns = ("type", "rows", "idle", "experts", "ms", "GB/s", "of read", "v(n)", "/ bytes", "x all")
        made = tables.new(*columns, left=(0, 2), close=True)
        for row in report["rows"]:
            ms = row["ms"]["median"]
            medians = (f"{row[name]['median']:.2f}" for name in ("v", "v_over_bytes", "over_reading_all"))
            rates = (f"{ms:.3f}", f"{1e-6 * row['bytes'] / ms:.1f}", f"{row['share_of_read']['median']:.0%}")
            idle = "left out" if row["skip"] else "read"
            made.add_row(row["type"], str(row["n"]), idle, f"{row['woken']['mean']:.1f}", *rates, *medians)
        return made

    def about(self) -> str:
        return f"; {self.experts} experts of {self.shape[0]}x{self.shape[1]}, {self.chosen} of each row"


def _bytes_of(layer: Experts) -> int:
    return layer.gate.nbytes + layer.up.nbytes + layer.down.nbytes


@functools.cache
def _through_experts(chosen: Kernels) -> Callable:
    """A program of (layers, x_nD, chosen_Lnk, weights_nk) that returns x_nD."""

    def run(layers, x, choices, weights):
        for layer, choice in zip(layers, choices, strict=True):
            x = x + chosen.experts(x, choice, weights, layer)
        return x

    return jax.jit(run)


class LutCase(NamedTuple):
    n: int  # tokens
    state: str  # "cold" or "warm"
    kernel: str  # a key of `PRODUCTS`


class LutCopies(NamedTuple):
    """Copies of one matrix as the product and as the tables read it."""

    codes: list[QTensor]
    planes: list[BitPlanes]
    dense: np.ndarray  # float64, its first rows

    def read_by(self, case: LutCase) -> Sequence[QTensor | BitPlanes]:
        """The matrices that the calls of a case read, one after the other."""
        found = self.codes if case.kernel == "product" else self.planes
        return found if case.state == "cold" else [found[0]] * len(found)


@dataclass(frozen=True, kw_only=True)
class LutBench(KernelBench):
    """Look-up tables of sums beside integer products, for matrices of four-bit weights.

    A matrix is cold if several copies are gone through in turn, and warm if one is used again and again, from the cache
    if it fits.
    """

    title = "lut"
    known = ("Q4_0", "Q4_1")
    shape_option = "--shapes"

    ns: tuple[int, ...] = (1, 4)
    types: tuple[str, ...] = known
    repeats: int = 5
    shapes: tuple[tuple[int, int], ...] = ((2048, 2048), (4096, 11008))  # (rows, columns) of the matrices
    cold_bytes: int = 256 << 20  # least bytes of all copies of a matrix together; a warm one is used as often

    def all_shapes(self) -> Sequence[tuple[int, int]]:
        return self.shapes

    def copies(self, nbytes: int) -> int:
        return min(256, -(-self.cold_bytes // nbytes))

    def bytes_of(self, kind: str, shape: tuple[int, int]) -> int:
        each = packed_bytes(kind, *shape)
        return BLOCK_MADE_BYTES * prod(shape) + 2 * self.copies(each) * each  # both kernels' own

    def make(self, kind: str, shape: tuple[int, int]) -> LutCopies:
        raw = random_raw(kind, *shape, 1)
        codes = pack_qtensor(raw, GGML[kind], shape)
        count, dense = self.copies(codes.nbytes), dequantize(raw[:64], GGML[kind]).astype(np.float64)
        return LutCopies(copies_of(codes, count), copies_of(pack_planes(codes), count), dense)

    def cases(self) -> list[LutCase]:
        return [LutCase(*case) for case in itertools.product(self.ns, ("cold", "warm"), PRODUCTS)]

    def order(self, cases: Sequence[LutCase], repeat: int) -> Iterator[LutCase]:
        """Each time another kernel in front: who comes first finds other things in the cache."""
        count = len(PRODUCTS)
        for start in range(0, len(cases), count):
            for i in range(count):
                yield cases[start + (i + repeat) % count]

    def once(self, chosen: Kernels, weights: LutCopies, case: LutCase) -> float:
        return product_seconds(PRODUCTS[case.kernel], weights.read_by(case), case.n)

    def row(self, weights: LutCopies, case: LutCase, taken: Mapping[Any, list[float]], machine: MachinePeaks) -> Json:
        """ "relative_error" is the root of the mean square error over that of the exact product."""
        w, ms = weights.codes[0], summary([1e3 * s for s in taken[case]])
        x, n_valid = random_rows(case.n, w.shape[1], case.n)
        got = np.asarray(PRODUCTS[case.kernel](weights.read_by(case)[:1], x, n_valid))
        exact = np.asarray(x, np.float64) @ weights.dense.T
        error = np.sqrt(np.mean((got[:, : exact.shape[1]] - exact) ** 2) / np.mean(exact**2))
        return {
            "rows": w.shape[0], "cols": w.shape[1], **case._asdict(), "ms": ms,
            "bytes": w.nbytes, "bytes_per_second": w.nbytes / (1e-3 * ms["median"]),
            "over_product": paired_ratio(taken[case], taken[case._replace(kernel="product")]),
            "relative_error": float(error),
        }  # fmt: skip

    def table(self, report: Json) -> Table:
        """A row a case.

        "x product" is time over that of the product kernel, so above 1 is slower; "error" is relative to the product of
        the same weights with activations that are not rounded.
        """
        columns = ("type", "matrix", "tokens", "weights", "kernel", "ms", "GB/s", "x product", "±", "error")
        made = tables.new(*columns, left=(0, 1, 3, 4), close=True)
        for row in report["rows"]:
            ratio, matrix = row["over_product"], f"{row['rows']}x{row['cols']}"
            kernel = row["kernel"] if row["kernel"] == "product" else f"tables, {row['kernel']}"
            rates = (f"{row['ms']['median']:.3f}", f"{row['bytes_per_second'] / 1e9:.1f}")
            ratios = (f"{ratio['median']:.2f}", f"{ratio['sd']:.2f}", f"{row['relative_error']:.2%}")
            made.add_row(row["type"], matrix, str(row["n"]), row["state"], kernel, *rates, *ratios)
        return made
