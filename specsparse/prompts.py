"""Prompts: the built-in ones, written for this project, or a file of one's own."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from specsparse.errors import UserError

BUILTIN = "builtin"
_BUILTIN_FILE = Path(__file__).parent / "data" / "prompts.jsonl"


class Prompt(NamedTuple):
    """One prompt: `id` is unique in its source, `task` is what reports are grouped by."""

    id: str
    task: str
    text: str


def load(
    source: str = BUILTIN, *, tasks: Sequence[str] | None = None, limit_per_task: int | None = None
) -> list[Prompt]:
    """Prompts of a source, in its order.

    Args:
        source: "builtin"; or a .jsonl file, one object with "text" (and "task", "id") per line; or a .txt file,
            prompts between blank lines.
        tasks: keep these only.
        limit_per_task: keep this many of each task, the first ones.

    Raises:
        UserError: no such file, a malformed line, an unknown task, or nothing left.
    """
    path = _BUILTIN_FILE if source == BUILTIN else Path(source).expanduser()
    prompts = _read(path)
    present = list(dict.fromkeys(p.task for p in prompts))
    for task in tasks or ():
        if task not in present:
            raise UserError(f"no prompts of task {task!r} in {source}; tasks: {', '.join(present)}")
    kept = [p for p in prompts if tasks is None or p.task in tasks]
    if limit_per_task is not None:
        kept = list(_first_of_each(kept, limit_per_task))
    if not kept:
        raise UserError(f"no prompts in {source}")
    return kept


def _first_of_each(prompts: Iterable[Prompt], limit: int) -> Iterable[Prompt]:
    seen: Counter[str] = Counter()
    for prompt in prompts:
        seen[prompt.task] += 1
        if seen[prompt.task] <= limit:
            yield prompt


def _read(path: Path) -> list[Prompt]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"no such file of prompts: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read prompts from {path}: {error}") from error
    if path.suffix == ".jsonl":
        prompts = [_parse(line, f"{path}:{i}") for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    elif path.suffix == ".txt":
        blocks = [block.strip("\n") for block in text.replace("\r\n", "\n").split("\n\n") if block.strip()]
        prompts = [Prompt("", "text", block) for block in blocks]
    else:
        raise UserError(f"{path}: prompts come as .jsonl or .txt")
    named = [p if p.id else p._replace(id=f"{p.task}-{i}") for i, p in enumerate(prompts, 1)]
    twice = [name for name, count in Counter(p.id for p in named).items() if count > 1]
    if twice:
        raise UserError(f"{path}: the id {twice[0]!r} is there twice")
    return named


def _parse(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str) or not row["text"]:
        raise UserError(f'{where}: expected an object with a "text"')
    return Prompt(str(row.get("id") or ""), str(row.get("task") or "text"), row["text"])
