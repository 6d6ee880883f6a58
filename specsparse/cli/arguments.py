"""Arguments that several commands share: numbers, names and lists of them, sampling parameters, and files to write.

The method has a page of its own, `specsparse.cli.method_options`.
"""

import argparse
import collections.abc
import typing
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsparse.support.files import Json, atomically, need_place, to_json, write_atomically
from specsparse.support.options import options_of, shown

if TYPE_CHECKING:
    from rich.console import Console

    from specsparse.engine.sampling.params import SamplingParams
    from specsparse.report.plots import Figure

STDOUT = "-"
"""The file of --json without one."""
ONE_TEXT = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "max_tokens", "min_tokens", "stop", "include_stop_str_in_output", "stop_token_ids", "ignore_eos", "bad_words",
    "logit_bias", "allowed_token_ids", "skip_special_tokens",
)  # fmt: skip
"""Sampling parameters that matter for one text on a terminal; `seed` is the command's own."""
NO_OPTION = ("logits_processors", "guided_decoding", "use_beam_search")
"""Sampling parameters that a command line cannot give: functions, and unsupported ones."""


# Types of arguments.


def count(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    if len(text) > 18:
        raise argparse.ArgumentTypeError(f"{shown(text)} is too large")
    return int(text)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if count(text) == 0:
        raise argparse.ArgumentTypeError("0 is too small, 1 is the least")
    return int(text)


def sizes(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 to 64, in order: `1..16`, `1,4,8`."""
    found: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        low, high = positive(first), positive(last if dots else first)
        if high > 64 or low > high:
            raise argparse.ArgumentTypeError(f"{part!r}: lengths from 1 to 64, the smaller first")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def names(text: str) -> tuple[str, ...]:
    """Words between commas, each once."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r}: names between commas")
    return found


def names_among(what: str, valid: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """`names`, each of which is one of `valid`; `what` says what they are names of."""

    def read(text: str) -> tuple[str, ...]:
        found = names(text)
        for name in found:
            if name not in valid:
                raise argparse.ArgumentTypeError(f"unknown {what} {name!r}: there are {', '.join(valid)}")
        return found

    return read


def token_ids(text: str) -> list[int]:
    """Token ids between commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be token ids with commas between them") from None


def logit_bias(text: str) -> tuple[int, float]:
    """A token id and its bias: `42=-5`."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be ID=BIAS, such as 42=-5") from None


# Sampling parameters: names, types and descriptions are those of `SamplingParams`.


def add_sampling(parser: argparse.ArgumentParser, fields: Iterable[str] | None = ONE_TEXT, **defaults: Any) -> None:
    """An option for each named parameter, or for all; one that is not given has the value in `defaults`, if any."""
    from specsparse.engine.sampling.params import SamplingParams

    options, types = options_of(SamplingParams), typing.get_type_hints(SamplingParams)
    fields = tuple(name for name in options if name not in NO_OPTION) if fields is None else tuple(fields)
    group = parser.add_argument_group("sampling")
    for name in fields:
        default = defaults.get(name, options[name].default)
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        about = options[name].about.removesuffix(".") + (f" ({default})" if is_number else "")
        flag, form = "--" + name.replace("_", "-"), _form(types[name])
        group.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=about.replace("%", "%%"), **form)
    parser.set_defaults(sampling_names=fields, sampling_defaults=defaults)


def _form(annotation: Any) -> dict[str, Any]:
    """How argparse reads a value of this type; lists are given in parts or with commas."""
    kinds = [k for k in typing.get_args(annotation) if k is not type(None)]
    kind = kinds[0] if type(None) in typing.get_args(annotation) else annotation
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind in (int, float):
        return {"type": kind, "metavar": "N" if kind is int else "X"}
    if typing.get_origin(kind) is collections.abc.Mapping:
        return {"type": logit_bias, "action": "append", "metavar": "ID=BIAS"}
    if typing.get_args(kind) == (int,):
        return {"type": token_ids, "action": "extend", "metavar": "ID,ID"}
    return {"action": "append", "metavar": "TEXT"}


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that a command line names."""
    given = {name: getattr(args, name) for name in args.sampling_names if hasattr(args, name)}
    if isinstance(bias := given.get("logit_bias"), list):
        given["logit_bias"] = dict(bias)
    return given


def sampling_params(args: argparse.Namespace) -> "SamplingParams":
    """All sampling parameters of a command line; UserError for a value that is not allowed."""
    from specsparse.engine.sampling.params import SamplingParams

    return SamplingParams.from_dict({**args.sampling_defaults, **given_sampling(args)})


# Files to write: a report as JSON, and pictures.


def add_json(add: Callable[..., argparse.Action]) -> None:
    """--json; `add` is `add_argument` of a parser."""
    add("--json", nargs="?", const=STDOUT, metavar="FILE", help="the report as one JSON line, last or in FILE")


def need_places(files: list[str | Path | None], pictures: list[Path | None], *sources: str | Path | None) -> None:
    """Checks before the work that every file can be written and is none of `sources`, which are read.

    Raises:
        UserError: see `need_place`.
    """
    for path in (*files, *pictures):
        if path not in (None, STDOUT):
            need_place(path, *sources, picture=any(path is picture for picture in pictures))


def write_json(file: str | None, report: Json, out: "Console") -> None:
    """Writes the report to the `file` of --json, if it was given."""
    if file == STDOUT:
        print(to_json(report), flush=True)
    elif file is not None:
        write_atomically(Path(file), to_json(report) + "\n")
        out.print(f"report: {file}", soft_wrap=True)


def draw(path: Path | None, figure: "Callable[[Json], Figure]", report: Json, out: "Console") -> None:
    """Draws the report as a picture, if one was asked for."""
    if path is not None:
        with atomically(path) as file:
            file.write(figure(report).png())
        out.print(f"figure: {path}", soft_wrap=True)
