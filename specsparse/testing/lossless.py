"""The certificate of a verifier, policy or callable as an assertion. Of a callable it needs numpy alone."""

import dataclasses
from typing import Any

from specsparse.errors import UserError
from specsparse.speculative.proof.certify import Certifiable, certifiable, certify
from specsparse.speculative.proof.external import ExternalVerifier
from specsparse.speculative.proof.results import CertificateReport


def assert_lossless(
    verifier: Certifiable, *, vocab: int | None = None, gamma: int | None = None, seed: int = 0, **how: Any
) -> CertificateReport:
    """Refuses a verifier, or a draft-length policy, whose text does not have the target's distribution.

    Args:
        verifier: yours, a callable as `speculative.proof.external` describes it; one of ours, its name, or a policy.
        vocab: tokens, see `specsparse.certify`.
        gamma: longest draft.
        seed: of the random distributions, and of the samples of a callable that draws for itself.
        how: fields of `ExternalVerifier`, such as `arrays="torch"` or `samples=100_000`.

    Returns:
        The report: whether the distribution was enumerated or sampled, and the error that samples would have found.

    Raises:
        AssertionError: it is lossy; says by how much, on what, and which texts differ most.
        UserError: it cannot be certified so.
    """
    verifier = certifiable(verifier)
    if isinstance(verifier, ExternalVerifier):
        try:
            verifier = dataclasses.replace(verifier, lossless=True, **how)
        except TypeError as error:
            known = ", ".join(field.name for field in dataclasses.fields(ExternalVerifier))
            raise UserError(f"assert_lossless: {error}; known are {known}") from error
    elif how:
        raise UserError(f"assert_lossless: {', '.join(how)} say how a callable gets its arguments")
    report = certify(verifier, vocab=vocab, gamma=gamma, seed=seed, mutants=False)
    broken = [result for result in report.results if not result.holds]
    if broken:
        worst = max(broken, key=lambda result: result.tv)
        lines = [
            f"{worst.verifier} is not lossless: total variation {worst.tv:.3g} on {worst.worst_on} ({worst.part}; "
            f"rounding or chance explain {worst.bound:.1g}); {len(broken)} of {len(report.results)} cases fail",
            *worst.differences(),
        ]
        raise AssertionError("\n  ".join(lines))
    return report
