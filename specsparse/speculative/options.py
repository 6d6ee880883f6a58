"""Options by name, checked, with the names of llama.cpp, vLLM and Hugging Face for aliases."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from specsparse.errors import UserError

MAX_GAMMA = 512
"""Most tokens a round may draft."""


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a factory.

    Attributes:
        kind: int, float, str or bool; an int is taken for a float.
        low: least value.
        high: largest value.
        aliases: other names for it.
        choices: all values, for a str.
    """

    kind: type = int
    low: float = 1
    high: float = MAX_GAMMA
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()

    def check(self, label: str, value: Any) -> Any:
        """The value as `kind`, or a UserError that says what it must be."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if self.kind is float and number:
            value = float(value)
        if not isinstance(value, self.kind) or (self.kind is int and isinstance(value, bool)):
            raise UserError(f"{label}={value!r} must be of type {self.kind.__name__}")
        if self.kind in (int, float) and not self.low <= value <= self.high:
            raise UserError(f"{label}={value} must lie in {self.low:g}..{self.high:g}")
        if self.choices and value not in self.choices:
            raise UserError(f"{label}={value} must be one of {', '.join(self.choices)}")
        return value


@dataclasses.dataclass(frozen=True)
class Factory:
    """How to make a drafter (or policy) from options.

    Attributes:
        build: called with the canonical names of the options given.
        options: by canonical name; a value whose checker is None is passed on as it is.
    """

    build: Callable[..., Any]
    options: Mapping[str, Option | None]

    def make(self, label: str, name: str, given: Mapping[str, Any]) -> Any:
        """`build` with checked options; `label` is the config group in messages."""
        return self.build(**canonical(label, name, self.options, given))


def nearest(name: str, valid: list[str]) -> str:
    """The valid name most like `name`, or all of them where none is near."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"valid: {', '.join(valid) or 'none'}"


def canonical(label: str, name: str, options: Mapping[str, Option | None], given: Mapping[str, Any]) -> dict[str, Any]:
    """Checked options under their canonical names. None is an option that was not given.

    Raises:
        UserError: an unknown option, one given under two names, a value of the wrong type or out of range.
    """
    names = {alias: key for key, option in options.items() if option for alias in option.aliases}
    names |= {key: key for key in options}
    checked: dict[str, Any] = {}
    source: dict[str, str] = {}
    for key, value in given.items():
        if key not in names:
            raise UserError(f"{label}.{key} is no option of {name}; {nearest(key, list(names))}")
        if value is None:
            continue
        target = names[key]
        if target in checked:
            raise UserError(f"{label}.{source[target]} and {label}.{key} are one option of {name}: give one of them")
        option, source[target] = options[target], key
        checked[target] = value if option is None else option.check(f"{label}.{key}", value)
    return checked


def gamma_option(*names: str) -> Option:
    """Tokens to draft a round, under everybody's names except those given (which the caller uses for something)."""
    everybody = (
        "gamma",
        "num_speculative_tokens",
        "draft_max",
        "num_assistant_tokens",
        "prompt_lookup_num_tokens",
        "n_draft",
    )
    return Option(aliases=tuple(name for name in everybody if name not in names))
