"""Sources of a model drafter's logits.

A model of its own (`draft_model`), a part of the target (`self_draft`), or a head on its features
(`heads.feature_source`).

A source feeds tokens and keeps caches; it knows nothing of distributions, trees or policies. Logits come as [.., N], N
columns of the draft's vocabulary; `widen` and `token_ids` lead from columns to the target's ids.
"""

import abc
import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine import cache as kv
from specsparse.engine.cache import KVCache
from specsparse.engine.llama import ForwardFn, Want, WhichLogits
from specsparse.engine.noise import NoiseStream, token_uniforms
from specsparse.engine.pytree import Pytree
from specsparse.engine.sampling.params import SamplingParams, compile_params
from specsparse.engine.sampling.pipeline import RowPaths, target_probs
from specsparse.engine.sampling.probs import REFERENCE, SamplingKernels, ranked
from specsparse.kernels import Matrix
from specsparse.speculative.base import DraftContext, Feedback


class Images(NamedTuple):
    """The ids that a draft model with a vocabulary of its own reads for each of the target's tokens."""

    starts: jax.Array  # int32[V + 1]; token t is read as `pieces[starts[t] : starts[t + 1]]`, which may be empty
    pieces: jax.Array  # int32[P], draft ids
    bos: jax.Array  # int32[], read first if the text does not begin with it; -1 for none

    def first(self, tokens: jax.Array) -> jax.Array:
        """The first piece of tokens, the only one of those that both vocabularies have."""
        start = self.starts[jnp.clip(tokens, 0, self.starts.shape[0] - 2)]
        return self.pieces[jnp.minimum(start, self.pieces.shape[0] - 1)]


class DraftIds(NamedTuple):
    """The committed text in a draft model's ids: each token's image after that of the tokens before it.

    So a longer text begins with what a shorter one was read as, and a cache that holds some of it stays right.
    """

    tokens: jax.Array  # int32[B, C], the target's ids
    length: jax.Array  # int32[B], draft ids
    # int32[B, C], draft ids up to each target token, itself included; None if they are the target's
    ends: jax.Array | None = None
    bos: jax.Array | None = None  # int32[B], 1 if a BOS of the draft's own comes first

    def at(self, images: Images | None, at_Bn: jax.Array) -> jax.Array:
        """int32[B, n]: the ids at these places; anything beyond the text. Without images the target's own ids."""
        last = self.tokens.shape[1] - 1
        if images is None or self.ends is None or self.bos is None:
            return jnp.take_along_axis(self.tokens, jnp.clip(at_Bn, 0, last), axis=1)
        before_Bn = jnp.sum(self.ends[:, None, :] <= at_Bn[:, :, None], axis=2, dtype=jnp.int32)
        token_Bn = jnp.clip(before_Bn, 0, last)
        # Places count from the end of the token before; a BOS of the draft's own comes before the first one.
        began_Bn = jnp.where(token_Bn > 0, jnp.take_along_axis(self.ends, jnp.maximum(token_Bn - 1, 0), axis=1), 0)
        piece_Bn = at_Bn - began_Bn - jnp.where(token_Bn > 0, 0, self.bos[:, None])
        tokens_Bn = jnp.clip(jnp.take_along_axis(self.tokens, token_Bn, axis=1), 0, images.starts.shape[0] - 2)
        index_Bn = jnp.clip(images.starts[tokens_Bn] + piece_Bn, 0, images.pieces.shape[0] - 1)
        return jnp.where(piece_Bn < 0, images.bos, images.pieces[index_Bn])


def draft_ids(images: Images | None, ctx: DraftContext) -> DraftIds:
    """The text `ctx.tokens[:, :length]` in the draft model's ids."""
    if images is None:
        return DraftIds(ctx.tokens, ctx.length)
    known_BC = jnp.arange(ctx.tokens.shape[1], dtype=jnp.int32)[None] < ctx.length[:, None]
    tokens_BC = jnp.where(known_BC, jnp.clip(ctx.tokens, 0, images.starts.shape[0] - 2), 0)
    count_BC = jnp.where(known_BC, images.starts[tokens_BC + 1] - images.starts[tokens_BC], 0)
    begins_B = (count_BC[:, 0] > 0) & (images.first(tokens_BC[:, 0]) == images.bos)
    bos_B = ((images.bos >= 0) & ~begins_B).astype(jnp.int32)
    ends_BC = jnp.cumsum(count_BC.at[:, 0].add(bos_B), axis=1, dtype=jnp.int32)
    return DraftIds(ctx.tokens, ends_BC[:, -1], ends_BC, bos_B)


PREFILL_ROWS = 128
"""Rows of a prompt's chunk at `init`."""


class DraftWeights(NamedTuple):
    """Weights of a model drafter, an argument of every jitted function."""

    # `engine.weights.Params` of the draft model, or of the target with fewer neurons; None for the target's
    params: Pytree = None
    head: Matrix | None = None  # [N, D], the trimmed output matrix, or None
    ids: jax.Array | None = None  # int32[N], target id of each column of a trimmed head, ascending, or None
    # draft ids of the target's tokens if the draft model has other ones; then `head` and `ids` are of the tokens that
    # both have. None if the ids are the same
    images: Images | None = None
    norm: jax.Array | None = None  # f32[D], the RMS norm before `head` of a head on features, else None


class FedRows(NamedTuple):
    tokens: jax.Array  # int32[B, n], ids of the target
    n_valid: jax.Array  # int32[B], how many of a sequence's rows count, the first ones
    # int32[B, n] of all rows of a tree so far, with those of earlier calls; None for a chain, whose tokens come one at
    # a time, each committed before the next
    parents: jax.Array | None = None


class KeptRows(NamedTuple):
    """Rows of the last draft that a cache may keep: the first `count` int32[B] of all rows, or of the path `rows`
    int32[B, m] through them."""

    count: jax.Array
    rows: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class VocabMap:
    """The map between the draft's columns and the target's ids. Ids below both sizes are the same token."""

    target: int  # V, ids of the target
    draft: int  # ids of the draft model
    columns: int  # N, columns of logits: min(V, draft), or fewer if the head is trimmed
    unknown: int = 0  # the draft's id in place of one that it does not have

    def to_draft(self, tokens: jax.Array) -> jax.Array:
        """Ids of the draft; a target id that it does not have becomes `unknown`."""
        return jnp.where((tokens < 0) | (tokens >= self.draft), jnp.int32(self.unknown), tokens)

    def token_ids(self, weights: DraftWeights, column: jax.Array) -> jax.Array:
        return column if weights.ids is None else weights.ids[column]

    def widen(self, weights: DraftWeights, q_RN: jax.Array) -> jax.Array:
        """q over the target's ids, float32[R, V]; 0 at ids without a column."""
        if weights.ids is not None:  # written id by id: a fifth of the time of reading a column for each id
            wide_RV = jnp.zeros((q_RN.shape[0], self.target), q_RN.dtype)
            return wide_RV.at[:, weights.ids].set(q_RN, mode="promise_in_bounds", unique_indices=True)
        return jnp.pad(q_RN, ((0, 0), (0, self.target - self.columns)))


@dataclasses.dataclass(frozen=True)
class Source(abc.ABC):
    """Base of all sources: final frozen dataclasses. The state is a pytree, the cache passes through a draft by value.

    A draft is `open`, then any number of `feed`, then `close`; after the verdict `keep`. New rows lie behind the
    cache's length.
    """

    vocab: VocabMap
    independent: ClassVar[bool] = False  # whether logits at a position do not depend on the drafted tokens before it

    @property
    def wants_hidden(self) -> bool | tuple[int, ...]:
        """The target's hidden rows for `init` and `keep`, as `Drafter.wants_hidden`."""
        return False

    @property
    def wants_mass(self) -> bool:
        """The target's weights of attention for `keep`, as `Drafter.wants_mass`."""
        return False

    def capacity(self, tokens: int) -> int:
        """Slots of its cache beside a target's of so many tokens."""
        return tokens

    @abc.abstractmethod
    def init(self, weights: DraftWeights, ctx: DraftContext, hidden_BnD: jax.Array | None = None) -> Pytree:
        """State after the prompt; `hidden` are its rows."""

    @abc.abstractmethod
    def room(self, weights: DraftWeights, state: Pytree, ctx: DraftContext) -> jax.Array:
        """Nodes for which there is room behind the committed tokens, int32[B]; below 1 there is no draft."""

    @abc.abstractmethod
    def open(
        self, weights: DraftWeights, state: Pytree, ctx: DraftContext, live_B: jax.Array
    ) -> tuple[Pytree, jax.Array]:
        """The cache with all committed tokens of the sequences in `live`, and logits float32[B, N] after the last.

        At most `ctx.budget` nodes will be drafted.
        """

    @abc.abstractmethod
    def feed(self, weights: DraftWeights, ctx: DraftContext, cache: Pytree, rows: FedRows) -> tuple[jax.Array, Pytree]:
        """Logits float32[B, n, N], and the cache, its length unchanged."""

    def confidence(self, cache: Pytree) -> jax.Array | None:
        """float32[B]: the acceptance of a chain's next node, as a head of the source's own predicts it before the node
        is drawn; None without such a head."""
        return None

    @abc.abstractmethod
    def close(self, weights: DraftWeights, state: Pytree, cache: Pytree, ctx: DraftContext) -> tuple[Pytree, Pytree]:
        """The state, and the target's cache, after a draft."""

    @abc.abstractmethod
    def keep(
        self, weights: DraftWeights, state: Pytree, ctx: DraftContext, feedback: Feedback, kept: KeptRows
    ) -> Pytree:
        """The source's state after the verdict, without what was rejected."""


@dataclasses.dataclass(frozen=True)
class ModelSource(Source):
    """Base of the sources that run a model's forward function. Static.

    Between `open` and `close` the cache's length counts all committed tokens, the last one too.
    """

    forward: ForwardFn
    context: int  # tokens the model may look at
    layers: tuple[int, ...] | None  # the layers that run, None for all

    @abc.abstractmethod
    def params(self, weights: DraftWeights, ctx: DraftContext) -> Pytree:
        """The parameters that the forward function is called with."""

    def feed(self, weights: DraftWeights, ctx: DraftContext, cache: KVCache, rows: FedRows) -> tuple[Pytree, KVCache]:
        images, tokens_Bn = weights.images, rows.tokens
        ids_Bn = self.vocab.to_draft(tokens_Bn) if images is None else images.first(tokens_Bn)
        return self.run(weights, ctx, cache, rows._replace(tokens=ids_Bn))

    def feed_last(
        self, weights: DraftWeights, ctx: DraftContext, cache: KVCache, live_B: jax.Array
    ) -> tuple[KVCache, jax.Array]:
        """Runs the last emitted token of the live sequences, bool[B]: the cache with it, and logits float32[B, N]."""
        last_B1 = jnp.take_along_axis(ctx.tokens, jnp.maximum(ctx.length - 1, 0)[:, None], axis=1)
        live_B = live_B.astype(jnp.int32)
        logits_B1N, cache = self.feed(weights, ctx, cache, FedRows(last_B1, live_B))
        return kv.commit(cache, live_B), logits_B1N[:, 0]

    def run(
        self, weights: DraftWeights, ctx: DraftContext, cache: KVCache, rows: FedRows, logits: WhichLogits = "all"
    ) -> tuple[Pytree, KVCache]:
        """`feed` for ids of the draft model; `logits` as in `Want`: [B, 1, N] for "last", None for "none"."""
        want = Want(logits=logits, layers=self.layers)
        params = self.params(weights, ctx)
        out, cache = self.forward(
            params, rows.tokens, cache, n_valid_B=rows.n_valid, parents_Bn=rows.parents, want=want
        )
        return None if out.logits is None else out.logits[..., : self.vocab.columns], cache


@dataclasses.dataclass(frozen=True)
class DraftSampling:
    """Makes q and tokens of a drafter's logits. Static."""

    sampling: SamplingParams  # temperature, top-k, top-p and min-p; the other fields keep their defaults
    columns: int  # N, logits of a row: the draft's vocabulary, trimmed or not
    kernels: SamplingKernels = REFERENCE  # of argmax, distribution and draw

    def probs(self, logits_RN: jax.Array) -> tuple[jax.Array, jax.Array]:
        """q float32[R, N] after temperature and truncation, and ok bool[R] (False: NaN, +inf or no token left)."""
        config, arrays = compile_params(self.sampling, vocab_size=self.columns)
        R = logits_RN.shape[0]
        rows = RowPaths(jnp.zeros((R,), jnp.int32), jnp.zeros((R, 0), jnp.int32))
        return target_probs(config, arrays, logits_RN, None, rows, kernels=self.kernels)

    def confidence(self, logits_RN: jax.Array) -> jax.Array:
        """How sure the draft is of each token, float32[R, N]: q itself, or at temperature 0 the softmax at 1."""
        warm = self.sampling.merged(temperature=1.0) if self.sampling.greedy else self.sampling
        return dataclasses.replace(self, sampling=warm).probs(logits_RN)[0]

    def top(self, logits_RN: jax.Array) -> jax.Array:
        return self.kernels.argmax(logits_RN)

    def ranked(self, logits_RN: jax.Array, count: int) -> jax.Array:
        """The most likely columns in order, int32[R, count], equal ones by index."""
        return ranked(self.kernels, logits_RN, count)

    def draw(self, q_RN: jax.Array, u_RU: jax.Array) -> jax.Array:
        """A column of each row drawn by inverse CDF, int32[R]; consumes the row's uniforms (see `draft_uniforms`)."""
        return self.kernels.draw(q_RN, u_RU)

    def propose(
        self, logits_RN: jax.Array, u_RU: jax.Array, ids_N: jax.Array | None, size: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`draw`, ok of `probs`, and q over a larger vocabulary of `size` ids: int32[R], bool[R], float32[R, V], by one
        call of kernels that have `propose`. `ids_N` is the token of each column, or None if column i is token i."""
        assert self.kernels.propose is not None
        truncation = compile_params(self.sampling, vocab_size=self.columns)[1].truncation
        truncation = jax.tree.map(jnp.asarray, truncation)
        return self.kernels.propose(logits_RN.astype(jnp.float32), truncation, u_RU, ids_N, size)


def draft_uniforms(ctx: DraftContext, *, depth, node) -> jax.Array:
    """Uniforms in [0, 1) of noise stream `draft`, float32[B, n, 4], for the tokens of n nodes, keyed by seed, sample
    and round of `ctx`. `depth` (1 for a child of the root) and index `node` are int32 and broadcast to [B, n]."""
    return token_uniforms(
        ctx.seed[:, None],
        sample=ctx.sample[:, None],
        stream=NoiseStream.DRAFT,
        position=ctx.length[:, None] - 1 + depth,
        round=ctx.round[:, None],
        node=node,
    )
