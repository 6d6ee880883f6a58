"""One small tree over all that is known cheaply: a head, lookup, what last followed a token, a table.

Each level of the tree holds what the sources propose behind the likeliest node of the level above, and the likeliest
nodes of all are verified. The worth of a proposal is learnt while the text is written, from rounds that are over.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine import cache as kv
from specsparse.engine.model import Model
from specsparse.engine.pytree import AnyArray, Pytree
from specsparse.errors import UserError
from specsparse.speculative.base import (
    GAMMA_NAMES,
    MAX_NODES,
    PAD,
    ROOT,
    SHORT_GAMMA,
    Draft,
    DraftContext,
    Drafted,
    Drafter,
    DraftKind,
    Feedback,
)
from specsparse.speculative.drafters.heads.feature_source import pick
from specsparse.speculative.drafters.heads.head import Head, shipped_for
from specsparse.speculative.drafters.lookup import PromptLookup
from specsparse.speculative.drafters.model_drafter import ModelDrafter
from specsparse.speculative.drafters.recycle import shown_successors
from specsparse.speculative.drafters.sources import DraftSampling, DraftWeights, FedRows, KeptRows, Source
from specsparse.speculative.drafters.spec import DrafterSpec, HeadDrafting, Load, LoadedDrafter, PolicyOption, Vocab
from specsparse.speculative.policies.base import Fixed, Policy
from specsparse.support.options import Also, Inline, Range, Size

HEAD_RANKS = 3
"""Tokens that the head proposes behind a node; every other source proposes one."""
LOOKUP = PromptLookup(ngram_max=6, ngram_min=2)
_CLASSES = 6  # of the head's probabilities, and of the length of lookup's match, which its copied tokens make longer
_SURE = np.array([0.1, 0.25, 0.45, 0.65, 0.85], np.float32)  # limits of the classes of the head's probabilities
_LEAST = 0.04  # chance of a node below which no row is cheap enough to verify what follows it
_HEAD_GAIN = 0.5  # tokens expected of one more level by the head, where lookup has nothing
_WEIGHT = 8.0  # proposals that a prior is worth
# The chance of a proposal if nobody else makes it, a later source does, or lookup does too; as SmolLM2-135M and its
# head had it on sixteen questions of Spec-Bench's conversations.
_HEAD_FIRST = ((0.07, 0.2, 0.8), (0.14, 0.35, 0.8), (0.32, 0.45, 0.8), (0.47, 0.56, 0.9), (0.7, 0.7, 0.95), (0.93,) * 3)
_HEAD_LATER = ((0.03, 0.12, 0.6), (0.11, 0.27, 0.75), (0.15, 0.45, 0.75), *((0.3, 0.5, 0.75),) * 3)
_COPIED = tuple((a, b, b) for a, b in ((0.12, 0.48), (0.3, 0.6), (0.6, 0.65), (0.6, 0.75), (0.85, 0.85), (0.85, 0.9)))
# The last successor, beside the head's tokens and without them; four-grams and trigrams.
_TABLES = tuple((a,) * 3 for a in (0.13, 0.3, 0.3, 0.2))
_BEHIND_ROOT = np.array([*_HEAD_FIRST, *_HEAD_LATER, *_COPIED, *_TABLES], np.float32)
PRIORS = np.stack([_BEHIND_ROOT, np.float32(0.9) * _BEHIND_ROOT], axis=2).reshape(-1)
"""float32[cells]: these chances, in the order of `_cell`."""


class NGramTable(NamedTuple):
    """The token that followed three tokens, or two, most often in a text."""

    keys: AnyArray  # uint32[S], hashes of the tokens before; S is a power of two and a hash stands at its remainder
    tokens: AnyArray  # int32[S], the token after them

    @classmethod
    def from_ids(cls, ids: np.ndarray) -> "NGramTable":
        """The table of a text's ids, int32[n]. Tokens that followed only once are left out; of two that meet the more
        frequent stays."""
        pairs = []
        for n in (2, 3):
            key_m = _hashed([ids[i : len(ids) - n + i] for i in range(n)])
            pairs.append(key_m.astype(np.uint64) << 32 | ids[n:].astype(np.uint64))
        found, times = np.unique(np.concatenate(pairs), return_counts=True)
        kept = np.flatnonzero(times > 1)
        kept = kept[np.argsort(times[kept], kind="stable")]
        size = 2 ** int(2 * len(kept) + 1).bit_length()
        keys, tokens = np.zeros(size, np.uint32), np.full(size, PAD, np.int32)
        key_m = (found[kept] >> 32).astype(np.uint32)
        keys[key_m % size], tokens[key_m % size] = key_m, (found[kept] & 0xFFFFFFFF).astype(np.int32)
        return cls(keys, tokens)

    def after(self, tail_B3: jax.Array) -> tuple[jax.Array, jax.Array]:
        """int32[B]: the token behind the last three tokens, or else the last two, `PAD` if both are unknown; bool[B]:
        whether three were known."""
        found = []
        for n in (3, 2):
            key_B = _hashed([tail_B3[:, i] for i in range(3 - n, 3)])
            at_B = key_B % jnp.uint32(len(self.keys))
            found.append(jnp.where(self.keys[at_B] == key_B, self.tokens[at_B], PAD))
        return jnp.where(found[0] >= 0, found[0], found[1]), found[0] >= 0


def _hashed(tokens: list) -> AnyArray:
    """uint32 of tokens in order, of numpy or jax."""
    key = tokens[0].astype(np.uint32) * np.uint32(0) + np.uint32(len(tokens))
    for token in tokens:
        key = (key ^ token.astype(np.uint32)) * np.uint32(0x9E3779B1)
        key = key ^ (key >> np.uint32(15))
    return key


class MixedWeights(NamedTuple):
    """The head's weights, empty without one, and the table, or None."""

    head: DraftWeights = DraftWeights()
    table: NGramTable | None = None


class Proposals(NamedTuple):
    """What all sources propose on the levels of a draft.

    D counts levels and M the proposals of a level; c below counts cells.
    """

    tokens: jax.Array  # int32[B, D, M], behind the likeliest node of the level above
    # int32[B, D, M], what each is known by; `PAD` for none, and for what an earlier source proposes too
    cells: jax.Array
    reach: jax.Array  # float32[B, D, M], the chance that each is accepted, -1 where the cell is `PAD`
    spine: jax.Array  # int32[B, D], the likeliest of each level


class MixedState(NamedTuple):
    successors: jax.Array  # int32[B, V], the token that last followed each one in the text, `PAD` where none did
    head: Pytree  # of the head's source, or None
    # hits, tries: float32[B, cells], proposals of finished rounds, and those that were the target's token
    hits: jax.Array
    tries: jax.Array
    proposed: Proposals  # of the last draft


class _Level(NamedTuple):
    """A draft in the making: the head's cache and its logits float32[B, N] behind the spine; of the spine's last node
    the chance, float32[B], and int32[B, 3] the tokens up to it; bool[B] whether the head has read it, whether lookup
    goes on there, and whether another level follows; int32[B] levels that the head has scored."""

    cache: Pytree
    proposed: Proposals
    reach: jax.Array
    tail: jax.Array
    heads: jax.Array
    copies: jax.Array
    live: jax.Array
    scored: jax.Array


@dataclass(frozen=True)
class MixedTree(Drafter):
    """The drafter of `Mixed`.

    Tokens are chosen, not drawn, and their number depends on the text before the draft alone: one-hot drafts, which
    `tree_match` and `tree_delta` verify without loss at any temperature.
    """

    max_nodes: int = SHORT_GAMMA
    source: Source | None = None  # of the head, or None
    sampling: DraftSampling | None = None  # the head's
    levels: int = 0  # that the head scores at most

    kind = DraftKind.ONE_HOT
    tree = True
    asks_worth = True

    @property
    def wants_hidden(self) -> bool | tuple[int, ...]:
        return False if self.source is None else self.source.wants_hidden

    def with_room(self, nodes: int) -> Self:
        return replace(self, max_nodes=nodes)

    def init(self, params: MixedWeights, ctx: DraftContext, *, hidden: jax.Array | None = None) -> MixedState:
        batch = ctx.length.shape[0]
        head = None if self.source is None else self.source.init(params.head, ctx, hidden)
        none_Bc = jnp.zeros((batch, len(PRIORS)), jnp.float32)
        successors = shown_successors(ctx, ranks=1)[:, :, 0]
        return MixedState(successors, head, none_Bc, none_Bc, self._nothing(batch))

    def _nothing(self, batch: int) -> Proposals:
        none_BDM = jnp.full((batch, self.max_nodes, HEAD_RANKS + 3), PAD, jnp.int32)
        return Proposals(none_BDM, none_BDM, none_BDM.astype(jnp.float32), jnp.zeros(none_BDM.shape[:2], jnp.int32))

    def draft(self, params: MixedWeights, state: MixedState, ctx: DraftContext) -> Drafted:
        """The likeliest nodes of all levels; consumes no noise."""
        batch, K = ctx.length.shape[0], self.max_nodes
        budget_B = jnp.clip(ctx.budget, 0, K)
        chance_Bc = (state.hits + _WEIGHT * PRIORS[None]) / (state.tries + _WEIGHT)
        start_B, match_B = LOOKUP.find(ctx.tokens, ctx.length)
        last_B3 = ctx.length[:, None] + jnp.arange(-3, 0, dtype=jnp.int32)[None]
        tail_B3 = jnp.where(last_B3 >= 0, pick(ctx.tokens, last_B3), PAD)
        room_B = jnp.zeros_like(budget_B)
        if self.source is not None:
            room_B = jnp.minimum(self.source.room(params.head, state.head, ctx), self.levels)

        def add(d, level: _Level, score) -> _Level:
            """One level; `score` gives the head's logits behind the spine, and its cache."""
            # Every source's tokens in order of precedence, and the class of each.
            tokens, classes = [], []
            copied_B1 = pick(ctx.tokens, (start_B + d)[:, None])
            copies_B = level.copies & (start_B + d < ctx.length)
            lookup_B = 2 * _CLASSES + jnp.clip(match_B + d - 2, 0, _CLASSES - 1)
            heads_B, cache = jnp.zeros_like(level.heads), level.cache
            if self.source is not None:
                cell_B1 = _cell(lookup_B, 0, d)[:, None]
                surely_B = jnp.where(copies_B, jnp.take_along_axis(chance_Bc, cell_B1, axis=1)[:, 0], 0)
                gain_B = level.reach * (1 - surely_B) * _HEAD_GAIN
                heads_B = level.heads & level.live & (d < room_B) & ctx.deeper(gain_B)
                logits_BN, cache = score(level, heads_B)
                ids_Br, class_Br = jax.lax.cond(heads_B.any(), self._read, self._unread, params.head, logits_BN)
                tokens.append(jnp.where(heads_B[:, None], ids_Br, PAD))
                classes.append(class_Br)
            tokens.append(jnp.where(copies_B[:, None], copied_B1, PAD))
            classes.append(lookup_B[:, None])
            last_B = level.tail[:, 2]
            tokens.append(state.successors[jnp.arange(batch), jnp.maximum(last_B, 0)][:, None])
            classes.append(3 * _CLASSES + jnp.where(heads_B, 0, 1)[:, None])
            if params.table is not None:
                token_B, three_B = params.table.after(level.tail)
                tokens.append(token_B[:, None])
                classes.append(3 * _CLASSES + 2 + jnp.where(three_B, 0, 1)[:, None])
            tokens_BM, class_BM = (jnp.concatenate(x, axis=1) for x in (tokens, classes))
            # A token that several propose is one node, the first one's.
            same_BMM = (tokens_BM[:, :, None] == tokens_BM[:, None]) & (tokens_BM >= 0)[:, :, None]
            after_MM = np.triu(np.ones(same_BMM.shape[1:], bool), 1)
            by_lookup_M = np.arange(tokens_BM.shape[1]) == (0 if self.source is None else HEAD_RANKS)
            again_BMM = same_BMM & after_MM[None]
            once_BM = again_BMM.any(axis=2).astype(jnp.int32)
            agreed_BM = jnp.where((again_BMM & by_lookup_M[None, None]).any(axis=2), 2, once_BM)
            new_BM = (tokens_BM >= 0) & ~again_BMM.any(axis=1)
            cells_BM = _cell(class_BM, agreed_BM, d)
            reach_BM = level.reach[:, None] * jnp.minimum(jnp.take_along_axis(chance_Bc, cells_BM, axis=1), 0.98)
            new_BM = new_BM & level.live[:, None]
            reach_BM = jnp.where(new_BM, reach_BM, -1)
            best_B1 = jnp.argmax(reach_BM, axis=1, keepdims=True).astype(jnp.int32)
            reach_B, token_B = (jnp.take_along_axis(x, best_B1, axis=1)[:, 0] for x in (reach_BM, tokens_BM))

            def put(old, new_BM):
                new_BM = jnp.pad(new_BM, ((0, 0), (0, old.shape[2] - new_BM.shape[1])), constant_values=PAD)
                return jax.lax.dynamic_update_slice_in_dim(old, new_BM[:, None], d, axis=1)

            old = level.proposed
            proposed = Proposals(
                put(old.tokens, tokens_BM),
                put(old.cells, jnp.where(new_BM, cells_BM, PAD)),
                put(old.reach, reach_BM),
                jax.lax.dynamic_update_slice_in_dim(old.spine, best_B1, d, axis=1),
            )
            tail_B3 = jnp.concatenate([level.tail[:, 1:], token_B[:, None]], axis=1)
            copies_B = copies_B & (token_B == copied_B1[:, 0])
            live_B = level.live & (reach_B > _LEAST) & (d + 1 < budget_B)
            scored_B = level.scored + heads_B.astype(jnp.int32)
            return _Level(cache, proposed, reach_B, tail_B3, heads_B, copies_B, live_B, scored_B)

        def begin(level: _Level, heads_B: jax.Array):
            assert self.source is not None
            cache, logits_BN = self.source.open(params.head, state.head, ctx._replace(budget=budget_B), heads_B)
            return logits_BN, cache

        def feed(level: _Level, heads_B: jax.Array):
            assert self.source is not None
            n_valid_B = heads_B.astype(jnp.int32)
            rows = FedRows(level.tail[:, 2:], n_valid_B)
            logits_B1N, cache = self.source.feed(params.head, ctx, level.cache, rows)
            return logits_B1N[:, 0], kv.commit(cache, n_valid_B)

        live_B = budget_B > 0
        ones_B = jnp.ones((batch,), jnp.float32)
        none_B = jnp.zeros_like(budget_B)
        level = _Level(state.head, self._nothing(batch), ones_B, tail_B3, live_B, match_B > 0, live_B, none_B)
        level = add(jnp.int32(0), level, begin)
        _, level = jax.lax.while_loop(
            lambda c: c[1].live.any(), lambda c: (c[0] + 1, add(c[0], c[1], feed)), (jnp.int32(1), level)
        )
        head, cache = state.head, ctx.cache
        if self.source is not None:
            head, cache = self.source.close(params.head, state.head, level.cache, ctx)
        draft = self._best(level.proposed, budget_B, ctx)
        state = state._replace(head=head, proposed=level.proposed)
        return Drafted(draft, state, cache, passes=level.scored)

    def _read(self, weights: DraftWeights, logits_BN: jax.Array) -> tuple[jax.Array, jax.Array]:
        """int32[B, HEAD_RANKS]: the head's likeliest tokens, and their classes, by rank and probability."""
        assert self.source is not None and self.sampling is not None
        column_Br = self.sampling.ranked(logits_BN, HEAD_RANKS)
        # By the kernels: sums over the columns as XLA's reductions wait for its own threads, twice a level.
        p_Br = jnp.take_along_axis(self.sampling.confidence(logits_BN), column_Br, axis=1)
        sure_Br = jnp.sum(p_Br[:, :, None] >= _SURE[None, None], axis=2, dtype=jnp.int32)
        later_r = np.where(np.arange(HEAD_RANKS) > 0, _CLASSES, 0).astype(np.int32)
        return self.source.vocab.token_ids(weights, column_Br), sure_Br + later_r[None]

    def _unread(self, weights: DraftWeights, logits_BN: jax.Array) -> tuple[jax.Array, jax.Array]:
        none_Br = jnp.zeros((logits_BN.shape[0], HEAD_RANKS), jnp.int32)
        return none_Br, none_Br

    def _best(self, found: Proposals, budget_B: jax.Array, ctx: DraftContext) -> Draft:
        """The likeliest proposals of all levels, as many as pay. Chances fall along a path, so each has its parent."""
        batch, D, M = found.tokens.shape
        reach_BK, at_BK = jax.lax.top_k(found.reach.reshape(batch, D * M), self.max_nodes)
        count_B = jnp.sum(reach_BK > 0, axis=1, dtype=jnp.int32)
        count_B = jnp.minimum(jnp.minimum(count_B, budget_B), ctx.worth(jnp.maximum(reach_BK, 0)))
        held_BK = jnp.arange(self.max_nodes, dtype=jnp.int32)[None] < count_B[:, None]
        # The spine stands first: the rows of its nodes, which are mostly those that are kept, then need no moving.
        spine_BD = found.spine + M * jnp.arange(D, dtype=jnp.int32)[None]
        along_BK = jnp.take_along_axis(spine_BD, at_BK // M, axis=1) == at_BK
        order_BK = jnp.argsort(~(along_BK & held_BK), axis=1, stable=True)
        at_BK = jnp.take_along_axis(at_BK, order_BK, axis=1)
        tokens_BK = jnp.take_along_axis(found.tokens.reshape(batch, D * M), at_BK, axis=1)
        parents_BK = at_BK // M - 1  # the node of a level's spine has the level's number
        return Draft(jnp.where(held_BK, tokens_BK, 0), jnp.where(held_BK, parents_BK, ROOT), count_B)

    def commit(self, params: MixedWeights, state: MixedState, ctx: DraftContext, feedback: Feedback) -> MixedState:
        """Learns from every proposal behind which the target's token is now known, whether it was verified or not."""
        said, found, D = feedback.verdict, state.proposed, self.max_nodes
        token_BD = said.tokens[:, :D]
        spine_BD = jnp.take_along_axis(found.tokens, found.spine[:, :, None], axis=2)[:, :, 0]
        along_BD = jnp.cumprod((spine_BD == token_BD).astype(jnp.int32), axis=1)
        along_BD = jnp.pad(along_BD[:, :-1], ((0, 0), (1, 0)), constant_values=1) > 0
        known_BD = along_BD & (jnp.arange(D, dtype=jnp.int32)[None] < said.count[:, None])
        right_BD1M = (found.tokens == token_BD[:, :, None])[:, :, None]
        of_BDcM = (found.cells[:, :, None] == np.arange(len(PRIORS))[None, None, :, None]) & known_BD[:, :, None, None]
        hits_Bc, tries_Bc = (jnp.sum(x, axis=(1, 3), dtype=jnp.float32) for x in (of_BDcM & right_BD1M, of_BDcM))
        head = state.head
        if self.source is not None:  # it reads the target's rows: which of its own would be right does not matter
            head = self.source.keep(params.head, head, ctx, feedback, KeptRows(said.accepted))
        # What a refused row says would cost an argmax over the vocabulary, and changes little beside a head.
        new_n = jnp.arange(D + 1, dtype=jnp.int32)[None]
        at_Bn = ctx.length[:, None] - said.count[:, None] + new_n
        before_Bn = jnp.where(new_n < said.count[:, None], pick(ctx.tokens, at_Bn - 1), state.successors.shape[1])
        # Of equal tokens the last one counts: a scatter promises no order.
        again_Bnn = (before_Bn[:, :, None] == before_Bn[:, None]) & (new_n[:, :, None] < new_n[:, None])
        before_Bn = jnp.where(again_Bnn.any(axis=2), state.successors.shape[1], before_Bn)
        place = jnp.arange(len(before_Bn))[:, None], before_Bn
        return state._replace(
            successors=state.successors.at[place].set(pick(ctx.tokens, at_Bn), mode="drop"),
            head=head,
            hits=state.hits + hits_Bc,
            tries=state.tries + tries_Bc,
        )


def _cell(kind: jax.Array, agreed: jax.Array | int, d: jax.Array) -> jax.Array:
    """Index of what is known of a proposal: its class, whether no later source makes it too (0), one does (1) or lookup
    (2), and whether it follows the root."""
    return (kind * 3 + agreed) * 2 + jnp.minimum(d, 1)


@dataclass(frozen=True)
class MixedDrafting:
    """How the tree is drafted.

    Attributes:
        max_nodes: nodes drafted at most; how many of them pay is for the policy to say.
        draft_vocab: the head scores these ids only; by default those of its file.
        policy: a `Policy`, instead of `max_nodes`.
    """

    max_nodes: Annotated[int, Range(1, MAX_NODES), Also(*GAMMA_NAMES)] | None = None
    draft_vocab: Vocab = None
    policy: PolicyOption = None


@dataclass(frozen=True)
class Mixed(DrafterSpec):
    """One small tree over a head, lookup, what last followed each token, and the n-grams of a text.

    Attributes:
        head: its file, or a name; by default the one that was trained for the target, if there is one.
        levels: of the tree that the head scores at most; 0 for no head.
        table: a text whose tri- and four-grams are proposed too, such as one that the target wrote.
    """

    head: str | Path | None = None
    levels: Size = 3
    table: str | Path | None = None
    # Fewer options than a `Drafting`.
    drafting: Annotated[MixedDrafting, Inline()] = field(  # pyrefly: ignore[bad-override]
        default=MixedDrafting(), kw_only=True
    )

    kind = DraftKind.ONE_HOT
    tree = True
    can_draw = False

    @property
    def max_nodes(self) -> int:
        how = self.drafting
        return how.policy.gamma if how.policy is not None else how.max_nodes or SHORT_GAMMA

    @property
    def length_policy(self) -> Policy:
        policy = self.drafting.policy
        return Fixed(self.max_nodes) if policy is None else policy.over_tree(policy.gamma)

    @property
    def any_length(self) -> bool:
        return self.drafting.max_nodes is self.drafting.policy is None

    def with_policy(self, policy: Policy) -> Self:
        return replace(self, drafting=replace(self.drafting, policy=policy, max_nodes=None))

    def drawing_at(self, temperature: float) -> Self:
        return self

    def build(self, target: Model, load: Load) -> LoadedDrafter:
        tree, head, table, reads = MixedTree(self.max_nodes), lambda capacity: DraftWeights(), None, (0, 0)
        if self.table is not None:
            try:
                text = Path(self.table).expanduser().read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise UserError(f"drafter.table={self.table} must be a file of text: {error}") from None
            ids = target.tokenizer.encode(text, parse_special=True)
            table = NGramTable.from_ids(np.asarray(ids, np.int32))
            table = jax.tree.map(jnp.asarray, table)
        if self.levels and (self.head is not None or shipped_for(target.params.output_norm) is not None):
            style = HeadDrafting(temperature=0.0, draft_vocab=self.drafting.draft_vocab)
            loaded = Head(self.head, drafting=style).build(target, load)
            chain, reads = loaded.drafter, (loaded.bytes_per_token, loaded.keys_per_token)
            assert isinstance(chain, ModelDrafter) and loaded.weights is not None
            head = loaded.weights
            tree = replace(tree, source=chain.source, sampling=chain.sampling, levels=self.levels)
        return LoadedDrafter(tree, lambda capacity: MixedWeights(head(capacity), table), *reads)
