"""For tests of drafters: contexts made of lists of ids, and drafts read back as lists."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from specsparse.engine.noise import seed_words
from specsparse.speculative.base import Draft, DraftContext


def draft_context(
    texts: Sequence[Sequence[int]],
    *,
    capacity: int,
    budget: int | Sequence[int],
    round: int = 0,
    poison: int = -7,
) -> DraftContext:
    """A context of B texts of at most `capacity` ids; the slots beyond each text hold `poison`."""
    tokens = np.full((len(texts), capacity), poison, np.int32)
    for row, ids in zip(tokens, texts, strict=True):
        row[: len(ids)] = ids
    return DraftContext(
        tokens=jnp.asarray(tokens),
        length=jnp.array([len(ids) for ids in texts], jnp.int32),
        budget=jnp.array([budget] * len(texts) if isinstance(budget, int) else budget, jnp.int32),
        seed=jnp.asarray(np.tile(seed_words(3)[None], (len(texts), 1))),
        sample=jnp.arange(len(texts), dtype=jnp.int32),
        round=jnp.full((len(texts),), round, jnp.int32),
    )


def drafted_ids(draft: Draft, b: int = 0) -> list[int]:
    """The drafted ids of sequence b."""
    return np.asarray(draft.tokens)[b, : int(draft.count[b])].tolist()
