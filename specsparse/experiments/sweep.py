"""One table over the runs of a sweep: what varied, and what came of it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from specsparse import intervals
from specsparse.experiments import placement_sweep, sparsity_report
from specsparse.record import PLAIN, SPECULATIVE
from specsparse.trackers import RECORD_FILE

SPARSITY = "sparsity"
_NOT_VARIED = ("name",)


def records(directory: Path) -> list[dict[str, Any]]:
    """The records of a sweep's jobs, in their order; a job that failed has none."""
    jobs = sorted((d for d in directory.iterdir() if d.name.isdecimal()), key=lambda d: int(d.name))
    files = [d / RECORD_FILE for d in jobs]
    return [json.loads(f.read_text(encoding="utf-8")) for f in files if f.is_file()]


def varied(found: list[dict[str, Any]]) -> list[str]:
    """Keys of the config that differ between the records."""
    flat = [dict(_flat(r.get("config") or {})) for r in found]
    keys = dict.fromkeys(key for config in flat for key in config)
    return [k for k in keys if k not in _NOT_VARIED and len({repr(config.get(k)) for config in flat}) > 1]


def table(found: list[dict[str, Any]]) -> Table:
    """A row a run; the speed-up's best is bold."""
    keys = varied(found)
    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    titles = (*keys, "plain tok/s", "tok/s", "speed-up", "95 % interval", "tokens/pass", "accept. length", "differing")
    for title in titles:
        out.add_column(title, justify="right", no_wrap=True)
    best = max(((_speedup(r) or {}).get("ratio_of_totals", 0) for r in found), default=0)
    for r in found:
        config, summary = dict(_flat(r["config"])), r["summary"]
        plain, method = ((summary.get(side) or {}).get("rates", {}) for side in (PLAIN, SPECULATIVE))
        faster, identity = _speedup(r), summary.get("identity")
        cells = [str(config.get(key)) for key in keys]
        cells += [_cell(plain, "tokens_per_second", ".1f"), _cell(method, "tokens_per_second", ".1f")]
        cells += [_cell(faster, "ratio_of_totals", ".2f")]
        cells += [_ends(faster)]
        cells += [_cell(method, key, ".2f") for key in ("tokens_per_target_pass", "mean_acceptance_length")]
        cells += [str(identity["differing"]) if identity else "-"]
        out.add_row(*cells, style="bold" if faster and faster["ratio_of_totals"] == best else None)
    return out


def show(directory: Path, out: Console) -> None:
    """Print the table of a sweep's directory; nothing for fewer than two runs of a kind that has one."""
    everything = records(directory)
    points = [r for r in everything if r.get("kind") == SPARSITY]
    if len(points) > 1:
        flat = [dict(_flat(r["config"])) for r in points]
        out.print(sparsity_report.sweep_table(points, {k: [c.get(k) for c in flat] for k in varied(points)}))
        out.print(f"records: {directory}", style="dim", highlight=False)
    placed = [r for r in everything if r.get("kind") == "placement"]
    if len(placed) > 1:
        placement_sweep.show(directory, placed, out)
    found = [r for r in everything if "summary" in r and PLAIN in r["summary"]]
    if len(found) > 1:
        out.print(table(found))
        out.print(f"records: {directory}", style="dim", highlight=False)


def _speedup(record: Mapping[str, Any]) -> dict[str, Any] | None:
    return record["summary"].get("speedup")


def _ends(faster: Mapping[str, Any] | None) -> str:
    """The interval; records from before intervals were over prompts hold two equal ends for one pair."""
    if faster is None or faster.get("prompts") == 1:
        return "-"
    return intervals.shown(faster["low"], faster["high"])


def _cell(values: Mapping[str, Any] | None, key: str, spec: str) -> str:
    value = (values or {}).get(key)
    return "-" if value is None else format(value, spec)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
