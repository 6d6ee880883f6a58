"""The parts of a method as a config names them: `GROUP.name`, and beside it the options of that choice.

The file of a choice in `conf/` says the name and what differs from the defaults, which are those of the choice's class.
"""

import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

from specsparse.errors import UserError
from specsparse.speculative.drafters import DRAFTERS
from specsparse.speculative.gamma import GAMMA_NAMES
from specsparse.speculative.policies import POLICIES
from specsparse.speculative.trees import CHAIN, TREES
from specsparse.speculative.verifiers import RULES
from specsparse.support.options import values_of
from specsparse.support.registry import Registry

PARTS: Mapping[str, Registry[Any]] = {"drafter": DRAFTERS, "policy": POLICIES, "tree": TREES, "verifier": RULES}
"""Registries by group."""


ELSEWHERE = {"max_nodes": "policy.gamma", "policy": "policy=NAME", "tree": "tree=NAME"}
"""Options of drafters that have a group of their own in the config."""
NOTHING = {"drafter": "none", "tree": CHAIN}
"""Choices that are no part, and have no options."""


def completed(group: str, given: Mapping[str, object]) -> dict[str, object]:
    """A group of the config with all options of a built-in choice, as plain values; any other as it is.

    Raises:
        UserError: an option that the choice does not have (with the nearest), or a bad value.
    """
    name, own = given.get("name"), {key: value for key, value in given.items() if key != "name"}
    if name == NOTHING.get(group) and own:
        raise UserError(f"{group}.{next(iter(own))} is no option of {group}={name}")
    if not isinstance(name, str) or not PARTS[group].is_builtin(name):
        same = GAMMA_NAMES if group == "policy" else ()
        return {"gamma" if key in same else key: value for key, value in given.items()}
    options = PARTS[group].options(name)
    names = {alias: key for key, option in options.items() for alias in option.aliases} | {key: key for key in options}
    spelled = {names.get(key, key): key for key in own}  # of two names of an option the one that came later counts
    for option, key in spelled.items():
        if option in ELSEWHERE and own[key] is not None:
            raise UserError(f"write {ELSEWHERE[option]} instead of {group}.{key}")
    values = values_of(PARTS[group].make(name, {key: own[key] for key in spelled.values()}))
    return {"name": name} | {key: value for key, value in values.items() if key not in ELSEWHERE}


class Described(NamedTuple):
    """An option as a reader needs it: its name, its default, other projects' names of it, and what it means."""

    name: str
    default: object
    also: tuple[str, ...]
    about: str


def described(group: str, name: str) -> list[Described]:
    """The options of a choice that the config has no group of its own for.

    Raises:
        UserError: an unknown name.
    """
    if name == NOTHING.get(group):
        return []
    defaults, options = values_of(PARTS[group].make(name, {})), PARTS[group].options(name).values()
    return [Described(o.name, defaults[o.name], o.aliases, o.about) for o in options if o.name not in ELSEWHERE]


def help_text(group: str, name: str) -> str:
    """The options of a choice, one below the other; "" where it has none."""
    rows = [(f"{group}.{o.name}={'null' if o.default is None else o.default}", o.about) for o in described(group, name)]
    width = max((len(left) for left, _ in rows), default=0) + 2
    return "\n".join(
        textwrap.fill(about, 110, initial_indent=left.ljust(width), subsequent_indent=" " * width)
        for left, about in rows
    )
