"""How long forwards and drafts take: by a table that was measured here, or on paper by a device's sheet."""

import abc
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from specsparse.data.devices import Device
from specsparse.measure.costs.candidates import Candidate
from specsparse.measure.costs.roofline import Roofline
from specsparse.measure.costs.subjects import Subject
from specsparse.measure.costs.traffic import Traffic
from specsparse.runtime.times.defaults import STEP_FLOOR
from specsparse.runtime.times.kept import FREE, CostTable, DraftCost

REACHED = (0.8, 0.6)
"""Shares of its bandwidth and of its arithmetic that a device on paper is taken to reach. Our kernels reach 0.71 to
0.89 of the bandwidth on two machines (docs/measured.md); of the arithmetic of eight rows less is known."""
REACHED_AT_MOST = ((0.9, 0.4), (0.7, 0.8))
"""The two corners between which it lies: v(n) depends on their quotient alone."""
RESTLESS = 0.1
"""Deviation of a forward between repeats from which on the machine was busy: 0.06 alone, 0.14 beside others."""
DOUBTS = (2.0, -2.0)
"""Standard deviations of a measured time to which its interval reaches: slow, and fast."""


class Clock(abc.ABC):
    """Times of one target at one length of its cache and one batch size. Of a batch every sequence has n rows."""

    @property
    @abc.abstractmethod
    def step_s(self) -> float:
        """Seconds of a plain step."""

    @abc.abstractmethod
    def v(self, n: float) -> float:
        """v(n): a forward of n rows a sequence in plain steps."""

    @abc.abstractmethod
    def overhead(self, gamma: int) -> float:
        """c0 in plain steps: verdict, commit and counters of a round of gamma tokens."""

    @abc.abstractmethod
    def draft(self, candidate: Candidate, width: float = 1.0) -> DraftCost:
        """Seconds to draft a token, or a level of a tree with so many nodes."""

    def costs(self, candidate: Candidate, gamma: int, width: float = 1.0) -> tuple[float, float]:
        """(c, c0) in plain steps, as `speculative.expected` takes them."""
        draft = self.draft(candidate, width)
        return draft.token_s / self.step_s, self.overhead(gamma) + draft.fixed_s / self.step_s


@dataclass(frozen=True)
class Paper(Clock):
    """By the roofline: what is read and computed, at shares of a device's peaks that it may reach.

    Attributes:
        device: with all its peaks.
        load: of the target's forward.
        kernels: that a forward of it starts.
        kv_length, batch: tokens in each cache, sequences.
        reached: shares of bandwidth and of arithmetic.
    """

    device: Device
    load: Traffic
    kernels: int
    kv_length: float
    batch: int = 1
    reached: tuple[float, float] = REACHED

    def forward_s(self, load: Traffic, kernels: int, n: float) -> float:
        """Seconds of a forward of n rows a sequence: the roofline's, and what of its shorter side does not hide."""
        roofline, size = Roofline(self.device.reaching(*self.reached), load), (n, self.kv_length, self.batch)
        shorter = min(roofline.memory_s(*size), roofline.compute_s(*size))
        left = (1 - self.device.overlap) * shorter + kernels * self.device.dispatch
        return roofline.forward_s(*size) + left

    @cached_property
    def step_s(self) -> float:
        """Seconds of a plain step."""
        return self.forward_s(self.load, self.kernels, 1)

    def v(self, n: float) -> float:
        """v(n) by the roofline."""
        return self.forward_s(self.load, self.kernels, n) / self.step_s

    def overhead(self, gamma: int) -> float:
        """None that is known."""
        return 0.0

    def draft(self, candidate: Candidate, width: float = 1.0) -> DraftCost:
        """A forward of one row a token, or of the nodes of a level; nothing for drafts that are copied."""
        load = candidate.token
        return FREE if load is None else DraftCost(self.forward_s(load, candidate.kernels, width))


@dataclass(frozen=True)
class Timed(Clock):
    """By what was measured here with one sequence.

    Attributes:
        table: the measured times.
        keys: of the drafters' costs in the table, by the candidates' names.
        footprint: bytes of the target, by which a draft that was not timed is weighed.
        kv_length, batch: tokens in each cache, sequences; a batch's rows are taken to cost what one sequence's do.
        doubt: standard deviations by which v(n) is moved.
    """

    table: CostTable
    keys: Mapping[str, str]
    footprint: float
    kv_length: float
    batch: int = 1
    doubt: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a plain step."""
        more = self._forward(1) - self.table.forward(1, self.kv_length)
        return self.table.step(self.kv_length) + more

    def _forward(self, n: float) -> float:
        """Of all sequences: the weights once for all rows, each cache for itself."""
        t, b = self.table, self.batch
        further = t.forward(n, self.kv_length) - t.forward(n)
        others = (b - 1) * t.kv_s * t.windows.read(1, t.kv_base)  # the caches of the other sequences
        return t.forward(b * n) + b * further + others

    def v(self, n: float) -> float:
        """v(n) of the table, moved by `doubt` times the deviation of the timings."""
        plain = 1.0 + (self._forward(n) - self._forward(1)) / self.step_s
        return plain * (1 + self.doubt * self._deviation(n)) if n > 1 else plain

    def _deviation(self, n: float) -> float:
        """Relative standard deviation of the forward of n rows between repeats."""
        spread = self.table.residuals.get("spread")
        known = {name: float(value) for name, value in spread.items()} if isinstance(spread, Mapping) else {}
        return known.get(f"near {min(self.table.ns, key=lambda m: abs(m - n))}", 0.0)

    def overhead(self, gamma: int) -> float:
        """As measured, of one sequence."""
        return (self.table.round_s + self.table.round_token_s * gamma) / self.step_s

    def draft(self, candidate: Candidate, width: float = 1.0) -> DraftCost:
        """As measured (a tree's level by its usual width); else by the bytes a token reads and a floor."""
        key = self.keys.get(candidate.name)
        if key in self.table.drafts:
            return self.table.drafts[key]
        if candidate.token is None:
            return FREE
        share = candidate.token.weight_bytes / self.footprint + STEP_FLOOR
        return DraftCost(share * self.step_s)


@dataclass(frozen=True)
class Clocks:
    """The expected times and the two ends of what they may be; drafts that pay most are at the `fast` end. `note` says
    what makes them doubtful."""

    expected: Clock
    slow: Clock
    fast: Clock
    source: str
    note: str | None = None


def on_paper(device: Device, target: Subject, kv_length: float, batch: int, *, kv_dtype: str = "f16") -> Clocks:
    """By a device's sheet."""
    load, kernels = target.traffic(kv_dtype=kv_dtype), target.kernels()
    made = [Paper(device, load, kernels, kv_length, batch, reached) for reached in (REACHED, *REACHED_AT_MOST)]
    source = "measured peaks" if device.measured else f"sheet: {device.source}"
    return Clocks(*made, source=f"{device.title}, on paper ({source})")


def timed(table: CostTable, keys: Mapping[str, str], target: Subject, kv_length: float, batch: int) -> Clocks:
    """By a measured table."""
    made = [Timed(table, keys, target.nbytes, kv_length, batch, doubt) for doubt in (0.0, *DOUBTS)]
    source = f"{table.identity.get('cpu', 'this machine')}, measured {table.identity.get('date')}"
    return Clocks(*made, source=source, note=_restless(table))


def _restless(table: CostTable) -> str | None:
    """A line where the forwards varied much between repeats."""
    spread = table.residuals.get("spread")
    if not isinstance(spread, Mapping):
        return None
    forwards = [float(value) for name, value in spread.items() if name.startswith("near ")]
    usual = statistics.median(forwards) if forwards else 0.0
    if usual < RESTLESS:
        return None
    return f"note: a forward varied by {usual:.0%} between repeats, the machine was busy: --refresh measures it again"
