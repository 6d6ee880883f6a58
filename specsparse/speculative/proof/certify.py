"""The certificate: the exact joint output distribution of every verifier, on random cases and corners, against the
target's.

Two things are certified on the same cases. The *rule*: every draft and every coin interval is enumerated in float64
(`exact`). The *driver*: the thresholds and distributions of the jitted float32 verdict that the decode loop calls are
found by bisection (`driver`). Either gives the distribution of one round, which is continued by plain sampling to a
fixed length and compared with plain sampling alone.

Anybody's callable is certified likewise (`external`): its uniforms are bisected as the driver's are, or it is sampled
with a stated power if it draws its own; and its text of several rounds is compared with the target's, too. A
draft-length policy is certified by the driver on the drafts that it leaves (`policies`).
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

from specsparse.errors import UserError
from specsparse.speculative.base import DraftKind, Verifier
from specsparse.speculative.proof.cases import CORNERS, Case, at_temperature_0, make_case
from specsparse.speculative.proof.exact import continuations, output_probs
from specsparse.speculative.proof.external import ExternalVerifier, external
from specsparse.speculative.proof.measured import measure_external
from specsparse.speculative.proof.results import DRIVER, CertificateReport, MutantResult, Result, driver_tv
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import VERIFIERS, get_verifier
from specsparse.support.options import Range, Seed, read

if TYPE_CHECKING:
    from specsparse.speculative.policies.base import Policy

Certifiable: TypeAlias = "Verifier | str | ExternalVerifier | Callable | Policy"

VOCAB, GAMMA = 4, 3
"""Tokens of most cases of our own verifiers and their longest chain, unless others are asked for."""

_BOTH = (("random", 5, 6), ("p flat, q tied", 5, 6))
MANY_SIBLINGS = {
    DraftKind.ONE_HOT: _BOTH,
    DraftKind.WOR: _BOTH,
    DraftKind.IID: (("random", 4, 5), ("p flat, q tied", 4, 5), ("p flat, q tied", 5, 4)),  # of 5^5 drafts too many
}
"""Corner, siblings of the root, tokens. The rejection of a fourth or fifth shows only if several tokens are left."""


def shapes(*, vocab: int, gamma: int, tree: bool) -> list[tuple[TreeTemplate, int]]:
    """Draft shapes with the vocabulary to try them on: chains to gamma, or trees to 8 nodes and 5 siblings."""
    if not tree:
        return [(TreeTemplate.chain(g), vocab) for g in range(gamma + 1)]
    ragged = TreeTemplate.from_paths([(0, 0, 0), (1,), (2,)])
    return [
        (TreeTemplate.chain(0), vocab),
        (TreeTemplate.chain(1), vocab),
        (TreeTemplate.kary((3,)), vocab),
        (TreeTemplate.kary((2, 1)), min(vocab, 3)),
        (ragged, min(vocab, 3)),
        (TreeTemplate.kary((2, 3)), 2),
        (TreeTemplate.kary((5,)), 2),  # more siblings than tokens: duplicates, and q used up
    ]


def cases(verifier: Verifier, *, vocab: int, gamma: int, seed: int) -> Iterator[Case]:
    """Every case of a verifier: its kinds of draw x shapes x corners, then a few of a wider vocabulary."""
    for kind in (kind for kind in DraftKind if kind in verifier.kinds):
        many = verifier.tree and kind is not DraftKind.SAMPLED
        tried = [(c, *shape) for shape in shapes(vocab=vocab, gamma=gamma, tree=many) for c in CORNERS]
        tried.append(("random", TreeTemplate.kary((2,)) if many else TreeTemplate.chain(2), 6))
        if many:
            tried += [(c, TreeTemplate.kary((siblings,)), size) for c, siblings, size in MANY_SIBLINGS[kind]]
        for corner, template, size in tried:
            case = make_case(corner, kind, template, vocab=size, seed=seed)
            yield at_temperature_0(case) if verifier.greedy_only else case


def measure(verifier: Verifier, case: Case) -> Result:
    """Total variation between the output of one round by the rule and plain sampling."""
    drafts, target = list(case.outcomes()), continuations(case.p, case.length)[0]
    probs = output_probs(verifier.rule, drafts, case.p, case.length)
    of = {"drafts": len(drafts), "texts": False}
    return Result.from_probs(verifier.name, verifier.lossless, case, probs, target, **of)


def measure_driver(verifier: Verifier, tried: Sequence[Case], *, seed: int) -> list[Result]:
    """Total variation between the output of one round by the jitted driver and plain sampling, case by case."""
    from specsparse.speculative.proof.driver import driver_probs, jitted

    found = []
    for one_hot in (True, False):
        some = [case for case in tried if (case.kind is DraftKind.ONE_HOT) == one_hot]
        for case, (probs, drafts) in zip(
            some, driver_probs(jitted(verifier), verifier, some, seed=seed) if some else ()
        ):
            target, bound = continuations(case.p, case.length)[0], driver_tv(case.template, vocab=len(case.p[0]))
            of = {"drafts": drafts, "texts": False, "part": DRIVER, "bound": bound}
            found.append(Result.from_probs(verifier.name, verifier.lossless, case, probs, target, **of))
    return found


@dataclasses.dataclass(frozen=True)
class _Options:
    vocab: Annotated[int, Range(2, 6)] | None
    gamma: Annotated[int, Range(1, 3)] | None
    seed: Seed
    mutants: bool | None
    driver: bool
    known_bugs: bool


def certify(
    verifiers: "Sequence[Certifiable] | Certifiable | None" = None, *, vocab: int | None = None,
    gamma: int | None = None, seed: int = 0, mutants: bool | None = None, driver: bool = True, known_bugs: bool = False,
    progress: Callable[[str], None] | None = None,
) -> CertificateReport:  # fmt: skip
    """Measures verifiers (all of `VERIFIERS` if None) and the mutants; most of a minute for all.

    Args:
        verifiers: names, verifiers, anybody's callables (see `external`), or draft-length policies (see
            `policies.measure_policy`); one may stand alone.
        vocab: vocabulary of most cases, 2..6; by default 4, and 3 for callables. `CertificateReport.covered` says
            which were tried. Mutants, known bugs and policies keep their own.
        gamma: longest chain, 1..3; by default 3, and 2 for callables, with one case of 4 drafts and one of 6 tokens.
        seed: of the random distributions; the same seed gives the same report.
        mutants: whether to run the mutants too; by default they run unless callables alone are certified.
        driver: whether to certify, beside the rules, the jitted driver of the lossless verifiers.
        known_bugs: whether to run `KNOWN_BUGS` too, real mistakes and methods that were called lossy.
        progress: gets a line before each part of what may take long.

    Raises:
        UserError: an unknown name, a case too large to enumerate, or a callable that cannot be certified so.
    """
    given = {"vocab": vocab, "gamma": gamma, "seed": seed, "mutants": mutants, "driver": driver}
    read(_Options, {**given, "known_bugs": known_bugs}, group="", null=True)
    alone = verifiers is not None and (isinstance(verifiers, str) or not isinstance(verifiers, Sequence))
    several = [verifiers] if alone else list(VERIFIERS.values() if verifiers is None else verifiers)
    if not several and not known_bugs:
        raise UserError("certify([]) certifies nothing: name a verifier, or leave the list out for all")
    chosen = [certifiable(v) for v in several]
    ours = [v for v in chosen if isinstance(v, Verifier)]
    if (vocab or gamma) and not all(isinstance(v, Verifier | ExternalVerifier) for v in chosen):
        raise UserError("certify: a policy's drafts are as long as its own gamma: leave out gamma and vocab")
    results: list[Result] = []
    for one in chosen:  # a broken callable is said at once
        if isinstance(one, ExternalVerifier):
            results += measure_external(one, vocab=vocab, gamma=gamma, seed=seed, progress=progress)
        elif not isinstance(one, Verifier):
            from specsparse.speculative.proof.policies import measure_policy

            results += measure_policy(one, seed=seed)
    for verifier in ours:
        if progress:
            progress(f"{verifier.name}: its rule{', and its driver' * (driver and verifier.lossless)}")
        tried = list(cases(verifier, vocab=vocab or VOCAB, gamma=gamma or GAMMA, seed=seed))
        results += [measure(verifier, case) for case in tried]
        results += measure_driver(verifier, tried, seed=seed) if driver and verifier.lossless else []
    wrong: list[MutantResult] = []
    if bool(ours) if mutants is None else mutants:
        from specsparse.speculative.proof import mutants as known

        names = [*known.MUTANTS, *(known.DRIVER_MUTANTS if driver else ())]
        wrong += [known.measure_mutant(name, seed=seed) for name in names]
    if known_bugs:
        from specsparse.speculative.proof.known_bugs import KNOWN_BUGS

        for bug in KNOWN_BUGS.values():
            found = bug.measure(seed=seed)
            if bug.how.lossless:
                results += found
            else:
                worst = max(found, key=lambda r: r.tv)
                wrong.append(MutantResult(bug.how.name, bug.about, worst.tv, worst.part, worst.bound))
    return CertificateReport(tuple(results), tuple(wrong))


def certifiable(verifier: Certifiable) -> "Verifier | ExternalVerifier | Policy":
    """A verifier by its name, a policy or verifier as it is, a callable with the defaults of `ExternalVerifier`.

    Only names and policies need jax.
    """
    if isinstance(verifier, str):
        return get_verifier(verifier)
    policies = sys.modules.get("specsparse.speculative.policies.base")  # imported by whoever made one
    ours = (Verifier, policies.Policy) if policies else Verifier
    return verifier if isinstance(verifier, ours) else external(verifier)
