"""The model, its drafter and what else makes a method, as options of a command."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specsparse.errors import UserError

if TYPE_CHECKING:
    from specsparse.speculative.base import Drafter
    from specsparse.speculative.drafters.plan import DrafterPlan

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


def drafter_of(drafter: str, draft: str | None) -> tuple[str, dict[str, Any]]:
    """Name and options of what these two say."""
    return (drafter, {}) if draft is None else ("model", {"model": draft})


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


@dataclass(frozen=True)
class NamedMethod:
    """What `add_parts` adds, read.

    Attributes:
        drafter, verifier, policy, tree: names; of the drafter "none" is plain decoding.
        options: of each group.
    """

    drafter: str
    verifier: str | None
    policy: str | None
    tree: str | None
    options: Mapping[str, Mapping[str, Any]]

    def at(self, temperature: float) -> dict[str, Any]:
        """`drafter` and `verifier` for a generation at this temperature; {} for plain decoding.

        Raises:
            UserError: a name or an option that is unknown, or parts that do not fit.
        """
        from specsparse.speculative.method import choose_verifier, drawing_for

        if self.drafter == "none":
            return {}
        drafter = drawing_for(self._drafter(), self.verifier, temperature)
        given = {"temperature": temperature, "drafted_by": self.drafter}
        verifier = choose_verifier(drafter, self.verifier, self.options["verifier"], **given)
        plain_name = not (self.policy or self.tree or self.options["drafter"])
        return {"drafter": self.drafter if plain_name else drafter, "verifier": verifier}

    def _drafter(self) -> "Drafter | DrafterPlan":
        from specsparse.speculative.drafters.registry import get_drafter
        from specsparse.speculative.method import make_drafter
        from specsparse.speculative.policies import get_policy
        from specsparse.speculative.trees import get_tree

        tree = get_tree(self.tree, **self.options["tree"]) if self.tree else None
        if self.policy is None and tree is None:
            return get_drafter(self.drafter, **self.options["drafter"])
        policy = get_policy(self.policy or "fixed", **self.options["policy"])
        return make_drafter(self.drafter, self.options["drafter"], policy, tree=tree)


def named(args: argparse.Namespace) -> NamedMethod:
    """What a command line says of the method.

    Raises:
        UserError: an option of a part that is not named, or a part beside plain decoding.
    """
    options = read_options(args.option)
    for group in GROUPS:
        if options[group] and getattr(args, group) in (None, "none"):
            raise UserError(f"{group}.{next(iter(options[group]))} needs --{group} NAME")
    if args.drafter == "none" and (given := [group for group in GROUPS[1:] if getattr(args, group)]):
        raise UserError(f"--{given[0]} needs --drafter NAME")
    return NamedMethod(args.drafter, args.verifier, args.policy or None, args.tree or None, options)


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
