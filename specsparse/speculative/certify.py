"""The certificate: the exact joint output law of every verifier, on random cases and corners, against the target's.

One round is enumerated (every draft, every coin interval, the very functions the engine runs, in float64), continued by
plain sampling to a fixed length, and compared with plain sampling alone.
"""

import dataclasses
import io
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from specsparse.errors import UserError
from specsparse.speculative.base import DraftKind, Verifier
from specsparse.speculative.cases import CORNERS, Case, keep_top, make_case, map_tables
from specsparse.speculative.exact import continuations, output_law, total_variation
from specsparse.speculative.mutants import MUTANTS
from specsparse.speculative.tree import TreeTemplate
from specsparse.speculative.verify import VERIFIERS, get_verifier

LOSSLESS_TV = 1e-10
"""Most total variation of a lossless verifier: float64 rounding of a few thousand additions."""

MUTANT_TV = 1e-3
"""Least total variation that shows a mutant, on one of its random cases."""

MUTANT_CASES = 3
"""Random cases per mutant."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Total variation of one verifier on one case."""

    verifier: str
    lossless: bool
    kind: str
    parents: tuple[int, ...]
    vocab: int
    corner: str
    drafts: int
    tv: float


@dataclasses.dataclass(frozen=True)
class MutantResult:
    """Largest total variation of one mutant over its random cases."""

    name: str
    mistake: str
    tv: float


@dataclasses.dataclass(frozen=True)
class CertificateReport:
    """What `certify` found.

    Attributes:
        results: one entry per verifier and case.
        mutants: one entry per mutant.
    """

    results: tuple[Result, ...]
    mutants: tuple[MutantResult, ...]

    @property
    def failures(self) -> list[str]:
        """Lossless verifiers over `LOSSLESS_TV` and mutants not over `MUTANT_TV`; NaN fails."""
        bad = [f"{r.verifier}: {r.corner}" for r in self.results if r.lossless and not r.tv <= LOSSLESS_TV]
        return bad + [f"mutant {m.name}" for m in self.mutants if not m.tv > MUTANT_TV]

    @property
    def passed(self) -> bool:
        """Whether the certificate holds."""
        return not self.failures

    def worst(self, verifier: str) -> Result:
        """The case with the largest total variation of that verifier."""
        return max((r for r in self.results if r.verifier == verifier), key=lambda r: r.tv)

    def tables(self) -> list[Table]:
        """Rich tables: verifiers, then mutants."""
        top = Table(
            "verifier", "promise", "cases", "drafts", "worst total variation", "on", title="Output law of a round"
        )
        for name in dict.fromkeys(r.verifier for r in self.results):
            rows, worst = [r for r in self.results if r.verifier == name], self.worst(name)
            promise = "lossless" if worst.lossless else "lossy"
            drafts = sum(r.drafts for r in rows)
            where = f"{worst.corner}, {worst.kind}, {len(worst.parents)} nodes"
            top.add_row(name, promise, str(len(rows)), str(drafts), f"{worst.tv:.1e}", where)
        bottom = Table("mutant", "total variation", "mistake", title="Mutants the certificate must catch")
        for m in self.mutants:
            bottom.add_row(m.name, f"{m.tv:.1e}", m.mistake)
        return [top, bottom] if self.mutants else [top]

    def table(self) -> str:
        """The tables as plain text, with the verdict."""
        console = Console(file=io.StringIO(), width=118)
        for table in self.tables():
            console.print(table)
        verdict = "holds" if self.passed else "FAILS: " + "; ".join(self.failures)
        return f"{console.file.getvalue()}certificate {verdict}\n"


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
    for kind in DraftKind:
        if kind not in verifier.kinds:
            continue
        many = verifier.tree and kind is not DraftKind.SAMPLED
        found = [
            make_case(corner, kind, template, vocab=size, seed=seed)
            for template, size in shapes(vocab=vocab, gamma=gamma, tree=many)
            for corner in CORNERS
        ]
        wide = TreeTemplate.kary((2,)) if many else TreeTemplate.chain(2)
        for case in [*found, make_case("random", kind, wide, vocab=6, seed=seed)]:
            greedy = verifier.greedy_only
            yield dataclasses.replace(case, p=map_tables(case.p, keep_top(1))) if greedy else case


def measure(verifier: Verifier, case: Case) -> Result:
    """Total variation between the output of one round and plain sampling."""
    drafts = list(case.outcomes())
    law = output_law(verifier.rule, drafts, case.p, case.length)
    tv = total_variation(law, continuations(case.p, case.length)[0])
    vocab = case.p[0].shape[0]
    return Result(
        verifier.name, verifier.lossless, case.kind.value, case.template.parents, vocab, case.name, len(drafts), tv
    )


def measure_mutant(name: str, *, seed: int) -> MutantResult:
    """Largest total variation of a mutant over `MUTANT_CASES` random cases."""
    mutant = MUTANTS[name]
    found = []
    for case in range(MUTANT_CASES):
        made = mutant.round(seed * MUTANT_CASES + case)
        law = output_law(made.rule, made.outcomes, made.p, made.length)
        found.append(total_variation(law, continuations(made.p, made.length)[0]))
    return MutantResult(name, mutant.mistake, max(found))


def certify(
    verifiers: Sequence[Verifier | str] | None = None,
    *,
    vocab: int = 4,
    gamma: int = 3,
    seed: int = 0,
    mutants: bool = True,
) -> CertificateReport:
    """Measures verifiers (all of `VERIFIERS` if None) and the mutants; about half a minute for all.

    Args:
        verifiers: what to certify, or their names.
        vocab: vocabulary of most cases, 2..6.
        gamma: longest chain, 1..3.
        seed: of the random laws; the same seed gives the same report.
        mutants: whether to run the mutants too.

    Raises:
        UserError: an unknown name, or a case too large to enumerate.
    """
    if not 2 <= vocab <= 6 or not 1 <= gamma <= 3:
        raise UserError(f"certify enumerates everything: vocab={vocab} must lie in 2..6 and gamma={gamma} in 1..3")
    chosen = [get_verifier(v) if isinstance(v, str) else v for v in verifiers or VERIFIERS.values()]
    results = [measure(v, case) for v in chosen for case in cases(v, vocab=vocab, gamma=gamma, seed=seed)]
    tried = [measure_mutant(name, seed=seed) for name in MUTANTS] if mutants else []
    return CertificateReport(tuple(results), tuple(tried))
