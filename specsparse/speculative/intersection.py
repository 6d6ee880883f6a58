"""Two vocabularies against each other: the tokens that both have, and what a draft model reads for the others.

Text tokens are the same where their bytes are (a byte-level "Ġthe", a SentencePiece "▁the"; a byte <0x0A>, a "Ċ").
Special tokens go with special tokens alone, by their role and then by their name; they are never text.
Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies" (arXiv:2502.05202), calls drafting from the tokens that both have token-level intersection (TLI).
"""

from dataclasses import dataclass

import numpy as np

from specsparse.engine.text.tokenizer import Tokenizer

ROLES = ("eos", "eot", "bos")
"""Special tokens that are known by what they do, the first ones first."""


@dataclass(frozen=True)
class SpecialPair:
    """A special token of the target and what the draft model reads in its place.

    Attributes:
        role: "eos", "eot", "bos" (where the draft's texts begin with one), "name" (both have one of that name) or
            "end" (another token that ends a generation, read as the draft's EOS).
        target, draft: ids.
        text: of the target's token.
        drafted: whether the draft's token is drafted as the target's; of several with one counterpart one is.
    """

    role: str
    target: int
    draft: int
    text: str
    drafted: bool


@dataclass(frozen=True, eq=False)
class Intersection:
    """How the draft's tokens and the target's go together.

    Invariants: `target_ids` is ascending; `target_ids` and `draft_ids` hold no id twice; the image of `target_ids[i]`
    is `draft_ids[i]` alone.

    Attributes:
        target_ids: int32[N], the target's ids of the tokens that both have, special ones included.
        draft_ids: int32[N], the draft's ids of the same tokens.
        starts: int32[V + 1]; `pieces[starts[t] : starts[t + 1]]` is the image of target token t, what the draft reads
            for it: its own token, the tokens of its bytes, or nothing for special tokens without a counterpart.
        pieces: int32[P], draft ids.
        specials: special tokens that have a counterpart.
        unread: special tokens of the target that have none.
        target_texts, draft_texts: text tokens of each vocabulary.
    """

    target_ids: np.ndarray
    draft_ids: np.ndarray
    starts: np.ndarray
    pieces: np.ndarray
    specials: tuple[SpecialPair, ...]
    unread: int
    target_texts: int
    draft_texts: int

    @property
    def texts(self) -> int:
        """Text tokens that both have."""
        return len(self.target_ids) - sum(pair.drafted for pair in self.specials)

    def image(self, token: int) -> list[int]:
        """What the draft reads for a target token."""
        return self.pieces[self.starts[token] : self.starts[token + 1]].tolist()

    def probs(self, q_D: np.ndarray) -> np.ndarray:
        """float[V]: a distribution over the draft's ids, restricted to the shared ones, normalised anew, over the
        target's ids.

        What `drafters.draft_model.shared_weights` makes the engine draw from; no mass where none is shared.
        """
        wide_V = np.zeros(len(self.starts) - 1, q_D.dtype)
        wide_V[self.target_ids] = q_D[self.draft_ids]
        return wide_V / max(wide_V.sum(), np.finfo(q_D.dtype).tiny)

    @property
    def pieces_per_token(self) -> float:
        """Mean length of an image."""
        return len(self.pieces) / max(len(self.starts) - 1, 1)

    def facts(self) -> dict[str, object]:
        """Overlap, unmapped shares and special ids, as plain values for records and `inspect`."""
        return {
            "shared": self.texts,
            "shared_of_target": self.texts / max(self.target_texts, 1),
            "shared_of_draft": self.texts / max(self.draft_texts, 1),
            "unmapped_target": self.target_texts - self.texts,
            "unmapped_draft": self.draft_texts - self.texts,
            "draft_tokens_per_target_token": self.pieces_per_token,
            "special": [
                {"role": p.role, "text": p.text, "target": p.target, "draft": p.draft, "drafted": p.drafted}
                for p in self.specials
            ],
            "special_unread": self.unread,
        }

    def sentence(self) -> str:
        """The same in a line."""
        roles = [f"{p.role} {p.target} as {p.draft}" for p in self.specials if p.role in ROLES]
        return (
            f"{self.texts} tokens shared, {self.texts / max(self.target_texts, 1):.0%} of the target's and "
            f"{self.texts / max(self.draft_texts, 1):.0%} of the draft's; special ids: {', '.join(roles) or 'none'}"
            + (f", {self.unread} without a counterpart" if self.unread else "")
        )


def intersect(target: Tokenizer, draft: Tokenizer, *, target_size: int, draft_size: int) -> Intersection:
    """The intersection of two vocabularies.

    Args:
        target, draft: their tokenizers.
        target_size, draft_size: ids that the models know; those beyond a tokenizer stand for nothing.
    """
    ours, theirs = _texts(target, target_size), _texts(draft, draft_size)
    pairs = _special_pairs(target, draft, target_size, draft_size)
    shared = {pair.target: pair.draft for pair in pairs if pair.drafted}
    shared |= {t: theirs[data] for data, t in ours.items() if data in theirs}
    image = {pair.target: [pair.draft] for pair in pairs} | {t: [d] for t, d in shared.items()}
    special, images = _specials(target), []
    for token in range(target_size):
        known = image.get(token)
        if known is None:
            data = b"" if token >= target.vocab_size or token in special else target.token_bytes(token)
            known = [theirs[data]] if data in theirs else [i for i in draft.encode_bytes(data) if i < draft_size]
        images.append(known)
    target_ids = np.array(sorted(shared), np.int32)
    paired = {pair.target for pair in pairs}
    return Intersection(
        target_ids=target_ids,
        draft_ids=np.array([shared[t] for t in target_ids.tolist()], np.int32),
        starts=np.cumsum([0, *map(len, images)], dtype=np.int32),
        pieces=np.array([d for known in images for d in known], np.int32),
        specials=tuple(pairs),
        unread=sum(t < target_size and t not in paired for t in special),
        target_texts=len(ours),
        draft_texts=len(theirs),
    )


def _specials(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that are no text, whatever type the file gives them."""
    named = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.eot_id, tokenizer.unknown_id} - {None}
    return tokenizer.special_ids | tokenizer.stop_ids | {i for i in named if i is not None}


def _texts(tokenizer: Tokenizer, size: int) -> dict[bytes, int]:
    """The text token of some bytes. Of several the first that is no byte token: the one that a text is encoded as."""
    special, single, found = _specials(tokenizer), tokenizer.byte_ids, dict[bytes, int]()
    for index in range(min(size, tokenizer.vocab_size)):
        data = b"" if index in special else tokenizer.token_bytes(index)
        if data and (data not in found or (found[data] in single and index not in single)):
            found[data] = index
    return found


def _special_pairs(target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int) -> list[SpecialPair]:
    """Counterparts by role, then by name; then the draft's EOS for what else ends a generation of the target."""
    wanted = [(role, getattr(target, f"{role}_id"), getattr(draft, f"{role}_id")) for role in ROLES]
    if target.add_bos and not draft.add_bos:  # the target's tokenizer put it there: the draft reads no BOS
        wanted = wanted[:-1]
    named = {draft.token_text(i): i for i in sorted(_specials(draft))}
    ours = sorted(_specials(target))
    wanted += [("name", t, named.get(target.token_text(t))) for t in ours]
    wanted += [("end", t, draft.eos_id) for t in sorted(target.stop_ids)]
    found: dict[int, SpecialPair] = {}
    used: set[int] = set()
    for role, t, d in wanted:
        if t is None or d is None or t in found or t >= target_size or d >= draft_size:
            continue
        found[t] = SpecialPair(role, t, d, target.token_text(t), drafted=d not in used)
        used.add(d)
    return list(found.values())
