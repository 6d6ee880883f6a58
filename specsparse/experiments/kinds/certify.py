"""The certificate as an experiment: exact total variation of every verifier and mutant, in one table."""

from dataclasses import dataclass
from typing import Annotated

from rich.text import Text

from specsparse.errors import UserError
from specsparse.experiments.kind import Kind, RunContext, RunResult
from specsparse.speculative.policies.base import Policy
from specsparse.speculative.proof.certify import certify
from specsparse.speculative.proof.external import ExternalVerifier, external
from specsparse.speculative.proof.results import DRIVER, LEGEND, POWER, RULE, CertificateReport
from specsparse.speculative.verify import VERIFIERS, get_verifier
from specsparse.support import registry, terminal
from specsparse.support.options import Also, Range, Seed

DEFINITION = (
    "total variation between the joint distribution of the tokens of one round, continued by plain sampling, and plain "
    "sampling; every draft enumerated"
)
FINDS = f"the true total variation that samples would have shown with a chance of {POWER:.0%}"


@dataclass(frozen=True)
class CertifySpec:
    """What `kind: certify` enumerates; see `speculative.proof.certify.certify`."""

    verifiers: tuple[str, ...] | None = None
    vocab: Annotated[int, Range(2, 6)] | None = None
    gamma: Annotated[int, Range(1, 3)] | None = None
    mutants: bool = True
    known_bugs: Annotated[bool, Also("museum")] = True
    also: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CertifySettings:
    """What `kind: certify` reads of a config."""

    certify: CertifySpec = CertifySpec()
    seed: Seed = 0


class Certify(Kind[CertifySettings]):
    """The exact output distribution of every verifier, by its rule and as it runs, and of the mutants."""

    timed = False
    takes_model = False
    takes_ffn = False

    def check(self, cfg: CertifySettings) -> None:
        """Unknown verifiers are refused, and callables that cannot be had."""
        for name in cfg.certify.verifiers or ():
            get_verifier(name)
        if not _callables(cfg.certify) and cfg.certify.verifiers == ():
            raise UserError("certify.verifiers=[] certifies nothing: name some, or leave it out for all")

    def run(self, cfg: CertifySettings, ctx: RunContext) -> RunResult:
        """Enumerates. No model is loaded."""
        spec = cfg.certify
        named = VERIFIERS if spec.verifiers is None else spec.verifiers
        chosen = [*map(get_verifier, named), *_callables(spec)]
        with terminal.busy(ctx.console, "enumerating every draft and every coin, bisecting the driver's"):
            how = {"vocab": spec.vocab, "gamma": spec.gamma, "mutants": spec.mutants, "known_bugs": spec.known_bugs}
            report = certify(chosen, seed=cfg.seed, **how)
        kept = (
            "as promised: rule and driver of every lossless verifier keep the distribution of p, every mutant is caught"
        )
        broken = "NOT as promised: " + "; ".join(report.failures)
        legend = Text("\n".join(report.legend()), style="dim")
        verdict = Text(kept, style="green") if report.passed else Text(broken, style="bold red")
        worst = _worst(report, RULE)
        return RunResult(
            {
                "as_promised": report.passed,
                "worst_lossless": worst,
                "worst_lossless_driver": _worst(report, DRIVER),
            },
            report,
            shown=[report.rich_table(), legend, verdict],
            definitions={"tv": DEFINITION, **LEGEND, "finds": FINDS},
            more={"failures": report.failures, "rows": report.rows()},
            as_promised=report.passed,
            objective=worst,
        )


def _callables(spec: CertifySpec) -> list[ExternalVerifier | Policy]:
    """What `certify.also` names, each a `module:name` of a function, an `ExternalVerifier` or a policy."""
    for home in spec.also:
        if ":" not in home:
            raise UserError(f"certify.also={home} names no callable: say module:name, such as mine:my_verifier")
    found = [registry.load(home, f"certify.also={home}") for home in spec.also]
    return [one if isinstance(one, Policy) else external(one) for one in found]


def _worst(report: CertificateReport, part: str) -> float | None:
    """The worst total variation of a lossless rule or driver."""
    return max((r.tv for r in report.results if r.lossless and r.part == part), default=None)
