"""Prompts: the built-in ones, written for this project, those of benchmarks, or a file of one's own."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from specsparse.data import humaneval, spec_bench, speed_bench
from specsparse.errors import UserError
from specsparse.support.files import Json

BUILTIN = "builtin"
_BUILTIN_FILE = Path(__file__).parent / "prompts.jsonl"


class Prompt(NamedTuple):
    """One prompt: `id` is unique in its source, `task` is what reports are grouped by.

    `before` holds the user's earlier turns of a conversation; what was answered to them is up to the model. `system` is
    the message that the conversation begins with, if any.
    """

    id: str
    task: str
    text: str
    before: tuple[str, ...] = ()
    system: str = ""


def load(
    source: str = BUILTIN,
    *,
    path: str | None = None,
    tasks: Sequence[str] | None = None,
    limit_per_task: int | None = None,
    turns: str = "first",
    split: str = "blank",
) -> list[Prompt]:
    """Prompts of a source, in its order.

    Args:
        source: "builtin", "spec_bench", "humaneval" or "speed_bench"; or a .jsonl file, one object per line with "text"
            (and "task", "id"), or with "turns" or "messages", "category" and "question_id" as Spec-Bench and
            SPEED-Bench have them; or a .txt file.
        path: of "speed_bench": its file, or a folder of them.
        tasks: keep these only.
        limit_per_task: keep this many of each task, the first ones.
        turns: "first" turns of conversations only, or "both": later turns are prompts of their own.
        split: what a prompt of a .txt file is: "blank", what stands between blank lines, or "lines", a line.

    Raises:
        UserError: no such file, a malformed line, an unknown task, or nothing left.
    """
    if path is not None and source != speed_bench.NAME:
        raise UserError(f"data.path={path} is for data=speed_bench; a file of your own is data.source=FILE")
    if split != "blank" and not source.endswith(".txt"):
        raise UserError(f"data.split={split} is for a .txt file; data.source={source} has prompts of its own")
    prompts = [p for p in _of(source, path, split) if turns == "both" or not p.before]
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


def _of(source: str, path: str | None, split: str) -> list[Prompt]:
    """All prompts of a source."""
    if source == humaneval.NAME:
        return [Prompt(**row) for row in humaneval.problems()]
    if source == speed_bench.NAME:
        prompts = [prompt for file in speed_bench.files(path) for prompt in _read(file)]
        for prompt in prompts:
            speed_bench.check_text(prompt.text, f"{source}, question {prompt.id}")
        _check_ids(prompts, path or source)
        return prompts
    if source == spec_bench.NAME:
        return _read(spec_bench.questions())
    return _read(_BUILTIN_FILE if source == BUILTIN else Path(source).expanduser(), split)


def _first_of_each(prompts: Iterable[Prompt], limit: int) -> Iterable[Prompt]:
    seen: Counter[str] = Counter()
    for prompt in prompts:
        seen[prompt.task] += 1
        if seen[prompt.task] <= limit:
            yield prompt


def _read(path: Path, split: str = "blank") -> list[Prompt]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"no such file of prompts: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read prompts from {path}: {error}") from error
    if path.suffix == ".jsonl":
        lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        prompts = [prompt for i, line in lines for prompt in _parse(line, f"{path}:{i}")]
    elif path.suffix == ".txt":
        end = "\n" if split == "lines" else "\n\n"
        blocks = [block.strip("\n") for block in text.replace("\r\n", "\n").split(end) if block.strip()]
        prompts = [Prompt("", "text", block) for block in blocks]
    else:
        raise UserError(f"{path}: prompts come as .jsonl or .txt")
    named = [p if p.id else p._replace(id=f"{p.task}-{i}") for i, p in enumerate(prompts, 1)]
    _check_ids(named, str(path))
    return named


def _check_ids(prompts: Iterable[Prompt], where: str) -> None:
    twice = [name for name, count in Counter(p.id for p in prompts).items() if count > 1]
    if twice:
        raise UserError(f"{where}: the id {twice[0]!r} is there twice")


def _parse(line: str, where: str) -> list[Prompt]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})") from error
    if isinstance(row, dict) and "messages" in row:
        return _of_messages(row, where)
    if isinstance(row, dict) and "turns" in row:
        return _conversation(row, row["turns"], where)
    if not isinstance(row, dict) or not isinstance(row.get("text"), str) or not row["text"]:
        raise UserError(f'{where}: expected an object with a "text"')
    return [Prompt(str(row.get("id") or ""), str(row.get("task") or "text"), row["text"])]


def _of_messages(row: Json, where: str) -> list[Prompt]:
    """Every user's turn of {"role", "content"} messages, which may begin with a system message."""
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "content" in m for m in messages):
        raise UserError(f'{where}: "messages" must be a list of {{"role", "content"}}')
    system = messages[0]["content"] if messages and messages[0].get("role") == "system" else ""
    if not isinstance(system, str):
        raise UserError(f"{where}: the system message must be a text")
    users = messages[1:] if system else messages
    if other := [m.get("role") for m in users if m.get("role") != "user"]:
        raise UserError(
            f"{where}: a message of role {other[0]!r}: what is answered to a user's turn is up to the model"
        )
    return [p._replace(system=system) for p in _conversation(row, [m["content"] for m in users], where)]


def _conversation(row: Json, turns: object, where: str) -> list[Prompt]:
    """Every turn of a Spec-Bench question; the later ones are numbered."""
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
        raise UserError(f'{where}: "turns" must be a list of texts')
    name, task = str(row.get("question_id") or row.get("id") or ""), str(row.get("category") or "text")
    ids = [name if i == 0 or not name else f"{name}-{i + 1}" for i in range(len(turns))]
    return [Prompt(ids[i], task, text, tuple(turns[:i])) for i, text in enumerate(turns)]
