"""Measures what forwards, rounds and drafts of a model cost on this machine; the timing cache keeps the table.

The first part fits times and slopes to repeated timings, the second times rounds, the third drafters.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np

from specsparse.data import prompts
from specsparse.engine import hosts
from specsparse.engine.cache import LayerWindows
from specsparse.engine.model import Model
from specsparse.measure import intervals
from specsparse.measure.costs.roofline import measure_device
from specsparse.measure.trials import Loop, Ours, token_ids
from specsparse.runtime import timing_cache
from specsparse.runtime.method import Method, MethodSpec, resolve
from specsparse.runtime.timing_cache import CostTable, DraftCost, cost_key
from specsparse.speculative.drafters.synthetic import Scripted
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.trees.base import TreeShape
from specsparse.speculative.trees.static import DRAWS, StaticTree
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import get_verifier
from specsparse.support.interleaved import interleaved
from specsparse.support.registry import Choice

Bar = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Shows progress: (what is measured, steps) -> a context whose value is called after each step."""


def silent(what: str, steps: int) -> AbstractContextManager[Callable[[], None]]:
    return contextlib.nullcontext(lambda: None)


def polish(seconds: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Times at the repeats' median speed, and their relative deviations: log t = thing + repeat, by medians.

    A machine that is slower in one repeat slows everything in it alike.
    """
    logs = np.log(np.asarray(list(seconds.values())))  # [things, repeats]
    thing, repeat = np.zeros(logs.shape[0]), np.zeros(logs.shape[1])
    for _ in range(10):
        thing += np.median(logs - thing[:, None] - repeat[None], axis=1)
        repeat += np.median(logs - thing[:, None] - repeat[None], axis=0)
    rest = logs - thing[:, None] - repeat[None]
    level = np.median(repeat)
    times = dict(zip(seconds, np.exp(thing + level).tolist(), strict=True))
    return times, dict(zip(seconds, np.sqrt((rest**2).mean(axis=1)).tolist(), strict=True))


def rising(values: Sequence[float]) -> list[float]:
    """The non-decreasing values nearest to these (isotonic regression): more rows never take less time."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, i), (b, j) = pools[-2:]
            pools[-2:] = [((a * i + b * j) / (i + j), i + j)]
    return [mean for mean, count in pools for _ in range(count)]


def fit_kv(
    ns: tuple[int, ...], near: list[float], far: list[float], distance: float
) -> tuple[float, float, list[float]]:
    """Fits far(n) - near(n) = distance (a + b n) by least squares, a and b at least 0.

    Args:
        ns: rows.
        near, far: seconds of a forward of n rows at two cache lengths.
        distance: tokens between the two that are read; 0 if a window is shorter than both.

    Returns:
        a, b in seconds a token (and row), and the fit's error at each n relative to far(n).
    """
    rows = np.asarray(ns, np.float64)
    if not distance:
        return 0.0, 0.0, [n / f - 1 for n, f in zip(near, far, strict=True)]
    more = (np.asarray(far) - np.asarray(near)) / distance
    design = np.stack([np.ones_like(rows), rows], axis=1)
    scale = 1 / np.asarray(far)  # relative errors count
    (a, b), *_ = np.linalg.lstsq(design * scale[:, None], more * scale, rcond=None)
    if b < 0:
        a, b = float(np.average(more, weights=scale**2)), 0.0
    elif a < 0:
        a, b = 0.0, float((more * rows * scale**2).sum() / (rows**2 * scale**2).sum())
    a, b = max(float(a), 0.0), max(float(b), 0.0)
    found = np.asarray(near) + distance * (a + b * rows)
    return a, b, ((found - np.asarray(far)) / np.asarray(far)).tolist()


def fit_overhead(gammas: tuple[int, int], more: list[float]) -> tuple[float, float]:
    """Seconds a round and a token of room, both at least 0, from what rounds of two lengths add."""
    (g0, g1), (m0, m1) = gammas, more
    slope = max((m1 - m0) / (g1 - g0), 0.0) if g1 > g0 else 0.0
    fixed = (m0 + m1) / 2 - slope * (g0 + g1) / 2
    if fixed < 0:  # all of it by the token
        fixed, slope = 0.0, (m0 + m1) / (g0 + g1)
    return fixed, max(slope, 0.0)


def fit_draft(points: list[tuple[float, float]]) -> DraftCost:
    """token_s and fixed_s, both at least 0, from (tokens, seconds) of at most two lengths; one length is all fixed."""
    if not points:
        return DraftCost()
    (m0, t0), (m1, t1) = points[0], points[-1]
    if m1 - m0 < 0.5:
        return DraftCost(0.0, sum(t for _, t in points) / len(points))
    slope = min(max((t1 - t0) / (m1 - m0), 0.0), t1 / m1)
    return DraftCost(slope, max(t1 - slope * m1, 0.0))


@dataclass(frozen=True)
class Effort:
    ns: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # rows of the rounds, from 1
    near: int = 128  # tokens in the cache
    far: int = 1024  # tokens in the cache
    repeats: int = 15  # of each timing, interleaved
    decode: int = 16  # tokens of a timing, if a round emits as many as it has rows
    least: int = 4  # rounds of a timing, at least
    narrow: int = 2  # room of the loop beside that with room for the most rows: what a token of room costs

    @property
    def gamma(self) -> int:
        """Room of the loop whose rounds have all of `ns`."""
        return max(max(self.ns) - 1, 1)

    @property
    def room(self) -> int:
        """Tokens that the tests add to the cache."""
        return max(self.decode, self.least * (self.gamma + 1)) + self.gamma + 2

    def rounds(self, n: int) -> int:
        return max(self.decode // n, self.least)

    def for_model(self, context: int, step_s: float, width: int = 0) -> "Effort":
        """Less if a forward takes long, cache lengths that the context holds, and rows that steps of a width hold."""
        slow = step_s > SLOW
        widest = min(max(1, context // 4), width or max(self.ns))
        ns = tuple(n for n in self.ns if n <= widest and (not slow or n in (1, 2, 3, 4, 8, 16)))
        fitted = dataclasses.replace(
            self,
            ns=ns,
            narrow=min(self.narrow, max(max(ns) - 1, 1)),
            decode=max(1, min(max(8, min(self.decode, int(0.25 / step_s))), context // 8)),
            least=max(1, min(2 if slow else self.least, context // (4 * max(ns)))),
            repeats=min(self.repeats, 4) if slow else self.repeats,
        )
        most = max(context - fitted.room, 1)
        near = min(self.near, max(most // 4, 1))
        far = min(self.far, 256) if slow else self.far
        return dataclasses.replace(fitted, near=near, far=max(min(far, most), near + 1))


def load_or_measure(model: Model, *, refresh: bool = False, bar: Bar = silent) -> CostTable:
    """The model's kept table; without one it is measured (half a minute for a small model) and kept."""
    if not refresh and (known := timing_cache.load(model)) is not None:
        return known
    with bar("measuring rounds on this machine", Effort.repeats) as done:
        table = measure(model, done=done)
    return timing_cache.save(model, table)


def measure(model: Model, *, effort: Effort = Effort(), done: Callable[[], None] = lambda: None) -> CostTable:
    """Measures everything but drafters; `done` is called before each repeat, which times everything once.

    All times are of rounds in the decode loop, with what a round does besides its forward: one program has room for the
    most rows, and its drafts are as long as each timing asks for. They are tokens of the built-in prompts: rows of a
    text share experts, so how many they wake is the text's.
    `residuals` of the result: `spread`, the relative deviation of each time between repeats; `kv`, the relative error
    of the fit over the cache's length by n; `rising`, how far a v(n) had to be moved so that they rise.
    """
    rough = Ours(model, depth=0, room=16, forwards=1)
    rough.verify(1)
    effort = effort.for_model(model.config.context_length, hosts.agreed(rough.verify(1)), model.width)
    device = measure_device()
    text = model.tokenizer.encode("\n\n".join(prompt.text for prompt in prompts.load()))
    ids = np.resize(np.asarray(text, np.int32), effort.far + effort.room)
    plain = Loop(model, Method(), ids[: effort.far + 1], room=effort.room)
    loops = {}
    for gamma in {effort.narrow, effort.gamma}:  # a drafter that costs nothing and drafts the text
        drafter = Scripted.chain(gamma, (gamma,), vocab_size=model.config.vocab_size, truth=tuple(ids))
        method = Method(drafter, get_verifier("match"), Fixed(gamma))
        loops[gamma] = Loop(model, method, ids[: effort.far + 1], room=effort.room)

    def seconds(loop: Loop, n: int, kv: int, **drafted: int) -> float:
        return loop.again(effort.rounds(n), start=kv + 1, **drafted) / effort.rounds(n)

    # Each returns seconds: of a round with its share of the call, of a call.
    far_ns = tuple(sorted({effort.ns[0], effort.ns[len(effort.ns) // 2], effort.ns[-1]}))
    timings: dict[str, Callable[[], float]] = {"plain": partial(seconds, plain, 1, effort.near)}
    for name, kv, ns in (("near", effort.near, effort.ns), ("far", effort.far, far_ns)):
        timings |= {f"{name} {n}": partial(seconds, loops[effort.gamma], n, kv, drafted=n - 1) for n in ns}
    timings["narrow"] = partial(seconds, loops[effort.narrow], 1, effort.near, drafted=0)
    timings |= {"host": partial(plain.run, 0), "host of rounds": partial(loops[effort.gamma].run, 0)}
    for loop in (plain, *loops.values()):
        loop.run(1)  # compiles
    at, spread = polish(interleaved(timings, repeats=effort.repeats, warm_up=0, before=done))

    def alone(name: str, n: int = 1, host: str = "host of rounds") -> float:
        """Half at least: if a round takes less than its share of the call, noise could make it nothing."""
        return max(at[name] - at[host] / effort.rounds(n), at[name] / 2)

    raw = [alone(f"near {n}", n) for n in effort.ns]
    near, far, plain_s = rising(raw), [alone(f"far {n}", n) for n in far_ns], alone("plain", host="host")
    windows = LayerWindows.from_config(model.config)
    distance = windows.read(1, effort.far) - windows.read(1, effort.near)
    kv_s, kv_row_s, kv_errors = fit_kv(far_ns, [near[effort.ns.index(n)] for n in far_ns], far, distance)
    fixed_s, token_s = fit_overhead((effort.narrow, effort.gamma), [alone("narrow") - plain_s, near[0] - plain_s])
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return CostTable(
        ns=effort.ns,
        kv_base=effort.near,
        forward_s=tuple(plain_s + more - near[0] for more in near),
        kv_s=kv_s,
        kv_row_s=kv_row_s,
        plain_s=plain_s,
        round_s=fixed_s,
        round_token_s=token_s,
        host_s=at["host"],
        bandwidth=device.bandwidth,
        int8=device.int8,
        f32=device.f32,
        windows=windows,
        residuals={
            "spread": spread,
            "kv": dict(zip(map(str, far_ns), kv_errors, strict=True)),
            "kv_far": effort.far,
            "rising": max(abs(n / r - 1) for n, r in zip(near, raw, strict=True)),
        },
        identity={**timing_cache.identity(model), "date": date},
    )


LENGTHS = {2: 2, 7: 7}
TEMPLATE, LEVELS = TreeTemplate.kary((3, 1, 1)), {3: 1, 9: 3}
"""Chains of two lengths, and a tree cut to its first level and whole: budgets of a round, and the tokens or levels that
they are. They tell a token's or level's cost from a round's."""
ROUNDS = (12, 8)
"""Timed rounds of one method, and those of a slow model. If fewer than six draft they show no cost: `above_noise` is 0
then."""
SLOW = 0.03
"""Seconds of a step from which on a model is timed less."""


def table_for(
    model: Model, name: str, options: Mapping[str, object], *, draw: str | None = None, bar: Bar = silent
) -> tuple[CostTable, str]:
    """`table_with_draft` for a drafter by name, and the key of its cost.

    With `draw`, how static trees draw children, `token_s` is the cost of a level; without, that of a chain's token.
    """
    sizes, tree = (LENGTHS, None) if draw is None else (LEVELS, StaticTree(TEMPLATE, DRAWS[draw]))
    policy, key = Fixed(max(sizes)), draft_key(name, options, draw)
    spec = MethodSpec(Choice(name, dict(options)), policy=policy, tree=tree)

    def method() -> Method:  # a policy that takes all of a draft's room is left out by `resolve`
        return dataclasses.replace(resolve(spec, model), policy=policy)

    return table_with_draft(model, key, method, sizes, bar=bar), key


def draft_key(name: str, options: Mapping[str, object] | None = None, draw: str | None = None) -> str:
    """The name under which the cost of a drafter's chains is kept, or of its trees whatever their shape."""
    return cost_key(name, options) + ("" if draw is None else f", {draw} trees")


def table_for_tree(
    model: Model, name: str, options: Mapping[str, object], tree: TreeShape, method: Method, *, bar: Bar = silent
) -> tuple[CostTable, str]:
    """`table_for` for trees of one shape: the cost of a round of `method`, which drafts them."""
    shape = hashlib.sha256(repr(tree).encode()).hexdigest()[:16]
    key = f"{cost_key(name, options)}, tree #{shape}"
    return table_with_draft(model, key, lambda: method, bar=bar), key


def table_with_draft(
    model: Model, key: str, method: Callable[[], Method], sizes: Mapping[int, int] | None = None, *, bar: Bar = silent
) -> CostTable:
    """The model's table with the cost of one drafter under `key`, both measured if they are not known yet, and kept.

    `method` is called to measure it; see `measure_draft`.
    """
    table = load_or_measure(model, bar=bar)
    if key not in table.drafts:
        with bar(f"measuring the cost of drafting by {key}", 1) as done:
            table = table.with_draft(key, measure_draft(model, table, method(), sizes))
            done()
        table = timing_cache.save(model, table)
    return table


def measure_draft(
    model: Model, table: CostTable, method: Method, sizes: Mapping[int, int] | None = None
) -> DraftCost:
    """The cost of drafting in real rounds: to draft and to learn from the verdict, beyond drafts that cost nothing.

    `sizes` are budgets of a round with policy=fixed, and the tokens or levels that they are. Two tell the cost of a
    token (of a level, if drafts are trees) from that of a round; without any, all of it is the round's. A cost that may
    be noise is 0.
    """
    longest, rounds = max(LENGTHS), ROUNDS[table.plain_s > SLOW]
    once = token_ids(12, model.config.vocab_size, seed=1)  # repeated, so that lookups find something
    ids = np.resize(once, min(33, model.config.context_length // 2))
    truth = tuple(np.resize(once, 256).tolist())  # beyond its end all drafted ids would be the same
    wrong = Scripted.chain(longest, (0,), vocab_size=model.config.vocab_size, truth=truth)
    free = time_rounds(model, Method(wrong, get_verifier("match"), Fixed(longest)), ids, rounds, drafted=1)
    _, nothing, target_pass = map(statistics.median, zip(*free, strict=True))
    speed = table.forward(2, len(ids)) / target_pass  # the table's times were measured at another time
    points = []
    for size, units in (sizes or {None: 0}).items():
        found = time_rounds(model, method, ids, rounds, drafted=size)
        if found:
            assert method.drafter is not None
            drafted = units if method.drafter.tree else statistics.fmean(n for n, _, _ in found)
            points.append((float(drafted), speed * above_noise([own - nothing for _, own, _ in found])))
    return fit_draft(points)


def above_noise(seconds: Sequence[float]) -> float:
    """The median, or 0 if a sign test does not find it above 0."""
    above = sum(s > 0 for s in seconds)
    return statistics.median(seconds) if intervals.binomial(above, len(seconds))[0] > 0.5 else 0.0


def time_rounds(
    model: Model, method: Method, ids: np.ndarray, rounds: int, *, drafted: int | None = None
) -> list[tuple[int, float, float]]:
    """(tokens drafted, seconds to draft and to learn from the verdict, seconds of the target's pass) of each of so many
    rounds that drafts. With policy=fixed drafts may be of `drafted` tokens.

    The host runs each stage as a program of its own, so a draft is timed by itself, after the target's pass as in a
    compiled loop, and methods share the program of that pass. The first round is not timed: it reads from memory what
    later rounds find in the caches.
    """
    assert method.drafter is not None
    loop, counted = Loop(model, method, ids, room=(rounds + 2) * (method.drafter.max_depth + 1), loop="host"), []
    if drafted is not None:
        loop.drafts_of(drafted)
    for _ in range(rounds + 1):
        loop.run(1)
        c = loop.session.counters()[0]
        draft, verify, commit = (getattr(c.times, stage) for stage in ("draft", "verify", "commit"))
        counted.append((c.num_drafts, c.num_draft_tokens, draft + commit, verify))
    steps = (np.subtract(after, before).tolist() for before, after in itertools.pairwise(counted))
    return [(drafted, own, target_pass) for drafts, drafted, own, target_pass in steps if drafts]
