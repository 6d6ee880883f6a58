"""The neurons or experts on the accelerator: four rules, the time per token that each predicts, and PowerInfer's file.

A forward pass reads a neuron with a probability that the profiler counted. With m the hot and M the whole mass of a
layer (sums of those probabilities), s the bytes of a neuron and B a device's bandwidth, an FFN takes

    hot  = call + s m / B_hot                              if there is a hot neuron; s |hot| / B_hot for hot=dense
    cold = call + s (M - m) / B_cold + exchange            if there is a cold one
    hot  = s m / B_hot                                     if all are hot: the FFN is not split, as in a whole layer
    exchange = 2 latency + bytes / B_link                  residual and mask there, partial sum back

and max(hot, cold) if the devices overlap, else hot + cold. PowerInfer (arXiv:2312.12456, section 6) puts the same
quantities into an integer program; its released solver leaves bandwidth and exchange out. Of a model with experts an
expert stands for a neuron everywhere here: it is read with the probability that some row chooses it.

**The optimum.** For a given number of hot neurons k of a layer the time depends on their mass m alone. Up to the mass
at which both devices take equally long, more mass is less time, so the k hottest are best. A layer is thus a menu of
(bytes, seconds), one item for each allowed k, and the whole a multiple-choice knapsack, which a table over the budget
solves exactly. Beyond that balance colder neurons could serve a little better than the hottest; `bound_s` counts that
in: it is the linear relaxation over menus in which every mass up to that of the k hottest may be had, so that no choice
of neurons in multiples of the granularity is faster.
"""

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType

from specsparse.engine.config import EXPERTS, ROUTER, ModelConfig
from specsparse.engine.gguf.reader import MAGIC, POWERINFER_MAGIC, GGUFFile, model_digest, open_gguf
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.errors import UserError

GRANULARITY = 256
"""Hot neurons of a layer come in multiples of this: what PowerInfer's CUDA kernels ask for."""
_CELLS = 1 << 18  # cells of the table over the budget at most; sizes are rounded up to a coarser unit to keep to it
_COUNTED = {2: 2.0, 3: 4.5}
"""Matrices of an FFN -> c; PowerInfer counts 4 neurons as c F elements (llama.cpp:3115), not as those they have."""
_NEURONS = ("ffn_gate", "ffn_up", "ffn_down", "ffn_down_t", *EXPERTS)
_PREDICTOR = ("fc1", "fc2", ROUTER)
_KV_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32}


@dataclass(frozen=True)
class Hardware:
    """Two devices and their link. Bandwidths are bytes per second, above 0."""

    hot_bandwidth: float
    cold_bandwidth: float
    link_bandwidth: float
    latency_s: float = 0.0  # seconds of a transfer of nothing
    call_s: float = 0.0  # seconds that starting one device's part of an FFN takes
    overlap: bool = True  # both parts of an FFN run at the same time


@dataclass(frozen=True, eq=False)
class Problem:
    """A model, its activations, two devices and a budget."""

    read: tuple[np.ndarray, ...]  # L arrays f64[F], the probability that a forward pass reads a neuron
    neuron_bytes: tuple[int, ...]  # L, bytes of one neuron's rows of gate, up and down
    dense_bytes: tuple[int, ...]  # L, bytes of a layer's attention, norms and predictor
    cache_bytes: int  # bytes of one layer's keys and values
    output_bytes: int  # of the output matrix and its norm
    exchange_bytes: int  # sent both ways for the FFN of a layer with cold neurons
    border_bytes: int  # sent if a layer runs on another device than the one before it
    width: int  # D
    budget: int  # bytes of the accelerator for all of this
    hardware: Hardware
    matrices: int = 3  # of the FFN: 3, or 2 without a gate
    granularity: int = GRANULARITY  # hot neurons of a layer are a multiple of this, or all
    dense_hot: bool = False  # hot neurons are all computed (hot=dense), not the predicted ones alone

    def __post_init__(self):
        assert len(self.read) == len(self.neuron_bytes) == len(self.dense_bytes) >= 1

    @property
    def layers(self) -> int:
        return len(self.read)

    @property
    def layer_bytes(self) -> list[int]:
        """L, bytes of a whole layer with its cache."""
        sizes = zip(self.dense_bytes, self.neuron_bytes, self.read, strict=True)
        return [dense + neuron * len(read) + self.cache_bytes for dense, neuron, read in sizes]

    @property
    def reserved_bytes(self) -> int:
        """Bytes on the accelerator before any neuron: dense parts, output and cache."""
        return sum(self.dense_bytes) + self.layers * self.cache_bytes + self.output_bytes

    @property
    def neuron_budget(self) -> int:
        """Bytes left for hot neurons; 0 if not even the reserved ones fit, as in PowerInfer."""
        return max(self.budget - self.reserved_bytes, 0)

    def ranked(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Neurons int64[F], the hottest first, equal ones by index; and the allowed numbers of hot neurons int64[],
        multiples of the granularity, and all."""
        read = self.read[layer]
        counts = np.append(np.arange(0, len(read), self.granularity), len(read))
        return np.argsort(-read, kind="stable"), counts

    def ffn_seconds(self, layer: int, count, mass):
        """Seconds of a layer's FFN with `count` hot neurons of that mass; numbers or arrays."""
        hot, cold = self.part_seconds(layer, count, mass)
        return np.maximum(hot, cold) if self.hardware.overlap else hot + cold

    def part_seconds(self, layer: int, count, mass):
        """(hot, cold) seconds of a layer's FFN, one beside the other."""
        h, size, total = self.hardware, self.neuron_bytes[layer], float(self.read[layer].sum())
        exchange = 2 * h.latency_s + self.exchange_bytes / h.link_bandwidth
        read = np.asarray(count if self.dense_hot else mass, np.float64)
        count, all_hot = np.asarray(count), len(self.read[layer])
        hot = np.where(count > 0, np.where(count < all_hot, h.call_s, 0.0) + size * read / h.hot_bandwidth, 0.0)
        cold = h.call_s + size * np.maximum(total - mass, 0.0) / h.cold_bandwidth + exchange
        return hot, np.where(count < all_hot, cold, 0.0)


@dataclass(frozen=True)
class ModelParts:
    """Bytes of a model's parts, L of each but the last two."""

    attention: tuple[int, ...]  # with its norm and biases
    predictors: tuple[int, ...]  # or routers of experts; 0 if the file has none
    norms: tuple[int, ...]  # of the FFN
    neurons: tuple[int, ...]  # of all neurons' rows
    output: int  # matrix and norm; the embedding itself if the two are tied
    cache: int  # keys and values of one layer

    @staticmethod
    def from_gguf(f: GGUFFile, config: ModelConfig, *, context: int, kv_dtype: str = "f16") -> "ModelParts":
        """The parts of an open file, with a cache of `context` positions."""

        def each(wanted: Callable[[str], bool]) -> tuple[int, ...]:
            sizes = [0] * config.n_layers
            for name, t in f.tensors.items():
                block, *rest = name.split(".")
                if block == "blk" and wanted(rest[1]):
                    sizes[int(rest[0])] += t.nbytes
            return tuple(sizes)

        tied = "output.weight" not in f.tensors
        output = ("output_norm.weight", "token_embd.weight" if tied else "output.weight")
        return ModelParts(
            attention=each(lambda n: n.startswith("attn")),
            predictors=each(_PREDICTOR.__contains__),
            norms=each("ffn_norm".__eq__),
            neurons=each(_NEURONS.__contains__),
            output=sum(f.tensors[n].nbytes for n in output if n in f.tensors),
            cache=int(2 * config.n_kv_heads * config.head_dim * context * _KV_BYTES[kv_dtype]),
        )

    def in_order(self) -> dict[str, int]:
        """Bytes of the whole model by part, in the order in which PowerInfer fills the accelerator."""
        return {
            "attention": sum(self.attention),
            "predictors": sum(self.predictors),
            "FFN norms": sum(self.norms),
            "output": self.output,
            "cache": self.cache * len(self.attention),
            "neurons": sum(self.neurons),
        }

    def problem(
        self, config: ModelConfig, read: Sequence[np.ndarray], *, budget: int, hardware: Hardware,
        granularity: int = GRANULARITY, dense_hot: bool = False, rows: int = 1,
    ) -> Problem:  # fmt: skip
        """The problem for a budget in bytes and passes of `rows` tokens; `read` is of `profiler.probabilities`."""
        width, mask = config.d_model, len(read[0])
        return Problem(
            read=tuple(read),
            neuron_bytes=tuple(-(-n // len(own)) for n, own in zip(self.neurons, read, strict=True)),
            dense_bytes=tuple(map(sum, zip(self.attention, self.predictors, self.norms, strict=True))),
            cache_bytes=self.cache,
            output_bytes=self.output,
            exchange_bytes=rows * (2 * 4 * width + mask),
            border_bytes=rows * 4 * width,
            width=width,
            budget=budget,
            hardware=hardware,
            matrices=3 if config.gated else 2,
            granularity=granularity,
            dense_hot=dense_hot,
        )


@dataclass(frozen=True, eq=False)
class Placement:
    """An answer to a `Problem`."""

    rule: str  # that made it
    hot: tuple[np.ndarray, ...]  # L masks bool[F], true on the accelerator
    seconds: float  # expected for a forward pass
    bytes_on_device: int  # of everything that lies there
    # no placement by neuron at this granularity can be faster (whole layers can: with a layer goes its attention);
    # None if the rule proves nothing
    bound_s: float | None = None
    # layers that run on the host altogether, attention too
    host_layers: frozenset[int] = field(default_factory=frozenset)
    output_on_host: bool = False  # whether the output matrix does

    @property
    def hot_neurons(self) -> int:
        return int(sum(h.sum() for h in self.hot))

    def hot_share(self, problem: Problem) -> float:
        """Share of the neurons read that are hot ones."""
        total = sum(float(p.sum()) for p in problem.read)
        mass = sum(float(p[h].sum()) for p, h in zip(problem.read, self.hot, strict=True))
        return mass / total if total else 0.0

    def seconds_of(self, problem: Problem) -> float:
        """Expected for another problem of the same model, such as passes of more rows."""
        if self.rule == layers.__name__:
            count = problem.layers - len(self.host_layers)
            return layers_placed(problem, count, output=not self.output_on_host).seconds
        return neurons_placed(self.rule, problem, self.hot).seconds


def neurons_placed(rule: str, problem: Problem, hot: tuple[np.ndarray, ...], *, bound_s=None) -> Placement:
    """The placement of these neurons, everything else on the accelerator."""
    h, seconds = problem.hardware, 0.0
    for i, mask in enumerate(hot):
        seconds += float(problem.ffn_seconds(i, int(mask.sum()), float(problem.read[i][mask].sum())))
    seconds += (sum(problem.dense_bytes) + problem.output_bytes) / h.hot_bandwidth
    size = problem.reserved_bytes + sum(s * int(m.sum()) for s, m in zip(problem.neuron_bytes, hot, strict=True))
    return Placement(rule, hot, seconds, size, bound_s)


def layers_placed(problem: Problem, count: int, *, output: bool) -> Placement:
    """llama.cpp's offload: the last `count` layers on the accelerator, the others on the host, one after another."""
    h, first = problem.hardware, problem.layers - count
    seconds, size = problem.output_bytes / (h.hot_bandwidth if output else h.cold_bandwidth), 0
    layer_bytes = problem.layer_bytes  # a property that sums
    for i in range(problem.layers):
        read = problem.dense_bytes[i] + problem.neuron_bytes[i] * float(problem.read[i].sum())
        seconds += read / (h.cold_bandwidth if i < first else h.hot_bandwidth)
        if i >= first:
            size += layer_bytes[i]
    if 0 < count < problem.layers or (count and not output):
        seconds += h.latency_s + problem.border_bytes / h.link_bandwidth
    hot = tuple(np.full(len(p), i >= first) for i, p in enumerate(problem.read))
    size += problem.output_bytes if output else 0
    return Placement("layers", hot, seconds, size, None, frozenset(range(first)), not output)


def optimal(problem: Problem) -> Placement:
    """The fastest placement within the budget: exact over the hottest neurons of each layer."""
    menus = [_menu(problem, i) for i in range(problem.layers)]
    counts = _knapsack(menus, problem.neuron_budget)
    hot = tuple(_hottest(problem, i, int(menus[i][0][k])) for i, k in enumerate(counts))
    rest = (sum(problem.dense_bytes) + problem.output_bytes) / problem.hardware.hot_bandwidth
    relaxed = [_menu(problem, i, relaxed=True) for i in range(problem.layers)]
    return neurons_placed("optimal", problem, hot, bound_s=rest + _relaxation(relaxed, problem.neuron_budget))


def powerinfer(problem: Problem) -> Placement:
    """PowerInfer's solver: buckets of neurons, those with the largest sum of frequencies first, whatever the layer.

    Its capacity formula stands, but is never more than fits; its mix-up of layers with more than ten is left out.
    """
    size, d_ff = max(problem.neuron_bytes), max(len(p) for p in problem.read)
    element = size / (problem.matrices * problem.width)
    capacity = int(problem.neuron_budget / (d_ff * element * _COUNTED[problem.matrices])) * 4
    capacity = min(capacity, problem.neuron_budget // size)
    buckets = []
    for i in range(problem.layers):
        order, counts = problem.ranked(i)
        for first, last in pairwise(counts):
            buckets.append((-float(problem.read[i][order[first:last]].sum()), i, int(last - first)))
    taken = [0] * problem.layers
    for _, i, count in sorted(buckets)[: capacity // problem.granularity]:
        taken[i] += count
    return neurons_placed("powerinfer", problem, tuple(_hottest(problem, i, k) for i, k in enumerate(taken)))


def layers(problem: Problem, *, n_gpu_layers: int | None = None) -> Placement:
    """llama.cpp's offload of the last layers, and of the output with one more; None is as many as fit. UserError: more
    layers than the budget holds."""
    most, left = 0, problem.budget
    for size in (*reversed(problem.layer_bytes), problem.output_bytes):
        left -= size
        if left < 0:
            break
        most += 1
    wanted = most if n_gpu_layers is None else n_gpu_layers
    if min(wanted, problem.layers + 1) > most:
        raise UserError(f"n_gpu_layers={wanted}: {most} fit the budget; give that many or a larger vram_budget")
    return layers_placed(problem, min(wanted, problem.layers), output=wanted > problem.layers)


def none(problem: Problem) -> Placement:
    """No hot neurons; the dense parts stay on the accelerator (PowerInfer's --disable-gpu-index)."""
    return neurons_placed("none", problem, tuple(np.zeros(len(p), bool) for p in problem.read))


RULES: dict[str, Callable[..., Placement]] = {rule.__name__: rule for rule in (optimal, powerinfer, layers, none)}


def _hottest(problem: Problem, layer: int, count: int) -> np.ndarray:
    mask = np.zeros(len(problem.read[layer]), bool)
    mask[problem.ranked(layer)[0][:count]] = True
    return mask


def _menu(problem: Problem, layer: int, *, relaxed: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(counts, bytes, seconds) of every allowed number of hot neurons.

    If `relaxed`, the seconds are those at the best mass up to that of the hottest: at the ends, or where both devices
    take equally long.
    """
    order, counts = problem.ranked(layer)
    mass = np.concatenate([[0.0], np.cumsum(problem.read[layer][order])])[counts]
    sizes, at_all = counts * problem.neuron_bytes[layer], problem.ffn_seconds(layer, counts, mass)
    if not relaxed or problem.dense_hot:
        return counts, sizes, at_all
    at_none = problem.ffn_seconds(layer, counts, np.zeros_like(mass))
    hot, cold = problem.part_seconds(layer, counts, np.zeros_like(mass))
    h, size = problem.hardware, problem.neuron_bytes[layer]
    level = (cold - hot) / (size / h.hot_bandwidth + size / h.cold_bandwidth)
    balanced = problem.ffn_seconds(layer, counts, np.clip(level, 0.0, mass))
    best = np.minimum(np.minimum(at_none, at_all), balanced)
    return counts, sizes, np.where(counts < len(problem.read[layer]), best, at_all)  # all neurons have all the mass


def _knapsack(menus, budget: int) -> list[int]:
    """An item of each menu, of least time in all among those that fit."""
    unit = math.gcd(*(int(size) for _, sizes, _ in menus for size in sizes)) or 1
    budget = min(budget, sum(int(sizes[-1]) for _, sizes, _ in menus))
    unit = max(unit, -(-budget // _CELLS))
    cells = budget // unit
    best, chosen = np.zeros(cells + 1), []
    for _, sizes, seconds in menus:
        weights = -(-sizes // unit)
        new = np.full(cells + 1, np.inf)
        choice = np.zeros(cells + 1, np.int32)
        for k, (weight, cost) in enumerate(zip(weights, seconds, strict=True)):
            if weight > cells:
                break
            candidate = best[: cells + 1 - weight] + cost
            better = candidate < new[weight:]
            new[weight:][better] = candidate[better]
            choice[weight:][better] = k
        best = new
        chosen.append((weights, choice))
    out, left = [], cells
    for weights, choice in reversed(chosen):
        out.append(int(choice[left]))
        left -= int(weights[out[-1]])
    return out[::-1]


def _relaxation(menus, budget: int) -> float:
    """The least time if fractions of items may be mixed: along each menu's lower hull, the steepest edge first."""

    def slope(a: tuple[int, float], b: tuple[int, float]) -> float:
        return (b[1] - a[1]) / (b[0] - a[0])

    total, edges = 0.0, []
    for _, sizes, seconds in menus:
        hull = [(int(sizes[0]), float(seconds[0]))]
        for point in zip(sizes[1:].tolist(), seconds[1:].tolist()):
            while len(hull) > 1 and slope(hull[-2], hull[-1]) >= slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        total += hull[0][1]
        edges += [(slope(a, b), b[0] - a[0]) for a, b in pairwise(hull) if b[1] < a[1]]
    for steepness, size in sorted(edges):
        part = min(size, budget)
        total, budget = total + steepness * part, budget - part
    return total


# -- PowerInfer's file of a placement --

ARCHITECTURE = "generic.gpu_index"
_BLOCKS = f"{ARCHITECTURE}.block_count"
_CAPACITY = "split.vram_capacity"
_MODEL, _PROBLEM = "specsparse.model", "specsparse.problem"  # keys of our own, which PowerInfer does not look at


def path_for(model: str | os.PathLike[str]) -> Path:
    """The place where PowerInfer looks for the file that belongs to a model."""
    return Path(f"{os.fspath(model)}.generated.gpuidx")


@dataclass(frozen=True, eq=False)
class GpuIndex:
    """A placement as PowerInfer's `*.generated.gpuidx` holds it."""

    hot: tuple[np.ndarray, ...]  # L masks bool[F], true on the GPU
    vram_capacity: int  # bytes it was made for; PowerInfer reads the file only with at least that budget
    model: str | None = None  # digest of the model file; None in PowerInfer's own
    problem: str | None = None  # digest of the placement problem that it answers; None in PowerInfer's own

    def check(self, *, layers: int, d_ff: int, where: str) -> None:
        """Refuses, with a UserError that begins with `where`, a placement of other layers or neurons."""
        neurons = {len(hot) for hot in self.hot}
        if len(self.hot) != layers or neurons != {d_ff}:
            found = f"{len(self.hot)} layers of {', '.join(map(str, sorted(neurons)))} neurons"
            raise UserError(f"{where}: places {found}, the model has {layers} of {d_ff}: it belongs to another model")


def read_gpuidx(path: str | os.PathLike[str]) -> GpuIndex:
    """A file's placement. Tensors are taken by position, 2i and 2i + 1, as PowerInfer does; their names must agree.
    UserError: no gpuidx file, or one that contradicts itself; the line names the file and the layer."""
    f = open_gguf(path)
    if f.magic != POWERINFER_MAGIC or f.metadata.get("general.architecture") != ARCHITECTURE:
        raise UserError(
            f"{f.path}: is no gpuidx file (magic PWRI, architecture {ARCHITECTURE}); solve the placement again"
        )
    layers, capacity, tensors = f.get(_BLOCKS, "int"), f.get(_CAPACITY, "int"), list(f.tensors.values())
    if len(tensors) != 2 * layers or layers < 1 or capacity < 0:
        raise UserError(f"{f.path}: has {len(tensors)} tensors for {layers} layers and {capacity} bytes: damaged")
    hot = []
    for i in range(layers):
        pair, names = tensors[2 * i : 2 * i + 2], [f"blk.{i}.gpu_idx", f"blk.{i}.gpu_bucket"]
        vectors = all(t.type == GGMLQuantizationType.I32 and len(t.shape) == 1 for t in pair)
        if vectors and [t.name for t in pair] == names:
            index, bucket = (np.ascontiguousarray(t.raw).view("<i4") for t in pair)
            if np.isin(index, (0, 1)).all() and np.array_equal(np.flatnonzero(index), bucket):
                hot.append(index.astype(bool))
                continue
        raise UserError(f"{f.path}: {' and '.join(names)} should be a mask and the list of its ones, in I32: damaged")
    return GpuIndex(tuple(hot), capacity, *(f.get(key, "str", None) for key in (_MODEL, _PROBLEM)))


def write_gpuidx(path: str | os.PathLike[str], index: GpuIndex) -> Path:
    """Writes a file that PowerInfer reads; its CUDA kernels want a multiple of 256 hot neurons a layer."""
    tensors = []
    for i, hot in enumerate(index.hot):
        index_and_ids = np.asarray(hot).astype("<i4"), np.flatnonzero(hot).astype("<i4")
        for name, values in zip(("gpu_idx", "gpu_bucket"), index_and_ids):
            tensors.append(
                NewTensor(f"blk.{i}.{name}", GGMLQuantizationType.I32, values.shape, lambda values=values: values)
            )
    keys = {"general.architecture": ARCHITECTURE, _BLOCKS: len(index.hot), _CAPACITY: np.uint64(index.vram_capacity)}
    keys |= {key: value for key, value in ((_MODEL, index.model), (_PROBLEM, index.problem)) if value is not None}
    return write_gguf(path, keys, tensors, magic=POWERINFER_MAGIC)


class RunPlacement(NamedTuple):
    """The placement of a run, whether it was solved now, and one line on its source."""

    index: GpuIndex
    fresh: bool
    note: str


def kept_or_solved(
    f: GGUFFile, problem: Problem, solve: Callable[[Problem], Placement], *, rule: str,
    path: str | os.PathLike[str] | None = None, reset: bool = False, disable: bool = False,
) -> RunPlacement:  # fmt: skip
    """The placement to run with: the one of `MODEL.generated.gpuidx` if it fits, else a fresh one.

    PowerInfer ends a run with "failed to apply previously generated gpu split" if its file does not fit. Here such a
    file is replaced, and one line says why. UserError: `path` is a model: it would be overwritten.

    Args:
        solve: called if a fresh placement is needed; the result is written to `path`.
        rule: the name of `solve`.
        path: of the gpuidx file; None is PowerInfer's place for it.
        reset: solve in any case (PowerInfer's --reset-gpu-index).
        disable: no hot neurons, and no file read or written (--disable-gpu-index).
    """
    path = Path(path or path_for(f.path))
    if path.is_file():  # garbage and stale placements may be written over; a model may not, nor a torn one
        try:
            with path.open("rb") as file:
                model = file.read(len(MAGIC)) == MAGIC or path.samefile(f.path)  # a placement begins with PWRI
        except OSError:
            model = True  # for all that can be known
        with suppress(UserError):
            model = model or open_gguf(path).metadata.get("general.architecture") != ARCHITECTURE
        if model:
            raise UserError(f"{path}: is a model, or unreadable; no placement is written over it: name another file")
    if disable:
        return RunPlacement(
            GpuIndex(none(problem).hot, problem.neuron_budget), False, "no hot neurons: disable_gpu_index"
        )
    # The digest tells placement problems apart, activations and the rule included.
    rest, seen = asdict(problem), hashlib.sha256(rule.encode())
    for p in rest.pop("read"):
        seen.update(p.astype("<f8").tobytes())
    seen.update(repr(sorted(rest.items())).encode())
    digest, asked = model_digest(f), seen.hexdigest()[:32]
    if reset:
        why = "solved: reset_gpu_index"
    elif not path.exists():
        why = "solved: there was none"
    else:
        found = _fitting(path, problem, digest, asked)
        if isinstance(found, GpuIndex):
            return RunPlacement(found, False, f"placement read from {path}")
        why = f"solved again: {found}"
    index = GpuIndex(solve(problem).hot, problem.neuron_budget, digest, asked)
    try:
        write_gpuidx(path, index)
        why += f"; written to {path}"
    except UserError as error:
        why += f"; not kept ({error})"
    return RunPlacement(index, True, f"placement {why}")


def _fitting(path: Path, problem: Problem, model: str, asked: str) -> GpuIndex | str:
    """The placement of the file, or why it does not fit."""
    try:
        found = read_gpuidx(path)
        found.check(layers=problem.layers, d_ff=len(problem.read[0]), where=str(path))
    except UserError as error:
        return str(error)
    if found.model not in (None, model):
        return f"{path}: was made for another model file"
    if found.vram_capacity > problem.neuron_budget:
        return f"{path}: was made for {found.vram_capacity} bytes, {problem.neuron_budget} are left for neurons"
    if found.problem not in (None, asked):
        return f"{path}: answers other settings or activations"
    return found
