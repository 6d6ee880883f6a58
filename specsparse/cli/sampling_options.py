"""The fields of `SamplingParams` as options of a command: names, types and descriptions are those of the class."""

import argparse
import collections.abc
import typing
from collections.abc import Iterable
from typing import Any

from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.support.options import options_of

ONE_TEXT = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "max_tokens", "min_tokens", "stop", "include_stop_str_in_output", "stop_token_ids", "ignore_eos", "bad_words",
    "logit_bias", "allowed_token_ids", "skip_special_tokens",
)  # fmt: skip
"""Fields that one text on a terminal has a use for; `seed` is the command's own."""
NO_OPTION = ("logits_processors", "guided_decoding", "use_beam_search")
"""Fields that a command line cannot give: functions, and what is not supported."""
EVERY = tuple(name for name in options_of(SamplingParams) if name not in NO_OPTION)
"""All others."""


def add_arguments(parser: argparse.ArgumentParser, names: Iterable[str] = ONE_TEXT, **defaults: Any) -> None:
    """An option for each named field; what is not given is left to `defaults`, then to the class."""
    options, types = options_of(SamplingParams), typing.get_type_hints(SamplingParams)
    group = parser.add_argument_group("sampling")
    for name in names:
        default = defaults.get(name, options[name].default)
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        shown = f" ({default})" if is_number else ""
        group.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            default=argparse.SUPPRESS,
            help=(options[name].about.removesuffix(".") + shown).replace("%", "%%"),
            **_form(types[name]),
        )
    parser.set_defaults(sampling_names=tuple(names), sampling_defaults=defaults)


def params(args: argparse.Namespace) -> SamplingParams:
    """The parameters that a command line asks for.

    Raises:
        UserError: a value that is not allowed.
    """
    given = {name: getattr(args, name) for name in args.sampling_names if hasattr(args, name)}
    if isinstance(bias := given.get("logit_bias"), list):
        given["logit_bias"] = dict(bias)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if name in given:
            given[name] = [i for some in given[name] for i in some]
    return SamplingParams.from_dict({**args.sampling_defaults, **given})


def _form(annotation: Any) -> dict[str, Any]:
    """How argparse reads a value of this type; lists are given in parts or with commas."""
    kinds = [k for k in typing.get_args(annotation) if k is not type(None)]
    kind = kinds[0] if type(None) in typing.get_args(annotation) else annotation
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind in (int, float):
        return {"type": kind, "metavar": "N" if kind is int else "X"}
    if typing.get_origin(kind) is collections.abc.Mapping:
        return {"type": _bias, "action": "append", "metavar": "ID=BIAS"}
    if typing.get_args(kind) == (int,):
        return {"type": _ids, "action": "append", "metavar": "ID,ID"}
    return {"action": "append", "metavar": "TEXT"}


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{text!r} must be token ids with commas between them") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise UserError(f"--logit-bias {text!r} must be ID=BIAS, such as 42=-5") from None
