"""Measured acceptance: how often a chain's drafts are accepted, and how often the child of each rank is in a tree.

Measured by decoding prompts with the drafter, so that it holds for this target, draft, verifier and temperature.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.measure.costs.measured import load_or_measure
from specsparse.measure.costs.progress import Bar, silent
from specsparse.runtime.device_batch import Method, Request
from specsparse.runtime.metrics import Counters
from specsparse.runtime.session import Session
from specsparse.runtime.stepped import RoundView, Watch
from specsparse.runtime.times import store
from specsparse.runtime.times.kept import CostTable
from specsparse.runtime.times.stamp import cost_key
from specsparse.speculative.tree import TreeTemplate
from specsparse.speculative.verifiers.registry import RULES

RANKS = 8
"""Children whose acceptance is measured."""
ROUNDS = 24
"""Rounds a prompt."""

_LONGEST = 40
"""Characters of a value that stand in a key as they are."""

FAN = TreeTemplate.kary((RANKS,))
"""The tree that acceptance by rank is measured with: all children of the root."""

_LAW = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids", "logits_processors",
)  # fmt: skip
"""Sampling parameters that change the law of a token (`min_tokens` bans the tokens that stop)."""


def acceptance_key(
    drafter: str,
    verifier: str | None,
    params: SamplingParams,
    shape: str,
    *,
    options: Mapping[str, object] | None = None,
) -> str:
    """The name under which acceptance is kept: with everything that changes it.

    Args:
        drafter: name and options, as `drafts.cost_key` gives them.
        verifier: its name, or None for the default.
        params: of the target's law; those that are not its defaults count, functions by their names.
        shape: "chain", or how the siblings of a tree are drawn.
        options: of the verifier.
    """
    default = SamplingParams()
    given = [k for k in _LAW if k == _LAW[0] or getattr(params, k) != getattr(default, k)]
    law = [f"{k}={_shown(getattr(params, k))}" for k in given]
    return ", ".join([drafter, cost_key(verifier or "default verifier", options, among=RULES), shape, *law])


def _shown(value: object) -> str:
    """A number as it is written, anything longer by a digest."""
    if isinstance(value, Mapping):
        value = tuple(sorted(value.items()))
    elif isinstance(value, tuple):
        value = tuple(f"{v.__module__}.{v.__qualname__}" if callable(v) else v for v in value)
    text = repr(value)
    return text if len(text) <= _LONGEST else f"#{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def table_with_acceptance(
    model: Model,
    key: str,
    method: Callable[[], Method],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    whole: bool = False,
    bar: Bar = silent,
) -> CostTable:
    """The model's table with the acceptance of one method, measured where it is not known yet, and kept.

    Args:
        key: of `acceptance_key`.
        method: a chain of drafts, or the tree `FAN`.
        whole: whether it is another tree, measured as a whole (`tree_rates`).
        prompts: token ids to decode from; the longest part that leaves room in the context is used.
        params: the target's law.
    """
    table = load_or_measure(model, bar=bar)
    if key not in table.acceptance:
        how = method()
        assert how.drafter is not None
        with bar("measuring acceptance", len(prompts)) as done:
            if how.drafter.tree and not whole:
                rates = by_rank(model, how, prompts, params, done=done)
            else:
                counted = counters(sessions(model, how, prompts, params), done=done)
                rates = tree_rates(counted) if how.drafter.tree else chain_rate(counted)
        table = table.with_acceptance(key, rates)
        store.save(model, table)
    return table


def chain_rate(c: Counters) -> tuple[float]:
    """(accepted / tested,) of chains; (0.0,) where nothing was drafted."""
    return (c.num_accepted_tokens / c.num_tested if c.num_tested else 0.0,)


def tree_rates(c: Counters) -> tuple[float, float]:
    """(tokens emitted, nodes drafted) a round of trees."""
    rounds = max(c.num_rounds, 1)
    return c.num_emitted_tokens / rounds, c.num_draft_tokens / rounds


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


def counters(sessions: Iterable[Session], *, done: Callable[[], None] = lambda: None) -> Counters:
    """Of some rounds on each prompt, all together."""
    total = Counters()
    for session in sessions:
        session.advance(ROUNDS)
        total += session.counters()[0]
        done()
    return total


def sessions(
    model: Model,
    method: Method,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    watch: Watch | None = None,
) -> Iterator[Session]:
    """A session for each prompt, with room for so many rounds."""
    room = ROUNDS * (method.max_nodes + 1)
    kept = max(2, model.config.context_length - room - method.max_nodes)
    for seed, ids in enumerate(prompts):
        tail = np.asarray(ids, np.int32)[-kept:]
        text = Request(tail, params.merged(max_tokens=room, ignore_eos=True), seed)
        yield Session(model, [text], method, watch=watch)
