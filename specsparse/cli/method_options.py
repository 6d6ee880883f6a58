"""The model, its drafter and what else makes a method, as options of a command."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specsparse.errors import UserError
from specsparse.support.registry import Choice

if TYPE_CHECKING:
    from specsparse.engine.sampling.params import SamplingParams
    from specsparse.runtime.method import MethodSpec

GROUPS = ("drafter", "verifier", "policy", "tree")
"""What an option can belong to; one without a group is the drafter's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, --drafter and --draft."""
    add = parser.add_argument
    add("model", nargs="?", default="smollm2-135m", help="a known name, a GGUF file or hf://owner/repo/file.gguf")
    add(
        "--drafter",
        default="prompt_lookup",
        metavar="NAME",
        help="as in configs; none for plain decoding (%(default)s)",
    )
    add("--draft", metavar="FILE", help="a draft model: the drafter is then model")


def drafter_of(drafter: str, draft: str | None) -> Choice:
    """The drafter that these two name: a draft model is drafter=model."""
    return Choice(drafter) if draft is None else Choice("model", {"model": draft})


def add_parts(parser: argparse.ArgumentParser) -> None:
    """--drafter, --verifier, --policy, --tree and --option."""
    add = parser.add_argument
    add("--drafter", default="none", metavar="NAME", help="as in configs; none for plain decoding (%(default)s)")
    add("--verifier", metavar="NAME", help="the first lossless one that fits the draft")
    add("--policy", metavar="NAME", help="how many tokens to draft in a round; by default the drafter's own")
    add("--tree", metavar="NAME", help="the shape of the drafts of a drafter with a model")
    add(
        "--option", action="append", default=[], metavar="KEY=VALUE",
        help="of the drafter, such as gamma=4; of another part with its name, such as policy.gamma=4",
    )  # fmt: skip


def spec_of(args: argparse.Namespace, sampling: "SamplingParams") -> "MethodSpec":
    """The method that `add_parts` reads, for a target with these parameters.

    Raises:
        UserError: an option of a part that is not named, or a part beside plain decoding.
    """
    options = read_options(args.option)
    for group in GROUPS:
        if options[group] and getattr(args, group) in (None, "none"):
            raise UserError(f"{group}.{next(iter(options[group]))} needs --{group} NAME")
    if args.drafter == "none" and (given := [group for group in GROUPS[1:] if getattr(args, group)]):
        raise UserError(f"--{given[0]} needs --drafter NAME")
    from specsparse.runtime.method import MethodSpec  # jax, which mistakes above do not wait for

    named = {group: Choice(name, options[group]) for group in GROUPS if (name := getattr(args, group))}
    return MethodSpec(**named, sampling=sampling)


def read_options(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options by group, of texts KEY=VALUE or GROUP.KEY=VALUE; a value that is no JSON is a text.

    Raises:
        UserError: another form, an unknown group, or one option twice.
    """
    out: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for text in given:
        path, equals, value = text.partition("=")
        group, dot, key = path.rpartition(".")
        if not equals or not key or (dot and group not in GROUPS):
            raise UserError(f"--option {text} must be KEY=VALUE or GROUP.KEY=VALUE, GROUP one of {', '.join(GROUPS)}")
        options = out[group or "drafter"]
        if key in options:
            raise UserError(f"--option {path} was given twice")
        try:
            options[key] = json.loads(value)
        except (ValueError, RecursionError):
            options[key] = value
    return out
