"""Static trees: a template says which node has how many children; tokens are ranks, independent draws, or draws without
replacement."""

import dataclasses
import functools
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.cache import KVCache
from specsparse.errors import UserError
from specsparse.speculative.base import ROOT, Draft, DraftKind
from specsparse.speculative.draft_law import draft_uniforms
from specsparse.speculative.tree import TreeTemplate
from specsparse.speculative.trees.base import Expanded, Expander, TreeShape
from specsparse.speculative.trees.options import TemplateOptions


class Levels(NamedTuple):
    """A template by levels, for a loop over them.

    Attributes:
        parents: int[D, P], nodes with children on the level below, `ROOT` for the root, -2 for none.
        nodes: int[D, P, W], their children by rank, K for none.
        widths: int[D], most children of any of them.
        starts: int[D], first node of each level; its nodes follow each other.
    """

    parents: np.ndarray
    nodes: np.ndarray
    widths: np.ndarray
    starts: np.ndarray


class _Partial(NamedTuple):
    cache: KVCache
    tokens: jax.Array
    q: jax.Array | None
    fed: jax.Array


@dataclasses.dataclass(frozen=True)
class StaticTree(TreeShape):
    """A template whose nodes are filled level by level; a smaller budget keeps its first nodes.

    Attributes:
        template: the tree, nodes in level order (`by_level` puts them so).
        draw: `ONE_HOT`: child r is the token of rank r (Medusa, arXiv:2401.10774; EAGLE, 2401.15077). `IID`: children
            are drawn from q independently (SpecInfer, 2305.09781). `WOR`: each child is drawn from q without its elder
            siblings (Sequoia, 2402.12374). `SAMPLED`: a chain of draws.
    """

    template: TreeTemplate
    draw: DraftKind = DraftKind.ONE_HOT

    def __post_init__(self):
        if self.template.size < 1:
            raise UserError("a tree needs at least one node")
        if list(self.template.depths) != sorted(self.template.depths):
            object.__setattr__(self, "template", by_level(self.template))
        if self.draw is DraftKind.SAMPLED and self.branches:
            raise UserError("siblings are drawn iid or wor; sampled is for chains")

    kind = property(attrgetter("draw"))
    max_nodes = property(attrgetter("template.size"))
    max_depth = property(attrgetter("template.max_depth"))

    @property
    def branches(self) -> bool:
        """Whether the template does."""
        return self.template.width > 1

    @functools.cached_property
    def levels(self) -> Levels:
        """The template by levels."""
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
        if self.draw is not DraftKind.ONE_HOT:
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
        if self.draw is not DraftKind.ONE_HOT:
            x_RN, ok_R = by.law.law(x_RN)
            x_RN = jnp.where(ok_R[:, None], x_RN, jnp.float32(0))

        def rank(r, carry):
            tokens_BK, q_BKV, x_RN = carry
            node_P = jax.lax.dynamic_index_in_dim(levels.nodes[d], r, axis=1, keepdims=False)
            if self.draw is DraftKind.ONE_HOT:
                column_R = by.law.top(x_RN)
            else:
                u_BPU = draft_uniforms(by.ctx, depth=d + 1, node=node_P[None])
                column_R = by.law.draw(x_RN, u_BPU.reshape(-1, 4))
                wide_BPV = by.widen(x_RN).reshape(batch, P, -1)
                q_BKV = q_BKV.at[:, node_P].set(wide_BPV, mode="drop")
            tokens_BK = tokens_BK.at[:, node_P].set(by.token_ids(column_R).reshape(batch, P), mode="drop")
            return tokens_BK, q_BKV, self._without(x_RN, column_R)

        start = (partial.tokens, partial.q, x_RN)
        tokens_BK, q_BKV, _ = jax.lax.fori_loop(0, levels.widths[d], rank, start)
        return partial._replace(tokens=tokens_BK, q=q_BKV)

    def _without(self, x_RN: jax.Array, column_R: jax.Array) -> jax.Array:
        """What the next sibling is taken from: logits or q without the column just used."""
        row_R = jnp.arange(x_RN.shape[0], dtype=jnp.int32)
        if self.draw is DraftKind.ONE_HOT:
            return x_RN.at[row_R, column_R].set(np.float32(-np.inf))
        if self.draw is not DraftKind.WOR:
            return x_RN
        x_RN = x_RN.at[row_R, column_R].set(np.float32(0))
        mass_R1 = jnp.sum(x_RN, axis=1, keepdims=True)
        # A law whose mass is spent stays zero: a node without mass at its token is never accepted.
        return jnp.where(mass_R1 > 0, x_RN / mass_R1, jnp.float32(0))


_DRAWS = {"top": DraftKind.ONE_HOT, "iid": DraftKind.IID, "wor": DraftKind.WOR}


def static_tree(template: TreeTemplate, draw: str) -> StaticTree:
    """A template with its way of drawing by name: top, iid or wor."""
    return StaticTree(template, _DRAWS[draw])


def templated(widths: tuple[int, ...], paths: tuple[tuple[int, ...], ...] | None, draw: str) -> StaticTree:
    """From options: `widths` of the levels, or `paths`.

    Raises:
        UserError: both were given, or they are no tree.
    """
    if paths is None:
        return static_tree(TreeTemplate.kary(widths), draw)
    if widths != TemplateOptions.widths:
        raise UserError("tree.widths and tree.paths are two ways to say it: give one of them")
    return static_tree(TreeTemplate.from_paths(paths), draw)


sampled_iid = functools.partial(templated, draw="iid")
sampled_wor = functools.partial(templated, draw="wor")


def by_level(template: TreeTemplate) -> TreeTemplate:
    """The same tree with its nodes level by level, siblings in their order."""
    order = sorted(range(template.size), key=lambda node: template.depths[node])
    place = {node: i for i, node in enumerate(order)} | {ROOT: ROOT}
    return TreeTemplate(tuple(place[template.parents[node]] for node in order))
