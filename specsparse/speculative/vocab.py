"""Whether a draft model's vocabulary fits the target's: llama.cpp's rules, every difference in one table.

The rules: one family of tokenizer; the same BOS and EOS added, with the same ids where they are used; sizes within 128;
the same text for each id from 5 to the smaller size. The ids below 5 are specials, which often differ in name only.
"""

import dataclasses
from typing import Protocol

from specsparse.errors import UserError

FIRST_CHECKED = 5
"""Ids below it are special tokens, whose texts are not compared."""
MAX_SIZE_DIFFERENCE = 128
"""Padding rows that models of one family may differ by."""
_SHOWN = 8


class Vocabulary(Protocol):
    """What is compared: `engine.text.tokenizer.Tokenizer` has it."""

    type: str
    add_bos: bool
    add_eos: bool

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def bos_id(self) -> int | None:
        """BOS."""

    @property
    def eos_id(self) -> int | None:
        """EOS."""

    def token_text(self, index: int) -> str:
        """Text of an id."""


@dataclasses.dataclass(frozen=True)
class VocabDifference:
    """One line of the table.

    Attributes:
        what: what was compared.
        target, draft: the two values.
        special: whether `special_tokens=target` settles it: special ids, and whether they are added.
    """

    what: str
    target: str
    draft: str
    special: bool = False


def compare(target: Vocabulary, draft: Vocabulary) -> list[VocabDifference]:
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


def table(differences: list[VocabDifference]) -> str:
    """The differences as aligned text, one a line, long lists cut."""
    rows = [("", "target", "draft"), *((d.what, d.target, d.draft) for d in differences[:_SHOWN])]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    more = len(differences) - _SHOWN
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


def check_compatible(
    target: Vocabulary, draft: Vocabulary, *, special_tokens: str | None = None, where: str = "the draft model"
) -> list[VocabDifference]:
    """Refuses a draft model whose vocabulary is another one.

    Args:
        target: the target's vocabulary.
        draft: the draft's.
        special_tokens: "target" goes on with the target's ids where only specials differ: the draft is fed those, and
            drafts are read as those.
        where: the draft model's file, for the message.

    Returns:
        The differences that were let through.

    Raises:
        UserError: what differs, and what to do.
    """
    if special_tokens not in (None, "target"):
        raise UserError(f"drafter.special_tokens={special_tokens}: must be target, or left out")
    differences = compare(target, draft)
    real = [d for d in differences if not d.special]
    if not real and (special_tokens == "target" or not differences):
        return differences
    shown = "; ".join(f"{d.what} {d.target} against {d.draft}" for d in (real or differences)[:3])
    count = len(real or differences)
    more = f"; {count - 3} more" if count > 3 else ""
    if real:
        advice = (
            "take a draft model of the target's family, drafter.vocabulary=tli or slem, or a drafter without a model "
            "(drafter=prompt_lookup)"
        )
    else:
        advice = "drafter.special_tokens=target goes on with the target's ids"
    raise UserError(f"{where} has another vocabulary than the target ({shown}{more}): {advice}")
