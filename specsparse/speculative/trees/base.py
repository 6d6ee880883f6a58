"""Token trees that depend on data: array helpers, and the base of all tree shapes."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Annotated, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.cache import KVCache
from specsparse.speculative.base import MAX_NODES, PAD, ROOT, Draft, DraftContext, DraftKind, Verdict
from specsparse.speculative.drafters.sources import DraftSampling
from specsparse.support.options import Range


def node_depths(parents_BK: jax.Array, *, max_depth: int) -> jax.Array:
    """int32[B, K]: depth of each node, 1 for children of the root; `max_depth` is the static bound."""
    return (ancestor_paths(parents_BK, max_depth=max_depth) != PAD).sum(axis=-1, dtype=jnp.int32)


def ancestor_paths(parents_BK: jax.Array, *, max_depth: int) -> jax.Array:
    """int32[B, K, max_depth]: nodes from the root's child down to each node, itself last, then `PAD`."""
    batch, K = parents_BK.shape
    node_BK = jnp.tile(jnp.arange(K, dtype=jnp.int32)[None], (batch, 1))
    up = []
    for _ in range(max_depth):
        up.append(node_BK)
        above_BK = jnp.take_along_axis(parents_BK, jnp.maximum(node_BK, 0), axis=1)
        node_BK = jnp.where(node_BK == ROOT, ROOT, above_BK)
    down_BKD = jnp.stack(up[::-1], axis=-1) if up else jnp.zeros((batch, K, 0), jnp.int32)
    blanks_BK = (down_BKD == ROOT).sum(axis=-1, dtype=jnp.int32)
    from_D = jnp.arange(max_depth, dtype=jnp.int32)[None, None] + blanks_BK[..., None]
    shifted = jnp.take_along_axis(down_BKD, jnp.minimum(from_D, max_depth - 1), axis=-1)
    return jnp.where(from_D < max_depth, shifted, PAD)


def row_parents(parents_BK: jax.Array) -> jax.Array:
    """int32[B, K+1]: parents of the rows of the verifying forward pass, -1 being the committed prefix.

    Row 0 (the last committed token) hangs on the prefix, row 1+i on the row of node i's parent.
    """
    return jnp.pad(parents_BK + 1, ((0, 0), (1, 0)), constant_values=ROOT)


def path_rows(verdict: Verdict) -> jax.Array:
    """int32[B, K+1]: rows of the forward pass to keep in the cache, in order; the first `verdict.count` count."""
    return jnp.pad(verdict.nodes + 1, ((0, 0), (1, 0)))


Nodes = Annotated[int, Range(1, MAX_NODES)]
Depth = Annotated[int, Range(1, MAX_NODES)]


@dataclasses.dataclass(frozen=True)
class Expander:
    """How a tree is expanded, for the length of one trace: the draft model's forward, and its distribution."""

    # (cache, tokens_BR, parents_BR, n_valid_B) -> (float32[B, R, N] logits, cache). The rows hang on the committed
    # prefix (parent -1) or on each other; a later call feeds the earlier rows again
    feed: Callable[..., tuple[jax.Array, KVCache]]
    sampling: DraftSampling
    token_ids: Callable[[jax.Array], jax.Array]  # target ids of columns
    widen: Callable[[jax.Array], jax.Array]  # float32[.., N] -> float32[.., V]
    vocab_size: int
    ctx: DraftContext  # the round's context; keys the noise


class Expanded(NamedTuple):
    """A finished tree."""

    draft: Draft
    cache: KVCache  # after the last feeding
    rows: jax.Array  # int32[B, K], row under which each node was fed in that feeding, -1 for nodes that were not


class TreeShape(abc.ABC):
    """Base of the shapes: frozen dataclasses, whose fields are the options, that expand a tree level by level, one
    forward a level.

    Static facts are class attributes, fields or properties.

    Attributes:
        independent: whether it is made of distributions that do not depend on what was drafted before.
    """

    independent: ClassVar[bool] = False

    @property
    def kind(self) -> DraftKind:
        """How the tokens of a tree are drawn."""
        return DraftKind.ONE_HOT

    @property
    @abc.abstractmethod
    def max_nodes(self) -> int:
        """K: nodes that a tree has room for."""

    @property
    @abc.abstractmethod
    def max_depth(self) -> int:
        """Nodes of the longest path that a tree may have."""

    @property
    def branches(self) -> bool:
        """Whether a node may have more than one child."""
        return True

    @property
    def max_rows(self) -> int:
        """Rows that `expand` feeds at once, at most; by default all nodes."""
        return self.max_nodes

    @abc.abstractmethod
    def expand(
        self, by: Expander, cache: KVCache, logits_BN: jax.Array, *, budget_B: jax.Array, room_B: jax.Array
    ) -> Expanded:
        """A tree of at most `budget` nodes that feeds at most `room` rows, from the logits after the root."""
