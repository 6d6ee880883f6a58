"""Chat with a model by any method; colours tell where each token came from. /reset begins again, /exit ends.

With a draft the answer is decoded round by round, so that its colours can be told; that is slower than a run.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from specsparse.errors import UserError

STYLES = {"accepted": "green", "recovered": "yellow", "bonus": "cyan", "plain": ""}
"""Colour of a token by where it came from."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, method, law and length of the answers."""
    add = parser.add_argument
    add("model", nargs="?", default="smollm2-135m", help="a known name, a GGUF file or hf://owner/repo/file.gguf")
    add(
        "--drafter",
        default="prompt_lookup",
        metavar="NAME",
        help="as in configs; none for plain decoding (%(default)s)",
    )
    add("--draft", metavar="FILE", help="a draft model: the drafter is then model")
    add("--verifier", metavar="NAME", help="the first lossless one that fits the draft")
    add("--gamma", type=int, default=4, metavar="N", help="tokens drafted in a round (%(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="of the answers (%(default)s)")
    add("--max-tokens", type=int, default=256, metavar="N", help="of an answer (%(default)s)")
    add("--system", metavar="TEXT", help="a system message")
    add("--prompt", metavar="TEXT", help="answer this one message and end")
    add("--seed", type=int, default=0, help="of the noise (%(default)s)")


def main(args: argparse.Namespace) -> int:
    """Load, then answer until the input ends."""
    from rich.text import Text

    from specsparse import api
    from specsparse.cli.conversation import ORIGINS, Conversation
    from specsparse.engine.sampling.params import SamplingParams
    from specsparse.support import terminal

    sampling = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    method = _method(args)
    out = terminal.console()
    with terminal.loading(out, f"loading {args.model}") as progress:
        model = api.load(args.model, progress=progress)
    first = [{"role": "system", "content": args.system}] if args.system else []
    chat = Conversation(model, sampling, method, args.seed, list(first))
    if method:
        legend = [Text(f"{name}: {ORIGINS[name]}", style=style) for name, style in STYLES.items()]
        out.print(Text("\n").join(legend))
    for message in [args.prompt] if args.prompt is not None else _messages(out):
        if message == "/reset":
            chat.messages = list(first)
            continue
        _answer(chat, message, out, alone=args.prompt is not None)
    return 0


def _answer(chat: Any, message: str, out: Any, *, alone: bool) -> None:
    """One answer and its figures; a mistake ends a chat of one message, and only the message in a longer one."""
    from rich.text import Text

    try:
        found = chat.say(
            message, lambda piece, origin: out.print(Text(piece, style=STYLES[origin]), end="", soft_wrap=True)
        )
    except UserError as error:
        if alone:
            raise
        out.print(Text(str(error), style="red"), soft_wrap=True)
        return
    out.print()
    out.print(Text(_figures(found), style="dim"))


def _method(args: argparse.Namespace) -> dict[str, Any]:
    """`drafter` and `verifier` for a generation; {} for plain decoding."""
    from specsparse.speculative.method import choose_verifier, make_drafter
    from specsparse.speculative.policies.base import Fixed

    if args.gamma < 1 or args.max_tokens < 1:
        raise UserError(f"--gamma {args.gamma} and --max-tokens {args.max_tokens} must be at least 1")
    name = "model" if args.draft else args.drafter
    if name == "none":
        if args.verifier:
            raise UserError("--verifier needs a drafter")
        return {}
    drafter = make_drafter(name, {"model": args.draft} if args.draft else {}, Fixed(args.gamma))
    return {
        "drafter": drafter,
        "verifier": choose_verifier(drafter, args.verifier, temperature=args.temperature, drafted_by=name),
    }


def _messages(out: Any) -> Iterator[str]:
    """Lines of the user until the input ends."""
    while True:
        try:
            line = out.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            out.print()
            return
        if line in ("/exit", "/quit"):
            return
        if line:
            yield line


def _figures(found: Any) -> str:
    """Tokens, rate, and what the draft was good for."""
    stats, counters = found.stats, found.stats.counters
    rate = stats.decode_tokens / stats.decode_s if stats.decode_s else 0.0
    text = f"{stats.decode_tokens} tokens, {rate:.0f} tok/s"
    if counters.num_draft_tokens:
        passes = counters.num_emitted_tokens / counters.num_rounds
        share = counters.num_accepted_tokens / counters.num_draft_tokens
        text += f", {passes:.2f} tokens a target pass, {share:.0%} of the drafted ones kept"
    return text
