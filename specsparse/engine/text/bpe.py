"""Byte-level BPE ("gpt2" in GGUF) on the `tokenizers` library."""

import logging
import re
from collections.abc import Mapping
from functools import cached_property
from itertools import chain, repeat
from operator import add
from typing import TYPE_CHECKING

from specsparse.engine.text.pre_tokenizer import PRE_TOKENIZERS, PreTokenizer
from specsparse.engine.text.vocabulary import TokenType, Vocab, strings
from specsparse.errors import UserError

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger(__name__)


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte (GPT-2's table).

    A printable byte of Latin-1 stands for itself; the others follow from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
_BYTES = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


class BpeCodec:
    """Text without special tokens to ids, and ids to bytes.

    Raises:
        UserError: merges are missing or name what the vocabulary lacks, or the pre-tokenizer is not known.
    """

    def __init__(self, vocab: Vocab, metadata: Mapping[str, object]):
        self._vocab = vocab
        self.pre = _pre_tokenizer(metadata, vocab.where)
        self._merges = _merges(metadata, vocab)

    @cached_property
    def _tokenizer(self) -> "tokenizers.Tokenizer":
        # Built at the first text: loading a model does not wait for it, nor for the library.
        import tokenizers
        from tokenizers import models, pre_tokenizers

        model = models.BPE(self._vocab.ids, list(zip(*self._merges)), ignore_merges=self.pre.ignore_merges)
        tokenizer = tokenizers.Tokenizer(model)
        steps: list[object] = [pre_tokenizers.Split(tokenizers.Regex(regex), "isolated") for regex in self.pre.regexes]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        missing = [c for c in BYTE_CHARACTERS if c not in self._vocab.ids]
        if missing:
            # A byte without a token is dropped; cutting there keeps its neighbours from being merged.
            steps.append(pre_tokenizers.Split(tokenizers.Regex("[" + re.escape("".join(missing)) + "]"), "removed"))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        return tokenizer

    @property
    def library(self) -> "tokenizers.Tokenizer":
        """What encodes."""
        return self._tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of a text; bytes that the vocabulary has no token for are dropped, as llama.cpp does."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def byte_id(self, byte: int) -> int | None:
        """The token of one byte."""
        return self._vocab.ids.get(BYTE_CHARACTERS[byte])

    def token_bytes(self, index: int) -> bytes:
        """The bytes a token stands for."""
        text, kind = self._vocab.tokens[index], self._vocab.types[index]
        if kind == TokenType.NORMAL:
            try:
                return bytes([_BYTES[c] for c in text])
            except KeyError:  # an added token in plain text
                return text.encode()
        if kind == TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        return text.encode()


def _pre_tokenizer(metadata: Mapping[str, object], where: str) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if not name:
        log.warning("%s: no pre-tokenizer is named (tokenizer.ggml.pre); 'default' is used, ids may be wrong", where)
        name = "default"
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        supported = ", ".join(PRE_TOKENIZERS)
        raise UserError(f"{where}: pre-tokenizer {name!r:.40} is not supported; supported: {supported}")
    return PRE_TOKENIZERS[name]


def _merges(metadata: Mapping[str, object], vocab: Vocab) -> tuple[list[str], list[str]]:
    """What each merge joins: its left tokens and its right ones. Loops in C, because vocabularies are long."""
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list | tuple):
        raise UserError(f"{vocab.where}: a vocabulary without merges (tokenizer.ggml.merges is missing)")
    strings(list(merges), "merges", vocab.where)
    unique, ids = list(dict.fromkeys(merges)), vocab.ids  # of equal merges the first counts
    if set(map(str.count, unique, repeat(" "))) <= {1}:
        both = " ".join(unique).split(" ") if unique else []
    else:
        both = [token for merge in unique for token in merge.partition(" ")[::2]]
    lefts, rights = both[::2], both[1::2]
    if not all(map(ids.__contains__, chain(lefts, rights, map(add, lefts, rights)))):
        pairs = zip(lefts, rights)
        i = next(i for i, (left, right) in enumerate(pairs) if not ids.keys() >= {left, right, left + right})
        raise UserError(
            f"{vocab.where}: tokenizer.ggml.merges[{i}] {unique[i]!r:.60} joins what is not in the vocabulary"
        )
    return lefts, rights
