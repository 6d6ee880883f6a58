"""Sibling rejection: `token`, `mss`, `wor`, `delta`, `tree_delta` are this one rule on different drafts."""

import dataclasses

from specsparse.speculative.verifiers import residuals
from specsparse.speculative.verifiers.residuals import Array, Scalar
from specsparse.speculative.verifiers.siblings import Child, SiblingRule


@dataclasses.dataclass(frozen=True)
class Rejection(SiblingRule):
    """Accept with min(1, p/q), else go on with norm(max(0, p - q)).

    q is the distribution that very sibling was drawn from. Width one: Leviathan et al. (2211.17192, Alg. 1), Chen et
    al. (2302.01318, Alg. 2). Independent siblings: SpecInfer's multi-step sampling (2305.09781, Alg. 2). Without
    replacement: Sequoia (2402.12374, Alg. 2). One-hot q: accept with p(x), else strike x out of p (EAGLE 2401.15077).
    """

    judges_whole = False

    def reads_alpha(self, *, tree: bool, greedy: bool) -> bool:
        """True for chains: sum_x min(p, q), p(x) of one-hot drafts."""
        return not tree

    def enter(self, p_V: Array, q_V: Array, siblings: Scalar) -> tuple:
        return ()

    def accept(self, p_x: Scalar, q_x: Scalar, memo: tuple) -> Scalar:
        """Accepts with probability min(1, p/q) (Leviathan et al. 2023, algorithm 1)."""
        return residuals.cap(residuals.ratio(p_x, q_x))

    def reject(self, probs_V: Array, q_V: Array, child: Child, memo: tuple, last: Scalar) -> tuple[Array, tuple]:
        """The residual norm(max(0, p - q)), which the next sibling is judged by."""
        # A row that could not have drawn its own token is no distribution: refusing the token leaves p owed in full.
        return residuals.residual(probs_V, q_V, usable=child.q > 0), ()
