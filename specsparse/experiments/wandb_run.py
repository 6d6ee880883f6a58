"""A finished run on Weights & Biases, by the real client: offline by default, `wandb sync` sends it later.

It starts when the record is there and reads it back, since a run's timings are not to be shared with a service process.
"""

import csv
import io
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specsparse.data import prompts
from specsparse.errors import UserError
from specsparse.report import figures, methods, runs
from specsparse.report.methods import ReportedMethod
from specsparse.report.plots import Figure
from specsparse.report.runs import Run

_BINS = 12
_COLUMNS = ("prompt_id", "task", "side", "repeat", "prompt", "text", "tokens", "tokens_per_second", "finish_reason")
PASSES = "passes"
"""Section of the charts over passes. The record's sums have the names without it."""
_OF_THE_STEP = ("prompt_id", "task", "repeat")


def publish(directory: Path, options: Mapping[str, object]) -> str:
    """Send (or, offline, write) what a run's directory holds.

    Config and manifest; a step for each prompt and repeat; histograms over rounds and over prompts; acceptance by
    position; tables of prompts, texts and figures' numbers; the figures; every PNG and CSV that the run wrote; the
    record's numbers as the summary. Runs of a sweep share a group, the sweep's directory, unless `group` is given.

    Args:
        directory: of the run, with its record.json.
        options: project, mode and group, as in conf/tracker/wandb.yaml.

    Returns:
        A line that says where the run is, and offline the command that sends it.
    """
    import wandb

    run = runs.read(directory)
    mode = options.get("mode", "offline")
    group = options.get("group") or (directory.resolve().parent.name if directory.name.isdecimal() else None)
    config = {**run.config, "manifest": {k: v for k, v in run.manifest.items() if k != "config"}}  # what it ran on
    client = wandb.init(
        dir=str(directory), name=run.name, config=config, job_type=run.kind, group=group, tags=_tags(run),
        project=options.get("project", "specsparse"), mode=mode,
        settings=wandb.Settings(silent=True, console="off"),
    )  # fmt: skip
    client.define_metric(f"{PASSES}/*", summary="none")  # or the last prompt's numbers would stand for the run's
    found = methods.from_runs([run])
    made, _ = figures.make([run], found)
    for step in _steps(run.rows):
        client.log(step)
    for part in (_histograms(found), _prompts(run), _figures(made), _written(directory)):
        if part:
            client.log(part)
    numbers = {k: v for k, v in _flat(run.summary).items() if v is not None}
    client.summary.update(numbers | _acceptance(found))
    client.finish()
    return _where(client, mode)


def _where(client: Any, mode: str) -> str:
    """Asks for the address online only: without one the client warns."""
    directory = Path(client.dir).parent
    if mode == "disabled":
        return "wandb: disabled, nothing was written"
    if mode == "online":
        return f"wandb: {client.url}"
    shown = min(str(directory), os.path.relpath(directory), key=len)
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


def _tags(run: Run) -> list[str]:
    values = [run.kind, *(run.setting(f"{key}.name") for key in ("drafter", "verifier", "policy", "tree"))]
    return [value for value in dict.fromkeys(values) if isinstance(value, str)]


def _histograms(found: Sequence[ReportedMethod]) -> dict[str, object]:
    """Drafted tokens that stayed, over rounds; speed-up and tokens per second, over prompts."""
    import wandb

    out: dict[str, object] = {}
    for method in found:
        reached = [sum(s.method.num_drafts for s in method.samples), *_per_position(method)]
        if reached[0]:
            exactly = [a - b for a, b in zip(reached, [*reached[1:], 0], strict=True)]
            edges = np.arange(len(exactly) + 1) - 0.5
            name = f"accepted_in_a_round/{method.side}"
            out[name] = wandb.Histogram(np_histogram=(np.array(exactly), edges))
        for name, values in {
            "speedup_by_prompt": [s.plain_s / s.method_s for s in method.samples],
            "tokens_per_second_by_prompt": [s.method.num_emitted_tokens / s.method.times.total for s in method.samples],
        }.items():
            out[f"{name}/{method.side}"] = wandb.Histogram(values, num_bins=_BINS)
    return out


def _per_position(method: ReportedMethod) -> list[int]:
    """Accepted at each position, all prompts together."""
    counts = [s.method.num_accepted_tokens_per_pos for s in method.samples]
    return [sum(c[k] for c in counts if k < len(c)) for k in range(method.positions())]


def _acceptance(found: Sequence[ReportedMethod]) -> dict[str, float]:
    """Acceptance by position, 1 first, for the summary."""
    return {
        f"acceptance_per_position/{method.side}/{k + 1}": at.value
        for method in found
        for k in range(method.positions())
        if (at := method.accepted_at(k)) is not None
    }


def _prompts(run: Run) -> dict[str, object]:
    """One table: each prompt with what every side wrote."""
    import wandb

    if not run.rows:
        return {}
    texts = _texts(run)
    data = []
    for row in run.rows:
        rates = {"prompt": texts.get(row.get("prompt_id", ""), ""), **(row.get("rates") or {})}
        data.append([{**rates, **row}.get(column) for column in _COLUMNS])
    return {"prompts": wandb.Table(columns=list(_COLUMNS), data=data, allow_mixed_types=True)}


def _texts(run: Run) -> dict[str, str]:
    """The prompts' texts by id; none where their file is gone."""
    source, turns = run.setting("data.source") or prompts.BUILTIN, run.setting("data.turns") or "first"
    try:
        path, split = run.setting("data.path"), run.setting("data.split") or "blank"
        return {p.id: p.text for p in prompts.load(source, path=path, turns=turns, split=split)}
    except UserError:
        return {}


def _figures(made: Sequence[Figure]) -> dict[str, object]:
    """Each figure as a picture, and its numbers as a table."""
    import wandb

    out: dict[str, object] = {}
    for figure in made:
        columns = figure.columns()
        data = [[row.get(column) for column in columns] for row in figure.rows]
        out[f"figures/{figure.name}"] = wandb.Image(_picture(figure.png()), caption=figure.caption)
        out[f"tables/{figure.name}"] = wandb.Table(columns=columns, data=data, allow_mixed_types=True)
    return out


def _written(directory: Path) -> dict[str, object]:
    """What the experiment drew itself, and its tables."""
    import wandb

    pictures, tables = sorted(directory.glob("*.png")), sorted(directory.glob("*.csv"))
    out = {f"figures/{file.stem}": wandb.Image(_picture(file.read_bytes())) for file in pictures}
    for file in tables:
        columns, *data = csv.reader(io.StringIO(file.read_text(encoding="utf-8")))
        values = [[_number(cell) for cell in row] for row in data]
        out[f"tables/{file.stem}"] = wandb.Table(columns=columns, data=values, allow_mixed_types=True)
    return out


def _number(cell: str) -> float | str | None:
    """A cell of a CSV file as the number it may be; None where it is empty."""
    try:
        return float(cell) if cell else None
    except ValueError:
        return cell


def _picture(png: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(png))


def _flat(value: object, prefix: str = "") -> dict[str, object]:
    """Nested keys joined by slashes, as wandb groups its charts; items of a list by their index."""
    if isinstance(value, list):
        value = {str(i): item for i, item in enumerate(value)}
    if not isinstance(value, Mapping):
        return {prefix.rstrip("/"): value}
    return {k: v for key, item in value.items() for k, v in _flat(item, f"{prefix}{key}/").items()}
