"""SentencePiece BPE ("llama" in GGUF) on the `sentencepiece` library."""

import struct
from functools import cached_property

import sentencepiece

from specsparse.engine.text.vocabulary import TokenType, Vocab
from specsparse.errors import UserError

SPACE = "\u2581"
"""The character that stands for a space inside the vocabulary."""


class SpmCodec:
    """Text without special tokens to ids, and ids to bytes."""

    def __init__(self, vocab: Vocab):
        self._vocab = vocab

    @cached_property
    def _processor(self) -> sentencepiece.SentencePieceProcessor:
        # Built at the first text: loading a model does not wait for it.
        try:
            return sentencepiece.SentencePieceProcessor(model_proto=_model_proto(self._vocab))
        except RuntimeError as error:
            raise UserError(f"{self._vocab.where}: sentencepiece does not take this vocabulary: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Ids of a text; a character without a token becomes its bytes' tokens, or the unknown token.

        Raises:
            UserError: the library does not take the vocabulary.
        """
        return self._processor.encode(text)

    def byte_id(self, byte: int) -> int | None:
        """The token of one byte."""
        return self._vocab.ids.get(f"<0x{byte:02X}>")

    def token_bytes(self, index: int) -> bytes:
        """The bytes a token stands for."""
        text, kind = self._vocab.tokens[index], self._vocab.types[index]
        if kind == TokenType.NORMAL:
            return text.replace(SPACE, " ").encode()
        if kind == TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        return text.encode()


def _model_proto(vocab: Vocab) -> bytes:
    """The vocabulary as sentencepiece's ModelProto (its sentencepiece_model.proto gives the field numbers).

    Special and user-defined tokens are cut out before; in what is left llama.cpp lets merges form any token whatever
    its type, hence every token but bytes and the unknown one is a normal one here. The space before a text is the
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
