"""From `SamplingParams` to what the device needs: static facts (`SamplingConfig`) and arrays (`SamplingArrays`)."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError

Encode = Callable[[str], Sequence[int]]
Array = np.ndarray | jax.Array
_HUGE = 1e20
"""Beyond this a temperature or penalty makes no difference, and the arithmetic on logits stays finite."""


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Static facts of a batch's distributions: which steps any of its sequences uses. Hashable, a static argument of
    `jax.jit`.

    Attributes:
        vocab_size: V.
        greedy: every sequence is greedy; truncation is then off.
        mixed: some sequences are greedy and some are not.
        use_bias: logit bias, allowed ids or one-token bad words.
        use_penalties: presence, frequency or repetition penalties.
        use_min_p, use_top_k, use_top_p: truncations.
        use_min_tokens: stop tokens are masked at first.
        bad_prefix: tokens before the last one of the longest bad word; 0 where there is none of several tokens.
        context: generated tokens that `History.recent` keeps, for bad words and processors.
        logprobs: None, or how many top tokens to report (V for all).
        processors: `SamplingParams.logits_processors`.
    """

    vocab_size: int
    greedy: bool = False
    mixed: bool = False
    use_bias: bool = False
    use_penalties: bool = False
    use_min_p: bool = False
    use_top_k: bool = False
    use_top_p: bool = False
    use_min_tokens: bool = False
    bad_prefix: int = 0
    context: int = 0
    logprobs: int | None = None
    processors: tuple[Callable, ...] = ()

    @property
    def raw(self) -> bool:
        """Whether the logits of the model are used as they are."""
        steps = (self.use_bias, self.use_penalties, self.use_min_tokens, self.bad_prefix > 0, bool(self.processors))
        return not any(steps)


class SamplingArrays(NamedTuple):
    """Arrays of a batch's distributions, one row a sequence; None where no sequence uses the step.

    Attributes:
        temperature: float32[B]; 0 is greedy.
        log_min_p: float32[B]; -inf is off.
        top_k: int32[B]; V is off.
        top_p: float32[B]; 1 is off.
        presence, frequency, repetition: float32[B], or None.
        bias: float32[B, V] added to the logits, -inf for a banned token, or None.
        bad_prefix: int32[B, W, m], right-aligned tokens before the last one of each bad word, -1 matches anything.
        bad_last: int32[B, W], the last token of each bad word, V where there is none.
        min_tokens: int32[B], or None.
        stop_ids: int32[B, s] masked until `min_tokens` are generated, V where there is none.
    """

    temperature: Array
    log_min_p: Array
    top_k: Array
    top_p: Array
    presence: Array | None = None
    frequency: Array | None = None
    repetition: Array | None = None
    bias: Array | None = None
    bad_prefix: Array | None = None
    bad_last: Array | None = None
    min_tokens: Array | None = None
    stop_ids: Array | None = None


def compile_params(
    params: SamplingParams | Sequence[SamplingParams],
    *,
    vocab_size: int,
    batch: int = 1,
    encode: Encode | None = None,
    eos_ids: Sequence[int] = (),
    context_limit: int = 4096,
) -> tuple[SamplingConfig, SamplingArrays]:
    """Turns the parameters of B sequences into a `SamplingConfig` and `SamplingArrays`.

    Args:
        params: one for each sequence, or one for all `batch` of them.
        vocab_size: V.
        batch: B, where `params` is a single one.
        encode: text -> ids without special tokens; needed by `bad_words`.
        eos_ids: end-of-sequence ids, masked with `stop_token_ids` until `min_tokens`.
        context_limit: generated tokens that processors see where `max_tokens` is None.

    Raises:
        UserError: a token id outside the vocabulary, bad words without an encoder or that encode to nothing, no token
            left, or sequences with different logits processors.
    """
    each = [params] * batch if isinstance(params, SamplingParams) else list(params)
    for one in each:
        _check_ids(one, vocab_size)
    if len({one.logits_processors for one in each}) > 1:
        raise UserError("logits_processors must be the same for all sequences of a batch")
    words = [_bad_words(one, encode, vocab_size) for one in each]
    bias = _bias(each, words, vocab_size)
    prefix, last = _bad_arrays(words, vocab_size)
    greedy = [one.greedy for one in each]
    config = SamplingConfig(
        vocab_size=vocab_size,
        greedy=all(greedy),
        mixed=any(greedy) and not all(greedy),
        use_bias=bias is not None,
        use_penalties=any(_penalised(one) for one in each),
        use_min_p=any(one.min_p > 0.0 and not one.greedy for one in each),
        use_top_k=any(_top_k(one, vocab_size) < vocab_size for one in each),
        use_top_p=any(one.top_p < 1.0 and not one.greedy for one in each),
        use_min_tokens=any(one.min_tokens > 0 for one in each),
        bad_prefix=0 if prefix is None else prefix.shape[2],
        context=_context(each, prefix, context_limit),
        logprobs=_logprobs(each, vocab_size),
        processors=tuple(each[0].logits_processors),
    )
    return config, _arrays(config, each, eos_ids)._replace(bias=bias, bad_prefix=prefix, bad_last=last)


def _arrays(config: SamplingConfig, each: list[SamplingParams], eos_ids: Sequence[int]) -> SamplingArrays:
    """The numbers of each sequence; greedy ones get neutral truncation, as in vLLM."""
    V = config.vocab_size
    with np.errstate(divide="ignore"):
        log_min_p = np.log(np.array([0.0 if one.greedy else one.min_p for one in each], np.float64)).astype(np.float32)
    probs = SamplingArrays(
        temperature=np.array([0.0 if one.greedy else min(one.temperature, _HUGE) for one in each], np.float32),
        log_min_p=log_min_p,
        top_k=np.array([_top_k(one, V) for one in each], np.int32),
        top_p=np.array([1.0 if one.greedy else one.top_p for one in each], np.float32),
    )
    if config.use_penalties:
        probs = probs._replace(
            presence=np.array([one.presence_penalty for one in each], np.float32),
            frequency=np.array([one.frequency_penalty for one in each], np.float32),
            repetition=np.clip([one.repetition_penalty for one in each], 1 / _HUGE, _HUGE).astype(np.float32),
        )
    if config.use_min_tokens:
        stops = [sorted({*eos_ids, *one.stop_token_ids}) for one in each]
        width = max(1, max(len(ids) for ids in stops))
        probs = probs._replace(
            min_tokens=np.array([min(one.min_tokens, 2**31 - 1) for one in each], np.int32),
            stop_ids=np.array([ids + [V] * (width - len(ids)) for ids in stops], np.int32),
        )
    return probs


def _penalised(one: SamplingParams) -> bool:
    return one.presence_penalty != 0.0 or one.frequency_penalty != 0.0 or one.repetition_penalty != 1.0


def _top_k(one: SamplingParams, vocab_size: int) -> int:
    return vocab_size if one.top_k < 1 or one.greedy else min(one.top_k, vocab_size)


def _logprobs(each: list[SamplingParams], vocab_size: int) -> int | None:
    counts = [one.logprobs for one in each if one.logprobs is not None]
    if not counts:
        return None
    return vocab_size if -1 in counts else min(max(counts), vocab_size)


def _context(each: list[SamplingParams], prefix: np.ndarray | None, limit: int) -> int:
    context = 0 if prefix is None else prefix.shape[2]
    if each[0].logits_processors:
        context = max(context, 1, *(min(one.max_tokens or limit, limit) for one in each))
    return context


def _check_ids(one: SamplingParams, vocab_size: int) -> None:
    named = (
        ("stop_token_ids", one.stop_token_ids),
        ("logit_bias", one.logit_bias),
        ("allowed_token_ids", one.allowed_token_ids or ()),
    )
    for name, ids in named:
        for token in ids:
            if token >= vocab_size:
                raise UserError(f"{name}: token id {token} is outside the vocabulary (0 to {vocab_size - 1})")


def _bad_words(one: SamplingParams, encode: Encode | None, vocab_size: int) -> list[list[int]]:
    """Token sequences to avoid. As in vLLM each word is also taken with a space before it, where that changes its first
    token and not its length: a word inside a text has other ids than one at its start."""
    sequences: list[list[int]] = []
    for word in one.bad_words:
        if encode is None:
            raise UserError("bad_words need a model with a tokenizer")
        bare = [int(token) for token in encode(word.lstrip())]
        spaced = [int(token) for token in encode(" " + word.lstrip())]
        if not bare:
            raise UserError(f"bad_words: {word!r} has no tokens in this vocabulary")
        sequences.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    for token in (token for ids in sequences for token in ids):
        if not 0 <= token < vocab_size:
            raise UserError(f"bad_words: token id {token} is outside the vocabulary (0 to {vocab_size - 1})")
    return sequences


def _bias(each: list[SamplingParams], words: list[list[list[int]]], vocab_size: int) -> np.ndarray | None:
    """float32[B, V]: logit bias, and -inf for what is not allowed or is a bad word of one token."""
    singles = [[ids[0] for ids in one if len(ids) == 1] for one in words]
    if not any(one.logit_bias or one.allowed_token_ids is not None or s for one, s in zip(each, singles, strict=True)):
        return None
    bias = np.zeros((len(each), vocab_size), np.float32)
    for row, one, single in zip(bias, each, singles, strict=True):
        for token, value in one.logit_bias.items():
            row[token] = value
        if one.allowed_token_ids is not None:
            banned = np.ones(vocab_size, bool)
            banned[list(one.allowed_token_ids)] = False
            row[banned] = -np.inf
        row[single] = -np.inf
        if not np.isfinite(row).any():
            raise UserError("allowed_token_ids, bad_words and logit_bias leave no token that may be generated")
    return bias


def _bad_arrays(words: list[list[list[int]]], vocab_size: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Bad words of several tokens as padded arrays: prefix int32[B, W, m] and last token int32[B, W]."""
    longer = [[ids for ids in one if len(ids) > 1] for one in words]
    count = max(len(one) for one in longer)
    if count == 0:
        return None, None
    m = max(len(ids) - 1 for one in longer for ids in one)
    prefix = np.full((len(words), count, m), -1, np.int32)
    last = np.full((len(words), count), vocab_size, np.int32)
    for b, one in enumerate(longer):
        for w, ids in enumerate(one):
            prefix[b, w, m - len(ids) + 1 :] = ids[:-1]
            last[b, w] = ids[-1]
    return prefix, last
