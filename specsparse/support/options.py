"""The one option schema: a dataclass and values by name -> a checked instance, or one line that says what is wrong.

The fields of a frozen dataclass are its options. A type says what a value is; what a type cannot say is `Annotated`:

    @dataclass(frozen=True)
    class PromptLookup:
        nodes: Annotated[int, Range(1, 512), Also("gamma", "num_speculative_tokens")] = 10
        rule: Literal["hot", "gate"] = "hot"

Nothing here imports jax, so that a mistyped option is answered at once.
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
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, Union

from specsparse.errors import UserError

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

_NEAR = 0.7
"""Least likeness of two keys of which one may be a slip for the other."""
_AS_NEAR = 0.15
"""A key less like than the best by more than this is not named beside it."""


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a number.

    Attributes:
        low, high: least and largest value.
        above, below: whether `low`, or `high`, itself is outside.
        besides: values that are allowed all the same, such as -1 for all.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    besides: tuple[float, ...] = ()
    below: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value is allowed; NaN and infinities are not, but for those of `besides`."""
        inside = self.low < value if self.above else self.low <= value
        inside = inside and (value < self.high if self.below else value <= self.high)
        return (inside and -math.inf < value < math.inf) or value in self.besides

    def __str__(self) -> str:
        bounds = []
        if self.low > -math.inf:
            bounds.append(f"{'above' if self.above else 'at least'} {_number(self.low)}")
        if self.high < math.inf:
            bounds.append(f"{'below' if self.below else 'at most'} {_number(self.high)}")
        text = " and ".join(bounds)
        return " or ".join([text, *map(_number, self.besides)])


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


@dataclasses.dataclass(frozen=True, init=False)
class Also:
    """Other names of an option, those of other projects."""

    names: tuple[str, ...]

    def __init__(self, *names: str):
        object.__setattr__(self, "names", names)


@dataclasses.dataclass(frozen=True)
class Read:
    """How a value without a plain type is read.

    Attributes:
        by: value -> value; raises ValueError, TypeError or OSError where it cannot be read.
        text: what the value must be, for the message.
    """

    by: Callable[[Any], object]
    text: str


@dataclasses.dataclass(frozen=True)
class Internal:
    """A field that is no option: given by the program, never by the user."""


@dataclasses.dataclass(frozen=True)
class Inline:
    """A field that is a dataclass of options of its own, which are given beside the others; their defaults are those of
    the field's."""


@dataclasses.dataclass(frozen=True)
class Rest:
    """A field that takes all values whose names are no option, unchecked: those of a choice that is made later."""


class OptionError(UserError):
    """An option's value that is not what is `wanted`."""

    def __init__(self, label: str, value: object, wanted: str):
        super().__init__(f"{label}={shown(value)} must be {wanted}")
        self.wanted = wanted


def shown(value: object) -> str:
    """A value as messages have it: on one line, and cut where it is long."""
    try:
        text = "null" if value is None else " ".join((value if isinstance(value, str) else repr(value)).split())
    except ValueError:  # Python writes no number of more digits than it is told to
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def only_known(function: Callable[P, R], name: str = "") -> Callable[P, R]:
    """The function; a keyword that it does not have is refused as an unknown option is.

    `name` is its own for the message, by default as it is defined.
    """
    known, called = list(inspect.signature(function).parameters), name or function.__name__

    @functools.wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> R:
        for key in given:
            if key not in known:
                raise UserError(f"{called}() has no option {shown(key)}{nearest(key, known)}")
        return function(*args, **given)

    return call


Count = Annotated[int, Range(1)]
"""A whole number of at least 1."""
Size = Annotated[int, Range(0)]
"""A whole number of at least 0."""
Seed = Annotated[int, Range(0, 2**64 - 1)]
"""Of noise, 64 bits."""
Positive = Annotated[float, Range(0, above=True)]
"""A number above 0."""
Share = Annotated[float, Range(0, 1, above=True)]
"""A number above 0 and at most 1."""


class Option(NamedTuple):
    """One option of a class.

    Attributes:
        name: of its field.
        hint: its type, without what is annotated.
        marks: what is annotated.
        default: `dataclasses.MISSING` where a value is needed.
        about: its line in the class's docstring, or "".
    """

    name: str
    hint: object
    marks: tuple[object, ...]
    default: object
    about: str

    @property
    def aliases(self) -> tuple[str, ...]:
        """Its other names, those of a type that may be None among them."""
        marks = [*self.marks, *(mark for part in typing.get_args(self.hint) for mark in _parts(part)[1])]
        return tuple(name for mark in marks if isinstance(mark, Also) for name in mark.names)


@functools.cache
def options_of(owner: type) -> Mapping[str, Option]:
    """The options of a dataclass by name, in order; fields marked `Internal` or `Rest` are none, `Inline` ones several.

    Raises:
        TypeError: it is no dataclass.
    """
    if not dataclasses.is_dataclass(owner):
        raise TypeError(f"{owner.__name__} is no dataclass: its fields are its options")
    about, out = _attributes(owner), {}
    for field, hint, marks in _fields(owner):
        if _marked(marks, Inline):
            of_field = _default(field)
            for name, option in options_of(hint).items():
                default = option.default if of_field is dataclasses.MISSING else getattr(of_field, name)
                out[name] = option._replace(default=default)
        elif not _marked(marks, Internal | Rest):
            out[field.name] = Option(field.name, hint, marks, _default(field), about.get(field.name, ""))
    return types.MappingProxyType(out)


def read(
    owner: type[T], given: Mapping[str, object], *,
    group: str, name: str = "", internal: Mapping = {}, null: bool = False,
) -> T:  # fmt: skip
    """An instance of a dataclass from values by option name.

    Args:
        owner: the class.
        given: values; None leaves an option at its default, unless its type has None.
        group: what stands before the option in messages, such as "drafter"; "" for nothing.
        name: of the choice in the group, for the message; by default none.
        internal: values of fields that are no options.
        null: None is a value like any other, and refused where the type does not have it.

    Raises:
        UserError: an unknown option (with the nearest), one given under two names, a missing one, or a bad value.
    """
    options, label = options_of(owner), f"{group}." if group else ""
    rest = next((field.name for field, _, marks in _fields(owner) if _marked(marks, Rest)), None)
    names = {alias: key for key, option in options.items() for alias in option.aliases} | {key: key for key in options}
    values: dict[str, Any] = {rest: {}} if rest else {}
    source: dict[str, str] = {}
    for key, value in given.items():
        if key not in names and rest:
            values[rest][str(key)] = value
            continue
        if key not in names:
            whose = f" of {name}" if name else ""
            raise UserError(f"{label}{key} is no option{whose}{nearest(str(key), names)}")
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
    for field, hint, marks in _fields(owner):
        if _marked(marks, Inline):
            own = {key: values.pop(key) for key in options_of(hint) if key in values}
            of_field = _default(field)
            values[field.name] = (
                hint(**own) if of_field is dataclasses.MISSING else dataclasses.replace(of_field, **own)
            )
    return owner(**values, **internal)


def checked(option: Option, value: object, label: str) -> Any:
    """The value as the option's type; `label` names it in the message.

    Raises:
        UserError: a value of another type or out of range.
    """
    return _value(option.hint, option.marks, value, label)


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint for a name that is not valid, beginning with "; ": the nearest one, or all where none is near."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; valid: {', '.join(names) or 'none'}"


def near_keys(key: str, keys: Iterable[str], most: int = 3) -> list[str]:
    """Dotted keys like `key`, the nearest first and of equals the first given; empty where none is near.

    Likeness is that of the whole keys, of their last parts, or of the last part and a word of the other one's (`limit`
    and `data.limit_per_task`). Where `key` has a group, keys of a group of such a name go first, else keys without one.
    """
    likeness = {other: _likeness(key, other) for other in keys}
    best = max(likeness.values(), default=0.0)
    near = [other for other, like in likeness.items() if like and like >= best - _AS_NEAR]
    return sorted(near, key=lambda other: -likeness[other])[:most]


def _likeness(key: str, other: str) -> float:
    """About 1 where they are the same or nearly, and 1 more for the same group; 0 where they are not alike."""
    (head, _, name), (group, _, option) = key.rpartition("."), other.rpartition(".")
    like = max(_ratio(name, part) for part in (option, *option.split("_")))
    if head:
        return like + _ratio(head, group) if like >= _NEAR else 0.0
    like = max(like, _ratio(key, other))
    return like + (0.0 if group else _AS_NEAR) if like >= _NEAR else 0.0


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _value(hint: Any, marks: Sequence[object], value: object, label: str) -> object:
    readers = [mark for mark in marks if isinstance(mark, Read)]
    if readers and not (value is None and _takes_none(hint)):
        return _read_by(readers[0], value, label)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        inner, more = _parts(hint)
        return _value(inner, more, value, label)
    if origin in (Union, types.UnionType):
        return _union(args, marks, value, label)
    if origin is Literal:
        if not any(value is arg or (type(value) is type(arg) and value == arg) for arg in args):
            raise OptionError(label, value, f"{'one of ' if len(args) > 1 else ''}{', '.join(map(str, args))}")
        return value
    if origin in (tuple, Sequence) or hint is tuple:
        return _items(args, value, label)
    if origin in (dict, Mapping) or hint is dict:
        if not isinstance(value, Mapping):
            raise OptionError(label, value, "a group of values")
        return dict(value)
    if dataclasses.is_dataclass(hint) and not isinstance(value, hint):
        if not isinstance(value, Mapping):
            raise OptionError(label, value, "a group of values")
        return read(hint, value, group=label)
    return _plain(hint, [mark for mark in marks if isinstance(mark, Range)], value, label)


def _union(hints: Sequence[object], marks: Sequence[object], value: object, label: str) -> object:
    """The first of the types that takes the value; None is taken as it is."""
    if value is None and type(None) in hints:
        return None
    wanted = []
    for hint in hints:
        try:
            if hint is not type(None):
                return _value(hint, marks, value, label)
        except OptionError as error:
            wanted.append(error.wanted)
    raise OptionError(label, value, " or ".join(wanted))


def _items(hints: Sequence[object], value: object, label: str) -> tuple:
    """A list as a tuple; one text is a list of it, where texts are wanted."""
    hint = hints[0] if hints else Any
    value = (value,) if isinstance(value, str) and hint is str else value
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence | Set):
        raise OptionError(label, value, "a list, such as [a,b]")
    return tuple(_value(hint, (), item, label) for item in value)


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def values_of(options: object) -> dict[str, object]:
    """Each option of an instance and its value as YAML and JSON have it, those of its `Inline` parts among them."""
    out: dict[str, object] = {}
    for field, _, marks in _fields(type(options)):
        value = getattr(options, field.name)
        if _marked(marks, Inline):
            out |= values_of(value)
        elif not _marked(marks, Internal | Rest):
            out[field.name] = as_yaml(value)
    return out


def as_yaml(value: object) -> object:
    """A value as YAML and JSON have it: tuples are lists, and paths are text."""
    if isinstance(value, list | tuple):
        return [as_yaml(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _plain(hint: type, ranges: Sequence[Range], value: object, label: str) -> object:
    given, real = value, isinstance(value, numbers.Real) and not isinstance(value, bool)
    if hint is float and real:
        value = _float(value)
    elif hint is int and real and isinstance(value, numbers.Integral):
        value = int(value)
    elif hint is str and real:
        value = str(value)
    wanted = _NAMES.get(hint) or f"a {getattr(hint, '__name__', hint)}"
    fits = isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool)
    if not fits or not all(bounds.holds(value) for bounds in ranges):
        limits = [f"of {bounds}" if str(bounds).startswith("at ") else str(bounds) for bounds in ranges]
        raise OptionError(label, given, " ".join([wanted, *limits]))
    return value


def _float(value: numbers.Real) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number too long for a float
        return math.inf


def _read_by(reader: Read, value: object, label: str) -> object:
    try:
        return reader.by(value)
    except (ValueError, TypeError, OSError):
        raise OptionError(label, value, reader.text) from None


def _fields(owner: type) -> list[tuple[dataclasses.Field, object, tuple[object, ...]]]:
    """The fields that are given when an instance is made, with their types and what is annotated."""
    hints = typing.get_type_hints(owner, include_extras=True)
    return [(field, *_parts(hints[field.name])) for field in dataclasses.fields(owner) if field.init]


def _parts(hint: object) -> tuple[object, tuple[object, ...]]:
    """A type and what is annotated."""
    if typing.get_origin(hint) is not Annotated:
        return hint, ()
    inner, *marks = typing.get_args(hint)
    return inner, tuple(marks)


def _marked(marks: Sequence[object], kind: type | types.UnionType) -> bool:
    return any(isinstance(mark, kind) for mark in marks)


def _takes_none(hint: object) -> bool:
    return hint is Any or type(None) in typing.get_args(hint)


def _default(field: dataclasses.Field) -> object:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _attributes(owner: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say of each attribute."""
    out: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        _, _, section = text.partition("Attributes:\n")
        for found in re.finditer(r"^ +([\w, ]+): (.*(?:\n {8,}.*)*)", section.split("\n\n")[0], re.MULTILINE):
            out |= dict.fromkeys(found[1].split(", "), " ".join(found[2].split()))
    return out
