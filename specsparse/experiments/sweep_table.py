"""One table over the runs of a sweep: what varied, and what came of it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specsparse.experiments.kinds.placement import sweep as placement_sweep
from specsparse.experiments.kinds.sparse import sparsity_report
from specsparse.measure import conditions
from specsparse.measure.conditions import Rank
from specsparse.measure.intervals import LEAST_PROMPTS, Interval
from specsparse.report import methods, runs
from specsparse.report.record import PLAIN, RECORD_FILE, SPECULATIVE, STOPPED
from specsparse.runtime import metrics
from specsparse.support import tables

SPARSITY = "sparsity"
_RESULTS = (
    "rank", "speed-up", "95 % interval", "tok/s", "plain tok/s", "read GB/s", "tokens/pass", "accept. length",
    "differing",
)  # fmt: skip


def records(directory: Path) -> list[dict[str, Any]]:
    """The records of a sweep's finished jobs, in their order, a measurement once."""
    jobs = sorted((d for d in directory.iterdir() if d.name.isdecimal()), key=lambda d: int(d.name))
    once = runs.once([d for d in jobs if (d / RECORD_FILE).is_file()])
    found = [json.loads((d / RECORD_FILE).read_text(encoding="utf-8")) for d in once]
    return [record for record in found if record.get("state") != STOPPED]


def table(found: list[dict[str, Any]]) -> Table:
    """A row a run: what was swept, then what came of it; the best speed-up, and what ties with it, is bold."""
    swept = methods.differing_settings([r["config"] for r in found])
    note = metrics.lengths_note(per_pass="tokens/pass", length="accept. length")
    out = tables.new(*(Text(setting.name) for setting in swept), *_RESULTS, left=(), close=True, note=note)
    for i, (r, rank) in enumerate(zip(found, ranks(found), strict=True)):
        summary = r["summary"]
        plain, method = ((summary.get(side) or {}).get("rates", {}) for side in (PLAIN, SPECULATIVE))
        faster, identity = _speedup(r), summary.get("identity")
        read, interval = conditions.of_record(r).conditions.read_bandwidth, _interval(faster)
        cells = [str(rank or "-"), _cell(faster, "ratio_of_totals", ".2f"), interval.ends() if interval else "-"]
        cells += [_cell(method, "tokens_per_second", ".1f"), _cell(plain, "tokens_per_second", ".1f")]
        cells += [f"{read / 1e9:.1f}" if read else "-"]
        cells += [_cell(method, key, ".2f") for key in ("tokens_per_target_pass", "mean_acceptance_length")]
        cells += [str(identity["differing"]) if identity else "-"]
        names = [Text(setting.values[i]) for setting in swept]
        out.add_row(*names, *cells, style="bold" if rank and rank.place == 1 else None)
    return out


def ranks(found: list[dict[str, Any]]) -> list[Rank | None]:
    """Of the records, by their speed-up."""
    return conditions.ranks([_interval(_speedup(r)) for r in found])


def lines(found: list[dict[str, Any]]) -> list[str]:
    """What a reader must know of the table: what ties mean, and what makes the ranking doubtful."""
    measured = [_interval(_speedup(r)) for r in found]
    out = conditions.rank_lines(measured)
    out += apart(found)
    swept = methods.differing_settings([r["config"] for r in found])
    names = [", ".join(f"{setting.name} {setting.values[i]}" for setting in swept) for i in range(len(found))]
    bounds = []
    for name, r in zip(names, found, strict=True):
        rates = (r["summary"].get(SPECULATIVE) or {}).get("rates", {})
        bounds.append((name, (_speedup(r) or {}).get("ratio_of_totals"), rates.get("tokens_per_target_pass")))
    taken = [conditions.of_record(r).conditions for r in found]
    out += conditions.all_busy(zip(names, taken, strict=True)) + conditions.all_impossible(bounds)
    return out + conditions.all_skewed(zip(names, measured, strict=True))


def apart(found: list[dict[str, Any]]) -> list[str]:
    """One line where the records were taken under conditions too far apart, else none."""
    line = conditions.differ([conditions.of_record(r) for r in found])
    return [line] if line else []


def show(directory: Path, out: Console) -> None:
    """Print the table of a sweep's directory; nothing for fewer than two runs of a kind that has one."""
    everything = records(directory)
    points = [r for r in everything if r.get("kind") == SPARSITY]
    if len(points) > 1:
        swept = methods.differing_settings([r["config"] for r in points])
        tables.show(out, sparsity_report.sweep_table(points, swept), names=len(swept))
        _say(apart(points), out)
        _say_where(directory, out)
    placed = [r for r in everything if r.get("kind") == "placement"]
    if len(placed) > 1:
        placement_sweep.show(directory, placed, out)
        _say(apart(placed), out)
    found = [r for r in everything if "summary" in r and PLAIN in r["summary"]]
    if len(found) > 1:
        tables.show(out, table(found), names=len(methods.differing_settings([r["config"] for r in found])))
        _say(lines(found), out)
        _say_where(directory, out)


def _say(lines: list[str], out: Console) -> None:
    for line in lines:
        out.print(Text(line, style="yellow"), soft_wrap=True)


def _say_where(directory: Path, out: Console) -> None:
    out.print(Text(f"records: {directory}", style="dim"), soft_wrap=True)


def _speedup(record: Mapping[str, Any]) -> dict[str, Any] | None:
    return record["summary"].get("speedup")


def _interval(faster: Mapping[str, Any] | None) -> Interval | None:
    """Of a record; older ones hold ends for one or two prompts too, and do not say how many prompts there were."""
    if faster is None:
        return None
    prompts = faster.get("prompts", 0)
    ends = (None, None) if 0 < prompts < LEAST_PROMPTS else (faster["low"], faster["high"])
    return Interval(faster["ratio_of_totals"], *ends, prompts, faster.get("skewed", False))


def _cell(values: Mapping[str, Any] | None, key: str, spec: str) -> str:
    value = (values or {}).get(key)
    return "-" if value is None else format(value, spec)
