"""Two runs side by side: the settings that differ, the results, and whether the results differ for sure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from specsparse.errors import UserError
from specsparse.measure import intervals
from specsparse.measure.intervals import Interval
from specsparse.report import methods, pages
from specsparse.report.methods import MEASURES, ReportedMethod
from specsparse.report.record import PLAIN
from specsparse.report.runs import Run, disagreements, stand_ins
from specsparse.support.files import Json, write_atomically
from specsparse.support.tables import cell, new


@dataclass(frozen=True)
class Line:
    """One measure over the prompts that both decoded; `ratio` is B over A, paired."""

    name: str
    a: Interval | None
    b: Interval | None
    ratio: Interval | None


@dataclass(frozen=True)
class Difference:
    names: tuple[str, str]
    # (key, of A, of B) that differ, of the configs and of commit, machine, kernels and packages
    settings: tuple[tuple[str, str, str], ...]
    lines: tuple[Line, ...]  # measures over all common prompts, then the speed-up of each task
    # (prompts that both decoded, those whose tokens differ) plainly and with the method
    texts: dict[str, tuple[int, tuple[str, ...]]]
    common: int  # prompts that both decoded
    warnings: tuple[str, ...]


def diff(a: Run, b: Run) -> Difference:
    """Compare two runs of kind `speed`. UserError: a run without passes of a method, or no prompt in common."""
    ours, theirs = _only_method(a), _only_method(b)
    here, there = ({s.prompt: s for s in m.samples} for m in (ours, theirs))
    common = [name for name in here if name in there]
    if not common:
        raise UserError(f"{a.directory} and {b.directory} have no prompt in common")

    def line(label: str, prompts: Sequence[str], measure: str) -> Line:
        top, bottom = MEASURES[measure]
        one, other = (
            replace(method, samples=tuple(own[name] for name in prompts))
            for method, own in ((ours, here), (theirs, there))
        )
        above, below = ([(top(s), bottom(s)) for s in m.samples] for m in (other, one))
        ratio = intervals.ratio_of_ratios(above, below)
        return Line(label, one.measured(measure), other.measured(measure), ratio)

    lines = [line(name, common, name) for name in MEASURES]
    tasks = list(dict.fromkeys(here[name].task for name in common))
    for task in tasks if len(tasks) > 1 else []:
        lines.append(line(f"speed-up, {task}", [name for name in common if here[name].task == task], "speed-up"))
    texts = {"plain": _texts(a, b, PLAIN, PLAIN), "method": _texts(a, b, ours.side, theirs.side)}
    return Difference(
        names=_names(a, b), settings=tuple(_settings(a, b)), lines=tuple(lines), texts=texts, common=len(common),
        warnings=(*stand_ins([a, b]), *disagreements([a, b])),
    )  # fmt: skip


def _only_method(run: Run) -> ReportedMethod:
    found = methods.from_runs([run])
    if len(found) != 1:
        what = "several methods" if found else "no method that was decoded beside plain decoding"
        raise UserError(f"{run.directory}: has {what}; diff compares two runs of one method each")
    return found[0]


def _names(a: Run, b: Run) -> tuple[str, str]:
    """The shortest ends of the paths that differ; jobs of a sweep with the sweep."""
    one, two = a.directory.resolve().parts, b.directory.resolve().parts
    least = 2 if one[-1].isdecimal() or two[-1].isdecimal() else 1
    for length in range(least, max(len(one), len(two)) + 1):
        if one[-length:] != two[-length:]:
            return "/".join(one[-length:]), "/".join(two[-length:])
    return "A", "B"


def _settings(a: Run, b: Run) -> list[tuple[str, str, str]]:
    """The config's keys that differ, then commit, machine, kernels and packages."""
    found = []
    for part in ("", "git", "cpu", "kernels", "model", "packages"):
        sides = [dict(methods.flat(run.manifest.get(part) or {} if part else run.config)) for run in (a, b)]
        for key in dict.fromkeys([*sides[0], *sides[1]]):
            if sides[0].get(key) != sides[1].get(key) and (part or key != "name"):
                found.append((f"{part} {key}".lstrip(), str(sides[0].get(key, "-")), str(sides[1].get(key, "-"))))
    return found


def _texts(a: Run, b: Run, side_a: str, side_b: str) -> tuple[int, tuple[str, ...]]:
    ours, theirs = (
        {p.prompt_id: p.token_ids for p in run.passes if p.side == side and p.repeat == 0}
        for run, side in ((a, side_a), (b, side_b))
    )
    both = [name for name in ours if name in theirs]
    return len(both), tuple(name for name in both if ours[name] != theirs[name])


def tables(found: Difference) -> list[Table]:
    """The tables of settings that differ, and of results."""
    a, b = found.names
    rows = ([cell if len(cell) < 60 else f"{cell[:56]} ..." for cell in row] for row in found.settings)
    settings = new("set otherwise", a, b, rows=rows, left=(0, 1, 2), wrap=(0, 1, 2))
    out = new("", f"A: {a}", f"B: {b}", "B / A", "95 % interval", "", left=(0, 5))
    for line in found.lines:
        values = [cell(one.value if one else None, ".3g") for one in (line.a, line.b, line.ratio)]
        out.add_row(line.name, *values, "-" if line.ratio is None else line.ratio.ends(), verdict(line))
    return [settings, out] if found.settings else [out]


def verdict(line: Line) -> str:
    """Whether the interval of the ratio excludes 1, in words."""
    if line.ratio is None:
        return ""
    if line.ratio.low is None or line.ratio.high is None:
        return line.ratio.sentence()
    if line.ratio.low > 1:
        return "higher"
    return "lower" if line.ratio.high < 1 else "no clear difference"


def lines(found: Difference) -> list[str]:
    """Whether the texts are the same, and warnings."""
    out = [f"all columns are over the {found.common} prompts that both decoded"]
    for side, (both, differing) in found.texts.items():
        where = f": {', '.join(differing[:8])}{' ..' if len(differing) > 8 else ''}" if differing else ""
        out.append(f"{side} text: {len(differing)} of {both} prompts have other tokens{where}")
    return out + [f"beware: {warning}" for warning in found.warnings]


def write(found: Difference, directory: Path) -> Path:
    """The same as a page; returns its file, UserError if it cannot be written."""
    rows: list[Json] = [
        {"name": n.name, "a": n.a, "b": n.b, "ratio": n.ratio, "verdict": verdict(n)} for n in found.lines
    ]
    title = f"{found.names[0]} against {found.names[1]}"
    text = pages.render("diff.html", title=title, found=found, rows=rows, lines=lines(found))
    write_atomically(directory / pages.PAGE, text)
    return directory / pages.PAGE
