"""A drafter that is right and wrong where it is told to be: every acceptance pattern, for measuring and for tests."""

import dataclasses
from operator import attrgetter
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError
from specsparse.speculative.base import ROOT, Draft, DraftContext, Drafted, Drafter, DraftKind
from specsparse.speculative.drafters import lookup
from specsparse.speculative.tree import TreeTemplate


@dataclasses.dataclass(frozen=True)
class Scripted(Drafter):
    """Drafts the true continuation along one path of a tree and wrong tokens everywhere else.

    In round r the accepted path ends at node `ends[r % len(ends)]` (`ROOT`: nothing is accepted), if the target goes
    on as the truth says. Wrong siblings differ from the truth and from each other.

    The truth is int32[n] or int32[B, n], ids by absolute position (prompt first): `params`, or the field `truth` where
    `params` is None. Beyond its end everything is wrong.

    Attributes:
        template: the tree; see `chain` for the common case.
        ends: last right node of each round, repeated for ever.
        vocab_size: ids are drafted below this; more than a node has children.
        truth: ids of the whole text, if they are not given as `params`.
    """

    template: TreeTemplate
    ends: tuple[int, ...]
    vocab_size: int
    truth: tuple[int, ...] = ()
    kind: ClassVar[DraftKind] = DraftKind.ONE_HOT

    def __post_init__(self):
        if not self.ends or any(not ROOT <= end < self.template.size for end in self.ends):
            raise UserError(f"scripted ends {self.ends} must be nodes of a tree of {self.template.size}, or -1")
        if self.vocab_size <= self.template.width:
            raise UserError(f"scripted vocab_size={self.vocab_size} must exceed the tree's width {self.template.width}")

    @classmethod
    def chain(cls, gamma: int, accept: tuple[int, ...], *, vocab_size: int, truth: tuple[int, ...] = ()) -> "Scripted":
        """Drafts of `gamma` tokens of which `accept[r]` are right in round r."""
        return cls(TreeTemplate.chain(gamma), tuple(a - 1 for a in accept), vocab_size, truth)

    @classmethod
    def of(
        cls,
        max_nodes: int,
        *,
        accept: tuple[int, ...] | None,
        vocab_size: int,
        truth: tuple[int, ...],
        template: TreeTemplate | None,
        ends: tuple[int, ...],
    ) -> "Scripted":
        """Of options: a chain with `accept` right tokens a round (by default all), or a tree with `ends`."""
        if template is not None:
            return cls(template, ends, vocab_size, truth)
        return cls.chain(max_nodes, (max_nodes,) if accept is None else accept, vocab_size=vocab_size, truth=truth)

    max_nodes = property(attrgetter("template.size"))
    max_depth = property(attrgetter("template.max_depth"))

    @property
    def tree(self) -> bool:
        """Whether the template branches."""
        return self.template.width > 1

    def draft(self, params: Pytree, state: Pytree, ctx: DraftContext) -> Drafted:
        """The round's script, cut to the first `budget` nodes; consumes no noise."""
        batch, K = ctx.tokens.shape[0], self.max_nodes
        truth_BK = self._truth(params, ctx)
        right_BK = jnp.take(self._right(), ctx.round % len(self.ends), axis=0) & (truth_BK >= 0)
        miss_K = jnp.array(self.template.ranks, jnp.int32)[None] + 1
        wrong_BK = (jnp.maximum(truth_BK, 0) + miss_K) % self.vocab_size
        count_B = lookup.allowed(ctx, jnp.full((batch,), K, jnp.int32), max_nodes=K)
        tokens_BK = jnp.where(right_BK, truth_BK, wrong_BK)
        tokens_BK = jnp.where(jnp.arange(K, dtype=jnp.int32)[None] < count_B[:, None], tokens_BK, 0)
        return lookup.drafted(Draft(tokens_BK, self.template.parents_array(batch), count_B), state, ctx)

    def _truth(self, params: Pytree, ctx: DraftContext) -> jax.Array:
        """int32[B, K]: the true id at each node's position, -1 beyond the end of the truth."""
        given = jnp.array(self.truth, jnp.int32) if params is None else jnp.asarray(params, jnp.int32)
        batch, n = ctx.tokens.shape[0], given.shape[-1]
        at_BK = ctx.length[:, None] + jnp.array(self.template.depths, jnp.int32)[None] - 1
        if n == 0:
            return jnp.full(at_BK.shape, -1, jnp.int32)
        truth_Bn = jnp.broadcast_to(given.reshape(-1, n), (batch, n))
        return jnp.where(at_BK < n, jnp.take_along_axis(truth_Bn, jnp.minimum(at_BK, n - 1), axis=1), -1)

    def _right(self) -> jax.Array:
        """bool[len(ends), K]: nodes on the accepted path of each round."""
        table = np.zeros((len(self.ends), self.max_nodes), bool)
        for row, end in enumerate(self.ends):
            table[row, list(self.template.path(end))] = True
        return jnp.asarray(table)
