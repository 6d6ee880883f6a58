"""What several commands share: types of arguments, the method, the sampling parameters, and the ways of a report."""

import argparse
import collections.abc
import dataclasses
import json
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from specsparse.engine import hosts
from specsparse.errors import UserError, refuse
from specsparse.support.files import Json, atomically, need_place, to_json, write_atomically
from specsparse.support.neighbours import DRAFT_FILES, METHODS, WORDS, speculative
from specsparse.support.options import options_of, shown
from specsparse.support.registry import Choice
from specsparse.support.terminal import decoding_input

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from specsparse.engine.model import Model
    from specsparse.engine.sampling.params import SamplingParams
    from specsparse.report.plots import Figure
    from specsparse.runtime.method import MethodSpec

T = TypeVar("T")
DataclassT = TypeVar("DataclassT", bound="DataclassInstance")
STDOUT = "-"
"""The file of `--json` if none is named."""
MODEL = "smollm2-135m"
"""The default model."""
ANY_MODEL = "a known name, a GGUF file, owner/repo:Q4_K_M of the Hub or hf://owner/repo/file.gguf"
DRAFT_MODEL = ("-md", "--model-draft", "--draft")
DRAFT_LENGTH = ("--gamma", "--draft-max", "--spec-draft-n-max")
GROUPS = ("drafter", "verifier", "policy", "tree")
"""The parts of a method that have options."""
ONE_TEXT = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "max_tokens", "min_tokens", "stop", "include_stop_str_in_output", "stop_token_ids", "ignore_eos", "bad_words",
    "logit_bias", "allowed_token_ids", "skip_special_tokens",
)  # fmt: skip
"""Sampling parameters that matter for one text on a terminal; `seed` is the command's own."""
NO_OPTION = ("logits_processors", "guided_decoding", "use_beam_search")
"""Sampling parameters that a command line cannot give: functions, and unsupported ones."""


# Types of arguments.


def whole(least: int, most: int = 10**18 - 1) -> Callable[[str], int]:
    """A type of whole numbers from `least` to `most`."""

    def number(text: str) -> int:
        if not text.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
        if len(text) > 18 or int(text) > most:
            raise argparse.ArgumentTypeError(f"{shown(text)} is too large, {most:,} is the most")
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is too small, {least} is the least")
        return int(text)

    return number


count, positive = whole(0), whole(1)


def share(text: str, *, zero: bool = False) -> float:
    """A number above 0 and up to 1; `zero` allows 0 too."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1 or not (value or zero):
        raise argparse.ArgumentTypeError(f"{text!r} must be a share from 0 to 1, for instance 0.7")
    return value


def list_of(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """A type of values with commas between them."""

    def several(text: str) -> tuple[T, ...]:
        return tuple(read(part) for part in text.split(","))

    several.__name__ = f"list of {read.__name__}"
    return several


def sizes(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 to 64, ascending: `1..16`, `1,4,8`."""
    found, length = set[int](), whole(1, 64)
    for part in text.split(","):
        first, dots, last = part.partition("..")
        low, high = length(first), length(last if dots else first)
        if low > high:
            raise argparse.ArgumentTypeError(f"{part!r}: lengths from 1 to 64, the smaller first")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def names(text: str) -> tuple[str, ...]:
    """Words with commas between them, each once."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r}: names between commas")
    return found


def names_among(what: str, valid: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """`names`, each of them one of `valid`; `what` is the kind of name."""

    def read(text: str) -> tuple[str, ...]:
        for name in (found := names(text)):
            if name not in valid:
                raise argparse.ArgumentTypeError(f"unknown {what} {name!r}: there are {', '.join(valid)}")
        return found

    return read


def logit_bias(text: str) -> tuple[int, float]:
    """A token id and its bias: `42=-5`."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be ID=BIAS, such as 42=-5") from None


def piped() -> str:
    """The standard input without the newline at its end; UserError if it is no text in its encoding."""
    with decoding_input():
        return sys.stdin.read().removesuffix("\n")


# The model and the drafts: every command that decodes has these options, in llama.cpp's words too.


def add_model(parser: argparse.ArgumentParser, *, prompt: bool = False) -> None:
    """The model and how it runs; MODEL is an argument too, and with `prompt` PROMPT, which `settle` tells apart."""
    add = parser.add_argument
    add("first", nargs="?", metavar="MODEL", help=f"{ANY_MODEL} ({MODEL}){'; with -m: PROMPT' if prompt else ''}")
    if prompt:
        add("second", nargs="?", metavar="PROMPT", help="the same as -p")
        add("-p", "--prompt", metavar="TEXT", help="the prompt; - reads it from the standard input")
    add_model_options(parser.add_argument_group("model").add_argument)


def also(add: Callable[..., argparse.Action], here: str, *known: str, **form: Any) -> None:
    """The flags that neighbours have for what is `here` (see `neighbours.Word`), beside `known`; help names none."""
    words = (f"--{name.replace('_', '-')}" for name, word in WORDS.items() if word.here == here and word.whose)
    if flags := [flag for flag in words if flag not in known]:
        add(*flags, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **form)


def add_model_options(add: Callable[..., argparse.Action]) -> None:
    add("-m", "--model", dest="model", metavar="MODEL", help="the same as MODEL")
    on_hub, about = lambda text: f"hf://{text.removeprefix('hf://')}", "a model of the Hub: owner/repo:Q4_K_M"
    add("-hf", "--hf-repo", dest="model", type=on_hub, metavar="REPO", help=about)
    about = "tokens that the context holds (as the file says)"
    add("-c", "--ctx-size", "--context", dest="context", type=positive, metavar="N", help=about)
    add("-t", "--threads", type=positive, metavar="N", help="threads of the native kernels (all cores)")
    add("--kv-dtype", metavar="TYPE", help="f16 (default), bf16, f32 or q8_0 cache")
    add("--mesh", type=positive, metavar="N", help="divide the model among N devices")
    about = "native, reference, xla, packed or bf16 (the best there is)"
    add("--kernels", dest="backend", metavar="NAME", help=about)
    also(add, "load.context_length", "--ctx-size", dest="context", type=positive)
    also(add, "load.threads", "--threads", dest="threads", type=positive)
    also(add, "load.kv_dtype", dest="kv_dtype")
    also(add, "load.mesh", dest="mesh", type=positive)


def add_distributed(add: Callable[..., argparse.Action]) -> None:
    about = "one of several processes that hold the model: auto (Slurm, Kubernetes, Open MPI) or its place, from 0"
    add("--distributed", metavar="HOST:PORT,COUNT,INDEX", help=about)


def settle(args: argparse.Namespace) -> None:
    """Sets `model` and, of a command that has one, `prompt` by the arguments without a flag."""
    words = [word for name in ("first", "second") if (word := getattr(args, name, None)) is not None]
    if args.model is None:
        args.model = words.pop(0) if words else MODEL
    for word in words:
        if getattr(args, "prompt", word) is not None:
            given = "the model and the prompt are" if hasattr(args, "prompt") else "the model is"
            raise UserError(f"unknown argument {shown(word)}: {given} given already")
        args.prompt = word


def load_options(given: Any) -> dict[str, Any]:
    """Keywords of `load`, of the attributes that `add_model_options` names."""
    found = {name: getattr(given, name) for name in ("kv_dtype", "threads", "backend")}
    found["mesh"] = hosts.mesh_of(given.mesh)
    return found if given.context is None else {**found, "context_length": given.context}


def load(args: argparse.Namespace, out: "Console") -> "Model":
    """The model that the arguments of `add_model` name; progress is shown on `out`."""
    from specsparse import api
    from specsparse.support import terminal

    with terminal.loading(out, f"loading {args.model}") as progress:
        return api.load(args.model, progress=progress, **load_options(args))


def add_draft(add: Callable[..., argparse.Action]) -> None:
    """The drafter, its verifier and how much it drafts."""
    about = "a drafter as in configs; none is plain decoding (the model's usual one in `models`, or prompt_lookup)"
    add("--drafter", metavar="NAME", help=about)
    add("--spec-type", dest="drafter", type=drafter_name, metavar="TYPE", help="the same in llama.cpp's words")
    add(*DRAFT_MODEL, dest="draft", metavar="FILE", help="a model that drafts: a name or a file")
    about = "tokens drafted in a round (as many as pay, by auto_off)"
    add(*DRAFT_LENGTH, dest="gamma", type=positive, metavar="N", help=about)
    add("--verifier", metavar="NAME", help="a verifier (the first lossless one that fits the draft)")
    also(add, "drafter.model", *DRAFT_MODEL, dest="draft")
    also(add, "drafter.gamma", "--draft", *DRAFT_LENGTH, dest="gamma", type=positive)


def drafter_name(text: str) -> str:
    """The drafter of a name of llama.cpp's or vLLM's."""
    return METHODS.get(text, text).replace("-", "_")


def drafter_of(drafter: str | None, draft: str | None, model: str = MODEL) -> Choice:
    """The drafter that --drafter and --draft name, else the usual one of `model`; the file may be that of a published
    head, as in llama.cpp. UserError: a drafter that has no file beside one."""
    if draft is None:
        from specsparse.models import catalogue

        entry = None if drafter else catalogue.find(model)
        return Choice(drafter or (entry.drafter if entry else catalogue.DRAFTER))
    name = drafter_name(drafter or "model")
    if name not in DRAFT_FILES:
        raise UserError(f"{drafter} and the draft model {draft} are two drafters: give one of them")
    return Choice(name, {DRAFT_FILES[name]: draft})


def add_method(parser: argparse.ArgumentParser) -> None:
    """`add_draft`, and --policy, --tree and --option for every option of every part."""
    add = parser.add_argument_group("drafts").add_argument
    add_draft(add)
    add("--speculative-config", type=speculative, metavar="JSON", help="drafter and verifier in vLLM's words")
    add("--policy", metavar="NAME", help="decides how many tokens a round drafts (auto_off)")
    add("--tree", metavar="NAME", help="the shape of drafts, if the drafter has a model")
    about = "an option of the drafter, such as gamma=4; of another part with its name, such as policy.gamma=4"
    add("--option", action="append", default=[], metavar="KEY=VALUE", help=about)
    for name in ("n_min", "p_min", "ngram_min", "ngram_max"):
        also(add, f"drafter.{name}", dest="option", action="append", type=f"{name}={{}}".format)


def method_of(args: argparse.Namespace, sampling: "SamplingParams") -> "MethodSpec":
    """The method that the arguments of `add_draft` or `add_method` say, for these sampling parameters of the target.
    UserError: an option of a part that is not named, a part beside plain decoding, or one thing said twice."""
    options = read_options(getattr(args, "option", ()))
    chosen = {group: Choice(name, options[group]) for group in GROUPS if (name := getattr(args, group, None))}
    theirs = getattr(args, "speculative_config", None) or {}
    named, twice = args.drafter is not None or args.draft is not None, theirs.get("verifier") and "verifier" in chosen
    refuse({
        "--speculative-config names the drafter: leave --drafter and --draft out, or it": theirs and named,
        "--verifier and rejection_sample_method of --speculative-config are one thing: give one of them": twice,
    })  # fmt: skip
    if theirs.get("verifier"):
        chosen["verifier"] = Choice(theirs["verifier"], options["verifier"])
    drafter = theirs.get("drafter") or drafter_of(args.drafter, args.draft, args.model)
    chosen["drafter"] = Choice(drafter.name, {**drafter.options, **options["drafter"]})
    lengths = {name for name, word in WORDS.items() if word.here == "drafter.gamma"}
    places = {"--option {}": options["drafter"], "--option policy.{}": options["policy"],
              "{} of --speculative-config": drafter.options}  # fmt: skip
    twice = [place.format(name) for place, given in places.items() for name in given if name in lengths]
    if args.gamma is not None and twice:
        raise UserError(f"--gamma and {twice[0]} are one thing: give one of them")
    of_drafts = [*(f"--option {name}" for name in options["drafter"]), *["--gamma"] * (args.gamma is not None),
                 *(f"--{group}" for group in GROUPS[1:] if group in chosen)]  # fmt: skip
    if drafter.name == "none" and of_drafts:
        raise UserError(f"{of_drafts[0]} needs --drafter NAME: none is plain decoding")
    for group in GROUPS:
        if group not in chosen and options[group]:
            raise UserError(f"{group}.{next(iter(options[group]))} needs --{group} NAME")
    if args.gamma is not None:
        own = chosen.get("policy", Choice("fixed"))
        chosen["policy"] = Choice(own.name, {**own.options, "gamma": args.gamma})
    from specsparse.runtime.method import MethodSpec  # imports jax, which takes longer than to find a mistake

    return MethodSpec(**chosen, sampling=sampling)


def read_options(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options by group, of texts KEY=VALUE or GROUP.KEY=VALUE, the last counts. A value that is not JSON is a text.
    UserError: another form, or an unknown group."""
    out: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for text in given:
        path, equals, value = text.partition("=")
        group, dot, key = path.rpartition(".")
        options = out.get(group if dot else "drafter")
        if options is None or not equals or not key:
            raise UserError(f"--option {text} must be KEY=VALUE or GROUP.KEY=VALUE, GROUP one of {', '.join(GROUPS)}")
        options[key] = json_or_text(value)
    return out


def json_or_text(value: str) -> Any:
    """The value of a JSON text; any other text as it is."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


# Sampling parameters: names, types and descriptions are those of `SamplingParams`.


def add_sampling(
    parser: argparse.ArgumentParser, fields: Iterable[str] | None = ONE_TEXT, *, tokens: bool = True, **defaults: Any
) -> None:
    """An option for each named parameter, or for all; `defaults` are values of options that are not given.

    With `tokens` -n is --max-tokens.
    """
    from specsparse.engine.sampling.params import SamplingParams

    options, types = options_of(SamplingParams), typing.get_type_hints(SamplingParams)
    fields = tuple(name for name in options if name not in NO_OPTION) if fields is None else tuple(fields)
    group = parser.add_argument_group("sampling")
    for name in fields:
        default = defaults.get(name, options[name].default)
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        about = options[name].about.removesuffix(".") + (f" ({default})" if is_number else "")
        short = {"temperature": ("--temp",), "seed": ("-s",), "max_tokens": ("-n",) if tokens else ()}.get(name, ())
        flags = (*short, "--" + name.replace("_", "-"))
        form: dict[str, Any] = {**_form(types[name]), "dest": name}
        group.add_argument(*flags, default=argparse.SUPPRESS, help=about.replace("%", "%%"), **form)
        also(group.add_argument, f"sampling.{name}", *flags, **form)
    parser.set_defaults(sampling_names=fields, sampling_defaults=defaults)


def _form(annotation: Any) -> dict[str, Any]:
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    kind = kinds[0] if type(None) in typing.get_args(annotation) else annotation
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind in (int, float):
        return {"type": kind, "metavar": "N" if kind is int else "X"}
    if typing.get_origin(kind) is collections.abc.Mapping:
        return {"type": logit_bias, "action": "append", "metavar": "ID=BIAS"}
    if typing.get_args(kind) == (int,):
        return {"type": list_of(int), "action": "extend", "metavar": "ID,ID"}
    return {"action": "append", "metavar": "TEXT"}


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in args.sampling_names if hasattr(args, name)}
    if isinstance(bias := given.get("logit_bias"), list):
        given["logit_bias"] = dict(bias)
    return given


def sampling_params(args: argparse.Namespace) -> "SamplingParams":
    """All sampling parameters of a command line; UserError for a value that is not allowed."""
    from specsparse.engine.sampling.params import SamplingParams

    return SamplingParams.from_dict({**args.sampling_defaults, **given_sampling(args)})


def from_args(kind: type[DataclassT], args: argparse.Namespace, **more: Any) -> DataclassT:
    """A dataclass of the arguments that have its fields' names; `more` are values of other fields."""
    given = vars(args)
    return kind(**{field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given} | more)


# Reports: as tables and lines, as JSON, as a figure.


def add_json(add: Callable[..., argparse.Action], about: str = "the report as one JSON line, last or in FILE") -> None:
    """--json [FILE]; `add` is `add_argument` of a parser."""
    add("--json", nargs="?", const=STDOUT, metavar="FILE", help=about)


def need_places(files: list[str | Path | None], pictures: list[Path | None], *sources: str | Path | None) -> None:
    """Checks before the work, by `need_place`, that every file can be written and is none of `sources`."""
    for path in (*files, *pictures):
        if path not in (None, STDOUT):
            need_place(path, *sources, picture=any(path is picture for picture in pictures))


def show(out: "Console", parts: "Iterable[Table | Text | str]") -> None:
    from rich.table import Table
    from rich.text import Text

    from specsparse.support import tables

    for part in parts:
        if isinstance(part, Table):
            tables.show(out, part)
        else:
            out.print(Text(part) if isinstance(part, str) else part, soft_wrap=True)


def write_json(file: str | None, report: Json, out: "Console") -> None:
    """Writes the report to the `file` of --json, if it was given."""
    if file == STDOUT:
        print(to_json(report), flush=True)
    elif file is not None:
        write_atomically(Path(file), to_json(report) + "\n")
        out.print(f"report: {file}", soft_wrap=True)


def draw(path: Path | None, figure: "Callable[[Json], Figure]", report: Json, out: "Console") -> None:
    """Draws the report as a PNG, if the command line names one."""
    if path is not None:
        with atomically(path) as file:
            file.write(figure(report).png())
        out.print(f"figure: {path}", soft_wrap=True)
