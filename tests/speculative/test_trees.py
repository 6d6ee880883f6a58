"""Tree shapes: Sequoia's optimum against every tree there is, level order, and options by name."""

import dataclasses
import itertools

import numpy as np
import pytest

from specsparse.errors import UserError
from specsparse.speculative.base import ROOT, DraftKind
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.expected import expected_tokens_tree
from specsparse.speculative.trees import get_tree
from specsparse.speculative.trees.dynamic import DynamicTree, PSplit
from specsparse.speculative.trees.static import StaticTree, sequoia
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.testing.contract import check_tree


def every_tree(nodes: int, depth: int, ranks: int) -> set[tuple[tuple[int, ...], ...]]:
    """All trees of 1..nodes nodes as sorted paths of ranks; each grows from a smaller one by a leaf."""
    found = level = {((0,),)}
    for _ in range(nodes - 1):
        bigger = set()
        for tree in level:
            for above in [(), *tree]:
                path = (*above, sum(len(p) == len(above) + 1 and p[:-1] == above for p in tree))
                if path[-1] < ranks and len(path) <= depth:
                    bigger.add(tuple(sorted([*tree, path])))
        level = bigger
        found = found | level
    return found


@pytest.mark.parametrize("seed", range(12))
def test_sequoia_is_the_best_tree(seed):
    rng = np.random.default_rng(seed)
    rates = rng.dirichlet(np.ones(4))[:3]  # not sorted: an elder sibling may be the worse one
    nodes, depth, level_cost = 6, int(rng.integers(1, 5)), float(rng.choice([0.0, 0.2]))
    cost = np.cumsum([1.0, *rng.choice([0.02, 0.3], nodes)])  # steps, as measured times have

    def speed(template):
        return expected_tokens_tree(template.parents, [dict(enumerate(rates)).get(r, 0.0) for r in template.ranks]) / (
            cost[template.size] + level_cost * template.max_depth
        )

    best = max(speed(TreeTemplate.from_paths(paths)) for paths in every_tree(nodes, depth, 3))
    chosen = sequoia(rates, cost, nodes, depth, level_cost=level_cost)
    assert chosen.size <= nodes and chosen.max_depth <= depth and chosen.width <= 3
    assert speed(chosen) == pytest.approx(best, rel=1e-12)


def test_sequoia_of_a_sure_draft_is_a_chain_and_of_a_flat_one_a_fan():
    assert sequoia([0.9, 0.01], [1.0] * 6, 5, 5) == TreeTemplate.chain(5)
    assert sequoia([0.2] * 5, [1.0] * 6, 5, 1) == TreeTemplate.kary((5,))
    assert sequoia([0.5], [1, 9, 9], 2, 2).size == 2  # where all is dear, what is dear anyhow is used


@pytest.mark.parametrize("arguments", [([], [1, 1], 1, 1), ([0.8, 0.3], [1, 1], 1, 1), ([0.5], [1], 1, 1)])
def test_sequoia_refuses(arguments):
    with pytest.raises(UserError, match="tree"):
        sequoia(*arguments)


def test_templates_are_put_in_level_order():
    shape = StaticTree(TreeTemplate((ROOT, 0, 1, ROOT, 3)))
    assert shape.template == TreeTemplate((ROOT, ROOT, 0, 1, 2))
    levels = shape.levels
    assert levels.starts.tolist() == [0, 2, 4] and levels.widths.tolist() == [2, 1, 1]
    assert levels.parents.tolist() == [[ROOT, -2], [0, 1], [2, -2]]
    seen = [n for n in levels.nodes.ravel().tolist() if n < shape.max_nodes]
    assert sorted(seen) == list(range(5))


@pytest.mark.parametrize(
    ("name", "options", "kind", "nodes"),
    [
        ("static", {"widths": [2, 2]}, DraftKind.ONE_HOT, 6),
        ("static", {"paths": [[0, 0], [1]]}, DraftKind.ONE_HOT, 3),
        ("sampled_iid", {"widths": [3]}, DraftKind.IID, 3),
        ("sampled_wor", {}, DraftKind.WOR, 15),
        ("p_split", {"draft_max": 9, "n_parallel": 2, "p_split": 0.3}, DraftKind.ONE_HOT, 9),
        ("dynamic", {"total": 8, "depth": 3, "top_k": 2}, DraftKind.ONE_HOT, 8),
        ("sequoia", {"acceptance": [0.5, 0.2], "nodes": 3, "cost": [1, 1, 1, 1], "draw": "wor"}, DraftKind.WOR, 3),
    ],
)
def test_trees_by_name(name, options, kind, nodes):
    tree = get_tree(name, **options)
    assert (tree.kind, tree.max_nodes) == (kind, nodes) and hash(tree) == hash(tree)
    assert 1 <= tree.max_depth <= nodes


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: get_tree("psplit"), "did you mean p_split"),
        (lambda: get_tree("p_split", p_splt=0.1), "did you mean p_split"),
        (lambda: get_tree("static", widths=[8, 8, 8]), "at most 64"),
        (lambda: get_tree("static", widths=[2], paths=[[0]]), "one of them"),
        (lambda: get_tree("static", widths="ab"), "tree.widths"),
        (lambda: get_tree("static", widths=[]), "at least one node"),
        (lambda: get_tree("chain", nodes=3), "tree.nodes is no option of"),
        (lambda: DynamicTree(total=9, depth=2, top_k=2), "total=9"),
        (lambda: PSplit(nodes=4, depth=5), "depth=5"),
    ],
)
def test_bad_trees_are_refused_in_one_line(make, words):
    with pytest.raises(UserError) as error:
        make()
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["sampled_iid", "sampled_wor"])
def test_drawn_siblings_need_a_temperature(name):
    """Refused before a model is there; a chain of such draws has no siblings."""
    with pytest.raises(UserError, match=f"by tree={name} .* at drafter.temperature=0: set it") as error:
        get_drafter("layer_skip", tree=get_tree(name, widths=[2, 2]))
    assert "\n" not in str(error.value)
    assert get_drafter("layer_skip", tree=get_tree(name, widths=[2, 2]), temperature=0.5).kind.value in name
    assert not get_drafter("layer_skip", tree=get_tree(name, widths=[1, 1])).tree


def test_every_tree_is_counted():
    """A check of the check: trees whose children are ranked are counted by the Catalan numbers."""
    sizes = [len(tree) for tree in every_tree(5, 9, 9)]
    assert [sizes.count(n) for n in range(1, 6)] == [1, 2, 5, 14, 42]
    assert all(TreeTemplate.from_paths(t).size == len(t) for t in itertools.islice(every_tree(4, 4, 4), 20))


SHAPES = {"static": {"widths": (2, 2)}, "p_split": {"nodes": 6, "n_parallel": 3, "p_split": 0.15}}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_keep_the_contract(name):
    """The others by the drafters that use them."""
    check_tree(get_tree(name, **SHAPES[name]))


@dataclasses.dataclass(frozen=True)
class Bad(StaticTree):
    """Breaks one rule."""

    wrong: str = ""

    @property
    def max_depth(self):
        return 1 if self.wrong == "depth" else self.template.max_depth

    @property
    def branches(self):
        return self.wrong != "branches"

    def expand(self, *args, **kwargs):
        tree = super().expand(*args, **kwargs)
        return tree._replace(draft=tree.draft._replace(q=None)) if self.wrong == "kind" else tree


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("branches", "without branches it is a chain"), ("kind", "returned q NoneType where"), ("depth", "depth")],
)
def test_the_contract_refuses(wrong, words):
    with pytest.raises(AssertionError, match=words):
        check_tree(Bad(TreeTemplate.kary((2, 2)), DraftKind.IID if wrong == "kind" else DraftKind.ONE_HOT, wrong))
