"""What drafting costs, measured in real rounds."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specsparse.api import make_method
from specsparse.bench.sides import token_ids
from specsparse.costs import store
from specsparse.costs.fit import draft_line
from specsparse.costs.loops import Loop
from specsparse.costs.measure import load_or_measure
from specsparse.costs.table import CostTable, DraftCost
from specsparse.engine.params import SamplingParams
from specsparse.model import Model
from specsparse.session import Method
from specsparse.speculative.method import make_drafter
from specsparse.speculative.policy import Fixed


def cost_key(name: str, options: Mapping[str, Any] | None = None) -> str:
    """The name under which a drafter's cost is kept: its own, and the options that were given."""
    given = ", ".join(f"{key}={value}" for key, value in sorted((options or {}).items()) if value is not None)
    return f"{name} ({given})" if given else name


def table_for(model: Model, name: str, options: Mapping[str, Any]) -> tuple[CostTable, str]:
    """The model's table with the cost of a configured drafter, measured where it is not known yet, and its key.

    Raises:
        UserError: an unknown drafter or option.
    """
    params = SamplingParams(temperature=0.0)

    def make(gamma: int) -> Method:
        return make_method(model, make_drafter(name, options, Fixed(gamma)), None, params)

    key = cost_key(name, options)
    return table_with_draft(model, key, make), key


def table_with_draft(model: Model, drafter: str, make: Callable[[int], Method]) -> CostTable:
    """The model's table with the cost of one drafter, both measured where they are not known yet, and kept.

    Args:
        model: the target.
        drafter: name under which the cost is kept; with everything that changes it in the name.
        make: the method for a draft length.
    """
    table = load_or_measure(model)
    if drafter not in table.drafts:
        table = table.with_draft(drafter, measure_draft(model, table, make))
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
    once = token_ids(24, model.config.vocab_size, seed=1).tolist()
    ids = np.asarray([*once, *once, *once, *once[:8]], np.int32)[: model.config.context_length // 2]
    left = (model.config.context_length - len(ids)) // (max(gammas) + 1)
    stretch = max(1, min(rounds, left - 1) // 4)
    plain = Loop(model, Method(), ids, room=stretch)
    plain.run(stretch)
    points = []
    for gamma in gammas:
        loop = Loop(model, make(gamma), ids, room=(4 * stretch + 1) * (gamma + 1))
        loop.run(1)  # compiles
        found = [_draft_seconds(loop, plain, table, stretch, gamma) for _ in range(4)]
        found = [pair for pair in found if pair is not None]
        if found:
            points.append((statistics.fmean(m for m, _ in found), statistics.median(s for _, s in found)))
    return draft_line(points)


def _draft_seconds(loop: Loop, plain: Loop, table: CostTable, rounds: int, gamma: int) -> tuple[float, float] | None:
    """Tokens drafted a round and seconds that takes, over some rounds; None where the text has ended."""
    first, kv = loop.session.counters(0), float(loop.session.state.length[0])
    seconds = loop.run(rounds) - table.host_s
    c = loop.session.counters(0)
    ran, drafts = c.num_rounds - first.num_rounds, c.num_drafts - first.num_drafts
    if not ran:
        return None
    drafted = c.num_draft_tokens - first.num_draft_tokens
    kv += (c.num_emitted_tokens - first.num_emitted_tokens) / 2
    rows = 1 + (drafted / drafts if drafts else 0)
    rest = drafts * table.round(rows, gamma, kv) + (ran - drafts) * table.round(1, gamma, kv)
    speed = (plain.again(rounds) - table.host_s) / (rounds * table.step(float(plain.session.state.length[0])))
    return drafted / ran, max(seconds / speed - rest, 0.0) / ran
