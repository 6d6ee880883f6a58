"""The certificate as an experiment: exact total variation of every verifier and mutant, in one table."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specsparse.experiments import trackers
from specsparse.experiments.config import RunConfig
from specsparse.experiments.decoding import Engine
from specsparse.report.record import RECORD_FILE
from specsparse.runtime import manifest
from specsparse.speculative.proof.certify import DRIVER, LEGEND, MUTANT_TV, RULE, CertificateReport, certify, worst_on
from specsparse.speculative.verify import get_verifier
from specsparse.support import terminal

DEFINITION = (
    "total variation between the joint law of the tokens of one round, continued by plain sampling, and plain "
    "sampling; every draft enumerated"
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
        """The worst total variation of a lossless verifier's rule."""
        return self.worst(RULE)

    def worst(self, part: str) -> float | None:
        """The worst total variation of a lossless rule or driver."""
        return max((r.tv for r in self.report.results if r.lossless and r.part == part), default=None)


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
    with terminal.busy(console, "enumerating every draft and every coin, bisecting the driver's"):
        report = certify(chosen, vocab=spec.vocab, gamma=spec.gamma, seed=cfg.seed, mutants=spec.mutants)
    tracker = trackers.make(cfg.tracker.name, cfg.tracker.options, directory)
    found = Certified(report)
    tracker.finish(_record(cfg, found))
    console.print(table(report))
    console.print(Text("\n".join(f"{part}: {meaning}" for part, meaning in LEGEND.items()), style="dim"))
    kept = "as promised: rule and driver of every lossless verifier keep the law of p, every mutant is caught"
    ok = Text(kept, style="green")
    broken = Text("NOT as promised: " + "; ".join(report.failures), style="bold red")
    console.print(ok if report.passed else broken)
    console.print(Text(f"record: {directory / RECORD_FILE}", style="dim"))
    return found


def rows(report: CertificateReport) -> list[dict[str, Any]]:
    """One row per verifier and part, and per mutant: rules and drivers of lossless ones, lossy ones, mutants.

    `part` says whether a row is about the rule or the driver.
    """
    out = []
    for name, part in report.certified:
        worst, cases = report.worst(name, part), report.cases(name, part)
        out.append(
            {
                "name": name,
                "part": part,
                "promise": "lossless" if worst.lossless else "lossy",
                "tv": worst.tv,
                "bound": worst.bound if worst.lossless else None,
                "holds": all(r.holds for r in cases),
                "cases": len(cases),
                "drafts": sum(r.drafts for r in cases),
                "on": f"worst on {worst_on(worst)}",
            }
        )
    out.sort(key=lambda row: (row["promise"] == "lossy", row["part"] == DRIVER))
    for m in report.mutants:
        out.append(
            {
                "name": m.name,
                "part": m.part,
                "promise": "mutant",
                "tv": m.tv,
                "bound": MUTANT_TV,
                "holds": m.caught,
                "on": m.mistake,
            }
        )
    return out


def table(report: CertificateReport) -> Table:
    """The rows as one table; TV is total variation."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "what", "promise", "TV", "cases", ""):
        out.add_column(name, justify="right" if name in ("TV", "cases") else "left", no_wrap=bool(name))
    for row in rows(report):
        bound = {"lossless": "<= {:.0e}", "lossy": "LOSSY", "mutant": "> {:.0e}"}[row["promise"]].format(row["bound"])
        what = f"{row['part']} mutant" if row["promise"] == "mutant" else row["part"]
        tv = Text(f"{row['tv']:.1e}" + ("" if row["holds"] else " FAILS"), style="" if row["holds"] else "bold red")
        out.add_row(Text(row["name"], no_wrap=True), what, bound, tv, str(row.get("cases", "")), row["on"])
    return out


def _record(cfg: RunConfig, found: Certified) -> dict[str, Any]:
    made = manifest.build(cfg.composed, None)
    return {
        "name": cfg.name,
        "kind": cfg.kind,
        "summary": {
            "as_promised": found.as_promised,
            "worst_lossless": found.objective,
            "worst_lossless_driver": found.worst(DRIVER),
        },
        "failures": found.report.failures,
        "rows": rows(found.report),
        "definitions": {"tv": DEFINITION, **LEGEND},
        "manifest": made,
        "config": made["config"],
    }
