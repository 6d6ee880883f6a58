"""Rounds for drafters with a cache of their own: after each, it must draft as one that has read the whole text."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.model import Model
from specsparse.speculative.base import ROOT, Drafter, Feedback
from specsparse.speculative.verifiers.draft_rules import match_verdict
from specsparse.testing.drafting import draft_context, on_target, target_rows

ROUNDS = 5


def check(
    model: Model, drafter: Drafter, weights, texts: Sequence[Sequence[int]], *, capacity: int, vocab: int
) -> None:
    """Plays `ROUNDS` rounds of three texts: the first accepts 0, 1, 2, all and 0 tokens, the second all, the last some.

    Accepted nodes lie on a random path of the draft's tree; ids from 3 to below `vocab` are emitted.
    """
    begin = jax.jit(lambda weights, ctx, hidden: drafter.init(weights, ctx, hidden=hidden))
    draft = jax.jit(drafter.draft)

    @jax.jit
    def commit(weights, state, ctx, draft, target_Bn, hidden):
        return drafter.commit(weights, state, ctx, Feedback(draft, match_verdict(draft, target_Bn), hidden))

    nodes, rng, texts = drafter.max_nodes, np.random.default_rng(0), [list(text) for text in texts]

    def context(number):
        return on_target(model, draft_context(texts, capacity=capacity, budget=nodes, round=number))

    def rows(ctx):
        return target_rows(model, ctx, drafter.wants_hidden)

    ctx = context(0)
    state = begin(weights, ctx, rows(ctx))
    for number in range(ROUNDS):
        ctx = context(number)
        found = draft(weights, state, ctx)
        fresh = draft(weights, begin(weights, ctx, rows(ctx)), ctx)
        jax.tree.map(np.testing.assert_array_equal, found.draft, fresh.draft)
        before, target, paths = [len(text) for text in texts], np.full((len(texts), nodes + 1), vocab, np.int32), []
        for b, accept in enumerate(((0, 1, 2, 9, 0)[number], 9, int(rng.integers(0, 4)))):
            at, path = ROOT, [0]
            while len(path) <= accept:
                children = [i for i in range(int(found.draft.count[b])) if int(found.draft.parents[b, i]) == at]
                if not children:
                    break
                at = children[int(rng.integers(len(children)))]
                target[b, path[-1]] = int(found.draft.tokens[b, at])
                path.append(at + 1)
            texts[b] += [*(int(found.draft.tokens[b, row - 1]) for row in path[1:]), int(rng.integers(3, vocab))]
            paths.append(path)
        after = context(number)
        every = np.asarray(rows(after))
        hidden = np.zeros((len(texts), nodes + 1, every.shape[-1]), np.float32)
        for b, path in enumerate(paths):
            for depth, row in enumerate(path):
                hidden[b, row] = every[b, before[b] - 1 + depth]
        state = commit(weights, found.state, after, found.draft, jnp.asarray(target), jnp.asarray(hidden))
