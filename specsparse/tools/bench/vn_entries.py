"""v(n) as entries that anybody can add to: one schema, files that validate by it, and the page that is made of them.

v(n) is the time of a forward of n rows over that of one row, of one engine with one file on one machine: the cost of a
round of speculation. `python -m specsparse bench speed --publish FILE` writes an entry for each engine it timed.
"""

import argparse
import dataclasses
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from specsparse.errors import UserError
from specsparse.measure import conditions
from specsparse.measure.conditions import Conditions
from specsparse.measure.trials import OURS
from specsparse.support.files import Json, to_json, write_atomically
from specsparse.support.options import Count, Positive, Range, Read, options_of, read

VERSION = 1
"""Of the schema."""
_SHOWN = (2, 4, 8, 16)  # the rows of the page's table


@dataclass(frozen=True)
class EngineUsed:
    """The engine that was timed.

    Attributes:
        name: specsparse, llama.cpp, ik_llama.cpp ..
        build: version or commit, and the instruction set.
        threads: how many.
    """

    name: str
    build: str
    threads: Count


@dataclass(frozen=True)
class MachineUsed:
    """The machine that it ran on.

    Attributes:
        name: short, the same in all entries of the machine.
        cpu: its processor, or accelerator.
        bandwidth: bytes read a second, measured beside it; None: not measured.
    """

    name: str
    cpu: str
    bandwidth: Positive | None = None


def _times(v: Mapping[str, float]) -> Mapping[str, float]:
    if (
        not isinstance(v, Mapping)
        or not v
        or not all(n.isdecimal() and int(n) > 1 and type(t) in (int, float) and t > 0 for n, t in v.items())
    ):
        raise ValueError
    return v


@dataclass(frozen=True)
class VnEntry:
    """One engine, one file, one machine.

    Attributes:
        engine, machine: what and where.
        model: the model.
        type: GGUF type of most of its weights.
        date: ISO.
        quiet: whether the memory was read at a steady rate meanwhile.
        depth: tokens in the cache.
        repeats: timings of each n; the figures are their medians.
        v: by n, from 2 on.
        source: where it is logged, with the command.
        step_ms: milliseconds of one row; None: not noted.
    """

    engine: EngineUsed
    machine: MachineUsed
    model: str
    type: str
    date: Annotated[str, Read(lambda text: datetime.date.fromisoformat(text).isoformat(), "a date such as 2026-11-23")]
    quiet: bool
    depth: Annotated[int, Range(0)]
    repeats: Count
    v: Annotated[Mapping[str, float], Read(_times, "times above 0 by whole numbers from 2 on")]
    source: str
    step_ms: Positive | None = None


def schema() -> Json:
    """The JSON schema (draft 2020-12) of a file of entries; `read_file` accepts what it accepts."""
    number, text = {"type": "number", "exclusiveMinimum": 0}, {"type": "string"}
    count, or_null = {"type": "integer", "minimum": 1}, {"anyOf": [number, {"type": "null"}]}

    def of(owner: type, **kinds: Json) -> Json:
        options = options_of(owner)
        about = {name: {**kinds.get(name, text), "description": option.about} for name, option in options.items()}
        needed = [name for name, option in options.items() if option.default is dataclasses.MISSING]
        return {"type": "object", "properties": about, "required": needed, "additionalProperties": False}

    v = {"type": "object", "patternProperties": {"^([2-9]|[1-9][0-9]+)$": number}, "additionalProperties": False,
         "minProperties": 1}  # fmt: skip
    entry = of(
        VnEntry, engine=of(EngineUsed, threads=count), machine=of(MachineUsed, bandwidth=or_null), v=v, repeats=count,
        depth={"type": "integer", "minimum": 0}, quiet={"type": "boolean"}, step_ms=or_null,
        date={**text, "format": "date"},
    )  # fmt: skip
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "v(n): the time of a forward of n rows over that of one row",
        "type": "object",
        "properties": {"schema": {"const": VERSION}, "entries": {"type": "array", "minItems": 1, "items": entry}},
        "required": ["schema", "entries"],
        "additionalProperties": False,
    }


def read_file(path: Path) -> tuple[VnEntry, ...]:
    """The entries of a file; UserError if it cannot be read, or is not as the schema says."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        given: Any = None
    known = isinstance(given, dict) and given.keys() == {"schema", "entries"} and given["schema"] == VERSION
    entries = given["entries"] if known else None
    if not (isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries)):
        raise UserError(f'{path}: is no file of v(n): {{"schema": {VERSION}, "entries": [{{..}}, ..]}} is needed')
    found = []
    for i, entry in enumerate(entries):
        where = f"{path.name}: entries[{i}]"
        try:
            found.append(read(VnEntry, entry, group=where, null=True))
        except UserError as error:
            text = str(error)
            raise UserError(text if text.startswith(where) else f"{where}.{text}") from None
    return tuple(found)


def check(path: Path, ns: Sequence[int]) -> None:
    """UserError if --publish would write no entry, or would replace a file of another kind."""
    if max(ns, default=1) < 2:
        raise UserError("--publish writes v(n): --widths must go beyond 1, for instance 1,2,4,8,16")
    if path.exists():
        try:
            read_file(path)
        except UserError as error:
            raise UserError(f"--publish replaces files of entries alone; {error}") from None


def publish(args: argparse.Namespace, report: Json) -> None:
    """Writes the report of `bench speed` with these arguments as a file of entries."""
    quantised = f" --quantise {args.quantise}" if args.quantise else ""
    peers = f" --peer {','.join(args.peers)}" if args.peers else ""
    depth = f" --depth {args.depth}" if args.depth else ""
    widths = ",".join(report["v"][OURS])
    command = f"python -m specsparse bench speed {args.model} --pp 0 --tg 0 --widths {widths}{depth}{quantised}{peers}"
    write_file(Path(args.publish), from_report(report, machine=args.machine, source=f"`{command}`"))


def from_report(report: Json, *, machine: str | None = None, source: str) -> list[VnEntry]:
    """An entry for each engine of a report of `one_sequence.SequenceBench` with v(n) beyond 1. `machine` is its short
    name, by default its processor's; `source` says where it is logged, with the command."""
    manifest, model, plan = report["manifest"], report["model"], report["plan"]
    cpu, git = manifest["cpu"]["model"], manifest.get("git") or {}
    builds = {OURS: f"{str(git.get('commit') or 'no checkout')[:10]}, {report['backend']} {manifest['kernels']['isa']}"}
    for peer in report["peers"]:
        flash = peer["flash"].get("verify")
        attention = "" if flash is None else f", flash attention {'on' if flash else 'off'}"
        builds[peer["name"]] = peer["version"] + attention
    steps = {row["engine"]: row["ms_per_token"] for row in report["results"] if row["test"] == "v1"}
    memory = report["machine"]["read_bytes_per_second"]
    quiet = conditions.busy(Conditions(memory["median"], memory["sd"] / memory["mean"])) is None
    same = {
        "machine": MachineUsed(machine or cpu, cpu, memory["median"]), "quiet": quiet, "source": source,
        "model": model.get("name") or str(model.get("file")), "type": model["main_type"],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "depth": plan["depth"], "repeats": plan["repeats"],
    }  # fmt: skip
    return [
        VnEntry(
            engine=EngineUsed(engine, builds.get(engine, ""), report["threads"]),
            v={str(n): round(t["median"], 3) for n, t in by_n.items() if int(n) > 1},
            step_ms=round(steps[engine], 3),
            **same,
        )
        for engine, by_n in report["v"].items()
    ]


def write_file(path: Path, entries: Sequence[VnEntry]) -> None:
    """Writes entries as a file that `read_file` takes; UserError if it cannot be written."""
    values = {"schema": VERSION, "entries": [dataclasses.asdict(entry) for entry in entries]}
    write_atomically(path, to_json(values, indent=1) + "\n")


def page(entries: Iterable[VnEntry]) -> str:
    """The page of v(n) in Markdown: a table a machine, engines beside one another, and how an entry gets there."""
    by_machine: dict[str, list[VnEntry]] = {}
    for entry in entries:
        by_machine.setdefault(entry.machine.name, []).append(entry)
    parts = [_HEAD]
    for name, own in sorted(by_machine.items()):
        parts += [f"## {name}\n", *_table(own), ""]
    return "\n".join([*parts, _FOOT])


def _table(entries: Sequence[VnEntry]) -> Iterable[str]:
    yield f"{entries[0].machine.cpu}.\n"
    heads = ["model", "type", "engine", "depth", "one row, ms", *(f"v({n})" for n in _SHOWN), "quiet", "date"]
    yield "| " + " | ".join(heads) + " |"
    yield "| --- " * len(heads) + "|"
    ordered = sorted(entries, key=lambda e: (e.model, e.type, e.depth, e.engine.name != OURS, e.engine.name, e.date))
    for e in ordered:
        times = [f"{e.v[str(n)]:.2f}" if str(n) in e.v else "" for n in _SHOWN]
        step = "" if e.step_ms is None else f"{e.step_ms:.2f}"
        cells = (e.model, e.type, e.engine.name, str(e.depth), step, *times, "yes" if e.quiet else "no", e.date)
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield from dict.fromkeys(
        f"* {e.engine.name}: {e.engine.build}, {e.engine.threads} threads; {e.source}" for e in ordered
    )


_HEAD = """# v(n) by engine, type and machine

v(n) is the time of a forward of n rows over that of one row. A round of speculation that drafts n - 1 tokens takes v(n)
plain steps and what drafting takes, so it must emit more than v(n) tokens to pay: an engine with v(8) = 5 has little to
gain, whatever the drafts. Depth is the number of tokens in the cache. This page is made of the files in
`docs/data/vn` by `make docs`.
"""
_FOOT = """
## Another machine or engine

    python -m specsparse bench speed smollm2-135m --pp 0 --tg 0 --widths 1,2,4,8,16 --peer llama.cpp --publish mine.json

writes an entry for each engine in the form of `docs/data/vn.schema.json`. A file beside the others is on this page
after the next `make docs`. Entries of engines that no peer module runs may be written by hand.
"""
