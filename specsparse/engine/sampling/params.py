"""Sampling parameters as users write them: vLLM's names, meanings and ranges, checked when they are made."""

import dataclasses
import difflib
import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Annotated, Any, TypeGuard

import numpy as np

from specsparse.errors import UserError
from specsparse.support.options import Count, Internal, Positive, Range, Read, Share, Size, checked, options_of

GREEDY_TEMPERATURE = 1e-5
"""A temperature below this is greedy decoding (vLLM's constant)."""
MAX_SEQUENCES = 16384
SEEDS = Range(-(2**63), 2**64 - 1)
"""Of a seed: 64 bits, signed or not."""

_DRAFT = "it belongs to the drafter: drafter=specsparse.get_drafter(NAME, gamma=N)"
_GUIDED = "guided decoding is not supported; use allowed_token_ids or logits_processors"
ELSEWHERE = {
    **dict.fromkeys(("gamma", "num_speculative_tokens", "num_assistant_tokens", "draft_max", "n_draft"), _DRAFT),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar"), _GUIDED),
    **dict.fromkeys(("n_predict", "max_new_tokens", "num_predict"), "here it is max_tokens"),
    "do_sample": "temperature=0 is greedy decoding, any other temperature samples",
    "num_return_sequences": "here it is n",
    "repeat_penalty": "here it is repetition_penalty",
    "num_beams": "beam search is not supported; use best_of to keep the most likely of several samples",
    "context_length": "it belongs to the model: specsparse.load(FILE, context_length=N)",
}
"""Names that other projects give to such things, and what to write here."""


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _items(value: Any) -> tuple:
    """A list, set or vector without repetitions; None is an empty one."""
    value = () if value is None else value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence | Set):
        raise TypeError
    return tuple(dict.fromkeys(value))


def _strings(value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else _items(value)
    if not all(isinstance(item, str) and item for item in items):
        raise ValueError
    return items


def _ids(value: object) -> tuple[int, ...]:
    items = _items(value)
    if not all(_is_int(item) and item >= 0 for item in items):
        raise ValueError
    return tuple(int(item) for item in items)


def _some_ids(value: object) -> tuple[int, ...]:
    if not (ids := _ids(value)):
        raise ValueError
    return ids


def _bias(value: object) -> dict[int, float]:
    bias: dict[int, float] = {}
    if not isinstance(value, Mapping | None):
        raise TypeError
    for key, number in (value or {}).items():
        # Keys of JSON objects are strings.
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        real = isinstance(number, numbers.Real) and not isinstance(number, bool)
        if not (_is_int(token) and token >= 0 and real and (abs(number) <= 1e30 or number == -math.inf)):
            raise ValueError
        bias[int(token)] = float(number)
    return bias


def _functions(value: object) -> tuple[Callable, ...]:
    items = (value,) if callable(value) else _items(value)
    if not all(callable(item) for item in items):
        raise TypeError
    return items


_Strings = Annotated[Sequence[str] | str, Read(_strings, "a string or a list of non-empty strings")]
_Ids = Annotated[Sequence[int], Read(_ids, "a list of token ids, whole numbers from 0 on")]
_Processors = Annotated[Sequence[Callable], Read(_functions, "a list of functions (ids, logits) -> logits")]
_Penalty = Annotated[float, Range(-2, 2)]
_Reported = Annotated[int | None, Range(0, besides=(-1,))]
_Bias = Annotated[
    Mapping[int, float], Read(_bias, "a mapping from token ids to numbers from -1e30 to 1e30, or minus infinity")
]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop; names, meanings and defaults are vLLM's `SamplingParams`.

    Lists are kept as tuples, and None is taken as an empty one, so that an object never changes. `guided_decoding` and
    `use_beam_search` are known and refused.

    Attributes:
        n: completions returned for a prompt.
        best_of: completions drawn, of which the `n` with the highest total log probability are returned; None is `n`.
        presence_penalty: subtracted from the logit of a token that was generated before, in [-2, 2].
        frequency_penalty: subtracted once for each time the token was generated before, in [-2, 2].
        repetition_penalty: the logit of a token of prompt or output is divided by it if positive, else multiplied; > 0.
        temperature: the logits are divided by it; 0 (below 1e-5) is greedy decoding.
        top_p: keeps the smallest set of most likely tokens with at least this probability, in (0, 1].
        top_k: keeps this many most likely tokens and what ties with the last of them; 0 or -1 keeps all.
        min_p: drops tokens less likely than this share of the most likely one's probability, in [0, 1].
        seed: 64-bit seed of the noise; None (or -1, as in vLLM) takes the seed of the run.
        stop: strings that end the text, where a token after the first `min_tokens` completes them.
        stop_token_ids: token ids that end it.
        bad_words: strings whose last token is not generated where it would complete them within the output.
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
        truncate_prompt_tokens: None, or keep this many last tokens of the prompt; -1 keeps what the context holds
            beside `max_tokens` (vLLM's rule), or beside one token where that is None.
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
    allowed_token_ids: Annotated[Sequence[int] | None, Read(_some_ids, "a list of token ids, one at least")] = None
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
        if self.guided_decoding is not None:
            raise UserError("guided_decoding is not supported; use allowed_token_ids or logits_processors")
        if self.use_beam_search is not False:
            raise UserError("use_beam_search is not supported; use best_of to keep the most likely of several samples")
        self._check_pairs()

    def _check_pairs(self) -> None:
        """Rules that join two fields."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}")
        if self.best_of is not None and self.best_of < self.n:
            raise UserError(f"best_of={self.best_of} must be at least n={self.n}")
        if self.greedy and self.num_sequences > 1:
            name = "best_of" if self.best_of is not None else "n"
            raise UserError(
                f"{name}={self.num_sequences} must be 1 where temperature=0: greedy completions are all equal"
            )
        if self.stop and not self.detokenize:
            raise UserError("detokenize=False must be true where stop strings are given")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without noise."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def num_sequences(self) -> int:
        """Completions to generate for a prompt: `best_of`, or `n`."""
        return self.n if self.best_of is None else self.best_of

    @classmethod
    def from_dict(cls, mapping: Mapping[str, object]) -> "SamplingParams":
        """Builds the parameters from names and values, as they come from a file or a command line.

        Raises:
            UserError: an unknown name (the message has the nearest valid one), or a value that is not allowed.
        """
        if not isinstance(mapping, Mapping):
            raise UserError(f"sampling parameters are a mapping of names to values, not {type(mapping).__name__}")
        _check_names(mapping)
        return cls(**mapping)

    def merged(self, **keywords: object) -> "SamplingParams":
        """These parameters with some replaced; raises UserError as `from_dict` does."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return self.from_dict({**fields, **keywords})


def _check_names(given: Iterable[object]) -> None:
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    for key in given:
        if key in ELSEWHERE:
            raise UserError(f"{key} is no sampling parameter: {ELSEWHERE[str(key)]}")
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.0)[0]
            raise UserError(f"unknown sampling parameter {str(key)[:60]!r}; did you mean {near!r}?")


def _by_known_names(init: Callable) -> Callable:
    """The `__init__`; an unknown name is refused as `from_dict` refuses it."""

    @functools.wraps(init)
    def __init__(self, *args, **given):
        _check_names(given)
        init(self, *args, **given)

    return __init__


SamplingParams.__init__ = _by_known_names(SamplingParams.__init__)  # type: ignore[method-assign]
