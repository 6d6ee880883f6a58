"""The target drafts for itself, and attends only to the blocks of its cache where its last verifications looked most.

After SparseSpec (arXiv:2512.01278) and Vegas (arXiv:2602.07223). Every verification sums its attention's weights by
blocks of sixteen slots. Now and then the blocks with most of them are copied into a small cache, for each layer and
key/value head its own, beside the first block and the last ones.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.cache import LANES, KVCache
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError
from specsparse.speculative.base import DraftContext, Feedback
from specsparse.speculative.drafters.heads.head import DRAFT_IDS, shipped_for
from specsparse.speculative.drafters.sources import DraftWeights, KeptRows, ModelSource, VocabMap
from specsparse.speculative.drafters.spec import DrafterSpec, Load, LoadedDrafter, bytes_of
from specsparse.support.options import Count, Size

_COPIED = 2
"""Blocks that are copied after each round: the rows that it verified, if they are no more than a block."""
_SPARE = 4
"""Blocks of the small cache for drafts."""


class SparseState(NamedTuple):
    cache: KVCache  # chosen slots of the target's cache, its last ones among them; `shift` is a multiple of 16
    mass: jax.Array  # float32[L, B, G, C/16], where verifications have looked since the blocks were chosen
    age: jax.Array  # int32[B], tokens committed since then


@dataclasses.dataclass(frozen=True)
class ChosenSlots(ModelSource):
    """The target on chosen slots of its own cache."""

    blocks: int  # chosen by their mass
    window: int  # last blocks, which are always there
    refresh: int  # tokens after which blocks are chosen anew
    attends: tuple[int, ...]  # positions that a row of each layer sees, 0 for all (`LayerKind.window`)
    wants_mass = True

    def init(self, weights: DraftWeights, ctx: DraftContext, hidden_BnD: jax.Array | None = None) -> SparseState:
        """Where the target looks is not known yet: the first verification has the blocks chosen again."""
        (batch, groups, blocks, row, lanes), nothing_B = ctx.cache.k[0].shape, jnp.zeros_like(ctx.length)
        held = min(self._chosen(blocks) + -(-self.refresh // LANES) + _SPARE, blocks)
        k = tuple(jnp.zeros((batch, groups, held, row, lanes), each.dtype) for each in ctx.cache.k)
        v = tuple(jnp.zeros((batch, groups, held * LANES, row), each.dtype) for each in ctx.cache.v)
        mass = jnp.zeros((len(k), batch, groups, blocks), jnp.float32)
        state = SparseState(KVCache(k, v, nothing_B, nothing_B), mass, nothing_B)
        state = self._choose(state, ctx.cache, ctx.length >= 0)
        return state._replace(age=nothing_B + self.refresh)

    def room(self, weights: DraftWeights, state: SparseState, ctx: DraftContext) -> jax.Array:
        behind_B = min(self.context, ctx.cache.capacity) - ctx.length + 1
        return jnp.minimum(behind_B, state.cache.capacity - state.cache.length)

    def open(
        self, weights: DraftWeights, state: SparseState, ctx: DraftContext, live_B: jax.Array
    ) -> tuple[KVCache, jax.Array]:
        """Runs the last emitted token."""
        return self.feed_last(weights, ctx, state.cache, live_B)

    def close(
        self, weights: DraftWeights, state: SparseState, cache: KVCache, ctx: DraftContext
    ) -> tuple[SparseState, KVCache]:
        """The target's cache is as it was."""
        return state._replace(cache=cache._replace(length=state.cache.length)), ctx.cache

    def keep(
        self, weights: DraftWeights, state: SparseState, ctx: DraftContext, feedback: Feedback, kept: KeptRows
    ) -> SparseState:
        """The verified rows take the place of the drafted ones."""
        assert feedback.mass is not None
        small, new_B = state.cache, ctx.cache.length - state.cache.length - state.cache.shift
        state = SparseState(_with_last(small, ctx.cache, new_B), state.mass + feedback.mass, state.age + new_B)
        full_B = state.cache.length + feedback.draft.max_nodes + 1 > small.capacity
        stale_B = (new_B > 0) & ((state.age >= self.refresh) | full_B | (new_B > LANES))
        return jax.lax.cond(stale_B.any(), lambda s: self._choose(s, ctx.cache, stale_B), lambda s: s, state)

    def params(self, weights: DraftWeights, ctx: DraftContext) -> Pytree:
        return ctx.params if weights.head is None else ctx.params._replace(output=weights.head)

    def _chosen(self, blocks: int) -> int:
        """Blocks of a choice: the first, those with most mass, and the last ones, of which one may not be full."""
        return min(1 + self.blocks + self.window + 1, blocks)

    def _choose(self, state: SparseState, cache: KVCache, stale_B: jax.Array) -> SparseState:
        """The blocks with most mass in the small caches of the sequences in `stale`.

        Blocks outside a layer's window are taken last: in a small cache no longer than the window it would see them.
        """
        blocks, held_B = state.mass.shape[3], -(-cache.length // LANES)
        count = self._chosen(blocks)
        block_c, held_B1 = jnp.arange(blocks, dtype=jnp.int32)[None], held_B[:, None]
        always_Bc, exists_Bc = (block_c == 0) | (block_c >= held_B1 - 1 - self.window), block_c < held_B1
        attends_L11 = np.array([n or 2**30 for n in self.attends], np.int32)[:, None, None]
        outside_LBc = LANES * (block_c + 1)[None] <= cache.length[None, :, None] + 1 - attends_L11
        mass = jnp.where(always_Bc[None, :, None], jnp.inf, state.mass)
        mass = jnp.where(outside_LBc[:, :, None], jnp.float32(-1), mass)
        mass = jnp.where(exists_Bc[None, :, None], mass, -jnp.inf)
        chosen_LBGM = jnp.sort(jax.lax.top_k(mass, count)[1], axis=3)  # what does not exist comes last

        def put(to, of, chosen_BGM):
            take = jax.vmap(jax.vmap(lambda each, at: each.at[at].get(mode="promise_in_bounds")))
            taken = take(of, chosen_BGM)
            old = jax.lax.slice_in_dim(to, 0, count, axis=2)
            taken = jnp.where(stale_B.reshape(-1, *[1] * (to.ndim - 1)), taken, old)
            return jax.lax.dynamic_update_slice_in_dim(to, taken, 0, axis=2)

        small, by_block = state.cache, lambda v: v.reshape(*v.shape[:2], -1, LANES, v.shape[3])
        k = tuple(map(put, small.k, cache.k, chosen_LBGM))
        v = tuple(
            put(by_block(to), by_block(of), chosen).reshape(to.shape)
            for to, of, chosen in zip(small.v, cache.v, chosen_LBGM, strict=True)
        )
        length_B = cache.length - LANES * jnp.maximum(held_B - count, 0)
        length_B = jnp.where(stale_B, length_B, small.length)
        shift_B = jnp.where(stale_B, cache.length - length_B, small.shift)
        mass = jnp.where(stale_B[None, :, None, None], jnp.float32(0), state.mass)
        return SparseState(KVCache(k, v, length_B, shift_B), mass, jnp.where(stale_B, 0, state.age))


def _with_last(small: KVCache, cache: KVCache, new_B: jax.Array) -> KVCache:
    """The small cache with the blocks of the last `new` slots, up to `LANES` of them, as they are in the other."""
    held, blocks = small.k[0].shape[2], cache.k[0].shape[2]
    count = min(_COPIED, held)
    to_B, shift_B = small.length // LANES, small.shift // LANES
    to_B = jnp.minimum(to_B, jnp.minimum(held, blocks - shift_B) - count)

    def put(to, of, at, shift, step):
        part = jax.lax.dynamic_slice_in_dim(of, (at + shift) * step, count * step, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(to, part, at * step, axis=1)

    each = jax.vmap(put, (0, 0, 0, 0, None))
    k = tuple(each(to, of, to_B, shift_B, 1) for to, of in zip(small.k, cache.k, strict=True))
    v = tuple(each(to, of, to_B, shift_B, LANES) for to, of in zip(small.v, cache.v, strict=True))
    return small._replace(k=k, v=v, length=small.length + new_B)


@dataclasses.dataclass(frozen=True)
class SparseKv(DrafterSpec):
    """The target on the slots of its own cache where it looks most; it pays behind long texts.

    Without ids of its own it scores those of the head that was trained for the target, if there is one.

    Attributes:
        slots: chosen by the weights of attention, for each layer and key/value head; in blocks of sixteen.
        window: last slots, which are always there, as the first sixteen are.
        refresh: tokens after which slots are chosen anew.
    """

    slots: Size = 256
    window: Count = 64
    refresh: Count = 16

    def build(self, target: Model, load: Load) -> LoadedDrafter:
        if not target.devices.one_program:
            raise UserError("drafter=sparse_kv needs the whole model on one device: load it without placement")
        c, in_blocks = target.config, lambda tokens: -(-tokens // LANES)
        style = self.style
        if style.draft_vocab is None and (head := shipped_for(target.params.output_norm)) is not None:
            # Most tokens of texts are among them, and scores of the whole vocabulary are a third of a draft's time.
            style = dataclasses.replace(style, draft_vocab=tuple(head.get(DRAFT_IDS, "numbers").tolist()))
        weights, columns = style.trim(target, target.params.output, c.vocab_size)
        source = ChosenSlots(
            VocabMap(c.vocab_size, c.vocab_size, columns), target.forward, c.context_length, layers=None,
            blocks=in_blocks(self.slots), window=in_blocks(self.window), refresh=min(self.refresh, c.context_length),
            attends=tuple(c.kind(i).window for i in range(c.n_layers)),
        )  # fmt: skip
        reads = bytes_of(target.params.layers, target.params.output if weights.head is None else weights.head)
        return LoadedDrafter(style.drafter(source, target), lambda capacity: weights, reads)
