"""How often drafts are accepted: swept, counted in a run of ours, or kept from one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import yaml

from specsparse.errors import UserError
from specsparse.runtime import metrics
from specsparse.runtime.metrics import Counters
from specsparse.speculative import expected
from specsparse.speculative.method import drafts_trees
from specsparse.speculative.trees.registry import CHAIN
from specsparse.support.files import Json
from specsparse.support.options import Positive, Range, read

Rate = Annotated[float, Range(0, 1)]
KEPT = Path(__file__).parents[2] / "data" / "acceptance.yaml"
"""Rates that were measured once, each with where and when."""


@dataclass(frozen=True)
class Accepted:
    """How a chain's drafts are accepted.

    Attributes:
        alpha: chance that a drafted token is accepted once those before it were.
        reach: chance that a draft is accepted up to its 1st, 2nd .. token, () where alpha alone is known.
        share: of the rounds that draft.
        length: mean tokens of a draft, where it is shorter than it may be.
        weight: tokens that were counted, 1 where nothing was.
        ranks: chance that the child of each rank is the one accepted, of children of one node; () where not counted.
    """

    alpha: Rate
    reach: tuple[Rate, ...] = ()
    share: Rate = 1.0
    length: Positive | None = None
    weight: Positive = 1.0
    ranks: tuple[Rate, ...] = ()

    @classmethod
    def counted(cls, c: Counters) -> "Accepted | None":
        """Of a run's counters; None where nothing was drafted."""
        if not (c.num_drafts and c.num_tested and c.num_rounds):
            return None
        reach = tuple(accepted / c.num_drafts for accepted in c.num_accepted_tokens_per_pos)
        drafted = c.num_draft_tokens / c.num_drafts
        share = c.num_drafts / c.num_rounds
        return cls(c.num_accepted_tokens / c.num_tested, reach, share, drafted, float(c.num_emitted_tokens))

    def tokens(self, gamma: int) -> float:
        """E[tokens] of a round with drafts of up to gamma tokens, the bonus included; no further than was counted."""
        tokens = 1 + sum(self.reach[:gamma]) if self.reach else expected.expected_tokens(self.alpha, gamma)
        return expected.mean_tokens(tokens, self.share)

    def rows(self, gamma: int) -> float:
        """Mean tokens of a draft that may have gamma."""
        return gamma if self.length is None else min(float(gamma), self.length)

    def as_dict(self) -> Json:
        """As plain values."""
        return {"alpha": self.alpha, "reach": list(self.reach), "share": self.share, "length": self.length,
                "weight": self.weight, "ranks": list(self.ranks)}  # fmt: skip


@dataclass(frozen=True)
class AcceptedRates:
    """Of one method on texts of some kinds.

    Attributes:
        source: where it is from, in a line.
        tasks: by kind of text.
    """

    source: str
    tasks: Mapping[str, Accepted]

    @property
    def alpha(self) -> float:
        """Of all tasks, weighted by their tokens."""
        whole = sum(a.weight for a in self.tasks.values())
        return sum(a.alpha * a.weight for a in self.tasks.values()) / whole

    @property
    def longest(self) -> int | None:
        """The longest draft that was counted; None where none was."""
        counted = [len(a.reach) for a in self.tasks.values() if a.reach and a.share]
        return max(counted) if counted else None

    def of_task(self, task: str) -> "AcceptedRates | None":
        """On texts of that kind, None where none were counted."""
        return AcceptedRates(f"{self.source}, {task}", {task: self.tasks[task]}) if task in self.tasks else None


SWEPT = "swept"
"""The source of what nobody counted."""


def swept(alpha: float) -> AcceptedRates:
    """The same chance at every place of every text.

    Raises:
        UserError: no chance.
    """
    if not 0 <= alpha <= 1:
        raise UserError(f"an acceptance of {alpha:g} is none: it lies in 0 to 1")
    return AcceptedRates(SWEPT, {"any": Accepted(alpha)})


def of_groups(source: str, groups: Mapping[str, Counters]) -> AcceptedRates | None:
    """Of counters by task, without their sum; None where nothing was drafted."""
    found = {task: Accepted.counted(c) for task, c in groups.items() if task != "all"}
    if not found and "all" in groups:
        found = {"all": Accepted.counted(groups["all"])}
    idle = {task: Accepted(0.0, (0.0,), 0.0, None, float(groups[task].num_emitted_tokens or 1))
            for task, one in found.items() if one is None}  # fmt: skip
    if all(one is None for one in found.values()):
        return None
    return AcceptedRates(source, {task: one or idle[task] for task, one in found.items()})


def of_record(path: Path) -> dict[str, AcceptedRates]:
    """Of a run's record.json, by drafter: of a run with one method, or of one that compared several.

    Raises:
        UserError: no such file, or a record in which no chain was drafted.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        source = f"{path.parent.name}/{path.name}"
        made = {str(name): of_groups(source, groups) for name, groups in _methods(record)}
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {error.strerror}; a run leaves its record.json in its folder"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise UserError(f"{path}: is no record.json of a run") from None
    kept = {name: one for name, one in made.items() if one is not None}
    if not kept:
        raise UserError(
            f"{path}: no method of this run drafted chains; +experiment=spec and compare leave such records"
        )
    for name, one in kept.items():
        for task, rates in one.tasks.items():
            given = {key: value for key, value in rates.as_dict().items() if value is not None}
            read(Accepted, given, group=f"{path}: {name}, {task}")  # counters that contradict one another
    return kept


def _methods(record: Json):
    """(drafter, counters by task) of a record of `kind: speed` or `kind: compare`."""
    if record.get("kind") == "compare":
        trees = record.get("config", {}).get("tree", {}).get("name", CHAIN) != CHAIN
        for row in record["methods"]:
            name = row["name"].split(" x ")[0]
            if trees and drafts_trees(name):
                continue  # what positions are to a chain, levels are to a tree
            sides = {task: group["speculative"] for task, group in row["tasks"].items()}
            yield name, {task: metrics.from_dict(s["counters"]) for task, s in sides.items()}
    elif record["method"].get("levels") is None:
        groups = {task: group["sides"] for task, group in record["groups"].items()}
        counted = {
            task: metrics.from_dict(sides["speculative"]["counters"])
            for task, sides in groups.items() if "speculative" in sides
        }  # fmt: skip
        yield record["method"]["drafter"], counted


@dataclass(frozen=True)
class _Row:
    """A line of the table of kept rates."""

    target: str
    drafter: str
    source: str
    tasks: Mapping[str, Json]


@cache
def _table(path: Path) -> tuple[_Row, ...]:
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tuple(read(_Row, row, group=f"{path.name}[{i}]") for i, row in enumerate(rows))


def kept(target: str, drafter: str) -> AcceptedRates | None:
    """What the table has of a drafter (of a draft model its name) for a target, or None."""
    for row in _table(KEPT):
        if (row.target, row.drafter) == (target, drafter):
            tasks = {task: read(Accepted, values, group=f"{drafter}.{task}") for task, values in row.tasks.items()}
            return AcceptedRates(row.source, tasks)
    return None


def kept_tasks(target: str) -> set[str]:
    """Kinds of texts that the table has rates of."""
    return {task for row in _table(KEPT) if row.target == target for task in row.tasks}
