"""The `train` group of a config, and its keys, given to the options that they belong to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self, get_type_hints

from specsparse.errors import UserError
from specsparse.experiments.kind import Kind
from specsparse.experiments.settings import ModelSettings, OfChoice
from specsparse.support.options import Count, Range, nearest, options_of, read


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
