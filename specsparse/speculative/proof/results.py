"""What a certificate found: results, mutants and the report of both."""

import dataclasses
import io

import numpy as np
from rich.console import Console
from rich.table import Table

from specsparse.speculative.proof.chain_law import Power

RULE, DRIVER, CALLABLE, SAMPLED = "rule", "driver", "callable", "sampled"
"""What a line of the report is about: the rule in float64, the jitted driver in float32, or anybody's callable."""

LEGEND = {
    RULE: "the verifier's rule in float64, every coin interval enumerated",
    DRIVER: "the jitted float32 verdict that the decode loop calls, every uniform bisected",
    CALLABLE: "a callable in its own precision, every draft enumerated and every uniform bisected",
    SAMPLED: "a callable that draws for itself, by samples: at most the bound by chance",
}

LOSSLESS_TV = 1e-10
"""Most total variation of a lossless rule: float64 rounding of a few thousand additions."""

MUTANT_TV = 1e-3
"""Least total variation that shows a mutant, on one of its random cases."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Total variation of one verifier on one case.

    Attributes:
        verifier: its name.
        lossless: whether it promises p's law.
        kind: how the drafts were drawn.
        parents: shape of the drafts.
        vocab: tokens.
        corner: name of the case.
        drafts: how many were enumerated.
        tv: total variation from plain sampling.
        part: `RULE`, `DRIVER`, `CALLABLE` or `SAMPLED`.
        bound: the most that a lossless one may have.
        law: float64[V, ..], the joint law of its text; of a callable only.
        target: the target's.
        power: what the samples can tell; None where nothing was sampled.
    """

    verifier: str
    lossless: bool
    kind: str
    parents: tuple[int, ...]
    vocab: int
    corner: str
    drafts: int
    tv: float
    part: str = RULE
    bound: float = LOSSLESS_TV
    law: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)
    target: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)
    power: Power | None = None

    @property
    def holds(self) -> bool:
        """Whether the promise is kept; NaN does not."""
        return not self.lossless or self.tv <= self.bound

    def differences(self, most: int = 5) -> list[str]:
        """The texts whose probability differs most from the target's, the largest difference first."""
        if self.law is None or self.target is None:
            return []
        gap = (self.law - self.target).ravel()
        texts = [(i, np.unravel_index(i, self.law.shape)) for i in np.argsort(-np.abs(gap), kind="stable")[:most]]
        return [
            f"text {' '.join(map(str, text))}: {self.law[text]:.6f} where p has {self.target[text]:.6f} ({gap[i]:+.2g})"
            for i, text in texts
            if gap[i]
        ]


@dataclasses.dataclass(frozen=True)
class MutantResult:
    """Largest total variation of one mutant over its random cases; it is caught over `bound`."""

    name: str
    mistake: str
    tv: float
    part: str = RULE
    bound: float = MUTANT_TV

    @property
    def caught(self) -> bool:
        """Whether the certificate shows the mistake; NaN does not."""
        return self.tv > self.bound


@dataclasses.dataclass(frozen=True)
class CertificateReport:
    """What `certify` found. Each entry says whether it is about a rule or a driver (`part`).

    Attributes:
        results: one entry per verifier, part and case.
        mutants: one entry per mutant.
    """

    results: tuple[Result, ...]
    mutants: tuple[MutantResult, ...]

    @property
    def failures(self) -> list[str]:
        """Lossless verifiers over their bound and mutants not over theirs; NaN fails."""
        bad = [f"{r.verifier}{' (driver)' * (r.part == DRIVER)}: {r.corner}" for r in self.results if not r.holds]
        return bad + [f"mutant {m.name}" for m in self.mutants if not m.caught]

    @property
    def passed(self) -> bool:
        """Whether the certificate holds."""
        return not self.failures

    @property
    def certified(self) -> list[tuple[str, str]]:
        """Verifier and part of what was certified, in order."""
        return list(dict.fromkeys((r.verifier, r.part) for r in self.results))

    @property
    def parts(self) -> set[str]:
        """Parts that the report is about."""
        return {entry.part for entry in (*self.results, *self.mutants)}

    @property
    def finds(self) -> float | None:
        """The total variation that every sampled case would have shown with the chance `chain_law.POWER`."""
        return max((r.power.finds for r in self.results if r.power), default=None)

    def cases(self, verifier: str, part: str = RULE) -> list[Result]:
        """Every case of a verifier's rule, or of its driver."""
        return [r for r in self.results if (r.verifier, r.part) == (verifier, part)]

    def worst(self, verifier: str, part: str = RULE) -> Result:
        """The case with the largest total variation of that verifier's rule or driver."""
        return max(self.cases(verifier, part), key=lambda r: r.tv)

    def tables(self) -> list[Table]:
        """Rich tables: verifiers, then mutants."""
        columns = ("verifier", "what", "promise", "cases", "drafts", "worst total variation", "on")
        top = Table(*columns, title="Output law of a round")
        for name, part in self.certified:
            rows, worst = self.cases(name, part), self.worst(name, part)
            promise = f"lossless <= {worst.bound:.0e}" if worst.lossless else "lossy"
            drafts = sum(r.drafts for r in rows)
            top.add_row(name, part, promise, str(len(rows)), str(drafts), f"{worst.tv:.1e}", worst_on(worst))
        bottom = Table("mutant", "of the", "total variation", "mistake", title="Mutants the certificate must catch")
        for m in self.mutants:
            bottom.add_row(m.name, m.part, f"{m.tv:.1e}", m.mistake)
        return [top, bottom] if self.mutants else [top]

    def table(self) -> str:
        """The tables as plain text, with the legend and the verdict."""
        console = Console(file=io.StringIO(), width=118)
        for table in self.tables():
            console.print(table)
        legend = "".join(f"{part}: {meaning}\n" for part, meaning in LEGEND.items() if part in self.parts)
        verdict = "holds" if self.passed else "FAILS: " + "; ".join(self.failures)
        return f"{console.file.getvalue()}{legend}certificate {verdict}\n"


def worst_on(result: Result) -> str:
    """Which case a result is of, in words."""
    return f"{result.corner}, {result.kind}, {len(result.parents)} nodes"
