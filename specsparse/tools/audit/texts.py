"""Two runs of any engines as JSON Lines of token ids: where their texts fork.

A line is one text: {"id": "chat-1", "token_ids": [198, 504, ..]}, the ids that were written and not the prompt's. The
`prompts.jsonl` of our runs is such a file; its key of a text is `prompt_id`, and of several repeats the first counts.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specsparse.errors import UserError
from specsparse.support.files import Json, is_unicode
from specsparse.tools.audit.compare import Rate, rate

ROWS_FILE = "prompts.jsonl"
Texts = dict[str, tuple[int, ...]]
"""Token ids by the id of a text."""


@dataclass(frozen=True)
class Fork:
    """Where two texts part.

    Attributes:
        text: its id.
        position: of the first token that differs, from 0; None where there is none.
        a, b: the token of each there; None where that text has ended.
        compared: tokens up to the fork, that one included; those of the shorter text where there is none.
    """

    text: str
    position: int | None
    a: int | None
    b: int | None
    compared: int


@dataclass(frozen=True)
class TextsDifference:
    """What `compare_texts` found.

    Attributes:
        forks: an entry for each text that both have.
        only: texts that only A, only B has.
        shorter: texts of which one is the beginning of the other.
    """

    forks: tuple[Fork, ...]
    only: tuple[int, int]
    shorter: tuple[str, ...]

    @property
    def forked(self) -> tuple[Fork, ...]:
        """The texts that part."""
        return tuple(fork for fork in self.forks if fork.position is not None)

    @property
    def positions(self) -> int:
        """Tokens compared."""
        return sum(fork.compared for fork in self.forks)

    @property
    def rate(self) -> Rate:
        """Forks for each thousand tokens, up to each text's first fork: what follows a fork is another text."""
        return rate(len(self.forked), self.positions)

    def cells(self) -> Json:
        """For the report."""
        return {
            "texts": len(self.forks), "forked": len(self.forked), "positions": self.positions,
            "fork_rate": self.rate._asdict(), "only_in": self.only, "cut_off": self.shorter,
            "forks": [{"id": f.text, "position": f.position, "a": f.a, "b": f.b, "compared": f.compared}
                      for f in self.forks],
        }  # fmt: skip


def read(path: Path, side: str | None = None) -> Texts:
    """The texts of a file, or of a run's folder.

    Args:
        path: the file, or a folder with `prompts.jsonl`.
        side: whose texts, where lines say "side"; None where there is one.

    Raises:
        UserError: no such file, a malformed line, a text that is there twice, or several sides and none chosen.
    """
    file = path / ROWS_FILE if path.is_dir() else path
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"{file}: cannot be read: {reason}") from None
    rows = [_row(line, f"{file}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    sides = list(dict.fromkeys(str(row["side"]) for _, _, row in rows if row.get("side") is not None))
    if side is None and len(sides) > 1:
        raise UserError(f"{file}: has texts of {', '.join(sides)}: choose with --sides, such as --sides {sides[0]}")
    if side is not None and side not in sides:
        raise UserError(f"{file}: has no texts of {side!r}: there are {', '.join(sides) or 'no sides'}")
    out: Texts = {}
    for name, ids, row in rows:
        if (side is not None and row.get("side") != side) or row.get("repeat"):
            continue
        if name in out:
            raise UserError(f"{file}: the text {name!r} is there twice")
        out[name] = ids
    if not out:
        raise UserError(f"{file}: has no texts")
    return out


def _row(line: str, where: str) -> tuple[str, tuple[int, ...], Json]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{where}: not JSON") from None
    name = next((row[key] for key in ("id", "prompt_id") if key in row), None) if isinstance(row, dict) else None
    ids = row.get("token_ids") if isinstance(row, dict) else None
    whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not isinstance(name, str | int) or not whole:
        raise UserError(f'{where}: expected an object such as {{"id": "chat-1", "token_ids": [198, 504]}}')
    if not is_unicode(str(name)):
        raise UserError(f"{where}: the id {name!a} is no valid Unicode")
    return str(name), tuple(ids), row


def compare_texts(a: Texts, b: Texts, *, where: Sequence[str] = ("A", "B")) -> TextsDifference:
    """The first fork of every text that both have.

    Where one text is the beginning of the other nothing is known of what it would have written: that is no fork.

    Raises:
        UserError: no text in common, or only empty ones.
    """
    common = [name for name in a if name in b]
    forks = [_fork(name, a[name], b[name]) for name in common]
    if not sum(fork.compared for fork in forks):
        raise UserError(f"{where[0]} and {where[1]} have no text in common: the ids of their lines must be the same")
    shorter = tuple(f.text for f in forks if f.position is None and len(a[f.text]) != len(b[f.text]))
    return TextsDifference(tuple(forks), (len(a) - len(common), len(b) - len(common)), shorter)


def _fork(name: str, a: Sequence[int], b: Sequence[int]) -> Fork:
    for i, (one, other) in enumerate(zip(a, b)):
        if one != other:
            return Fork(name, i, one, other, i + 1)
    return Fork(name, None, None, None, min(len(a), len(b)))
