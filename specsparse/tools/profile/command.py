"""Time per stage of speculative rounds and per kernel of a forward pass, and a trace for Perfetto (ui.perfetto.dev)."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specsparse.cli import method_options
from specsparse.cli.arguments import count, positive
from specsparse.support.files import need_place

_PROMPT = "List the days of the week, then list the days of the week again in the same order."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, method, and where to write."""
    method_options.add_arguments(parser)
    add = parser.add_argument
    add("--gamma", type=positive, default=4, metavar="N", help="tokens drafted in a round (%(default)s)")
    add("--prompt", default=_PROMPT, metavar="TEXT", help="what is decoded for the stages")
    add("--max-tokens", type=positive, default=64, metavar="N", help="of it (%(default)s)")
    add("--depth", type=count, default=128, metavar="N", help="tokens in the cache of the forward pass (%(default)s)")
    add("--out", type=Path, default=Path("trace.json"), metavar="FILE", help="the trace (%(default)s)")
    add("--json", action="store_true", help="one JSON object instead of the tables")


def main(args: argparse.Namespace) -> int:
    """Measure, print, write the trace."""
    from rich.console import Console

    from specsparse import api
    from specsparse.measure import machine
    from specsparse.support import terminal
    from specsparse.support.files import to_json, write_atomically
    from specsparse.tools.profile.stages import chrome_trace, profile

    need_place(args.out, args.model, args.drafter, args.draft)  # before the measurement, not after it
    method = _method(args)
    out = terminal.console() if not args.json else Console(stderr=True)
    with terminal.loading(out, f"loading {args.model}") as progress:
        model = api.load(args.model, progress=progress)
    with terminal.busy(out, "measuring"):
        found = profile(
            model, prompt=args.prompt, method=method, rows=args.gamma + 1 if method else 1, depth=args.depth,
            max_tokens=args.max_tokens, read_bandwidth=machine.read_bandwidth(),
        )  # fmt: skip
    write_atomically(args.out, to_json(chrome_trace(found, model=model.path.name)))
    if args.json:
        print(to_json(found.to_dict()))
        return 0
    for part in _parts(found):
        out.print(part)
    out.print(f"trace: {args.out} (open it at ui.perfetto.dev)", soft_wrap=True)
    return 0


def _method(args: argparse.Namespace) -> dict[str, Any]:
    """`drafter` and `verifier` for a generation; {} for plain decoding."""
    from specsparse.runtime.method import MethodSpec
    from specsparse.speculative.policies.base import Fixed

    return MethodSpec(method_options.drafter_of(args.drafter, args.draft), policy=Fixed(args.gamma)).arguments()


def _parts(found: Any) -> Iterator[Any]:
    """The tables and what they add up to."""
    from specsparse.support import tables

    if found.rounds:
        table, stages, count = tables.new("stage", "rounds", "ms a round", "share"), found.stages(), len(found.rounds)
        for name, s in stages.items():
            table.add_row(name, str(count), f"{1e3 * s / count:.3f}", f"{s / sum(stages.values()):.1%}")
        yield table
    total, nbytes = (sum(getattr(kernel, name) for kernel in found.kernels) for name in ("seconds", "nbytes"))
    table = tables.new("kernel", "calls", "ms", "GB/s", "share")
    for k in found.kernels:
        rate, share = f"{k.bandwidth / 1e9:.1f}", f"{k.seconds / total:.1%}"
        table.add_row(k.name, str(k.calls), f"{1e3 * k.seconds:.3f}", rate, share)
    yield table
    yield (
        f"a forward of {found.rows} rows after {found.depth} tokens: {1e3 * found.forward_s:.3f} ms as it runs "
        f"({nbytes / found.forward_s / 1e9:.1f} of {found.read_bandwidth / 1e9:.1f} GB/s), "
        f"{1e3 * total:.3f} ms kernel by kernel"
    )
