"""The measurement: every test on every side, in turn, the machine's own figures between them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from specsparse.kernels import peaks
from specsparse.measure.samples import Samples
from specsparse.measure.sides import Side
from specsparse.support.interleaved import alternating, interleaved


@dataclass(frozen=True)
class Plan:
    """What to measure; 0 or () leaves a test out.

    Attributes:
        pp: prompt tokens.
        tg: tokens to decode.
        ns: lengths of the verify test, ascending; 1 first.
        repeats: timings of each test on each side.
    """

    pp: int = 512
    tg: int = 128
    ns: tuple[int, ...] = ()
    repeats: int = 5

    def tests(self) -> tuple["Trial", ...]:
        """Every test, in the order of the first repeat."""
        out = [Trial(f"pp{self.pp}", "prompt", self.pp)] if self.pp else []
        out += [Trial(f"tg{self.tg}", "decode", self.tg)] if self.tg else []
        return (*out, *(Trial(f"v{n}", "verify", n) for n in self.ns))


@dataclass(frozen=True)
class Trial:
    """One test: a method of `Side` and its number of tokens."""

    name: str
    method: str
    n: int

    def run(self, side: Side) -> float:
        """Seconds."""
        return getattr(side, self.method)(self.n)


@dataclass
class Machine:
    """What the machine did at its best in each repeat: bytes read, int8 and float32 multiply-adds, all per second."""

    read: list[float] = field(default_factory=list)
    int8: list[float] = field(default_factory=list)
    f32: list[float] = field(default_factory=list)

    def measure(self, buffer: peaks.ReadBuffer) -> None:
        """Adds one round (about 80 ms)."""
        self.read.append(buffer.rate())
        self.f32.append(peaks.f32_rate())
        int8 = peaks.int8_rate()
        if int8 is not None:
            self.int8.append(int8)


@dataclass(frozen=True)
class Results:
    """Samples by test name and side name, and the machine's figures."""

    samples: dict[str, dict[str, Samples]]
    machine: Machine


def warm_up(plan: Plan, side: Side, done: Callable[[], None] = lambda: None) -> None:
    """Runs every test once: compiles, touches memory, wakes threads."""
    for test in plan.tests():
        test.run(side)
        done()


def run(plan: Plan, sides: Sequence[Side], done: Callable[[], None] = lambda: None) -> Results:
    """Times every test `repeats` times on every side.

    Sides alternate test by test (A B A B), and the order of the tests turns round with each repeat, so that drift of
    the machine hits all alike. `done` is called after each timing.
    """
    tests, machine, buffer = plan.tests(), Machine(), peaks.ReadBuffer()

    def order(_, repeat: int) -> Iterator[tuple[Trial, str]]:
        return ((test, side.name) for test in alternating(tests, repeat) for side in sides)

    found = interleaved(
        {(test, side.name): partial(test.run, side) for test in tests for side in sides},
        repeats=plan.repeats, warm_up=0, order=order, before=lambda: machine.measure(buffer), done=done,
    )  # fmt: skip
    samples = {t.name: {s.name: Samples(tuple(found[t, s.name]), t.n) for s in sides} for t in tests}
    return Results(samples, machine)
