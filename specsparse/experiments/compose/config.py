"""From Hydra's composed config to frozen dataclasses; nothing else in the library sees OmegaConf.

Every mistake becomes a `UserError` that names the key and, for an unknown one, the nearest valid name.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.experiments.compose.parts import PARTS, completed
from specsparse.experiments.settings import RunConfig
from specsparse.speculative.drafters import draw_temperature
from specsparse.support.options import options_of, read

S = TypeVar("S")


def from_omegaconf(cfg: DictConfig | Mapping[str, object]) -> RunConfig:
    """A validated `RunConfig` from Hydra's composed config, but for the keys of its kind; `of_kind` reads those.

    Raises:
        UserError: a missing or mistyped value, a value out of range, a broken interpolation.
    """
    items = cfg.items_ex(resolve=False) if isinstance(cfg, DictConfig) else cfg.items()
    tree = OmegaConf.create({key: value for key, value in items if key != "hydra"})
    _give_way(tree)
    try:
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "config"
        missing = isinstance(error, MissingMandatoryValue)
        raise UserError(f"{key}: {'a value is needed' if missing else str(error).splitlines()[0]}") from error
    assert isinstance(plain, dict)
    read(RunConfig, plain, group="", null=True)  # what is wrong here needs no class of a part, which may import jax
    plain |= {group: completed(group, plain[group]) for group in PARTS if isinstance(plain.get(group), dict)}
    run = read(RunConfig, plain, group="", internal={"composed": plain}, null=True)
    return _drawn(run, run.params)  # fails here, not after the model is loaded


def _give_way(tree: DictConfig) -> None:
    """Takes away a `???` of a choice's file where the option is given under another name of it."""
    for group, registry in PARTS.items():
        part = tree.get(group)
        missing = [key for key in part if OmegaConf.is_missing(part, key)] if isinstance(part, DictConfig) else []
        for key in missing:
            option = registry.options(part.name).get(str(key)) if registry.is_builtin(part.name) else None
            if option is not None and any(alias in part for alias in option.aliases):
                del part[key]


def of_kind(run: RunConfig, owner: type[S]) -> S:
    """What a kind reads of a run: the groups that its class of settings names.

    Raises:
        UserError: a key of the run that is nobody's, or a value that is not the kind's.
    """
    wanted, common = options_of(owner), options_of(RunConfig)
    given = {**{key: getattr(run, key) for key in wanted if key in common}, **run.own}
    return read(owner, given, group="", name=f"kind={run.kind}", null=True)


def _drawn(run: RunConfig, target: SamplingParams) -> RunConfig:
    """`drafter.temperature=null` filled in: verifiers that weigh q want drafts that are drawn from it."""
    options, drawn_at = run.drafter.options, draw_temperature(run.verifier.name, target.temperature)
    if options.get("temperature", 0.0) is not None or drawn_at is None:
        return run
    own = dataclasses.replace(run.drafter, options={**options, "temperature": drawn_at})
    return dataclasses.replace(run, drafter=own)


def choice_options(path: Path) -> dict[str, object]:
    """The options of a choice by its YAML file and its class, without its name; empty where it has none."""
    given = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
    assert isinstance(given, dict)
    given = completed(path.parent.name, given) if path.parent.name in PARTS else given
    return {str(key): value for key, value in given.items() if key != "name"}


def valid_keys() -> list[str]:
    """Every dotted key that all runs have (options of drafters and the like are checked by their owners)."""
    keys = [f"sampling.{name}" for name in options_of(SamplingParams)]
    for name, option in options_of(RunConfig).items():
        inner = options_of(option.hint) if dataclasses.is_dataclass(option.hint) else ()
        keys += [name, *(f"{name}.{sub}" for sub in inner)]
    return keys
