"""The results of a certificate, the power of samples, and the report."""

import dataclasses
import math
from typing import Any

import numpy as np

from specsparse.speculative.proof.boxes import STEPS
from specsparse.speculative.proof.cases import Case
from specsparse.speculative.proof.exact import total_variation
from specsparse.speculative.trees.template import TreeTemplate

RULE, DRIVER, CALLABLE, SAMPLED = "rule", "driver", "callable", "sampled"
"""The subject of a line of the report: the rule in float64, the jitted driver in float32, or anybody's callable."""

LEGEND = {
    RULE: "the verifier's rule in float64, every coin interval enumerated",
    DRIVER: "the jitted float32 verdict that the decode loop calls, every uniform bisected",
    CALLABLE: "a callable in its own precision, every draft enumerated and every uniform bisected",
    SAMPLED: "a callable that draws for itself, by samples: at most the bound by chance",
}

COLUMNS = ("", "what", "promise", "TV", "cases", "drafts", "")
"""Of the table of a report; TV is total variation."""

LOSSLESS_TV = 1e-10
"""Most total variation of a lossless rule: float64 rounding of a few thousand additions."""

MUTANT_TV = 1e-3
"""Least total variation that shows a mutant, on one of its random cases."""

LEVEL = 1e-6
"""Chance that a sampled report calls any of its lossless cases lossy."""

POWER = 0.95
"""Chance to find a total variation of `Power.finds`, and a window of `measured.window`."""

WRONG_SHARE = 0.25
"""Share of wrong verdicts in a window whose width is reported."""


@dataclasses.dataclass(frozen=True)
class Power:
    """The errors that samples can find."""

    samples: int
    level: float  # chance that a lossless case is called lossy, its share of `LEVEL`
    bound: float  # the measured total variation from which on a case is called lossy
    finds: float  # the true total variation that is found with the chance `POWER`


def power(target: np.ndarray, samples: int, *, cases: int) -> Power:
    """The power of n samples of a distribution, in every finite sample and for every alternative.

    The measured total variation of n samples from the distribution itself is at most sum_i sqrt(p_i (1 - p_i) / n) / 2
    in expectation, and one sample changes it by at most 1/n. So it is over that by t with a chance of at most
    exp(-2 n t^2) (McDiarmid 1989), and the frequency of one event is under its probability by t no likelier (Hoeffding
    1963). That event is the one on which the distributions differ most.

    Args:
        target: the distribution, of any shape.
        samples: n.
        cases: how many share `LEVEL`.
    """
    level = LEVEL / cases
    chance = math.sqrt(math.log(1 / level) / (2 * samples))
    bound = float(np.sqrt(target * (1 - target) / samples).sum() / 2) + chance
    return Power(samples, level, bound, bound + math.sqrt(math.log(1 / (1 - POWER)) / (2 * samples)))


def driver_tv(template: TreeTemplate, *, vocab: int, steps: int = STEPS) -> float:
    """Most total variation of a lossless driver: float32 rounding, in the worst case of everything.

    With e = 1 / steps (2^-24: float32's unit roundoff, and the step of a uniform), V tokens, T coins on a path at most:

    * A token drawn from a distribution: each of V-1 edges is off by at most 2V e (two sums of V terms, a product, a
      step), and p itself by e. Together 2V^2 e. `match` draws T+1 tokens, all others one.
    * A distribution after a rejection: at most (V+8) e in L1 (p and q rounded, the difference, its sum, the division;
      an earlier weight or rho) over the chance to be there, which its weight in the joint distribution cancels. After j
      rejections it is j (V+8) e.
    * A coin: 6 e (p and q rounded, a product, the division, a step), and the error of its distribution.

    All of it adds up to less than (T+1) ((T+1) (V+8) + 2V^2) e.
    """

    def coins(row: int) -> int:
        return max((tested + coins(node + 1) for tested, node in enumerate(template.children[row], 1)), default=0)

    draws = coins(0) + 1
    return draws * (draws * (vocab + 8) + 2 * vocab**2) / steps


@dataclasses.dataclass(frozen=True)
class Result:
    """Total variation of one verifier on one case."""

    verifier: str
    lossless: bool  # whether it promises p's distribution
    kind: str  # how the drafts were drawn
    parents: tuple[int, ...]  # shape of the drafts
    vocab: int  # tokens
    corner: str  # name of the case
    drafts: int  # how many were enumerated
    tv: float  # total variation from plain sampling
    part: str = RULE  # `RULE`, `DRIVER`, `CALLABLE` or `SAMPLED`
    bound: float = LOSSLESS_TV  # the most that a lossless one may have
    # probs, target: float64[V, ..], the joint distribution of its text, and the target's; of callables and policies
    probs: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)
    target: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)
    power: Power | None = None  # the power of the samples, or None if nothing was sampled
    # the narrowest window of one uniform, with wrong verdicts in it, that would have been seen, or None if no random
    # points were tried. See `measured.window`
    window: float | None = None

    @classmethod
    def from_probs(
        cls, verifier: str, lossless: bool, case: Case, probs: np.ndarray, target: np.ndarray, *,
        drafts: int, texts: bool = True, **more: Any,
    ) -> "Result":  # fmt: skip
        """Compares `probs` with `target`, and keeps both for `differences` if `texts` is true."""
        kept: dict[str, Any] = {"probs": probs, "target": target} if texts else {}
        tv, kind, parents = total_variation(probs, target), case.kind.value, case.template.parents
        return cls(verifier, lossless, kind, parents, len(target), case.name, drafts, tv, **kept, **more)

    @property
    def holds(self) -> bool:
        """Whether the promise is kept; NaN does not."""
        return not self.lossless or self.tv <= self.bound

    @property
    def worst_on(self) -> str:
        return f"{self.corner}, {self.kind}, {len(self.parents)} nodes"

    def differences(self, most: int = 5) -> list[str]:
        """The texts whose probability differs most from the target's, the largest difference first."""
        if self.probs is None or self.target is None:
            return []
        gap = (self.probs - self.target).ravel()
        texts = [(i, np.unravel_index(i, self.probs.shape)) for i in np.argsort(-np.abs(gap), kind="stable")[:most]]
        return [
            f"text {' '.join(map(str, text))}: {self.probs[text]:.6f}, by p {self.target[text]:.6f} ({gap[i]:+.2g})"
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


@dataclasses.dataclass(frozen=True, repr=False)
class CertificateReport:
    """The results of `certify`. Each entry says whether it is about a rule or a driver (`part`)."""

    results: tuple[Result, ...]  # one entry per verifier, part and case
    mutants: tuple[MutantResult, ...]  # one entry per mutant

    def __repr__(self) -> str:
        """Counts, the worst total variation of lossless verifiers, and whether the certificate holds."""
        names = {r.verifier for r in self.results}
        worst = max((r.tv for r in self.results if r.lossless), default=0.0)
        caught = sum(m.caught for m in self.mutants)
        counts = f"{len(names)} verifiers, {len(self.results)} cases, worst lossless TV {worst:.1e}"
        verdict = "holds" if self.passed else f"FAILS ({len(self.failures)})"
        return f"CertificateReport({counts}, {caught} of {len(self.mutants)} mutants caught: {verdict})"

    @property
    def failures(self) -> list[str]:
        """Lossless verifiers over their bound and mutants not over theirs; NaN fails."""
        bad = [f"{r.verifier}{' (driver)' * (r.part == DRIVER)}: {r.corner}" for r in self.results if not r.holds]
        return bad + [f"mutant {m.name}" for m in self.mutants if not m.caught]

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def certified(self) -> list[tuple[str, str]]:
        """Each verifier and part that was certified, in order."""
        return list(dict.fromkeys((r.verifier, r.part) for r in self.results))

    @property
    def finds(self) -> float | None:
        """The total variation that every sampled case would have shown with the chance `POWER`."""
        return max((r.power.finds for r in self.results if r.power), default=None)

    @property
    def window(self) -> float | None:
        """The narrowest window of one uniform that every enumerated callable would show, see `measured.window`."""
        return max((r.window for r in self.results if r.window), default=None)

    def covered(self, verifier: str | None = None, part: str | None = None) -> str:
        """The vocabularies, and the drafts on each, for which the figures hold; of all results or of some."""
        tried: dict[int, set[tuple[int, ...]]] = {}
        for r in self.results:
            if verifier in (None, r.verifier) and part in (None, r.part):
                tried.setdefault(r.vocab, set()).add(r.parents)
        return "; ".join(f"{vocab} tokens: {_shapes(tried[vocab])}" for vocab in sorted(tried))

    def cases(self, verifier: str, part: str = RULE) -> list[Result]:
        """Every case of a verifier's rule, or of its driver."""
        return [r for r in self.results if (r.verifier, r.part) == (verifier, part)]

    def worst(self, verifier: str, part: str = RULE) -> Result:
        """The case with the largest total variation of that verifier's rule or driver."""
        return max(self.cases(verifier, part), key=lambda r: r.tv)

    def rows(self) -> list[dict[str, Any]]:
        """One row per verifier and part, and per mutant: rules and drivers of lossless ones, lossy ones, mutants."""
        out = []
        for name, part in self.certified:
            worst, cases = self.worst(name, part), self.cases(name, part)
            out.append(
                {
                    "name": name,
                    "part": part,
                    "promise": "lossless" if worst.lossless else "lossy",
                    "tv": worst.tv,
                    "bound": worst.bound if worst.lossless else None,
                    "holds": all(r.holds for r in cases),
                    "finds": max((r.power.finds for r in cases if r.power), default=None),
                    "cases": len(cases),
                    "drafts": sum(r.drafts for r in cases),
                    "on": f"worst on {worst.worst_on}",
                    "covered": self.covered(name, part),
                    "texts": worst.differences(),
                }
            )
        out.sort(key=lambda row: (row["promise"] == "lossy", row["part"] == DRIVER))
        for m in self.mutants:
            same = {"name": m.name, "part": m.part, "promise": "mutant", "tv": m.tv, "bound": m.bound}
            out.append({**same, "holds": m.caught, "on": m.mistake})
        return out

    def cells(self) -> list[list[str]]:
        out = []
        for row in self.rows():
            bound = {"lossless": "<= {:.0e}", "lossy": "LOSSY", "mutant": "> {:.0e}"}[row["promise"]]
            what = f"{row['part']} mutant" if row["promise"] == "mutant" else row["part"]
            tv = f"{row['tv']:.1e}{'' if row['holds'] else ' FAILS'}"
            counts = (str(row.get(key, "")) for key in ("cases", "drafts"))
            out.append([row["name"], what, bound.format(row["bound"]), tv, *counts, row["on"]])
        return out

    def legend(self) -> list[str]:
        """A line for each part in the table, the vocabularies and drafts, and the errors that would have been found."""
        parts = {entry.part for entry in (*self.results, *self.mutants)}
        lines = [f"{part}: {meaning}" for part, meaning in LEGEND.items() if part in parts]
        measured = dict.fromkeys(r.part for r in self.results)
        lines += [f"covered ({part}), and nothing beyond: {self.covered(part=part)}" for part in measured]
        if self.window:
            lines.append(
                f"a window of one uniform in which {WRONG_SHARE:.0%} of verdicts are wrong is seen from "
                f"{self.window:.0e} on with {POWER:.0%} (callable)"
            )
        if self.finds:
            lines.append(f"samples would have found a total variation of {self.finds:.3f} with {POWER:.0%}")
        return lines

    def table(self) -> str:
        """The table as plain text, with the legend and the verdict."""
        cells = [list(COLUMNS), *self.cells()]
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
        verdict = "holds" if self.passed else "FAILS: " + "; ".join(self.failures)
        return "\n".join([*lines, "", *self.legend(), f"certificate {verdict}\n"])


def _shapes(several: set[tuple[int, ...]]) -> str:
    chains = sorted(len(parents) for parents in several if parents == tuple(range(-1, len(parents) - 1)))
    trees = [parents for parents in several if parents != tuple(range(-1, len(parents) - 1))]
    words = [f"chains of {', '.join(map(str, chains))}"] if chains else []
    if trees:
        siblings = max(parents.count(node) for parents in trees for node in parents)
        words.append(f"trees to {max(map(len, trees))} nodes and {siblings} siblings")
    return " and ".join(words)
