"""Chat templates: the Jinja text in a model file that turns messages into a prompt. The template is untrusted."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2

from specsparse.engine.text.sandbox import ChatEnvironment
from specsparse.errors import UserError

MAX_TEMPLATE = 1 << 20
"""Characters of a template."""
MAX_OUTPUT = 1 << 24
"""Characters of a rendered chat."""

Messages = Sequence[Mapping[str, object]]
"""`{"role": ..., "content": ...}`, in order; both are texts."""


class ChatTemplate:
    """A compiled template.

    Args:
        template: `tokenizer.chat_template` of the file, None where it has none.
        variables: what the template sees besides the messages: "bos_token" and the like.
        where: the file, for messages.

    Raises:
        UserError: there is no template, or it is not valid.
    """

    def __init__(self, template: object, variables: Mapping[str, str], *, where: str):
        if template is None:
            raise UserError(f"{where}: no chat template in this file; give a plain prompt instead of messages")
        if not isinstance(template, str) or len(template) > MAX_TEMPLATE:
            raise UserError(f"{where}: the chat template is not a text of up to {MAX_TEMPLATE:,} characters")
        self._where = where
        self._environment = ChatEnvironment()
        self._environment.filters["tojson"] = _tojson
        self._environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
        self._variables = {"tools": None, "documents": None, **variables}
        try:
            self._template = self._environment.from_string(template)
        except Exception as error:  # the parser meets arbitrary text: deep nesting, for one, is a RecursionError
            raise self._failed("is not valid", error) from None

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """The prompt for some messages.

        Raises:
            UserError: messages of another form, or the template refuses them, fails or runs away.
        """
        messages = _checked(messages)
        self._environment.restart()
        pieces, size = [], 0
        try:
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._variables
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_OUTPUT:
                    raise _Refusal(f"it prints more than {MAX_OUTPUT:,} characters")
        except _Refusal as error:
            raise self._failed("refuses these messages", error) from None
        except Exception as error:  # a template can raise anything that Python can
            raise self._failed("cannot be rendered", error) from None
        return "".join(pieces)

    def _failed(self, what: str, error: Exception) -> UserError:
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return UserError(f"{self._where}: the chat template {what}{line}: {reason}")


class _Refusal(jinja2.TemplateError):
    """Raised on behalf of the template."""


def _checked(messages: Messages) -> list[dict[str, object]]:
    form = 'a message is {"role": "user", "content": "..."}'
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise UserError(f"messages must be a list, not {type(messages).__name__}; {form}")
    if not messages:
        raise UserError(f"messages is empty; {form}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UserError(f"messages[{i}] is {message!r:.40}; {form}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise UserError(f"messages[{i}] has no text under {key!r}; {form}")
    return [dict(message) for message in messages]


def _refuse(message: str) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no prompt wants.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
