"""Make a GGUF file of another program's, change one, join a dense one with predictors for PowerInfer, or take its
tokenizer out."""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsparse.cli.arguments import ANY_MODEL
from specsparse.errors import UserError
from specsparse.support import terminal
from specsparse.support.files import need_folder

if TYPE_CHECKING:
    from specsparse.engine.gguf.reader import GGUFFile

OUT_TYPES = "f32, f16, bf16, q8_0, q6_k, q5_k, q4_k, q4_0 or q4_1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="conversion", required=True, metavar="CONVERSION")

    def add(name: str, run: Callable[[argparse.Namespace], str], what: str) -> Callable[..., Any]:
        sub = kinds.add_parser(name, help=what, description=what, allow_abbrev=False)
        sub.set_defaults(run=run)
        sub.add_argument("--overwrite", "--yes", action="store_true", help="replace the file to write without asking")
        return sub.add_argument

    arg = add("hf", _hf, "a checkpoint of transformers (safetensors) into a GGUF file")
    arg("source", metavar="DIR_OR_REPO", help="a folder with config.json, or owner/repo[@revision] of the Hub")
    arg("out", type=Path, metavar="OUT.gguf")
    about = f"type of the matrices: {OUT_TYPES}, or mxfp4 for those of experts beside q8_0 (%(default)s)"
    arg("--outtype", default="f16", metavar="TYPE", help=about)
    arg("--pre", metavar="NAME", help="pre-tokenizer of a byte-level BPE, if the checkpoint does not tell")

    for name, what, forms, default in (
        ("eagle3", "an EAGLE-3 head", ("original", "speculators"), "original"),
        ("dflash", "a DFlash drafter", ("authors", "speculators"), "the first that can say what it is"),
        ("dspark", "a DSpark drafter", ("authors", "speculators"), "the first that can say what it is"),
    ):
        arg = add(name, _head, f"{what} into another of its forms: a folder, or a GGUF file for llama.cpp")
        arg("source", metavar="HEAD", help="a folder, a GGUF file, a known name or hf://owner/repo")
        arg("out", type=Path, metavar="OUT", help="a folder, or a file that ends in .gguf")
        arg("--form", choices=forms, help=f"form of a folder ({default})")
        arg("--target", metavar="MODEL", help="the target's GGUF file: its tokenizer goes into the head's")
        arg("--verifier", metavar="OWNER/NAME", help="the target's repository or folder, for a speculators folder")
        types = "f32, f16, bf16, q8_0, q4_0, q4_1"
        arg("--outtype", default="f32", metavar="TYPE", help=f"type of a GGUF file's matrices: {types} (%(default)s)")

    arg = add("quantize", _quantize, "a GGUF file into another type of weights")
    arg("source", metavar="IN.gguf", help=ANY_MODEL)
    arg("out", type=Path, metavar="OUT.gguf")
    arg("type", metavar="TYPE", help="Q8_0, Q6_K, Q5_K, Q4_K, Q5_1, Q5_0, Q4_1, Q4_0, F16, BF16, F32 ..")

    arg = add("llama2c", _llama2c, "a model of llama2.c into a GGUF file")
    arg("model", type=Path, metavar="model.bin")
    arg("tokenizer", type=Path, metavar="tokenizer.bin")
    arg("out", type=Path, metavar="OUT.gguf")
    arg("--outtype", default="f32", metavar="TYPE", help=f"type of the matrices: {OUT_TYPES} (%(default)s)")

    arg = add("set-metadata", _set_metadata, "change one metadata value of a GGUF file, in its place or into --out")
    arg("file", metavar="FILE")
    arg("key", metavar="KEY", help="such as tokenizer.ggml.eos_token_id")
    arg("value", metavar="VALUE", help="read as the type that the key has")
    arg("--type", metavar="TYPE", help="type of a key that is not there yet: uint32, float32, bool, string ..")
    arg("--out", type=Path, metavar="FILE", help="write there, and leave FILE as it is")

    what = "the tokenizer of a GGUF file into a folder for transformers and load generators"
    arg = add("tokenizer", _tokenizer, what)
    arg("source", metavar="MODEL", help=ANY_MODEL)
    arg("out", type=Path, metavar="DIR", help="the folder of tokenizer.json and tokenizer_config.json")

    arg = add("make-delta", _make_delta, "write the tensors and metadata that a model has and its base has not")
    arg("base", metavar="BASE", help=ANY_MODEL)
    arg("model", metavar="MODEL.gguf", help="with tensors of the same names and shapes")
    arg("out", type=Path, metavar="DELTA.gguf")

    arg = add("apply-delta", _apply_delta, "make a model of its base and a difference; another base is refused")
    arg("base", metavar="BASE", help=ANY_MODEL)
    arg("delta", type=Path, metavar="DELTA.gguf")
    arg("out", type=Path, metavar="OUT.gguf")

    arg = add("powerinfer", _powerinfer, "join a dense GGUF with predictors into a PowerInfer file, or split one")
    arg("source", metavar="MODEL", help="a GGUF, or a folder of transformers; with --back a PowerInfer file")
    arg("predictors", type=Path, metavar="DIR", help="the folder of model_0.pt .. and config.json; --back writes it")
    arg("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    arg(
        "--type",
        type=str.lower,
        choices=("f16", "q4_0"),
        default="f16",
        help="f16 (default) or q4_0, the types that PowerInfer computes rightly",
    )
    arg("--threshold", type=float, help="to write into the file (the one of DIR/config.json)")
    arg("--back", action="store_true", help="split a PowerInfer file into a dense GGUF and its predictors")


def main(args: argparse.Namespace) -> int:
    if args.out is not None:
        need_folder(args.out)
        if args.out.exists():
            _check_replaced(args)
    print(args.run(args))
    return 0


def _check_replaced(args: argparse.Namespace) -> None:
    """The file to write is there: it is no source, and is not replaced unasked."""
    from specsparse.models import catalogue

    out = args.out
    for name in ("file", "source", "base", "model", "delta", "tokenizer", "target"):
        if given := getattr(args, name, None):
            entry = catalogue.find(str(given))
            source = catalogue.locate(entry) if entry else Path(given)
            if source is not None and source.exists() and out.samefile(source):
                raise UserError(f"{out}: is the source; give another file to write")
    if args.overwrite:
        return
    if not sys.stdin.isatty():
        raise UserError(f"{out}: is there already; --overwrite replaces it")
    question = f"{out} is there already ({out.stat().st_size / 2**20:.1f} MiB). Replace it? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError(f"{out}: left as it is")


def _hf(args: argparse.Namespace) -> str:
    from specsparse.models.convert.hf import convert_hf

    notes: list[str] = []
    with terminal.loading(terminal.console(), f"converting {args.source}") as progress:
        convert_hf(args.source, args.out, type_name=args.outtype, pre=args.pre, progress=progress, note=notes.append)
    for line in notes:
        print(f"note: {line}", file=sys.stderr)
    return _wrote(args.out)


def _head(args: argparse.Namespace) -> str:
    from specsparse.models import catalogue
    from specsparse.models.convert.heads import convert_head, head_facts

    target = _opened(args.target) if args.target else None
    options = {"form": args.form, "target": target, "verifier": args.verifier, "quant": args.outtype}
    head = convert_head(args.conversion, catalogue.published(args.source), args.out, **options)
    if args.out.suffix == ".gguf":
        return _wrote(args.out)
    names = ", ".join(sorted(path.name for path in args.out.iterdir()))
    return f"wrote {args.out}: {names} ({head_facts(head)['head']})"


def _quantize(args: argparse.Namespace) -> str:
    from specsparse.engine.gguf import requantise
    from specsparse.engine.gguf.reader import FLOAT_TYPES

    kind, source = requantise.kind_of(args.type), _opened(args.source)
    before = source.main_type()
    if kind.name not in FLOAT_TYPES and before not in (*FLOAT_TYPES, kind.name):
        what = f"{args.source} is quantised already ({before}): what two roundings lose adds up"
        print(f"warning: {what}; a file in F16 or F32 makes a better {kind.name}", file=sys.stderr)
    with terminal.loading(terminal.console(), f"quantising to {kind.name}") as progress:
        requantise.requantise(source, args.out, kind, progress=progress)
    return _wrote(args.out)


def _llama2c(args: argparse.Namespace) -> str:
    from specsparse.models.convert.llama2c import convert_llama2c

    with terminal.loading(terminal.console(), f"converting {args.model}") as progress:
        convert_llama2c(args.model, args.tokenizer, args.out, type_name=args.outtype, progress=progress)
    return _wrote(args.out)


def _set_metadata(args: argparse.Namespace) -> str:
    from specsparse.models.convert.edit import set_metadata

    with terminal.loading(terminal.console(), f"writing {args.out or args.file}") as progress:
        old, new = set_metadata(args.file, args.key, args.value, args.out, type_name=args.type, progress=progress)
    return f"{args.key}: {new} (was {old if len(old) <= 60 else old[:58] + '..'})"


def _tokenizer(args: argparse.Namespace) -> str:
    from specsparse.models.convert.hf_tokenizer import NAMES, write_tokenizer

    write_tokenizer(_opened(args.source), args.out)
    return f"wrote {args.out}: {', '.join(NAMES)}"


def _make_delta(args: argparse.Namespace) -> str:
    from specsparse.models.convert.edit import make_delta

    count = make_delta(_opened(args.base).path, _opened(args.model).path, args.out)
    return f"wrote {args.out}: {count} tensors, {args.out.stat().st_size / 2**20:.1f} MiB"


def _apply_delta(args: argparse.Namespace) -> str:
    from specsparse.models.convert.edit import apply_delta

    return _wrote(apply_delta(_opened(args.base).path, args.delta, args.out))


def _powerinfer(args: argparse.Namespace) -> str:
    """A folder of transformers becomes a temporary file in F16 first, as PowerInfer's own converter makes it."""
    from specsparse.models.convert.hf import convert_hf
    from specsparse.powerinfer.model_files import from_powerinfer, to_powerinfer

    with contextlib.ExitStack() as stack:
        if (Path(os.path.expanduser(args.source)) / "config.json").is_file():
            folder = tempfile.TemporaryDirectory(prefix=f".{args.out.name}.", dir=args.out.parent)
            source = Path(stack.enter_context(folder), "dense.gguf")
            convert_hf(args.source, source, type_name="f16")
        else:
            source = _opened(args.source).path
        if args.back:
            from_powerinfer(source, args.out, args.predictors)
            return f"wrote {args.out} and the predictors in {args.predictors}"
        notes = to_powerinfer(source, args.predictors, args.out, out_type=args.type, threshold=args.threshold)
    return "\n".join([f"wrote {args.out}", *(f"note: {note}" for note in notes)])


def _opened(name: str) -> "GGUFFile":
    """The file of a model: a path, a known name or a reference to the Hub."""
    from specsparse.engine.gguf.reader import open_gguf
    from specsparse.models import catalogue

    return open_gguf(catalogue.resolve(name))


def _wrote(path: Path) -> str:
    size = _opened(str(path)).sizes()
    weights, mib = size["weights"] / 1e6, size["bytes"] / 2**20
    return f"wrote {path}: {weights:.1f} M weights, {mib:.1f} MiB, {size['bits_per_weight']:.2f} bits a weight"
