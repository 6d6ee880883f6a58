"""The shared part of the trainings: the `train` group of a config, and the directory that a later run goes on from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from specsparse.engine.gguf.reader import model_digest, open_gguf
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.experiments.kind import Kind, RunContext
from specsparse.experiments.settings import ModelSettings
from specsparse.experiments.trackers.base import Series
from specsparse.support import files
from specsparse.support.options import Count, Range, Rest, nearest, options_of, read
from specsparse.training.corpus import DataOptions, Text, TextWritten, generate, read_shard

STATE = "state.safetensors"
"""The checkpoint of a training."""
TRAINING = Series(
    "training", "step", least=("loss", "divergence", "perplexity"), most=("acceptance", "live", "agreement")
)
TEXT = Series("text", "tokens")


@dataclass(frozen=True)
class TrainSpec:
    """The group `train`: `window`, `active_share` and `compare` are of train_predictors; `options` those of a kind."""

    tokens: Count = 4096
    window: Annotated[int, Range(4)] = 128
    judged: Count = 8
    active_share: Annotated[float | None, Range(0, 1, above=True, below=True)] = None
    compare: tuple[str, ...] = ()
    output: str | None = None
    options: Annotated[dict[str, Any], Rest()] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainSettings(ModelSettings):
    train: TrainSpec = TrainSpec()
    kind: str = ""


class Training(Kind[TrainSettings]):
    """A kind that trains on text: its times are no result, and its model is dense."""

    timed = False
    resumes = True
    takes_ffn = False


def options(cfg: TrainSettings, *owners: type) -> list[Any]:
    """The keys of `train` by the dataclasses that they belong to; a key that two have goes to both.

    `seed` and `chat` are the run's. A key that is null stays at its default. UserError: a key that nobody has, or a
    value of the wrong type or out of range.
    """
    names = {name for owner in owners for name in options_of(owner)}
    if unknown := [name for name in cfg.train.options if name not in names]:
        hint = nearest(unknown[0], [*names, *options_of(TrainSpec)])
        raise UserError(f"train.{unknown[0]} is no option of kind={cfg.kind}{hint}")
    out, of_run = [], {"seed": cfg.seed, "chat": cfg.data.chat}
    for owner in owners:
        given = {name: value for name, value in cfg.train.options.items() if name in options_of(owner)}
        internal = {name: value for name, value in of_run.items() if name in owner.__dataclass_fields__}
        out.append(read(owner, given, group="train", internal=internal))
    return out


def claim(folder: Path, cfg: TrainSettings, model: Model | None, settings: Mapping[str, object]) -> None:
    """Makes the directory that of a training with these settings, of this model if it needs one. UserError: it holds
    another one."""
    if model is not None:
        overrides = {name: value for name, value in cfg.model.overrides().items() if name != "threads"}
        settings = {"model": {"digest": model_digest(open_gguf(model.path)), "overrides": overrides}, **settings}
    path, wanted = folder / "settings.json", json.loads(files.to_json(settings))
    found = files.kept(path)
    different = sorted(key for key in wanted if found.get(key) != wanted[key])
    if path.exists() and different:
        raise UserError(
            f"{folder} holds a training with another {different[0]}: give train.output=ANOTHER, or remove it"
        )
    files.write_atomically(path, files.to_json(wanted, indent=1) + "\n")


def own_texts(
    cfg: TrainSettings, data: DataOptions, model: Model, folder: Path, ctx: RunContext
) -> tuple[list[Text], TextWritten]:
    """Answers of `train.tokens` tokens that the model writes into the folder if they are not there yet."""
    wanted, written = cfg.train.tokens, TextWritten(0, 0.0)
    with ctx.counting("writing text", wanted) as step:

        def progress(found: TextWritten) -> None:
            nonlocal written
            written = found
            rate = f"writing text, {found.tokens_per_s:,.0f} tokens/s" if found.tokens_per_s else "reading text"
            step(min(found.tokens, wanted), rate)
            ctx.tracker.point(TEXT, {"tokens": found.tokens, "tokens_per_second": found.tokens_per_s or None})

        paths = generate(model, data, folder, tokens=wanted, progress=progress)
    return [text for path in paths for text in read_shard(path)], written
