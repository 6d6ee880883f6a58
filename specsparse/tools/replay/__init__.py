"""The acceptance that other verifiers, draft lengths, trees and temperatures would have had in a recorded run, without
its models.

The run must have been given record_laws=32 (or another number of tokens to keep of each distribution).
"""

import argparse
from pathlib import Path
from typing import Any

from specsparse.cli.arguments import list_of, names, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN_DIR", help="directory of the run, or its laws.npz")
    add("--verifier", type=names, metavar="LIST", help="verifiers (all that fit the recorded draws)")
    shape = parser.add_mutually_exclusive_group()
    lengths = "draft lengths, 4 or 1,2,4 (1 to the recorded one)"
    shape.add_argument("--gamma", type=list_of(int), metavar="LIST", help=lengths)
    narrower = "a narrower tree: most siblings on each level, 2,1; may be given again"
    shape.add_argument("--tree", type=list_of(int), metavar="LIST", action="append", help=narrower)
    add("--temperature", type=float, metavar="T", help="temperature of the target (the recorded one)")
    add("--json", action="store_true", help="one JSON line a method instead of the table")


def main(args: argparse.Namespace) -> int:
    import dataclasses

    from specsparse.measure.recording import Recording
    from specsparse.support import tables, terminal
    from specsparse.support.files import to_json
    from specsparse.tools.replay.replay import replay, verifiers_of

    recording = Recording.load(args.run)
    about = recording.about
    cuts: list[dict[str, Any]] = [{"widths": widths} for widths in args.tree or ()]
    cuts = cuts or [{"gamma": g} for g in args.gamma or range(1, about["depth"] + 1)]
    verifiers = args.verifier or verifiers_of(recording)
    results = [replay(recording, v, **cut, temperature=args.temperature) for v in verifiers for cut in cuts]
    if args.json:
        for result in results:
            print(to_json(dataclasses.asdict(result)))
        return 0
    columns = ("tokens per pass", "mean acceptance length", "accepted", "with the run's coins")
    table = tables.new("verifier", "tree" if args.tree else "gamma", *columns)
    for r in results:
        length = "-" if r.mean_acceptance_length is None else f"{r.mean_acceptance_length:.3f}"
        cut = str(r.gamma) if r.widths is None else ",".join(map(str, r.widths))
        rates = (f"{r.tokens_per_pass:.3f}", length, f"{r.accepted:.1f} of {r.drafted}", str(r.realised))
        table.add_row(r.verifier, cut, *rates)
    own = f"{about['verifier']}, gamma {about['depth']}, temperature {about['temperature']:g}"
    first = f"{len(recording)} rounds recorded with {own}: {int(recording.accepted.sum())} accepted"
    show(terminal.console(), [first, table])
    return 0
