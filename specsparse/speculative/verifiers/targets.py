"""Rules that read the target's own token at each row, drawn or the likeliest, and not its law."""

import abc

import jax

from specsparse.speculative.base import Draft, Verdict


class TargetRule(abc.ABC):
    """Base of such rules but `Match`; a verifier of one has `needs_p` False. Its verdicts hold alpha."""

    @abc.abstractmethod
    def verdict(self, draft: Draft, target_Bn: jax.Array, *, coins_BK: jax.Array) -> Verdict:
        """The verdict on a draft.

        Args:
            draft: of a kind that the verifier accepts.
            target_Bn: int32[B, K+1], the target's token at each row, as `verify.match_verdict` takes it.
            coins_BK: float32[B, K] in [0, 1), one coin a node (noise stream `accept`).
        """
