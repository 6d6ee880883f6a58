"""Trees of one shape, a template: given, by widths or paths, or the best by Sequoia's dynamic programme over measured
acceptance and time. Tokens are ranks, independent draws, or draws without replacement."""

import dataclasses
import functools
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.cache import KVCache
from specsparse.errors import UserError, refuse
from specsparse.speculative.base import ROOT, Draft, DraftKind
from specsparse.speculative.drafters.sources import draft_uniforms
from specsparse.speculative.trees.base import Depth, Expanded, Expander, Nodes, TreeShape
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.support.options import Count, Range, Size


class Levels(NamedTuple):
    """A template by levels, for a loop over them."""

    parents: np.ndarray  # int[D, P], nodes with children on the level below, `ROOT` for the root, -2 for none
    nodes: np.ndarray  # int[D, P, W], their children by rank, K for none
    widths: np.ndarray  # int[D], most children of any of them
    starts: np.ndarray  # int[D], first node of each level; its nodes follow each other


class _Partial(NamedTuple):
    cache: KVCache
    tokens: jax.Array
    q: jax.Array | None
    fed: jax.Array


class TemplateTree(TreeShape):
    """A template whose nodes are filled level by level; a smaller budget keeps its first nodes.

    Attributes:
        template: the tree, nodes in level order.
        kind: `ONE_HOT`: child r is the token of rank r (Medusa, arXiv:2401.10774; EAGLE, 2401.15077). `IID`: children
            are drawn from q independently (SpecInfer, 2305.09781). `WOR`: each child is drawn from q without its elder
            siblings (Sequoia, 2402.12374). `SAMPLED`: a chain of draws.
    """

    template: TreeTemplate

    def __post_init__(self):
        if self.template.size < 1:
            raise UserError("a tree needs at least one node")

    max_nodes = property(attrgetter("template.size"))
    max_depth = property(attrgetter("template.max_depth"))

    @property
    def branches(self) -> bool:
        return self.template.width > 1

    @functools.cached_property
    def levels(self) -> Levels:
        t = self.template
        depths = np.array(t.depths)
        parents = [sorted({t.parents[node] for node in np.flatnonzero(depths == d + 1)}) for d in range(t.max_depth)]
        most = max(map(len, parents))
        table = np.full((t.max_depth, most), ROOT - 1)
        nodes = np.full((t.max_depth, most, t.width), t.size)
        for d, level in enumerate(parents):
            for p, parent in enumerate(level):
                table[d, p] = parent
                nodes[d, p, : len(t.children[parent + 1])] = t.children[parent + 1]
        widths = np.array([max(len(t.children[p + 1]) for p in level) for level in parents])
        return Levels(table, nodes, widths, np.array([np.argmax(depths == d + 1) for d in range(t.max_depth)]))

    def expand(
        self, by: Expander, cache: KVCache, logits_BN: jax.Array, *, budget_B: jax.Array, room_B: jax.Array
    ) -> Expanded:
        """Consumes the uniforms of stream `draft` of each drawn node, keyed by position, round and node."""
        batch, K = budget_B.shape[0], self.max_nodes
        levels = jax.tree.map(lambda a: jnp.asarray(a, jnp.int32), self.levels)
        parents_BK = self.template.parents_array(batch)
        q = None
        if self.kind is not DraftKind.ONE_HOT:
            q = jnp.zeros((batch, K, by.vocab_size), jnp.float32)
        partial = _Partial(cache, jnp.zeros((batch, K), jnp.int32), q, jnp.zeros((batch,), jnp.int32))
        first = jnp.broadcast_to(logits_BN[:, None], (batch, levels.parents.shape[1], logits_BN.shape[1]))
        partial = self._fill(by, levels, partial, first, jnp.int32(0))

        def step(carry):
            d, g = carry
            start = levels.starts[d]  # every node above this level is fed
            n_valid_B = jnp.where(budget_B > start, start, 0)
            logits_BKN, cache = by.feed(g.cache, g.tokens, parents_BK, n_valid_B)
            above_BPN = jnp.take(logits_BKN, jnp.clip(levels.parents[d], 0, K - 1), axis=1)
            g = g._replace(cache=cache, fed=jnp.maximum(g.fed, n_valid_B))
            return d + 1, self._fill(by, levels, g, above_BPN, d)

        def more(carry):
            start = levels.starts[jnp.minimum(carry[0], self.max_depth - 1)]
            return (carry[0] < self.max_depth) & (budget_B > start).any()

        _, partial = jax.lax.while_loop(more, step, (jnp.int32(1), partial))
        count_B = jnp.clip(budget_B, 0, K)
        node_K = jnp.arange(K, dtype=jnp.int32)[None]
        tokens_BK = jnp.where(node_K < count_B[:, None], partial.tokens, 0)
        rows_BK = jnp.where(node_K < partial.fed[:, None], node_K, -1)
        return Expanded(Draft(tokens_BK, parents_BK, count_B, partial.q), partial.cache, rows_BK)

    def _fill(self, by: Expander, levels: Levels, partial: _Partial, logits_BPN: jax.Array, d: jax.Array) -> _Partial:
        """The nodes of level d, rank by rank, from the logits after their parents."""
        batch, P, N = logits_BPN.shape
        x_RN = logits_BPN.reshape(batch * P, N)
        if self.kind is not DraftKind.ONE_HOT:
            x_RN, ok_R = by.sampling.probs(x_RN)
            x_RN = jnp.where(ok_R[:, None], x_RN, jnp.float32(0))

        def rank(r, carry):
            tokens_BK, q_BKV, x_RN = carry
            node_P = jax.lax.dynamic_index_in_dim(levels.nodes[d], r, axis=1, keepdims=False)
            if self.kind is DraftKind.ONE_HOT:
                column_R = by.sampling.top(x_RN)
            else:
                u_BPU = draft_uniforms(by.ctx, depth=d + 1, node=node_P[None])
                column_R = by.sampling.draw(x_RN, u_BPU.reshape(-1, 4))
                wide_BPV = by.widen(x_RN).reshape(batch, P, -1)
                q_BKV = q_BKV.at[:, node_P].set(wide_BPV, mode="drop")
            tokens_BK = tokens_BK.at[:, node_P].set(by.token_ids(column_R).reshape(batch, P), mode="drop")
            # The next sibling is taken from these: logits or q without the column just used.
            row_R = jnp.arange(x_RN.shape[0], dtype=jnp.int32)
            if self.kind is DraftKind.ONE_HOT:
                x_RN = x_RN.at[row_R, column_R].set(np.float32(-np.inf))
            elif self.kind is DraftKind.WOR:
                x_RN = x_RN.at[row_R, column_R].set(np.float32(0))
                mass_R1 = jnp.sum(x_RN, axis=1, keepdims=True)
                # A distribution whose mass is spent stays zero: a node without mass at its token is never accepted.
                x_RN = jnp.where(mass_R1 > 0, x_RN / mass_R1, jnp.float32(0))
            return tokens_BK, q_BKV, x_RN

        start = (partial.tokens, partial.q, x_RN)
        tokens_BK, q_BKV, _ = jax.lax.fori_loop(0, levels.widths[d], rank, start)
        return partial._replace(tokens=tokens_BK, q=q_BKV)


DRAWS = {"top": DraftKind.ONE_HOT, "iid": DraftKind.IID, "wor": DraftKind.WOR}
Draw = Literal["top", "iid", "wor"]
"""How tokens are drawn, by name: the most likely ones, from q independently, or without replacement."""


@dataclasses.dataclass(frozen=True)
class StaticTree(TemplateTree):
    """A given template, its nodes in any order, and how tokens are drawn."""

    template: TreeTemplate  # pyrefly: ignore[bad-override]  # read-only here, and nobody writes it
    draw: DraftKind = DraftKind.ONE_HOT

    kind = property(attrgetter("draw"))

    def __post_init__(self):
        super().__post_init__()
        assert self.draw is not DraftKind.SAMPLED or not self.branches, "siblings are drawn IID or WOR"
        parents, depths = self.template.parents, self.template.depths
        order = sorted(range(self.template.size), key=lambda node: depths[node])
        place = {node: i for i, node in enumerate(order)} | {ROOT: ROOT}
        object.__setattr__(self, "template", TreeTemplate(tuple(place[parents[node]] for node in order)))


@dataclasses.dataclass(frozen=True)
class _Described(TemplateTree):
    """The same tree every round.

    Attributes:
        widths: children of every node, level by level.
        paths: instead, paths of ranks, such as [[0], [1], [0, 0], [0, 1]] (Medusa's notation).
    """

    widths: tuple[Count, ...] = (3, 2, 1)
    paths: tuple[tuple[Size, ...], ...] | None = None

    @functools.cached_property
    def template(self) -> TreeTemplate:
        if self.paths is None:
            return TreeTemplate.kary(self.widths)
        if self.widths != _Described.widths:
            raise UserError("tree.widths and tree.paths are two ways to say it: give one of them")
        return TreeTemplate.from_paths(self.paths)


@dataclasses.dataclass(frozen=True)
class Static(_Described):
    """The same tree every round, of the most likely tokens or of drawn ones.

    Attributes:
        draw: top, the most likely tokens; iid, drawn from q independently; wor, drawn without replacement.
    """

    draw: Draw = "top"

    @property
    def kind(self) -> DraftKind:
        return DRAWS[self.draw]


@dataclasses.dataclass(frozen=True)
class SampledIid(_Described):
    """The same tree every round, children drawn from q independently."""

    kind = DraftKind.IID


@dataclasses.dataclass(frozen=True)
class SampledWor(_Described):
    """The same tree every round, children drawn from q without replacement."""

    kind = DraftKind.WOR


@dataclasses.dataclass(frozen=True)
class Sequoia(TemplateTree):
    """The tree with the highest predicted speed, by Sequoia's dynamic programme (arXiv:2402.12374).

    Attributes:
        acceptance: chance that the child of each rank is the accepted one; null: measured on the built-in prompts, a
            guess in the API.
        cost: times of a round that verifies 0, 1, .. nodes, in plain steps; null: measured on this machine, in the API
            the same for every node.
        level_cost: time to draft one level, in plain steps; null: measured, 0 in the API.
        nodes: at most.
        depth: at most.
        draw: as of a static tree.
    """

    acceptance: tuple[float, ...] | None = None
    cost: tuple[float, ...] | None = None
    level_cost: Annotated[float | None, Range(0, 1e6)] = None
    nodes: Nodes = 15
    depth: Depth = 6
    draw: Draw = "top"

    kind = Static.kind

    @functools.cached_property
    def template(self) -> TreeTemplate:
        rates = GUESSED_ACCEPTANCE if self.acceptance is None else self.acceptance
        times = [1 + n / 16 for n in range(self.nodes + 1)] if self.cost is None else self.cost
        return sequoia(rates, times, self.nodes, self.depth, level_cost=self.level_cost or 0.0)


GUESSED_ACCEPTANCE = (0.6, 0.15, 0.07, 0.03)
"""By rank, where nothing was measured."""


def sequoia(
    acceptance_by_rank: Sequence[float], cost_of_n: Sequence[float], max_nodes: int, max_depth: int, *,
    level_cost: float = 0.0,
) -> TreeTemplate:  # fmt: skip
    """The tree of the highest predicted speed (Chen et al., Sequoia, arXiv:2402.12374, section 3.1 and 3.3).

    A tree T is expected to yield 1 + sum over its nodes of the product of acceptances on the node's path; it takes
    cost_of_n[size] + level_cost * depth. Unlike the paper's, the cost is measured and may have steps.

    The tree has its nodes level by level, and at least one, since no draft at all is a policy's business. UserError:
    chances or times that are none.

    Args:
        acceptance_by_rank: chance that the child of rank r is the one accepted at a node.
        cost_of_n: time of a round that verifies n nodes, n = 0 .. max_nodes, in any unit (a table of v(n + 1)).
        max_nodes, max_depth: at least 1.
        level_cost: time of drafting one level, same unit.
    """
    rates, cost = np.asarray(acceptance_by_rank, np.float64), np.asarray(cost_of_n, np.float64)
    chances = rates.ndim == 1 and rates.size and (rates >= 0).all() and rates.sum() <= 1 + 1e-9
    refuse({
        "tree.acceptance must hold the chance of each rank: at least 0, in all at most 1": not chances,
        f"tree.cost must hold times above 0 for 0..{max_nodes} nodes": cost.size <= max_nodes or not (cost > 0).all(),
    })  # fmt: skip
    ranks, deepest = len(rates), min(max_depth, max_nodes)
    # gain[d, r, n]: most tokens that n nodes give as children of rank r and up (and their subtrees) of one node, with
    # paths of at most d. first[d, r, n]: nodes of the subtree of child r in that optimum, 0 for no child.
    gain = np.zeros((deepest + 1, ranks + 1, max_nodes + 1))
    first = np.zeros(gain.shape, np.int64)
    for d in range(1, deepest + 1):
        for r in reversed(range(ranks)):
            for n in range(1, max_nodes + 1):
                m = np.arange(1, n + 1)  # nodes of this child's subtree, itself among them
                worth = rates[r] * (1 + gain[d - 1, 0, m - 1]) + gain[d, r + 1, n - m]
                best = int(np.argmax(worth))
                gain[d, r, n], first[d, r, n] = worth[best], m[best]

    def paths(d: int, r: int, n: int, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
        """Paths of ranks of the optimum's nodes below one node."""
        if d == 0 or n == 0 or first[d, r, n] == 0:
            return []
        m, here = int(first[d, r, n]), (*path, r)
        return [here, *paths(d - 1, 0, m - 1, here), *paths(d, r + 1, n - m, path)]

    _, depth, size = max(
        ((1 + gain[d, 0, n]) / (cost[n] + level_cost * d), -d, -n)
        for d in range(1, deepest + 1)
        for n in range(1, max_nodes + 1)
    )
    return TreeTemplate.from_paths(paths(-depth, 0, -size))
