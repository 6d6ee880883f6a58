"""Continue a prompt by any method: text as it comes, or one JSON object.

The prompt is the argument, a file or the standard input; a newline at the end of the last two is left out.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from specsparse.cli import arguments, method_options
from specsparse.errors import UserError
from specsparse.support.terminal import decoding_input


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a known name, a GGUF file or hf://owner/repo/file.gguf")
    add("prompt", nargs="?", metavar="PROMPT", help="text to continue; without it the standard input, or --file")
    add("--file", metavar="FILE", help="the prompt is in this file")
    add("--chat", action="store_true", help="the prompt is a user's message in the model's chat template")
    add("--system", metavar="TEXT", help="a system message before it (with --chat)")
    method_options.add_parts(parser)
    add("--json", action="store_true", help="one JSON object: text, token ids, counters, seed, finish reason")
    arguments.add_sampling(parser, None, temperature=0.0, max_tokens=256)


def main(args: argparse.Namespace) -> int:
    """Load, then write the continuation to the standard output, and figures to a terminal beside it."""
    params, prompt = _checked(args), _prompt(args)
    from specsparse import api
    from specsparse.support import terminal
    from specsparse.support.files import to_json

    method = method_options.spec_of(args, params).arguments()
    with terminal.loading(terminal.console(), f"loading {args.model}") as progress:
        model = api.load(args.model, progress=progress)
    if args.json or params.num_sequences > 1:
        found = api.generate(model, prompt, sampling=params, **method)
        every = found if isinstance(found, list) else [found]
        if args.json:
            objects = [_as_json(found) for found in every]
            print(to_json(objects[0] if len(objects) == 1 else {"completions": objects}))
            return 0
        for i, found in enumerate(every, 1):
            print(f"--- {i} of {len(every)}\n{found.text}")
        return 0
    stream = api.stream(model, prompt, sampling=params, rounds=1, **method)
    for piece in stream:
        print(piece, end="", flush=True)
    print(flush=True)
    return 0


def _checked(args: argparse.Namespace) -> Any:
    """The sampling parameters; UserError if a text is asked for something that only JSON shows."""
    params = arguments.sampling_params(args)
    unseen = {"logprobs": params.logprobs is not None, "prompt-logprobs": params.prompt_logprobs is not None}
    for flag, given in {**unseen, "no-detokenize": not params.detokenize}.items():
        if given and not args.json:
            raise UserError(f"--{flag} shows nothing as text: add --json")
    if args.system is not None and not args.chat:
        raise UserError("--system is a message of a chat: add --chat")
    return params


def _prompt(args: argparse.Namespace) -> str | list[dict[str, str]]:
    """A text, or with --chat its messages; UserError if there is none or two, or it cannot be read."""
    if args.prompt is not None and args.file is not None:
        raise UserError("a prompt and --file were given: give one of them")
    example = 'some text, for instance "Once upon a time"'
    if args.prompt is not None:
        text = args.prompt
    elif args.file is not None:
        try:
            text = Path(args.file).read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--file {args.file}: {getattr(error, 'strerror', None) or 'is no UTF-8 text'}") from None
    elif sys.stdin.isatty():
        raise UserError(f"there is no prompt: write {example} after the model, name --file, or pipe it in")
    else:
        with decoding_input():
            text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise UserError(f"the prompt is empty: give {example}")
    if not args.chat:
        return text
    first = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*first, {"role": "user", "content": text}]


def _as_json(found: Any) -> dict[str, Any]:
    """A completion as JSON; seconds are of the whole call."""
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
