"""Sampling parameters as users write them (vLLM's names, meanings and ranges), and as arrays for the device."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeGuard

import numpy as np

from specsparse.errors import UserError, refuse
from specsparse.support.neighbours import hint
from specsparse.support.options import Count, Internal, Positive, Range, Read, Share, Size, checked, options_of

if TYPE_CHECKING:
    import jax

    Array = np.ndarray | jax.Array
else:
    Array = Any

GREEDY_TEMPERATURE = 1e-5
"""A temperature below this is greedy decoding (vLLM's constant)."""
MAX_SEQUENCES = 16384
SEEDS = Range(-(2**63), 2**64 - 1)
"""64 bits, signed or not."""
_HUGE = 1e20  # beyond this a temperature or penalty makes no difference, and the arithmetic on logits stays finite


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _list(text: str, fits: Callable[[Any], bool], *, single: type | None = None, least: int = 0) -> Read:
    """Reads a list, set or vector without repetitions; None is an empty one, and a `single` value a list of itself."""

    def read(value: Any) -> tuple:
        value = () if value is None else value.tolist() if isinstance(value, np.ndarray) else value
        value = (value,) if single is not None and isinstance(value, single) else value
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence | Set):
            raise TypeError
        items = tuple(dict.fromkeys(value))
        if len(items) < least or not all(map(fits, items)):
            raise ValueError
        return tuple(int(item) if _is_int(item) else item for item in items)

    return Read(read, text)


def _is_id(item: object) -> bool:
    return _is_int(item) and item >= 0


def _bias(value: object) -> dict[int, float]:
    bias: dict[int, float] = {}
    if not isinstance(value, Mapping | None):
        raise TypeError
    for key, number in (value or {}).items():
        # Keys of JSON objects are strings.
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        if not (_is_int(token) and token >= 0 and _is_real(number) and (abs(number) <= 1e30 or number == -math.inf)):
            raise ValueError
        bias[int(token)] = float(number)
    return bias


_TEXTS = _list("a string or a list of non-empty strings", lambda x: isinstance(x, str) and x != "", single=str)
_Strings = Annotated[Sequence[str] | str, _TEXTS]
_Ids = Annotated[Sequence[int], _list("a list of token ids, whole numbers from 0 on", _is_id)]
_Processors = Annotated[
    Sequence[Callable], _list("a list of functions (ids, logits) -> logits", callable, single=Callable)
]
_Penalty = Annotated[float, Range(-2, 2)]
_Reported = Annotated[int | None, Range(0, besides=(-1,))]
_Bias = Annotated[
    Mapping[int, float], Read(_bias, "a mapping from token ids to numbers from -1e30 to 1e30, or minus infinity")
]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop; names, meanings and defaults are those of vLLM 0.8's `SamplingParams`.

    What other versions and projects call them is in `specsparse.support.neighbours`. Lists are kept as tuples, and None
    is taken as an empty one, so that an object never changes. `guided_decoding` and `use_beam_search` are refused.

    Attributes:
        n: completions returned for a prompt.
        best_of: completions drawn, of which the `n` with the highest total log probability are returned; None is `n`.
        presence_penalty: subtracted from the logit of a token that was generated before, in [-2, 2].
        frequency_penalty: subtracted once for each time the token was generated before, in [-2, 2].
        repetition_penalty: the logit of a token of prompt or output is divided by it if positive, else multiplied; > 0.
        temperature: the logits are divided by it; 0 (below 1e-5) is greedy decoding.
        top_p: keeps the smallest set of most likely tokens with at least this probability, in (0, 1].
        top_k: keeps this many most likely tokens and those that tie with the last of them; 0 or -1 keeps all.
        min_p: drops tokens less likely than this share of the most likely one's probability, in [0, 1].
        seed: 64-bit seed of the noise; None (or -1, as in vLLM) takes the seed of the run.
        stop: strings that end the text, if a token after the first `min_tokens` completes them.
        stop_token_ids: token ids that end it.
        bad_words: strings whose last token is not generated if it would complete them within the output.
        include_stop_str_in_output: whether the text keeps the stop string.
        ignore_eos: goes on after an end-of-sequence token.
        max_tokens: tokens generated at most; None means until the context is full.
        min_tokens: before this many tokens no end-of-sequence or stop token is generated, and no stop string ends the
            text.
        logprobs: None, or how many most likely tokens to report with each generated one; -1 is all.
        prompt_logprobs: the same for the prompt.
        detokenize: whether to produce text (needed by `stop`).
        skip_special_tokens: leaves special tokens out of the text.
        spaces_between_special_tokens: separates special tokens by spaces.
        logit_bias: token id -> number added to its logit; minus infinity bans the token.
        allowed_token_ids: None, or the only ids that may be generated.
        truncate_prompt_tokens: None, or keep this many last tokens of the prompt; -1 keeps as many as the context holds
            beside `max_tokens` (vLLM's rule), or beside one token if that is None.
        logits_processors: pure jax functions (ids int32[c], logits float32[V]) -> float32[V].
        guided_decoding: not supported.
        use_beam_search: not supported.

    Raises:
        UserError: a value of a wrong type or out of range.
    """

    n: Annotated[int, Range(1, MAX_SEQUENCES)] = 1
    best_of: Annotated[int | None, Range(1, MAX_SEQUENCES)] = None
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Positive = 1.0
    temperature: Annotated[float, Range(0)] = 1.0
    top_p: Share = 1.0
    top_k: Annotated[int, Range(1, besides=(0, -1))] = -1
    min_p: Annotated[float, Range(0, 1)] = 0.0
    seed: Annotated[int | None, SEEDS] = None
    stop: _Strings = ()
    stop_token_ids: _Ids = ()
    bad_words: _Strings = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: Count | None = 16
    min_tokens: Size = 0
    logprobs: _Reported = None
    prompt_logprobs: _Reported = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: _Bias = dataclasses.field(default_factory=dict, hash=False)
    allowed_token_ids: Annotated[Sequence[int] | None, _list("a list of token ids, one at least", _is_id, least=1)] = (
        None
    )
    truncate_prompt_tokens: Annotated[int | None, Range(1, besides=(-1,))] = None
    logits_processors: _Processors = ()
    guided_decoding: Annotated[Any, Internal()] = None
    use_beam_search: Annotated[bool, Internal()] = False

    def __post_init__(self) -> None:
        """Checks every field and brings it into its normal form."""
        for name, option in options_of(SamplingParams).items():
            object.__setattr__(self, name, checked(option, getattr(self, name), name))
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        most, count = self.max_tokens, "n" if self.best_of is None else "best_of"
        refuse({
            "guided_decoding is not supported; use allowed_token_ids or logits_processors":
                self.guided_decoding is not None,
            "use_beam_search is not supported; use best_of to keep the most likely of several samples":
                self.use_beam_search is not False,
            f"min_tokens={self.min_tokens} must be at most max_tokens={most}":
                most is not None and self.min_tokens > most,
            f"best_of={self.best_of} must be at least n={self.n}": self.num_sequences < self.n,
            f"{count}={self.num_sequences} must be 1 if temperature=0: greedy completions are all equal":
                self.greedy and self.num_sequences > 1,
            "detokenize=False must be true if stop strings are given": self.stop and not self.detokenize,
        })  # fmt: skip

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without noise."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def num_sequences(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "SamplingParams":
        """Builds the parameters from names and values, as they come from a file or a command line.

        Raises:
            UserError: an unknown name (the message has the nearest valid one), or a value that is not allowed.
        """
        _check_names(mapping)
        return cls(**mapping)

    def merged(self, **keywords: object) -> "SamplingParams":
        """These parameters with some replaced; raises UserError as `from_dict` does."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return self.from_dict({**fields, **keywords})


def _check_names(given: Iterable[object]) -> None:
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    for key in given:
        if key not in names:
            raise UserError(f"unknown sampling parameter {str(key)[:60]!r}{hint(str(key), options_of(SamplingParams))}")


_generated_init = SamplingParams.__init__


@functools.wraps(_generated_init)
def _init_by_known_names(self, *args, **given):
    _check_names(given)
    _generated_init(self, *args, **given)


SamplingParams.__init__ = _init_by_known_names


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """The steps of sampling that any sequence of a batch uses: a static argument of `jax.jit`."""

    vocab_size: int
    greedy: bool = False  # every sequence is greedy; truncation is then off
    mixed: bool = False  # some sequences are greedy and some are not
    use_bias: bool = False  # logit bias, allowed ids or one-token bad words
    use_penalties: bool = False  # presence, frequency or repetition penalties
    use_min_p: bool = False
    use_top_k: bool = False
    use_top_p: bool = False
    use_min_tokens: bool = False  # stop tokens are masked at first
    bad_prefix: int = 0  # tokens before the last one of the longest bad word; 0 if no bad word has several tokens
    context: int = 0  # generated tokens that `History.recent` keeps, for bad words and processors
    logprobs: int | None = None  # None, or how many top tokens to report (V for all)
    processors: tuple[Callable, ...] = ()  # `SamplingParams.logits_processors`

    @property
    def raw(self) -> bool:
        """Whether the logits of the model are used as they are."""
        steps = (self.use_bias, self.use_penalties, self.use_min_tokens, self.bad_prefix > 0, bool(self.processors))
        return not any(steps)


class Truncation(NamedTuple):
    """Temperature and truncation of each sequence or row. Neutral values switch a step off, so no flags are needed."""

    temperature: Array  # float32[R]; 0 is greedy
    log_min_p: Array  # float32[R], natural logarithm of min_p; -inf is off
    top_k: Array  # int32[R]; V (or more) is off
    top_p: Array  # float32[R]; 1 is off


class SamplingArrays(NamedTuple):
    """The sampling parameters of a batch as arrays, one row a sequence; None if no sequence uses the step."""

    truncation: Truncation
    # presence, frequency, repetition: float32[B], or None
    presence: Array | None = None
    frequency: Array | None = None
    repetition: Array | None = None
    bias: Array | None = None  # float32[B, V] added to the logits, -inf for a banned token, or None
    # int32[B, W, m], right-aligned tokens before the last one of each bad word, -1 matches anything
    bad_prefix: Array | None = None
    bad_last: Array | None = None  # int32[B, W], the last token of each bad word; V fills up
    min_tokens: Array | None = None  # int32[B], or None
    stop_ids: Array | None = None  # int32[B, s] masked until `min_tokens` are generated; V fills up


def compile_params(
    params: SamplingParams | Sequence[SamplingParams],
    *,
    vocab_size: int,
    batch: int = 1,
    encode: Callable[[str], Sequence[int]] | None = None,
    eos_ids: Sequence[int] = (),
    context_limit: int = 4096,
) -> tuple[SamplingConfig, SamplingArrays]:
    """The static facts and arrays of B sequences; greedy ones get neutral truncation, as in vLLM.

    Args:
        params: one for each sequence, or one for all `batch` of them.
        encode: text -> ids without special tokens; needed by `bad_words`.
        eos_ids: end-of-sequence ids, masked with `stop_token_ids` until `min_tokens`.
        context_limit: generated tokens that processors see if `max_tokens` is None.

    Raises:
        UserError: a token id outside the vocabulary, bad words that encode to nothing, no token left, or sequences with
            different logits processors.
    """
    V, each = vocab_size, [params] * batch if isinstance(params, SamplingParams) else list(params)
    if len({one.logits_processors for one in each}) > 1:
        raise UserError("logits_processors must be the same for all sequences of a batch")
    words = [_encoded_words(one, encode) for one in each]
    for one in each:
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            if outside := [token for token in getattr(one, name) or () if token >= V]:
                raise UserError(f"{name}: token id {outside[0]} is outside the vocabulary (0 to {V - 1})")
    bias, (prefix, last) = _bias_array(each, words, V), _bad_word_arrays(words, V)
    greedy = [one.greedy for one in each]
    top_k = [V if one.top_k < 1 or one.greedy else min(one.top_k, V) for one in each]
    min_p = np.array([0.0 if one.greedy else one.min_p for one in each], np.float64)
    with np.errstate(divide="ignore"):
        log_min_p = np.log(min_p).astype(np.float32)
    arrays = SamplingArrays(
        Truncation(
            temperature=np.array([0.0 if one.greedy else min(one.temperature, _HUGE) for one in each], np.float32),
            log_min_p=log_min_p,
            top_k=np.array(top_k, np.int32),
            top_p=np.array([1.0 if one.greedy else one.top_p for one in each], np.float32),
        ),
        bias=bias,
        bad_prefix=prefix,
        bad_last=last,
    )
    penalties = np.array([[one.presence_penalty, one.frequency_penalty, one.repetition_penalty] for one in each])
    use_penalties = bool((penalties != [0.0, 0.0, 1.0]).any())
    if use_penalties:
        penalties[:, 2] = np.clip(penalties[:, 2], 1 / _HUGE, _HUGE)
        presence, frequency, repetition = np.ascontiguousarray(penalties.T, np.float32)
        arrays = arrays._replace(presence=presence, frequency=frequency, repetition=repetition)
    use_min_tokens = any(one.min_tokens > 0 for one in each)
    if use_min_tokens:
        stops = [sorted({*eos_ids, *one.stop_token_ids}) for one in each]
        width = max(1, max(len(ids) for ids in stops))
        arrays = arrays._replace(
            min_tokens=np.array([min(one.min_tokens, 2**31 - 1) for one in each], np.int32),
            stop_ids=np.array([ids + [V] * (width - len(ids)) for ids in stops], np.int32),
        )
    bad_prefix = context = 0 if prefix is None else prefix.shape[2]
    if each[0].logits_processors:
        context = max(context, 1, *(min(one.max_tokens or context_limit, context_limit) for one in each))
    reported = [V if one.logprobs == -1 else min(one.logprobs, V) for one in each if one.logprobs is not None]
    config = SamplingConfig(
        vocab_size=V,
        greedy=all(greedy),
        mixed=any(greedy) and not all(greedy),
        use_bias=bias is not None,
        use_penalties=use_penalties,
        use_min_p=bool((min_p > 0.0).any()),
        use_top_k=min(top_k) < V,
        use_top_p=any(one.top_p < 1.0 and not one.greedy for one in each),
        use_min_tokens=use_min_tokens,
        bad_prefix=bad_prefix,
        context=context,
        logprobs=max(reported, default=None),
        processors=tuple(each[0].logits_processors),
    )
    return config, arrays


def _encoded_words(one: SamplingParams, encode: Callable[[str], Sequence[int]] | None) -> list[list[int]]:
    """Token sequences to avoid. As in vLLM each word is also taken with a space before it, if that changes its first
    token and not its length: a word inside a text has other ids than one at its start."""
    sequences: list[list[int]] = []
    for word in one.bad_words:
        bare, spaced = (
            [int(token) for token in encode(space + word.lstrip())] if encode else [] for space in ("", " ")
        )
        if not bare:
            raise UserError(f"bad_words: {word!r} has no tokens in this vocabulary")
        sequences.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return sequences


def _bias_array(each: list[SamplingParams], words: list[list[list[int]]], vocab_size: int) -> np.ndarray | None:
    """float32[B, V]: logit bias, and -inf for a token that is not allowed or is a bad word of its own."""
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


def _bad_word_arrays(words: list[list[list[int]]], vocab_size: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Bad words of several tokens, padded: the tokens before the last one int32[B, W, m], and the last int32[B, W]."""
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
