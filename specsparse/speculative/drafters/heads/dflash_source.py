"""A DFlash drafter as a source of logits: one forward a draft, whose rows are then handed out position by position."""

import dataclasses
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine import cache as kv
from specsparse.engine.cache import LANES, KVCache
from specsparse.engine.pytree import Pytree
from specsparse.kernels import QTensor
from specsparse.kernels.reference.dense import append
from specsparse.speculative.base import DraftContext
from specsparse.speculative.drafters.heads.dflash_block import (
    BlockKeys,
    BlockShape,
    BlockWeights,
    block_rows,
    context_keys,
    masked_attention,
    one_by_one,
    sees_block,
    sees_context,
)
from specsparse.speculative.drafters.heads.feature_source import FeatureSource, pick
from specsparse.speculative.drafters.sources import DraftWeights, FedRows
from specsparse.speculative.tree import node_depths


class DFlashParams(NamedTuple):
    """What a drafter needs beside its output matrix.

    Attributes:
        block: its layers.
        cos, sin: f32[positions, d/2], for every position of a block.
        embedding: QTensor [V, D], or None for the target's.
    """

    block: BlockWeights
    cos: jax.Array
    sin: jax.Array
    embedding: QTensor | None


class BlockDraft(NamedTuple):
    """The state while a draft is made, its length counting the drafted tokens too; f32[B, m, N] logits of the m
    positions after the last token."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    length: jax.Array
    logits: jax.Array


@dataclasses.dataclass(frozen=True)
class BlockSource(FeatureSource[KVCache]):
    """A block drafter with a cache of the context's keys and values. Static.

    Attributes:
        shape: of its layers.
        rows: of a block.
        skipped: rows of a block that draft nothing: 1, or 0 where the last token's own row drafts.
        mask_token: id of the other rows.
        levels: depth of the trees it drafts, 0 for chains.
        embedding_scale, logit_scale, softcap: as in `DFlashFile`.
    """

    shape: BlockShape
    rows: int
    skipped: int
    mask_token: int
    levels: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float = 0.0

    independent = True
    wants_hidden = property(attrgetter("shape.features"))  # type: ignore[assignment]

    @property
    def positions(self) -> int:
        """m, tokens that a block drafts."""
        return self.rows - self.skipped

    def capacity(self, tokens: int) -> int:
        """Slots of its cache beside a target's of `tokens`: a block and its last row's copies lie behind them."""
        return -(-(tokens + 2 * self.rows) // LANES) * LANES

    def empty(self, batch: int, tokens: int) -> KVCache:
        """A cache with room for a block behind the tokens."""
        return kv.init(
            layers=self.shape.layers,
            batch=batch,
            kv_heads=self.shape.kv_heads,
            capacity=self.capacity(tokens),
            head_dim=self.shape.head_dim,
            dtype=self.kv_dtype,
        )

    def room(self, weights: DraftWeights, state: KVCache, ctx: DraftContext) -> jax.Array:
        """Up to the end of the context and of the cache; of a chain no more than a block drafts."""
        left_B = min(self.context, ctx.tokens.shape[1]) - ctx.length + 1
        return left_B if self.levels else jnp.minimum(left_B, self.positions)

    def open(
        self, weights: DraftWeights, state: KVCache, ctx: DraftContext, live_B: jax.Array
    ) -> tuple[BlockDraft, jax.Array]:
        """Drafts the block. Logits are computed of as many positions as the budget asks for."""
        batch, n, D = ctx.tokens.shape[0], self.rows, self.shape.width
        p: DFlashParams = weights.params
        last_B1 = pick(ctx.tokens, ctx.length[:, None] - 1)
        masks_Bn = jnp.full((batch, n - 1), self.mask_token, jnp.int32)
        tokens_R = jnp.concatenate([last_B1, masks_Bn], axis=1).reshape(-1)
        at_R = (state.length[:, None] + jnp.arange(n, dtype=jnp.int32)[None]).reshape(-1)
        with jax.named_scope("dflash"):
            embedding = ctx.params.embedding if p.embedding is None else p.embedding
            x_RD = self.kernels.embed(embedding, tokens_R) * jnp.float32(self.embedding_scale)
            valid_B = jnp.where(live_B, n, 0)
            keys, values = list(state.k), list(state.v)

            def attend(i: int, q_RHd: jax.Array, own: BlockKeys) -> jax.Array:
                args = (q_RHd, own, keys[i], values[i], state.length, valid_B)
                if self.shape.windows[i] is not None and not self.shape.causal[i]:
                    return self._attend_window(i, *args)
                out_RO, keys[i], values[i] = self._attend_all(i, *args)
                return out_RO

            linear = partial(self.kernels.linear, n_valid=valid_B)
            cos, sin = _pick_rows(p.cos, at_R), _pick_rows(p.sin, at_R)
            y_RD = block_rows(linear, self.shape, p.block, x_RD, cos, sin, attend, one_by_one)
        wanted_B = jnp.minimum(ctx.budget, self.levels or self.positions)
        logits_BmN = self._logits(weights, y_RD.reshape(batch, n, D)[:, self.skipped :], jnp.where(live_B, wanted_B, 0))
        return BlockDraft(tuple(keys), tuple(values), state.length, logits_BmN), logits_BmN[:, 0]

    def feed(
        self, weights: DraftWeights, ctx: DraftContext, cache: BlockDraft, rows: FedRows
    ) -> tuple[jax.Array, BlockDraft]:
        """Logits by position alone: those after a node of depth i are of position i, whatever was drafted before."""
        if rows.parents is None:
            depth_Bn = (cache.length - ctx.length + 2)[:, None]
        else:
            depth_Bn = node_depths(rows.parents, max_depth=max(self.levels, 1))
        return pick(cache.logits, depth_Bn), cache

    def close(
        self, weights: DraftWeights, state: KVCache, cache: BlockDraft, ctx: DraftContext
    ) -> tuple[KVCache, Pytree]:
        """The block is forgotten."""
        return KVCache(cache.k, cache.v, state.length), ctx.cache

    def advance(
        self, weights: DraftWeights, ctx: DraftContext, state: KVCache, hidden_BnE: jax.Array, count_B: jax.Array
    ) -> KVCache:
        """Appends the keys and values of the rows."""
        p: DFlashParams = weights.params
        batch, n, width = hidden_BnE.shape
        at_Bn = state.length[:, None] + jnp.arange(n, dtype=jnp.int32)[None]
        kept_Bn = jnp.arange(n, dtype=jnp.int32)[None] < count_B[:, None]
        cos, sin = _pick_rows(p.cos, at_Bn.reshape(-1)), _pick_rows(p.sin, at_Bn.reshape(-1))
        with jax.named_scope("dflash/context"):
            linear = partial(self.kernels.linear, n_valid=count_B)
            found = context_keys(
                linear, self.shape, p.block, hidden_BnE.reshape(batch * n, width), cos, sin, one_by_one
            )
        keys, values = [], []
        for k, v, own in zip(state.k, state.v, found, strict=True):
            rows = (a.reshape(batch, n, *a.shape[1:]) for a in own)
            k, v = append(k, v, *rows, at_Bn, kept_Bn)
            keys.append(k)
            values.append(v)
        return KVCache(tuple(keys), tuple(values), state.length + count_B)

    def _attend_all(self, i: int, q_RHd, own: BlockKeys, k, v, length_B, valid_B):
        """Attention by the kernels, which know chains, windows of them, and trees.

        A causal block is a chain. A bidirectional one is a chain of all rows but the last, and under it one leaf for
        each query, all with the keys and values of the last row: each leaf sees the context and the whole block.
        """
        n, rotation = self.rows, jnp.zeros((1, v.shape[2], 0), jnp.float32)  # all is rotated already
        batch = valid_B.shape[0]
        options = {"cos": rotation, "sin": rotation, "length": length_B, "pairing": self.shape.pairing}
        q, k_new, v_new = (a.reshape(batch, n, -1) for a in (q_RHd, *own))
        if self.shape.causal[i] or n == 1:
            flat = (a.reshape(batch * n, -1) for a in (q, k_new, v_new))
            return self.kernels.attend(*flat, k, v, n_valid=valid_B, window=self.shape.windows[i] or 0, **options)
        chain = jnp.arange(-1, n - 2, dtype=jnp.int32)
        parents = jnp.concatenate([chain, jnp.full((n,), n - 2, jnp.int32)])
        k_all, v_all = (jnp.concatenate([a[:, : n - 1], jnp.repeat(a[:, -1:], n, axis=1)], 1) for a in (k_new, v_new))
        q_all = jnp.concatenate([q[:, : n - 1], q], axis=1)
        out, k, v = self.kernels.attend(
            *(a.reshape(batch * (2 * n - 1), -1) for a in (q_all, k_all, v_all)), k, v,
            n_valid=jnp.where(valid_B > 0, 2 * n - 1, 0), parents=jnp.tile(parents[None], (batch, 1)), **options,
        )  # fmt: skip
        return out.reshape(batch, 2 * n - 1, -1)[:, n - 1 :].reshape(batch * n, -1), k, v

    def _attend_window(self, i: int, q_RHd, own: BlockKeys, k, v, length_B, valid_B):
        """Attention both ways with a window, sequence by sequence, so that a sequence's bits are its own."""
        n, window = self.rows, self.shape.windows[i]
        batch, groups, capacity, d = v.shape
        block = sees_block(self.shape.causal[i], window, n)
        slots = jnp.arange(capacity, dtype=jnp.int32)

        def one(args):
            q_nHd, k_nGd, v_nGd, k_G, v_GCd, length = args
            k_GCd = k_G.swapaxes(2, 3).reshape(groups, capacity, d)
            there_C = slots < length
            past = (a.swapaxes(0, 1).astype(jnp.float32) for a in (k_GCd, v_GCd))
            past = BlockKeys(*(jnp.where(there_C[:, None, None], a, jnp.float32(0)) for a in past))
            at_n = length + jnp.arange(n, dtype=jnp.int32)
            seen = sees_context(window, at_n, slots) & there_C[None]
            return masked_attention(self.shape, q_nHd, [past, BlockKeys(k_nGd, v_nGd)], [seen, block])

        by_sequence = [a.reshape(batch, n, *a.shape[1:]) for a in (q_RHd, *own)]
        out = jax.lax.map(one, (*by_sequence, k, v, length_B))
        return jnp.where((valid_B > 0)[:, None, None], out, jnp.float32(0)).reshape(batch * n, -1)

    def _logits(self, weights: DraftWeights, y_BmD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        norm = weights.params.block.output_norm
        with jax.named_scope("dflash/output"):
            logits_RN = self.score_rows(weights, y_BmD, n_valid_B, norm=norm, eps=self.shape.eps)
        if self.logit_scale != 1.0:
            logits_RN = logits_RN * jnp.float32(self.logit_scale)
        if self.softcap > 0:
            logits_RN = jnp.tanh(logits_RN / jnp.float32(self.softcap)) * jnp.float32(self.softcap)
        return logits_RN.reshape(*y_BmD.shape[:2], -1)


def _pick_rows(table: jax.Array, index_R: jax.Array) -> jax.Array:
    return table[jnp.clip(index_R, 0, len(table) - 1)]
