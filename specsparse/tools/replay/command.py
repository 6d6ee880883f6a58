"""What other verifiers, draft lengths, trees and temperatures would accept in a recorded run, without its models.

The run must have been given record_laws=32 (or another number of tokens to keep of each distribution).
"""

import argparse
from pathlib import Path
from typing import Any

from specsparse.cli.arguments import names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and what to try on it."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN_DIR", help="directory of the run, or its laws.npz")
    add("--verifier", type=names, metavar="LIST", help="verifiers (all that fit the recorded draws)")
    shape = parser.add_mutually_exclusive_group()
    lengths = "draft lengths, 4 or 1,2,4 (1 to the recorded one)"
    shape.add_argument("--gamma", type=_numbers, metavar="LIST", help=lengths)
    narrower = "a narrower tree: most siblings on each level, 2,1; may be given again"
    shape.add_argument("--tree", type=_numbers, metavar="LIST", action="append", help=narrower)
    add("--temperature", type=float, metavar="T", help="of the target (the recorded one)")
    add("--json", action="store_true", help="one JSON line a method instead of the table")


def main(args: argparse.Namespace) -> int:
    """Replay and print."""
    import dataclasses

    from specsparse.measure.recording import Recording
    from specsparse.support import tables, terminal
    from specsparse.support.files import to_json
    from specsparse.tools.replay.replay import replay, verifiers_of

    recording = Recording.load(args.run)
    verifiers = args.verifier or verifiers_of(recording)
    cuts: list[dict[str, Any]] = [{"widths": widths} for widths in args.tree or ()]
    cuts = cuts or [{"gamma": g} for g in args.gamma or range(1, recording.about["depth"] + 1)]
    found = [replay(recording, v, **cut, temperature=args.temperature) for v in verifiers for cut in cuts]
    if args.json:
        for one in found:
            print(to_json(dataclasses.asdict(one)))
        return 0
    size = "tree" if args.tree else "gamma"
    rates = ("tokens per pass", "mean acceptance length", "accepted", "with the run's coins")
    table = tables.new("verifier", size, *rates)
    for one in found:
        length = one.mean_acceptance_length
        cells = [f"{one.tokens_per_pass:.3f}", "-" if length is None else f"{length:.3f}"]
        cut = str(one.gamma) if one.widths is None else ",".join(map(str, one.widths))
        table.add_row(one.verifier, cut, *cells, f"{one.accepted:.1f} of {one.drafted}", str(one.realised))
    out = terminal.console()
    about = recording.about
    own = f"{about['verifier']}, gamma {about['depth']}, temperature {about['temperature']:g}"
    out.print(f"{len(recording)} rounds recorded with {own}: {int(recording.accepted.sum())} accepted")
    out.print(table)
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers, such as 1,2,4") from None
