"""Chat templates: the Jinja text in a model file that turns messages into a prompt.

The template is untrusted: it has no access to Python, and a budget of steps and of memory. Jinja's own sandbox guards
attributes and caps `range`. It leaves open a template that runs forever (nested loops, recursive macros) or that builds
huge values in a few steps. Here every loop turn, call and filter is counted, and an operation that can grow a value is
checked before it does.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specsparse.errors import UserError

MAX_TEMPLATE = 1 << 20
"""Characters of a template."""
MAX_OUTPUT = 1 << 24
"""Characters of a rendered chat."""
MAX_STEPS = 1_000_000
"""Loop turns, filters and (five each) calls of one rendering."""
MAX_SIZE = 1 << 23
"""Characters of a string or items of a list, and the largest number given to a call or filter."""
MAX_BUILT = 1 << 29
"""Characters and items of all values of one rendering together."""

Messages = Sequence[Mapping[str, object]]
"""`{"role": ..., "content": ...}`, in order; both are texts."""

_WIDE_FORMAT, _NUMBER = re.compile(r"\d{7,}|%[^%a-zA-Z]*\*"), re.compile(r"\d+")
_WIDTH_BY_ARGUMENT = re.compile(r"\{[^{}]*:[^{}]*\{[^{]")
_LONGEST_DATE = 256  # characters of a form: each may ask for many

_LEFT_OUT = {*("pprint", "striptags", "urlize", "wordwrap", "xmlattr")}
"""Filters that no prompt needs, and that make much out of little or take long."""
_NOT_TEXT = {
    *("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list"),
    *("map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort", "sum", "unique"),
}
"""Filters that do not print what they are given."""
_PASSED = (jinja2.Environment, Context, nodes.EvalContext)


class ChatTemplate:
    """A compiled template.

    `template` is `tokenizer.chat_template` of the file `where`; it sees `variables` besides the messages, such as
    "bos_token". Raises UserError if there is none, or it is not valid.
    """

    def __init__(self, template: object, variables: Mapping[str, str], *, where: str):
        if not isinstance(template, str) or len(template) > MAX_TEMPLATE:
            problem = "no chat template" if template is None else "the chat template is too long or no text"
            raise UserError(f"{where}: {problem} in this file; give a plain prompt instead of messages")
        self._where = where
        self._environment = _ChatEnvironment()
        self._variables = {"tools": None, "documents": None, **variables}
        try:
            self._template = self._environment.from_string(template, _GLOBALS)
        except Exception as error:  # the parser meets arbitrary text: deep nesting, for one, is a RecursionError
            raise self._failed("is not valid", error) from None

    def render(
        self, messages: Messages, *, add_generation_prompt: bool = True, more: Mapping[str, object] | None = None
    ) -> str:
        """The prompt for some messages; the template sees the variables of `more` too, such as "enable_thinking".

        Raises UserError if the template refuses them, fails or runs away.
        """
        listed = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
        for i, message in enumerate(messages if listed else [messages]):
            texts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
            if not listed or not all(isinstance(text, str) for text in texts):
                form = 'a list of {"role": "user", "content": "..."}, one at least, is needed'
                raise UserError(f"messages{f'[{i}]' if listed else ''} is {message!r:.40}; {form}")
        given = {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
        self._environment.restart()
        parts, size = [], 0
        try:
            for part in self._template.generate({**self._variables, **(more or {}), **given}):
                parts.append(part)
                size += len(part)
                if size > MAX_OUTPUT:
                    raise _Refusal(f"it prints more than {MAX_OUTPUT:,} characters")
        except _Refusal as error:
            raise self._failed("refuses these messages", error) from None
        except Exception as error:  # a template can raise anything that Python can
            raise self._failed("cannot be rendered", error) from None
        return "".join(parts)

    def _failed(self, what: str, error: Exception) -> UserError:
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return UserError(f"{self._where}: the chat template {what}{line}: {reason}")


class _Refusal(jinja2.TemplateError):
    """Raised on behalf of the template."""


def _refuse(message: str) -> NoReturn:
    raise _Refusal(str(message))


def _tojson(
    value: object, indent: int | None = None, ensure_ascii: bool = False, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    # Jinja's own filter escapes for HTML, which no prompt wants.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    if len(form) > _LONGEST_DATE:
        raise SecurityError(f"a date in more than {_LONGEST_DATE} characters")
    return datetime.now().strftime(form)


_GLOBALS = {"raise_exception": _refuse, "strftime_now": _now}


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with a budget; `restart` before each rendering."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        # Constants are not folded at compile time, where no budget would count.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, finalize=_printable
        )
        self._steps = self._built = 0
        self.globals.pop("lipsum")
        filters = {**self.filters, "tojson": _tojson}
        self.filters = {name: self._guarded(name, f) for name, f in filters.items() if name not in _LEFT_OUT}
        self.filters |= {"_turns": self._turns, "_checked": self._checked, "_printable": _printable}

    def restart(self) -> None:
        self._steps = self._built = 0

    def concat(self, parts: Iterable[str]) -> str:  # pyrefly: ignore[bad-override]  # Jinja's is an attribute
        parts = list(parts)
        self._count(sum(map(len, parts)))
        return "".join(parts)

    def call(self, context: Context, function: Callable, *args: Any, **kwargs: object) -> object:
        self._step(5)  # about what a macro costs beside a loop turn
        method = getattr(function, "__wrapped__", function)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            if method.__name__ == "join" and args:
                args = (list(args[0]),)  # it may be a generator, which is looked at only once
                _check_growth("join", args[0], (owner,))
            else:
                for value in chain(args, kwargs.values()):
                    _printable(value)
                _check_growth(method.__name__, owner, (*args, *kwargs.values()))
        _check_arguments(chain(args, kwargs.values()))
        return self._checked(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> object:
        self._step()
        if operator == "**" and not (abs(left) < 1 << 32 and abs(right) < 64):
            raise SecurityError("a power is too large")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int) and len(value) * times > MAX_SIZE:
                    raise SecurityError("it repeats a value too often")
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
                raise SecurityError("a number is too large")
        if operator == "%" and isinstance(left, str):
            _check_growth("format", left, right if isinstance(right, tuple) else (right,))
            _printable(right)
        return self._checked(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_turns", [], [], None, None, lineno=loop.lineno)
        _check_concatenations(tree)
        return tree

    def _turns(self, items: Iterable[object]) -> Iterator[object]:
        for item in items:
            self._step()
            yield item

    def _step(self, cost: int = 1) -> None:
        self._steps += cost
        if self._steps > MAX_STEPS:
            raise SecurityError(f"it takes more than {MAX_STEPS:,} steps")

    def _checked(self, value: object) -> object:
        if isinstance(value, str | list | tuple | dict):
            self._count(len(value))
        return value

    def _count(self, size: int) -> None:
        self._built += size
        if size > MAX_SIZE or self._built > MAX_BUILT:
            raise SecurityError(f"it builds values of more than {MAX_SIZE:,} characters or items")

    def _guarded(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: object) -> object:
            self._step()
            # Jinja passes its environment or context first to the filters that ask for it.
            values = [value for value in args if not isinstance(value, _PASSED)]
            _check_arguments(chain(values[1:], kwargs.values()))
            if name == "join":
                items = list(values[0])  # it may be a generator, which is looked at only once
                args = tuple(items if value is values[0] else value for value in args)
                values[0] = items
            if name not in _NOT_TEXT:
                for value in values:
                    _printable(value)
            if values and name in ("replace", "format", "join", "indent", "tojson", "sum"):
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

    def wrapped(node: object) -> object:
        if not isinstance(node, nodes.Concat):
            return node
        line = node.lineno
        node.nodes = [nodes.Filter(item, "_printable", [], [], None, None, lineno=line) for item in node.nodes]
        return nodes.Filter(node, "_checked", [], [], None, None, lineno=line)

    for node in tree.iter_child_nodes():
        _check_concatenations(node)
    for field, value in tree.iter_fields():
        if isinstance(value, list):
            value[:] = map(wrapped, value)
        else:
            setattr(tree, field, wrapped(value))


def _printable(value: object) -> object:
    """The value, unless its text is huge: a list that holds a list twice, forty levels deep, is small until printed."""
    if not isinstance(value, list | tuple | dict):
        return value
    waiting, seen = [value], 0
    while waiting:
        item = waiting.pop()
        if isinstance(item, list | tuple | dict):
            seen += 8 * len(item)
            waiting += item.values() if isinstance(item, dict) else item
        elif isinstance(item, str):
            seen += len(item)
        if seen > MAX_SIZE:
            raise SecurityError(f"it prints a value of more than {MAX_SIZE:,} characters or items")
    return value


def _lines(value: object, depth: int = 1) -> int:
    """Items of a value, each as often as it is deep: what an indentation costs. What is huge was refused before."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(depth + _lines(item, depth + 1) for item in items)


def _check_arguments(values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_SIZE:
            raise SecurityError(f"it passes the number {value:.3g} to a function")


def _check_growth(name: str, value: Any, args: tuple[Any, ...]) -> None:
    """Refuses the string operations that would make much out of little."""
    size = 0
    if name == "replace" and len(args) >= 2:
        old, new = str(args[0]), str(args[1])
        size = len(str(value)) + str(value).count(old) * len(new)
    elif name == "join":
        separator = len(str(args[0])) if args else 0
        size = sum(separator + (len(item) if isinstance(item, str) else 1) for item in value)
    elif name == "indent":
        width = args[0] if args and isinstance(args[0], int | str) else 4
        size = len(str(value)) + str(value).count("\n") * (width if isinstance(width, int) else len(width))
    elif name == "expandtabs":
        size = len(value) * max([8, *(arg for arg in args if isinstance(arg, int))])
    elif name in ("format", "format_map"):
        if _WIDE_FORMAT.search(str(value)):
            raise SecurityError("it formats to a very large width")
        fields = str(value).count("{") + str(value).count("%")
        widths = [arg for arg in args if isinstance(arg, int)] if _WIDTH_BY_ARGUMENT.search(str(value)) else []
        size = fields * max([1, *widths, *(len(str(arg)) for arg in args)])
        size += sum(map(int, _NUMBER.findall(str(value))))
    elif name == "translate":
        table = args[0].values() if isinstance(args[0], Mapping) else args[0]
        size = len(value) * max([1, *(len(item) for item in table if isinstance(item, str))])
    elif name == "tojson":
        widest = max([1, *(arg if isinstance(arg, int) else len(str(arg)) for arg in args)])
        size = widest * _lines(value)
    elif name == "sum" and any(isinstance(arg, list | tuple) for arg in args):
        raise SecurityError("it adds up lists, each of them copied again and again")
    if size > MAX_SIZE:
        raise SecurityError(f"it builds a text of more than {MAX_SIZE:,} characters")
