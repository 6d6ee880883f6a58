"""The contract of a drafter, for anybody's own: `check_drafter(MyDrafter())` is one line in a test."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.errors import UserError
from specsparse.speculative.base import Draft, DraftContext, Drafted, Drafter, DraftKind, Feedback
from specsparse.speculative.drafters.plan import DrafterPlan
from specsparse.speculative.tree import check_parents
from specsparse.speculative.verify import match_verdict, valid_verifiers
from specsparse.testing.drafting import draft_context, drafted_ids, on_plan

VOCAB, CAPACITY, GAMMA = 5, 48, 6
"""Ids of the texts, few enough that they repeat themselves; their longest; most nodes asked for."""

SEEDS = range(4)
FEATURES = 64


def check_drafter(drafter: Drafter | DrafterPlan, *, weights: Any = None) -> None:
    """Refuses a drafter that breaks the contract of `speculative.base`.

    A plan is bound to a tiny random model. Texts have the ids 0 to `VOCAB` - 1 and at most `CAPACITY` tokens.

    Args:
        drafter: yours.
        weights: what its methods take as `params`.

    Raises:
        AssertionError: says what is broken.
    """
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(drafter, DrafterPlan):
            case = DrafterCase(*on_plan(Path(folder), drafter, vocab=VOCAB, capacity=CAPACITY))
        else:
            case = DrafterCase(drafter, weights)
        for check in DRAFTER_CHECKS:
            check(case)


@dataclasses.dataclass(frozen=True)
class DrafterCase:
    """A drafter under test.

    Attributes:
        drafter: yours.
        weights: its `params`.
        prepare: puts the target into a context.
        traced: batch sizes that a stage of `draft` was traced for, in order.
    """

    drafter: Drafter
    weights: Any = None
    prepare: Callable[[DraftContext], DraftContext] = lambda ctx: ctx
    traced: list[int] = dataclasses.field(default_factory=list)

    def draft(self, ctx: DraftContext) -> Draft:
        """The draft after a prompt, of which the last two tokens arrive through `commit`."""
        prepare, begin, draft, commit = self._stages
        before, after = prepare(ctx._replace(length=jnp.maximum(ctx.length - 2, 1))), prepare(ctx)
        drafted = draft(self.weights, begin(self.weights, before), before)
        return draft(self.weights, commit(self.weights, drafted, before, after), after).draft

    def first(self, ctx: DraftContext) -> Drafted:
        """The draft after the prompt itself."""
        return self.drafter.draft(self.weights, self._begin(self.weights, ctx), ctx)

    @functools.cached_property
    def _stages(self) -> tuple[Callable, ...]:
        """Compiled one by one: `draft` is needed twice, and so is the target's pass over the text."""

        def noted(stage: Callable, ctx: int) -> Callable:
            def traced(*given):
                self.traced.append(given[ctx].length.shape[0])
                return stage(*given)

            return jax.jit(traced)

        stages = (self.prepare, 0), (self._begin, 1), (self.drafter.draft, 2), (self._commit, 2)
        return tuple(noted(stage, ctx) for stage, ctx in stages)

    def _begin(self, weights: Any, ctx: DraftContext) -> Any:
        return self.drafter.init(weights, ctx, hidden=self._features(ctx))

    def _commit(self, weights: Any, drafted: Drafted, before: DraftContext, after: DraftContext) -> Any:
        """The state after a verdict that accepts no drafted token."""
        nothing = jnp.full((len(before.length), self.drafter.max_nodes + 1), VOCAB, jnp.int32)
        verdict, rows = match_verdict(drafted.draft, nothing), self._features(before)
        hidden = None if rows is None else rows[:, : self.drafter.max_nodes + 1]
        return self.drafter.commit(weights, drafted.state, after, Feedback(drafted.draft, verdict, hidden))

    def _features(self, ctx: DraftContext) -> jax.Array | None:
        """Some rows for each text, a function of its ids alone; None for drafters that want none."""
        if not self.drafter.wants_hidden:
            return None
        held = jnp.arange(CAPACITY)[None] < ctx.length[:, None]
        tokens = jnp.where(held, ctx.tokens, 0).astype(jnp.float32)
        wanted = self.drafter.wants_hidden
        width = FEATURES * (1 if wanted is True else len(wanted))
        return jnp.sin(tokens[:, :, None] * jnp.arange(1, width + 1, dtype=jnp.float32)[None, None])


def static_and_named(case: DrafterCase) -> None:
    """It is hashable, has room for a token, and some verifier takes its drafts."""
    drafter = case.drafter
    assert hash(drafter) == hash(drafter), "its hash changes"
    assert isinstance(drafter.kind, DraftKind), f"kind is {drafter.kind!r}, not a DraftKind"
    assert 1 <= drafter.max_depth <= drafter.max_nodes, f"max_depth {drafter.max_depth}, max_nodes {drafter.max_nodes}"
    assert valid_verifiers(drafter.kind, tree=drafter.tree), f"no verifier takes {drafter.kind} drafts"


def shapes_budget_and_parents(case: DrafterCase) -> None:
    """A draft is a tree of ids of the vocabulary, within the budget."""
    for seed in SEEDS:
        budget = [0, 2, 100] if seed else [GAMMA, 1, 3]
        draft = case.draft(draft_context(texts(seed), capacity=CAPACITY, budget=budget, round=seed))
        _check_draft(case.drafter, draft, budget)


def _check_draft(drafter: Drafter, draft: Draft, budget: list[int]) -> None:
    room = (len(budget), drafter.max_nodes)
    assert draft.tokens.shape == draft.parents.shape == room, f"tokens {draft.tokens.shape}, not {room}"
    kinds = {str(x.dtype) for x in (draft.tokens, draft.parents, draft.count)}
    assert kinds == {"int32"}, f"tokens, parents and count are {kinds}, not int32"
    assert (draft.q is None) == (drafter.kind is DraftKind.ONE_HOT), "q is given by drawn drafts, and by no others"
    for b, most in enumerate(budget):
        count, parents = int(draft.count[b]), np.asarray(draft.parents[b]).tolist()
        assert 0 <= count <= min(most, drafter.max_nodes), f"{count} nodes on a budget of {most}"
        _check_tree(parents, count)
        depth = _depth(parents[:count])
        assert depth <= min(most, drafter.max_depth), f"depth {depth} on a budget of {most}"
        ids = drafted_ids(draft, b)
        assert all(0 <= token < VOCAB for token in ids), f"{ids}: ids lie in 0..{VOCAB - 1}"
        if not drafter.tree:
            assert parents == list(range(-1, drafter.max_nodes - 1)), f"{parents} are not the parents of a chain"


def _check_tree(parents: list[int], count: int) -> None:
    try:
        check_parents(parents, count)
    except UserError as error:
        raise AssertionError(str(error)) from error


def _depth(parents: list[int]) -> int:
    """Longest path of a tree whose nodes stand behind their parents."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return max(depths, default=0)


def nothing_beyond_the_text_is_read(case: DrafterCase) -> None:
    """Poison beyond the length, likely tokens and impossible ones, changes nothing."""
    for seed in SEEDS:
        contexts = [draft_context(texts(seed), capacity=CAPACITY, budget=GAMMA, poison=p) for p in _POISON]
        first, *others = map(case.draft, contexts)
        for other in others:
            _check_same(first, other, "it reads tokens beyond the length")


_POISON = (-7, 0, 1, 2**31 - 1)


def rows_are_independent(case: DrafterCase) -> None:
    """What is drafted for a text does not depend on the batch around it."""
    for seed in SEEDS:
        ctx = draft_context(texts(seed), capacity=CAPACITY, budget=[GAMMA, 2, 4], round=1)
        together = case.draft(ctx)
        for b in range(3):
            _check_same(_row(together, b), case.draft(_row(ctx, b)), "a text's draft depends on its batch")


def one_compilation_serves_every_text(case: DrafterCase) -> None:
    """Lengths, budgets and rounds are traced."""
    known = 0
    for seed in SEEDS:
        case.draft(draft_context(texts(seed), capacity=CAPACITY, budget=seed, round=seed))
        known = known or len(case.traced)
    assert len(case.traced) == known, "it is compiled again for another text"


def a_full_buffer_and_a_single_token(case: DrafterCase) -> None:
    """The shortest and the longest text."""
    ids = np.random.default_rng(7).integers(0, VOCAB, CAPACITY).tolist()
    draft = case.draft(draft_context([ids, ids[:1], ids[:-1]], capacity=CAPACITY, budget=GAMMA))
    _check_draft(case.drafter, draft, [GAMMA] * 3)


def the_cache_passes_through(case: DrafterCase) -> None:
    """A drafter hands on the cache that it was given, or a self-draft's of the same structure."""
    ctx = draft_context(texts(0), capacity=CAPACITY, budget=GAMMA)

    def check(cache: Any) -> Draft:
        whole = case.prepare(ctx._replace(cache=cache))
        drafted = case.first(whole)
        if whole.cache is cache:
            assert drafted.cache is cache, "the cache is not ctx.cache"
        else:  # a self-draft writes beyond the length
            assert jax.tree.structure(drafted.cache) == jax.tree.structure(whole.cache), (
                "the cache has changed its form"
            )
        return drafted.draft

    jax.eval_shape(check, jnp.ones((3, 2)))


DRAFTER_CHECKS = (
    static_and_named,
    shapes_budget_and_parents,
    nothing_beyond_the_text_is_read,
    rows_are_independent,
    one_compilation_serves_every_text,
    a_full_buffer_and_a_single_token,
    the_cache_passes_through,
)
"""The parts of the contract, each a function of a `DrafterCase`."""


def texts(seed: int, batch: int = 3) -> list[list[int]]:
    """Texts over `VOCAB` ids, so that they repeat themselves; different lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in rng.integers(1, CAPACITY - GAMMA - 1, batch)]


def _row(tree: Any, b: int) -> Any:
    return jax.tree.map(lambda x: x[b : b + 1], tree)


def _check_same(a: Draft, b: Draft, what: str) -> None:
    """Equal as far as a draft says something: what stands at nodes that do not exist may be anything."""
    exists = np.arange(a.max_nodes)[None] < np.asarray(a.count)[:, None]
    same = np.array_equal(a.count, b.count) and all(
        np.array_equal(np.asarray(x)[exists], np.asarray(y)[exists])
        for x, y in ((a.tokens, b.tokens), (a.parents, b.parents), (a.q, b.q))
        if x is not None
    )
    assert same, what
