"""Time per stage of speculative rounds and per kernel of a forward pass, and a trace for Perfetto (ui.perfetto.dev)."""

import argparse
from pathlib import Path

from specsparse.cli import arguments
from specsparse.support.files import need_place

_PROMPT = "List the days of the week, then list the days of the week again in the same order."
_GAMMA = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser, prompt=True)
    arguments.add_draft(parser.add_argument_group("drafts").add_argument)
    arguments.add_sampling(parser, ("temperature", "top_k", "top_p", "max_tokens"), temperature=0.0, max_tokens=64)
    add = parser.add_argument
    about = "tokens in the cache of the forward pass (%(default)s)"
    add("--depth", type=arguments.count, default=128, metavar="N", help=about)
    add("--out", type=Path, default=Path("trace.json"), metavar="FILE", help="the trace (%(default)s)")
    add("--json", action="store_true", help="one JSON object instead of the tables")


def main(args: argparse.Namespace) -> int:
    from rich.console import Console

    from specsparse.support import terminal
    from specsparse.support.files import to_json, write_atomically
    from specsparse.tools.profile.stages import chrome_trace, parts, profile

    arguments.settle(args)
    if args.gamma is None and args.drafter != "none":
        args.gamma = _GAMMA
    need_place(args.out, args.model, args.drafter, args.draft)  # before the measurement, not after it
    sampling = arguments.sampling_params(args).merged(ignore_eos=True)
    method = arguments.method_of(args, sampling).arguments()
    out = terminal.console() if not args.json else Console(stderr=True)
    prompt = arguments.piped() if args.prompt == "-" else args.prompt or _PROMPT
    model = arguments.load(args, out)
    with terminal.busy(out, "measuring"):
        options = {"rows": args.gamma + 1 if method else 1, "depth": args.depth, "sampling": sampling}
        report, rounds = profile(model, prompt=prompt, method=method, **options)
    write_atomically(args.out, to_json(chrome_trace(report, rounds, model=model.path.name)))
    if args.json:
        print(to_json(report))
    else:
        arguments.show(out, [*parts(report), f"trace: {args.out} (open it at ui.perfetto.dev)"])
    return 0
