"""What vLLM's rejection sampler does, from its definition: vllm/v1/sample/rejection_sampler.py at commit 7f6fc1c.

At random: a draft is accepted when p/q is at least its uniform. Recovered tokens are drawn for every row at once as the
largest of max(0, p - q) / E, or p without the draft where there is no q, by one vector E of exponential noise a request
that all rows share; the one of the first rejected row is used. The bonus token is drawn from the last row alike, by
noise of its own. At temperature 0 drafts are compared with the argmax of the target, which is emitted.
"""

import numpy as np

from specsparse.speculative.base import DraftKind
from specsparse.speculative.proof.batches import at, draw, greedy, one_hot, race, residual, walk
from specsparse.speculative.proof.external import ExternalVerifier

VERSION = "definition of commit 7f6fc1c"
"""Which version was read."""

SAMPLES = 1_000_000
"""Sequences of each case where it draws for itself."""


def random(*, uniforms: bool = False, draft_probs: bool = True) -> ExternalVerifier:
    """The path of requests with a temperature.

    Args:
        uniforms: whether tokens are drawn by inverse CDF of a uniform, where vLLM takes exponential noise; coins and
            weights stay as they are, and the distribution can be enumerated.
        draft_probs: whether the drafter's distribution is handed over; else drafts are an n-gram's, or an argmax.
    """

    def verify(p, q, drafts, randomness):
        N, K = drafts.shape
        q = q if draft_probs else one_hot(drafts, p.shape[2])
        weights = residual(p, q) if draft_probs else p[:, :K] * (1 - q)
        if uniforms:
            coins, token = randomness[:, :K], draw(weights, randomness[:, -2:][:, 0])
            bonus = draw(p[:, K:], randomness[:, -1])
        else:
            coins = randomness.random((N, K))
            token = race(weights, randomness.exponential(size=(N, p.shape[2])))
            bonus = race(p[:, K:], randomness.exponential(size=(N, p.shape[2])))
        drawn = at(q, drafts)
        accept = (drawn > 0) & (at(p, drafts) / np.where(drawn > 0, drawn, 1) >= coins)
        return walk(drafts, accept, np.concatenate([token, bonus], axis=1))

    name = f"vLLM random{'' if draft_probs else ' without draft_probs'}{', inverse CDF' if uniforms else ''}"
    kind = DraftKind.SAMPLED if draft_probs else DraftKind.ONE_HOT
    how = "uniforms" if uniforms else "generator"
    samples = 0 if uniforms else SAMPLES
    return ExternalVerifier(verify, name=name, batched=True, randomness=how, drafts=kind, samples=samples)


def at_zero() -> ExternalVerifier:
    """The path of requests at temperature 0."""
    return ExternalVerifier(greedy, name="vLLM greedy", batched=True, randomness="uniforms", greedy=True)
