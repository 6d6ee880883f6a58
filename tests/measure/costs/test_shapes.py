"""Trees on paper: Sequoia's tokens over its levels, by what was counted of siblings or by what is supposed of them."""

import pytest

from specsparse.data.devices import Device
from specsparse.measure.costs.acceptance import Accepted, AcceptedRates, swept
from specsparse.measure.costs.forecast import (
    Clocks,
    DraftShape,
    candidates,
    forecast,
    siblings,
    tree_break_even,
    tree_for,
)
from specsparse.measure.costs.roofline import outline
from specsparse.speculative.trees.static import GUESSED_ACCEPTANCE
from specsparse.speculative.trees.template import TreeTemplate

IDLE = Device("idle", "a made device", bandwidth=1e12, f32=1e17, int8=1e17, source="made")
"""Its arithmetic costs nothing."""
SHORT = Device("short", "a made device", bandwidth=1e12, f32=1e12, int8=1e12, source="made")


def of(device):
    target, draft = outline("llama-3.1-8b"), outline("llama-3.2-1b")
    found = {c.name: c for c in candidates(target, (draft,))}
    return Clocks.on_paper(device, target, 512, 1), found["llama-3.2-1b"], found["llama-3.2-1b tree"]


def test_siblings_are_those_that_were_counted_else_share_what_is_left():
    assert siblings(Accepted(0.5, ranks=(0.5, 0.2))) == (0.5, 0.2)
    assert siblings(Accepted(0.6)) == pytest.approx(GUESSED_ACCEPTANCE)
    assert siblings(Accepted(0.3, (0.8, 0.1)))[0] == 0.8
    assert siblings(Accepted(0.0)) == (0, 0, 0, 0)
    for alpha in (0.3, 0.8, 0.98, 1.0):
        assert sum(siblings(Accepted(alpha))) <= 1 + 1e-12


def test_the_tokens_of_a_tree_are_the_chances_of_its_nodes():
    pair = DraftShape.tree(TreeTemplate.kary((2, 1)))  # two children, one child each
    alone = Accepted(0.5, ranks=(0.5, 0.2), share=0.5)
    assert pair.tokens(alone) == pytest.approx(1 + 0.5 * (0.7 + 0.7 * 0.5))
    assert (pair.room, pair.template.max_depth) == (4, 2)
    rarer = Accepted(0.5, (0.5, 0.1), ranks=(0.5, 0.2))  # the second place is right in a fifth, not in half
    assert pair.tokens(rarer) == pytest.approx(1 + 0.7 + 0.7 * 0.2)
    assert DraftShape.tree(TreeTemplate.chain(4)).tokens(rarer) == pytest.approx(1 + 0.5 + 0.1 + 0.1 * 0.2 + 0.1 * 0.04)


def test_a_forecast_of_trees_is_tokens_over_rows_and_levels():
    clock, _, candidate = of(SHORT)
    found = forecast(clock, candidate, swept(0.7), lengths=(2, 8))
    for point in found.points:
        tree = tree_for(clock.expected, candidate, swept(0.7), point.gamma)
        assert (tree.room, tree.template.max_depth) == (point.gamma, point.levels) and point.gamma <= 8
        level, c0 = clock.expected.costs(candidate, point.gamma, width=point.gamma / point.levels)
        time = clock.expected.v(point.gamma + 1) + point.levels * level + c0
        assert point.speedup == pytest.approx(tree.tokens(Accepted(0.7)) / time)
        assert point.low <= point.speedup <= point.high


def test_where_rows_are_free_a_tree_beats_the_chain_and_pays_earlier():
    clock, chain, tree = of(IDLE)
    chains, trees = (forecast(clock, c, swept(0.5), lengths=(2, 4, 8)) for c in (chain, tree))
    assert trees.best.speedup > chains.best.speedup > 1 and trees.break_even < chains.break_even
    least = tree_break_even(clock.expected, tree, 8)
    paying = forecast(clock, tree, swept(least + 0.01), lengths=(2, 4, 8))
    assert paying.pays and not forecast(clock, tree, swept(least - 0.01), lengths=(2, 4, 8)).pays


def test_several_texts_share_the_tree_of_their_mean():
    clock, _, candidate = of(SHORT)
    half = AcceptedRates(
        "made", {"a": Accepted(0.9, ranks=(0.9,), weight=1), "b": Accepted(0.1, ranks=(0.1,), weight=1)}
    )
    mean = AcceptedRates("made", {"a": Accepted(0.5, ranks=(0.5,))})
    assert tree_for(clock.expected, candidate, half, 8) == tree_for(clock.expected, candidate, mean, 8)
