"""Two runs of any engines as JSON Lines of token ids: where their texts fork.

A line is one text: {"id": "chat-1", "token_ids": [198, 504, ..]}, the ids that were written and not the prompt's. The
`prompts.jsonl` of our runs is such a file; its key of a text is `prompt_id`, and of several repeats the first counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from specsparse.errors import UserError
from specsparse.support import tables
from specsparse.support.files import Json, is_unicode, json_lines
from specsparse.tools.audit.same_bits import Rate, rate

ROWS_FILE = "prompts.jsonl"
Texts = dict[str, tuple[int, ...]]
"""Token ids by the id of a text."""


class Fork(NamedTuple):
    """The place where two texts part."""

    id: str
    position: int | None  # of the first token that differs, from 0; None if there is none
    a: int | None  # the token of A there; None if that text has ended
    b: int | None  # the token of B
    compared: int  # tokens up to the fork, that one included; those of the shorter text if there is none


@dataclass(frozen=True)
class TextsDifference:
    forks: tuple[Fork, ...]  # an entry for each text that both have
    only: tuple[int, int]  # numbers of texts that only A, only B has
    shorter: tuple[str, ...]  # texts of which one is the beginning of the other

    @property
    def forked(self) -> tuple[Fork, ...]:
        return tuple(fork for fork in self.forks if fork.position is not None)

    @property
    def positions(self) -> int:
        return sum(fork.compared for fork in self.forks)

    @property
    def rate(self) -> Rate:
        """Forks for each thousand tokens, up to each text's first fork: behind a fork stands another text."""
        return rate(len(self.forked), self.positions)

    def to_dict(self) -> Json:
        return {
            "texts": len(self.forks), "forked": len(self.forked), "positions": self.positions,
            "fork_rate": self.rate._asdict(), "only_in": self.only, "cut_off": self.shorter,
            "forks": [fork._asdict() for fork in self.forks],
        }  # fmt: skip


def read(path: Path, side: str | None = None) -> Texts:
    """The texts of a file, or of a folder with `prompts.jsonl`; of one `side`, if lines say "side".

    Of several lines of a text the first counts. UserError if a line is malformed, or if there are several sides and
    none was chosen.
    """
    file = path / ROWS_FILE if path.is_dir() else path
    rows = [_row(row, where) for where, row in json_lines(file)]
    sides = list(dict.fromkeys(str(row["side"]) for _, _, row in rows if row.get("side") is not None))
    if len(sides) > 1 if side is None else side not in sides:
        raise UserError(f"{file}: has texts of {', '.join(sides) or 'no side'}: name one of them with --sides, or none")
    out: Texts = {}
    for name, ids, row in rows:
        if (side is None or row.get("side") == side) and not row.get("repeat"):
            out.setdefault(name, ids)
    return out


def _row(found: object, where: str) -> tuple[str, tuple[int, ...], Json]:
    """The id of a line's text, its token ids and the whole line."""
    row = found if isinstance(found, dict) else {}
    name, ids = row.get("id", row.get("prompt_id")), row.get("token_ids")
    whole = isinstance(ids, list) and all(type(i) is int for i in ids)
    if not (isinstance(name, str | int) and is_unicode(str(name)) and whole):
        raise UserError(f'{where}: expected an object such as {{"id": "chat-1", "token_ids": [198, 504]}}')
    return str(name), tuple(ids), row


def compare_texts(a: Texts, b: Texts, *, where: Sequence[str] = ("A", "B")) -> TextsDifference:
    """The first fork of every text that both have; UserError if they have none in common, or only empty ones.

    If one text is the beginning of the other, nothing is known of how it would have gone on: that is no fork.
    """
    common = [name for name in a if name in b]
    forks = []
    for name in common:
        pairs = enumerate(zip(a[name], b[name]))
        at = next((i for i, (one, other) in pairs if one != other), None)
        if at is None:
            forks.append(Fork(name, None, None, None, min(len(a[name]), len(b[name]))))
        else:
            forks.append(Fork(name, at, a[name][at], b[name][at], at + 1))
    if not sum(fork.compared for fork in forks):
        raise UserError(f"{where[0]} and {where[1]} have no text in common: the ids of their lines must be the same")
    shorter = tuple(f.id for f in forks if f.position is None and len(a[f.id]) != len(b[f.id]))
    return TextsDifference(tuple(forks), (len(a) - len(common), len(b) - len(common)), shorter)


def parts(difference: TextsDifference) -> Iterator[Table | str]:
    """The texts that fork, the rate, and the texts that were not compared."""
    forked, positions = difference.forked, difference.positions
    if forked:
        rows = ((fork.id, str(fork.position), str(fork.a), str(fork.b)) for fork in forked)
        yield tables.new("text", "first fork at", "token of A", "token of B", rows=rows)
    yield f"{len(forked)} of {len(difference.forks)} texts fork; {positions} tokens compared up to the first fork"
    yield f"forks in 1,000 tokens: {difference.rate}, 95 % interval of Clopper and Pearson"
    if difference.shorter:
        yield f"{len(difference.shorter)} texts are the beginning of the other's: compared as far as they go"
    a, b = difference.only
    if a or b:
        yield f"left out: {a} texts only A has, {b} only B"
