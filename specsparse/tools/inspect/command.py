"""Print what a model file is: metadata, tensors, bytes per token, what this machine could do with it at best.

With a second file, how that would do as its draft model.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from specsparse.errors import UserError

MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, the draft, and how much to show."""
    add = parser.add_argument
    add("model", metavar="FILE", help="the path of a GGUF file, a known name or hf://owner/repo/file.gguf")
    add("second", nargs="?", metavar="DRAFT", help="a draft model to judge beside it")
    add("--draft", metavar="FILE", help="the same")
    add("--tensors", action="store_true", help="a line for every tensor, not for every kind of tensor")
    add("--device", default="this", metavar="NAME", help="estimate for this machine (default), a100, h100, m1 ..")
    add("--json", action="store_true", help="one JSON object instead of tables")


def main(args: argparse.Namespace) -> int:
    """Inspects and prints."""
    from rich.text import Text

    from specsparse.measure.costs.roofline import get_device
    from specsparse.support import terminal
    from specsparse.support.files import to_json
    from specsparse.tools.inspect.inspection import report

    if args.second and args.draft:
        raise UserError(f"{args.second} and --draft {args.draft}: one draft model is judged, give one of them")
    device = get_device(args.device)
    found = _look_at(args.model)
    if isinstance(found, dict):  # a head in a folder
        print(to_json(found)) if args.json else terminal.console().print(_pairs("head", found))
        return 0
    name = args.second or args.draft
    draft = name and _look_at(name)
    inspected = report(found, device, draft=draft or None, each=args.tensors)
    if args.json:
        print(to_json(inspected))
        return 0
    out = terminal.console()
    for part in _parts(inspected, device.title):
        out.print(Text(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))
    return 0


def _look_at(name: str) -> Any:
    """A model file or a head, inspected; a folder of transformers gets a line that says what it is."""
    from specsparse.engine.gguf.reader import open_gguf
    from specsparse.models import catalogue, hub
    from specsparse.models.convert.heads import head_facts, read_dflash, read_eagle3
    from specsparse.models.convert.hf import head_kind, refuse_draft_head
    from specsparse.models.convert.hf_config import read_json
    from specsparse.tools.inspect.inspection import Inspected

    path = catalogue.published(name, "no") if name.startswith(hub.SCHEME) else catalogue.resolve(name)
    if (path / "config.json").is_file():
        readers = {"EAGLE-3": read_eagle3, "DFlash": read_dflash}
        kind = head_kind(read_json(path / "config.json"))
        if kind in readers:
            return head_facts(readers[kind](path))
        refuse_draft_head(path)
        raise UserError(f"{path}: is a folder of transformers; `specsparse convert hf {path} OUT.gguf` makes a GGUF")
    return Inspected.from_gguf(open_gguf(path))


def _parts(report: Mapping[str, Any], device: str) -> Iterator[Any]:
    """The report of `inspection` as lines and tables."""
    size, form = report["sizes"], report["format"]
    yield f"{report['file']}: {form['magic']} version {form['version']}"
    yield _pairs("metadata", report["metadata"])
    yield _tensors(report["tensors"])
    kinds = ", ".join(f"{name} {_mib(n)}" for name, n in size["bytes_by_type"].items())
    yield f"{size['weights'] / 1e6:.1f} M weights, {_mib(size['bytes'])}, {size['bits_per_weight']:.2f} bits a weight"
    yield f"  {kinds}"
    if report["head"]:
        yield _pairs("head", report["head"])
        drafter = report["metadata"]["general.architecture"]  # eagle3 and dflash name the drafters too
        yield f"drafts for its target: drafter={drafter} drafter.path={report['file']}"
        return
    if report["problem"]:
        yield f"does not run here: {report['problem']}"
        return
    yield _pairs("model", {**report["model"], **(report["tokenizer"] or {})})
    rates = report["rates"]
    cache = f"{_mib(rates['kv_bytes'])} of cache after {rates['kv_length']} tokens"
    yield f"a token reads {_mib(rates['weight_bytes'])} of weights and {cache}"
    yield (
        f"at best {rates['tokens_per_second']:.0f} tok/s decoding, {rates['prompt_tokens_per_second']:.0f} tok/s of "
        f"prompt, 8 tokens in one pass {rates['v8']:.2f} times as long as one ({device})"
    )
    yield "measured: python -m specsparse bench, python -m specsparse.run +experiment=roofline"
    if report["pair"]:
        yield from _pair(report["pair"], device)


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.1f} MiB" if nbytes >= 0.1 * MIB else f"{nbytes / 1024:.1f} KiB"


def _table(*columns: str) -> Any:
    from specsparse.support import tables

    left = [i for i, name in enumerate(columns) if name not in ("shape", "count", "size")]
    return tables.new(*columns, left=left, wrap=range(len(columns)))


def _pairs(title: str, values: Mapping[str, str]) -> Any:
    from rich.text import Text

    table = _table(title, "")
    for key, value in values.items():
        table.add_row(Text(key), Text(value))
    return table


def _tensors(groups: list[Mapping[str, Any]]) -> Any:
    from rich.text import Text

    table = _table("tensor", "type", "shape", "count", "size")
    for g in groups:
        shape = " x ".join(map(str, g["shape"]))
        table.add_row(Text(g["name"]), g["type"], shape, str(g["count"]), _mib(g["nbytes"]))
    return table


def _pair(found: Mapping[str, Any], device: str) -> Iterator[Any]:
    yield f"\n{found['draft']} as its draft model"
    if found["fits"]:
        yield "the vocabularies fit"
    else:
        table = _table("differs", "target", "draft")
        for d in found["differences"][:8]:
            table.add_row(d["what"], d["target"], d["draft"])
        yield table
        more = len(found["differences"]) - 8
        as_target = "drafter.special_tokens=target goes on with the target's ids"
        tli = "drafter.vocabulary=tli drafts the tokens that both have, slem goes by way of text"
        yield (f"and {more} more; " if more > 0 else "") + (
            as_target if found["only_special"] else f"they do not fit: {tli}"
        )
        yield found["overlap"]
    yield f"a drafted token costs {found['cost']:.2f} of a plain step, by the roofline of {device}"
    for row in found["speedups"]:
        gain = f"speed-up {row['speedup']:.2f} with gamma {row['gamma']}" if row["gamma"] else "no draft pays"
        yield f"  at acceptance {row['alpha']:g}: {gain}"
