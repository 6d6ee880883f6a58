"""What all tree shapes share: the draft model that expands them, and the finished tree."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax

from specsparse.engine.cache import KVCache
from specsparse.speculative.base import Draft, DraftContext, DraftKind
from specsparse.speculative.draft_sampling import DraftSampling
from specsparse.speculative.gamma import MAX_NODES
from specsparse.support.options import Range

Nodes = Annotated[int, Range(1, MAX_NODES)]
Depth = Annotated[int, Range(1, MAX_NODES)]


@dataclasses.dataclass(frozen=True)
class Expander:
    """How a tree is expanded, for the length of one trace: the draft model's forward, and its distribution.

    Attributes:
        feed: (cache, tokens_BR, parents_BR, n_valid_B) -> (float32[B, R, N] logits, cache). The rows hang on the
            committed prefix (parent -1) or on each other; a later call feeds the earlier rows again.
        probs: the draft's distribution over its N columns.
        token_ids: target ids of columns.
        widen: float32[.., N] -> float32[.., V].
        vocab_size: V.
        ctx: the round's context; keys the noise.
    """

    feed: Callable[..., tuple[jax.Array, KVCache]]
    sampling: DraftSampling
    token_ids: Callable[[jax.Array], jax.Array]
    widen: Callable[[jax.Array], jax.Array]
    vocab_size: int
    ctx: DraftContext


class Expanded(NamedTuple):
    """A finished tree.

    Attributes:
        draft: the tree.
        cache: after the last feeding.
        rows: int32[B, K], row under which each node was fed in that feeding, -1 for nodes that were not.
    """

    draft: Draft
    cache: KVCache
    rows: jax.Array


class TreeShape(abc.ABC):
    """Base of the shapes: frozen dataclasses, whose fields are the options, that expand a tree level by level, one
    forward a level.

    Static facts are class attributes, fields or properties.

    Attributes:
        kind: how the tokens are drawn.
        max_nodes: K.
        max_depth: longest path.
        branches: whether a node may have more than one child.
        independent: whether it is made of distributions that do not depend on what was drafted before.
    """

    kind: DraftKind = DraftKind.ONE_HOT
    max_nodes: int
    max_depth: int
    branches: bool = True
    independent: bool = False

    @property
    def max_rows(self) -> int:
        """Rows that `expand` feeds at once, at most; by default all nodes."""
        return self.max_nodes

    @abc.abstractmethod
    def expand(
        self, by: Expander, cache: KVCache, logits_BN: jax.Array, *, budget_B: jax.Array, room_B: jax.Array
    ) -> Expanded:
        """A tree of at most `budget` nodes that feeds at most `room` rows, from the logits after the root."""
