"""Sampling parameters as users write them: vLLM's names, meanings and ranges, checked when they are made."""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from specsparse.errors import UserError

GREEDY_TEMPERATURE = 1e-5
"""A temperature below this is greedy decoding (vLLM's constant)."""
MAX_SEQUENCES = 16384

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


def _show(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(name: str, value: Any, allowed: str) -> UserError:
    return UserError(f"{name}={_show(value)} is not allowed: {name} must be {allowed}")


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_real(value: Any) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class _Int:
    """An integer between `low` and `high`, or one of `extra`, or None where `optional`."""

    text: str
    low: int
    high: int | None = None
    extra: tuple[int, ...] = ()
    optional: bool = False

    def __call__(self, name: str, value: Any) -> int | None:
        if value is None and self.optional:
            return None
        if _is_int(value):
            inside = value >= self.low and (self.high is None or value <= self.high)
            if inside or value in self.extra:
                return int(value)
        raise _refuse(name, value, self.text)


@dataclasses.dataclass(frozen=True)
class _Real:
    """A finite real number for which `test` holds."""

    text: str
    test: Callable[[float], bool]

    def __call__(self, name: str, value: Any) -> float:
        if _is_real(value):
            try:
                number = float(value)
            except OverflowError:  # a whole number too long for a float
                number = math.inf
            if math.isfinite(number) and self.test(number):
                return number
        raise _refuse(name, value, self.text)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "true or false")
    return value


def _items(name: str, value: Any, text: str) -> tuple:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, (Sequence, set, frozenset)):
        if not (isinstance(value, np.ndarray) and value.ndim == 1):
            raise _refuse(name, value, text)
        value = value.tolist()
    return tuple(dict.fromkeys(value)) if all(_hashable(item) for item in value) else tuple(value)


def _hashable(item: Any) -> bool:
    return type(item).__hash__ is not None


def _strings(name: str, value: Any) -> tuple[str, ...]:
    text = "a string or a list of non-empty strings"
    items = (value,) if isinstance(value, str) else _items(name, value, text)
    if not all(isinstance(item, str) and item for item in items):
        raise _refuse(name, value, text)
    return items


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    text = "a list of token ids (integers from 0 on)"
    items = _items(name, value, text)
    if not all(_is_int(item) and item >= 0 for item in items):
        raise _refuse(name, value, text)
    return tuple(int(item) for item in items)


def _allowed_ids(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = _token_ids(name, value)
    if not ids:
        raise _refuse(name, value, "None or a list with at least one token id")
    return ids


def _bias(name: str, value: Any) -> dict[int, float]:
    text = "a mapping from token ids to numbers from -1e30 to 1e30, or minus infinity"
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refuse(name, value, text)
    bias: dict[int, float] = {}
    for key, number in value.items():
        # Keys of JSON objects are strings.
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        if not (_is_int(token) and token >= 0 and _is_real(number) and (abs(number) <= 1e30 or number == -math.inf)):
            raise _refuse(name, value, text)
        bias[int(token)] = float(number)
    return bias


def _processors(name: str, value: Any) -> tuple[Callable, ...]:
    items = (value,) if callable(value) else _items(name, value, "a list of functions (ids, logits) -> logits")
    if not all(callable(item) for item in items):
        raise _refuse(name, value, "a list of functions (ids, logits) -> logits")
    return items


_COUNT = "a whole number of at least {}"
_PENALTY = _Real("a number from -2 to 2", lambda x: -2.0 <= x <= 2.0)
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "n": _Int(f"a whole number from 1 to {MAX_SEQUENCES}", 1, MAX_SEQUENCES),
    "best_of": _Int(f"None or a whole number from 1 to {MAX_SEQUENCES}", 1, MAX_SEQUENCES, optional=True),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _Real("a finite number above 0", lambda x: x > 0.0),
    "temperature": _Real("a finite number of at least 0 (0 = greedy)", lambda x: x >= 0.0),
    "top_p": _Real("a number above 0 and up to 1", lambda x: 0.0 < x <= 1.0),
    "top_k": _Int("a whole number of at least 1, or 0 or -1 for all tokens", 1, extra=(0, -1)),
    "min_p": _Real("a number from 0 to 1", lambda x: 0.0 <= x <= 1.0),
    "seed": _Int("None or a whole number of at most 64 bits", -(2**63), 2**64 - 1, optional=True),
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "bad_words": _strings,
    "include_stop_str_in_output": _boolean,
    "ignore_eos": _boolean,
    "max_tokens": _Int("None or " + _COUNT.format(1), 1, optional=True),
    "min_tokens": _Int(_COUNT.format(0), 0),
    "logprobs": _Int("None, -1 for all, or " + _COUNT.format(0), 0, extra=(-1,), optional=True),
    "prompt_logprobs": _Int("None, -1 for all, or " + _COUNT.format(0), 0, extra=(-1,), optional=True),
    "detokenize": _boolean,
    "skip_special_tokens": _boolean,
    "spaces_between_special_tokens": _boolean,
    "logit_bias": _bias,
    "allowed_token_ids": _allowed_ids,
    "truncate_prompt_tokens": _Int("None, -1, or " + _COUNT.format(1), 1, extra=(-1,), optional=True),
    "logits_processors": _processors,
}


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

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] | str = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    truncate_prompt_tokens: int | None = None
    logits_processors: Sequence[Callable] = ()
    guided_decoding: Any = None
    use_beam_search: bool = False

    def __post_init__(self) -> None:
        """Checks every field and brings it into its normal form."""
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
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
            raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.best_of is not None and self.best_of < self.n:
            raise _refuse("best_of", self.best_of, f"at least n={self.n}")
        if self.greedy and self.num_sequences > 1:
            name = "best_of" if self.best_of is not None else "n"
            raise _refuse(name, self.num_sequences, "1 where temperature=0: greedy completions are all equal")
        if self.stop and not self.detokenize:
            raise _refuse("detokenize", False, "true where stop strings are given")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without noise."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def num_sequences(self) -> int:
        """Completions to generate for a prompt: `best_of`, or `n`."""
        return self.n if self.best_of is None else self.best_of

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "SamplingParams":
        """Builds the parameters from names and values, as they come from a file or a command line.

        Raises:
            UserError: an unknown name (the message has the nearest valid one), or a value that is not allowed.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for key in mapping:
            if key in ELSEWHERE:
                raise UserError(f"{key} is no sampling parameter: {ELSEWHERE[key]}")
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.0)[0]
                raise UserError(f"unknown sampling parameter {_show(key)}; did you mean {near!r}?")
        return cls(**mapping)

    def merged(self, **keywords: Any) -> "SamplingParams":
        """These parameters with some replaced; raises UserError as `from_dict` does."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return self.from_dict({**fields, **keywords})
