"""What a caller asks for, checked: prompts, sampling parameters and seeds become the sequences of a session."""

import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import jax
import numpy as np

from specsparse.engine.model import Model
from specsparse.engine.noise import seed_at
from specsparse.engine.sampling.params import SEEDS, SamplingParams
from specsparse.errors import ContextTooLong, UserError
from specsparse.runtime.device_batch import Request
from specsparse.support.options import shown

PromptLike = str | np.ndarray | Seq[int] | Seq[Mapping[str, str]]
"""A text, token ids, or a chat: a list of {"role", "content"}."""


def params_of(
    model: Model, sampling: SamplingParams | None, max_tokens: int | None, fields: Mapping[str, object]
) -> SamplingParams:
    """`sampling`, or greedy for None, with `max_tokens` and `fields` in place of its own.

    Raises:
        UserError: no model, no `SamplingParams`, or a field that it does not have.
    """
    if not isinstance(model, Model):
        raise UserError(f"the first argument is a Model, from specsparse.load(...), not {type(model).__name__}")
    if not isinstance(sampling, SamplingParams | None):
        raise UserError(f"sampling must be SamplingParams, not {type(sampling).__name__}")
    params = SamplingParams(temperature=0.0, max_tokens=None) if sampling is None else sampling
    if max_tokens is not None:
        fields = {**fields, "max_tokens": max_tokens}
    return params.merged(**fields) if fields else params


def every_params(
    model: Model,
    sampling: SamplingParams | Seq[SamplingParams] | None,
    max_tokens: int | None,
    fields: Mapping[str, object],
    *,
    count: int,
    many: bool,
) -> list[SamplingParams]:
    """`params_of` for each of `count` prompts: the same for all, or one of a list each.

    Raises:
        UserError: as `params_of`; or a list of another length than the prompts.
    """
    if not isinstance(sampling, list | tuple):
        return [params_of(model, sampling, max_tokens, fields)] * count
    if not many or len(sampling) != count:
        prompts = f"{count} prompts" if many else "one prompt that is in no list"
        raise UserError(f"sampling is a list of {len(sampling)} for {prompts}: give one for each, or one for all")
    return [params_of(model, one, max_tokens, fields) for one in sampling]


def prompts_of(prompt: PromptLike | Seq[PromptLike]) -> tuple[list[PromptLike], bool]:
    """The prompts, and whether a list of them was given. A list of integers or of chat messages is one prompt.

    Raises:
        UserError: neither, or nothing.
    """
    if isinstance(prompt, str | np.ndarray):
        return [prompt], False
    if not isinstance(prompt, Seq):
        raise UserError(f"a prompt is a text, token ids or a chat, not {type(prompt).__name__}")
    if not prompt:
        raise UserError("the prompt is empty: at least one token is needed")
    if isinstance(prompt[0], str | Seq | np.ndarray):
        return list(prompt), True
    return [prompt], False


def prompt_ids(model: Model, prompt: PromptLike, params: SamplingParams) -> np.ndarray:
    """Checked ids int32[n] of a text, a chat or ids. Texts may name special tokens; BOS is added as the file says.

    Raises:
        UserError: ids that the model does not have, none at all, or more than its context holds.
    """
    tokenizer = model.tokenizer
    if isinstance(prompt, Seq) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
        prompt = tokenizer.apply_chat_template(prompt)
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special=True, parse_special=True)
        if len(ids) > 1 and tokenizer.add_bos and ids[0] == ids[1] == tokenizer.bos_id:
            ids = ids[1:]  # a chat template has written BOS already
    else:
        ids = prompt
    keep = params.truncate_prompt_tokens
    if keep is not None:
        ids = ids[-(_room_for_prompt(model, params) if keep == -1 else keep) :]
    return model.check_ids(ids)


def _room_for_prompt(model: Model, params: SamplingParams) -> int:
    """Tokens that the context has beside the `max_tokens` to come, or beside one where they are not limited."""
    context = model.config.context_length
    wanted = 1 if params.max_tokens is None else params.max_tokens
    if wanted >= context:
        raise ContextTooLong(
            f"max_tokens={wanted} leaves truncate_prompt_tokens=-1 no prompt: the context holds {context} tokens"
        )
    return context - wanted


def seed_of(seed: object) -> int:
    """The seed, or a new one for None.

    Raises:
        UserError: no whole number of 64 bits.
    """
    if seed is None:
        drawn = secrets.randbits(32)
        if jax.process_count() == 1:
            return drawn
        from jax.experimental.multihost_utils import broadcast_one_to_all

        return int(broadcast_one_to_all(np.uint32(drawn)))  # processes that share a model write one text
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not SEEDS.holds(int(seed)):
        raise UserError(f"seed={shown(seed)} must be a whole number of 64 bits, or None for a new one")
    return int(seed)


def sequences_of(
    model: Model,
    prompts: Seq[PromptLike],
    sampling: SamplingParams | Seq[SamplingParams],
    seed: object = None,
    *,
    common_noise: bool = False,
) -> list[list[Request]]:
    """The completions to draw for each prompt of a batch, each with noise of its own.

    Log probabilities are kept where the best of several completions are to be chosen.

    Args:
        model: the target.
        prompts: of the batch.
        sampling: for all prompts, and its seed wins over `seed`; or one for each, whose seed is that prompt's own.
        seed: of the batch: prompt i has `seed_at(seed, i)`. None draws a new one.
        common_noise: prompts share `seed` itself: where two texts agree so far, so do their next draws.

    Raises:
        UserError: as `prompt_ids` and `seed_of`.
    """
    if isinstance(sampling, SamplingParams):
        seed = seed if sampling.seed is None else sampling.seed
        sampling = [sampling.merged(seed=None)] * len(prompts)
    shared, groups = seed_of(seed), []
    for place, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        own = shared if common_noise else seed_at(shared, place)
        own = own if params.seed is None else params.seed
        ids = prompt_ids(model, prompt, params)
        ranked = params.merged(logprobs=0) if params.num_sequences > params.n and params.logprobs is None else params
        groups.append([Request(ids, ranked, own, sample) for sample in range(params.num_sequences)])
    return groups
