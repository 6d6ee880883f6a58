"""The vocabulary of a GGUF file: its tokens, their types and the special ids, checked once at load."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NoReturn

import numpy as np

from specsparse.errors import UserError

MODELS = {"llama": "spm", "gpt2": "bpe"}
"""`tokenizer.ggml.model` -> kind of tokenizer."""

# Tokens that end a generation, known by their text since files rarely list them all (llama.cpp, src/llama-vocab.cpp).
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>")
_END_OF_TURN += ("_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>")
_END_OTHER = ("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "<|eom_id|>", "[EOS]", "<eos>", "<turn|>")
_END_OTHER += ("<|tool_response>", "[e~[")
# A fill-in-the-middle model that opens a new file or repository has left the text: these end a generation as well.
_END_OF_FILE = ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>")
_END_OF_FILE += ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")
_END_IDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Families that use "<|end|>" between the parts of one answer are known by these tokens.
_END_IS_NO_END = (("<|return|>", "<|call|>"), ("<|return|>", "<|calls|>"))
_END_IS_NO_END += (("<|call|>", "<|flush|>"), ("<|calls|>", "<|flush|>"))
# Control tokens that some files mark as plain text.
_CONTROL = ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>")
_CONTROL += ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>")
_CONTROL += ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>")
_CONTROL += ("<|prefix|>", "<|suffix|>", "<|middle|>")
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # parts of an answer, always shown

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


HIDDEN = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})
"""Types that are not text: found in text only with `parse_special`, printed only without `skip_special`."""


@dataclass(frozen=True)
class TokenizerKeys:
    """The metadata keys `tokenizer.ggml.*` of a file; `where` names the file in messages."""

    metadata: Mapping[str, object]
    where: str

    def fail(self, text: str) -> NoReturn:
        raise UserError(f"{self.where}: {text}") from None

    def get(self, name: str) -> object:
        return self.metadata.get(f"tokenizer.ggml.{name}")

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool | int | np.bool_ | np.integer) or value not in (0, 1):
            self.fail(f"tokenizer.ggml.{name} is {value!r:.40}, not true or false")
        return bool(value)

    def array(self, name: str, *, n: int | None = None) -> list:
        """The values of an array, which has `n` of them."""
        value = self.get(name)
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if value is None or not isinstance(value, list | tuple):
            self.fail(f"tokenizer.ggml.{name} is " + ("missing" if value is None else f"{value!r:.40}, not an array"))
        if n is not None and len(value) != n:
            self.fail(f"tokenizer.ggml.{name} has {len(value)} entries for {n} tokens")
        return list(value)

    def strings(self, name: str) -> list[str]:
        values = self.array(name)
        try:
            "".join(values).encode()  # in C, because vocabularies are long
        except (TypeError, UnicodeEncodeError):
            wrong = (not isinstance(v, str) or any("\ud800" <= c <= "\udfff" for c in v) for v in values)
            i = next(i for i, is_wrong in enumerate(wrong) if is_wrong)
            self.fail(f"tokenizer.ggml.{name}[{i}] is {values[i]!r:.40}, not a string of valid Unicode")
        return values


@dataclass(frozen=True)
class Vocab:
    """A checked vocabulary.

    Invariants: `tokens`, `types` and, for "spm", `scores` have the same length; texts are unique and valid Unicode;
    every id is in range.
    """

    kind: str  # "spm" or "bpe"
    tokens: list[str]  # text of each id, as in the file (byte-level BPE writes bytes as printable characters)
    types: list[int]  # TokenType of each id, as int
    ids: dict[str, int]
    scores: list[float]  # merge priority of each id; empty for "bpe"
    # ids by name ("bos", "eos", "eot", "eom", "unknown", "padding", ...); absent ones are not listed
    special: dict[str, int]
    keys: TokenizerKeys  # the other keys of the file

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(i for i, kind in enumerate(self.types) if kind in HIDDEN)

    @property
    def stop_ids(self) -> frozenset[int]:
        ids = {self.ids[name] for name in _END_OF_TURN + _END_OTHER + _END_OF_FILE if name in self.ids}
        if any(self.ids.keys() >= set(names) for names in _END_IS_NO_END):
            ids.discard(self.ids.get("<|end|>", -1))
        return frozenset(ids | {self.special[name] for name in _END_IDS if name in self.special})

    @cached_property
    def fixed(self) -> list[tuple[str, int]]:
        """(text, id) of the tokens that are cut out of a text before it is tokenized, longest text first."""
        cut = HIDDEN | {TokenType.USER_DEFINED}
        found = [(self.tokens[i], i) for i, kind in enumerate(self.types) if kind in cut]
        return sorted(found, key=lambda item: -len(item[0].encode()))


def read_vocab(metadata: Mapping[str, object], *, where: str) -> Vocab:
    """Reads `tokenizer.ggml.*`; `where` names the file. Raises UserError for a missing, wrong or unsupported key."""
    keys = TokenizerKeys(metadata, where)
    model = keys.get("model")
    if model is None:
        keys.fail("no tokenizer in this file (tokenizer.ggml.model is missing)")
    if not isinstance(model, str) or model not in MODELS:
        keys.fail(f"tokenizer model {model!r:.40} is not supported; supported: {', '.join(MODELS)}")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(keys.strings("tokens"))]
    n, ids = len(tokens), {token: i for i, token in enumerate(tokens)}
    if not n:
        keys.fail("tokenizer.ggml.tokens is empty")
    if len(ids) != n:
        i = next(i for i, token in enumerate(tokens) if ids[token] != i)
        keys.fail(f"token {tokens[i]!r:.40} is in the vocabulary twice (ids {i} and {ids[tokens[i]]})")
    types = [int(TokenType.NORMAL)] * n
    if keys.get("token_type") is not None:
        known = {int(kind): int(kind) for kind in TokenType}
        types = [known.get(kind, 0) if isinstance(kind, int) else 0 for kind in keys.array("token_type", n=n)]
    byte = int(TokenType.BYTE)
    for i in (i for i, kind in enumerate(types) if kind == byte):
        if not _BYTE.fullmatch(tokens[i]):
            keys.fail(f"token {i} is a byte, but its text is {tokens[i]!r:.40} and not <0x00> to <0xFF>")
    scores = keys.array("scores", n=n) if MODELS[model] == "spm" else []
    for i, score in enumerate(scores):
        if not isinstance(score, int | float) or math.isnan(score):
            keys.fail(f"tokenizer.ggml.scores[{i}] is {score!r:.40}, not a number")
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if MODELS[model] == "spm" else {}
    special = {name: i for name, i in defaults.items() if i < n}
    for name in ("bos", "unknown", "padding", *_END_IDS):
        value = keys.get(f"{name}_token_id")
        is_int = isinstance(value, int | np.integer)
        if is_int and 0 <= value < n:
            special[name] = int(value)
        elif value is not None and not (is_int and name in ("unknown", "padding")):
            # Those two are often placeholders and are never emitted.
            keys.fail(f"tokenizer.ggml.{name}_token_id is {value!r:.40}, not an id of the vocabulary of {n}")
    for name in _END_OF_TURN:
        if "eot" not in special and name in ids:
            special["eot"] = ids[name]
    marks = dict.fromkeys(_END_OF_TURN + _END_OTHER + _END_OF_FILE + _CONTROL, TokenType.CONTROL)
    for name, kind in (marks | dict.fromkeys(_SHOWN, TokenType.USER_DEFINED)).items():
        if name in ids:
            types[ids[name]] = kind
    return Vocab(MODELS[model], tokens, types, ids, scores, special, keys)
