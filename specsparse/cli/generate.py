"""Continue a prompt by any method: text as it comes, or one JSON object.

The prompt is the argument, a file or the standard input; a newline at the end of the last two is left out.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specsparse.cli import arguments
from specsparse.engine import hosts
from specsparse.errors import GenerationFailed, UserError
from specsparse.support.files import read_text
from specsparse.support.options import shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser, prompt=True)
    arguments.add_distributed(parser.add_argument)
    add = parser.add_argument
    add("-f", "--file", metavar="FILE", help="a file that holds the prompt")
    add("--chat", action="store_true", help="put the prompt into the model's chat template, as the user's message")
    add("--system", metavar="TEXT", help="a system message before it; --chat is then meant")
    arguments.add_method(parser)
    add("--json", action="store_true", help="one JSON object: text, token ids, counters, seed, finish reason")
    arguments.add_sampling(parser, None, temperature=0.0, max_tokens=256)


def main(args: argparse.Namespace) -> int:
    """Load, then write the continuation to the standard output and its figures to the other one."""
    arguments.settle(args)
    params = arguments.sampling_params(args)
    only_json = {"logprobs": params.logprobs is not None, "prompt-logprobs": params.prompt_logprobs is not None,
                 "no-detokenize": not params.detokenize}  # fmt: skip
    for flag, given in only_json.items():
        if given and not args.json:
            raise UserError(f"--{flag} shows nothing as text: add --json")
    prompt = hosts.agreed(_prompt(args) if hosts.leads() else None)  # a launcher gives one process its input
    from specsparse import api
    from specsparse.support import terminal
    from specsparse.support.files import to_json

    method = arguments.method_of(args, params).arguments()
    model = arguments.load(args, terminal.console())
    if not args.json and params.num_sequences == 1:
        stream = api.stream(model, prompt, sampling=params, rounds=1, **method)
        try:
            for text in stream:
                print(text, end="", flush=True)
        finally:  # a text that fails has an end, too
            print(flush=True)
        _say_figures([stream.generation], drafting=bool(method))
        return 0
    try:
        result = api.generate(model, prompt, sampling=params, **method)
    except GenerationFailed as error:
        print(error.text, file=sys.stderr if args.json else None)
        raise
    completions = result if isinstance(result, list) else [result]
    if args.json:
        objects = [_as_json(completion) for completion in completions]
        print(to_json(objects[0] if len(objects) == 1 else {"completions": objects}))
        return 0
    for i, completion in enumerate(completions, 1):
        print(f"--- {i} of {len(completions)}\n{completion.text}")
    _say_figures(completions, drafting=bool(method))
    return 0


def _prompt(args: argparse.Namespace) -> str | list[dict[str, str]]:
    """A text, or of a chat its messages. UserError: no prompt, or two, or a file that cannot be read."""
    example = 'some text, for instance "Once upon a time"'
    if args.file is not None and args.prompt is not None:
        raise UserError("--file and a prompt: give one of them")
    if args.prompt is not None and args.prompt != "-":
        text = args.prompt
    elif args.file is not None:
        text = read_text(Path(args.file), f"--file {args.file}").removesuffix("\n")
    else:
        text = "" if sys.stdin.isatty() else arguments.piped()
    if not text:
        first = f"; {shown(args.model)} is the model" if " " in args.model else ""
        raise UserError(f"there is no prompt: write -p with {example}, name --file, or pipe it in{first}")
    if not args.chat and args.system is None:
        return text
    first = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*first, {"role": "user", "content": text}]


def _say_figures(completions: Sequence[Any], *, drafting: bool) -> None:
    """Rate and acceptance of all completions together, and the prompt, on the standard error."""
    from specsparse.runtime.metrics import Counters, figures

    stats = completions[0].stats
    counters = sum((completion.stats.counters for completion in completions), Counters())
    length = len(completions[0].prompt_token_ids)
    prompt = f"prompt of {length} token{'s'[: length != 1]} in {stats.prefill_s:.2f} s"
    none = ", nothing drafted" if drafting and not counters.num_draft_tokens else ""
    print(f"{figures(counters, stats.decode_s)}{none}; {prompt}", file=sys.stderr)


def _as_json(completion: Any) -> dict[str, Any]:
    """A completion as JSON; seconds are of the whole call."""
    same = ("text", "token_ids", "finish_reason", "stop_reason", "seed", "tokens_per_second", "prompt_token_ids")
    out = {name: getattr(completion, name) for name in same}
    out["counters"] = dataclasses.asdict(completion.stats.counters)
    out["seconds"] = {key: getattr(completion.stats, f"{key}_s") for key in ("load", "compile", "prefill", "decode")}
    for name in ("logprobs", "prompt_logprobs"):
        if (entries := getattr(completion, name)) is not None:
            out[name] = [entry and dataclasses.asdict(entry) for entry in entries]
    return out
