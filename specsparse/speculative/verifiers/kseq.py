"""K-sequential selection: every sibling meets the same threshold, p is settled once at the end (SpecTr, 2310.15141)."""

import dataclasses

from specsparse.speculative.verifiers import laws
from specsparse.speculative.verifiers.laws import Array
from specsparse.speculative.verifiers.siblings import Child, SiblingRule

TOLERANCE = 1e-4
"""Width of the bracket around rho at which the solver stops."""


def overlap(p_V: Array, q_V: Array, rho: Array) -> Array:
    """b(rho) = sum_x min(q, p/rho), the chance that one sibling passes."""
    xp = laws.namespace(p_V)
    return laws.total(xp.minimum(rho * q_V, p_V)) / rho


def uses(b: Array, siblings: Array) -> Array:
    """c = (1 - (1-b)^k) / b = sum_{j<k} (1-b)^j, expected siblings tested per sibling's share; k at b = 0."""
    xp = laws.namespace(b)
    one = xp.ones_like(b)
    inside = xp.clip(b, xp.finfo(b.dtype).tiny, one - xp.finfo(b.dtype).eps)
    c = -xp.expm1(siblings * xp.log1p(-inside)) / inside
    return xp.where(siblings > 1, xp.clip(c, one, xp.maximum(siblings, one)), one)


def solve_rho(p_V: Array, q_V: Array, siblings: Array) -> tuple[Array, Array]:
    """(rho, c): rho at most `TOLERANCE` above the root of c(b(rho)) = rho in [1, k], and c there.

    c(b(.)) increases, so c at a point below the root is itself a lower bound, and above it an upper bound: every step
    does better than halving the bracket. An only child takes no step.
    """
    xp = laws.namespace(p_V)
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
    _, rho, _ = laws.repeat_while(wide, narrow, start)
    return rho, xp.minimum(uses(overlap(p_V, q_V, rho), siblings), rho)


@dataclasses.dataclass(frozen=True)
class KSeq(SiblingRule):
    """Accept each of k independent siblings with min(1, p/(rho q)); after k rejections sample norm(max(0, p - rho q)).

    rho in [1, k] solves 1 - (1-b)^k = rho b with b = sum_x min(q, p/rho) (Sun et al. 2310.15141, Alg. 2, Thm. 2). The
    residual is taken as norm(p - c min(q, p/rho)) with c = (1 - (1-b)^k) / b: the same law at the root, where c = rho,
    and exact for every larger rho too, so that the tolerance of the solver costs acceptance and never the law.
    """

    def enter(self, p_V: Array, q_V: Array, siblings: Array) -> tuple:
        """Memo: (rho, c)."""
        return solve_rho(p_V, q_V, siblings)

    def accept(self, law_x: Array, q_x: Array, memo: tuple) -> Array:
        """min(1, p / (rho q))."""
        rho, _ = memo
        return laws.cap(laws.ratio(law_x, rho * q_x))

    def reject(self, law_V: Array, q_V: Array, child: Child, memo: tuple, last: Array) -> tuple[Array, tuple]:
        """p until the last sibling, then what the k siblings leave of it."""
        xp = laws.namespace(law_V)
        rho, c = memo
        owed = law_V - c * xp.minimum(q_V, law_V / rho)
        settle = last & (child.q > 0)
        return laws.normalise(xp.maximum(owed, xp.zeros_like(owed)), law_V, usable=settle), memo
