"""The one training loop: an optimiser's steps from wherever a state stands, and the file and curve they leave."""

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
import optax
from rich.console import Console

from specsparse.engine.pytree import Pytree
from specsparse.support import terminal
from specsparse.support.files import load_state, save_state


class Stepped(Protocol):
    """A state that counts its steps: a pytree of arrays that holds all that a restart needs."""

    @property
    def step(self) -> jax.Array: ...


State = TypeVar("State", bound=Stepped)
Group = TypeVar("Group")
OnStep = Callable[[int, Any, Any, Any], None]
"""on_step(steps done, state, losses, batch)."""


def trapezoid(peak: float, steps: int, *, up: int, down: int) -> optax.Schedule:
    """Rates that rise from 0 over `up` steps, stay at `peak`, and fall to 0 over the last `down` of `steps`."""
    flat = max(steps - up - down, 0)
    parts = (
        optax.linear_schedule(0.0, peak, up),
        optax.constant_schedule(peak),
        optax.linear_schedule(peak, 0.0, down),
    )
    return optax.join_schedules(parts, [up, up + flat])


class Rates(Protocol):
    """The options of a training's rates: steps in which they rise and the share in which they fall."""

    @property
    def steps(self) -> int: ...
    @property
    def warmup(self) -> int: ...
    @property
    def decay(self) -> float: ...


def rates(peak: float, options: Rates) -> optax.Schedule:
    """The trapezoid of a training: it falls over the last `decay` of the steps."""
    down = max(1, round(options.decay * options.steps))
    return trapezoid(peak, options.steps, up=options.warmup, down=down)


def learning_rate(schedule: optax.Schedule, step: jax.Array) -> dict[str, float]:
    """The rate of the last of so many steps, for a curve."""
    return {"learning_rate": float(np.asarray(schedule(max(int(step) - 1, 0))))}


def adamw(rate: optax.Schedule, *, decay: float, clip: float) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) whose weight decay is of matrices, behind a clipped norm."""
    matrices = partial(jax.tree.map, lambda x: x.ndim > 1)
    return optax.chain(optax.clip_by_global_norm(clip), optax.adamw(rate, b2=0.98, weight_decay=decay, mask=matrices))


def updated(
    optimiser: optax.GradientTransformation, grads: Pytree, state: optax.OptState, weights: Pytree
) -> tuple[Pytree, optax.OptState]:
    """Weights and state of the optimiser after a step along `grads`."""
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its int32 counter with floats
        updates, state = optimiser.update(grads, state, weights)
    return optax.apply_updates(weights, updates), state


def endless(
    plan: Callable[[np.ndarray], Iterable[Group]], count: int, *, seed: int, start: int
) -> Iterator[tuple[int, Group]]:
    """(step, group) from step `start` on without end: `plan` groups `count` texts, in another order each time."""
    done = 0
    for epoch in itertools.count():
        for group in plan(np.random.default_rng([seed, epoch]).permutation(count)):
            if done >= start:
                yield done, group
            done += 1


def train(
    state: State, batches: Iterator[Any], step: Callable[[State, Any], tuple[State, Any]], *, steps: int,
    on_step: OnStep | None = None,
) -> State:  # fmt: skip
    """The state after `steps` steps, those that it has done already included; `batches` are of the steps to come, and
    `step` gives the next state and the losses before it."""
    for done in range(int(state.step) + 1, steps + 1):
        batch = next(batches)
        state, losses = step(state, batch)
        if on_step is not None:
            on_step(done, state, losses, batch)
    return state


@dataclass(eq=False)
class Log:
    """The curve of a training, and the file that a stopped one goes on from; the file appears whole or not at all."""

    path: Path
    # steps, every: of the training, and from one point of the curve to the next; the last step is one
    steps: int
    every: int
    # unit, count: what is counted of a batch, by name and as a function
    unit: str
    count: Callable[[Any], int]
    # its columns beside step, `unit`, seconds and rate, from the state and the losses since the last point
    point: Callable[[Any, Sequence[Any]], dict[str, Any]]
    # called with each point, those of an earlier run first; the rate is there `unit`_per_second
    publish: Callable[[dict[str, Any]], None] = lambda point: None
    curve: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self):
        self._recent: list[Any] = []
        self._seen, self._before, self._begun = 0, 0, time.perf_counter()

    def resume(self, like: State) -> State | None:
        """The state in the file, of the shapes of `like`, or None; UserError for a damaged file or another training."""
        if not self.path.exists():
            return None
        state, meta = load_state(self.path, like)
        self.curve = meta["curve"]
        self._seen = self._before = self.curve[-1][self.unit] if self.curve else 0
        for point in self.curve:
            self._publish(point)
        return state

    def add(self, step: int, state: Stepped) -> None:
        seconds = time.perf_counter() - self._begun
        counted = {"step": step, self.unit: self._seen, "seconds": seconds, "rate": self.rate}
        judging = time.perf_counter()
        self.curve.append(counted | self.point(state, self._recent))
        self._begun += time.perf_counter() - judging  # not a part of the rate
        self._recent = []
        self._publish(self.curve[-1])

    def _publish(self, point: dict[str, Any]) -> None:
        self.publish({f"{self.unit}_per_second" if key == "rate" else key: value for key, value in point.items()})

    @property
    def rate(self) -> float:
        """Counted units a second, of this run alone."""
        seconds = time.perf_counter() - self._begun
        return (self._seen - self._before) / seconds if seconds > 0 else 0.0

    @contextmanager
    def shown(self, console: Console, what: str, state: Stepped) -> Generator[OnStep]:
        """A bar; yields the function that `train` is to call after each step."""
        self._begun = time.perf_counter()
        with terminal.counting(console, what, self.steps) as step:
            step(int(state.step))

            def on_step(done: int, state: Stepped, losses: Any, batch: Any) -> None:
                self._seen += self.count(batch)
                self._recent.append(losses)
                if done % self.every == 0 or done == self.steps:
                    self.add(done, state)
                    save_state(self.path, state, {"curve": self.curve})
                step(done, f"{what}, {self.rate:,.0f} {self.unit}/s")

            yield on_step
