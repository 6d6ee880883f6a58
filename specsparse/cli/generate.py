"""Continue a prompt by any method: text as it comes, or one JSON object.

The prompt is the argument, a file or the standard input; a newline at the end of the last two is left out.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specsparse.cli import sampling_options
from specsparse.errors import UserError

GROUPS = ("drafter", "verifier", "policy", "tree")
"""What an option can belong to; one without a group is the drafter's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, prompt, method and form of the answer, then every sampling option."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a known name, a GGUF file or hf://owner/repo/file.gguf")
    add("prompt", nargs="?", metavar="PROMPT", help="text to continue; without it the standard input, or --file")
    add("--file", metavar="FILE", help="the prompt is in this file")
    add("--chat", action="store_true", help="the prompt is a user's message in the model's chat template")
    add("--system", metavar="TEXT", help="a system message before it (with --chat)")
    add("--drafter", default="none", metavar="NAME", help="as in configs; none for plain decoding (%(default)s)")
    add("--verifier", metavar="NAME", help="the first lossless one that fits the draft")
    add("--policy", metavar="NAME", help="how many tokens to draft in a round; by default the drafter's own")
    add("--tree", metavar="NAME", help="the shape of the drafts of a drafter with a model")
    add(
        "--option", action="append", default=[], metavar="KEY=VALUE",
        help="of the drafter, such as gamma=4; of another part with its name, such as policy.gamma=4",
    )  # fmt: skip
    add("--json", action="store_true", help="one JSON object: text, token ids, counters, seed, finish reason")
    sampling_options.add_arguments(parser, sampling_options.EVERY, temperature=0.0, max_tokens=256)


def main(args: argparse.Namespace) -> int:
    """Load, then write the continuation to the standard output, and figures to a terminal beside it."""
    params, prompt = _checked(args), _prompt(args)
    from specsparse import api
    from specsparse.support import terminal

    method = _method(args, params.temperature)
    with terminal.loading(terminal.console(), f"loading {args.model}") as progress:
        model = api.load(args.model, progress=progress)
    if args.json or params.num_sequences > 1:
        found = api.generate(model, prompt, sampling=params, **method)
        every = found if isinstance(found, list) else [found]
        _print_json(every) if args.json else _print_texts(every)
        return 0
    stream = api.stream(model, prompt, sampling=params, rounds=1, **method)
    for piece in stream:
        print(piece, end="", flush=True)
    print(flush=True)
    return 0


def _checked(args: argparse.Namespace) -> Any:
    """The sampling parameters, and that text is not asked for what only JSON shows."""
    params = sampling_options.params(args)
    unseen = {"logprobs": params.logprobs is not None, "prompt-logprobs": params.prompt_logprobs is not None}
    for flag, given in {**unseen, "no-detokenize": not params.detokenize}.items():
        if given and not args.json:
            raise UserError(f"--{flag} shows nothing as text: add --json")
    if args.system is not None and not args.chat:
        raise UserError("--system is a message of a chat: add --chat")
    return params


def _prompt(args: argparse.Namespace) -> str | list[dict[str, str]]:
    """A text, or with --chat its messages.

    Raises:
        UserError: none or two were given, it cannot be read, or it is empty.
    """
    if args.prompt is not None and args.file is not None:
        raise UserError("a prompt and --file were given: give one of them")
    if args.prompt is not None:
        text = args.prompt
    elif args.file is None and sys.stdin.isatty():
        raise UserError('there is no prompt: write it after the model ("Once upon a time"), name --file, or pipe it in')
    else:
        text = _read(args.file).removesuffix("\n")
    if not text:
        raise UserError("the prompt is empty")
    if not args.chat:
        return text
    first = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*first, {"role": "user", "content": text}]


def _read(file: str | None) -> str:
    """A file, or the standard input, as UTF-8."""
    try:
        return sys.stdin.read() if file is None else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file or 'the standard input'} is no UTF-8 text") from error


def _method(args: argparse.Namespace, temperature: float) -> dict[str, Any]:
    """`drafter` and `verifier` for a generation; {} for plain decoding.

    Raises:
        UserError: a name or an option that is unknown, or parts that do not fit.
    """
    from specsparse.speculative.drafters.registry import get_drafter
    from specsparse.speculative.method import choose_verifier, make_drafter
    from specsparse.speculative.policies.registry import get_policy
    from specsparse.speculative.trees import get_tree

    options = read_options(args.option)
    for group in GROUPS:
        if options[group] and getattr(args, group) in (None, "none"):
            raise UserError(f"{group}.{next(iter(options[group]))} needs --{group} NAME")
    name = args.drafter
    if name == "none":
        if given := [group for group in GROUPS[1:] if getattr(args, group)]:
            raise UserError(f"--{given[0]} needs --drafter NAME")
        return {}
    tree = get_tree(args.tree, **options["tree"]) if args.tree else None
    if args.policy or tree is not None:
        policy = get_policy(args.policy or "fixed", **options["policy"])
        drafter: Any = make_drafter(name, options["drafter"], policy, tree=tree)
    else:
        drafter = get_drafter(name, **options["drafter"])
    verifier = choose_verifier(drafter, args.verifier, options["verifier"], temperature=temperature, drafted_by=name)
    plain_name = not (args.policy or args.tree or options["drafter"])
    return {"drafter": name if plain_name else drafter, "verifier": verifier}


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
        except ValueError:
            options[key] = value
    return out


def _print_texts(every: Sequence[Any]) -> None:
    """Several texts, each under a line with its number."""
    for i, found in enumerate(every, 1):
        print(f"--- {i} of {len(every)}\n{found.text}")


def _print_json(every: Sequence[Any]) -> None:
    """One object; of several completions with a list of them."""
    from specsparse.support.json_files import to_json

    shown = [_as_json(found) for found in every]
    print(to_json(shown[0] if len(shown) == 1 else {"completions": shown}))


def _as_json(found: Any) -> dict[str, Any]:
    """What is known of a completion; seconds are of the whole call."""
    stats = found.stats
    times = {key: getattr(stats, f"{key}_s") for key in ("load", "compile", "prefill", "decode")}
    out = {
        "text": found.text,
        "token_ids": found.token_ids,
        "finish_reason": found.finish_reason,
        "stop_reason": found.stop_reason,
        "seed": found.seed,
        "tokens_per_second": found.tokens_per_second,
        "prompt_token_ids": found.prompt_token_ids,
        "counters": dataclasses.asdict(stats.counters),
        "seconds": times,
    }
    for name in ("logprobs", "prompt_logprobs"):
        entries = getattr(found, name)
        if entries is not None:
            out[name] = [None if entry is None else dataclasses.asdict(entry) for entry in entries]
    return out
