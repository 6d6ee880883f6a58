"""What the trainings share: the `train` group of a config, and the directory that a later run goes on from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self, get_type_hints

from specsparse.engine.gguf.digest import model_digest
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.experiments.kind import Kind
from specsparse.experiments.settings import ModelSettings, OfChoice
from specsparse.support import files
from specsparse.support.options import Count, Range, nearest, options_of, read

_SETTINGS = "settings.json"


@dataclass(frozen=True)
class TrainSpec:
    """What `kind: train_predictors` reads, compares and keeps; the others are `predictors.fit_mlp.FitOptions`."""

    tokens: Count = 4096
    window: Annotated[int, Range(4)] = 128
    judged: Count = 8
    active_share: Annotated[float | None, Range(0, 1, above=True, below=True)] = None
    compare: tuple[str, ...] = ()
    output: str | None = None
    options: OfChoice = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainSettings(ModelSettings):
    """What a training reads of a config."""

    train: TrainSpec = TrainSpec()
    kind: str = ""


class Training(Kind[TrainSettings]):
    """A kind that trains on text: its times are no result, and its model is dense."""

    timed = False
    takes_ffn = False


class TrainKeys:
    """Base of dataclasses whose fields are the dataclasses that the keys of `train` belong to."""

    @classmethod
    def of(cls, cfg: TrainSettings) -> Self:
        """Made of the keys of `train`; see `split`."""
        return cls(**split(cfg, get_type_hints(cls)))


def split(cfg: TrainSettings, owners: Mapping[str, type]) -> dict[str, Any]:
    """The owners (dataclasses), made of the keys that are their options; a key that two have goes to both.

    `seed` and `chat` are the run's. A key that is null stays at its default.

    Raises:
        UserError: an unknown key, or a value of the wrong type or out of range.
    """
    names = {name for owner in owners.values() for name in options_of(owner)}
    if unknown := [name for name in cfg.train.options if name not in names]:
        hint = nearest(unknown[0], [*names, *options_of(TrainSpec)])
        raise UserError(f"train.{unknown[0]} is no option of kind={cfg.kind}{hint}")
    out = {}
    for key, owner in owners.items():
        given = {name: value for name, value in cfg.train.options.items() if name in options_of(owner)}
        of_run = {"seed": cfg.seed, "chat": cfg.data.chat}
        internal = {name: value for name, value in of_run.items() if name in owner.__dataclass_fields__}
        out[key] = read(owner, given, group="train", internal=internal)
    return out


def identity(model: Model, overrides: Mapping[str, object]) -> dict[str, object]:
    """What tells a model from a retrained one of the same name and size."""
    kept = {name: value for name, value in overrides.items() if name != "threads"}
    return {"digest": model_digest(open_gguf(model.path)), "overrides": kept}


def claim(folder: Path, settings: Mapping[str, object]) -> None:
    """Makes the directory that of a training with these settings, or finds that it is already.

    Raises:
        UserError: it holds another training, or cannot be read or written.
    """
    path, wanted = folder / _SETTINGS, json.loads(files.to_json(settings))
    if path.exists():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({error}); remove {folder} to begin again") from error
        different = sorted(key for key in wanted if not isinstance(found, Mapping) or found.get(key) != wanted[key])
        if different:
            raise UserError(
                f"{folder} holds a training with another {different[0]}: give train.output=ANOTHER, or remove it"
            )
    files.write_atomically(path, files.to_json(wanted, indent=1) + "\n")
