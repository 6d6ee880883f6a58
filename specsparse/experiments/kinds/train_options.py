"""The keys of `train`, given to the options that they belong to."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from specsparse.errors import UserError
from specsparse.experiments.config import RunConfig
from specsparse.predictors.registry import checked
from specsparse.support.options import nearest

_OF_THE_RUN = ("seed", "chat")


def split(cfg: RunConfig, owners: Mapping[str, type]) -> dict[str, Any]:
    """The owners (dataclasses), made of the keys that are their fields; a key that two have goes to both.

    `seed` and `chat` are the run's. A key that is null stays at its default.

    Raises:
        UserError: an unknown key, or a value of the wrong type or out of range.
    """
    of_run = {"seed": cfg.seed, "chat": cfg.data.chat}
    has = {key: {f.name for f in fields(owner)} for key, owner in owners.items()}
    names = set().union(*has.values()) - set(_OF_THE_RUN)
    given = {key: {name: value for name, value in of_run.items() if name in has[key]} for key in owners}
    for name, value in cfg.train.options.items():
        if name not in names:
            raise UserError(f"unknown key train.{name}{nearest(name, names)}")
        for key, owner in owners.items():
            if value is not None and name in has[key]:
                given[key][name] = _checked(name, get_type_hints(owner)[name], value)
    return {key: owner(**given[key]) for key, owner in owners.items()}


def _checked(name: str, hint: Any, value: Any) -> Any:
    if name != "temperatures":
        return checked(f"train.{name}", hint, value)
    if not isinstance(value, list | tuple) or not all(isinstance(x, int | float) for x in value):
        raise UserError(f"train.{name}={value}: expected a list of numbers")
    return tuple(float(x) for x in value)
