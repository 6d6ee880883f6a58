"""What drafting costs, measured in real rounds."""

import hashlib
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.measure.costs.fit import draft_line
from specsparse.measure.costs.loops import Loop
from specsparse.measure.costs.measured import load_or_measure
from specsparse.measure.costs.progress import Bar, silent
from specsparse.measure.trials import token_ids
from specsparse.runtime.binding import make_method
from specsparse.runtime.device_batch import Method
from specsparse.runtime.metrics import Counters
from specsparse.runtime.times import store
from specsparse.runtime.times.kept import CostTable, DraftCost
from specsparse.runtime.times.stamp import cost_key
from specsparse.speculative.method import make_drafter
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.tree import TreeTemplate
from specsparse.speculative.trees.base import TreeShape
from specsparse.speculative.trees.static import static_tree
from specsparse.support.interleaved import interleaved


def table_for(model: Model, name: str, options: Mapping[str, object], *, bar: Bar = silent) -> tuple[CostTable, str]:
    """The model's table with the cost of a configured drafter, measured where it is not known yet, and its key.

    Raises:
        UserError: an unknown drafter or option.
    """
    params = SamplingParams(temperature=0.0)

    def make(gamma: int) -> Method:
        return make_method(model, make_drafter(name, options, Fixed(gamma)), None, params)

    key = cost_key(name, options)
    return table_with_draft(model, key, make, bar=bar), key


def table_with_draft(model: Model, drafter: str, make: Callable[[int], Method], *, bar: Bar = silent) -> CostTable:
    """The model's table with the cost of one drafter, both measured where they are not known yet, and kept.

    Args:
        model: the target.
        drafter: name under which the cost is kept; with everything that changes it in the name.
        make: the method for a draft length.
        bar: shows progress.
    """
    return table_with(model, drafter, lambda table: measure_draft(model, table, make), bar)


def table_with(model: Model, drafter: str, measured: Callable[[CostTable], DraftCost], bar: Bar) -> CostTable:
    """The same for a cost that is measured in another way, by `measure_tree` or `measure_whole`."""
    table = load_or_measure(model, bar=bar)
    if drafter not in table.drafts:
        with bar("measuring the cost of drafting", 1) as done:
            table = table.with_draft(drafter, measured(table))
            done()
        store.save(model, table)
    return table


def measure_draft(
    model: Model, table: CostTable, make: Callable[[int], Method], *, gammas: tuple[int, int] = (2, 7), rounds: int = 96
) -> DraftCost:
    """What drafting costs in real rounds: their time less what the table says of the forward and the round.

    The text is a repeated passage, so that lookups find something. Plain steps are timed in turn with stretches of
    rounds, and the table's times are scaled by them.

    Args:
        model: the target.
        table: its measured times.
        make: the method for a draft length; called with both of `gammas`, from which the cost of a token and of a
            round are told apart (all goes to the round where the drafts come out equally long).
        gammas: the two draft lengths.
        rounds: of all stretches together.
    """
    beside, points = _Beside.of(model, table, max(gammas), rounds), []
    for gamma in gammas:
        if found := beside.stretches(make(gamma), nodes=gamma, depth=gamma):
            points.append((statistics.fmean(m for m, _ in found), statistics.median(s for _, s in found)))
    return draft_line(points)


def measure_tree(
    model: Model, table: CostTable, make: Callable[[TreeTemplate], Method], *, rounds: int = 96
) -> DraftCost:
    """What drafting trees costs, as `measure_draft` does for chains: `token_s` a level, `fixed_s` a round besides.

    Args:
        model, table, rounds: as there.
        make: the method for a template; called with a shallow one and a deep one.
    """
    beside, points = _Beside.of(model, table, DEEP.size, rounds), []
    for template in (SHALLOW, DEEP):
        if found := beside.stretches(make(template), nodes=template.size, depth=template.max_depth):
            points.append((float(template.max_depth), statistics.median(s for _, s in found)))
    return draft_line(points)


def measure_whole(model: Model, table: CostTable, method: Method, *, rounds: int = 96) -> DraftCost:
    """What drafting a tree costs that is drafted in the same way every round: all of it by the round."""
    assert method.drafter is not None
    beside = _Beside.of(model, table, method.max_nodes, rounds)
    found = beside.stretches(method, nodes=method.max_nodes, depth=method.drafter.max_depth)
    return DraftCost(fixed_s=statistics.median([seconds for _, seconds in found] or [0.0]))


def trees_key(name: str, options: Mapping[str, object] | None = None, draw: str = "top") -> str:
    """The name under which the cost of a drafter's trees is kept, whatever their shape."""
    return f"{cost_key(name, options)}, {draw} trees"


def table_for_trees(
    model: Model, name: str, options: Mapping[str, object], *, draw: str = "top", bar: Bar = silent
) -> tuple[CostTable, str]:
    """The same for static trees: what a level costs, by `measure_tree`.

    Args:
        model, name, options, bar: as `table_for`'s.
        draw: how children are drawn.
    """
    params, key = SamplingParams(temperature=0.0), trees_key(name, options, draw)

    def make(template: TreeTemplate) -> Method:
        tree = static_tree(template, draw)
        return make_method(model, make_drafter(name, options, Fixed(template.size), tree=tree), None, params)

    return table_with(model, key, lambda table: measure_tree(model, table, make), bar), key


def table_for_tree(
    model: Model, name: str, options: Mapping[str, object], tree: TreeShape, method: Method, *, bar: Bar = silent
) -> tuple[CostTable, str]:
    """The model's table with what a drafter's trees of one shape cost a round, and the key of it; as `table_for`.

    Args:
        model: the target.
        name, options: of the drafter.
        tree: its shape; what is kept holds for this one alone.
        method: that drafts it.
        bar: shows progress.
    """
    shape = hashlib.sha256(repr(tree).encode()).hexdigest()[:16]
    key = f"{cost_key(name, options)}, tree #{shape}"
    return table_with(model, key, lambda table: measure_whole(model, table, method), bar), key


SHALLOW, DEEP = TreeTemplate.kary((3,)), TreeTemplate.kary((3, 1, 1))
"""Trees of one level and of three."""


def _passage(model: Model) -> np.ndarray:
    """A repeated passage, at most half the context."""
    once = token_ids(24, model.config.vocab_size, seed=1).tolist()
    return np.asarray([*once, *once, *once, *once[:8]], np.int32)[: model.config.context_length // 2]


_STRETCHES = 12
"""Timings of one method; together they are as many rounds as are asked for, where the context holds so many. From four
the cost of a drafted token was known to 0.02 plain steps."""
_LONG_S = 0.03
"""A plain step from which on fewer rounds are timed."""


@dataclass(frozen=True)
class _Beside:
    """The plain loop that stretches of `rounds` rounds of a method on the same text are timed in turn with."""

    model: Model
    table: CostTable
    ids: np.ndarray
    rounds: int
    plain: Loop

    @classmethod
    def of(cls, model: Model, table: CostTable, nodes: int, rounds: int) -> "_Beside":
        """For drafts of up to `nodes` nodes; fewer rounds where the context holds no more, or a step takes long."""
        ids, rounds = _passage(model), rounds if table.plain_s < _LONG_S else rounds // 3
        left = (model.config.context_length - len(ids)) // (nodes + 1)
        stretch = max(1, min(rounds, left - 1 - _STRETCHES) // _STRETCHES)
        plain = Loop(model, Method(), ids, room=stretch + 1)
        plain.run(stretch)  # compiles
        return cls(model, table, ids, stretch, plain)

    def stretches(self, method: Method, *, nodes: int, depth: int) -> list[tuple[float, float]]:
        """(tokens drafted, seconds that takes) a round that drafts, for each stretch until the text ends.

        Each stretch begins with a round that is not timed: after another program the first one reads from memory what
        the caches hold in all others, and a text has more of those.

        Args:
            method: with its drafter.
            nodes: that a draft has room for.
            depth: most tokens that a draft adds to the text.
        """
        table = self.table
        loop = Loop(self.model, method, self.ids, room=(_STRETCHES * (self.rounds + 1) + 1) * (depth + 1))
        loop.run(1)  # compiles
        places: list[tuple[_Place, _Place]] = []

        def ahead() -> float:
            loop.run(1)
            start = _place(loop)
            took = loop.run(self.rounds)
            places.append((start, _place(loop)))
            return took

        def plainly() -> float:
            self.plain.again(1)
            return self.plain.run(self.rounds)

        # A call of the method hands over more state than one of plain decoding, so it takes longer by itself.
        calls = {"method": ahead, "plain": plainly, "call": partial(loop.run, 0)}
        taken = interleaved(calls, repeats=_STRETCHES, warm_up=0)
        call_s = statistics.median(taken["call"])
        plain_kv = float(self.plain.session.state.length[0])
        found = []
        for ((first, start), (c, end)), took, plain_s in zip(places, taken["method"], taken["plain"]):
            ran, drafts = c.num_rounds - first.num_rounds, c.num_drafts - first.num_drafts
            if not ran:
                break
            if not drafts:
                continue
            drafted, kv = c.num_draft_tokens - first.num_draft_tokens, (start + end) / 2
            rest = drafts * table.round(1 + drafted / drafts, nodes, kv) + (ran - drafts) * table.step(kv)
            speed = (plain_s - table.host_s) / (self.rounds * table.step(plain_kv))
            found.append((drafted / drafts, max((took - call_s) / speed - rest, 0.0) / drafts))
        return found


_Place = tuple[Counters, float]
"""Counters and tokens of a text so far."""


def _place(loop: Loop) -> _Place:
    """Where it is."""
    return loop.session.counters()[0], float(loop.session.state.length[0])
