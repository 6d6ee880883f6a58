"""The other rules that test siblings in turn: K-sequential selection, and lossy ones, which trade the target's
distribution for acceptance and are labelled and measured wherever they appear."""

import dataclasses

from specsparse.speculative.verifiers import residuals
from specsparse.speculative.verifiers.residuals import Array, Scalar
from specsparse.speculative.verifiers.siblings import Child, SiblingRule
from specsparse.support.options import Share

TOLERANCE = 1e-4
"""Width of the bracket around rho at which the solver stops."""


def overlap(p_V: Array, q_V: Array, rho: Scalar) -> Scalar:
    """b(rho) = sum_x min(q, p/rho), the chance that one sibling passes."""
    xp = residuals.namespace(p_V)
    return residuals.total(xp.minimum(rho * q_V, p_V)) / rho


def uses(b: Scalar, siblings: Scalar) -> Scalar:
    """c = (1 - (1-b)^k) / b = sum_{j<k} (1-b)^j, expected siblings tested per sibling's share; k at b = 0."""
    xp = residuals.namespace(b)
    one = xp.ones_like(b)
    inside = xp.clip(b, xp.finfo(b.dtype).tiny, one - xp.finfo(b.dtype).eps)
    c = -xp.expm1(siblings * xp.log1p(-inside)) / inside
    return xp.where(siblings > 1, xp.clip(c, one, xp.maximum(siblings, one)), one)


def solve_rho(p_V: Array, q_V: Array, siblings: Scalar) -> tuple[Scalar, Scalar]:
    """(rho, c): rho at most `TOLERANCE` above the root of c(b(rho)) = rho in [1, k], and c there.

    c(b(.)) increases, so c at a point below the root is itself a lower bound, and above it an upper bound: every step
    does better than halving the bracket. An only child takes no step.
    """
    xp = residuals.namespace(p_V)
    one = xp.ones_like(siblings)

    def narrow(bracket):
        low, high, _ = bracket
        middle = (low + high) / 2
        c = uses(overlap(p_V, q_V, middle), siblings)
        below = c > middle
        return xp.where(below, xp.minimum(c, high), low), xp.where(below, high, xp.maximum(c, low)), high - low

    def wide(bracket):
        low, high, before = bracket
        return (high - low > TOLERANCE) & (high - low < before)  # rounding or NaN must not keep it going

    start = (one, xp.maximum(siblings, one), siblings + one)
    _, rho, _ = residuals.repeat_while(wide, narrow, start)
    return rho, xp.minimum(uses(overlap(p_V, q_V, rho), siblings), rho)


@dataclasses.dataclass(frozen=True)
class KSeq(SiblingRule):
    """Accept each of k independent siblings with min(1, p/(rho q)); after k rejections sample norm(max(0, p - rho q)).

    rho in [1, k] solves 1 - (1-b)^k = rho b with b = sum_x min(q, p/rho) (Sun et al. 2310.15141, Alg. 2, Thm. 2). The
    residual is taken as norm(p - c min(q, p/rho)) with c = (1 - (1-b)^k) / b: the same distribution at the root, where
    c = rho, and exact for every larger rho too, so that the tolerance of the solver costs acceptance and never the
    distribution.
    """

    def enter(self, p_V: Array, q_V: Array, siblings: Scalar) -> tuple:
        return solve_rho(p_V, q_V, siblings)

    def accept(self, p_x: Scalar, q_x: Scalar, memo: tuple) -> Scalar:
        rho, _ = memo
        return residuals.cap(residuals.ratio(p_x, rho * q_x))

    def reject(self, probs_V: Array, q_V: Array, child: Child, memo: tuple, last: Scalar) -> tuple[Array, tuple]:
        """p until the last sibling, then what the k siblings leave of it."""
        xp = residuals.namespace(probs_V)
        rho, c = memo
        owed = probs_V - c * xp.minimum(q_V, probs_V / rho)
        settle = last & (child.q > 0)
        return residuals.normalise(xp.maximum(owed, xp.zeros_like(owed)), probs_V, usable=settle), memo


@dataclasses.dataclass(frozen=True)
class Typical(SiblingRule):
    """Accept x when p(x) > min(epsilon, delta exp(-H(p))); nothing is left to chance (Medusa, 2401.10774, eq. 1).

    The first typical child in draw order is taken (Medusa takes the longest typical path). After rejections the token
    is drawn from p itself.

    Attributes:
        epsilon: hard threshold.
        delta: factor of the entropy-dependent one.
    """

    epsilon: Share = 0.09
    delta: Share = 0.3

    def enter(self, p_V: Array, q_V: Array, siblings: Scalar) -> tuple:
        """The threshold at this parent is all that is remembered."""
        xp = residuals.namespace(p_V)
        some = p_V > 0
        log_p = xp.log(xp.where(some, p_V, xp.ones_like(p_V)))
        entropy = -residuals.total(p_V * log_p)
        return (xp.minimum(xp.full_like(entropy, self.epsilon), self.delta * xp.exp(-entropy)),)

    def accept(self, p_x: Scalar, q_x: Scalar, memo: tuple) -> Scalar:
        return (p_x > memo[0]).astype(p_x.dtype)

    def reject(self, probs_V: Array, q_V: Array, child: Child, memo: tuple, last: Scalar) -> tuple[Array, tuple]:
        return probs_V, memo


@dataclasses.dataclass(frozen=True)
class Threshold(SiblingRule):
    """Accept once the summed p of the siblings so far reaches `total` times the coin, or p(x) alone reaches `single`.

    One coin serves all siblings of a parent, as in SGLang's target-only sampling; here it is written as independent
    coins with the conditional probabilities (A_j - A_{j-1}) / (1 - A_{j-1}), A_j = min(1, sum_{i<=j} p(x_i) / total).
    After rejections the tokens tried are struck out of p. At 1 and 1 it is `tree_delta`, and lossless.

    Attributes:
        single: p(x) from which a token is taken unseen.
        total: summed p at which acceptance is certain.
    """

    single: Share = 1.0
    total: Share = 0.8

    def enter(self, p_V: Array, q_V: Array, siblings: Scalar) -> tuple:
        """Memo: p already tried at this parent."""
        return (residuals.namespace(p_V).zeros_like(p_V[0]),)

    def accept(self, p_x: Scalar, q_x: Scalar, memo: tuple) -> Scalar:
        """Chance that the parent's coin, not met by the elder siblings, is met by this one."""
        xp = residuals.namespace(p_x)
        (tried,) = memo
        p_x = p_x * (1 - tried)
        before, after = residuals.cap(tried / self.total), residuals.cap((tried + p_x) / self.total)
        chance = xp.where(before < 1, residuals.ratio(after - before, 1 - before), xp.ones_like(p_x))
        return xp.where(p_x >= self.single, xp.ones_like(p_x), chance)

    def reject(self, probs_V: Array, q_V: Array, child: Child, memo: tuple, last: Scalar) -> tuple[Array, tuple]:
        (tried,) = memo
        rest_V = residuals.residual(probs_V, residuals.one_hot(probs_V, child.token))
        return rest_V, (tried + probs_V[child.token] * (1 - tried),)
