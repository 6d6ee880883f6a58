"""`drafter=mixed`: one tree of all sources' proposals, what it learns of them, and how many of its nodes pay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.runtime.method import load_drafter
from specsparse.speculative import loop  # noqa: F401  # contexts may cross a jit
from specsparse.speculative.base import PAD, ROOT, Feedback
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.mixed import MixedTree, MixedWeights, NGramTable
from specsparse.speculative.drafters.sources import DraftSampling
from specsparse.speculative.policies.base import ActivePolicy
from specsparse.speculative.policies.cost import AutoOff, CostModel, CostOptimal
from specsparse.speculative.trees import get_tree
from specsparse.speculative.trees.base import Expander
from specsparse.speculative.verifiers.draft_rules import match_verdict
from specsparse.testing.drafting import draft_context, drafted_ids, tiny_model

V, C, K = 12, 24, 4
TREE = MixedTree(K)
init, draft, commit = (jax.jit(functools.partial(f, MixedWeights())) for f in (TREE.init, TREE.draft, TREE.commit))


def state_of(known: dict[int, int], ctx):
    state = init(ctx)
    table = np.full((1, V), PAD, np.int32)
    table[0, list(known)] = list(known.values())
    return state._replace(successors=jnp.asarray(table))


def context(text, budget=K):
    return draft_context([text], capacity=C, budget=budget, vocab=V)


@pytest.mark.parametrize(
    ("successors", "tokens", "parents"),
    [
        ({2: 3, 3: 4}, [3, 4, 9, 1], [ROOT, 0, 1, 2]),  # lookup copies 3, 4, 9, 1, and the successors agree
        ({2: 5, 5: 6}, [5, 6, 3], [ROOT, 0, ROOT]),  # they do not, and are right more often than a short match
    ],
)
def test_a_token_of_several_sources_is_one_node_and_the_likeliest_path_stands_first(successors, tokens, parents):
    ctx = context([1, 2, 3, 4, 9, 1, 2])
    tree, *_, passes = draft(state_of(successors, ctx), ctx)
    assert passes.tolist() == [0]  # of a head
    assert drafted_ids(tree) == tokens and np.asarray(tree.parents)[0].tolist()[: len(parents)] == parents


def test_a_proposal_is_worth_what_it_was_worth_in_rounds_that_are_over():
    """Lookup's 3 is not verified at first, and is the target's token each time."""
    ctx = context([1, 2, 3, 1, 2], budget=1)
    state = state_of({2: 5}, ctx)
    assert drafted_ids(draft(state, ctx).draft) == [5]
    for _ in range(8):
        drafted = draft(state, ctx)
        verdict = match_verdict(drafted.draft, jnp.array([[3, 0, 0, 0, 0]]), tree=True)
        after = commit(drafted.state, ctx, Feedback(drafted.draft, verdict))
        assert int(after.successors[0, 1]) == 2  # that is what the text ends with
        state = after._replace(successors=state.successors)
    assert float(state.tries.sum()) == 16 and float(state.hits.sum()) == 8
    assert drafted_ids(draft(state, ctx).draft) == [3]


def test_of_equal_tokens_of_a_round_the_last_one_is_followed():
    ctx = context([5, 7, 7, 9])
    drafted = draft(state_of({}, ctx), ctx)
    verdict = match_verdict(drafted.draft, jnp.zeros((1, K + 1), jnp.int32), tree=True)
    verdict = verdict._replace(tokens=jnp.array([[7, 7, 9, PAD, PAD]]), count=jnp.array([3]))
    after = commit(drafted.state, ctx, Feedback(drafted.draft, verdict))
    assert np.asarray(after.successors)[0, [5, 7, 9]].tolist() == [7, 9, PAD]


def test_a_table_knows_what_followed_three_tokens_or_two_most_often():
    ids = np.array([1, 2, 3, 4] * 3 + [9, 2, 3, 5] * 2 + [8, 2, 3, 7], np.int32)
    table = NGramTable(*map(jnp.asarray, NGramTable.from_ids(ids)))
    token, three = table.after(jnp.array([[1, 2, 3], [9, 2, 3], [8, 2, 3], [0, 2, 3], [3, 7, 6]]))
    assert np.asarray(token).tolist() == [4, 5, 4, 4, PAD] and np.asarray(three).tolist() == [True, True] + [False] * 3


@pytest.mark.parametrize(("slope", "nodes", "at_rate"), [(0.01, 4, 4), (0.15, 3, 2), (0.35, 1, 1), (0.7, 0, 0)])
def test_as_many_nodes_as_pay(slope, nodes, at_rate):
    reach, nowhere = jnp.array([[0.6, 0.3, 0.17, 0.1]]), jnp.zeros((1,), jnp.int32)
    cost = CostModel(tuple(1 + slope * n for n in range(6)), c=0.1, prior=0.5)
    assert int(cost.worth(reach, jnp.ones(1), nowhere)[0]) == nodes
    for gain in (0.05, 0.2, 0.5, 1.0):
        assert bool(cost.deeper(jnp.array([gain]), jnp.ones(1), nowhere)[0]) == (gain >= 0.1 + slope)
    # Beside the run's own rate, which is above 1 where drafts pay; one that is on keeps on learning.
    exact, on = CostOptimal(gamma=K, cost=cost, least=0), AutoOff(gamma=K, cost=cost, margin=0.1)
    least, some = (int(policy.worth(policy.init(1), reach)[0]) for policy in (exact, on))
    assert (least, some) == (at_rate, max(at_rate, 1))


def test_ddtree_has_the_same_budget():
    """Rows that cost 0.2 tokens each: the third token's 0.15 does not pay."""
    cost = CostModel((1.0, 1.2, 1.4, 1.6), prior=0.0)
    policy = CostOptimal(gamma=3, cost=cost)
    ctx = context([1, 2])._replace(policies=(ActivePolicy(policy, policy.init(1)),))
    sampling, tree = DraftSampling(SamplingParams(temperature=0.0), 4), get_tree("ddtree", nodes=3, depth=1)
    by = Expander(lambda *_: pytest.fail("one level needs no row"), sampling, lambda i: i, lambda q: q, 4, ctx)
    room = jnp.array([3])
    expand = jax.jit(lambda logits: tree.expand(by, None, logits, budget_B=room, room_B=room).draft)
    found = expand(jnp.log(jnp.array([[0.3, 0.05, 0.5, 0.15]])))
    assert drafted_ids(found) == [2, 0]


def test_a_table_that_cannot_be_read_is_one_line(tmp_path):
    model = tiny_model(tmp_path, vocab=V, capacity=C)
    with pytest.raises(UserError, match=r"^drafter\.table=[^\n]*$"):
        load_drafter(model, get_drafter("mixed", table=tmp_path / "none.txt"))
    with pytest.raises(UserError, match=r"drafter\.gamma=65"):
        get_drafter("mixed", gamma=65)
