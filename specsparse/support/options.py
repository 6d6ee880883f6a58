"""The one option schema: a dataclass and values by name -> a checked instance, or one line that says what is wrong.

The fields of a frozen dataclass are its options. A type says what a value is; what a type cannot say is `Annotated`:

    @dataclass(frozen=True)
    class PromptLookup:
        nodes: Annotated[int, Range(1, 512), Also("gamma", "num_speculative_tokens")] = 10
        rule: Literal["hot", "gate"] = "hot"

Options that must fit each other are compared in `__post_init__`.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union

from specsparse.errors import UserError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a number; `above` and `below` leave out `low` and `high`, `besides` allows others, as -1 for all."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    besides: tuple[float, ...] = ()
    below: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value is allowed; NaN and infinities only if `besides` has them."""
        inside = self.low < value if self.above else self.low <= value
        inside = inside and (value < self.high if self.below else value <= self.high)
        return (inside and -math.inf < value < math.inf) or value in self.besides

    def __str__(self) -> str:
        low, high, *besides = (str(v) if isinstance(v, int) else f"{v:g}" for v in (self.low, self.high, *self.besides))
        bounds = [f"{'above' if self.above else 'at least'} {low}"] if self.low > -math.inf else []
        bounds += [f"{'below' if self.below else 'at most'} {high}"] if self.high < math.inf else []
        return " or ".join([" and ".join(bounds), *besides])


class Also(tuple[str, ...]):
    """Other names of an option, those of other projects: `Also("gamma", "draft_max")`."""

    def __new__(cls, *names: str):
        return super().__new__(cls, names)


@dataclasses.dataclass(frozen=True)
class Read:
    """How a value without a plain type is read: `by` raises ValueError, TypeError or OSError if it is not a `text`."""

    by: Callable[[Any], object]
    text: str


def instance_of(text: str, *kinds: type) -> Read:
    """Takes instances of classes as they are; `text` says what they are, for the message."""

    def checked(value: object) -> object:
        if not isinstance(value, kinds):
            raise TypeError
        return value

    return Read(checked, text)


class Internal:
    """A field that is no option: given by the program, never by the user."""


class Inline:
    """A field of another dataclass, whose options are given beside the others. Its default has their defaults."""


class Rest:
    """A field that takes all values of other names, unchecked: the options of a choice that is made later."""


Count = Annotated[int, Range(1)]
Size = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, 2**64 - 1)]
Positive = Annotated[float, Range(0, above=True)]
Share = Annotated[float, Range(0, 1, above=True)]


class OptionError(UserError):
    """An option's value that is not what is `wanted`."""

    def __init__(self, label: str, value: object, wanted: str):
        super().__init__(f"{label}={shown(value)} must be {wanted}")
        self.wanted = wanted


class Option(NamedTuple):
    name: str  # of its field
    hint: Any  # its type
    marks: tuple[object, ...]  # what is annotated
    default: Any  # `dataclasses.MISSING` if a value is needed
    about: str  # its line in the class's docstring, or ""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Its other names; also those annotated inside a union."""
        marks = [*self.marks, *(mark for part in typing.get_args(self.hint) for mark in _parts(part)[1])]
        return tuple(name for mark in marks if isinstance(mark, Also) for name in mark)

    def has(self, *kinds: type) -> bool:
        return any(isinstance(mark, kinds) for mark in self.marks)


@functools.cache
def options_of(owner: type) -> Mapping[str, Option]:
    """The options of a dataclass by name, in order: its fields, but for `Internal` and `Rest`, and those `Inline`."""
    out: dict[str, Option] = {}
    for field in _fields(owner):
        if field.has(Inline):
            own = options_of(field.hint)
            given = {} if field.default is dataclasses.MISSING else vars(field.default)
            out |= {name: option._replace(default=given.get(name, option.default)) for name, option in own.items()}
        elif not field.has(Internal, Rest):
            out[field.name] = field
    return types.MappingProxyType(out)


def read(
    owner: type[T], given: Mapping[str, object], *,
    group: str, name: str = "", internal: Mapping = {}, null: bool = False,
) -> T:  # fmt: skip
    """An instance of a dataclass from values by option name. UserError: an unknown option (with the nearest), one given
    under two names, a missing one, or a bad value.

    Args:
        given: values; None leaves an option at its default, unless its type has None.
        group: stands before the option in messages, such as "drafter".
        name: of the choice in the group, for messages.
        internal: values of the fields marked `Internal`.
        null: None is a value like any other, and refused if the type does not have it.
    """
    options, label = options_of(owner), f"{group}." if group else ""
    rest = next((field.name for field in _fields(owner) if field.has(Rest)), None)
    names = {alias: key for key, option in options.items() for alias in option.aliases} | {key: key for key in options}
    values: dict[str, Any] = {}
    others: dict[str, object] = {}
    source: dict[str, str] = {}
    for key, value in given.items():
        if key not in names and rest:
            others[str(key)] = value
            continue
        if key not in names:
            raise UserError(f"{label}{key} is no option{name and f' of {name}'}{nearest(str(key), names)}")
        option = options[names[key]]
        if value is None and not null and not _takes_none(option.hint):
            continue
        if option.name in values:
            raise UserError(f"{label}{source[option.name]} and {label}{key} are one option: give one of them")
        if null and dataclasses.is_dataclass(option.hint) and isinstance(value, Mapping):
            value = read(option.hint, value, group=f"{label}{key}", null=True)
        values[option.name], source[option.name] = checked(option, value, f"{label}{key}"), key
    for option in options.values():
        if option.default is dataclasses.MISSING and option.name not in values:
            raise UserError(f"{label}{option.name}: a value is needed")
    for field in _fields(owner):
        if field.has(Inline):
            own = {key: values.pop(key) for key in options_of(field.hint) if key in values}
            missing = field.default is dataclasses.MISSING
            values[field.name] = field.hint(**own) if missing else dataclasses.replace(field.default, **own)
    return owner(**values, **({rest: others} if rest else {}), **internal)


def checked(option: Option, value: object, label: str) -> Any:
    """The value as the option's type; UserError, with the `label`, if it has another type or is out of range."""
    return _value(option.hint, option.marks, value, label)


def check_at_most(group: str, part: object, **limits: str) -> None:
    """Refuses an option that is larger than the one that limits it, both by name; None is not given."""
    for name, limit in limits.items():
        value, most = getattr(part, name), getattr(part, limit)
        if value is not None and most is not None and value > most:
            raise UserError(f"{group}.{name}={value} must be at most {group}.{limit}={most}")


def values_of(options: object) -> dict[str, object]:
    """Each option of an instance, those of its `Inline` parts among them, and its value as YAML and JSON have it."""
    whole = vars(options)
    parts = (whole[field.name] for field in _fields(type(options)) if field.has(Inline))
    whole = whole | {key: value for part in parts for key, value in vars(part).items()}
    return {name: as_yaml(whole[name]) for name in options_of(type(options))}


def as_yaml(value: object) -> object:
    """A value as YAML and JSON have it: tuples are lists, and paths are text."""
    if isinstance(value, list | tuple):
        return [as_yaml(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def shown(value: object) -> str:
    """A value as messages have it: on one line, and cut if it is long."""
    try:
        text = "null" if value is None else " ".join((value if isinstance(value, str) else repr(value)).split())
    except ValueError:  # Python writes no number of more digits than it is told to
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint for a name that is not valid, beginning with "; ": the nearest one, or all if none is near."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; valid: {', '.join(names) or 'none'}"


def _value(hint: Any, marks: Sequence[object], value: object, label: str) -> object:
    reader = next((mark for mark in marks if isinstance(mark, Read)), None)
    if reader and not (value is None and _takes_none(hint)):
        try:
            return reader.by(value)
        except (ValueError, TypeError, OSError):
            raise OptionError(label, value, reader.text) from None
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        return _value(*_parts(hint), value, label)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        wanted = []
        for kind in args:
            try:
                if kind is not type(None):
                    return _value(kind, marks, value, label)
            except OptionError as error:
                wanted.append(error.wanted)
        raise OptionError(label, value, " or ".join(wanted))
    if origin is Literal:
        if not any(value is arg or (type(value) is type(arg) and value == arg) for arg in args):
            raise OptionError(label, value, f"{'one of ' if len(args) > 1 else ''}{', '.join(map(str, args))}")
        return value
    if origin in (tuple, Sequence) or hint is tuple:
        value = (value,) if isinstance(value, str) and args[:1] == (str,) else value  # one text is a list of it
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence | Set):
            raise OptionError(label, value, "a list, such as [a,b]")
        return tuple(_value(args[0] if args else Any, (), item, label) for item in value)
    is_group = dataclasses.is_dataclass(hint) and not isinstance(value, hint)
    if is_group or origin in (dict, Mapping) or hint is dict:
        if not isinstance(value, Mapping):
            raise OptionError(label, value, "a group of values")
        return read(hint, value, group=label) if is_group else dict(value)
    return _plain(hint, [mark for mark in marks if isinstance(mark, Range)], value, label)


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _plain(hint: type, ranges: Sequence[Range], value: Any, label: str) -> object:
    given, real = value, isinstance(value, numbers.Real) and not isinstance(value, bool)
    if hint is float and real:
        try:
            value = float(value)
        except OverflowError:  # a whole number too long for a float
            value = math.inf
    elif hint is int and real and isinstance(value, numbers.Integral):
        value = int(value)
    elif hint is str and real:
        value = str(value)
    fits = isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool)
    if not fits or not all(bounds.holds(value) for bounds in ranges):
        wanted = _NAMES.get(hint) or f"a {getattr(hint, '__name__', hint)}"
        limits = [f"of {bounds}" if str(bounds).startswith("at ") else str(bounds) for bounds in ranges]
        raise OptionError(label, given, " ".join([wanted, *limits]))
    return value


@functools.cache
def _fields(owner: type) -> tuple[Option, ...]:
    """The fields that are given when an instance is made, in the order of the signature, as options."""
    if not dataclasses.is_dataclass(owner):
        raise TypeError(f"{owner.__name__} is no dataclass: its fields are its options")
    hints, about, out = typing.get_type_hints(owner, include_extras=True), _attributes(owner), []
    for field in sorted(dataclasses.fields(owner), key=lambda field: field.kw_only is True):
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        if field.init:
            out.append(Option(field.name, *_parts(hints[field.name]), default, about.get(field.name, "")))
    return tuple(out)


def _parts(hint: Any) -> tuple[Any, tuple[object, ...]]:
    return (hint.__origin__, hint.__metadata__) if typing.get_origin(hint) is Annotated else (hint, ())


def _takes_none(hint: object) -> bool:
    return hint is Any or type(None) in typing.get_args(hint)


def _attributes(owner: type) -> dict[str, str]:
    """The lines of each attribute in the docstrings of a class and its bases."""
    out: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        _, _, section = text.partition("Attributes:\n")
        for found in re.finditer(r"^ +([\w, ]+): (.*(?:\n {8,}.*)*)", section.split("\n\n")[0], re.MULTILINE):
            out |= dict.fromkeys(found[1].split(", "), " ".join(found[2].split()))
    return out
