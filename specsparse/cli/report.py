"""One HTML page about finished runs, with PNG figures and the CSV behind each: `report RUN_DIR ..`.

`report diff A B` compares two runs. The page needs no network and nothing beside it.
"""

import argparse
import os
from pathlib import Path

from specsparse.cli.arguments import show
from specsparse.errors import UserError
from specsparse.support import terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN_DIR", help="runs, sweeps, or folders of them; or: diff A B")
    add("--out", type=Path, metavar="DIR", help="the folder to write (report/ in the folder of the runs)")
    add("--title", help="heading of the page (the names of the experiments)")


def main(args: argparse.Namespace) -> int:
    """Write the page, and say what is on it and what is not."""
    if "" in args.runs:
        raise UserError("a run's folder is empty: name it, such as runs/NAME, or . for the current folder")
    from specsparse.report import pages, runs  # after the arguments: matplotlib takes a second

    if args.runs[0] == "diff":
        return _diff(args)
    paths = [Path(path) for path in args.runs]
    found = runs.find(paths)
    title = args.title or ", ".join(dict.fromkeys(run.name for run in found))
    folders = [path if path.is_dir() else path.parent for path in paths]
    common = folders[0] if len(folders) == 1 else Path(os.path.commonpath([f.resolve() for f in folders]))
    out = args.out or common / "report"
    try:
        written = pages.write(found, out, title=title)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}; give --out DIR") from None
    for figure in written.made:
        print(f"{figure.name}: {figure.title}, {len(figure.rows)} rows")
    for left_out in written.missing:
        print(f"left out {left_out.name}: {left_out.why}")
    for run in runs.stopped(paths):
        print(f"left out {run.directory}: stopped after {run.record.get('passes') or 0} passes")
    print(f"page: {written.page}")
    print(f"figures and CSV: {written.page.parent / pages.FIGURES}")
    return 0


def _diff(args: argparse.Namespace) -> int:
    """Print the differences of two runs; with --out as a page too."""
    from specsparse.report import diff, runs

    if len(args.runs) != 3:
        raise UserError("report diff takes two runs: report diff A B")
    a, b = (runs.find([Path(path)]) for path in args.runs[1:])
    for path, found in zip(args.runs[1:], (a, b)):
        if len(found) != 1:
            raise UserError(f"{path}: holds {len(found)} runs; diff takes one on each side, such as {path}/0")
    difference, out = diff.diff(a[0], b[0]), terminal.console()
    show(out, [*diff.tables(difference), *diff.lines(difference)])
    if args.out is not None:
        out.print(f"page: {diff.write(difference, args.out)}", soft_wrap=True)
    return 0
