"""Two vocabularies against each other: whether a draft model's fits the target's, and the tokens that both have.

Whether it fits is said by llama.cpp's rules: one family of tokenizer; the same BOS and
EOS added, with the same ids where they are used; sizes within 128; the same text for each id from 5 to the smaller
size. The ids below 5 are specials, which often differ in name only.

Two that do not fit still share tokens, by their bytes (a byte-level "Ġthe", a SentencePiece "▁the"; a byte <0x0A>, a
"Ċ"). Special tokens go with special tokens alone, by their role and then by their name; they are never text. Timor et
al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies"
(arXiv:2502.05202), call drafting from the tokens that both have token-level intersection (TLI).
"""

from dataclasses import dataclass

import numpy as np

from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError

FIRST_CHECKED = 5
"""Ids below it are special tokens, whose texts are not compared."""
MAX_SIZE_DIFFERENCE = 128
"""Padding rows that models of one family may differ by."""


@dataclass(frozen=True)
class VocabDifference:
    """Two values that differ. `special_tokens=target` settles the `special` ones: ids, and whether they are added."""

    what: str
    target: str
    draft: str
    special: bool = False


def compare(target: Tokenizer, draft: Tokenizer) -> list[VocabDifference]:
    """All differences that break a rule; empty if the two fit."""
    found = []

    def check(what, a, b, *, special=False):
        if a != b:
            found.append(VocabDifference(what, str(a), str(b), special))

    check("tokenizer", target.type, draft.type)
    check("adds BOS", target.add_bos, draft.add_bos, special=True)
    check("adds EOS", target.add_eos, draft.add_eos, special=True)
    if target.add_bos or draft.add_bos:
        check("BOS id", target.bos_id, draft.bos_id, special=True)
    if target.add_eos or draft.add_eos or None in (target.eos_id, draft.eos_id):
        check("EOS id", target.eos_id, draft.eos_id, special=True)
    if abs(target.vocab_size - draft.vocab_size) > MAX_SIZE_DIFFERENCE:
        found.append(VocabDifference("size", str(target.vocab_size), str(draft.vocab_size)))
    for token in range(FIRST_CHECKED, min(target.vocab_size, draft.vocab_size)):
        check(f"token {token}", repr(target.token_text(token)), repr(draft.token_text(token)))
    return found


def check_compatible(
    target: Tokenizer, draft: Tokenizer, *, special_tokens: str | None = None, where: str = "the draft model"
) -> list[VocabDifference]:
    """Refuses a draft model whose vocabulary is another one; the differences that were let through.

    Args:
        target, draft: their vocabularies.
        special_tokens: "target" goes on with the target's ids if only specials differ: the draft is fed those, and
            drafts are read as those.
        where: the draft model's file, for the message.
    """
    differences = compare(target, draft)
    real = [d for d in differences if not d.special]
    if not real and (special_tokens == "target" or not differences):
        return differences
    shown = "; ".join(f"{d.what} {d.target} against {d.draft}" for d in (real or differences)[:3])
    more = f"; {count - 3} more" if (count := len(real or differences)) > 3 else ""
    advice = "drafter.special_tokens=target goes on with the target's ids"
    if real:
        advice = (
            "take a draft model of the target's family, drafter.vocabulary=tli or slem, or a drafter without a model "
            "(drafter=prompt_lookup)"
        )
    raise UserError(f"{where} has another vocabulary than the target ({shown}{more}): {advice}")


ROLES = ("eos", "eot", "bos")
"""Special tokens that are known by what they do, the first ones first."""


@dataclass(frozen=True)
class SpecialPair:
    """A special token of the target and what the draft model reads in its place."""

    # "eos", "eot", "bos" (where the draft's texts begin with one), "name" (both have one of that name) or "end"
    # (another token that ends a generation, read as the draft's EOS)
    role: str
    target: int
    draft: int
    text: str  # of the target's token
    drafted: bool  # whether the draft's token is drafted as the target's; of several with one counterpart one is


@dataclass(frozen=True, eq=False)
class Intersection:
    """How the draft's tokens and the target's go together.

    Invariants: `target_ids` is ascending; `target_ids` and `draft_ids` hold no id twice; the image of `target_ids[i]`
    is `draft_ids[i]` alone.
    """

    target_ids: np.ndarray  # int32[N], the target's ids of the tokens that both have, special ones included
    draft_ids: np.ndarray  # int32[N], the draft's ids of the same tokens
    # int32[V + 1]; `pieces[starts[t] : starts[t + 1]]` is the image of target token t, what the draft reads for it: its
    # own token, the tokens of its bytes, or nothing for special tokens without a counterpart
    starts: np.ndarray
    pieces: np.ndarray  # int32[P], draft ids
    specials: tuple[SpecialPair, ...]  # special tokens that have a counterpart
    unread: int  # special tokens of the target that have none
    # target_texts, draft_texts: text tokens of each vocabulary
    target_texts: int
    draft_texts: int

    @property
    def texts(self) -> int:
        return len(self.target_ids) - sum(pair.drafted for pair in self.specials)

    def image(self, token: int) -> list[int]:
        """The draft's ids that stand for a target token."""
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
