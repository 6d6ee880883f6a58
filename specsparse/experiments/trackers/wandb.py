"""Weights & Biases: a run's curves while it goes on, and all that it has written at its end.

Offline by default; `wandb sync` sends a run later.
"""

import csv
import functools
import importlib.util
import io
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from specsparse.data import prompts
from specsparse.errors import UserError, not_installed
from specsparse.experiments.trackers.base import Series, Tracker
from specsparse.report.record import RECORD_FILE
from specsparse.support.files import kept, to_json, write_atomically

if TYPE_CHECKING:
    from specsparse.experiments.settings import RunConfig

PASSES = "passes"
"""Section of the charts over passes. The record's sums have the names without it."""
_BINS = 12
_COLUMNS = ("prompt_id", "task", "side", "repeat", "prompt", "text", "tokens", "tokens_per_second", "finish_reason")
_OF_THE_STEP = ("prompt_id", "task", "repeat")
_ID_FILE = "wandb.json"  # in the folder that a stopped training goes on from: which run of W&B it is
_FINISH_S = 600  # seconds that the end of a run waits for its data to be sent, unless WANDB_FINISH_TIMEOUT says another

Mode = Literal["offline", "online", "disabled"]
Resume = Literal["allow", "must", "never", "auto"]


class _Client(NamedTuple):
    """A run of wandb's, by series the last point that it had before it was resumed, and metrics that have an axis."""

    run: Any
    last: dict[str, float]
    defined: set[str]


@dataclass(frozen=True)
class Wandb(Tracker):
    """Weights & Biases.

    The first of these holds: the option, if it is not null; the variable of the environment; the default.

    Attributes:
        mode: WANDB_MODE, else offline.
        project: WANDB_PROJECT, else specsparse.
        entity: WANDB_ENTITY, else the account's own.
        group: WANDB_RUN_GROUP, else the folder of the sweep.
        tags: WANDB_TAGS (with commas), beside those of the method.
        id: WANDB_RUN_ID, else that of the stopped training that goes on, else a new one.
        resume: WANDB_RESUME, else allow for a training that goes on.
        artifacts: whether the record's files and trained models are sent as artifacts.
    """

    mode: Mode | None = None
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] | None = None
    id: str | None = None
    resume: Resume | None = None
    artifacts: bool = True

    def _mode(self) -> Mode:
        return self.mode or _of_environment("WANDB_MODE", Mode) or "offline"

    def check(self) -> None:
        """UserError: wandb is not installed, a variable of the environment has no value that it can have, or nobody is
        logged in for a run that is to be online."""
        mode = self._mode()
        _of_environment("WANDB_RESUME", Resume)
        _finish_s()
        if importlib.util.find_spec("wandb") is None:
            raise UserError(not_installed(ModuleNotFoundError(name="wandb")))
        if mode == "online":
            _log_in()

    def start(self, run: "RunConfig", directory: Path, folder: Path | None) -> _Client:
        import wandb

        from specsparse.experiments.settings import STAND_IN

        mode, env, before = self._mode(), os.environ.get, {} if folder is None else kept(folder / _ID_FILE)
        config, stood_in, is_cell = run.composed, run.stood_in, directory.name.removesuffix(STAND_IN).isdecimal()
        tags = [run.kind, *((config.get(key) or {}).get("name") for key in ("drafter", "verifier", "policy", "tree"))]
        tags += ["stand-in"] if stood_in else []
        tags += env("WANDB_TAGS", "").split(",") if self.tags is None else self.tags
        chosen: dict[str, Any] = {
            "project": self.project or env("WANDB_PROJECT") or "specsparse",
            "entity": self.entity or env("WANDB_ENTITY"),
            "group": self.group or env("WANDB_RUN_GROUP") or (directory.resolve().parent.name if is_cell else None),
            "id": self.id or env("WANDB_RUN_ID") or before.get("id"),
            "resume": self.resume or _of_environment("WANDB_RESUME", Resume) or ("allow" if before else None),
            "name": env("WANDB_NAME") or run.name,
            "notes": env("WANDB_NOTES") or (str(stood_in) if stood_in else None),
            "dir": env("WANDB_DIR") or str(directory),
            "job_type": run.kind,
            "config": {**config, **({"stand_in": vars(stood_in)} if stood_in else {})},
            "tags": [tag for tag in dict.fromkeys(tags) if isinstance(tag, str) and tag],
        }
        settings = wandb.Settings(silent=True, console="off", finish_timeout=_finish_s(), finish_timeout_raises=True)
        chosen |= {"settings": settings, "allow_val_change": True, "reinit": "create_new"}  # beside a run of the user's
        try:
            found = wandb.init(mode=mode, **chosen)
        except Exception:
            if mode != "online" or not (directory / RECORD_FILE).is_file():
                raise
            found = wandb.init(mode="offline", **chosen)  # the work is done, what it found is kept
        if folder is not None and mode != "disabled":
            write_atomically(folder / _ID_FILE, to_json({"id": found.id}))
        found.define_metric(f"{PASSES}/*", summary="none")  # or the last prompt's numbers would stand for the run's
        return _Client(found, {}, set())

    def log(self, client: _Client, series: Series, values: Mapping[str, float]) -> None:
        axis, run = f"{series.name}/{series.axis}", client.run
        if series.name not in client.last:
            client.last[series.name] = run.summary.get(axis, -np.inf) if run.resumed else -np.inf
        for name in values:
            if (key := f"{series.name}/{name}") not in client.defined:
                client.defined.add(key)
                best = "min" if name.startswith(series.least) else "max" if name.startswith(series.most) else None
                over = {"hidden": True} if name == series.axis else {"step_metric": axis}
                run.define_metric(key, **over, summary=best and f"{best},last")
        if values[series.axis] > client.last[series.name]:
            run.log({f"{series.name}/{name}": value for name, value in values.items()})

    def stop(self, client: _Client) -> None:
        try:
            client.run.finish(exit_code=1)
        finally:
            _tear_down()

    def finish(self, client: _Client, directory: Path) -> str:
        """Sends the files of a finished run: the manifest, a step for each prompt and repeat, histograms over rounds
        and over prompts, acceptance by position, tables of prompts, texts and figures' numbers, the figures, every PNG
        and CSV, the record's numbers as the summary, and artifacts."""
        import wandb
        from PIL import Image

        from specsparse.report import figures, methods, runs  # matplotlib takes a second

        run, client = runs.read(directory), client.run
        manifest = {k: v for k, v in run.manifest.items() if k != "config"}
        client.config.update({"manifest": manifest}, allow_val_change=True)
        found = methods.from_runs([run])
        made, _ = figures.make([run], found)
        for step in _steps(run.rows):
            client.log(step)

        def table(columns: Sequence[str], rows: list[list[Any]]) -> wandb.Table:
            return wandb.Table(columns=list(columns), data=rows, allow_mixed_types=True)

        parts = _histograms(found)
        for figure in made:
            columns = figure.columns()
            parts[f"tables/{figure.name}"] = table(columns, [[row.get(c) for c in columns] for row in figure.rows])
            parts[f"figures/{figure.name}"] = wandb.Image(Image.open(io.BytesIO(figure.png())), caption=figure.caption)
        for file in sorted(directory.glob("*.png")):
            parts[f"figures/{file.stem}"] = wandb.Image(str(file))
        for file in sorted(directory.glob("*.csv")):
            columns, *cells = csv.reader(io.StringIO(file.read_text(encoding="utf-8")))
            parts[f"tables/{file.stem}"] = table(columns, [[_number(cell) for cell in row] for row in cells])
        if run.rows:
            parts["prompts"] = table(_COLUMNS, _prompts(run))
        if parts:
            client.log(parts)
        numbers = _numbers(run.summary)
        client.summary.update(numbers | {
            f"acceptance_per_position/{method.side}/{k + 1}": at.value
            for method in found for k in range(method.positions()) if (at := method.accepted_at(k)) is not None
        })  # fmt: skip
        for artifact in _artifacts(run, numbers) if self.artifacts else ():
            client.log_artifact(artifact)
        mode, at = self._mode(), Path(client.dir).parent
        sync = f"wandb sync {shlex.quote(min(str(at), os.path.relpath(at), key=len))}"
        try:
            client.finish()
        except TimeoutError:
            return f"wandb: {client.url}, and not all is sent; to send the rest: {sync}"
        _tear_down()
        if mode == "disabled":
            return "wandb: disabled, nothing was written"
        return f"wandb: written offline; to send it: {sync}" if client.offline else f"wandb: {client.url}"


def _of_environment(name: str, choices: Any) -> Any:
    """A variable's value, or None; UserError: it is none of those of the literal type."""
    value = os.environ.get(name) or None
    if value not in (None, *get_args(choices)):
        raise UserError(f"{name}={value} must be one of: {', '.join(get_args(choices))}")
    return value


def _finish_s() -> float:
    given = os.environ.get("WANDB_FINISH_TIMEOUT") or _FINISH_S
    try:
        return float(given)
    except ValueError:
        raise UserError(f"WANDB_FINISH_TIMEOUT={given} must be a number of seconds") from None


@functools.cache
def _log_in() -> None:
    """Asks W&B's server whether it knows the user; UserError if not. No process of W&B's is left: times may follow."""
    import wandb

    wandb.setup(wandb.Settings(mode="online"))  # whatever WANDB_MODE says
    try:
        wandb.login(force=True, verify=True)
    except Exception as error:
        said = " ".join(str(error).split()).rstrip(".")[:300]
        later = "give tracker.mode=offline to send the run later"
        raise UserError(f"tracker=wandb cannot be online: {said}; {later}") from error
    finally:
        _tear_down()


def _tear_down() -> None:
    """Ends W&B's own process, beside which nothing should be timed, unless the caller has a run of theirs."""
    import wandb

    if wandb.run is None:
        wandb.teardown()


def _artifacts(run: Any, numbers: Mapping[str, float]) -> list[Any]:
    """The files of the run's folder, and each model that it has trained."""
    import wandb

    def artifact(name: str, kind: str, files: Sequence[Path], **more: object) -> Any:
        made = wandb.Artifact(re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)[:128], kind, metadata={**about, **more})
        for file in files:
            made.add_file(str(file), policy="immutable", skip_cache=True)  # not copied
        return made

    about = {"kind": run.kind, "stand_in": run.stand_in and str(run.stand_in), **run.origin}
    out = [artifact(f"{run.kind}-{run.name}", "record", [f for f in sorted(run.directory.iterdir()) if f.is_file()])]
    for path in map(Path, run.record.get("trained") or ()):
        name = path.stem if path.stem.startswith(path.parent.name) else f"{path.parent.name}-{path.stem}"
        out.append(artifact(name, "model", [path], settings=run.config.get("train"), results=numbers))
    return out


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
    """A table of each prompt with the text of every side, and the prompt's text if its file is still there."""
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


def _numbers(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A record's numbers by one name each; its tables, lists of rows, are CSV files."""
    tables = [k for k, v in summary.items() if isinstance(v, list) and any(isinstance(row, Mapping) for row in v)]
    flat = _flat({key: value for key, value in summary.items() if key not in tables})
    return {key: value for key, value in flat.items() if value is not None}


def _flat(value: object, prefix: str = "") -> dict[str, object]:
    """Nested keys joined by slashes, as wandb groups its charts; items of a list by their index."""
    if isinstance(value, list):
        value = {str(i): item for i, item in enumerate(value)}
    if not isinstance(value, Mapping):
        return {prefix.rstrip("/"): value}
    return {k: v for key, item in value.items() for k, v in _flat(item, f"{prefix}{key}/").items()}
