"""The numbers of a run: JSON lines and one record, always; and from there to Weights & Biases.

The client of W&B starts when the record is there and reads it back, since a run's timings are not to be shared with a
service process. It is offline by default; `wandb sync` sends a run later.
"""

import csv
import io
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specsparse.data import prompts
from specsparse.errors import UserError
from specsparse.experiments.settings import STAND_IN
from specsparse.report.record import RECORD_FILE, ROWS_FILE
from specsparse.support.files import append_line, to_json, write_atomically
from specsparse.support.options import nearest, read
from specsparse.support.registry import Choice

PASSES = "passes"
"""Section of the charts over passes. The record's sums have the names without it."""
_BINS = 12
_COLUMNS = ("prompt_id", "task", "side", "repeat", "prompt", "text", "tokens", "tokens_per_second", "finish_reason")
_OF_THE_STEP = ("prompt_id", "task", "repeat")


class Tracker:
    """`prompts.jsonl`, a line per row as it comes, and `record.json` at the end, whole or not at all.

    What an earlier run left in the directory goes first, so that its rows are never taken for this run's.
    """

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        for name in (RECORD_FILE, ROWS_FILE):
            (directory / name).unlink(missing_ok=True)
        self._directory = directory

    def log(self, row: Mapping[str, object]) -> None:
        append_line(self._directory / ROWS_FILE, to_json(row))

    def finish(self, record: Mapping[str, object]) -> None:
        """Writes the record of the whole run; nothing is logged after it."""
        write_atomically(self._directory / RECORD_FILE, to_json(record, indent=1) + "\n")


@dataclass(frozen=True)
class JsonlOptions:
    """Of the files that are always written."""


@dataclass(frozen=True)
class WandbOptions:
    """Of Weights & Biases; see `publish`."""

    group: str | None = None
    mode: Literal["offline", "online", "disabled"] = "offline"
    project: str = "specsparse"


_OPTIONS = {"jsonl": JsonlOptions, "wandb": WandbOptions}


def options_of_tracker(tracker: Choice) -> JsonlOptions | WandbOptions:
    """Its checked options. UserError: an unknown tracker or option, with the valid names."""
    if tracker.name not in _OPTIONS:
        raise UserError(f"tracker={tracker.name} is unknown{nearest(tracker.name, _OPTIONS)}")
    return read(_OPTIONS[tracker.name], tracker.options, group="tracker", name=tracker.name)


def publish(directory: Path, options: WandbOptions) -> str:
    """Sends a run's directory, or writes it offline; returns a line that says where the run is.

    Config and manifest; a step for each prompt and repeat; histograms over rounds and over prompts; acceptance by
    position; tables of prompts, texts and figures' numbers; the figures; every PNG and CSV that the run wrote; the
    record's numbers as the summary. Runs of a sweep share a group, the sweep's directory, unless `group` is given.
    """
    import wandb
    from PIL import Image

    from specsparse.report import figures, methods, runs  # matplotlib takes a second

    run = runs.read(directory)
    is_cell = directory.name.removesuffix(STAND_IN).isdecimal()
    group = options.group or (directory.resolve().parent.name if is_cell else None)
    tags = [run.kind, *(run.setting(f"{key}.name") for key in ("drafter", "verifier", "policy", "tree"))]
    tags += ["stand-in"] if run.stand_in else []
    client = wandb.init(
        dir=str(directory), name=run.name, job_type=run.kind, group=group, project=options.project, mode=options.mode,
        notes=str(run.stand_in) if run.stand_in else None,
        config={
            **run.config, **({"stand_in": run.record["stand_in"]} if run.stand_in else {}),
            "manifest": {k: v for k, v in run.manifest.items() if k != "config"},
        },
        tags=[tag for tag in dict.fromkeys(tags) if isinstance(tag, str)],
        settings=wandb.Settings(silent=True, console="off"),
    )  # fmt: skip
    client.define_metric(f"{PASSES}/*", summary="none")  # or the last prompt's numbers would stand for the run's
    found = methods.from_runs([run])
    made, _ = figures.make([run], found)
    for step in _steps(run.rows):
        client.log(step)
    tables: dict[str, tuple[Sequence[str], list[list[Any]]]] = {}
    parts, pictures = _histograms(found), [(f.name, f.png(), f.caption) for f in made]
    for figure in made:
        columns = figure.columns()
        tables[f"tables/{figure.name}"] = columns, [[row.get(column) for column in columns] for row in figure.rows]
    pictures += [(file.stem, file.read_bytes(), None) for file in sorted(directory.glob("*.png"))]
    for name, png, caption in pictures:
        parts[f"figures/{name}"] = wandb.Image(Image.open(io.BytesIO(png)), caption=caption)
    for file in sorted(directory.glob("*.csv")):
        columns, *data = csv.reader(io.StringIO(file.read_text(encoding="utf-8")))
        tables[f"tables/{file.stem}"] = columns, [[_number(cell) for cell in row] for row in data]
    if run.rows:
        tables["prompts"] = _COLUMNS, _prompts(run)
    for name, (columns, data) in tables.items():
        parts[name] = wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)
    if parts:
        client.log(parts)
    numbers = {k: v for k, v in _flat(run.summary).items() if v is not None}
    client.summary.update(numbers | {
        f"acceptance_per_position/{method.side}/{k + 1}": at.value
        for method in found for k in range(method.positions()) if (at := method.accepted_at(k)) is not None
    })  # fmt: skip
    client.finish()
    if options.mode == "disabled":
        return "wandb: disabled, nothing was written"
    if options.mode == "online":  # without an address the client warns
        return f"wandb: {client.url}"
    written = Path(client.dir).parent
    shown = min(str(written), os.path.relpath(written), key=len)
    return f"wandb: written offline; to send it: wandb sync {shlex.quote(shown)}"


def _steps(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A step for each prompt and repeat: its id, task and repeat, and each side's numbers under the side's name."""
    steps: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        which = {key: row.get(key) for key in _OF_THE_STEP}
        step = steps.setdefault(tuple(which.values()), {f"{PASSES}/{key}": value for key, value in which.items()})
        rest = {key: value for key, value in row.items() if key not in (*_OF_THE_STEP, "side", "token_ids")}
        numbers = {k: v for k, v in _flat(rest).items() if isinstance(v, int | float)}
        step.update({f"{PASSES}/{row.get('side')}/{key}": value for key, value in numbers.items()})
    return list(steps.values())


def _histograms(found: Sequence[Any]) -> dict[str, Any]:
    """Drafted tokens that stayed, over rounds; speed-up and tokens per second, over prompts."""
    import wandb

    out = {}
    for method in found:
        counters = [s.method for s in method.samples]
        accepted = [c.num_accepted_tokens_per_pos for c in counters]
        reached = [sum(c.num_drafts for c in counters)]
        reached += [sum(c[k] for c in accepted if k < len(c)) for k in range(method.positions())]
        if reached[0]:
            exactly = [a - b for a, b in zip(reached, [*reached[1:], 0], strict=True)]
            edges = np.arange(len(exactly) + 1) - 0.5
            out[f"accepted_in_a_round/{method.side}"] = wandb.Histogram(np_histogram=(np.array(exactly), edges))
        for name, values in {
            "speedup_by_prompt": [s.plain_s / s.method_s for s in method.samples],
            "tokens_per_second_by_prompt": [c.num_emitted_tokens / c.times.total for c in counters],
        }.items():
            out[f"{name}/{method.side}"] = wandb.Histogram(values, num_bins=_BINS)
    return out


def _prompts(run: Any) -> list[list[Any]]:
    """Each prompt with what every side wrote, and the prompt's text if its file is still there."""
    source, turns = run.setting("data.source") or prompts.BUILTIN, run.setting("data.turns") or "first"
    try:
        path, split = run.setting("data.path"), run.setting("data.split") or "blank"
        texts = {p.id: p.text for p in prompts.load(source, path=path, turns=turns, split=split)}
    except UserError:
        texts = {}
    whole = ({"prompt": texts.get(row.get("prompt_id", ""), ""), **(row.get("rates") or {}), **row} for row in run.rows)
    return [[row.get(column) for column in _COLUMNS] for row in whole]


def _number(cell: str) -> float | str | None:
    """A cell of a CSV file as the number it may be; None if it is empty."""
    try:
        return float(cell) if cell else None
    except ValueError:
        return cell


def _flat(value: object, prefix: str = "") -> dict[str, object]:
    """Nested keys joined by slashes, as wandb groups its charts; items of a list by their index."""
    if isinstance(value, list):
        value = {str(i): item for i, item in enumerate(value)}
    if not isinstance(value, Mapping):
        return {prefix.rstrip("/"): value}
    return {k: v for key, item in value.items() for k, v in _flat(item, f"{prefix}{key}/").items()}
