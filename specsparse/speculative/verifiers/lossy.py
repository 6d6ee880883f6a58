"""Lossy rules: they trade the target's law for acceptance, and are labelled and measured wherever they appear."""

import dataclasses

from specsparse.speculative.verifiers import laws
from specsparse.speculative.verifiers.laws import Array
from specsparse.speculative.verifiers.siblings import Child, SiblingRule
from specsparse.support.options import Share


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

    def enter(self, p_V: Array, q_V: Array, siblings: Array) -> tuple:
        """Memo: the threshold at this parent."""
        xp = laws.namespace(p_V)
        some = p_V > 0
        log_p = xp.log(xp.where(some, p_V, xp.ones_like(p_V)))
        entropy = -laws.total(p_V * log_p)
        return (xp.minimum(xp.full_like(entropy, self.epsilon), self.delta * xp.exp(-entropy)),)

    def accept(self, law_x: Array, q_x: Array, memo: tuple) -> Array:
        """1 over the threshold, else 0."""
        return (law_x > memo[0]).astype(law_x.dtype)

    def reject(self, law_V: Array, q_V: Array, child: Child, memo: tuple, last: Array) -> tuple[Array, tuple]:
        return law_V, memo


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

    def enter(self, p_V: Array, q_V: Array, siblings: Array) -> tuple:
        """Memo: p already tried at this parent."""
        return (laws.namespace(p_V).zeros_like(p_V[0]),)

    def accept(self, law_x: Array, q_x: Array, memo: tuple) -> Array:
        """Chance that the parent's coin, not met by the elder siblings, is met by this one."""
        xp = laws.namespace(law_x)
        (tried,) = memo
        p_x = law_x * (1 - tried)
        before, after = laws.cap(tried / self.total), laws.cap((tried + p_x) / self.total)
        chance = xp.where(before < 1, laws.ratio(after - before, 1 - before), xp.ones_like(p_x))
        return xp.where(p_x >= self.single, xp.ones_like(p_x), chance)

    def reject(self, law_V: Array, q_V: Array, child: Child, memo: tuple, last: Array) -> tuple[Array, tuple]:
        (tried,) = memo
        rest_V = laws.residual(law_V, laws.one_hot(law_V, child.token))
        return rest_V, (tried + law_V[child.token] * (1 - tried),)
