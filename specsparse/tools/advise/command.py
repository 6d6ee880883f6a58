"""Should I speculate at all? Predicted speed-ups of every method for TARGET, with draft models where any are named.

A name of the catalogue, a GGUF file or hf://owner/repo/file.gguf; headers are enough, and most models of the catalogue
need not be here. On this machine forwards and drafts are measured once and kept; on other devices times are on paper.
Acceptance is what --acceptance counted, else what the table of kept rates has, else swept.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from specsparse.cli.arguments import STDOUT, draw, need_places, positive, sizes
from specsparse.errors import UserError

T = TypeVar("T")
_MOST = 1 << 24
"""Of sequences, or of tokens."""
_MOST_SIZES, _MOST_ALPHAS = 32, 16
"""Pairs of a batch and a context, and acceptances: every method is looked at in each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The models, the device, and what is known of acceptance."""
    add = parser.add_argument
    add(
        "target", metavar="TARGET", help="the model that writes: a known name, a GGUF file or hf://owner/repo/file.gguf"
    )
    add("drafts", nargs="*", default=(), metavar="DRAFT", help="draft models to judge for it")
    add("--device", type=_device, default="this", metavar="NAME", help="this machine (default), h100, h200, mi300x ..")
    add("--paper", action="store_true", help="this machine too by its peaks alone: nothing is loaded")
    add("--refresh", action="store_true", help="measure this machine again, whatever was kept")
    add("--batch", type=_list(_count), default=(1,), metavar="LIST", help="sequences at once: 1,4,16 (1)")
    add("--context", type=_list(_count), default=(), metavar="LIST", help="tokens in each cache: 512,4096 (512)")
    add("--gamma", type=sizes, metavar="LIST", help="draft lengths to look at, up to 64: 1..8,12 (1 to 16)")
    add("--alpha", type=_list(_share), default=(), metavar="LIST", help="acceptances to suppose: 0.5,0.6,0.7,0.8")
    add("--acceptance", type=Path, metavar="FILE", help="record.json of a run: what it counted is taken")
    add("--task", metavar="NAME", help="of the texts that were counted, those of this kind alone")
    add("--kv-dtype", choices=("f16", "bf16", "f32", "q8_0"), default="f16", help="of the caches (%(default)s)")
    add("--plot", type=Path, metavar="FILE.png", help="draw speed-up against draft length")
    add("--json", nargs="?", const=STDOUT, metavar="FILE", help="one JSON object instead of tables, or in FILE")


def main(args: argparse.Namespace) -> int:
    """Advise and print."""
    from specsparse.models import catalogue, hub

    if args.alpha and (args.acceptance or args.task):
        raise UserError("--alpha supposes what --acceptance and --task count: give one of them")
    if args.refresh and (args.paper or args.device != "this"):
        raise UserError("--refresh measures this machine: leave --paper and --device out")
    pairs = len(args.batch) * max(len(args.context), 1)
    if pairs > _MOST_SIZES or len(args.alpha) > _MOST_ALPHAS:
        raise UserError(
            f"--batch and --context make {pairs} pairs, {_MOST_SIZES} are the most; --alpha has {len(args.alpha)} "
            f"values, {_MOST_ALPHAS} are the most: give fewer"
        )
    need_places([args.json], [args.plot], args.target, *args.drafts, args.acceptance)
    for name in (args.target, *args.drafts):
        if not name.startswith(hub.SCHEME) and catalogue.find(name) is None:
            catalogue.resolve(name)  # neither a known model nor a file

    from specsparse.experiments.decoding import bar_on  # after the names: JAX takes a second
    from specsparse.measure.costs import acceptance
    from specsparse.support import tables, terminal
    from specsparse.support.files import to_json, write_atomically
    from specsparse.tools.advise.advise import Question, advise, parts

    out = terminal.console()
    lengths = {"lengths": args.gamma} if args.gamma else {}
    question = Question(
        args.target, tuple(args.drafts), args.device, args.batch, args.context, alphas=args.alpha,
        counted=acceptance.from_record(args.acceptance) if args.acceptance else None, task=args.task,
        kv_dtype=args.kv_dtype, paper=args.paper, refresh=args.refresh, **lengths,
    )  # fmt: skip
    found = advise(question, bar=bar_on(out))
    report = found.to_dict()
    if args.json == STDOUT:
        print(to_json(report))
    else:
        for part in parts(found):
            tables.show(out, part) if hasattr(part, "columns") else out.print(part, soft_wrap=True)
    if args.json not in (None, STDOUT):
        write_atomically(Path(args.json), to_json(report) + "\n")
    if args.plot is not None:
        from specsparse.tools.advise.advised_figure import advised

        draw(args.plot, advised, report, out)
    return 0


def _device(text: str) -> str:
    from specsparse.data.devices import known

    return known(text)


def _list(one: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Values with commas between, each once, ascending."""

    def several(text: str) -> tuple[T, ...]:
        return tuple(sorted({one(part) for part in text.split(",")}))  # type: ignore[type-var]

    return several


def _count(text: str) -> int:
    if (value := positive(text)) > _MOST:
        raise argparse.ArgumentTypeError(f"{value} is too large, {_MOST:,} is the most")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: an acceptance lies in 0 to 1, for instance 0.7")
    return value
