"""The certificate: the exact joint output law of every verifier, on random cases and corners, against the target's.

Two things are certified on the same cases. The *rule*: every draft and every coin interval is enumerated in float64
(`exact`). The *driver*: the thresholds and laws of the jitted float32 verdict that the decode loop calls are found by
bisection (`driver`). Either gives the law of one round, which is continued by plain sampling to a fixed length and
compared with plain sampling alone.
"""

import dataclasses
import io
from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from specsparse.errors import UserError
from specsparse.speculative.base import DraftKind, Verifier
from specsparse.speculative.proof.cases import CORNERS, Case, keep_top, make_case, map_tables
from specsparse.speculative.proof.driver import STEPS, driver_laws, jitted
from specsparse.speculative.proof.driver_mutants import DRIVER_MUTANTS
from specsparse.speculative.proof.exact import continuations, output_law, total_variation
from specsparse.speculative.proof.mutants import MUTANTS
from specsparse.speculative.tree import TreeTemplate
from specsparse.speculative.verify import VERIFIERS, get_verifier

RULE, DRIVER = "rule", "driver"
"""What a line of the report is about: the rule in float64, or the jitted driver in float32."""

LEGEND = {
    RULE: "the verifier's rule in float64, every coin interval enumerated",
    DRIVER: "the jitted float32 verdict that the decode loop calls, every uniform bisected",
}

LOSSLESS_TV = 1e-10
"""Most total variation of a lossless rule: float64 rounding of a few thousand additions."""

MUTANT_TV = 1e-3
"""Least total variation that shows a mutant, on one of its random cases."""

MUTANT_CASES = 3
"""Random cases per mutant."""


def driver_tv(template: TreeTemplate, *, vocab: int) -> float:
    """Most total variation of a lossless driver: float32 rounding, in the worst case of everything.

    With e = 2^-24 (float32's unit roundoff, and the step of a uniform), V tokens and at most T coins on a path:

    * A token drawn from a law: each of V-1 edges is off by at most 2V e (two sums of V terms, a product, a step), and p
      itself by e. Together 2V^2 e. `match` draws T+1 tokens, all others one.
    * A law after a rejection: at most (V+8) e in L1 (p and q rounded, the difference, its sum, the division; an earlier
      weight or rho) over the chance to be there, which its weight in the joint law cancels. After j rejections it is
      j (V+8) e.
    * A coin: 6 e (p and q rounded, a product, the division, a step), and what its law is off by.

    All of it adds up to less than (T+1) ((T+1) (V+8) + 2V^2) e.
    """

    def coins(row: int) -> int:
        return max((tested + coins(node + 1) for tested, node in enumerate(template.children[row], 1)), default=0)

    steps = coins(0) + 1
    return steps * (steps * (vocab + 8) + 2 * vocab**2) / STEPS


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
        part: `RULE` or `DRIVER`.
        bound: the most that a lossless one may have.
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

    @property
    def holds(self) -> bool:
        """Whether the promise is kept; NaN does not."""
        return not self.lossless or self.tv <= self.bound


@dataclasses.dataclass(frozen=True)
class MutantResult:
    """Largest total variation of one mutant over its random cases."""

    name: str
    mistake: str
    tv: float
    part: str = RULE

    @property
    def caught(self) -> bool:
        """Whether the certificate shows the mistake; NaN does not."""
        return self.tv > MUTANT_TV


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
        """Lossless verifiers over their bound and mutants not over `MUTANT_TV`; NaN fails."""
        where = {RULE: "", DRIVER: " (driver)"}
        bad = [f"{r.verifier}{where[r.part]}: {r.corner}" for r in self.results if not r.holds]
        return bad + [f"mutant {m.name}" for m in self.mutants if not m.caught]

    @property
    def passed(self) -> bool:
        """Whether the certificate holds."""
        return not self.failures

    @property
    def certified(self) -> list[tuple[str, str]]:
        """Verifier and part of what was certified, in order."""
        return list(dict.fromkeys((r.verifier, r.part) for r in self.results))

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
        legend = "".join(f"{part}: {meaning}\n" for part, meaning in LEGEND.items())
        verdict = "holds" if self.passed else "FAILS: " + "; ".join(self.failures)
        return f"{console.file.getvalue()}{legend}certificate {verdict}\n"


def worst_on(result: Result) -> str:
    """Which case a result is of, in words."""
    return f"{result.corner}, {result.kind}, {len(result.parents)} nodes"


def shapes(*, vocab: int, gamma: int, tree: bool) -> list[tuple[TreeTemplate, int]]:
    """Draft shapes with the vocabulary to try them on: chains to gamma, or trees to 8 nodes."""
    if not tree:
        return [(TreeTemplate.chain(g), vocab) for g in range(1, gamma + 1)]
    ragged = TreeTemplate.from_paths([(0, 0, 0), (1,), (2,)])
    return [
        (TreeTemplate.chain(1), vocab),
        (TreeTemplate.kary((3,)), vocab),
        (TreeTemplate.kary((3,)), 2),  # more siblings than tokens: duplicates, and q used up
        (TreeTemplate.kary((2, 1)), vocab),
        (ragged, min(vocab, 3)),
        (TreeTemplate.kary((2, 3)), 2),
    ]


def cases(verifier: Verifier, *, vocab: int, gamma: int, seed: int) -> Iterator[Case]:
    """Every case of a verifier: its kinds of draw x shapes x corners, then one wider vocabulary."""
    for kind, many in _kinds(verifier):
        tried = shapes(vocab=vocab, gamma=gamma, tree=many)
        yield from (_case(verifier, c, kind, *shape, seed) for shape in tried for c in CORNERS)
        yield _case(verifier, "random", kind, TreeTemplate.kary((2,)) if many else TreeTemplate.chain(2), 6, seed)


def empty_cases(verifier: Verifier, *, vocab: int, seed: int) -> Iterator[Case]:
    """Empty drafts of every kind. There is no rule to certify in them, but a driver."""
    for kind, _ in _kinds(verifier):
        yield from (_case(verifier, corner, kind, TreeTemplate.chain(0), vocab, seed) for corner in CORNERS)


def _kinds(verifier: Verifier) -> list[tuple[DraftKind, bool]]:
    """Kinds of draw, and whether siblings are tried."""
    return [(kind, verifier.tree and kind is not DraftKind.SAMPLED) for kind in DraftKind if kind in verifier.kinds]


def _case(verifier: Verifier, corner: str, kind: DraftKind, template: TreeTemplate, vocab: int, seed: int) -> Case:
    case = make_case(corner, kind, template, vocab=vocab, seed=seed)
    return dataclasses.replace(case, p=map_tables(case.p, keep_top(1))) if verifier.greedy_only else case


def measure(verifier: Verifier, case: Case) -> Result:
    """Total variation between the output of one round by the rule and plain sampling."""
    drafts = list(case.outcomes())
    law = output_law(verifier.rule, drafts, case.p, case.length)
    return _result(verifier, case, law, len(drafts))


def measure_driver(verifier: Verifier, tried: Sequence[Case], *, seed: int) -> list[Result]:
    """Total variation between the output of one round by the jitted driver and plain sampling, case by case."""
    found = []
    for one_hot in (True, False):
        some = [case for case in tried if (case.kind is DraftKind.ONE_HOT) == one_hot]
        for case, made in zip(some, driver_laws(jitted(verifier), verifier, some, seed=seed) if some else ()):
            bound = driver_tv(case.template, vocab=case.p[0].shape[0])
            result = _result(verifier, case, made.law, made.drafts)
            found.append(dataclasses.replace(result, part=DRIVER, bound=bound))
    return found


def _result(verifier: Verifier, case: Case, law: np.ndarray, drafts: int) -> Result:
    tv = total_variation(law, continuations(case.p, case.length)[0])
    kind, vocab = case.kind.value, case.p[0].shape[0]
    return Result(verifier.name, verifier.lossless, kind, case.template.parents, vocab, case.name, drafts, tv)


def measure_mutant(name: str, *, seed: int) -> MutantResult:
    """Largest total variation of a mutant over `MUTANT_CASES` random cases."""
    mutant = MUTANTS[name]
    found = []
    for case in range(MUTANT_CASES):
        made = mutant.round(seed * MUTANT_CASES + case)
        law = output_law(made.rule, made.outcomes, made.p, made.length)
        found.append(total_variation(law, continuations(made.p, made.length)[0]))
    return MutantResult(name, mutant.mistake, max(found))


def measure_driver_mutant(name: str, *, seed: int) -> MutantResult:
    """Largest total variation of a mutant of a driver over `MUTANT_CASES` random cases."""
    mutant = DRIVER_MUTANTS[name]
    tried = mutant.cases(seed, count=MUTANT_CASES)
    made = driver_laws(mutant.driver(), get_verifier(mutant.verifier), tried, seed=seed)
    found = [total_variation(law, continuations(case.p, case.length)[0]) for case, (law, _) in zip(tried, made)]
    return MutantResult(name, mutant.mistake, max(found), DRIVER)


def certify(
    verifiers: Sequence[Verifier | str] | Verifier | str | None = None,
    *,
    vocab: int = 4,
    gamma: int = 3,
    seed: int = 0,
    mutants: bool = True,
    driver: bool = True,
) -> CertificateReport:
    """Measures verifiers (all of `VERIFIERS` if None) and the mutants; most of a minute for all.

    Args:
        verifiers: what to certify, or their names; one may stand alone.
        vocab: vocabulary of most cases, 2..6.
        gamma: longest chain, 1..3.
        seed: of the random laws; the same seed gives the same report.
        mutants: whether to run the mutants too.
        driver: whether to certify, beside the rules, the jitted driver of the lossless verifiers.

    Raises:
        UserError: an unknown name, or a case too large to enumerate.
    """
    if not 2 <= vocab <= 6 or not 1 <= gamma <= 3:
        raise UserError(f"certify enumerates everything: vocab={vocab} must lie in 2..6 and gamma={gamma} in 1..3")
    verifiers = [verifiers] if isinstance(verifiers, str | Verifier) else verifiers
    chosen = [get_verifier(v) if isinstance(v, str) else v for v in verifiers or VERIFIERS.values()]
    results = []
    for verifier in chosen:
        tried = list(cases(verifier, vocab=vocab, gamma=gamma, seed=seed))
        results += [measure(verifier, case) for case in tried]
        if driver and verifier.lossless:
            tried += empty_cases(verifier, vocab=vocab, seed=seed)
            results += measure_driver(verifier, tried, seed=seed)
    wrong = [measure_mutant(name, seed=seed) for name in MUTANTS] if mutants else []
    if mutants and driver:
        wrong += [measure_driver_mutant(name, seed=seed) for name in DRIVER_MUTANTS]
    return CertificateReport(tuple(results), tuple(wrong))
