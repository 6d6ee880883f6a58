"""Measure prompt processing (pp), decoding (tg) and v(n), the cost of n tokens in one pass over that of one.

Prints tables; --json adds the report as a last line of JSON, --json FILE writes it there. Shares are of the read
bandwidth and of the multiply-add peak measured in between.
--peer runs another engine on the same file and threads, in turn with ours.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specsparse.cli.arguments import count, positive, sizes
from specsparse.errors import UserError
from specsparse.support.files import atomically, need_place

if TYPE_CHECKING:
    from rich.console import Console

    from specsparse.report.figure import Figure
    from specsparse.support.files import Json

_REPEATS = 5
_LONGEST = 2**31 - 1
STDOUT = "-"
"""The file of --json without one."""
MODEL = "smollm2-135m"
"""The model where nobody says."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, on what, beside whom."""
    add = parser.add_argument
    add("named", nargs="?", metavar="MODEL", help=f"a known name or the path of a GGUF file ({MODEL})")
    add("--model", help="the same")
    add("--pp", type=count, default=512, metavar="N", help="prompt tokens, 0 for no such test (%(default)s)")
    add("--tg", type=count, default=128, metavar="N", help="tokens to decode, 0 for no such test (%(default)s)")
    add("--n", type=_lengths, metavar="LIST", help="v(n): 1..16, 1,4,8 or none (1..16; 1,2,4,8 with --ffn-shape)")
    add("--depth", type=count, default=0, metavar="N", help="tokens in the cache before each test (%(default)s)")
    add("--rows", type=positive, metavar="N", help="v(n) in a program of N rows, n of them valid; default n rows")
    add("--repeats", type=positive, metavar="N", help="timings of each test (5; with --drafter 1)")
    add("--threads", type=positive, metavar="N", help="of every engine (all cores)")
    add("--kv-dtype", metavar="TYPE", help="f16 (default), bf16, f32 or q8_0 cache")
    add("--kernels", metavar="NAME", help="native, reference, xla, packed or bf16 (the best there is)")
    add("--quantise", metavar="TYPE", help="measure the same model re-quantised: Q4_0, Q8_0, F16 ...")
    peer = "beside llama.cpp, ik_llama.cpp, transformers, transformers-bf16, by the interpreter SPECSPARSE_PEER_PYTHON"
    add("--peer", type=_names, default=(), metavar="LIST", help=peer)
    add(
        "--batch",
        type=sizes,
        default=(),
        metavar="LIST",
        help="instead: pp, tg and speculation (--drafter, drafts of --n tokens) by batch size: 1,2,4,8",
    )
    add(
        "--drafter",
        metavar="NAME",
        help="instead: texts with drafts of --n tokens (2,4) by smollm2-draft, a GGUF file or a drafter",
    )
    add("--ffn-shape", type=_shape, metavar="DxF", help="instead: one FFN, sparse and dense: 4096x11008")
    add("--active", type=_shares, metavar="LIST", help="shares of neurons kept, with --ffn-shape (0.05,0.1,0.2,0.5,1)")
    add("--plot", type=Path, metavar="FILE.png", help="draw the table, with --ffn-shape or --batch")
    add("--ablation", choices=("lut",), help="instead: look-up tables beside integer products, 4-bit weights")
    add("--products", type=_names, metavar="LIST", help="instead: products by type of weights, n rows: Q4_0,Q8_0,Q6_K")
    add(
        "--shapes",
        type=_matrices,
        metavar="LIST",
        help="rows x columns: with --ablation (2048x2048,4096x11008), one with --products (1536x1536)",
    )
    add("--device", choices=("gpu", "tpu", "cpu"), help="instead: stages on a device, models made from their shapes")
    add("--all", action="store_true", help="every stage, with --device (under 8 minutes)")
    add("--stages", metavar="LIST", help="some of them, with --device: status,equality ...")
    add("--tiny", action="store_true", help="tiny shapes in this process, with --device: a trial of the bench itself")
    add("--layers", type=positive, metavar="N", help="of the 7B shape, with --device (all)")
    add("--publish", metavar="FILE", help="write v(n) of each engine as entries of the page of v(n) (docs/vn.md)")
    add("--machine", metavar="NAME", help="what --publish calls this machine (its processor)")
    add("--json", nargs="?", const=STDOUT, metavar="FILE", help="the report as one JSON line, last or in FILE")


def main(args: argparse.Namespace) -> int:
    """Measure and print."""
    from specsparse.measure import lock  # after the arguments: JAX takes a second
    from specsparse.support import terminal
    from specsparse.support.files import to_json, write_atomically

    if args.named and args.model:
        raise UserError(f"{args.named} and --model {args.model}: one model is measured, give one of them")
    args.model = args.named or args.model
    if args.active and not args.ffn_shape:
        raise UserError("--active goes with --ffn-shape, for instance 4096x11008")
    if args.plot and not (args.ffn_shape or args.batch):
        raise UserError("--plot goes with --ffn-shape or --batch, for instance --batch 1,2,4,8")
    if args.shapes and not (args.ablation or args.products):
        raise UserError("--shapes goes with --ablation lut or --products Q4_0,Q8_0")
    if (args.all or args.stages or args.tiny or args.layers) and not args.device:
        raise UserError("--all, --stages, --tiny and --layers go with --device, for instance --device gpu --all")
    if args.device and bool(args.all) == bool(args.stages):
        raise UserError("--device: give --all, or --stages status,equality")
    if args.machine and not args.publish:
        raise UserError("--machine names the machine for --publish FILE")
    _check_alone(args)
    args.model = args.model or MODEL
    for path in (args.json, args.plot, args.publish):
        if path not in (None, STDOUT):
            # Before the measurement, not after it.
            need_place(path, args.model, args.drafter, picture=path is args.plot)
    if args.publish:
        _check_publish(args)
    if not any(getattr(args, name) for name in _WITHOUT_MODEL):
        _check_model(args.model)
    measure = next((mode.measure for name, mode in _INSTEAD.items() if getattr(args, name)), _single)
    out = terminal.console()
    with lock.turn(lambda line: out.print(line, soft_wrap=True)):
        found = measure(args, out)
    if args.publish:
        _publish(args, found)
        out.print(f"entries: {args.publish}", soft_wrap=True)
    if args.json == STDOUT or (args.device and args.json is None):
        print(to_json(found), flush=True)
    elif args.json is not None:
        write_atomically(Path(args.json), to_json(found) + "\n")
        out.print(f"report: {args.json}", soft_wrap=True)
    return int(bool(args.device and found["failed"]))


def _check_model(name: str) -> None:
    """Its file is there and begins well: that is said before the machine is waited for."""
    from specsparse.engine.gguf.reader import open_gguf
    from specsparse.models import catalogue

    open_gguf(catalogue.resolve(name))


def _check_publish(args: argparse.Namespace) -> None:
    """A file that is there is one of entries, and there will be entries."""
    from specsparse.tools.bench import published

    if args.n is not None and max(args.n, default=1) < 2:
        raise UserError("--publish writes v(n): --n must go beyond 1, for instance 1,2,4,8,16")
    if Path(args.publish).exists():
        try:
            published.read_file(Path(args.publish))
        except UserError as error:
            raise UserError(f"--publish replaces files of entries alone; {error}") from None


def _publish(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """v(n) of the report as a file of entries."""
    from specsparse.tools.bench import published

    quantised = f" --quantise {args.quantise}" if args.quantise else ""
    peer = f" --peer {','.join(args.peer)}" if args.peer else ""
    ns = ",".join(str(n) for n in found["v"]["specsparse"])
    command = f"python -m specsparse bench --model {args.model} --pp 0 --tg 0 --n {ns}{quantised}{peer}"
    published.write_file(Path(args.publish), published.of_report(found, machine=args.machine, source=f"`{command}`"))


def _check_alone(args: argparse.Namespace) -> None:
    """Before anything is waited for or loaded."""
    asked = [(name, mode.alone) for name, mode in _INSTEAD.items() if getattr(args, name)][:1]
    if args.publish:
        asked.insert(0, ("publish", _NOT_PUBLISHED))
    for mode, names in asked:
        flag = f"--{mode.replace('_', '-')}"
        for name in (*names, "model") if mode in _WITHOUT_MODEL else names:
            if getattr(args, name):
                raise UserError(f"{flag} does not go with --{name.replace('_', '-')}")
        if args.n == () and mode != "publish":  # `_check_publish` says what that wants
            raise UserError(f"--n none: nothing to measure with {flag}")


def _single(args: argparse.Namespace, out: Any) -> dict[str, Any]:
    """One sequence, with v(n) and peers; prints the tables and returns the report."""
    from specsparse.measure.trials import TrialPlan
    from specsparse.tools.bench import job, tables

    ns = _lengths("1..16") if args.n is None else args.n
    if not (args.pp or args.tg or ns):
        raise UserError("nothing to measure: give --pp, --tg or --n")
    if args.rows is not None and args.rows < max(ns, default=0):
        raise UserError(f"--rows {args.rows} is less than the largest --n, {max(ns)}")
    plan = job.with_one(TrialPlan(pp=args.pp, tg=args.tg, ns=ns, repeats=args.repeats or _REPEATS))
    found = job.run(
        job.BenchJob(
            model=args.model, plan=plan, depth=args.depth, rows=args.rows, threads=args.threads, kv_dtype=args.kv_dtype,
            backend=args.kernels, peers=args.peer, quantise=args.quantise,
        ),
        out,
    )  # fmt: skip
    if plan.pp or plan.tg:
        out.print(tables.results(found))
    if plan.ns:
        out.print(tables.verify(found))
    for line in tables.lines(found):
        out.print(line, soft_wrap=True)
    return found


def _batch(args: argparse.Namespace, out: Any) -> dict[str, Any]:
    """Several sequences at once; prints the table and returns the report."""
    from specsparse.report.figures.batches import batches
    from specsparse.support import tables
    from specsparse.tools.bench import batch

    if not args.tg:
        raise UserError("--batch decodes: give --tg")
    chosen = {"drafter": args.drafter, "drafted": args.n, "repeats": args.repeats}
    given = {name: value for name, value in chosen.items() if value}
    plan = batch.BatchPlan(sizes=args.batch, pp=args.pp, tg=args.tg, **given)
    found = batch.run(
        plan, out, model=args.model, threads=args.threads, kv_dtype=args.kv_dtype, backend=args.kernels,
        peers=args.peer,
    )  # fmt: skip
    tables.show(out, batch.table(found))
    for line in batch.lines(found):
        out.print(line, soft_wrap=True)
    _draw(args.plot, batches, found, out)
    return found


def _speculation(args: argparse.Namespace, out: Any) -> dict[str, Any]:
    """Texts with drafts, beside a peer's; prints the table and returns the report."""
    from specsparse.tools.bench import speculation

    if not args.tg:
        raise UserError("--drafter writes texts: give --tg")
    chosen = {name: value for name, value in (("drafted", args.n), ("repeats", args.repeats)) if value}
    plan = speculation.SpeculationPlan(args.drafter, tg=args.tg, **chosen)
    found = speculation.run(
        plan, out, model=args.model, peers=args.peer, threads=args.threads, kv_dtype=args.kv_dtype,
        backend=args.kernels,
    )  # fmt: skip
    out.print(speculation.table(found))
    for line in speculation.lines(found):
        out.print(line, soft_wrap=True)
    return found


def _device(args: argparse.Namespace, out: Any) -> dict[str, Any]:
    """Stages on an accelerator; prints as it goes and returns the report."""
    from specsparse.tools.bench.card import job
    from specsparse.tools.bench.card.stages import CardPlan

    names = () if args.all else tuple(args.stages.split(","))
    short = {"tokens": 8, "repeats": 1} if args.tiny else {}
    chosen = {**short, **({"repeats": args.repeats} if args.repeats else {})}
    backend = args.kernels or ("xla" if args.device == "cpu" else None)
    plan = CardPlan(args.device, tiny=args.tiny, layers=args.layers, backend=backend, **chosen)

    def say(line: str) -> None:
        out.print(line, soft_wrap=True, highlight=False, markup=False)  # a name in brackets is no style

    found = job.run(plan, names, say, apart=not args.tiny)
    for line in job.lines(found):
        say(line)
    return found


def _ffn(args: argparse.Namespace, out: Any) -> dict[str, Any]:
    """One FFN of a given shape; prints the table and returns the report."""
    from specsparse.report.figures.active_share import active_share
    from specsparse.tools.bench import ffn, ffn_table

    width, neurons = args.ffn_shape
    chosen = {"ns": args.n} if args.n else {}
    if args.quantise:
        chosen["types"] = (args.quantise,)
    active = args.active or _shares("0.05,0.1,0.2,0.5,1")
    plan = ffn.FfnPlan(width, neurons, active, repeats=args.repeats or _REPEATS, **chosen)
    found = ffn.run(plan, out, threads=args.threads, backend=args.kernels)
    out.print(ffn_table.table(found))
    out.print(ffn_table.summary_line(found), soft_wrap=True)
    _draw(args.plot, active_share, found, out)
    return found


def _lut(args: argparse.Namespace, out: Any) -> dict[str, Any]:
    """Two kernels for four-bit weights side by side; prints the table and returns the report."""
    from specsparse.tools.bench.lut import bench as lut
    from specsparse.tools.bench.lut import table as lut_table

    chosen = {"ns": args.n, "shapes": args.shapes, "types": args.quantise and (args.quantise.upper(),)}
    plan = lut.LutPlan(repeats=args.repeats or _REPEATS, **{name: value for name, value in chosen.items() if value})
    found = lut.run(plan, out, threads=args.threads)
    out.print(lut_table.table(found))
    out.print(lut_table.summary_line(found), soft_wrap=True)
    return found


def _products(args: argparse.Namespace, out: Any) -> dict[str, Any]:
    """Products of several types; prints the table and returns the report."""
    from specsparse.tools.bench import products

    if args.shapes and len(args.shapes) > 1:
        raise UserError("--products takes one of --shapes, for instance 1536x1536")
    chosen = {"ns": args.n, "shape": args.shapes and args.shapes[0], "repeats": args.repeats}
    types = tuple(name.upper() for name in args.products)
    plan = products.ProductsPlan(types, **{name: value for name, value in chosen.items() if value})
    found = products.run(plan, out, threads=args.threads)
    out.print(products.table(found))
    out.print(products.summary_line(found), soft_wrap=True)
    return found


def _draw(path: Path | None, figure: "Callable[[Json], Figure]", found: "Json", out: "Console") -> None:
    """The report as a picture, where one was asked for."""
    if path is not None:
        with atomically(path) as file:
            file.write(figure(found).png())
        out.print(f"figure: {path}", soft_wrap=True)


class _Mode(NamedTuple):
    """What an option measures instead of one sequence, and the options that it does not go with."""

    measure: Callable[[argparse.Namespace, Any], dict[str, Any]]
    alone: tuple[str, ...]


_WITHOUT_MODEL = ("device", "products", "ablation", "ffn_shape")
_NOT_PUBLISHED = ("drafter", "ablation", "products", "ffn_shape", "batch")
_INSTEAD = {
    "device": _Mode(
        _device,
        ("peer", "publish", "batch", "drafter", "ffn_shape", "ablation", "quantise", "rows", "depth", "kv_dtype", "n"),
    ),
    "products": _Mode(
        _products,
        ("peer", "batch", "ffn_shape", "ablation", "quantise", "drafter", "rows", "depth", "kv_dtype", "kernels"),
    ),
    "ablation": _Mode(_lut, ("peer", "batch", "ffn_shape", "drafter", "rows", "depth", "kv_dtype", "kernels")),
    "ffn_shape": _Mode(_ffn, ("peer", "batch", "drafter", "rows", "depth", "kv_dtype")),
    "batch": _Mode(_batch, ("quantise", "rows", "depth")),
    "drafter": _Mode(_speculation, ("quantise", "rows", "depth")),
}
"""By option, the first that is given counts."""


def _names(text: str) -> tuple[str, ...]:
    """Names without repeats: llama.cpp,ik_llama.cpp."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def _matrices(text: str) -> tuple[tuple[int, int], ...]:
    """Shapes of matrices: 2048x2048,4096x11008."""
    return tuple(_shape(part) for part in text.split(","))


def _shape(text: str) -> tuple[int, int]:
    """Two lengths: 4096x11008."""
    width, cross, neurons = text.partition("x")
    if not cross:
        raise argparse.ArgumentTypeError(f"{text!r}: two lengths, for instance 4096x11008")
    found = positive(width), positive(neurons)
    if max(found) > _LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r}: lengths go up to {_LONGEST}, for instance 4096x11008")
    return found


def _shares(text: str) -> tuple[float, ...]:
    """Shares in (0, 1], as 0.05,0.1,1."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: shares of neurons, for instance 0.05,0.1,1") from None
    if not all(0 < share <= 1 for share in found):
        raise argparse.ArgumentTypeError(f"{text!r}: shares lie above 0 and up to 1")
    return found


def _lengths(text: str) -> tuple[int, ...]:
    """The n of v(n): `1..16`, `1,4,8`, or `none`."""
    if text == "none":
        return ()
    try:
        return sizes(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; none leaves v(n) out") from None
