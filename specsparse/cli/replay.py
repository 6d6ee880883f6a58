"""What other verifiers, draft lengths and temperatures would have accepted in a recorded run, without its models.

The run must have been given record_laws=32 (or another number of tokens to keep of each law).
"""

import argparse
from pathlib import Path

from specsparse.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and what to try on it."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN_DIR", help="directory of the run, or its laws.npz")
    add("--verifier", type=_names, metavar="LIST", help="verifiers (all that fit the recorded draws)")
    add("--gamma", type=_numbers, metavar="LIST", help="draft lengths, 4 or 1,2,4 (1 to the recorded one)")
    add("--temperature", type=float, metavar="T", help="of the target (the recorded one)")
    add("--json", action="store_true", help="one JSON line a method instead of the table")


def main(args: argparse.Namespace) -> int:
    """Replay and print."""
    import dataclasses

    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from specsparse import display, replay
    from specsparse.recording import Recording
    from specsparse.trackers import to_json

    recording = Recording.load(args.run)
    names = args.verifier or replay.verifiers_of(recording)
    gammas = args.gamma or tuple(range(1, recording.about["depth"] + 1))
    found = [replay.replay(recording, v, gamma=g, temperature=args.temperature) for v in names for g in gammas]
    if args.json:
        for one in found:
            print(to_json(dataclasses.asdict(one)))
        return 0
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("verifier", "gamma", "tokens per pass", "mean acceptance length", "accepted", "with the run's coins"):
        table.add_column(title, justify="left" if title == "verifier" else "right")
    for one in found:
        length = one.mean_acceptance_length
        cells = [f"{one.tokens_per_pass:.3f}", "-" if length is None else f"{length:.3f}"]
        expected = "-" if one.accepted is None else f"{one.accepted:.1f}"
        table.add_row(one.verifier, str(one.gamma), *cells, f"{expected} of {one.drafted}", str(one.realised))
    out = display.console()
    about = recording.about
    own = f"{about['verifier']}, gamma {about['depth']}, temperature {about['temperature']:g}"
    out.print(f"{len(recording)} rounds recorded with {own}: {int(recording.accepted.sum())} accepted")
    out.print(table)
    return 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--gamma {text}: whole numbers, such as 1,2,4") from None
