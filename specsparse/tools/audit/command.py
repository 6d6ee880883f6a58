"""Does a verification of n rows give the bits of one row? Asked of specsparse and of other engines on the same file.

Rows of a text are computed one at a time and in batches of every width: which widths share bits, where the most likely
token is another one, and so how often greedy speculation writes another text than plain decoding.

    audit --model smollm2-135m --engine specsparse,llama.cpp --threads 1,2
    audit diff A B       two runs of any engines, JSON Lines of {"id": .., "token_ids": [..]} or folders of our runs
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from specsparse.cli.numbers import positive, sizes
from specsparse.errors import UserError
from specsparse.support.files import atomically, need_place

if TYPE_CHECKING:
    from specsparse.support.files import Json

STDOUT = "-"
"""The file of --json without one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to ask of whom."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("diff", nargs="*", metavar="diff A B", help="instead: where the texts of two runs fork")
    add("--model", default="smollm2-135m", help="a known name or the path of a GGUF file (%(default)s)")
    engines = "specsparse, llama.cpp, ik_llama.cpp, transformers, transformers-bf16 (specsparse)"
    add("--engine", type=_names, default=("specsparse",), metavar="LIST", help=engines)
    add("--threads", type=_positives, default=(), metavar="LIST", help="1,2 (all cores)")
    add("--widths", type=sizes, default=sizes("1..16,24,32,48"), metavar="LIST", help="1..48 (1..16,24,32,48)")
    add("--quantise", type=_names, default=(), metavar="LIST", help="the file requantised: Q4_0,Q8_0,F16 (as it is)")
    add("--flash", type=_switches, default=(True, False), metavar="LIST", help="on,off, where a peer has it (both)")
    add("--windows", type=positive, default=4, metavar="N", help="places of the text that are audited (%(default)s)")
    add("--prompt-tokens", type=positive, default=40, metavar="N", help="before the rows (%(default)s)")
    add("--tokens", type=positive, default=48, metavar="N", help="rows of each window (%(default)s)")
    rows = "greedy: rows of the engine's own greedy text, where a flip is a fork; text: of the real one (%(default)s)"
    add("--rows", choices=("greedy", "text"), default="greedy", help=rows)
    add("--text", type=Path, metavar="FILE", help="a real text (the built-in prompts)")
    add("--sides", type=_names, metavar="LIST", help="with diff: whose texts of a run's prompts.jsonl, one or A's,B's")
    add("--json", nargs="?", const=STDOUT, metavar="FILE", help="the report as JSON, last, or in FILE as it grows")
    add("--html", type=Path, metavar="FILE", help="the report as a page")
    add("--figure", type=Path, metavar="FILE.png", help="the widths as a picture")


def main(args: argparse.Namespace) -> int:
    """Audit and print; 1 where specsparse itself is not one group."""
    for path in (args.json, args.html, args.figure):
        if path not in (None, STDOUT):
            # Before the work, not after it.
            need_place(path, args.model, args.text, *args.diff[1:], picture=path is args.figure)
    if args.diff:
        return _diff(args)
    if args.sides:
        raise UserError("--sides goes with audit diff A B")
    if args.tokens < 2:
        raise UserError("--tokens 1 is too few: two rows are the least")
    from specsparse.support import terminal
    from specsparse.support.files import to_json, write_atomically
    from specsparse.tools.audit import job  # after the arguments: JAX takes a second
    from specsparse.tools.peers.engines import OURS

    out = terminal.console()
    plan = job.AuditPlan(
        model=args.model, engines=args.engine, threads=args.threads, widths=args.widths, types=args.quantise,
        flash=args.flash, windows=args.windows, prompt_tokens=args.prompt_tokens, tokens=args.tokens,
        greedy=args.rows == "greedy", text=args.text,
    )  # fmt: skip
    found: Json = {}

    def after(report: "Json") -> None:
        found.update(report)
        if args.json not in (None, STDOUT):
            write_atomically(Path(args.json), to_json(report) + "\n")

    try:
        job.run(plan, out, after)
    finally:  # of a run that is stopped, the cases that were done
        if found:
            _show(found, args, out)
    broken = [case for case in found["cases"] if case["engine"] == OURS and case["verdict"] != job.ONE_GROUP]
    return 1 if broken else 0


def _show(found: "Json", args: argparse.Namespace, out: Console) -> None:
    """Tables, lines, and the files that were asked for."""
    from specsparse.report.figures.widths import widths
    from specsparse.support import tables
    from specsparse.tools.audit import page as audit

    tables.show(out, audit.cases_table(found), names=4)
    if (groups := audit.groups_table(found)) is not None:
        tables.show(out, groups, names=2)
    for line in audit.lines(found):
        out.print(line, soft_wrap=True)
    if args.figure is not None:
        with atomically(args.figure) as file:
            file.write(widths(found).png())
        out.print(f"figure: {args.figure}", soft_wrap=True)
    if args.html is not None:
        audit.write_page(found, args.html)
        out.print(f"page: {args.html}", soft_wrap=True)
    _json(args.json, found, out)


def _diff(args: argparse.Namespace) -> int:
    """Where two runs' texts fork."""
    from specsparse.support import tables, terminal
    from specsparse.tools.audit import page as audit
    from specsparse.tools.audit import texts

    if args.diff[0] != "diff" or len(args.diff) != 3:
        raise UserError("audit takes options, or two runs: audit diff A B")
    if args.html or args.figure:
        raise UserError("audit diff makes a table and --json; it has no --html and no --figure")
    sides = args.sides or (None, None)
    if len(sides) > 2:
        raise UserError("--sides takes one side, or A's and B's")
    paths = [Path(path) for path in args.diff[1:]]
    a, b = (texts.read(path, side) for path, side in zip(paths, (sides[0], sides[-1]), strict=True))
    found, out = texts.compare_texts(a, b, where=args.diff[1:]), terminal.console()
    if found.forked:
        tables.show(out, audit.forks_table(found))
    for line in audit.forks_lines(found):
        out.print(line, soft_wrap=True)
    _json(args.json, {"audit": "specsparse audit diff", "version": 1, "a": args.diff[1], "b": args.diff[2],
                      **found.cells()}, out)  # fmt: skip
    return 0


def _json(file: str | None, found: "Json", out: Console) -> None:
    """The report, where it was asked for."""
    from specsparse.support.files import to_json, write_atomically

    if file == STDOUT:
        print(to_json(found), flush=True)
    elif file is not None:
        write_atomically(Path(file), to_json(found) + "\n")
        out.print(f"report: {file}", soft_wrap=True)


def _names(text: str) -> tuple[str, ...]:
    """Words between commas, each once."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r}: names between commas")
    return found


def _positives(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(positive(part) for part in text.split(",")))


def _switches(text: str) -> tuple[bool, ...]:
    """on, off, or both."""
    words = _names(text)
    if not set(words) <= {"on", "off"}:
        raise argparse.ArgumentTypeError(f"{text!r}: on, off or on,off")
    return tuple(word == "on" for word in words)
