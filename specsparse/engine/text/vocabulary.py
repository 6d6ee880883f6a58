"""The vocabulary of a GGUF file: its tokens, their types and the special ids, checked once at load."""

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from specsparse.errors import UserError

MODELS = {"llama": "spm", "gpt2": "bpe"}
"""`tokenizer.ggml.model` -> kind of tokenizer."""

# Tokens that end a generation, known by their text since files rarely list them all (llama.cpp, src/llama-vocab.cpp).
_END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
)
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
"""Types that are no text: found in text only with `parse_special`, printed only without `skip_special`."""


@dataclass(frozen=True)
class Vocab:
    """A checked vocabulary.

    Invariants: `tokens`, `types` and, for "spm", `scores` have the same length; texts are unique and valid Unicode;
    every id is in range.

    Attributes:
        kind: "spm" or "bpe".
        tokens: text of each id, as in the file (byte-level BPE writes bytes as printable characters).
        types: TokenType of each id, as int.
        ids: id of each text.
        scores: merge priority of each id; empty for "bpe".
        special: ids by name ("bos", "eos", "eot", "eom", "unknown", "padding", ...); absent ones are not listed.
        where: the file, for messages.
    """

    kind: str
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    scores: list[float]
    special: dict[str, int]
    where: str

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that are no text (control and unknown tokens)."""
        return frozenset(i for i, kind in enumerate(self.types) if kind in HIDDEN)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a generation."""
        names = _END_OF_TURN + _END_OTHER + _END_OF_FILE
        ids = {self.ids[name] for name in names if name in self.ids}
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
    """Reads and checks `tokenizer.ggml.*`.

    Args:
        metadata: GGUF keys and values.
        where: the file, for messages.

    Raises:
        UserError: what is missing, wrong or not supported.
    """
    kind = _kind(metadata, where)
    tokens, ids = _tokens(metadata, where)
    types = _types(metadata, len(tokens), where)
    _check_bytes(tokens, types, where)
    scores = _scores(metadata, len(tokens), where) if kind == "spm" else []
    special = _special(metadata, kind, len(tokens), where)
    _mark_control(types, ids)
    for name in _END_OF_TURN:
        if "eot" not in special and name in ids:
            special["eot"] = ids[name]
    return Vocab(kind, tokens, types, ids, scores, special, where)


def flag(metadata: Mapping[str, object], name: str, default: bool, *, where: str) -> bool:
    """The boolean `tokenizer.ggml.<name>`, or `default` where the file has none."""
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return default
    if not isinstance(value, bool | int | np.bool_ | np.integer) or value not in (0, 1):
        raise UserError(f"{where}: tokenizer.ggml.{name} is {value!r:.40}, not true or false")
    return bool(value)


def _kind(metadata: Mapping[str, object], where: str) -> str:
    model = metadata.get("tokenizer.ggml.model")
    supported = ", ".join(MODELS)
    if model is None:
        raise UserError(f"{where}: no tokenizer in this file (tokenizer.ggml.model is missing)")
    if not isinstance(model, str) or model not in MODELS:
        raise UserError(f"{where}: tokenizer model {model!r:.40} is not supported; supported: {supported}")
    return MODELS[model]


def _array(metadata: Mapping[str, object], name: str, where: str) -> list[object] | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise UserError(f"{where}: tokenizer.ggml.{name} is {value!r:.40}, not an array")
    return list(value)


def _tokens(metadata: Mapping[str, object], where: str) -> tuple[list[str], dict[str, int]]:
    tokens = _array(metadata, "tokens", where)
    if not tokens:
        raise UserError(f"{where}: no vocabulary (tokenizer.ggml.tokens is missing or empty)")
    strings(tokens, "tokens", where)
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        i = next(i for i, token in enumerate(tokens) if ids[token] != i)
        raise UserError(f"{where}: token {tokens[i]!r:.40} is in the vocabulary twice (ids {i} and {ids[tokens[i]]})")
    return tokens, ids


def strings(values: list[object], name: str, where: str) -> None:
    """Checks that an array holds nothing but valid Unicode strings."""
    plain = set(map(type, values)) == {str}  # asked in C first, because vocabularies are long
    for i, value in enumerate(() if plain else values):
        if not isinstance(value, str):
            raise UserError(f"{where}: tokenizer.ggml.{name}[{i}] is {value!r:.40}, not a string")
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        i = next(i for i, value in enumerate(values) if any("\ud800" <= c <= "\udfff" for c in value))
        raise UserError(f"{where}: tokenizer.ggml.{name}[{i}] is not valid UTF-8: {values[i]!r:.40}") from None


def _types(metadata: Mapping[str, object], n: int, where: str) -> list[int]:
    types = _array(metadata, "token_type", where)
    if types is None:
        return [int(TokenType.NORMAL)] * n
    _same_length(types, "token_type", n, where)
    known = {int(kind): int(kind) for kind in TokenType}
    return [known.get(kind, 0) if isinstance(kind, int) else 0 for kind in types]


def _check_bytes(tokens: list[str], types: list[int], where: str) -> None:
    byte = int(TokenType.BYTE)
    for i in (i for i, kind in enumerate(types) if kind == byte):
        if not _BYTE.fullmatch(tokens[i]):
            raise UserError(f"{where}: token {i} is a byte, but its text is {tokens[i]!r:.40} and not <0x00> to <0xFF>")


def _scores(metadata: Mapping[str, object], n: int, where: str) -> list[float]:
    scores = _array(metadata, "scores", where)
    if scores is None:
        raise UserError(f"{where}: a vocabulary without scores (tokenizer.ggml.scores is missing)")
    _same_length(scores, "scores", n, where)
    for i, score in enumerate(scores):
        if not isinstance(score, int | float) or math.isnan(score):
            raise UserError(f"{where}: tokenizer.ggml.scores[{i}] is {score!r:.40}, not a number")
    return scores


def _same_length(values: list[object], name: str, n: int, where: str) -> None:
    if len(values) != n:
        raise UserError(f"{where}: tokenizer.ggml.{name} has {len(values)} entries for {n} tokens")


def _special(metadata: Mapping[str, object], kind: str, n: int, where: str) -> dict[str, int]:
    special = {"bos": 1, "eos": 2, "unknown": 0} if kind == "spm" else {}
    special = {name: i for name, i in special.items() if i < n}
    for name in ("bos", "unknown", "padding", *_END_IDS):
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            continue
        try:
            index = operator.index(value)
        except TypeError:
            raise UserError(f"{where}: tokenizer.ggml.{name}_token_id is {value!r:.40}, not a token id") from None
        if 0 <= index < n:
            special[name] = index
        elif name not in ("unknown", "padding"):  # those two are often placeholders and are never emitted
            raise UserError(f"{where}: tokenizer.ggml.{name}_token_id is {index}, outside the vocabulary of {n}")
    return special


def _mark_control(types: list[int], ids: dict[str, int]) -> None:
    for name in _END_OF_TURN + _END_OTHER + _END_OF_FILE + _CONTROL:
        if name in ids:
            types[ids[name]] = TokenType.CONTROL
    for name in ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"):  # parts of an answer, always shown
        if name in ids:
            types[ids[name]] = TokenType.USER_DEFINED
