"""Does a verification of n rows give the bits of one row? Asked of specsparse and of other engines on the same file.

    audit [bits]         which widths share bits, and how often greedy speculation writes another text than plain
                         decoding: audit --engine specsparse,llama.cpp --threads 1,2
    audit diff A B       where the texts of two runs of any engines fork

Each prints tables; --json adds the report as a last line of JSON, --json FILE writes it there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from specsparse.cli.arguments import (
    STDOUT,
    add_json,
    draw,
    names,
    names_among,
    need_places,
    positive,
    sizes,
    write_json,
)
from specsparse.errors import UserError
from specsparse.support.files import Json, to_json, write_atomically
from specsparse.tools.peers.process import PEERS

_BITS = """Rows of a text are computed one at a time and in batches of every width: which widths share bits, where the
most likely token is another one, and so how often greedy speculation writes another text than plain decoding."""
_DIFF = """Where the texts of two runs fork. A and B are JSON Lines of {"id": .., "token_ids": [..]} of any engine, or
folders of runs of ours."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to ask of whom."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    kinds = parser.add_subparsers(dest="audit", required=True, metavar="bits | diff")

    made = kinds.add_parser("bits", help="which widths share bits (the default)", description=_BITS, allow_abbrev=False)
    made.set_defaults(run=_bits)
    add = made.add_argument
    add("--model", default="smollm2-135m", help="a known name or the path of a GGUF file (%(default)s)")
    engines = ("specsparse", *PEERS)
    add("--engine", type=names_among("engine", engines), default=("specsparse",), metavar="LIST",
        help=f"{', '.join(engines)} (specsparse)")  # fmt: skip
    add("--threads", type=_positives, default=(), metavar="LIST", help="1,2 (all cores)")
    add("--widths", type=sizes, default=sizes("1..16,24,32,48"), metavar="LIST", help="1..48 (1..16,24,32,48)")
    add("--quantise", type=names, default=(), metavar="LIST", help="the file requantised: Q4_0,Q8_0,F16 (as it is)")
    add("--flash", type=_switches, default=(True, False), metavar="LIST", help="on,off, if a peer has it (both)")
    add("--windows", type=positive, default=4, metavar="N", help="places of the text that are audited (%(default)s)")
    add("--prompt-tokens", type=positive, default=40, metavar="N", help="before the rows (%(default)s)")
    add("--tokens", type=positive, default=48, metavar="N", help="rows of each window, 2 or more (%(default)s)")
    rows = "greedy: rows of the engine's own greedy text, where a flip is a fork; text: of the real one (%(default)s)"
    add("--rows", choices=("greedy", "text"), default="greedy", help=rows)
    add("--text", type=Path, metavar="FILE", help="a real text (the built-in prompts)")
    add_json(add)
    add("--html", type=Path, metavar="FILE", help="the report as a page")
    add("--figure", type=Path, metavar="FILE.png", help="the widths as a picture")

    made = kinds.add_parser("diff", help="where the texts of two runs fork", description=_DIFF, allow_abbrev=False)
    made.set_defaults(run=_diff)
    add = made.add_argument
    add("a", metavar="A", help="JSON Lines, or a run's folder")
    add("b", metavar="B", help="another")
    add("--sides", type=names, metavar="LIST", help="whose texts of a run's prompts.jsonl, one side or A's,B's")
    add_json(add)


def rewritten(argv: Sequence[str]) -> list[str]:
    """`bits` if no sub-command is named."""
    return [*argv] if argv and argv[0] in ("bits", "diff", "-h", "--help") else ["bits", *argv]


def main(args: argparse.Namespace) -> int:
    """Audit and print; 1 if specsparse itself is not one group."""
    return args.run(args)


def _bits(args: argparse.Namespace) -> int:
    need_places([args.json, args.html], [args.figure], args.model, args.text)
    if args.tokens < 2:
        raise UserError("--tokens 1 is too few: two rows are the least")
    from specsparse.support import terminal
    from specsparse.tools.audit import same_bits  # after the arguments: JAX takes a second

    out, found = terminal.console(), Json()
    plan = same_bits.AuditPlan(
        model=args.model, engines=args.engine, threads=args.threads, widths=args.widths, types=args.quantise,
        flash=args.flash, windows=args.windows, prompt_tokens=args.prompt_tokens, tokens=args.tokens,
        greedy=args.rows == "greedy", text=args.text,
    )  # fmt: skip

    def after(report: Json) -> None:
        found.update(report)
        if args.json not in (None, STDOUT):  # as it grows
            write_atomically(Path(args.json), to_json(report) + "\n")

    try:
        same_bits.run(plan, out, after)
    finally:  # of a run that is stopped, the cases that were done
        if found:
            _show(found, args, out)
    ours = [case for case in found["cases"] if case["engine"] == same_bits.OURS]
    return int(any(case["verdict"] != same_bits.ONE_GROUP for case in ours))


def _show(found: Json, args: argparse.Namespace, out: Console) -> None:
    """Tables, lines, and the files that were asked for."""
    from specsparse.support import tables
    from specsparse.tools.audit import audit_page
    from specsparse.tools.audit.widths_figure import widths

    tables.show(out, audit_page.cases_table(found), names=4)
    if (groups := audit_page.groups_table(found)) is not None:
        tables.show(out, groups, names=2)
    for line in audit_page.lines(found):
        out.print(line, soft_wrap=True)
    draw(args.figure, widths, found, out)
    if args.html is not None:
        audit_page.write_page(found, args.html)
        out.print(f"page: {args.html}", soft_wrap=True)
    write_json(args.json, found, out)


def _diff(args: argparse.Namespace) -> int:
    from specsparse.support import tables, terminal
    from specsparse.tools.audit import texts

    need_places([args.json], [], args.a, args.b)
    sides = args.sides or (None, None)
    if len(sides) > 2:
        raise UserError("--sides takes one side, or A's and B's")
    a, b = (texts.read(Path(path), side) for path, side in ((args.a, sides[0]), (args.b, sides[-1])))
    found, out = texts.compare_texts(a, b, where=(args.a, args.b)), terminal.console()
    if found.forked:
        tables.show(out, texts.table(found))
    for line in texts.lines(found):
        out.print(line, soft_wrap=True)
    report = {"audit": "specsparse audit diff", "version": 1, "a": args.a, "b": args.b, **found.to_dict()}
    write_json(args.json, report, out)
    return 0


def _positives(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(positive(part) for part in text.split(",")))


def _switches(text: str) -> tuple[bool, ...]:
    words = names(text)
    if not set(words) <= {"on", "off"}:
        raise argparse.ArgumentTypeError(f"{text!r}: on, off or on,off")
    return tuple(word == "on" for word in words)
