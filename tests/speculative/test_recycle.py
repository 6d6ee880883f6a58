"""Token Recycling: the table of successors, the tree over it, and whole texts."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsparse.engine.generate import Finish
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.runtime.method import MethodSpec, resolve
from specsparse.runtime.session import Request, Session
from specsparse.speculative.base import PAD, ROOT, Draft, Feedback
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.recycle import Recycle, RecycleState
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers.draft_rules import match_verdict
from specsparse.testing.drafting import draft_context, drafted_ids, tiny_model
from tests.cells import cells

V, C = 12, 16


@pytest.mark.parametrize(("size", "tokens"), [(1, 1.3), (3, 1.49), (5, 1.58), (7, 1.637)])
def test_the_best_first_tree_has_the_likeliest_nodes(size, tokens):
    chances = (0.3, 0.1, 0.06)
    tree = TreeTemplate.best_first(chances, size)
    likely = [math.prod(chances[tree.ranks[node]] for node in tree.path(i)) for i in range(size)]
    assert likely == sorted(likely, reverse=True) and 1 + sum(likely) == pytest.approx(tokens)
    every = [math.prod(c) for d in (1, 2, 3) for c in np.array(np.meshgrid(*[chances] * d)).reshape(d, -1).T]
    assert np.allclose(likely, sorted(every, reverse=True)[:size])


def state_of(known: dict[int, tuple[int, ...]], ranks: int, root: int) -> RecycleState:
    table = np.full((1, V, ranks), PAD, np.int32)
    for token, successors in known.items():
        table[0, token, : len(successors)] = successors
    return RecycleState(jnp.asarray(table), jnp.array([root], jnp.int32))


def test_a_prompt_shows_what_followed_each_token_last():
    drafter = Recycle(max_nodes=3)
    init = jax.jit(functools.partial(drafter.init, None))
    state = init(draft_context([[1, 2, 1, 3, 4, 1]], capacity=C, budget=3, vocab=V))
    first = np.asarray(state.successors)[0, :, 0]
    assert {t: int(first[t]) for t in np.flatnonzero(first >= 0)} == {1: 3, 2: 1, 3: 4, 4: 1}
    assert (np.asarray(state.successors)[0, :, 1:] == PAD).all()


def test_nodes_without_a_token_leave_no_gap():
    """The first child is unknown to the table, so its sibling's subtree moves to the front, within the budget."""
    drafter = Recycle(max_nodes=10, chances=(0.5, 0.4))
    ctx = draft_context([[5]], capacity=C, budget=10, vocab=V)
    draft = jax.jit(functools.partial(drafter.draft, None))
    tree = draft(state_of({5: (1, 2), 2: (3,), 3: (4, 6)}, 2, 5), ctx).draft
    assert drafted_ids(tree) == [1, 2, 3, 4] and np.asarray(tree.parents)[0, :4].tolist() == [ROOT, ROOT, 1, 2]
    short = draft(state_of({5: (1, 2), 2: (3,)}, 2, 5), ctx._replace(budget=jnp.array([2]))).draft
    assert drafted_ids(short) == [1, 2]


def test_verified_rows_overwrite_the_table_and_accepted_ones_win():
    """Rows 7 (root), 1, 2 and 1 again: of the two rows of 1 the accepted one counts; row 3 was not verified."""
    drafter = Recycle(max_nodes=4, chances=(0.5, 0.4))
    draft = Draft(jnp.array([[1, 2, 1, 3]]), jnp.array([[ROOT, ROOT, 1, 0]]), jnp.array([3]))
    verdict = match_verdict(draft, jnp.array([[1, 9, 9, 9, 9]]), tree=True)
    assert np.asarray(verdict.nodes)[0, 0] == 0
    top = jnp.arange(10, dtype=jnp.int32).reshape(1, 5, 2)
    ctx = draft_context([[7, 1, 9]], capacity=C, budget=4, vocab=V)
    commit = jax.jit(functools.partial(drafter.commit, None))
    after = commit(state_of({3: (8, 8)}, 2, 7), ctx, Feedback(draft, verdict, None, top))
    table = np.asarray(after.successors)[0]
    assert [table[t].tolist() for t in (7, 1, 2, 3)] == [[0, 1], [2, 3], [4, 5], [8, 8]]
    assert (table[[0, 4, 5, 6, 8, 9, 10, 11]] == PAD).all()


def test_chances_fall():
    with pytest.raises(UserError, match=r"drafter\.chances"):
        get_drafter("recycle", chances=[0.1, 0.3])


def decoded(model: Model, prompts: list[list[int]], params: SamplingParams, spec: MethodSpec) -> Session:
    method = resolve(dataclasses.replace(spec, sampling=params) if spec.drafter else spec, model)
    session = Session(model, [Request(np.array(ids, np.int32), params, seed=3) for ids in prompts], method)
    while Finish.RUNNING in session.finish:
        session.advance(100)
    return session


# The draft is one-hot at any temperature.
@pytest.mark.parametrize("temperature", cells([0.0, 0.7], [0.0]))
def test_a_text_is_that_of_plain_decoding_and_its_tokens_recur(tmp_path, temperature):
    model = tiny_model(tmp_path, vocab=64, capacity=128)
    options = SamplingParams(temperature=temperature, max_tokens=96, ignore_eos=True)
    prompts = [[3, 1, 4, 1, 5], [2, 7]]
    plain = decoded(model, prompts, options, MethodSpec())
    drafted = decoded(model, prompts, options, MethodSpec(get_drafter("recycle", max_nodes=4), "tree_match"))
    assert all(map(np.array_equal, drafted.tokens(), plain.tokens()))
    if temperature == 0:  # a tiny model soon repeats itself
        assert np.asarray(drafted.state.counters.accepted).sum() > 50
