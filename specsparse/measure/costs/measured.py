"""Measures a model on this machine, once: the table is kept in the user's cache and read from there."""

import dataclasses
import datetime
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from specsparse.engine.model import Model
from specsparse.engine.windows import LayerWindows
from specsparse.measure.costs import devices
from specsparse.measure.costs.fit import fit_kv, overhead, polish, rising
from specsparse.measure.costs.loops import Loop
from specsparse.measure.costs.progress import Bar, silent
from specsparse.measure.trials import Ours, token_ids
from specsparse.runtime.device_batch import Method
from specsparse.runtime.times import store
from specsparse.runtime.times.kept import CostTable
from specsparse.speculative.drafters.scripted import Scripted
from specsparse.speculative.verify import get_verifier
from specsparse.support.interleaved import interleaved

_NEAR, _FAR = "near", "far"


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes:
        ns: rows of the forwards, from 1.
        near, far: tokens in the cache.
        repeats: of each timing, in turn.
        decode: tokens of a plain timing, rounds of a speculative one.
        forwards: passes of one timing of a forward.
        gammas: room for draft tokens of the loops whose rounds are timed, two of them.
    """

    ns: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 12, 16)
    near: int = 128
    far: int = 1024
    repeats: int = 15
    decode: int = 16
    forwards: int = 4
    gammas: tuple[int, int] = (2, 7)

    @property
    def far_ns(self) -> tuple[int, ...]:
        """Rows of the forwards with the longer cache: the least, a middle one and the most."""
        return tuple(sorted({self.ns[0], self.ns[len(self.ns) // 2], self.ns[-1]}))

    @property
    def room(self) -> int:
        """Tokens that the tests add to the cache."""
        return self.decode * (max(self.gammas) + 1) + max(self.ns) + max(self.gammas) + 2

    def for_model(self, context: int, step_s: float) -> "Effort":
        """Less where a forward takes long, and cache lengths that the context holds."""
        slow = step_s > 0.03
        effort = dataclasses.replace(
            self,
            forwards=max(1, min(self.forwards, int(0.05 / step_s))),
            decode=max(8, min(self.decode, int(0.5 / step_s))),
            repeats=min(self.repeats, 5) if slow else self.repeats,
            far=min(self.far, 256) if slow else self.far,
        )
        ns = tuple(n for n in effort.ns if n <= max(1, context // 4))
        effort = dataclasses.replace(effort, ns=ns, gammas=tuple(min(g, max(ns)) for g in effort.gammas))
        effort = dataclasses.replace(effort, decode=max(1, min(effort.decode, context // 8)))
        most = max(context - effort.room, 1)
        near = min(effort.near, max(most // 4, 1))
        return dataclasses.replace(effort, near=near, far=max(min(effort.far, most), near + 1))


def load_or_measure(
    model: Model, *, refresh: bool = False, effort: Effort | None = None, bar: Bar = silent
) -> CostTable:
    """The model's table, measured (half a minute for a small model) and kept where there is none yet."""
    known = None if refresh else store.load(model)
    if known is not None:
        return known
    effort = effort or Effort()
    with bar("measuring forwards and rounds of this machine", effort.repeats) as done:
        table = measure(model, effort=effort, done=done)
    store.save(model, table)
    return table


def measure(model: Model, *, effort: Effort | None = None, done: Callable[[], None] = lambda: None) -> CostTable:
    """Measures everything but drafters. `done` is called before each repeat.

    Every repeat times everything once, so that the repeats' own speeds can be told apart from the things timed (see
    `polish`). `residuals` of the result: `spread`, the relative deviation of each time between repeats; `kv`, the
    relative error of the fit over the cache's length by n; `rising`, how far a v(n) had to be moved so that they rise.
    """
    effort = (effort or Effort()).for_model(model.config.context_length, _rough_step(model))
    device = devices.measure()
    at, spread = polish(interleaved(_things(model, effort), repeats=effort.repeats, before=done))
    raw = [at[f"{_NEAR} {n}"] for n in effort.ns]
    forward = rising(raw)
    far_ns = effort.far_ns
    near = [forward[effort.ns.index(n)] for n in far_ns]
    windows = LayerWindows.of(model.config)
    distance = windows.read(1, effort.far) - windows.read(1, effort.near)
    kv_s, kv_row_s, kv_errors = fit_kv(far_ns, near, [at[f"{_FAR} {n}"] for n in far_ns], distance)
    host_s = at["host"]
    # Half at least: where a step takes less than its share of the call, noise could make it nothing.
    step = {g: max(at[f"loop {g}"] - host_s / effort.decode, at[f"loop {g}"] / 2) for g in (0, *effort.gammas)}
    more = [step[g] - step[0] - float(np.interp(g + 1, effort.ns, forward)) + forward[0] for g in effort.gammas]
    fixed_s, token_s = overhead(effort.gammas, more)
    return CostTable(
        ns=effort.ns,
        kv_base=effort.near,
        forward_s=tuple(forward),
        kv_s=kv_s,
        kv_row_s=kv_row_s,
        plain_s=step[0],
        round_s=fixed_s,
        round_token_s=token_s,
        host_s=host_s,
        bandwidth=device.bandwidth,
        int8=device.int8,
        f32=device.f32,
        windows=windows,
        residuals={
            "spread": spread,
            "kv": dict(zip(map(str, far_ns), kv_errors, strict=True)),
            "kv_far": effort.far,
            "rising": max(abs(f / r - 1) for f, r in zip(forward, raw, strict=True)),
        },
        identity={**store.identity(model), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")},
    )


def _things(model: Model, effort: Effort) -> dict[str, Callable[[], float]]:
    """What is timed, by name. Each returns seconds: of a forward, of a round with its share of the call, of a call."""
    things: dict[str, Callable[[], float]] = {}
    for name, depth, ns in ((_NEAR, effort.near, effort.ns), (_FAR, effort.far, effort.far_ns)):
        side = Ours(model, depth=depth, room=effort.room, forwards=effort.forwards)
        things |= {f"{name} {n}": partial(side.verify, n) for n in ns}
    ids = token_ids(effort.near + 1, model.config.vocab_size)
    plain = Loop(model, Method(), ids, room=effort.decode)
    loops = {0: plain}
    for gamma in effort.gammas:  # a drafter that costs nothing and is always wrong
        drafter = Scripted.chain(gamma, (0,), vocab_size=model.config.vocab_size)
        loops[gamma] = Loop(model, Method(drafter, get_verifier("match")), ids, room=effort.decode * (gamma + 1))
    things |= {f"loop {g}": (lambda loop=loop: loop.again(effort.decode) / effort.decode) for g, loop in loops.items()}
    return things | {"host": partial(plain.run, 0)}


def _rough_step(model: Model) -> float:
    """Seconds of a one-row forward, roughly."""
    side = Ours(model, depth=0, room=16, forwards=1)
    side.verify(1)
    return side.verify(1)
