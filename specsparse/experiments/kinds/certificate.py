"""The certificate as an experiment: exact total variation of every verifier and mutant, in one table."""

from dataclasses import dataclass
from typing import Annotated

from rich.text import Text

from specsparse.errors import UserError
from specsparse.experiments.kind import Kind, RunContext, RunResult
from specsparse.speculative.policies.base import Policy
from specsparse.speculative.proof.certify import certify
from specsparse.speculative.proof.external import ExternalVerifier, external
from specsparse.speculative.proof.results import COLUMNS, DRIVER, LEGEND, POWER, RULE
from specsparse.speculative.verifiers import VERIFIERS, get_verifier
from specsparse.support import registry, tables, terminal
from specsparse.support.options import Range, Seed

DEFINITIONS = {
    "tv": "total variation between the joint distribution of the tokens of one round, continued by plain sampling, and "
    "plain sampling; every draft enumerated",
    **LEGEND,
    "finds": f"the true total variation that samples would have shown with a chance of {POWER:.0%}",
}


@dataclass(frozen=True)
class CertifySpec:
    """See `speculative.proof.certify.certify`; `also` names functions, external verifiers or policies."""

    verifiers: tuple[str, ...] | None = None
    vocab: Annotated[int, Range(2, 6)] | None = None
    gamma: Annotated[int, Range(1, 3)] | None = None
    mutants: bool = True
    known_bugs: bool = True
    also: tuple[str, ...] = ()

    def callables(self) -> list[ExternalVerifier | Policy]:
        found = [registry.load(home, f"certify.also={home}") for home in self.also]
        return [one if isinstance(one, Policy) else external(one) for one in found]


@dataclass(frozen=True, kw_only=True)
class CertifySettings:
    certify: CertifySpec = CertifySpec()
    seed: Seed = 0


class Certify(Kind[CertifySettings]):
    """The exact output distribution of every verifier, by its rule and as it runs, and of the mutants."""

    timed = False
    takes_model = False
    takes_ffn = False

    def check(self, cfg: CertifySettings) -> None:
        for name in cfg.certify.verifiers or ():
            get_verifier(name)
        if not cfg.certify.callables() and cfg.certify.verifiers == ():
            raise UserError("certify.verifiers=[] certifies nothing: name some, or leave it out for all")

    def run(self, cfg: CertifySettings, ctx: RunContext) -> RunResult:
        spec = cfg.certify
        named = VERIFIERS if spec.verifiers is None else spec.verifiers
        chosen = [*map(get_verifier, named), *spec.callables()]
        with terminal.busy(ctx.console, "enumerating every draft and every coin, bisecting the driver's"):
            how = {"vocab": spec.vocab, "gamma": spec.gamma, "mutants": spec.mutants, "known_bugs": spec.known_bugs}
            report = certify(chosen, seed=cfg.seed, **how)
        verdict = Text("NOT as promised: " + "; ".join(report.failures), style="bold red")
        if report.passed:
            kept = "rule and driver of every lossless verifier keep the distribution of p, every mutant is caught"
            verdict = Text(f"as promised: {kept}", style="green")
        lossless = [result for result in report.results if result.lossless]
        rule, driver = (max((r.tv for r in lossless if r.part == part), default=None) for part in (RULE, DRIVER))
        table = tables.new(*COLUMNS, left=(0, 1, 2, 6), wrap=(0, 6), close=True)
        for name, what, promise, tv, *more in report.cells():
            failed = "bold red" if tv.endswith("FAILS") else ""
            table.add_row(Text(name, no_wrap=True), what, promise, Text(tv, style=failed), *more)
        return RunResult(
            {"as_promised": report.passed, "worst_lossless": rule, "worst_lossless_driver": driver},
            report,
            shown=[table, Text("\n".join(report.legend()), style="dim"), verdict],
            definitions=DEFINITIONS,
            more={"failures": report.failures, "rows": report.rows()},
            as_promised=report.passed,
            objective=rule,
        )
