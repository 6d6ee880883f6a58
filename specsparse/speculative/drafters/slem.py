"""String-level exact match (SLEM): a draft model writes text, which the target's tokenizer cuts into tokens anew.

Timor et al. 2025 (arXiv:2502.05202). Vocabularies need not overlap: the draft reads the text in tokens of its own, and
what it writes is verified as any draft without distributions. The host makes tokens of text, so `runtime.loops`
runs it.
"""

import functools
import itertools
import re
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.cache import KVCache
from specsparse.engine.pytree import AnyArray
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.speculative.base import DraftContext, Drafted, Drafter, DraftKind
from specsparse.speculative.drafters.model_drafter import ModelDrafter
from specsparse.speculative.drafters.sources import DraftWeights
from specsparse.speculative.vocab import Intersection

TAIL = 8
"""Committed tokens that a draft's text is cut together with, so that it begins where a token does."""
_WORD = re.compile(rb"(?<=[A-Za-z])(?= [A-Za-z])")
"""Where every tokenizer begins a token: before a word and its space that follow another word."""


class Translator:
    """Translates ids of one model to those of another by way of text. Compared by identity.

    Args:
        target, draft: the tokenizers.
        common: pairs of special tokens; the others end a draft and are not read.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer, common: Intersection):
        self._target, self._draft = target, draft
        self._read = {pair.target: pair.draft for pair in common.specials}
        self._written = {pair.draft: pair.target for pair in common.specials if pair.drafted}
        self._special = target.special_ids | target.stop_ids | self._read.keys()
        self._draft_special = draft.special_ids | draft.stop_ids | self._written.keys()
        # Words are cut into tokens one by one and remembered, so that a round costs what is new.
        self._encode = functools.lru_cache(1 << 14)(draft.encode_bytes)
        self._bytes = functools.lru_cache(None)(target.token_bytes)

    def read(self, ids: list[int], *, behind: bool = False) -> list[int]:
        """The draft's ids for ids of the target, whose text the draft's tokenizer cuts.

        Args:
            ids: a text or its end.
            behind: whether other ids, up to a `boundary`, come before: then there is no BOS.
        """
        out: list[int] = []
        inside = behind
        for part in self._parts(ids):
            if isinstance(part, int):
                out.append(part)
            else:
                text = part if inside else _begun(part, self._target, self._draft)
                for word in _WORD.split(text):
                    out += self._encode(word)
            inside = False
        bos = self._draft.bos_id if self._draft.add_bos and not behind else None
        return out if bos is None or out[:1] == [bos] else [bos, *out]

    def boundary(self, ids: list[int]) -> int:
        """The last place in `ids` where both tokenizers begin a token, whatever follows, or 0.

        There a word and its space follow another word, so that the text before is read once and for all.
        """
        text = [b"" if self._is_special(index) else self._bytes(index) for index in ids]
        for i in range(len(ids) - 1, 0, -1):
            behind = text[i] if len(text[i]) > 1 or not text[i] else text[i] + b"".join(text[i + 1 : i + 2])
            if text[i - 1] and _WORD.search(text[i - 1][-1:] + behind[:2]):
                return i
        return 0

    def write(self, ids: list[int], drafted: list[int]) -> list[int]:
        """The target's ids for a draft behind its `ids`, up to a special token that the target lacks."""
        special, size = self._draft_special, self._draft.vocab_size
        end = next((i for i, d in enumerate(drafted) if d in special or d >= size), len(drafted))
        data = b"".join(self._draft.token_bytes(d) for d in drafted[:end])
        last = [self._written[d] for d in drafted[end : end + 1] if d in self._written]
        tail = list(itertools.takewhile(lambda index: not self._is_special(index), reversed(ids[-TAIL:])))[::-1]
        if not tail:
            data = _begun(data, self._draft, self._target)
        before = b"".join(map(self._bytes, tail))
        together = self._target.encode_bytes(before + data)
        if together[: len(tail)] == tail:
            return together[len(tail) :] + last
        return self._target.encode_bytes(data) + last

    def _parts(self, ids: list[int]) -> list[int | bytes]:
        """Texts, and between them the draft's special ids."""
        parts: list[int | bytes] = []
        for special, run in itertools.groupby(ids, self._is_special):
            if special:
                parts += [self._read[index] for index in run if index in self._read]
            else:
                parts.append(b"".join(map(self._bytes, run)))
        return [part for part in parts if part != b""]

    def _is_special(self, index: int) -> bool:
        """Whether a token of the target has no text: a model may have more ids than its tokenizer."""
        return index in self._special or index >= self._target.vocab_size


def _begun(text: bytes, written_by: Tokenizer, read_by: Tokenizer) -> bytes:
    """The beginning of a text, with the leading space that the reading tokenizer adds and not the other's."""
    text = text.removeprefix(b" ") if written_by.add_space_prefix else text
    return b" " + text if read_by.add_space_prefix and text else text


class OwnText(NamedTuple):
    """The committed text in the draft model's ids."""

    ids: AnyArray  # int32[B, S], anything beyond `length`
    length: AnyArray  # int32[B], may be more than there is room for: nothing is drafted then
    kept: AnyArray  # int32[B], ids at the front that the draft's cache holds
    read: AnyArray  # int32[B], tokens of the target up to a `Translator.boundary`: they need not be read again
    closed: AnyArray  # int32[B], ids that they are, more than there is room for as well


class StringState(NamedTuple):
    cache: KVCache  # the draft model's
    text: OwnText  # the text of the last draft, with the draft behind it among its `ids`
    held: jax.Array  # int32[B], how many of these ids the cache holds
    budget: jax.Array  # int32[B], tokens of the target that the last draft may have


@dataclass(frozen=True)
class StringDrafter(Drafter):
    """Chains of the target's tokens, made of the text that a draft model writes. They are one-hot drafts."""

    # drafts in the draft model's own tokens, by argmax or drawn: either way without the target's noise
    writer: ModelDrafter
    translator: Translator  # between the two
    expansion: float  # slots of the draft's cache for each of the target's

    kind = DraftKind.ONE_HOT
    asks_stop = True
    reads_text = True
    has_sources = True  # the budget is in tokens of the target, the policy's in those of the writer
    max_nodes = property(attrgetter("writer.max_nodes"))

    def with_room(self, nodes: int) -> Self:
        return replace(self, writer=self.writer.with_room(nodes))

    def slots(self, tokens: int) -> int:
        """S, draft tokens beside a target's cache of `tokens` slots."""
        return self.writer.source.capacity(int(np.ceil(tokens * self.expansion)))

    def read_text(self, state: StringState | None, tokens_BC: np.ndarray, length_B: np.ndarray) -> OwnText:
        """Reads each text behind its last `Translator.boundary`, and counts the ids that the cache still holds."""
        batch, room = tokens_BC.shape[0], self.slots(tokens_BC.shape[1])
        before, held_B = (
            (None, None) if state is None else (OwnText(*map(np.asarray, state.text)), np.asarray(state.held))
        )
        text = OwnText(np.zeros((batch, room), np.int32), *np.zeros((4, batch), np.int32))
        for b in range(batch):
            read, closed = (0, 0) if before is None else (int(before.read[b]), int(before.closed[b]))
            if before is not None:
                text.ids[b, :closed] = before.ids[b, :closed]
            new = tokens_BC[b, read : length_B[b]].tolist()
            end = self.translator.boundary(new)
            done = self.translator.read(new[:end], behind=read > 0) if end else []
            rest = self.translator.read(new[end:], behind=read + end > 0)
            text.length[b] = closed + len(done) + len(rest)
            text.ids[b, closed : text.length[b]] = (done + rest)[: max(room - closed, 0)]
            text.read[b], text.closed[b] = read + end, closed + len(done)
            if before is not None and held_B is not None:
                most = min(int(text.length[b]), room, int(held_B[b]))
                same = text.ids[b, :most] == before.ids[b, :most]
                text.kept[b] = most if same.all() else int(same.argmin())
        return text

    def init(self, params: DraftWeights, ctx: DraftContext, *, hidden: jax.Array | None = None) -> StringState:
        cache = self.writer.init(params, _own(ctx))
        return StringState(cache, ctx.text, cache.length, jnp.zeros_like(ctx.length))

    def draft(self, params: DraftWeights, state: StringState, ctx: DraftContext) -> Drafted:
        """A chain of the draft model's own tokens, as many as are asked for of the target's."""
        text: OwnText = ctx.text
        own = _own(ctx).from_source(0)
        drafted = self.writer.draft(params, state.cache._replace(length=text.kept), own)
        draft, cache = drafted.draft._replace(count=own.keep(drafted.draft.count)), drafted.state
        # Rows of the drafted tokens stay behind the text: if the next text goes on like that, they are kept.
        held_B = cache.length + jnp.maximum(draft.count - 1, 0)
        node_K = jnp.arange(self.max_nodes, dtype=jnp.int32)[None]
        at_BK = jnp.where(node_K < draft.count[:, None], text.length[:, None] + node_K, text.ids.shape[1])
        row_B1 = jnp.arange(at_BK.shape[0], dtype=jnp.int32)[:, None]
        ids_BS = text.ids.at[row_B1, at_BK].set(draft.tokens, mode="drop")
        held_B = jnp.where(cache.length == text.length, held_B, cache.length)
        state = StringState(cache, text._replace(ids=ids_BS), held_B, ctx.budget)
        return drafted._replace(draft=draft._replace(q=None), state=state)

    def write_text(self, drafted: Drafted, tokens_BC: np.ndarray, length_B: np.ndarray) -> Drafted:
        """Cuts the text of each draft into the target's tokens."""
        draft, budget_B = drafted.draft, np.asarray(drafted.state.budget)
        own_BK, count_B = np.asarray(draft.tokens), np.asarray(draft.count)
        tokens_BK, found_B = np.zeros_like(own_BK), np.zeros_like(count_B)
        for b in np.flatnonzero(count_B):
            ids = tokens_BC[b, : length_B[b]][-TAIL:].tolist()
            found = self.translator.write(ids, own_BK[b, : count_B[b]].tolist())[: int(budget_B[b])]
            tokens_BK[b, : len(found)], found_B[b] = found, len(found)
        return drafted._replace(draft=draft._replace(tokens=tokens_BK, count=found_B))


def _own(ctx: DraftContext) -> DraftContext:
    return ctx._replace(tokens=ctx.text.ids, length=ctx.text.length, text=None)
