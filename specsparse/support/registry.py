"""Choices by name: the built-in ones, a package's own by entry point, and anybody's as `module:Class`."""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from specsparse.errors import UserError
from specsparse.support.options import Option, Rest, nearest, options_of, read, shown

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of a group by name, and its own options, which it checks when it is made."""

    name: str
    options: Annotated[dict[str, Any], Rest()] = dataclasses.field(default_factory=dict)


class Registry(Generic[T]):
    """Classes of one group by name.

    A class is named `module:Class` and imported when it is asked for, so that the names alone cost nothing. It is a
    frozen dataclass, and its fields are its options.

    Attributes:
        group: of the config, such as "drafter"; packages bring their own under the entry points `specsparse.drafters`,
            `specsparse.policies` and so on.
        aliases: other names, and the name each stands for.
    """

    def __init__(
        self, group: str, base: str | tuple[str, ...], package: str = "",
        builtin: Mapping[str, str] = types.MappingProxyType({}),
        aliases: Mapping[str, str] = types.MappingProxyType({}),
    ):  # fmt: skip
        self.group, self._bases = group, (base,) if isinstance(base, str) else base
        self._homes: dict[str, str | type] = {
            name: home if home.startswith("specsparse.") else f"{package}.{home}" for name, home in builtin.items()
        }
        self.aliases = dict(aliases)

    def register(self, name: str, owner: type, *, aliases: tuple[str, ...] = ()) -> None:
        """Makes a class known by name; UserError for a name that is taken or not possible, or another kind of class."""
        for word in (name, *aliases):
            spelled = isinstance(word, str) and re.fullmatch(r"[\w.-]+", word)
            if not spelled or word in self._homes or word in self.aliases:
                why = "is registered already" if spelled else "can be no name: use letters, digits, -, _ and ."
                raise UserError(f"{self.group}={shown(word)} {why}")
        self._check_kind(name, owner)
        self._homes[name] = owner
        self.aliases |= dict.fromkeys(aliases, name)

    def names(self) -> list[str]:
        """All names, without aliases: the built-in and registered ones, then those of installed packages."""
        return list(dict.fromkeys([*self._homes, *entry_points(self.group)]))

    def canonical(self, name: str) -> str:
        """The name that an alias stands for; any other as it is."""
        return self.aliases.get(name, name)

    def is_builtin(self, name: str) -> bool:
        """Whether the name, or alias, is built in or registered."""
        return self.canonical(name) in self._homes

    def holds(self, name: str) -> bool:
        """Whether the name is known, or is a `module:Class` that may be."""
        name = str(name)
        return self.is_builtin(name) or ":" in name or name in entry_points(self.group)

    def look(self, name: str) -> Any:
        """The class, or whatever else, behind a name, an alias or `module:Class`; UserError names the nearest."""
        key = self.canonical(str(name))
        home = self._homes.get(key) or (key if ":" in key else entry_points(self.group).get(key))
        if home is None:
            raise UserError(f"{self.group}={name} is unknown{nearest(key, [*self.names(), *self.aliases])}")
        return home if isinstance(home, type) else load(home, f"{self.group}={name}")

    def find(self, name: str) -> type[T]:
        """The class of a name, an alias, or `module:Class`; UserError, too, for one of another kind or not finished."""
        found = self.look(name)
        if not self.is_builtin(name):
            self._check_kind(name, found)
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            raise UserError(f"{self.group}={name} has no {', '.join(missing)}: see {self._named_bases()}")
        return found

    def options(self, name: str) -> Mapping[str, Option]:
        """The options of a choice by name; see `find`. UserError, too, if it is no frozen dataclass."""
        found: Any = self.find(name)
        if not dataclasses.is_dataclass(found) or not found.__dataclass_params__.frozen:
            raise UserError(f"{self.group}={name} must be a dataclass: put @dataclass(frozen=True) above the class")
        return options_of(found)

    def make(self, name: str, options: Mapping[str, object]) -> Any:
        self.options(name)  # it is a frozen dataclass
        return read(self.find(name), options, group=self.group, name=str(name))

    def _check_kind(self, name: str, found: object) -> None:
        """Refuses what is not derived from one of the bases."""
        bases = tuple(load(base, self.group) for base in self._bases)
        if not (isinstance(found, type) and issubclass(found, bases)):
            raise UserError(f"{self.group}={name} is no {bases[0].__name__}: derive it from {self._named_bases()}")

    def _named_bases(self) -> str:
        return " or ".join(base.replace(":", ".") for base in self._bases)


def entry_points(group: str) -> dict[str, str]:
    """The parts of a group that installed packages bring, `module:Class` by name."""
    plural = f"{group[:-1]}ies" if group.endswith("y") else f"{group}s"
    return {point.name: point.value for point in importlib.metadata.entry_points(group=f"specsparse.{plural}")}


def load(home: str, label: str) -> Any:
    """What `module:name` names; the module may lie in the current folder. UserError says why it cannot be had."""
    module, _, name = home.partition(":")
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module) or not name or module.endswith(".py"):
        form = f"{Path(module).stem or 'mine'}:{name or 'NAME'}"
        raise UserError(f"{label}: write MODULE:NAME, a module in this folder or on PYTHONPATH, such as {form}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = importlib.import_module(module)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        why = f"importing {module} failed: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            why = f"there is no module {module} in the current folder or on PYTHONPATH"
            if error.name and module.split(".")[0] != error.name.split(".")[0]:
                why = f"{module} needs {error.name}, which is not installed"
        raise UserError(f"{label}: {why}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            there = getattr(found, "__dict__", {})
            own = [key for key, value in there.items() if getattr(value, "__module__", None) == module]
            raise UserError(f"{label}: module {module} has no {name}{nearest(part, own)}")
        found = getattr(found, part)
    return found


def source_of(home: str) -> list[Path]:
    """The file of a `module:name`'s module, if it has one; results that it brought are told from those of another."""
    module = importlib.util.find_spec(home.partition(":")[0]) if ":" in home else None
    return [Path(module.origin)] if module and module.has_location and module.origin else []
