"""The keys of `train`, given to the options that they belong to."""

from collections.abc import Mapping
from typing import Any

from specsparse.errors import UserError
from specsparse.experiments.config import RunConfig, TrainSpec
from specsparse.support.options import nearest, options_of, read


def split(cfg: RunConfig, owners: Mapping[str, type]) -> dict[str, Any]:
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
