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
    B = len(texts)
    return DraftContext(
        tokens=jnp.asarray(tokens),
        length=jnp.asarray(np.array([len(ids) for ids in texts], np.int32)),
        budget=jnp.asarray(np.broadcast_to(np.asarray(budget, np.int32), (B,))),
        seed=jnp.asarray(np.tile(seed_words(3)[None], (B, 1))),
        sample=jnp.asarray(np.arange(B, dtype=np.int32)),
        round=jnp.asarray(np.full((B,), round, np.int32)),
    )


def drafted_ids(draft: Draft, b: int = 0) -> list[int]:
    """The drafted ids of sequence b."""
    return np.asarray(draft.tokens)[b, : int(draft.count[b])].tolist()
