"""A finished run on Weights & Biases, by the real client: offline by default, `wandb sync` sends it later.

It starts when the record is there and reads it back, since a run's timings are not to be shared with a service process.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specsparse import prompts
from specsparse.errors import UserError
from specsparse.report import figures, methods, runs
from specsparse.report.figure import Figure
from specsparse.report.methods import Method
from specsparse.report.runs import Run

_BINS = 12
_COLUMNS = ("prompt_id", "task", "side", "repeat", "prompt", "text", "tokens", "tokens_per_second", "finish_reason")


def publish(directory: Path, options: Mapping[str, Any]) -> None:
    """Send (or, offline, write) what a run's directory holds.

    Config; a step for each pass; histograms over rounds and over prompts; acceptance by position; tables of prompts,
    texts and figures' numbers; the figures, and every PNG that the run wrote; the record's numbers as the summary.
    Runs of a sweep share a group, the sweep's directory, unless `group` is given.

    Args:
        directory: of the run, with its record.json.
        options: project, mode and group, as in conf/tracker/wandb.yaml.
    """
    import wandb

    run = runs.read(directory)
    group = options.get("group") or (directory.resolve().parent.name if directory.name.isdecimal() else None)
    client = wandb.init(
        dir=str(directory), name=run.name, config=dict(run.config), job_type=run.kind, group=group, tags=_tags(run),
        project=options.get("project", "specsparse"), mode=options.get("mode", "offline"),
        settings=wandb.Settings(silent=True, console="off"),
    )  # fmt: skip
    found = methods.of([run])
    made, _ = figures.make([run], found)
    for row in run.rows:
        numbers = _flat({key: value for key, value in row.items() if key != "token_ids"})
        client.log({k: v for k, v in numbers.items() if isinstance(v, int | float)})
    for part in (_histograms(found), _prompts(run), _figures(made), _pictures(directory)):
        if part:
            client.log(part)
    numbers = {k: v for k, v in _flat(run.summary).items() if v is not None}
    client.summary.update(numbers | _acceptance(found))
    client.finish()


def _tags(run: Run) -> list[str]:
    values = [run.kind, *(run.setting(f"{key}.name") for key in ("drafter", "verifier", "policy", "tree"))]
    return [value for value in dict.fromkeys(values) if isinstance(value, str)]


def _histograms(found: Sequence[Method]) -> dict[str, Any]:
    """Drafted tokens that stayed, over rounds; speed-up and tokens per second, over prompts."""
    import wandb

    out: dict[str, Any] = {}
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


def _per_position(method: Method) -> list[int]:
    """Accepted at each position, all prompts together."""
    counts = [s.method.num_accepted_tokens_per_pos for s in method.samples]
    return [sum(c[k] for c in counts if k < len(c)) for k in range(method.positions())]


def _acceptance(found: Sequence[Method]) -> dict[str, float]:
    """Acceptance by position, 1 first, for the summary."""
    return {
        f"acceptance_per_position/{method.side}/{k + 1}": at.value
        for method in found
        for k in range(method.positions())
        if (at := method.accepted_at(k)) is not None
    }


def _prompts(run: Run) -> dict[str, Any]:
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
        return {p.id: p.text for p in prompts.load(source, turns=turns)}
    except UserError:
        return {}


def _figures(made: Sequence[Figure]) -> dict[str, Any]:
    """Each figure as a picture, and its numbers as a table."""
    import wandb

    out: dict[str, Any] = {}
    for figure in made:
        columns = figure.columns()
        data = [[row.get(column) for column in columns] for row in figure.rows]
        out[f"figures/{figure.name}"] = wandb.Image(_picture(figure.png()), caption=figure.caption)
        out[f"tables/{figure.name}"] = wandb.Table(columns=columns, data=data, allow_mixed_types=True)
    return out


def _pictures(directory: Path) -> dict[str, Any]:
    """What the experiment drew itself."""
    import wandb

    files = sorted(directory.glob("*.png"))
    return {f"figures/{file.stem}": wandb.Image(_picture(file.read_bytes())) for file in files}


def _picture(png: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(png))


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by slashes, as wandb groups its charts; items of a list by their index."""
    if isinstance(value, list):
        value = {str(i): item for i, item in enumerate(value)}
    if not isinstance(value, Mapping):
        return {prefix.rstrip("/"): value}
    return {k: v for key, item in value.items() for k, v in _flat(item, f"{prefix}{key}/").items()}
