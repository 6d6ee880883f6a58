"""A draft model with another vocabulary than the target's: which of its tokens are drafted, and what it reads."""

import jax.numpy as jnp
import numpy as np

from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.kernels import take_rows
from specsparse.speculative.drafters.plan import Drafting
from specsparse.speculative.drafters.reading import Images
from specsparse.speculative.drafters.sources import DraftWeights
from specsparse.speculative.intersection import Intersection, intersect


def common_tokens(target: Model, draft: Model, *, text: bool = False) -> Intersection:
    """The tokens that both models have; `text` says that they need have none, since text goes between them.

    Raises:
        UserError: they have no text in common.
    """
    common = intersect(
        target.tokenizer, draft.tokenizer, target_size=target.config.vocab_size, draft_size=draft.config.vocab_size
    )
    if not common.texts and not text:
        raise UserError(
            f"{draft.path} has no token in common with the target: take a draft model whose vocabulary overlaps, or a "
            "drafter without a model (drafter=prompt_lookup)"
        )
    return common


def shared_weights(style: Drafting, target: Model, draft: Model, common: Intersection) -> tuple[DraftWeights, int]:
    """What token-level intersection drafts with, and how many tokens it scores.

    The rows of the draft's output matrix for the tokens that both have: the law of these logits is q restricted to them
    and normalised anew, before the draft's temperature and truncation see it.

    Raises:
        UserError: none of the ids of `drafter.draft_vocab` is shared.
    """
    wanted, keep = style.ids(target, target.config.vocab_size), np.ones(len(common.target_ids), bool)
    if wanted is not None:
        keep = np.isin(common.target_ids, wanted)
    ids, own = common.target_ids[keep], common.draft_ids[keep]
    if not len(ids):
        raise UserError(f"drafter.draft_vocab holds no token that {draft.path} has too")
    weights = DraftWeights(
        head=take_rows(draft.params.output, own),
        ids=jnp.asarray(ids),
        images=images_of(draft, common),
    )
    return weights, len(ids)


def images_of(draft: Model, common: Intersection) -> Images:
    """What the draft model is fed for the target's tokens, after its BOS where its tokenizer adds one."""
    bos = draft.tokenizer.bos_id if draft.tokenizer.add_bos else None
    return Images(jnp.asarray(common.starts), jnp.asarray(common.pieces), jnp.int32(-1 if bos is None else bos))
