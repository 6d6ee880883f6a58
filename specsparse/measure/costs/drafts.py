"""What drafting costs, measured in real rounds."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.measure.bench.sides import token_ids
from specsparse.measure.costs.fit import draft_line
from specsparse.measure.costs.loops import Loop
from specsparse.measure.costs.measured import load_or_measure
from specsparse.measure.costs.progress import Bar, silent
from specsparse.runtime.binding import make_method
from specsparse.runtime.session import Method
from specsparse.runtime.times import store
from specsparse.runtime.times.kept import CostTable, DraftCost
from specsparse.runtime.times.stamp import cost_key
from specsparse.speculative.method import make_drafter
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.tree import TreeTemplate


def table_for(model: Model, name: str, options: Mapping[str, Any], *, bar: Bar = silent) -> tuple[CostTable, str]:
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
    """
    table = load_or_measure(model, bar=bar)
    if drafter not in table.drafts:
        with bar("measuring the cost of drafting", 1) as done:
            table = table.with_draft(drafter, measure_draft(model, table, make))
            done()
        store.save(model, table)
    return table


def table_with_tree(
    model: Model, drafter: str, make: Callable[[TreeTemplate], Method], *, bar: Bar = silent
) -> CostTable:
    """The same for a drafter of trees; `make` gives the method for a template, `token_s` is of a level."""
    table = load_or_measure(model, bar=bar)
    if drafter not in table.drafts:
        with bar("measuring the cost of drafting trees", 1) as done:
            table = table.with_draft(drafter, measure_tree(model, table, make))
            done()
        store.save(model, table)
    return table


def table_with_whole(model: Model, drafter: str, make: Callable[[], Method], *, bar: Bar = silent) -> CostTable:
    """The same for one tree; `make` gives the method, the cost is of a round."""
    table = load_or_measure(model, bar=bar)
    if drafter not in table.drafts:
        with bar("measuring the cost of drafting a tree", 1) as done:
            table = table.with_draft(drafter, measure_whole(model, table, make()))
            done()
        store.save(model, table)
    return table


def measure_draft(
    model: Model, table: CostTable, make: Callable[[int], Method], *, gammas: tuple[int, int] = (2, 7), rounds: int = 32
) -> DraftCost:
    """What drafting costs in real rounds: their time less what the table says of the forward and the round.

    The text is a repeated passage, so that lookups find something. Plain steps are timed beside each stretch of
    rounds, and the table's times are scaled by them.

    Args:
        make: the method for a draft length; called with both of `gammas`, from which the cost of a token and of a
            round are told apart (all goes to the round where the drafts come out equally long).
    """
    ids = _passage(model)
    stretch, plain = _stretch(model, ids, max(gammas), rounds)
    points = []
    for gamma in gammas:
        loop = Loop(model, make(gamma), ids, room=(4 * stretch + 1) * (gamma + 1))
        loop.run(1)  # compiles
        found = [_draft_seconds(loop, plain, table, stretch, gamma) for _ in range(4)]
        found = [pair for pair in found if pair is not None]
        if found:
            points.append((statistics.fmean(m for m, _ in found), statistics.median(s for _, s in found)))
    return draft_line(points)


def measure_tree(
    model: Model, table: CostTable, make: Callable[[TreeTemplate], Method], *, rounds: int = 32
) -> DraftCost:
    """What drafting trees costs, as `measure_draft` does for chains: `token_s` a level, `fixed_s` a round besides.

    Args:
        make: the method for a template; called with a shallow one and a deep one.
    """
    ids = _passage(model)
    stretch, plain = _stretch(model, ids, DEEP.size, rounds)
    points = []
    for template in (SHALLOW, DEEP):
        loop = Loop(model, make(template), ids, room=(4 * stretch + 1) * (template.max_depth + 1))
        loop.run(1)  # compiles
        found = [_draft_seconds(loop, plain, table, stretch, template.size) for _ in range(4)]
        if took := [pair[1] for pair in found if pair is not None]:
            points.append((float(template.max_depth), statistics.median(took)))
    return draft_line(points)


def measure_whole(model: Model, table: CostTable, method: Method, *, rounds: int = 32) -> DraftCost:
    """What drafting a tree costs that is grown in the same way every round: all of it by the round."""
    assert method.drafter is not None
    ids, nodes, depth = _passage(model), method.max_nodes, method.drafter.max_depth
    stretch, plain = _stretch(model, ids, nodes, rounds)
    loop = Loop(model, method, ids, room=(4 * stretch + 1) * (depth + 1))
    loop.run(1)  # compiles
    found = [_draft_seconds(loop, plain, table, stretch, nodes) for _ in range(4)]
    return DraftCost(fixed_s=statistics.median([seconds for _, seconds in filter(None, found)] or [0.0]))


SHALLOW, DEEP = TreeTemplate.kary((3,)), TreeTemplate.kary((3, 1, 1))
"""Trees of one level and of three."""


def _passage(model: Model) -> np.ndarray:
    """A repeated passage, at most half the context."""
    once = token_ids(24, model.config.vocab_size, seed=1).tolist()
    return np.asarray([*once, *once, *once, *once[:8]], np.int32)[: model.config.context_length // 2]


def _stretch(model: Model, ids: np.ndarray, nodes: int, rounds: int) -> tuple[int, Loop]:
    """Rounds of a timing, a quarter of `rounds` or what the context holds, and the plain loop beside them, compiled."""
    left = (model.config.context_length - len(ids)) // (nodes + 1)
    stretch = max(1, min(rounds, left - 1) // 4)
    plain = Loop(model, Method(), ids, room=stretch)
    plain.run(stretch)
    return stretch, plain


def _draft_seconds(loop: Loop, plain: Loop, table: CostTable, rounds: int, gamma: int) -> tuple[float, float] | None:
    """Tokens drafted a round and seconds that takes, over some rounds; None where the text has ended."""
    first, kv = loop.session.counters()[0], float(loop.session.state.length[0])
    seconds = loop.run(rounds) - table.host_s
    c = loop.session.counters()[0]
    ran, drafts = c.num_rounds - first.num_rounds, c.num_drafts - first.num_drafts
    if not ran:
        return None
    drafted = c.num_draft_tokens - first.num_draft_tokens
    kv += (c.num_emitted_tokens - first.num_emitted_tokens) / 2
    rows = 1 + (drafted / drafts if drafts else 0)
    rest = drafts * table.round(rows, gamma, kv) + (ran - drafts) * table.round(1, gamma, kv)
    speed = (plain.again(rounds) - table.host_s) / (rounds * table.step(float(plain.session.state.length[0])))
    return drafted / ran, max(seconds / speed - rest, 0.0) / ran
