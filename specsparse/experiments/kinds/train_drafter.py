"""`kind: train_drafter`: a head or a draft model, trained on text that the target writes, and how well it drafts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specsparse.data import prompts
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.experiments import trackers
from specsparse.experiments.config import RunConfig
from specsparse.experiments.decoding import Engine
from specsparse.experiments.kind import check_name
from specsparse.experiments.kinds import drafter_training as training
from specsparse.models import catalogue
from specsparse.report.record import RECORD_FILE
from specsparse.runtime import manifest
from specsparse.support import terminal
from specsparse.training import data
from specsparse.training.evaluate import Drafting, evaluate
from specsparse.training.form import Form

CSV_FILE = "curve.csv"
DEFINITIONS = {
    "agreement": "held-out greedy answers: drafts whose token at a place is the answer's, of those right so far",
    "acceptance": "1 + tokens right before the first wrong one, over drafts begun at every position of those answers",
    "loss": "KL(target, drafter) in nats on the step's candidates, by place in the draft",
}


@dataclass(frozen=True)
class Trained:
    """What came out."""

    path: Path
    drafting: Drafting
    form: Form

    @property
    def as_promised(self) -> bool:
        """A drafter promises nothing: whatever it drafts is verified."""
        return True

    @property
    def objective(self) -> float | None:
        """Mean acceptance length."""
        return self.drafting.acceptance


def check(cfg: RunConfig) -> None:
    """Names, options, files and prompts, before anything is loaded.

    Raises:
        UserError: whatever is wrong.
    """
    catalogue.resolve(cfg.model.path)
    training.options(cfg)
    prompts.load(cfg.data.source, tasks=cfg.data.tasks, limit_per_task=cfg.data.limit_per_task)
    trackers.check(cfg.tracker.name, cfg.tracker.options)
    check_name(cfg)


def run(cfg: RunConfig, directory: Path, *, engine: Engine, console: Console) -> Trained:
    """Writes text, trains, exports, judges; each of these goes on where an earlier run of the same output stopped.

    Raises:
        UserError: another training's output directory, or text without answers.
    """
    check(cfg)
    with terminal.loading(console, f"loading {cfg.model.path}") as progress:
        model = engine.load(cfg.model.path, progress=progress, **cfg.model.overrides())
    chosen, folder = training.options(cfg), training.folder_of(cfg, model)
    training.claim(folder, cfg, model)
    found = training.texts(cfg, model, folder, console)
    state, trainer, curve = training.trained(cfg, model, folder, found, console)
    ids, form = np.asarray(state.ids), trainer.form
    path = form.write(folder / f"{_stem(folder, form)}.gguf", state.weights, ids, quant=chosen.own.quantise)
    shape = (chosen.train.rows, chosen.train.drafting)
    answers = held_out(cfg, model, console)
    drafting = evaluate(model, form, state.weights, trainer.frozen(ids), answers, gamma=chosen.own.gamma, shape=shape)
    result = Trained(path, drafting, form)
    _write(cfg, directory, result, curve, console)
    return result


def _stem(folder: Path, form: Form) -> str:
    """The directory's name with that of the form behind it, once."""
    return folder.name if folder.name.endswith(f"-{form.name}") else f"{folder.name}-{form.name}"


def held_out(cfg: RunConfig, model: Any, console: Console) -> list[data.Text]:
    """Greedy answers to the last `train.judged` prompts of each task of `data` that are short enough."""
    chosen = training.options(cfg).data
    source = prompts.load(cfg.data.source, tasks=cfg.data.tasks, limit_per_task=cfg.data.limit_per_task)
    encoded = [(p.task, data.encode(model, p.text, chat=chosen.chat)) for p in source]
    short = [(task, ids) for task, ids in encoded if len(ids) <= chosen.prompt_tokens]
    tasks = dict.fromkeys(task for task, _ in short)
    kept = [ids for task in tasks for ids in [i for t, i in short if t == task][-cfg.train.judged :]]
    if not kept:
        raise UserError(f"no held-out prompt has at most {chosen.prompt_tokens} tokens: raise train.prompt_tokens")
    params = SamplingParams(temperature=0.0, max_tokens=chosen.answer)
    answers = []
    with terminal.counting(console, "answering held-out prompts", len(kept)) as bar:
        for start in range(0, len(kept), chosen.batch):
            part = kept[start : start + chosen.batch]
            answers += data.answer(model, part, [params] * len(part), seed=cfg.seed)
            bar.advance(bar.task_ids[0], len(part))
    return answers


def _write(cfg: RunConfig, directory: Path, result: Trained, curve: Sequence[dict[str, Any]], console: Console) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tracker = trackers.make(cfg.tracker.name, cfg.tracker.options, directory)
    made = manifest.build(cfg.composed, Path(catalogue.resolve(cfg.model.path)))
    (directory / CSV_FILE).write_text(_csv(curve), encoding="utf-8")
    summary = {result.form.name: str(result.path), "drafting": asdict(result.drafting), "curve": list(curve)}
    tracker.finish({
        "name": cfg.name, "kind": cfg.kind, "summary": summary, "definitions": DEFINITIONS,
        "manifest": made, "config": made["config"],
    })  # fmt: skip
    console.print(Text("held-out greedy answers: how often each token of a draft is right", style="bold"))
    console.print(_table(result.drafting))
    form = result.form
    console.print(Text(f"{form.name}: {result.path}; drafter={form.drafter} drafter.{form.option}={result.path}"))
    console.print(Text(f"record: {directory / RECORD_FILE}, {CSV_FILE}", style="dim"))


def _csv(curve: Sequence[dict[str, Any]]) -> str:
    """The curve: a line a checkpoint, a pair of columns a stream."""
    streams = range(len(curve[-1]["loss"])) if curve else ()
    head = ["step", "rows", "seconds", *(f"{name}_{s + 1}" for s in streams for name in ("loss", "agreement"))]
    lines = [",".join(head)]
    for point in curve:
        values = [point["step"], point["rows"], f"{point['seconds']:.1f}"]
        values += [f"{point[name][s]:.4f}" for s in streams for name in ("loss", "agreement")]
        lines.append(",".join(map(str, values)))
    return "\n".join(lines) + "\n"


def _table(drafting: Drafting) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("place", *(str(i + 1) for i in range(len(drafting.agreement))), "acceptance length", "drafts"):
        table.add_column(name, justify="right" if name != "place" else "left")
    row = [f"{a:.3f}" for a in drafting.agreement]
    table.add_row("agreement", *row, f"{drafting.acceptance:.2f}", str(drafting.tokens))
    return table
