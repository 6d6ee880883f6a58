"""The parts of a method as a config names them: `GROUP.name`, and beside it the options of that choice.

The file of a choice in `conf/` says the name and what differs from the defaults, which are those of the choice's class.
"""

from collections.abc import Mapping
from typing import Any

from specsparse.speculative.verifiers.registry import RULES
from specsparse.support.options import options_of
from specsparse.support.registry import Registry

PARTS: Mapping[str, Registry[Any]] = {"verifier": RULES}
"""Registries by group."""


def completed(group: str, given: Mapping[str, object]) -> dict[str, object]:
    """A group of the config with all options of a built-in choice, as plain values; any other as it is.

    Raises:
        UserError: an option that the choice does not have (with the nearest), or a bad value.
    """
    name = given.get("name")
    if not isinstance(name, str) or not PARTS[group].is_builtin(name):
        return dict(given)
    found = PARTS[group].read(name, {key: value for key, value in given.items() if key != "name"})
    return {"name": name} | {option: _plain(getattr(found, option)) for option in options_of(type(found))}


def option_name(group: str, key: str) -> str:
    """The name of an option that other projects call `key`."""
    return PARTS[group].option_names().get(key, key)


def _plain(value: object) -> object:
    """As YAML and JSON have it."""
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
