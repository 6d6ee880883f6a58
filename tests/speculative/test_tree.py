import jax.numpy as jnp
import numpy as np
import pytest

from specsparse.errors import UserError
from specsparse.speculative.base import PAD, DraftKind, Verdict
from specsparse.speculative.trees.base import ancestor_paths, node_depths, path_rows, row_parents
from specsparse.speculative.trees.static import StaticTree
from specsparse.speculative.trees.template import TreeTemplate


def test_chain():
    chain = TreeTemplate.chain(3)
    assert chain.parents == (-1, 0, 1)
    assert (chain.size, chain.max_depth, chain.width) == (3, 3, 1)
    empty = TreeTemplate.chain(0)
    assert (empty.size, empty.max_depth, empty.width) == (0, 0, 0)


def test_kary():
    tree = TreeTemplate.kary((2, 3))
    assert tree.parents == (-1, -1, 0, 0, 0, 1, 1, 1)
    assert tree.depths == (1, 1, 2, 2, 2, 2, 2, 2)
    assert tree.ranks == (0, 1, 0, 1, 2, 0, 1, 2)
    assert tree.children[0] == (0, 1)
    assert tree.path(5) == (1, 5)


def test_from_paths_adds_prefixes_and_elder_siblings():
    tree = TreeTemplate.from_paths([(1, 0)])
    assert tree.parents == (-1, -1, 1)
    assert tree == TreeTemplate.from_paths([(0,), (1,), (1, 0)])


@pytest.mark.parametrize("parents", [(0,), (-2,), (-1, 1), (-1, 0, 5)])
def test_bad_parents(parents):
    with pytest.raises(AssertionError):
        TreeTemplate(parents)


def test_bad_templates():
    with pytest.raises(UserError, match="width 0"):
        TreeTemplate.kary((2, 0))
    with pytest.raises(UserError, match="negative rank"):
        TreeTemplate.from_paths([(0, -1)])
    with pytest.raises(AssertionError, match="siblings are drawn IID or WOR"):
        StaticTree(TreeTemplate.kary((2,)), DraftKind.SAMPLED)


@pytest.mark.parametrize("seed", range(20))
def test_array_helpers_agree_with_the_template(seed):
    rng, K, depth = np.random.default_rng(seed), 7, 7
    tree = TreeTemplate(tuple(int(rng.integers(-1, node)) for node in range(K)))
    parents_BK = tree.parents_array(2)
    paths = np.full((K, depth), PAD)
    for node in range(K):
        paths[node, : tree.depths[node]] = tree.path(node)
    np.testing.assert_array_equal(ancestor_paths(parents_BK, max_depth=depth)[1], paths)
    np.testing.assert_array_equal(node_depths(parents_BK, max_depth=depth)[1], tree.depths)


def test_rows_of_the_forward_pass():
    parents = TreeTemplate.kary((2, 1)).parents_array(1)
    np.testing.assert_array_equal(row_parents(parents), [[-1, 0, 0, 1, 2]])
    nodes = jnp.array([[1, 3, PAD, PAD]], jnp.int32)
    verdict = Verdict(None, jnp.array([3], jnp.int32), nodes, None, None, None, None, None)
    np.testing.assert_array_equal(path_rows(verdict)[0, :3], [0, 2, 4])
