"""List the models that have a name: whether they are here, how large they are, how fast they could be here."""

import argparse
import contextlib
import functools
from dataclasses import asdict
from typing import Any

from specsparse.errors import UserError

KV_LENGTH = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="list these models only")
    about = "bring the named ones here; alone it asks on a terminal"
    add("--download", nargs="?", const="ask", choices=("yes", "no", "ask"), help=about)
    add("--json", action="store_true", help="one JSON object a line instead of a table")


def main(args: argparse.Namespace) -> int:
    from specsparse.models import catalogue
    from specsparse.support import tables, terminal
    from specsparse.support.files import to_json
    from specsparse.support.options import nearest

    named = set[str]()
    for name in args.names:
        if (entry := catalogue.find(name)) is None:
            raise UserError(f"{name} is no model of the catalogue{nearest(name, catalogue.names())}")
        named.add(entry.name)
    if args.download and not args.names:
        raise UserError("--download needs the names of the models to bring here")
    for name in args.names if args.download else ():
        catalogue.path_of(name, args.download)
    rows = [_row(entry) for name, entry in catalogue.entries().items() if not named or name in named]
    if args.json:
        for row in rows:
            print(to_json(row))
        return 0
    out = terminal.console(columns=True)
    tables.show(out, _table(rows))
    bring = "`python -m specsparse models NAME --download` brings one here"
    out.print(f"your own entries: {catalogue.own_folder()}; {bring}", soft_wrap=True)
    return 0


def _row(entry: Any) -> dict[str, Any]:
    """An entry and this machine's facts about it; unknown ones are None."""
    from specsparse.measure.costs.roofline import ModelOutline
    from specsparse.models import catalogue

    try:
        path = catalogue.locate(entry)
        path = path if path is not None and path.exists() else None
        here = "yes" if path else "made on first use" if entry.base else "no"
    except UserError:
        path, here = None, "not installed"
    known, outline = catalogue.known(entry), None
    size: float | None = known.size
    if path is not None and path.is_file():
        size = path.stat().st_size
        with contextlib.suppress(UserError):  # a file that does not run here
            outline = ModelOutline.from_file(entry.name, path)
    elif entry.shape is not None:
        outline = ModelOutline.from_shape(entry.name, entry.shape)
        size = size or outline.nbytes
    cache = outline.kv_bytes(min(outline.config.context_length, KV_LENGTH)) if outline else 0
    memory = None if size is None else size + cache
    speed = None if size is None or entry.role == "head" else _bandwidth() / size
    facts = {**asdict(known), "size": size, "here": here, "path": None if path is None else str(path)}
    return {**facts, "memory": memory, "tokens_per_second": speed}


@functools.cache
def _bandwidth() -> float:
    from specsparse.measure.machine import read_bandwidth

    return read_bandwidth()


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.text import Text

    from specsparse.support import tables
    from specsparse.support.files import size_text

    caption = (
        "size: of the file, or computed from the model's shape if it is not known; ?: unknown until downloaded; "
        f"memory: weights, and keys and values of {KV_LENGTH} tokens if the shape is known; tok/s: at best on this "
        "machine, by the memory bandwidth measured now"
    )
    titles = ("name", "here", "size", "memory", "tok/s", "licence", "drafted for by, or role", "model, and what for")
    table = tables.new(*titles, left=(0, 1, 5, 6, 7), wrap=(5, 6, 7), note=caption)
    for row in rows:
        size, memory, speed = row["size"], row["memory"], row["tokens_per_second"]
        cells = [row["name"], row["here"], size_text(size) if size else "?", size_text(memory) if memory else "?"]
        cells += [f"{speed:.{0 if speed >= 10 else 1}f}" if speed else "?"]
        consent = " (consent and HF_TOKEN)" if row["gated"] else ""
        cells += [(row["licence"] or "?") + consent, ", ".join(row["drafts"]) or row["role"]]
        table.add_row(*map(Text, (*cells, f"{row['what']}: {row['good_for']}")))
    return table
