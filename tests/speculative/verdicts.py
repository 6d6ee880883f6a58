"""Verdicts of a verifier's rule on distributions that a test writes down."""

from specsparse.speculative.verifiers import residuals
from specsparse.speculative.verify import LogitRows, Noise, Target


def verify(verifier, draft, p_BnV, *, coins_BK, u_B, draw=residuals.inverse_cdf, alpha=False):
    """By distributions."""
    alpha = alpha and verifier.rule.reads_alpha(tree=verifier.tree, greedy=False)
    target = Target(p_BnV, draw=draw, tree=verifier.tree, alpha=alpha)
    return verifier.rule.verdict(draft, target, Noise(coins_BK, u_B))


def verify_rows(verifier, draft, rows_RV, prob_rows, *, coins_BK, u_B, judge, alpha=False):
    """By a native call."""
    alpha = alpha and verifier.rule.reads_alpha(tree=verifier.tree, greedy=False)
    target = Target(rows=LogitRows(rows_RV, prob_rows, draft.count + 1, judge), tree=verifier.tree, alpha=alpha)
    return verifier.rule.verdict(draft, target, Noise(coins_BK, u_B))
