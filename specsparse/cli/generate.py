"""Continue a prompt by any method: text as it comes, or one JSON object.

The prompt is the argument, a file or the standard input; a newline at the end of the last two is left out.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specsparse.cli import method_options, sampling_options
from specsparse.errors import UserError
from specsparse.support.terminal import decoding_input


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, prompt, method and form of the answer, then every sampling option."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a known name, a GGUF file or hf://owner/repo/file.gguf")
    add("prompt", nargs="?", metavar="PROMPT", help="text to continue; without it the standard input, or --file")
    add("--file", metavar="FILE", help="the prompt is in this file")
    add("--chat", action="store_true", help="the prompt is a user's message in the model's chat template")
    add("--system", metavar="TEXT", help="a system message before it (with --chat)")
    method_options.add_parts(parser)
    add("--json", action="store_true", help="one JSON object: text, token ids, counters, seed, finish reason")
    sampling_options.add_arguments(parser, sampling_options.EVERY, temperature=0.0, max_tokens=256)


def main(args: argparse.Namespace) -> int:
    """Load, then write the continuation to the standard output, and figures to a terminal beside it."""
    params, prompt = _checked(args), _prompt(args)
    from specsparse import api
    from specsparse.support import terminal

    method = method_options.named(args).at(params.temperature)
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
        raise UserError('the prompt is empty: give some text, for instance "Once upon a time"')
    if not args.chat:
        return text
    first = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*first, {"role": "user", "content": text}]


def _read(file: str | None) -> str:
    """A file, or the standard input, as UTF-8."""
    if file is None:
        with decoding_input():
            return sys.stdin.read()
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is no UTF-8 text") from error


def _print_texts(every: Sequence[Any]) -> None:
    """Several texts, each under a line with its number."""
    for i, found in enumerate(every, 1):
        print(f"--- {i} of {len(every)}\n{found.text}")


def _print_json(every: Sequence[Any]) -> None:
    """One object; of several completions with a list of them."""
    from specsparse.support.files import to_json

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
