"""Time per stage of speculative rounds and per kernel of a forward pass, and a trace for Perfetto (ui.perfetto.dev)."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specsparse.cli import method_options
from specsparse.errors import UserError
from specsparse.support.files import need_place

_PROMPT = "List the days of the week, then list the days of the week again in the same order."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, method, and where to write."""
    method_options.add_arguments(parser)
    add = parser.add_argument
    add("--gamma", type=int, default=4, metavar="N", help="tokens drafted in a round (%(default)s)")
    add("--prompt", default=_PROMPT, metavar="TEXT", help="what is decoded for the stages")
    add("--max-tokens", type=int, default=64, metavar="N", help="of it (%(default)s)")
    add("--depth", type=int, default=128, metavar="N", help="tokens in the cache of the forward pass (%(default)s)")
    add("--out", type=Path, default=Path("trace.json"), metavar="FILE", help="the trace (%(default)s)")
    add("--json", action="store_true", help="one JSON object instead of the tables")


def main(args: argparse.Namespace) -> int:
    """Measure, print, write the trace."""
    from rich.console import Console

    from specsparse import api
    from specsparse.measure import machine
    from specsparse.support import terminal
    from specsparse.support.files import to_json, write_atomically
    from specsparse.tools.profile import stages as profile

    if min(args.gamma, args.max_tokens) < 1 or args.depth < 0:
        raise UserError("--gamma and --max-tokens must be at least 1, --depth at least 0")
    need_place(args.out, args.model, args.drafter, args.draft)  # before the measurement, not after it
    method = _method(args)
    out = terminal.console() if not args.json else Console(stderr=True)
    with terminal.loading(out, f"loading {args.model}") as progress:
        model = api.load(args.model, progress=progress)
    with terminal.busy(out, "measuring"):
        found = profile.profile(
            model, prompt=args.prompt, method=method, rows=args.gamma + 1 if method else 1, depth=args.depth,
            max_tokens=args.max_tokens, read_bandwidth=machine.read_bandwidth(),
        )  # fmt: skip
    write_atomically(args.out, to_json(profile.chrome_trace(found, model=model.path.name)))
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


def _parts(found: Any) -> list[Any]:
    """The tables and what they add up to."""
    parts = []
    if found.rounds:
        total, count = sum(found.stages().values()), len(found.rounds)
        rows = [(name, str(count), f"{1e3 * s / count:.3f}", f"{s / total:.1%}") for name, s in found.stages().items()]
        parts.append(_table(("stage", "rounds", "ms a round", "share"), rows))
    total = sum(kernel.seconds for kernel in found.kernels)
    rows = [
        (k.name, str(k.calls), f"{1e3 * k.seconds:.3f}", f"{k.bandwidth / 1e9:.1f}", f"{k.seconds / total:.1%}")
        for k in found.kernels
    ]
    parts.append(_table(("kernel", "calls", "ms", "GB/s", "share"), rows))
    nbytes = sum(kernel.nbytes for kernel in found.kernels)
    parts.append(
        f"a forward of {found.rows} rows after {found.depth} tokens: {1e3 * found.forward_s:.3f} ms as it runs "
        f"({nbytes / found.forward_s / 1e9:.1f} of {found.read_bandwidth / 1e9:.1f} GB/s), "
        f"{1e3 * total:.3f} ms kernel by kernel"
    )
    return parts


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from specsparse.support import tables

    table = tables.new(*titles)
    for row in rows:
        table.add_row(*row)
    return table
