"""SentencePiece BPE ("llama" in GGUF) on the `sentencepiece` library."""

import struct
from functools import cached_property
from typing import TYPE_CHECKING

import sentencepiece

from specsparse.engine.text.vocabulary import TokenType, Vocab

if TYPE_CHECKING:
    import tokenizers

SPACE = "\u2581"
"""The character that stands for a space inside the vocabulary."""


class SpmCodec:
    """Text without special tokens to ids, and plain tokens to bytes."""

    def __init__(self, vocab: Vocab):
        self._vocab = vocab

    @cached_property
    def _processor(self) -> sentencepiece.SentencePieceProcessor:
        # Built at the first text: loading a model does not wait for it.
        try:
            return sentencepiece.SentencePieceProcessor(model_proto=_model_proto(self._vocab))
        except RuntimeError as error:
            self._vocab.keys.fail(f"sentencepiece does not take this vocabulary: {error}")

    def encode(self, text: str) -> list[int]:
        """Ids of a text; a character without a token becomes its bytes' tokens, or the unknown token."""
        return self._processor.encode(text)

    def byte_id(self, byte: int) -> int | None:
        return self._vocab.ids.get(f"<0x{byte:02X}>")

    def text_bytes(self, token: str) -> bytes:
        return token.replace(SPACE, " ").encode()

    def library(self, *, space_prefix: bool) -> "tokenizers.Tokenizer":
        """A tokenizer of the `tokenizers` library, without special tokens.

        Its merges join two neighbours to the token of the highest score, as sentencepiece does.
        """
        import tokenizers
        from tokenizers import decoders, models, normalizers

        vocab = self._vocab
        unknown = next((vocab.tokens[i] for i, kind in enumerate(vocab.types) if kind == TokenType.UNKNOWN), None)
        bytes_too = all(f"<0x{byte:02X}>" in vocab.ids for byte in range(256))
        merges = []
        for index, token in enumerate(vocab.tokens):
            if vocab.types[index] in (TokenType.BYTE, TokenType.UNKNOWN):
                continue
            parts = [(token[:at], token[at:]) for at in range(1, len(token))]
            parts = [(a, b) for a, b in parts if a in vocab.ids and b in vocab.ids]
            merges += [(-vocab.scores[index], index, vocab.ids[a], vocab.ids[b], (a, b)) for a, b in parts]
        pairs = [merge[-1] for merge in sorted(merges)]
        model = models.BPE(vocab.ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_too)
        library = tokenizers.Tokenizer(model)
        spaces = [normalizers.Prepend(SPACE)] if space_prefix else []
        library.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
        strip = [decoders.Strip(content=" ", left=1)] if space_prefix else []
        library.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return library


def _model_proto(vocab: Vocab) -> bytes:
    """The vocabulary as sentencepiece's ModelProto (its sentencepiece_model.proto gives the field numbers).

    Special and user-defined tokens are cut out before; in the rest llama.cpp lets merges form any token, whatever its
    type, hence every token but bytes and the unknown one is a normal one here. The space before a text is the
    caller's. Written by hand: the library's message classes need `protobuf`, and clash with other copies of them.
    """
    data = {f"<0x{byte:02X}>" for byte in range(256)}
    byte_fallback = data <= vocab.ids.keys()
    unknown = next((i for i, kind in enumerate(vocab.types) if kind == TokenType.UNKNOWN), -1)
    parts = []
    for i, (token, score) in enumerate(zip(vocab.tokens, vocab.scores)):
        kind = TokenType.UNKNOWN if i == unknown else TokenType.NORMAL
        if byte_fallback and token in data:
            kind = TokenType.BYTE
        piece = _bytes(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind)
        parts.append(_bytes(1, piece))
    bpe = 2
    parts.append(_bytes(2, _number(3, bpe) + _number(4, len(vocab)) + _number(35, byte_fallback)))
    # Normalizer: add_dummy_prefix and remove_extra_whitespaces off, escape_whitespaces on.
    parts.append(_bytes(3, _bytes(1, b"identity") + _number(3, 0) + _number(4, 0) + _number(5, 1)))
    return b"".join(parts)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value
