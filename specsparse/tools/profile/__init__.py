"""Time per stage of speculative rounds and per kernel of a forward pass, and a trace for Perfetto (ui.perfetto.dev)."""

import argparse
from pathlib import Path

from specsparse.cli import arguments
from specsparse.support.files import need_place

_PROMPT = "List the days of the week, then list the days of the week again in the same order."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser)
    add = parser.add_argument
    add("--gamma", type=arguments.positive, default=4, metavar="N", help="tokens drafted in a round (%(default)s)")
    add("--prompt", default=_PROMPT, metavar="TEXT", help="the prompt whose rounds are timed")
    add("--max-tokens", type=arguments.positive, default=64, metavar="N", help="tokens to decode (%(default)s)")
    about = "tokens in the cache of the forward pass (%(default)s)"
    add("--depth", type=arguments.count, default=128, metavar="N", help=about)
    add("--out", type=Path, default=Path("trace.json"), metavar="FILE", help="the trace (%(default)s)")
    add("--json", action="store_true", help="one JSON object instead of the tables")


def main(args: argparse.Namespace) -> int:
    from rich.console import Console

    from specsparse import api
    from specsparse.runtime.method import MethodSpec
    from specsparse.speculative.policies.base import Fixed
    from specsparse.support import terminal
    from specsparse.support.files import to_json, write_atomically
    from specsparse.tools.profile.stages import chrome_trace, parts, profile

    need_place(args.out, args.model, args.drafter, args.draft)  # before the measurement, not after it
    drafter = arguments.drafter_of(args.drafter, args.draft)
    method = MethodSpec(drafter, policy=Fixed(args.gamma)).arguments()
    out = terminal.console() if not args.json else Console(stderr=True)
    with terminal.loading(out, f"loading {args.model}") as progress:
        model = api.load(args.model, progress=progress)
    with terminal.busy(out, "measuring"):
        rows = args.gamma + 1 if method else 1
        options = {"method": method, "rows": rows, "depth": args.depth, "max_tokens": args.max_tokens}
        report, rounds = profile(model, prompt=args.prompt, **options)
    write_atomically(args.out, to_json(chrome_trace(report, rounds, model=model.path.name)))
    if args.json:
        print(to_json(report))
    else:
        arguments.show(out, [*parts(report), f"trace: {args.out} (open it at ui.perfetto.dev)"])
    return 0
