"""The contracts of a drafter, of a draft tree's shape and of a draft-length policy, for anybody's own.

`check_drafter(MyDrafter())`, `check_tree(MyTree())` or `check_policy(MyPolicy(7))` is one line in a test.
"""

import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.noise import seed_words
from specsparse.engine.pytree import ABSENT
from specsparse.errors import UserError
from specsparse.speculative.base import (
    MAX_NODES,
    AnyDrafter,
    Draft,
    DraftContext,
    Drafted,
    Drafter,
    DraftKind,
    Feedback,
    Verdict,
)
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.loop import check_drafted, traced
from specsparse.speculative.policies.base import DraftView, Policy
from specsparse.speculative.proof.results import LEVEL, POWER
from specsparse.speculative.trees.base import TreeShape
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import valid_verifiers
from specsparse.speculative.verifiers.draft_rules import match_verdict
from specsparse.testing.drafting import draft_context, drafted_ids, on_spec
from specsparse.testing.lossless import assert_lossless

VOCAB, CAPACITY, GAMMA = 5, 48, 6
"""Ids of the texts, few enough that they repeat themselves; their longest; most nodes asked for."""

SEEDS = range(4)
FEATURES = 64


def check_drafter(drafter: AnyDrafter, *, weights: Any = None) -> "Checked":
    """Refuses a drafter that breaks the contract of `speculative.base`.

    A spec is built for a tiny random model. Texts have the ids 0 to `VOCAB` - 1 and at most `CAPACITY` tokens.

    Args:
        drafter: yours.
        weights: the `params` of its methods.

    Returns:
        The checks, a line each: shown by a notebook and by `print`.

    Raises:
        AssertionError: says what is broken.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            if (built := drafter.built) is not None:
                case = DrafterCase(built, weights)
            else:
                case = DrafterCase(*on_spec(Path(folder), drafter, vocab=VOCAB, capacity=CAPACITY))
            notes = [(check, check(case)) for check in DRAFTER_CHECKS]
        except UserError as error:  # the line that `generate` has
            raise AssertionError(str(error)) from None
    lines = [(check.__doc__ or "").partition("\n")[0] + (f" {note}" if note else "") for check, note in notes]
    return Checked(type(case.drafter).__name__, tuple(lines))


def check_tree(shape: TreeShape) -> None:
    """Refuses a shape that breaks the contract of `trees.base`; a tiny random model drafts trees of it.

    Raises:
        AssertionError: says what is broken.
    """
    assert hash(shape) == hash(shape), "its hash changes"
    assert isinstance(shape.kind, DraftKind), f"kind is {shape.kind!r}, not a DraftKind"
    depth, nodes = shape.max_depth, shape.max_nodes
    assert 1 <= depth <= nodes <= MAX_NODES, f"max_depth {depth}, max_nodes {nodes}: at most {MAX_NODES} nodes"
    assert shape.max_rows >= 1, f"max_rows {shape.max_rows}"
    assert shape.branches or depth == nodes, f"without branches it is a chain, of {nodes} nodes and not {depth} levels"
    check_drafter(get_drafter("layer_skip", tree=shape, temperature=0.0 if shape.kind is DraftKind.ONE_HOT else 0.8))


def check_policy(policy: Policy) -> None:
    """Refuses a policy that breaks the contract of `policies.base`: budgets fit, rows are independent, the state keeps
    its structure, one compilation serves all rounds, and its drops do not bias the text.

    One that is not `one_hot_only` and drops drafted tokens is certified (`specsparse.certify`).

    Raises:
        AssertionError: says what is broken.
    """
    assert hash(policy) == hash(policy), "its hash changes"
    batch, traces = 3, list[int]()

    def step(state: Any, ctx: DraftContext, verdict: Verdict, count_B: jax.Array) -> tuple:
        traces.append(len(ctx.length))
        budget_B = policy.budget(state, ctx)
        seen = (jnp.full(ctx.length.shape, x) for x in (0.5, 0.6, 1.0, 0.3, 0.4))
        look = DraftView(jnp.zeros_like(ctx.length), *seen)
        keep_BG = jax.vmap(lambda n: policy.keep(state, jnp.full_like(count_B, n)), out_axes=1)(counts_G)
        return budget_B, policy.stop(state, look), keep_BG, policy.update(state, verdict, count_B)

    compiled, drops, counts_G = jax.jit(step), False, np.arange(policy.gamma + 1, dtype=np.int32)
    ctx = draft_context([[1], [2], [3]], capacity=4, budget=[0, 3, 100])
    state, alone, rng = policy.begin(ctx.length), [policy.begin(ctx.length[:1])] * batch, np.random.default_rng(1)
    for _ in range(4):
        tested = rng.integers(0, 5, batch)
        accepted_B = jnp.array(np.maximum(tested - rng.integers(0, 2, batch), 0), jnp.int32)
        tested_B = jnp.array(tested, jnp.int32)  # counts are all that a policy reads
        verdict = Verdict(ABSENT, accepted_B + 1, ABSENT, accepted_B, tested_B, ABSENT, ABSENT, ABSENT)
        count_B = jnp.array(np.where(tested > 0, 4, 0), jnp.int32)
        before = jax.tree.map(lambda x: (x.shape, x.dtype), state)
        *said, state = compiled(state, ctx, verdict, count_B)
        budget_B, stop_B, keep_BG = said
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == before, "its state changes its form"
        assert budget_B.dtype == keep_BG.dtype == jnp.int32, f"budget is {budget_B.dtype}, keep {keep_BG.dtype}: int32"
        assert stop_B.dtype == bool, f"stop is {stop_B.dtype}, not bool"
        most_B = jnp.minimum(ctx.budget, policy.gamma)
        assert ((budget_B >= 0) & (budget_B <= most_B)).all(), f"budget {budget_B} beyond 0..{most_B}"
        kept_BG = np.asarray(keep_BG)
        assert ((kept_BG >= 0) & (kept_BG <= counts_G)).all(), f"it keeps {kept_BG[0]} nodes of {counts_G}"
        drops = drops or bool((kept_BG < counts_G).any())
        for b in range(batch):
            one = jax.tree.map(lambda x, b=b: x[b : b + 1], (ctx, verdict, count_B))
            *own, alone[b] = compiled(alone[b], *one)
            same = all((x[0] == y[b]).all() for x, y in zip(own, said, strict=True))
            assert same, "what it says of a text depends on the batch around it"
    assert sorted(traces) == [1, batch], "it is compiled again for another round"
    if drops and not policy.one_hot_only:
        assert_lossless(policy)


@dataclasses.dataclass(frozen=True, repr=False)
class Checked:
    """The checks of a part that passed."""

    name: str  # of its class
    lines: tuple[str, ...]  # a sentence for each part of the contract

    def __repr__(self) -> str:
        return "\n  ".join([f"{self.name} keeps the contract of a drafter:", *self.lines])


@dataclasses.dataclass(frozen=True)
class DrafterCase:
    """A drafter under test."""

    drafter: Drafter
    weights: Any = None  # its `params`
    prepare: Callable[[DraftContext], DraftContext] = lambda ctx: ctx  # puts the target into a context
    # batch sizes that a stage of `draft` was traced for, in order
    traced: list[int] = dataclasses.field(default_factory=list)

    def draft(self, ctx: DraftContext) -> Draft:
        """The draft after a prompt, of which the last two tokens arrive through `commit`."""
        prepare, begin, draft, commit = self._stages
        before, after = prepare(ctx._replace(length=jnp.maximum(ctx.length - 2, 1))), prepare(ctx)
        drafted = draft(self.weights, begin(self.weights, before), before)
        found = draft(self.weights, commit(self.weights, drafted, before, after), after)
        for b in () if found.failed is None else np.flatnonzero(found.failed):
            raise AssertionError(self.drafter.failure(np.asarray(ctx.tokens[b, : ctx.length[b]])))
        return found.draft

    @functools.cached_property
    def _stages(self) -> tuple[Callable, ...]:
        """Compiled one by one: `draft` is needed twice, and so is the target's pass over the text."""

        def noted(stage: Callable, ctx: int) -> Callable:
            def traced(*given):
                self.traced.append(given[ctx].length.shape[0])
                return stage(*given)

            return jax.jit(traced)

        stages = (self.prepare, 0), (self._begin, 1), (self._draft, 2), (self._commit, 2)
        return tuple(noted(stage, ctx) for stage, ctx in stages)

    def _begin(self, weights: Any, ctx: DraftContext) -> Any:
        with traced(self.drafter, "init"):
            return self.drafter.init(weights, ctx, hidden=self._features(ctx))

    def _draft(self, weights: Any, state: Any, ctx: DraftContext) -> Drafted:
        with traced(self.drafter, "draft"):
            drafted = self.drafter.draft(weights, state, ctx)
        check_drafted(self.drafter, drafted, ctx)
        return drafted

    def _commit(self, weights: Any, drafted: Drafted, before: DraftContext, after: DraftContext) -> Any:
        """The state after a verdict that accepts no drafted token."""
        nothing = jnp.full((len(before.length), self.drafter.max_nodes + 1), VOCAB, jnp.int32)
        verdict, rows = match_verdict(drafted.draft, nothing), self._features(before)
        hidden, top = None if rows is None else rows[:, : self.drafter.max_nodes + 1], None
        if ranks := self.drafter.wants_top:
            last = jnp.take_along_axis(before.tokens, jnp.maximum(before.length - 1, 0)[:, None], axis=1)
            fed = jnp.concatenate([last, drafted.draft.tokens], axis=1)
            top = (7 * fed[:, :, None] + jnp.arange(ranks, dtype=jnp.int32)[None, None]) % VOCAB
        mass = None
        if self.drafter.wants_mass:
            keys = before.cache.k
            mass = jnp.ones((len(keys), *keys[0].shape[:3]), jnp.float32)
        feedback = Feedback(drafted.draft, verdict, hidden, top, mass)
        with traced(self.drafter, "commit"):
            return self.drafter.commit(weights, drafted.state, after, feedback)

    def _features(self, ctx: DraftContext) -> jax.Array | None:
        """Some rows for each text, a function of its ids alone; None for drafters that read no rows."""
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
        draft = case.draft(draft_context(texts(seed), capacity=CAPACITY, vocab=VOCAB, budget=budget, round=seed))
        _check_draft(case.drafter, draft, budget)


def _check_draft(drafter: Drafter, draft: Draft, budget: list[int]) -> None:
    assert (draft.q is None) == (drafter.kind is DraftKind.ONE_HOT), "q is given by drawn drafts, and by no others"
    for b, most in enumerate(budget):
        count, parents = int(draft.count[b]), np.asarray(draft.parents[b]).tolist()
        assert 0 <= count <= min(most, drafter.max_nodes), f"{count} nodes on a budget of {most}"
        assert all(-1 <= parent < i for i, parent in enumerate(parents[:count])), f"{parents}: a parent comes first"
        depth = TreeTemplate(tuple(parents[:count])).max_depth
        assert depth <= min(most, drafter.max_depth), f"depth {depth} on a budget of {most}"
        ids = drafted_ids(draft, b)
        assert all(0 <= token < VOCAB for token in ids), f"{ids}: ids lie in 0..{VOCAB - 1}"
        if not drafter.tree:
            assert parents == list(range(-1, drafter.max_nodes - 1)), f"{parents} are not the parents of a chain"


def nothing_beyond_the_text_is_read(case: DrafterCase) -> None:
    """Poison beyond the length, likely tokens and impossible ones, changes nothing."""
    for seed in SEEDS:
        contexts = [
            draft_context(texts(seed), capacity=CAPACITY, vocab=VOCAB, budget=GAMMA, poison=p)
            for p in (-7, 0, 1, 2**31 - 1)
        ]
        first, *others = map(case.draft, contexts)
        for other in others:
            _check_same(first, other, "it reads tokens beyond the length")


def rows_are_independent(case: DrafterCase) -> None:
    """The draft for a text does not depend on the batch around it."""
    for seed in SEEDS:
        ctx = draft_context(texts(seed), capacity=CAPACITY, vocab=VOCAB, budget=[GAMMA, 2, 4], round=1)
        together = case.draft(ctx)
        for b in range(3):
            at = [b] * (3 if b else 1)  # alone once, else among its copies: another size of batch is another program
            mine, own = jax.tree.map(lambda x, at=at: np.asarray(x)[at], (together, ctx))
            _check_same(mine, case.draft(own), "a text's draft depends on its batch")


def one_compilation_serves_every_text(case: DrafterCase) -> None:
    """One compilation serves all lengths, budgets and rounds."""
    known = 0
    for seed in SEEDS:
        case.draft(draft_context(texts(seed), capacity=CAPACITY, vocab=VOCAB, budget=seed, round=seed))
        known = known or len(case.traced)
    assert len(case.traced) == known, "it is compiled again for another text"


def a_full_buffer_and_a_single_token(case: DrafterCase) -> None:
    """It drafts for the shortest text and for the longest."""
    ids = np.random.default_rng(7).integers(0, VOCAB, CAPACITY).tolist()
    draft = case.draft(draft_context([ids, ids[:1], ids[:-1]], capacity=CAPACITY, vocab=VOCAB, budget=GAMMA))
    _check_draft(case.drafter, draft, [GAMMA] * 3)


def the_cache_passes_through(case: DrafterCase) -> None:
    """A drafter hands on the cache that it was given, or a self-draft's of the same structure."""
    ctx = draft_context(texts(0), capacity=CAPACITY, vocab=VOCAB, budget=GAMMA)

    def check(cache: Any) -> Draft:
        whole = case.prepare(ctx._replace(cache=cache))
        drafted = case._draft(case.weights, case._begin(case.weights, whole), whole)
        if whole.cache is cache:  # a self-draft writes beyond the length
            assert drafted.cache is cache, "the cache is not ctx.cache"
        return drafted.draft

    jax.eval_shape(check, jnp.ones((3, 2)))


def tokens_are_drawn_from_q(case: DrafterCase) -> str:
    """Drawn tokens have the distribution q that is recorded with them.

    `DRAWS` drafts of each of three texts. The residuals 1[token = v] - q(v) of a node have the mean 0 whatever the node
    before it holds. Summed over an event of both tokens they lie in an interval of length 1, so their mean is beyond t
    with a chance of at most exp(-2 n t^2) (Azuma 1967), and there are 2^(cells) events.

    Returns:
        The total variation that would have been found.
    """
    if case.drafter.kind is DraftKind.ONE_HOT:
        return "Not asked here: its drafts are one-hot, no token is drawn."
    (prepare, begin, draft, _), B, K = case._stages, 3, case.drafter.max_nodes
    ctx = prepare(draft_context(texts(0, B), capacity=CAPACITY, vocab=VOCAB, budget=GAMMA))
    state, residuals, before = begin(case.weights, ctx), [], []
    for i in range(DRAWS):
        seeds = np.stack([seed_words(B * i + b) for b in range(B)])
        made = jax.device_get(draft(case.weights, state, ctx._replace(seed=seeds)).draft)
        mass_BK = made.q.sum(axis=2)
        real_BK = (np.arange(K) < made.count[:, None]) & (mass_BK != 0)  # a row without mass is never accepted
        assert (made.q[real_BK] >= 0).all() and np.allclose(mass_BK[real_BK], 1, atol=1e-3), (
            f"q is not a distribution: its rows have the mass {np.unique(mass_BK[real_BK])}"
        )
        q_BKV = np.append(made.q[..., :VOCAB], made.q[..., VOCAB:].sum(axis=2, keepdims=True), axis=2)
        tokens_BK = np.where(real_BK, made.tokens, 0)
        residuals.append(np.where(real_BK[..., None], np.eye(VOCAB + 1)[tokens_BK] - q_BKV, 0))
        before.append(np.eye(VOCAB)[np.pad(tokens_BK[:, :-1], ((0, 0), (1, 0)))])
    off_BKUV = np.einsum("nbku,nbkv->bkuv", before, residuals) / DRAWS
    tv_BK = np.abs(off_BKUV).sum(axis=(2, 3)) / 2
    events = off_BKUV[0, 0].size * math.log(2) + math.log(B * K / LEVEL)
    bound, misses = (math.sqrt(x / (2 * DRAWS)) for x in (events, math.log(1 / (1 - POWER))))
    worst = int(tv_BK.max(axis=0).argmax())
    assert tv_BK.max() <= bound, (
        f"the tokens of node {worst} are not drawn from the q that is recorded: over {DRAWS:,} drafts of a text they "
        f"are off by a total variation of {tv_BK.max():.2f}, of which chance explains {bound:.2f}"
    )
    return f"{DRAWS:,} drafts of each of {B} texts: an error of {bound + misses:.2f} (TV) is found with {POWER:.0%}."


DRAWS = 1024
"""Drafts of a text by which drawn tokens are tested."""

DRAFTER_CHECKS = (
    static_and_named,
    shapes_budget_and_parents,
    nothing_beyond_the_text_is_read,
    rows_are_independent,
    one_compilation_serves_every_text,
    a_full_buffer_and_a_single_token,
    the_cache_passes_through,
    tokens_are_drawn_from_q,
)
"""The parts of the contract, each a function of a `DrafterCase`, which may return a note."""


def texts(seed: int, batch: int = 3) -> list[list[int]]:
    """Texts over `VOCAB` ids, so that they repeat themselves; different lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in rng.integers(1, CAPACITY - GAMMA - 1, batch)]


def _check_same(a: Draft, b: Draft, what: str) -> None:
    """Equal at the nodes that exist; the others may hold anything."""
    exists = np.arange(a.max_nodes)[None] < np.asarray(a.count)[:, None]
    same = np.array_equal(a.count, b.count) and all(
        np.array_equal(np.asarray(x)[exists], np.asarray(y)[exists])
        for x, y in ((a.tokens, b.tokens), (a.parents, b.parents), (a.q, b.q))
        if x is not None
    )
    assert same, what
