"""Measure this engine beside the machine and beside other engines: one sub-command for each thing to measure.

    bench [speed] [MODEL]      prompts (pp), decoding (tg) and v(n), the cost of n tokens in one pass over that of one
    bench batch 1,2,4,8        pp, tg and speculation by the number of sequences at once
    bench draft NAME           texts with drafts by a drafter, a known draft model or a GGUF file
    bench ffn 4096x11008       one layer, its FFN sparse and dense
    bench experts              experts of a layer by rows of a pass
    bench products Q4_0,Q8_0   products by type of weights
    bench lut                  look-up tables beside integer products, four-bit weights
    bench device gpu --all     an accelerator in stages, on models made from their shapes

Each prints tables; --json adds the report as a last line of JSON, --json FILE writes it there. Shares are of the read
bandwidth and of the multiply-add peak measured in between. --peer runs another engine on the same file and threads,
interleaved with ours.
"""

import argparse
import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specsparse.cli import arguments
from specsparse.cli.arguments import count, drafter_name, list_of, names, positive, share, sizes, whole
from specsparse.engine import hosts
from specsparse.errors import UserError
from specsparse.support.files import Json
from specsparse.tools.peers import PEERS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


class Benchmark(Protocol):
    """A sub-command: a frozen dataclass, whose fields are the destinations of its options."""

    def check(self) -> None:
        """UserError if it cannot be run; before the machine is waited for and anything is loaded."""

    def run(self, out: "Console") -> Json:
        """Measures, showing progress on `out`, and returns the report."""

    def parts(self, report: Json) -> "Iterable[Table | Text | str]":
        """The report's tables and lines in the order of printing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(model=None, drafter=None, plot=None, publish=None)
    kinds = parser.add_subparsers(dest="bench", required=True, metavar=" | ".join(_BENCHES))

    def sub(name: str, what: str, options: str, **defaults: Any) -> Callable[..., Any]:
        made = kinds.add_parser(name, help=what, description=what, allow_abbrev=False)
        for option in options.split():
            made.add_argument(*_SHORT.get(option, ()), f"--{option}", **_OPTIONS[option])
        arguments.add_json(made.add_argument)
        made.set_defaults(**defaults)
        return made.add_argument

    def sub_with_model(name: str, what: str, options: str, **defaults: Any) -> Callable[..., Any]:
        add = sub(name, what, f"{options} peer", **defaults)
        arguments.add_model_options(kinds.choices[name].add_argument_group("model").add_argument)
        arguments.add_distributed(add)
        return add

    def add_drafts(name: str, about: str) -> None:
        """The options of drafts that other commands have; their lengths are a list here."""
        add = kinds.choices[name].add_argument_group("drafts").add_argument
        add("--drafter", metavar="NAME", help="smollm2-draft, a GGUF file or a drafter")
        add("--spec-type", dest="drafter", type=drafter_name, metavar="TYPE", help="the same in llama.cpp's words")
        add(*arguments.DRAFT_MODEL, dest="drafter", metavar="FILE", help="a model that drafts")
        add(*arguments.DRAFT_LENGTH, dest="drafted", type=sizes, metavar="LIST", help=about)
        arguments.add_sampling(kinds.choices[name], ("temperature", "top_k", "top_p"), temperature=0.0)

    add = sub_with_model("speed", "prompts, decoding and v(n) of one sequence", "pp repeats", ns=sizes("1..16"))
    add("first", nargs="?", metavar="MODEL", help=f"{arguments.ANY_MODEL} ({arguments.MODEL})")
    about = "tokens to decode, 0 for no such test (%(default)s)"
    add("-n", "--tg", dest="tg", type=count, default=128, metavar="N", help=about)
    add("--widths", dest="ns", type=_widths, metavar="LIST", help="the n of v(n): 1..16, 1,4,8 or none (1..16)")
    add("--depth", type=count, default=0, metavar="N", help="tokens in the cache before each test (%(default)s)")
    add("--rows", type=positive, metavar="N", help="v(n) in a program of N rows, n of them valid; default n rows")
    add("--quantise", metavar="TYPE", help="measure the same model re-quantised: Q4_0, Q8_0, F16 ...")
    add("--publish", metavar="FILE", help="write v(n) of each engine as entries of the page of v(n) (docs/vn.md)")
    add("--machine", metavar="NAME", help="this machine's name in --publish (its processor)")

    what = "prompts, decoding and speculation by the number of sequences at once"
    add = sub_with_model("batch", what, "pp tg repeats plot", drafter="prompt_lookup", drafted=())
    add("sizes", type=sizes, metavar="LIST", help="sequences at once: 1,2,4,8")
    add_drafts("batch", "tokens of a draft: 2,4 (as many as pay)")

    add = sub_with_model("draft", "texts plainly and with drafts", "tg repeats", repeats=1, drafted=(2, 4))
    add("drafter", nargs="?", default=argparse.SUPPRESS, metavar="NAME", help="the same as --drafter")
    add_drafts("draft", "tokens of a draft (2,4)")

    add = sub("ffn", "one FFN, sparse and dense", "types repeats threads kernels plot", types=("F16", "Q4_0"))
    add("shape", type=_shape, metavar="DxF", help="its width and its neurons: 4096x11008")
    add("--widths", dest="ns", type=sizes, default=(1, 2, 4, 8), metavar="LIST", help="tokens of a call (1,2,4,8)")
    shares = (0.05, 0.1, 0.2, 0.5, 1.0)
    add("--active", type=list_of(share), default=shares, metavar="LIST", help="shares of neurons kept (0.05 .. 1)")

    add = sub("experts", "experts of a layer by rows of a pass", "types repeats threads", types=("Q4_0",), repeats=15)
    add("--widths", dest="ns", type=sizes, default=(1, 2, 4, 8), metavar="LIST", help="rows of a pass (1,2,4,8)")
    add("--shape", type=_shape, default=(1536, 768), metavar="DxF", help="width and neurons of an expert (1536x768)")
    add("--experts", type=positive, default=32, metavar="N", help="experts of the layer (%(default)s)")
    add("--chosen", type=positive, default=4, metavar="N", help="experts of each row (%(default)s)")
    about = "share of neurons idle, to leave them out and not: 0.6 (%(default)s: left out of nothing)"
    add("--idle", type=share, default=0.0, metavar="SHARE", help=about)

    add = sub("products", "products by type of weights", "repeats threads", repeats=15, ns=(1, 4, 8, 64, 256))
    add("types", type=_types, metavar="LIST", help="types of weights: Q4_0,Q8_0,Q6_K")
    add("--widths", dest="ns", type=sizes, metavar="LIST", help="rows of activations (1,4,8,64,256)")
    add("--shape", type=_shape, default=(1536, 1536), metavar="RxC", help="rows x columns (1536x1536)")

    what = "look-up tables beside integer products, four-bit weights"
    add = sub("lut", what, "types repeats threads", types=("Q4_0", "Q4_1"), shapes=((2048, 2048), (4096, 11008)))
    add("--widths", dest="ns", type=sizes, default=(1, 4), metavar="LIST", help="tokens of a call (1,4)")
    add("--shapes", type=list_of(_shape), metavar="LIST", help="rows x columns (2048x2048,4096x11008)")

    add = sub("device", "stages on a device, models made from their shapes", "kernels", json=arguments.STDOUT)
    add("device", choices=("gpu", "tpu", "cpu"), metavar="gpu | tpu | cpu")
    stages = kinds.choices["device"].add_mutually_exclusive_group(required=True)
    stages.add_argument("--all", action="store_true", help="every stage (under 8 minutes)")
    stages.add_argument("--stages", type=names, default=(), metavar="LIST", help="some stages: status,equality ...")
    add("--tiny", action="store_true", help="tiny shapes in this process: a trial of the bench itself")
    add("--repeats", type=positive, metavar="N", help="timings of each figure (3; 1 with --tiny)")
    add("--layers", type=positive, metavar="N", help="layers of the 7B shape (all)")


def main(args: argparse.Namespace) -> int:
    from specsparse.measure.machine import timing_lock  # after the arguments: JAX takes a second
    from specsparse.support import terminal
    from specsparse.tools.bench import vn_entries

    arguments.settle(args)
    if hosts.count() > 1 and getattr(args, "peers", ()):
        raise UserError(f"--peer {args.peers[0]} runs on one machine: leave --distributed out")
    if not hosts.leads():
        args.json = args.plot = args.publish = None
    arguments.need_places([args.json, args.publish], [args.plot], args.model, args.drafter)
    if args.publish:
        vn_entries.check(Path(args.publish), args.ns)
    module, _, name = _BENCHES[args.bench].partition(":")
    owner = getattr(importlib.import_module(f"specsparse.tools.bench.{module}"), name)
    bench = arguments.from_args(owner, args)
    bench.check()
    out = terminal.console()
    with timing_lock(lambda line: out.print(line, soft_wrap=True)):
        report = bench.run(out)
    arguments.show(out, bench.parts(report))
    if args.plot:
        arguments.draw(args.plot, bench.figure, report, out)
    if args.publish:
        vn_entries.publish(args, report)
        out.print(f"entries: {args.publish}", soft_wrap=True)
    arguments.write_json(args.json, report, out)
    return int(bool(report.get("failed")))


def _types(text: str) -> tuple[str, ...]:
    return names(text.upper())


def _shape(text: str) -> tuple[int, int]:
    (width, cross, neurons), length = text.partition("x"), whole(1, 2**31 - 1)
    if not cross:
        raise argparse.ArgumentTypeError(f"{text!r}: two lengths, for instance 4096x11008")
    return length(width), length(neurons)


def _widths(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    try:
        return sizes(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; none leaves v(n) out") from None


_BENCHES = {
    "speed": "one_sequence:SequenceBench",
    "batch": "speculation:BatchBench",
    "draft": "speculation:DraftBench",
    "ffn": "kernel_benches:FfnBench",
    "experts": "kernel_benches:ExpertsBench",
    "products": "kernel_benches:ProductsBench",
    "lut": "kernel_benches:LutBench",
    "device": "device_stages:DeviceBench",
}
"""Sub-command -> its `Benchmark`."""
_SHORT = {"pp": ("-p",), "tg": ("-n",)}  # llama-bench's
_OPTIONS: dict[str, dict[str, Any]] = {
    "pp": {"type": count, "default": 512, "metavar": "N", "help": "prompt tokens, 0 for no such test (%(default)s)"},
    "tg": {"type": positive, "default": 128, "metavar": "N", "help": "tokens of each text (%(default)s)"},
    "types": {"type": _types, "metavar": "LIST", "help": "types of weights: Q4_0 ..  (%(default)s)"},
    "repeats": {"type": positive, "default": 5, "metavar": "N", "help": "timings of each test (%(default)s)"},
    "threads": {"type": positive, "metavar": "N", "help": "threads of every engine (all cores)"},
    "kernels": {
        "dest": "backend", "metavar": "NAME", "help": "native, reference, xla, packed or bf16 (the best there is)",
    },
    "peer": {
        "dest": "peers", "type": arguments.names_among("peer", PEERS), "default": (), "metavar": "LIST",
        "help": f"time these engines too, by the interpreter SPECSPARSE_PEER_PYTHON: {', '.join(PEERS)}",
    },
    "plot": {"type": Path, "metavar": "FILE.png", "help": "draw the table"},
}  # fmt: skip
"""Options of several sub-commands."""


def rewritten(argv: Sequence[str]) -> list[str]:
    """Puts `speed` in front if no sub-command is named."""
    return [*argv] if argv and argv[0] in (*_BENCHES, "-h", "--help") else ["speed", *argv]
