"""What Hydra knows beside the files of `conf/`: models of the catalogue, options of parts, and parts of elsewhere."""

import re
from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from specsparse.experiments.compose.parts import PARTS
from specsparse.models import catalogue
from specsparse.support.files import conf_dir
from specsparse.support.registry import entry_points

OPEN_GROUPS = (*PARTS, "predictor")
"""Groups of the config that take a user's own part."""


def offer(argv: Sequence[str] = ()) -> None:
    """Makes them known to Hydra's composition from here on.

    The names of the catalogue are choices of the `model` group. A group of `PARTS` takes any option: the class of its
    choice says which there are, when the config is read, so that no class is imported to compose it. A part that the
    command line names and no file has, `drafter=module:Class` or the name of another package's, is a choice too.

    Raises:
        UserError: a file of the user's folder that is no entry.
    """
    store = ConfigStore.instance()
    for entry in catalogue.entries().values():
        for name in (entry.name, *entry.aliases):
            store.store(group="model", name=name, node={"defaults": ["custom", "_self_"], "path": entry.name})
    store.store(name="parts", node={group: _open() for group in PARTS})
    for group, _, names in (arg.partition("=") for arg in argv):
        for name in names.split(",") if group in OPEN_GROUPS else ():
            if is_outside(group, name):
                store.store(group=group, name=name, node=_open(name=name))
    # Hydra copies its sources for every group that --help lists, and this one store with them; it is only read here.
    store.__deepcopy__ = lambda memo: store  # type: ignore[attr-defined]


def _open(**content: Any) -> DictConfig:
    """A group of the config that takes keys which it does not have."""
    return OmegaConf.create(content, flags={"struct": False})


def is_outside(group: str, name: str) -> bool:
    """Whether the choice is somebody's own part: a `module:Class`, or an installed package's entry point."""
    if (conf_dir() / group / f"{name}.yaml").is_file():
        return False
    return bool(re.fullmatch(r"[\w.]+:[\w.]+", name)) or name in entry_points(group)
