"""Which neurons lie on the accelerator, and the time per token that this is expected to give.

A forward pass reads a neuron with a probability that the profiler counted. With m the hot and M the whole mass of a
layer (sums of those probabilities), s the bytes of a neuron and B a device's bandwidth, an FFN takes

    hot  = call + s m / B_hot                              if there is a hot neuron; s |hot| / B_hot for hot=dense
    cold = call + s (M - m) / B_cold + exchange            if there is a cold one
    hot  = s m / B_hot                                     if all are hot: the FFN is not split, as in a whole layer
    exchange = 2 latency + bytes / B_link                  residual and mask there, partial sum back

and max(hot, cold) if the devices overlap, else hot + cold. PowerInfer (arXiv:2312.12456, section 6) puts the same
quantities into an integer program; its released solver leaves bandwidth and exchange out.
"""

from dataclasses import dataclass, field

import numpy as np

from specsparse.errors import UserError

GRANULARITY = 256
"""Hot neurons of a layer come in multiples of this: what PowerInfer's CUDA kernels ask for."""


@dataclass(frozen=True)
class Hardware:
    """Two devices and what lies between them. All rates above 0.

    Attributes:
        hot_bandwidth, cold_bandwidth: bytes per second that each reads from its own memory.
        link_bandwidth: bytes per second between the two.
        latency_s: seconds of a transfer of nothing.
        call_s: seconds that starting one device's part of an FFN takes.
        overlap: whether both parts of an FFN run at the same time.
    """

    hot_bandwidth: float
    cold_bandwidth: float
    link_bandwidth: float
    latency_s: float = 0.0
    call_s: float = 0.0
    overlap: bool = True

    def __post_init__(self):
        for name in ("hot_bandwidth", "cold_bandwidth", "link_bandwidth"):
            if not 0 < getattr(self, name) < np.inf:
                raise UserError(f"placement: {name}={getattr(self, name)} must be above 0 bytes per second")
        for name in ("latency_s", "call_s"):
            if not 0 <= getattr(self, name) < np.inf:
                raise UserError(f"placement: {name}={getattr(self, name)} must be at least 0 seconds")


@dataclass(frozen=True, eq=False)
class Problem:
    """A model, its activations, two devices and a budget.

    Attributes:
        read: L arrays f64[F], the probability that a forward pass reads a neuron.
        neuron_bytes: L, bytes of one neuron's rows of gate, up and down.
        dense_bytes: L, bytes of a layer's attention, norms and predictor.
        cache_bytes: bytes of one layer's keys and values.
        output_bytes: of the output matrix and its norm.
        exchange_bytes: sent both ways for the FFN of a layer with cold neurons.
        border_bytes: sent where a layer runs on another device than the one before it.
        width: D.
        budget: bytes of the accelerator for all of this.
        hardware: the devices.
        matrices: of the FFN: 3, or 2 without a gate.
        granularity: hot neurons of a layer are a multiple of this, or all.
        dense_hot: hot neurons are all computed (hot=dense), not the predicted ones alone.
    """

    read: tuple[np.ndarray, ...]
    neuron_bytes: tuple[int, ...]
    dense_bytes: tuple[int, ...]
    cache_bytes: int
    output_bytes: int
    exchange_bytes: int
    border_bytes: int
    width: int
    budget: int
    hardware: Hardware
    matrices: int = 3
    granularity: int = GRANULARITY
    dense_hot: bool = False

    def __post_init__(self):
        if not len(self.read) == len(self.neuron_bytes) == len(self.dense_bytes) >= 1:
            raise UserError("placement: activations, neurons and layers are not equally many")
        if self.granularity < 1:
            raise UserError(f"placement: granularity={self.granularity} must be at least 1")
        if self.budget < 0:
            raise UserError(f"vram_budget: {self.budget} bytes are not a budget; give 0 or more")
        for i, p in enumerate(self.read):
            if not ((p >= 0) & (p <= 1)).all():
                raise UserError(f"placement: layer {i} has activation probabilities outside 0 to 1")

    @property
    def layers(self) -> int:
        """L."""
        return len(self.read)

    @property
    def reserved_bytes(self) -> int:
        """What goes to the accelerator before any neuron: dense parts, output and cache."""
        return sum(self.dense_bytes) + self.layers * self.cache_bytes + self.output_bytes

    @property
    def neuron_budget(self) -> int:
        """Bytes left for hot neurons; 0 where not even the reserved ones fit, as in PowerInfer."""
        return max(self.budget - self.reserved_bytes, 0)

    def order(self, layer: int) -> np.ndarray:
        """Neurons int64[F], the hottest first, equal ones by index."""
        return np.argsort(-self.read[layer], kind="stable")

    def counts(self, layer: int) -> np.ndarray:
        """int64[], the allowed numbers of hot neurons: multiples of the granularity, and all."""
        d_ff = len(self.read[layer])
        return np.append(np.arange(0, d_ff, self.granularity), d_ff)

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


@dataclass(frozen=True, eq=False)
class Placement:
    """An answer to a `Problem`, of `placement.rules`.

    Attributes:
        rule: that made it.
        hot: L masks bool[F], true on the accelerator.
        seconds: expected for a forward pass.
        bytes_on_device: of everything that lies there.
        bound_s: no placement by neuron at this granularity can be faster (whole layers can: with a layer goes its
            attention); None if the rule proves nothing.
        host_layers: layers that run on the host altogether, attention too.
        output_on_host: whether the output matrix does.
    """

    rule: str
    hot: tuple[np.ndarray, ...]
    seconds: float
    bytes_on_device: int
    bound_s: float | None = None
    host_layers: frozenset[int] = field(default_factory=frozenset)
    output_on_host: bool = False

    @property
    def hot_neurons(self) -> int:
        """Neurons on the accelerator, of all layers."""
        return int(sum(h.sum() for h in self.hot))

    def hot_share(self, problem: Problem) -> float:
        """Share of the neurons read that are hot ones."""
        total = sum(float(p.sum()) for p in problem.read)
        mass = sum(float(p[h].sum()) for p, h in zip(problem.read, self.hot, strict=True))
        return mass / total if total else 0.0


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
    for i in range(problem.layers):
        read = problem.dense_bytes[i] + problem.neuron_bytes[i] * float(problem.read[i].sum())
        seconds += read / (h.cold_bandwidth if i < first else h.hot_bandwidth)
        if i >= first:
            size += layer_bytes(problem, i)
    if 0 < count < problem.layers or (count and not output):
        seconds += h.latency_s + problem.border_bytes / h.link_bandwidth
    hot = tuple(np.full(len(p), i >= first) for i, p in enumerate(problem.read))
    size += problem.output_bytes if output else 0
    return Placement("layers", hot, seconds, size, None, frozenset(range(first)), not output)


def layer_bytes(problem: Problem, layer: int) -> int:
    """Bytes of a whole layer with its cache."""
    neurons = problem.neuron_bytes[layer] * len(problem.read[layer])
    return problem.dense_bytes[layer] + neurons + problem.cache_bytes
