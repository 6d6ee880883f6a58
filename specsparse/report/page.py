"""The page: one HTML file that needs nothing beside it, no network and no script."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specsparse import metrics
from specsparse.report import figures, methods
from specsparse.report.figure import Figure, Missing
from specsparse.report.methods import Method
from specsparse.report.runs import Run, disagreements
from specsparse.trackers import write_atomically

PAGE, FIGURES = "index.html", "figures"
_MOST_ROWS = 200


@dataclass(frozen=True)
class Written:
    """What a report came to.

    Attributes:
        page: the HTML file.
        made: its figures, also as PNG and CSV in `figures/` beside it.
        missing: the figures that the records have no numbers for.
    """

    page: Path
    made: tuple[Figure, ...]
    missing: tuple[Missing, ...]


def write(runs: Sequence[Run], directory: Path, *, title: str) -> Written:
    """The report of these runs, into `directory`.

    Raises:
        OSError, UserError: the directory cannot be written.
    """
    found = methods.of(runs)
    made, missing = figures.make(runs, found)
    for figure in made:
        figure.write(directory / FIGURES)
    page = render("page.html", title=title, runs=[_run(r) for r in runs], methods=[_method(m) for m in found],
                  figures=made, missing=missing, warnings=warnings(runs), facts=_facts(runs, found),
                  lengths=metrics.lengths_note(per_pass="Tokens per pass"))  # fmt: skip
    write_atomically(directory / PAGE, page)
    return Written(directory / PAGE, tuple(made), tuple(missing))


def render(template: str, **values: Any) -> str:
    """A template of this folder; every value is escaped."""
    place = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=place, autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                              lstrip_blocks=True)  # fmt: skip
    environment.filters |= {"number": number}
    made = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return environment.get_template(template).render(made=made, most_rows=_MOST_ROWS, **values)


def number(value: Any) -> str:
    """For a cell: four significant digits, a dash for what is missing."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def warnings(runs: Sequence[Run]) -> list[str]:
    """What a reader must see first."""
    out = []
    for run in runs:
        found = run.summary.get("identity") or {}
        if found.get("promised") and found.get("differing"):
            out.append(f"{run.directory}: {found['differing']} tokens differ from plain decoding, against the promise")
        if run.summary.get("as_promised") is False:
            out.append(f"{run.directory}: NOT as promised")
    if len({_reference(r) for r in runs}) > 1:
        out.append("some runs used the slow reference kernels and some the native ones")
    differing = disagreements(runs)
    return out + [f"these runs do not share one {line}: compare ratios, not seconds" for line in differing]


def _reference(run: Run) -> bool:
    return (run.manifest.get("kernels") or {}).get("native") is False


def _facts(runs: Sequence[Run], found: Sequence[Method]) -> list[tuple[str, str]]:
    """Of the first run; what the others have otherwise is among the warnings."""
    m: Mapping[str, Any] = runs[0].manifest
    cpu, kernels, git = m.get("cpu") or {}, m.get("kernels") or {}, m.get("git") or {}
    facts = {
        "method": methods.common_pair(found),
        "model": (m.get("model") or {}).get("file"),
        "machine": f"{cpu.get('model')}, cores used: {cpu.get('cores')}" if cpu else None,
        "kernels": " ".join(str(kernels[k]) for k in ("kernels", "isa") if kernels.get(k)) or None,
        "commit": f"{git['commit'][:10]}{' with changes' if git.get('dirty') else ''}" if git.get("commit") else None,
        "date": m.get("date"),
    }
    return [(key, str(value)) for key, value in facts.items() if value]


def _run(run: Run) -> dict[str, Any]:
    return {
        "directory": str(run.directory),
        "name": run.name,
        "kind": run.kind,
        "date": run.manifest.get("date"),
        "command": " ".join(map(str, run.manifest.get("command") or ())),
        "prompts": len({row.get("prompt_id") for row in run.rows}),
    }


def _method(method: Method) -> dict[str, Any]:
    """A row of the first table."""
    entries = {e["name"]: e for e in run_methods(method.run)}
    entry = entries.get(method.side, method.run.summary)
    identity = entry.get("identity") or {}
    label = entry.get("label") or (method.run.record.get("method") or {}).get("label")
    return {
        "label": method.label,
        "promise": label,
        "differing": identity.get("differing"),
        "compared": f"{identity['tokens']} tokens over {identity['passes']} passes" if identity.get("passes") else None,
        "broken": bool(identity.get("promised") and identity.get("differing")),
        "prompts": len(method.samples),
        "speedup": method.speedup(),
        "tokens_per_second": method.tokens_per_second(),
        "tokens_per_pass": method.tokens_per_pass(),
        "acceptance": method.acceptance(),
    }


def run_methods(run: Run) -> list[Mapping[str, Any]]:
    """The methods of a comparison; empty for other kinds."""
    found = run.record.get("methods")
    return [e for e in found if isinstance(e, Mapping)] if isinstance(found, list) else []
