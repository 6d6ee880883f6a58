"""The certificate as an experiment: exact total variation of every verifier and mutant, in one table."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specsparse import display, manifest, trackers
from specsparse.config import RunConfig
from specsparse.experiments.decoding import Engine
from specsparse.speculative.certify import LOSSLESS_TV, MUTANT_TV, CertificateReport, certify
from specsparse.speculative.verify import get_verifier

DEFINITION = (
    "total variation between the joint law of the tokens of one round, continued by plain sampling, and plain "
    "sampling; every draft and every coin interval enumerated in float64"
)


@dataclass(frozen=True)
class Certified:
    """What came out."""

    report: CertificateReport

    @property
    def as_promised(self) -> bool:
        """Every lossless verifier within the bound, every mutant beyond its own."""
        return self.report.passed

    @property
    def objective(self) -> float | None:
        """The worst total variation of a lossless verifier."""
        return max((r.tv for r in self.report.results if r.lossless), default=None)


def check(cfg: RunConfig) -> None:
    """Names of verifiers and the tracker.

    Raises:
        UserError: an unknown one.
    """
    for name in cfg.certify.verifiers or ():
        get_verifier(name)
    trackers.check(cfg.tracker.name, cfg.tracker.options)


def run(cfg: RunConfig, directory: Path, *, engine: Engine, console: Console) -> Certified:
    """Enumerate, print one table, write the record. No model is loaded."""
    spec = cfg.certify
    chosen = None if spec.verifiers is None else [get_verifier(name) for name in spec.verifiers]
    with display.busy(console, "enumerating every draft and every coin"):
        report = certify(chosen, vocab=spec.vocab, gamma=spec.gamma, seed=cfg.seed, mutants=spec.mutants)
    tracker = trackers.make(cfg.tracker.name, cfg.tracker.options, directory)
    found = Certified(report)
    tracker.finish(_record(cfg, found))
    console.print(table(report))
    ok = Text("as promised: every lossless verifier keeps the law of p, every mutant is caught", style="green")
    broken = Text("NOT as promised: " + "; ".join(report.failures), style="bold red")
    console.print(ok if report.passed else broken)
    console.print(Text(f"record: {directory / trackers.RECORD_FILE}", style="dim"))
    return found


def rows(report: CertificateReport) -> list[dict[str, Any]]:
    """One row per verifier and per mutant: lossless ones, lossy ones, mutants."""
    out = []
    for name in dict.fromkeys(r.verifier for r in report.results):
        worst, cases = report.worst(name), [r for r in report.results if r.verifier == name]
        failed = worst.lossless and not all(r.tv <= LOSSLESS_TV for r in cases)
        out.append(
            {
                "name": name,
                "promise": "lossless" if worst.lossless else "lossy",
                "tv": worst.tv,
                "holds": not failed,
                "cases": len(cases),
                "drafts": sum(r.drafts for r in cases),
                "on": f"worst on {worst.corner}, {worst.kind}, {len(worst.parents)} nodes",
            }
        )
    out.sort(key=lambda row: row["promise"] == "lossy")
    for m in report.mutants:
        out.append({"name": m.name, "promise": "mutant", "tv": m.tv, "holds": bool(m.tv > MUTANT_TV), "on": m.mistake})
    return out


def table(report: CertificateReport) -> Table:
    """The rows as one table; TV is total variation."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "promise", "TV", "cases", ""):
        out.add_column(name, justify="right" if name in ("TV", "cases") else "left", no_wrap=bool(name))
    bounds = {"lossless": f"lossless <= {LOSSLESS_TV:.0e}", "lossy": "LOSSY", "mutant": f"mutant > {MUTANT_TV:.0e}"}
    for row in rows(report):
        tv = Text(f"{row['tv']:.1e}" + ("" if row["holds"] else " FAILS"), style="" if row["holds"] else "bold red")
        out.add_row(Text(row["name"], no_wrap=True), bounds[row["promise"]], tv, str(row.get("cases", "")), row["on"])
    return out


def _record(cfg: RunConfig, found: Certified) -> dict[str, Any]:
    made = manifest.build(cfg.composed, None)
    return {
        "name": cfg.name,
        "kind": cfg.kind,
        "summary": {"as_promised": found.as_promised, "worst_lossless": found.objective},
        "failures": found.report.failures,
        "rows": rows(found.report),
        "definitions": {"tv": DEFINITION},
        "manifest": made,
        "config": made["config"],
    }
