"""Print what a model file is: metadata, tensors, bytes per token, what this machine could do with it at best.

With a second file, how that would do as its draft model.
"""

import argparse
from typing import Any

from specsparse.cli.arguments import ANY_MODEL, show
from specsparse.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="FILE", help=ANY_MODEL)
    add("second", nargs="?", metavar="DRAFT", help="a draft model to judge beside it")
    add("-md", "--model-draft", "--draft", dest="draft", metavar="FILE", help="the same")
    add("--tensors", action="store_true", help="a line for every tensor, not for every kind of tensor")
    add("--device", default="this", metavar="NAME", help="estimate for this machine (default), a100, h100, m1 ..")
    add("--json", action="store_true", help="one JSON object instead of tables")


def main(args: argparse.Namespace) -> int:
    from specsparse.measure.costs.roofline import get_device
    from specsparse.support import terminal
    from specsparse.support.files import to_json
    from specsparse.tools.inspect.inspection import pairs, parts, report

    if args.second and args.draft:
        raise UserError("--draft: not allowed with argument DRAFT")
    device, name = get_device(args.device), args.second or args.draft
    inspected, draft = _look_at(args.model), _look_at(name) if name else None
    if draft is not None and (isinstance(inspected, dict) or isinstance(draft, dict)):
        head = args.model if isinstance(inspected, dict) else name
        raise UserError(f"{head} is a head in a folder, which is looked at alone: leave out the other file")
    if isinstance(inspected, dict):
        found, shown = inspected, [pairs("head", inspected)]
    else:
        found = report(inspected, device, draft=draft, each=args.tensors)
        shown = parts(found, device.title)
    if args.json:
        print(to_json(found))
    else:
        show(terminal.console(), shown)
    return 0


def _look_at(name: str) -> Any:
    """An `Inspected` file, or the facts of a head in a folder; another folder gets a line that says what it is."""
    from specsparse.engine.gguf.reader import open_gguf
    from specsparse.models import catalogue
    from specsparse.models.convert.heads import head_facts, read_dflash, read_eagle3
    from specsparse.models.convert.hf import head_kind, refuse_draft_head
    from specsparse.models.convert.hf_config import read_json
    from specsparse.support.hub_names import is_reference
    from specsparse.tools.inspect.inspection import Inspected

    path = catalogue.published(name, "no") if is_reference(name) else catalogue.resolve(name)
    if not (path / "config.json").is_file():
        return Inspected.from_gguf(open_gguf(path))
    readers = {"EAGLE-3": read_eagle3, "DFlash": read_dflash, "DSpark": read_dflash}
    kind = head_kind(read_json(path / "config.json"))
    if kind in readers:
        return head_facts(readers[kind](path))
    refuse_draft_head(path)
    raise UserError(f"{path}: is a folder of transformers; `specsparse convert hf {path} OUT.gguf` makes a GGUF")
