"""Measure prompt processing (pp), decoding (tg) and v(n), the cost of n tokens in one pass over that of one.

Prints tables, then one JSON line. Shares are of the read bandwidth and of the multiply-add peak measured in between.
--peer runs another engine on the same file and threads, in turn with ours.
"""

import argparse
from pathlib import Path
from typing import Any

from specsparse.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, on what, beside whom."""
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="a known name or the path of a GGUF file (%(default)s)")
    add("--pp", type=_count, default=512, metavar="N", help="prompt tokens, 0 for no such test (%(default)s)")
    add("--tg", type=_count, default=128, metavar="N", help="tokens to decode, 0 for no such test (%(default)s)")
    add("--n", type=_lengths, default=_lengths("1..16"), metavar="LIST", help="v(n): 1..16, 1,4,8 or none (1..16)")
    add("--depth", type=_count, default=0, metavar="N", help="tokens in the cache before each test (%(default)s)")
    add("--rows", type=_positive, metavar="N", help="v(n) in a program of N rows, n of them valid; default n rows")
    add("--repeats", type=_positive, default=5, metavar="N", help="timings of each test (%(default)s)")
    add("--threads", type=_positive, metavar="N", help="of both engines (all cores)")
    add("--kv-dtype", metavar="TYPE", help="f16 (default), bf16 or f32 cache")
    add("--kernels", metavar="NAME", help="native, reference or xla (the best there is)")
    add("--quantise", metavar="TYPE", help="measure the same model re-quantised: Q4_0, Q8_0, F16 ...")
    peer = "llama.cpp, transformers or transformers-bf16; SPECSPARSE_PEER_PYTHON may name an interpreter that has it"
    add("--peer", metavar="NAME", help=peer)
    add(
        "--batch",
        type=_lengths,
        default=(),
        metavar="LIST",
        help="instead: pp, tg and speculation by batch size: 1,2,4,8",
    )
    add("--json", type=Path, metavar="FILE", help="write the report to FILE too")


def main(args: argparse.Namespace) -> int:
    """Measure and print."""
    from specsparse import display, timing_lock  # after the arguments: JAX takes a second
    from specsparse.trackers import to_json, write_atomically

    out = display.console()
    with timing_lock.turn(lambda line: out.print(line, soft_wrap=True)):
        found = (_batch if args.batch else _single)(args, out)
    text = to_json(found)
    if args.json is not None:
        try:
            write_atomically(args.json, text + "\n")
        except OSError as error:
            raise UserError(f"{args.json}: cannot be written: {error.strerror or error}") from None
    print(text, flush=True)
    return 0


def _single(args: argparse.Namespace, out: Any) -> dict[str, Any]:
    """One sequence, with v(n) and peers; prints the tables and returns the report."""
    from specsparse.bench import job, table
    from specsparse.bench.measure import Plan

    if not (args.pp or args.tg or args.n):
        raise UserError("nothing to measure: give --pp, --tg or --n")
    if args.rows is not None and args.rows < max(args.n, default=0):
        raise UserError(f"--rows {args.rows} is less than the largest --n, {max(args.n)}")
    plan = job.with_one(Plan(pp=args.pp, tg=args.tg, ns=args.n, repeats=args.repeats))
    found = job.run(
        job.Job(
            model=args.model, plan=plan, depth=args.depth, rows=args.rows, threads=args.threads, kv_dtype=args.kv_dtype,
            backend=args.kernels, peer=args.peer, quantise=args.quantise,
        ),
        out,
    )  # fmt: skip
    if plan.pp or plan.tg:
        out.print(table.results(found))
    if plan.ns:
        out.print(table.verify(found))
    for line in table.lines(found):
        out.print(line, soft_wrap=True)
    return found


def _batch(args: argparse.Namespace, out: Any) -> dict[str, Any]:
    """Several sequences at once; prints the table and returns the report."""
    from specsparse.bench import batch

    for name in ("peer", "quantise", "rows", "depth"):
        if getattr(args, name):
            raise UserError(f"--batch does not go with --{name}")
    if not args.tg:
        raise UserError("--batch decodes: give --tg")
    plan = batch.BatchPlan(sizes=args.batch, pp=args.pp, tg=args.tg, repeats=args.repeats)
    found = batch.run(plan, out, model=args.model, threads=args.threads, kv_dtype=args.kv_dtype, backend=args.kernels)
    out.print(batch.table(found))
    return found


def _count(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _positive(text: str) -> int:
    if _count(text) == 0:
        raise argparse.ArgumentTypeError("0 is too small, 1 is the least")
    return int(text)


def _lengths(text: str) -> tuple[int, ...]:
    """The n of v(n): `1..16`, `1,4,8`, or `none`."""
    if text in ("none", "0"):
        return ()
    found: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        low, high = _positive(first), _positive(last if dots else first)
        if high > 64 or low > high:
            raise argparse.ArgumentTypeError(f"{part!r}: lengths from 1 to 64, the smaller first")
        found.update(range(low, high + 1))
    return tuple(sorted(found))
