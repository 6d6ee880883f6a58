"""Byte-level BPE ("gpt2" in GGUF) on the `tokenizers` library, and the regular expressions that cut words before it.

The expressions are llama.cpp's (src/llama-vocab.cpp), whose names a GGUF file uses. They run one after the other: each
cuts the parts that the last one left, at its matches.
"""

import logging
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from operator import add
from typing import TYPE_CHECKING

from specsparse.engine.text.vocabulary import Vocab

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger(__name__)

_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"|\s+(?!\S)|\s+"
_WORD_OR_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" + _SPACES

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _WORD_OR_SIGNS
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _WORD_OR_SIGNS
_QWEN35 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+" + _SPACES
# Case is told apart in ASCII only: any other letter counts as upper and as lower case.
_UPPER, _LOWER = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
_START = r"[^\r\n\p{L}\p{N}]?"
_CASED = (_START + _UPPER + "*" + _LOWER + "+", _START + _UPPER + "+" + _LOWER + "*")
_SIGNS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+" + _SPACES
_TEKKEN = _CASED[0] + "|" + _CASED[1] + r"|\p{N}|" + _SIGNS_SLASH
_GPT4O = _CASED[0] + _CONTRACTION + "?|" + _CASED[1] + _CONTRACTION + r"?|\p{N}{1,3}|" + _SIGNS_SLASH
_SEED_CODER = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+" + _SPACES
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]"
    + _SPACES
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_WIDE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff&&[^\\s]]+"  # the range holds spaces, which are not meant
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+" + _SPACES
)
# U+3000, a space, is left out of these signs.
_DEEPSEEK_SIGNS = r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002" + "]+"
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How a text is cut into words: `regexes` in order.

    With `ignore_merges` a word that is a token is taken whole, whatever the merges say. `add_bos` says whether a
    sequence starts with BOS if the file does not say.
    """

    regexes: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_DIGIT_THEN_GPT2 = (r"\p{N}", _GPT2)
_FAMILIES: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4": PreTokenizer((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer(_DIGIT_THEN_GPT2),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")), ignore_merges=True),
    "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan grok-2 solar-open": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
    "gpt-4o llama4 kanana2 minimax-m2": PreTokenizer((_GPT4O,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", r"\s?[" + _DEEPSEEK_LETTERS + "]+", _DEEPSEEK_SIGNS, r"\s+\z", _CJK_WIDE, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_WIDE, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm": PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_BAILING,)),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for names, pre in _FAMILIES.items() for name in names.split()}
"""`tokenizer.ggml.pre` -> pre-tokenizer."""


def byte_characters() -> list[str]:
    """The printable character that stands for each byte (GPT-2's table).

    A printable byte of Latin-1 stands for itself; the others follow from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_CHARACTERS = byte_characters()
_BYTES = {character: byte for byte, character in enumerate(_CHARACTERS)}


class BpeCodec:
    """Text without special tokens to ids, and plain tokens to bytes."""

    def __init__(self, vocab: Vocab):
        self._vocab, keys = vocab, vocab.keys
        name = keys.get("pre")
        if not name:
            log.warning(
                "%s: no pre-tokenizer is named (tokenizer.ggml.pre); 'default' is used, ids may be wrong", keys.where
            )
            name = "default"
        if not isinstance(name, str) or name not in PRE_TOKENIZERS:
            keys.fail(f"pre-tokenizer {name!r:.40} is not supported; supported: {', '.join(PRE_TOKENIZERS)}")
        self.pre = PRE_TOKENIZERS[name]
        self._merges = _merges(vocab)

    @cached_property
    def _tokenizer(self) -> "tokenizers.Tokenizer":
        # Built at the first text: loading a model does not wait for it, nor for the library.
        import tokenizers
        from tokenizers import models, pre_tokenizers

        model = models.BPE(self._vocab.ids, list(zip(*self._merges)), ignore_merges=self.pre.ignore_merges)
        tokenizer = tokenizers.Tokenizer(model)
        steps: list[object] = [pre_tokenizers.Split(tokenizers.Regex(regex), "isolated") for regex in self.pre.regexes]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        missing = [c for c in _CHARACTERS if c not in self._vocab.ids]
        if missing:
            # A byte without a token is dropped; cutting there keeps its neighbours from being merged.
            steps.append(pre_tokenizers.Split(tokenizers.Regex("[" + re.escape("".join(missing)) + "]"), "removed"))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of a text; bytes that the vocabulary has no token for are dropped, as llama.cpp does."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def byte_id(self, byte: int) -> int | None:
        return self._vocab.ids.get(_CHARACTERS[byte])

    def text_bytes(self, token: str) -> bytes:
        try:
            return bytes([_BYTES[c] for c in token])
        except KeyError:  # an added token in plain text
            return token.encode()

    def library(self, *, space_prefix: bool) -> "tokenizers.Tokenizer":
        """A tokenizer of the `tokenizers` library that decodes, too, without special tokens."""
        import tokenizers

        library = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        library.decoder = tokenizers.decoders.ByteLevel()
        return library


def _merges(vocab: Vocab) -> tuple[list[str], list[str]]:
    """The left and the right tokens that merges join. Loops in C, because vocabularies are long."""
    unique, ids = list(dict.fromkeys(vocab.keys.strings("merges"))), vocab.ids  # of equal merges the first counts
    if set(map(str.count, unique, repeat(" "))) <= {1}:
        both = " ".join(unique).split(" ") if unique else []
    else:
        both = [token for merge in unique for token in merge.partition(" ")[::2]]
    lefts, rights = both[::2], both[1::2]
    if not all(map(ids.__contains__, chain(lefts, rights, map(add, lefts, rights)))):
        pairs = zip(lefts, rights)
        i = next(i for i, (left, right) in enumerate(pairs) if not ids.keys() >= {left, right, left + right})
        vocab.keys.fail(f"tokenizer.ggml.merges[{i}] {unique[i]!r:.60} joins tokens that are not in the vocabulary")
    return lefts, rights
