"""The page of a report: one HTML file that needs nothing beside it, no network and no script."""

import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specsparse.measure import conditions
from specsparse.report import figures, methods
from specsparse.report.methods import ReportedMethod
from specsparse.report.plots import Figure, Missing
from specsparse.report.runs import Run, disagreements, stand_ins
from specsparse.runtime import metrics
from specsparse.support.files import Json, write_atomically

PAGE, FIGURES = "index.html", "figures"
_MOST_ROWS = 200


@dataclass(frozen=True)
class WrittenReport:
    """The HTML file, and its figures, which are also PNG and CSV files in `figures/` beside it."""

    page: Path
    made: tuple[Figure, ...]
    missing: tuple[Missing, ...]


def write(runs: Sequence[Run], directory: Path, *, title: str) -> WrittenReport:
    """The report of these runs, into `directory`. OSError, UserError: it cannot be written."""
    found = methods.from_runs(runs)
    made, missing = figures.make(runs, found)
    for figure in made:
        figure.write(directory / FIGURES)
    folder, measured = _folder(runs), [m.speedup() for m in found]
    ranks = conditions.ranks(measured)
    rows = [{**_method(m), "rank": rank} for m, rank in zip(found, ranks, strict=True)]
    of_runs, said = [_run(r, folder) for r in runs], [*warnings(runs), *doubts(found)]
    page = render("page.html", title=title, runs=of_runs, methods=rows, figures=made, missing=missing,
                  warnings=said, facts=_facts(runs, found, rows), same=_same(rows), same_runs=_same(of_runs),
                  folder=folder, taken_over=sum(len(run.also) for run in runs), ranked=any(ranks),
                  of_ranks=conditions.rank_lines(measured),
                  lengths=metrics.lengths_note(per_pass="Tokens per pass"))  # fmt: skip
    write_atomically(directory / PAGE, page)
    return WrittenReport(directory / PAGE, tuple(made), tuple(missing))


def render(template: str, **values: object) -> str:
    """A template of this folder; every value is escaped."""
    place = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=place, autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                              lstrip_blocks=True)  # fmt: skip
    environment.filters |= {"number": number}
    made = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return environment.get_template(template).render(made=made, most_rows=_MOST_ROWS, **values)


def number(value: object) -> str:
    """A number for a cell: four significant digits, a dash for a missing value."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def warnings(runs: Sequence[Run]) -> list[str]:
    """Lines that a reader must see first."""
    out: list[str] = []
    for run in runs:
        found = run.summary.get("identity") or {}
        if found.get("promised") and found.get("differing"):
            out.append(f"{run.directory}: {found['differing']} tokens differ from plain decoding, against the promise")
        if run.summary.get("as_promised") is False:
            out.append(f"{run.directory}: NOT as promised")
    if len({(run.manifest.get("kernels") or {}).get("native") is False for run in runs}) > 1:
        out.append("some runs used the slow reference kernels and some the native ones")
    folder = _folder(runs)
    out += conditions.all_busy([(_below(folder, run.directory), run.conditions) for run in runs])
    return stand_ins(runs) + out + disagreements(runs)


def doubts(found: Sequence[ReportedMethod]) -> list[str]:
    """Texts that may not have the target's distribution, speed-ups that no method can have, and doubtful intervals."""
    bounds = [(m, m.speedup(), m.measured("tokens per target pass")) for m in found]
    beyond = conditions.all_impossible((m.label, s.value if s else None, t.value if t else None) for m, s, t in bounds)
    of_texts = list(metrics.draws_doubts((m.label, m.draws_z()) for m in found))
    return of_texts + beyond + conditions.all_skewed((m.label, s) for m, s, _ in bounds)


def _facts(runs: Sequence[Run], found: Sequence[ReportedMethod], rows: Sequence[Json]) -> list[tuple[str, str]]:
    """Settings that the runs share, and the first run's machine, kernels and model; others are among the warnings."""
    cpu, git = (runs[0].manifest.get(part) or {} for part in ("cpu", "git"))
    origin, same = runs[0].origin, _same(rows)
    shared = methods.constants(found)
    if "prompts" in same:
        shared.append(f"{same['prompts']} prompt{'s' if same['prompts'] != 1 else ''}")
    if same.get("text"):
        shared.append(f"text: {same['text']}")
    days = sorted({day for run in runs if (day := _date(run))})
    facts = {
        "in every run" if len(found) > 1 else "method": ", ".join(shared),
        "model": origin["model file"],
        "machine": f"{cpu.get('model')}, cores used: {cpu.get('cores')}" if cpu else None,
        "kernels": origin["kernels"],
        "commit": f"{origin['commit']}{' with changes' if git.get('dirty') else ''}" if origin["commit"] else None,
        "date": " to ".join(dict.fromkeys((days[0], days[-1]))) if days else None,
    }
    return [(key, str(value)) for key, value in facts.items() if value]


def _same(rows: Sequence[Json]) -> Json:
    """The cells that are the same in every row, which then need no column; empty for a single row."""
    if len(rows) < 2:
        return {}
    return {key: value for key, value in rows[0].items() if all(row[key] == value for row in rows)}


def _date(run: Run) -> str | None:
    given = run.manifest.get("date")
    return str(given).replace("T", " ")[:16] if given else None


def _folder(runs: Sequence[Run]) -> Path | None:
    """The folder above all runs, or None for one run."""
    directories = [path.resolve() for run in runs for path in (run.directory, *run.also)]
    return Path(os.path.commonpath(directories)) if len(directories) > 1 else None


def _run(run: Run, folder: Path | None) -> Json:
    return {
        "directory": _below(folder, run.directory),
        "also": ", ".join(_below(folder, directory) for directory in run.also),
        "kind": run.kind,
        "date": _date(run),
        "command": " ".join(map(str, run.manifest.get("command") or ())),
        "prompts": len({row.get("prompt_id") for row in run.rows}),
        "taken": ", ".join(run.conditions.parts()),
    }


def _below(folder: Path | None, directory: Path) -> str:
    return str(directory) if folder is None else os.path.relpath(directory.resolve(), folder)


def _method(method: ReportedMethod) -> Json:
    found = method.run.record.get("methods")  # of a comparison
    entries = {e["name"]: e for e in found if isinstance(e, Mapping)} if isinstance(found, list) else {}
    entry = entries.get(method.side, method.run.summary)
    identity = entry.get("identity") or {}
    promise = entry.get("label") or (method.run.record.get("method") or {}).get("label") or ""
    differing, broken, text = identity.get("differing"), bool(identity.get("promised")), promise
    if differing:
        text = f"{differing} tokens differ{', against the promise' if broken else f'; {promise}'}"
    elif differing == 0:
        passes = f" ({identity['tokens']} tokens over {identity['passes']} passes)" if identity.get("passes") else ""
        text = f"same as plain{passes}"
    return {
        "label": method.label,
        "text": text,
        "verdict": "good" if differing == 0 else "bad" if broken and differing else "",
        "prompts": len(method.samples),
        "speedup": method.speedup(),
        "tokens_per_second": method.measured("tokens per second"),
        "tokens_per_pass": method.measured("tokens per target pass"),
        "acceptance": method.measured("draft acceptance rate"),
    }
