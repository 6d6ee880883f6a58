"""A Jinja environment for templates of unknown origin: no access to Python, and a budget of steps and of memory.

Jinja's own sandbox guards attributes and caps `range`. What it leaves open is a template that runs forever (nested
loops, recursive macros) or that builds huge values in a few steps; here every loop turn, call and filter is counted,
and whatever can grow a value is checked before it does.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000
"""Loop turns, calls and filters of one rendering."""
MAX_SIZE = 1 << 24
"""Characters of a string or items of a list, and the largest number given to a call or filter."""

_WIDE_FORMAT = re.compile(r"\d{7,}|%[^%a-zA-Z]*\*")

_PASSED = (jinja2.Environment, Context, nodes.EvalContext)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with a budget; `restart` before each rendering."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        # Constants are not folded at compile time, where no budget would count.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        self._steps = 0
        self.globals.pop("lipsum")
        self.filters = {name: self._guarded(name, function) for name, function in self.filters.items()}
        self.filters |= {"_turns": self._turns, "_checked": self._checked}

    def restart(self) -> None:
        """Begins a new budget."""
        self._steps = 0

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls `function` for the template."""
        self._step()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            _check_growth(function.__name__, owner, args)
        _check_arguments(chain(args, kwargs.values()))
        return self._checked(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes `left operator right` for the template."""
        self._step()
        if operator == "**" and not (abs(left) < 1 << 32 and abs(right) < 64):
            raise SecurityError("a power is too large")
        if operator == "*":
            _check_product(left, right)
        if operator == "%" and isinstance(left, str):
            _check_growth("format", left, right if isinstance(right, tuple) else (right,))
        return self._checked(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_turns", [], [], None, None, lineno=loop.lineno)
        _check_concatenations(tree)
        return tree

    def _turns(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise SecurityError(f"it takes more than {MAX_STEPS:,} steps")

    def _checked(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple | dict) and len(value) > MAX_SIZE:
            raise SecurityError(f"it builds a value of more than {MAX_SIZE:,} characters or items")
        return value

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._step()
            # Jinja passes its environment or context first to the filters that ask for it.
            values = [
                value for value in args if not isinstance(value, jinja2.Environment | Context | nodes.EvalContext)
            ]
            _check_arguments(chain(values[1:], kwargs.values()))
            if name == "join":
                at = next(i for i, value in enumerate(args) if value is values[0])
                items = list(values[0])
                args = (*args[:at], items, *args[at + 1 :])
                values[0] = items
            if values and name in ("replace", "format", "join", "indent"):
                _check_growth(name, values[0], (*values[1:], *kwargs.values()))
            return self._checked(function(*args, **kwargs))

        return guarded


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only prints its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _check_concatenations(tree: nodes.Node) -> None:
    """Wraps each `a ~ b` in a check of its length: doubled forty times, a string fills any memory."""
    for node in tree.iter_child_nodes():
        _check_concatenations(node)
    for field, value in tree.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(tree, field, _wrapped(value))
        elif isinstance(value, list):
            value[:] = [_wrapped(item) if isinstance(item, nodes.Concat) else item for item in value]


def _wrapped(node: nodes.Concat) -> nodes.Filter:
    return nodes.Filter(node, "_checked", [], [], None, None, lineno=node.lineno)


def _check_arguments(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_SIZE:
            raise SecurityError(f"it passes the number {value:.3g} to a function")


def _check_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int) and len(value) * times > MAX_SIZE:
            raise SecurityError("it repeats a value too often")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
        raise SecurityError("a number is too large")


def _check_growth(name: str, value: Any, args: tuple[Any, ...]) -> None:
    """Refuses the string operations that would make much out of little."""
    size = 0
    if name == "replace" and len(args) >= 2:
        old, new = str(args[0]), str(args[1])
        size = len(str(value)) + str(value).count(old) * len(new)
    elif name == "join":
        items = list(args[0]) if isinstance(value, str) and args else list(value)
        separator = value if isinstance(value, str) and args else (args[0] if args else "")
        size = sum(len(item) if isinstance(item, str) else 1 for item in items) + len(items) * len(str(separator))
    elif name == "indent":
        width = args[0] if args and isinstance(args[0], int | str) else 4
        size = len(str(value)) + str(value).count("\n") * (width if isinstance(width, int) else len(width))
    elif name in ("format", "format_map", "expandtabs"):
        if _WIDE_FORMAT.search(str(value)):
            raise SecurityError("it formats to a very large width")
        size = len(str(value)) * max([1, *(arg for arg in args if isinstance(arg, int))]) if name == "expandtabs" else 0
    if size > MAX_SIZE:
        raise SecurityError(f"it builds a text of more than {MAX_SIZE:,} characters")
