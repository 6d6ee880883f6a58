"""Join a dense GGUF with predictors into a PowerInfer file (default), or split one with --back."""

import argparse
from pathlib import Path

from specsparse.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to convert, from where to where."""
    add = parser.add_argument
    add("format", choices=["powerinfer"], help="the format on the other side")
    add("source", metavar="MODEL", help="a GGUF; with --back a PowerInfer file")
    add("predictors", type=Path, metavar="DIR", help="model_0.pt .. and config.json; with --back where to write them")
    add("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    add("--type", default="f16", help="f16 (default) or q4_0, what PowerInfer computes rightly")
    add("--threshold", type=float, help="to write into the file (the one of DIR/config.json)")
    add("--back", action="store_true", help="split a PowerInfer file into a dense GGUF and its predictors")


def main(args: argparse.Namespace) -> int:
    """Convert, and say what was written."""
    import math

    from specsparse import models
    from specsparse.powerinfer.convert import from_powerinfer, to_powerinfer

    source = models.resolve(args.source)
    if args.out.exists() and args.out.samefile(source):
        raise UserError(f"{args.out}: is the source; give another --out")
    if args.threshold is not None and math.isnan(args.threshold):
        raise UserError("--threshold is NaN; a number is needed, such as 0")
    if args.back:
        from_powerinfer(source, args.out, args.predictors)
        print(f"wrote {args.out} and the predictors in {args.predictors}")
        return 0
    notes = to_powerinfer(source, args.predictors, args.out, out_type=args.type.lower(), threshold=args.threshold)
    print(f"wrote {args.out}")
    for note in notes:
        print(f"note: {note}")
    return 0
