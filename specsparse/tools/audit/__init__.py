"""Does a verification of n rows give the bits of one row? In specsparse and in other engines on the same file.

    audit [bits]         which widths share bits, and how often greedy speculation writes another text than plain
                         decoding: audit --engine specsparse,llama.cpp --threads 1,2
    audit --routing      which experts the rows of a model with experts choose, by width and by engine
    audit diff A B       where the texts of two runs of any engines fork

Each prints tables; --json adds the report as a last line of JSON, --json FILE writes it there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from specsparse.cli import arguments
from specsparse.cli.arguments import list_of, names, names_among, positive, sizes, whole
from specsparse.errors import UserError
from specsparse.support import terminal
from specsparse.support.files import Json, to_json, write_atomically
from specsparse.tools.peers import PEERS

_BITS = """Rows of a text are computed one at a time and in batches of every width. The report says which widths share
bits, where the most likely token is another one, and so how often greedy speculation writes another text than plain
decoding."""
_ROUTING = """Rows of a text are computed one at a time and in batches of every width. The report says by layer whether
they choose the same experts with the same weights, and how far another engine's choice is from ours."""
_DIFF = """Where the texts of two runs fork. A and B are JSON Lines of {"id": .., "token_ids": [..]} of any engine, or
folders of runs of ours."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    kinds = parser.add_subparsers(dest="audit", required=True, metavar="bits | routing | diff")

    bits = kinds.add_parser("bits", help="which widths share bits (the default)", description=_BITS, allow_abbrev=False)
    bits.set_defaults(run=_bits)
    add = bits.add_argument
    add("--model", default=arguments.MODEL, help=f"{arguments.ANY_MODEL} (%(default)s)")
    engines, about = ("specsparse", *PEERS), f"some of {', '.join(('specsparse', *PEERS))} (specsparse)"
    add(
        "--engine", dest="engines", type=names_among("engine", engines), default=engines[:1], metavar="LIST", help=about
    )
    add("--threads", type=list_of(positive), default=(), metavar="LIST", help="numbers of threads: 1,2 (all cores)")
    add("--widths", type=sizes, default=sizes("1..16,24,32,48"), metavar="LIST", help="of a batch (1..16,24,32,48)")
    about = "requantise the file: Q4_0,Q8_0,F16 (as it is)"
    add("--quantise", dest="types", type=names, default=(), metavar="LIST", help=about)
    about = "flash attention of peers: on, off (both)"
    add("--flash", type=_switches, default=(True, False), metavar="LIST", help=about)
    rows = "greedy: rows of the engine's own greedy text, where a flip is a fork; text: of the real one (%(default)s)"
    add("--rows", choices=("greedy", "text"), default="greedy", help=rows)
    add("--html", type=Path, metavar="FILE", help="write the report as a page")
    add("--figure", type=Path, metavar="FILE.png", help="draw the widths")

    about = "experts by width and by engine (--routing)"
    routing = kinds.add_parser("routing", help=about, description=_ROUTING, allow_abbrev=False)
    routing.set_defaults(run=_routing)
    add = routing.add_argument
    telling = ("specsparse", *(name for name, kind in PEERS.items() if kind.routing))
    add("--model", required=True, help=arguments.ANY_MODEL)
    add(
        "--engine", dest="engines", type=names_among("engine", telling), default=telling[:1], metavar="LIST",
        help=f"some of {', '.join(telling)} (specsparse)",
    )  # fmt: skip
    add("--widths", type=sizes, default=sizes("1,2,4,8,16"), metavar="LIST", help="of a batch (1,2,4,8,16)")

    for sub, fewest in ((bits, 2), (routing, 1)):
        add = sub.add_argument
        add("--windows", type=positive, default=4, metavar="N", help="places of the text to audit (%(default)s)")
        add("--prompt-tokens", type=positive, default=40, metavar="N", help="tokens before the rows (%(default)s)")
        add("--tokens", type=whole(fewest), default=48, metavar="N", help=f"rows, from {fewest} on (%(default)s)")
        add("--text", type=Path, metavar="FILE", help="a real text (the built-in prompts)")
        arguments.add_json(add)

    sub = kinds.add_parser("diff", help="where the texts of two runs fork", description=_DIFF, allow_abbrev=False)
    sub.set_defaults(run=_diff)
    add = sub.add_argument
    add("a", metavar="A", help="JSON Lines, or a run's folder")
    add("b", metavar="B", help="another")
    add("--sides", type=names, metavar="LIST", help="the side of a run's prompts.jsonl to compare: one, or A's,B's")
    arguments.add_json(add)


def rewritten(argv: Sequence[str]) -> list[str]:
    """Puts `bits` in front if no sub-command is named; `--routing` names one."""
    if "--routing" in argv:
        return ["routing", *(word for word in argv if word != "--routing")]
    return [*argv] if argv and argv[0] in ("bits", "routing", "diff", "-h", "--help") else ["bits", *argv]


def main(args: argparse.Namespace) -> int:
    return args.run(args)


def _bits(args: argparse.Namespace) -> int:
    """Audit and print; 1 if specsparse itself is not one group."""
    arguments.need_places([args.json, args.html], [args.figure], args.model, args.text)
    from specsparse.tools.audit import audit_page, same_bits  # after the arguments: JAX takes a second

    out, report = terminal.console(), Json()
    threads = tuple(dict.fromkeys(args.threads))
    plan = arguments.from_args(same_bits.AuditPlan, args, threads=threads, greedy=args.rows == "greedy")

    def after_case(so_far: Json) -> None:
        report.update(so_far)
        if args.json not in (None, arguments.STDOUT):
            write_atomically(Path(args.json), to_json(report) + "\n")

    try:
        same_bits.run(plan, out, after_case)
    finally:
        if report:  # if the run is stopped, of the cases that were done
            audit_page.show_tables(report, out)
            arguments.show(out, audit_page.lines(report))
            arguments.draw(args.figure, audit_page.figure, report, out)
            if args.html is not None:
                audit_page.write_page(report, args.html)
                out.print(f"page: {args.html}", soft_wrap=True)
            arguments.write_json(args.json, report, out)
    ours = [case for case in report["cases"] if case["engine"] == same_bits.OURS]
    return int(any(case["verdict"] != same_bits.ONE_GROUP for case in ours))


def _routing(args: argparse.Namespace) -> int:
    """Audit and print; 1 if the routing of specsparse itself depends on the width."""
    arguments.need_places([args.json], [], args.model, args.text)
    from specsparse.tools.audit import routing, same_bits

    out = terminal.console()
    report = routing.run(arguments.from_args(same_bits.AuditPlan, args), out)
    arguments.show(out, routing.parts(report))
    arguments.write_json(args.json, report, out)
    return int(routing.differing(report["engines"]["specsparse"]) > 0)


def _diff(args: argparse.Namespace) -> int:
    from specsparse.tools.audit import texts

    arguments.need_places([args.json], [], args.a, args.b)
    sides = args.sides or (None, None)
    if len(sides) > 2:
        raise UserError("--sides takes one side, or A's and B's")
    a, b = (texts.read(Path(path), side) for path, side in ((args.a, sides[0]), (args.b, sides[-1])))
    difference, out = texts.compare_texts(a, b, where=(args.a, args.b)), terminal.console()
    arguments.show(out, texts.parts(difference))
    report = {"audit": "specsparse audit diff", "version": 1, "a": args.a, "b": args.b, **difference.to_dict()}
    arguments.write_json(args.json, report, out)
    return 0


def _switches(text: str) -> tuple[bool, ...]:
    words = names(text)
    if not set(words) <= {"on", "off"}:
        raise argparse.ArgumentTypeError(f"{text!r}: on, off or on,off")
    return tuple(word == "on" for word in words)
