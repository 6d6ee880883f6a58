"""Text, drafter and checkpoints in a directory that a later run goes on from."""

import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

import numpy as np
from rich.console import Console

from specsparse.experiments.config import RunConfig
from specsparse.experiments.kinds.training import folder as folders
from specsparse.experiments.kinds.training import options as train_options
from specsparse.support import terminal
from specsparse.support.options import Count
from specsparse.support.tensor_files import load_state, save_state
from specsparse.training.data import DataOptions, Text, generate, read_shard
from specsparse.training.form import Form
from specsparse.training.head_form import HeadForm
from specsparse.training.small import SmallOptions
from specsparse.training.small_form import SmallForm
from specsparse.training.trainer import Losses, Trainer, TrainOptions, TrainState, run

_TEXTS, _STATE = "texts", "state.safetensors"


@dataclass(frozen=True)
class OwnOptions:
    """What is neither text nor training; see conf/experiment/train_drafter.yaml."""

    form: Literal["head", "model"] = "head"
    texts: str | None = None
    gamma: Count = 4
    save_every: Count = 25
    quantise: str = "Q8_0"


@dataclass(frozen=True)
class Options:
    """The keys of `train`, by what they belong to."""

    own: OwnOptions
    data: DataOptions
    train: TrainOptions
    small: SmallOptions


def options(cfg: RunConfig) -> Options:
    """The options of `train`.

    Raises:
        UserError: an unknown one, or a value of the wrong type or out of range.
    """
    return Options(**train_options.split(cfg, get_type_hints(Options)))


def folder_of(cfg: RunConfig, model: Any) -> Path:
    """Where a training keeps its files."""
    end = "" if options(cfg).own.form == "head" else "-draft"
    return Path(cfg.train.output or Path("heads") / f"{Path(model.path).stem}{end}")


def form_of(cfg: RunConfig, model: Any) -> Form:
    """What is trained."""
    chosen = options(cfg)
    return HeadForm(model) if chosen.own.form == "head" else SmallForm(model, chosen.small, cfg.seed)


def claim(folder: Path, cfg: RunConfig, model: Any) -> None:
    """Makes the directory this training's, or finds that it is already.

    The number of steps, their rates and the amount of text may change between two runs; nothing else may.

    Raises:
        UserError: it holds another training.
    """
    found = options(cfg)
    shape = {n: getattr(found.train, n) for n in ("draft_vocab", "seed")}
    text = {f.name: getattr(found.data, f.name) for f in fields(found.data)}
    if found.own.form != "head":
        shape |= asdict(found.small)
    folders.claim(folder, {
        "model": folders.identity(model, cfg.model.overrides()), "text": text, found.own.form: shape,
    })  # fmt: skip


def texts(cfg: RunConfig, model: Any, folder: Path, console: Console) -> list[Text]:
    """Answers of `train.tokens` tokens, made where they are not there yet."""
    wanted, chosen = cfg.train.tokens, options(cfg)
    with terminal.counting(console, "writing text", wanted) as bar:
        paths = generate(
            model, chosen.data, Path(chosen.own.texts or folder / _TEXTS), tokens=wanted,
            progress=lambda done: bar.update(bar.task_ids[0], completed=min(done, wanted)),
        )  # fmt: skip
    return [text for path in paths for text in read_shard(path)]


def trained(
    cfg: RunConfig, model: Any, folder: Path, found: list[Text], console: Console
) -> tuple[TrainState, Trainer, list[dict[str, Any]]]:
    """The state after the last step, its trainer, and the curve: losses and tokens seen at each checkpoint."""
    chosen = options(cfg)
    trainer = Trainer(model, chosen.train, form_of(cfg, model))
    path = folder / _STATE
    if path.exists():
        state, meta = load_state(path, trainer.like())
        curve = meta["curve"]
    else:
        state, curve = trainer.start(found), []
    seen = [curve[-1]["rows"] if curve else 0]
    recent: list[Losses] = []
    begun = time.perf_counter()
    with terminal.counting(console, "training", chosen.train.steps) as bar:
        bar.update(bar.task_ids[0], completed=int(state.step))

        def on_step(state: TrainState, losses: Losses, rows: int) -> None:
            seen[0] += rows
            recent.append(losses)
            step = int(state.step)
            if step % chosen.own.save_every == 0 or step == chosen.train.steps:
                curve.append(_point(step, seen[0], recent, time.perf_counter() - begun))
                save_state(path, state, {"curve": curve})
                recent.clear()
            bar.update(bar.task_ids[0], completed=step)

        state = run(trainer, state, found, on_step=on_step)
    return state, trainer, curve


def _point(step: int, rows: int, recent: list[Losses], seconds: float) -> dict[str, Any]:
    """One point of the curve."""
    loss, agreement = (np.mean([np.asarray(x) for x in each], axis=0).tolist() for each in zip(*recent, strict=True))
    return {"step": step, "rows": rows, "loss": loss, "agreement": agreement, "seconds": seconds}
