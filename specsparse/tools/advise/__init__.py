"""Should I speculate at all? Predicted speed-ups of every method for TARGET, with draft models if any are named.

A name of the catalogue, a GGUF file or owner/repo:Q4_K_M of the Hub; headers are enough, and most models of the
catalogue need not be here. On this machine forwards and drafts are measured once and kept; on other devices times are
on paper.
Acceptances are those of --acceptance, else those of the table of kept rates, else several that are supposed.
"""

import argparse
from functools import partial
from pathlib import Path

from specsparse.cli import arguments
from specsparse.cli.arguments import list_of, share, sizes, whole
from specsparse.errors import refuse

_size = whole(1, 1 << 24)  # of sequences, and of tokens
_MOST_SIZES, _MOST_ALPHAS = 32, 16
"""Most pairs of a batch and a context, and most acceptances: every method is looked at in each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="TARGET", help=f"the model that writes: {arguments.ANY_MODEL}")
    add("drafts", nargs="*", default=(), metavar="DRAFT", help="draft models to judge for it")
    add("--device", type=_device, default="this", metavar="NAME", help="this machine (default), h100, h200, mi300x ..")
    add("--paper", action="store_true", help="take this machine too by its peaks alone: nothing is loaded")
    add("--refresh", action="store_true", help="measure this machine again, whatever was kept")
    add("--batch", type=list_of(_size), default=(1,), metavar="LIST", help="sequences at once: 1,4,16 (1)")
    add("--context", type=list_of(_size), default=(), metavar="LIST", help="tokens in each cache: 512,4096 (512)")
    about = "draft lengths to look at, up to 64: 1..8,12 (1 to 16)"
    add("--gamma", dest="lengths", type=sizes, default=argparse.SUPPRESS, metavar="LIST", help=about)
    about = "acceptances to suppose: 0.5,0.6,0.7,0.8"
    add("--alpha", type=list_of(_acceptance), default=(), metavar="LIST", help=about)
    add("--acceptance", type=Path, metavar="FILE", help="take the acceptances of a run: its record.json")
    add("--task", metavar="NAME", help="take only the acceptances of texts of this kind")
    add("--kv-dtype", choices=("f16", "bf16", "f32", "q8_0"), default="f16", help="type of the caches (%(default)s)")
    add("--plot", type=Path, metavar="FILE.png", help="draw speed-up against draft length")
    arguments.add_json(add, "one JSON object instead of tables, or in FILE")


def main(args: argparse.Namespace) -> int:
    from specsparse.models import catalogue
    from specsparse.support.hub_names import is_reference

    batches, contexts, alphas = (tuple(sorted({*given})) for given in (args.batch, args.context, args.alpha))
    pairs = len(batches) * max(len(contexts), 1)
    refuse({
        "--alpha supposes what --acceptance and --task count: give one of them":
            alphas and (args.acceptance or args.task),
        "--refresh measures this machine: leave --paper and --device out":
            args.refresh and (args.paper or args.device != "this"),
        f"--batch and --context make {pairs} pairs, {_MOST_SIZES} are the most: give fewer": pairs > _MOST_SIZES,
        f"--alpha has {len(alphas)} values, {_MOST_ALPHAS} are the most: give fewer": len(alphas) > _MOST_ALPHAS,
    })  # fmt: skip
    arguments.need_places([args.json], [args.plot], args.target, *args.drafts, args.acceptance)
    for name in (args.target, *args.drafts):
        if not is_reference(name) and catalogue.find(name) is None:
            catalogue.resolve(name)  # neither a known model nor a file

    from specsparse.measure.costs import acceptance  # after the names: JAX takes a second
    from specsparse.support import terminal
    from specsparse.tools.advise.advise import Question, advise, figure, parts

    out = terminal.console()
    counted = acceptance.from_record(args.acceptance) if args.acceptance else None
    sizes_given = {"batches": batches, "contexts": contexts, "alphas": alphas}
    question = arguments.from_args(Question, args, draft_models=tuple(args.drafts), counted=counted, **sizes_given)
    advice = advise(question, bar=partial(terminal.counting, out))
    if args.json != arguments.STDOUT:
        arguments.show(out, parts(advice))
    arguments.write_json(args.json, report := advice.to_dict(), out)
    arguments.draw(args.plot, figure, report, out)
    return 0


def _device(text: str) -> str:
    from specsparse.data.devices import known

    return known(text)


def _acceptance(text: str) -> float:
    return share(text, zero=True)
