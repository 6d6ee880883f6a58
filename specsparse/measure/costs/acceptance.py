"""How often drafts are accepted: swept, counted in a run, kept from one, or measured by decoding prompts here.

Acceptance depends on target, drafter, verifier, temperature and text, and not on the machine. Two forms of it stand
here: `Accepted` for predictions, and rates by rank for Sequoia's trees.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import numpy as np
import yaml

from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.measure.costs.measuring import Bar, load_or_measure, silent
from specsparse.runtime import metrics, timing_cache
from specsparse.runtime.loops import RoundView, Watch
from specsparse.runtime.method import Method, drafts_trees
from specsparse.runtime.metrics import Counters
from specsparse.runtime.session import Request, Session
from specsparse.runtime.timing_cache import CostTable, cost_key
from specsparse.speculative import expected
from specsparse.speculative.trees import CHAIN
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import RULES
from specsparse.support.files import Json
from specsparse.support.options import Positive, Range, read

Rate = Annotated[float, Range(0, 1)]
SWEPT = "swept"
"""The source of rates that nobody counted."""
KEPT = Path(__file__).parents[2] / "data" / "acceptance.yaml"
"""Rates that were measured once, each with where and when."""


@dataclass(frozen=True)
class Accepted:
    """How a chain's drafts are accepted."""

    alpha: Rate  # chance that a drafted token is accepted once those before it were
    # chance that a draft is accepted up to its 1st, 2nd .. token; () if only alpha is known
    reach: tuple[Rate, ...] = ()
    share: Rate = 1.0  # of the rounds, those that draft
    length: Positive | None = None  # mean tokens of a draft, if drafts are shorter than they may be
    weight: Positive = 1.0  # tokens that were counted; 1 without a count
    ranks: tuple[Rate, ...] = ()  # chance of each child of a node, by rank, to be the accepted one; () if not counted

    @classmethod
    def from_counters(cls, c: Counters) -> "Accepted | None":
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
        """Mean tokens of a draft if gamma are allowed."""
        return gamma if self.length is None else min(float(gamma), self.length)


@dataclass(frozen=True)
class AcceptedRates:
    """Acceptance of one method by kind of text, and in a line where it is from."""

    source: str
    tasks: Mapping[str, Accepted]

    @classmethod
    def from_groups(cls, source: str, groups: Mapping[str, Counters]) -> "AcceptedRates | None":
        """Rates of counters by task, without their sum; None if nothing was drafted."""
        found = {task: Accepted.from_counters(c) for task, c in groups.items() if task != "all"}
        if not found and "all" in groups:
            found = {"all": Accepted.from_counters(groups["all"])}
        if all(one is None for one in found.values()):
            return None
        idle = {task: Accepted(0.0, (0.0,), 0.0, None, float(groups[task].num_emitted_tokens or 1)) for task in found}
        return cls(source, {task: one or idle[task] for task, one in found.items()})

    def mean(self, value: Callable[[Accepted], float]) -> float:
        """Mean of a value over the tasks, weighted by their tokens."""
        whole = sum(a.weight for a in self.tasks.values())
        return sum(value(a) * a.weight for a in self.tasks.values()) / whole

    @property
    def alpha(self) -> float:
        return self.mean(lambda a: a.alpha)

    @property
    def share(self) -> float:
        return self.mean(lambda a: a.share)

    @property
    def longest(self) -> int | None:
        return max((len(a.reach) for a in self.tasks.values() if a.reach and a.share), default=None)


def swept(alpha: float) -> AcceptedRates:
    """One acceptance for all positions and texts."""
    return AcceptedRates(SWEPT, {"any": Accepted(alpha)})


def from_record(path: Path) -> dict[str, AcceptedRates]:
    """The rates by drafter that a run's record.json counted: a run with one method, or one that compared several.
    UserError: no such file, or a record in which no chain was drafted."""
    source, kept, why = f"{path.parent.name}/{path.name}", {}, "no method of this run drafted chains"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if "stand_in" in record:
            raise UserError(f"{path}: is of a stand-in, not of the pair that was asked for; take a run of the pair")
        made = {str(name): AcceptedRates.from_groups(source, groups) for name, groups in _counted_chains(record)}
        kept = {name: one for name, one in made.items() if one is not None}
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        why = "is no record.json of a run"
    if not kept:
        raise UserError(f"{path}: {why}; +experiment=spec and compare leave a record.json in the run's folder")
    for name, one in kept.items():
        for task, rates in one.tasks.items():
            given = {key: value for key, value in asdict(rates).items() if value is not None}
            read(Accepted, given, group=f"{path}: {name}, {task}")  # counters that contradict one another
    return kept


def _counted_chains(record: Json) -> Iterator[tuple[str, dict[str, Counters]]]:
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
        counted = {
            task: metrics.from_dict(sides["speculative"]["counters"])
            for task, sides in {"all": record["summary"], **record["tasks"]}.items() if "speculative" in sides
        }  # fmt: skip
        yield record["method"]["drafter"], counted


@cache
def kept_rates() -> Mapping[tuple[str, str], AcceptedRates]:
    """The kept rates by target and drafter (a draft model by its name)."""
    kept = {}
    for row in yaml.safe_load(KEPT.read_text(encoding="utf-8")):
        label = f"{KEPT.name}: {row['target']}, {row['drafter']}"
        tasks = {task: read(Accepted, values, group=f"{label}, {task}") for task, values in row["tasks"].items()}
        kept[row["target"], row["drafter"]] = AcceptedRates(row["source"], tasks)
    return MappingProxyType(kept)


RANKS, ROUNDS = 8, 24
"""Children whose acceptance is measured, and rounds a prompt."""
FAN = TreeTemplate.kary((RANKS,))
"""The tree that acceptance by rank is measured with: all children of the root."""
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids", "logits_processors",
)  # fmt: skip
"""Parameters that change the distribution of a token (`min_tokens` bans the tokens that stop)."""


def acceptance_key(
    drafter: str,
    verifier: str | None,
    params: SamplingParams,
    shape: str,
    *,
    options: Mapping[str, object] | None = None,
) -> str:
    """The name under which acceptance is kept, with everything that changes it.

    `drafter` is a `cost_key`, `shape` is "chain" or how the siblings of a tree are drawn, `options` are the verifier's.
    Of the sampling parameters those that are not their defaults count, functions by their names.
    """

    def short(value: object) -> str:
        """A number as it is written, anything longer by a digest."""
        if isinstance(value, Mapping):
            value = tuple(sorted(value.items()))
        elif isinstance(value, tuple):
            value = tuple(f"{v.__module__}.{v.__qualname__}" if callable(v) else v for v in value)
        text = repr(value)
        return text if len(text) <= 40 else f"#{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    default = SamplingParams()
    given = [k for k in _SAMPLING if k == _SAMPLING[0] or getattr(params, k) != getattr(default, k)]
    sampling = [f"{k}={short(getattr(params, k))}" for k in given]
    return ", ".join([drafter, cost_key(verifier or "default verifier", options, among=RULES), shape, *sampling])


def table_with_acceptance(
    model: Model,
    key: str,
    method: Callable[[], Method],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    whole: bool = False,
    keep: bool = True,
    bar: Bar = silent,
) -> CostTable:
    """The model's table with the acceptance of one method, measured if it is not known yet, and kept (if `keep`).

    A chain has (accepted / tested,), the tree `FAN` its rates `by_rank`, and a tree that is measured as a `whole`
    (tokens emitted, nodes drafted) a round.

    `key` is that of `acceptance_key`. The longest part of the prompts (token ids) that leaves room is used.
    """
    table = load_or_measure(model, bar=bar)
    if key not in table.acceptance:
        how = method()
        assert how.drafter is not None
        with bar("measuring acceptance", len(prompts)) as done:
            if how.drafter.tree and not whole:
                rates = by_rank(model, how, prompts, params, done=done)
            else:
                c = Counters()
                for session in sessions(model, how, prompts, params):
                    session.advance(ROUNDS)
                    c += session.counters()[0]
                    done()
                rates = (c.num_accepted_tokens / c.num_tested if c.num_tested else 0.0,)
                if how.drafter.tree:
                    rates = tuple(n / max(c.num_rounds, 1) for n in (c.num_emitted_tokens, c.num_draft_tokens))
        table = dataclasses.replace(table, acceptance={**table.acceptance, key: rates})
        if keep:
            table = timing_cache.save(model, table)
    return table


def by_rank(
    model: Model,
    method: Method,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    done: Callable[[], None] = lambda: None,
) -> tuple[float, ...]:
    """Sequoia's acceptance vector (Chen et al. 2402.12374, section 3.1): P(child of rank r is the accepted one).

    The siblings are the children of the root of `FAN`, in draw order; rounds whose draft was cut short do not count.
    """
    hits, rounds = np.zeros(method.max_nodes), 0

    def watch(view: RoundView) -> None:
        nonlocal rounds
        if int(view.draft.count[0]) == method.max_nodes:
            rounds += 1
            if (node := int(view.verdict.nodes[0, 0])) >= 0:
                hits[node] += 1

    for session in sessions(model, method, prompts, params, watch=watch):
        session.advance(ROUNDS)
        done()
    return tuple((hits / max(rounds, 1)).tolist())


def sessions(
    model: Model,
    method: Method,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    watch: Watch | None = None,
) -> Iterator[Session]:
    """A session for each prompt, with room for `ROUNDS` rounds."""
    room = ROUNDS * (method.max_nodes + 1)
    kept = max(2, model.config.context_length - room - method.max_nodes)
    for seed, ids in enumerate(prompts):
        tail = np.asarray(ids, np.int32)[-kept:]
        text = Request(tail, params.merged(max_tokens=room, ignore_eos=True), seed)
        yield Session(model, [text], method, watch=watch)
