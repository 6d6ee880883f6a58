import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.sampling import pipeline
from specsparse.engine.sampling.params import SamplingConfig
from specsparse.engine.sampling.pipeline import init_history, plain_rows

observe_many, chain_rows = jax.jit(pipeline.observe_many), jax.jit(pipeline.chain_rows)
path_counts, recent_tokens = jax.jit(pipeline.path_counts), jax.jit(pipeline.recent_tokens)
tree_rows = jax.jit(pipeline.tree_rows, static_argnames="depth")

CFG = SamplingConfig(vocab_size=10, use_penalties=True, context=3)


def int32(values):
    return jnp.asarray(values, jnp.int32)


def test_fields_exist_only_where_needed():
    history = init_history(SamplingConfig(vocab_size=10), [[1], [2]])
    assert history.counts is None and history.in_prompt is None and history.recent is None
    history = observe_many(history, int32([[4], [4]]), int32([1, 0]))
    assert history.generated.tolist() == [1, 0]


def test_observe_counts_and_remembers():
    history = init_history(CFG, [[1, 2], [3]])
    assert np.flatnonzero(history.in_prompt[0]).tolist() == [1, 2]
    history = observe_many(history, int32([[5, 5, 6, -1], [7, -1, -1, -1]]), int32([3, 0]))
    assert history.generated.tolist() == [3, 0]
    assert history.counts[0].tolist() == [0, 0, 0, 0, 0, 2, 1, 0, 0, 0] and not history.counts[1].any()
    assert history.recent.tolist() == [[5, 5, 6], [-1, -1, -1]]
    history = observe_many(history, int32([[9], [8]]), int32([1, 1]))
    assert history.recent.tolist() == [[5, 6, 9], [-1, -1, 8]]


def test_plain_rows_have_no_path():
    rows = plain_rows(2)
    history = observe_many(init_history(CFG, [[1], [1]]), int32([[4], [5]]), int32([1, 1]))
    np.testing.assert_array_equal(path_counts(history, rows), history.counts)
    np.testing.assert_array_equal(recent_tokens(history, rows), history.recent)


def test_chain_rows_follow_their_draft_prefix():
    history = observe_many(init_history(CFG, [[1], [1]]), int32([[4], [5]]), int32([1, 1]))
    rows = chain_rows(int32([[4, 6, 6], [5, 7, 8]]))
    assert rows.sequence.tolist() == [0, 0, 0, 1, 1, 1]
    assert rows.path.tolist() == [[-1, -1], [6, -1], [6, 6], [-1, -1], [7, -1], [7, 8]]
    assert recent_tokens(history, rows).tolist() == [
        [-1, -1, 4], [-1, 4, 6], [4, 6, 6], [-1, -1, 5], [-1, 5, 7], [5, 7, 8],
    ]  # fmt: skip
    counts = path_counts(history, rows)
    assert counts[2].tolist() == [0, 0, 0, 0, 1, 0, 2, 0, 0, 0] and int(counts.sum()) == 1 + 2 + 3 + 1 + 2 + 3


def test_tree_rows_follow_their_ancestors():
    token = int32([[4, 1, 2, 3, 5]])
    rows = tree_rows(token, int32([[-1, 0, 0, 1, 3]]), depth=3)
    assert rows.path.tolist() == [[-1, -1, -1], [1, -1, -1], [2, -1, -1], [1, 3, -1], [1, 3, 5]]
    assert tree_rows(token, int32([[-1, 0, 0, 0, 0]]), depth=0).path.shape == (5, 0)


def test_a_tree_of_width_one_is_a_chain():
    token = int32([[4, 1, 2, 3], [5, 6, 7, 8]])
    chain, tree = chain_rows(token), tree_rows(token, int32([[-1, 0, 1, 2]] * 2), depth=3)
    np.testing.assert_array_equal(chain.path, tree.path)
    np.testing.assert_array_equal(chain.sequence, tree.sequence)
