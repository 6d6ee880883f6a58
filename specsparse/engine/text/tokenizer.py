"""Text to token ids and back, from the metadata of a GGUF file. Ids are equal to llama.cpp's."""

import codecs
import operator
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Literal, overload

from specsparse.engine.text.bpe import BpeCodec
from specsparse.engine.text.spm import SpmCodec
from specsparse.engine.text.vocabulary import TokenType, Vocab, flag, read_vocab
from specsparse.errors import UserError

if TYPE_CHECKING:
    import tokenizers

    from specsparse.engine.text.chat_template import ChatTemplate, Messages


class Tokenizer:
    """A vocabulary and its rules; made by `from_metadata`.

    Attributes:
        type: "spm" or "bpe".
        add_bos: whether `encode(..., add_special=True)` puts BOS first.
        add_eos: whether it puts EOS last.
        add_space_prefix: whether a text and what follows a special token begin with a space ("spm").
    """

    def __init__(
        self, vocab: Vocab, codec: SpmCodec | BpeCodec, metadata: Mapping[str, object], *, add_bos: bool, prefix: bool
    ):
        self._vocab = vocab
        self._codec = codec
        self._template = metadata.get("tokenizer.chat_template")
        self.type = vocab.kind
        self.add_bos = self._adds("bos", flag(metadata, "add_bos_token", add_bos, where=vocab.where), metadata)
        self.add_eos = self._adds("eos", flag(metadata, "add_eos_token", False, where=vocab.where), metadata)
        prefix = flag(metadata, "add_space_prefix", prefix, where=vocab.where)
        self.add_space_prefix = prefix and vocab.kind == "spm"

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], *, where: str) -> "Tokenizer":
        """Reads a tokenizer.

        Args:
            metadata: GGUF keys and values; `tokenizer.*` is read.
            where: the file, for messages.

        Raises:
            UserError: no tokenizer, one that is not supported, or one that contradicts itself.
        """
        vocab = read_vocab(metadata, where=where)
        if vocab.kind == "spm":
            return cls(vocab, SpmCodec(vocab), metadata, add_bos=True, prefix=True)
        codec = BpeCodec(vocab, metadata)
        return cls(vocab, codec, metadata, add_bos=codec.pre.add_bos, prefix=False)

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary."""
        return len(self._vocab)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a sequence."""
        return self._vocab.special.get("bos")

    @property
    def eos_id(self) -> int | None:
        """The token that ends a sequence."""
        return self._vocab.special.get("eos")

    @property
    def unknown_id(self) -> int | None:
        """The token that stands for what the vocabulary lacks."""
        return self._vocab.special.get("unknown")

    @property
    def eot_id(self) -> int | None:
        """The token that ends a turn of a chat."""
        return self._vocab.special.get("eot")

    @property
    def stop_ids(self) -> frozenset[int]:
        """All tokens that end a generation: EOS, end of turn, and what else the vocabulary has of that kind."""
        return self._vocab.stop_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """Control and unknown tokens: `skip_special` hides them."""
        return self._vocab.special_ids

    @property
    def byte_ids(self) -> frozenset[int]:
        """Tokens that stand for one byte where a character has no token of its own (<0x00> to <0xFF> of "spm")."""
        return frozenset(i for i, kind in enumerate(self._vocab.types) if kind == TokenType.BYTE)

    def token_text(self, index: int) -> str:
        """A token as the file writes it, for showing."""
        return self._vocab.tokens[self._checked(index)]

    def token_bytes(self, index: int) -> bytes:
        """The bytes of a token; a control token gives its name. One token may hold part of a character only.

        Raises:
            UserError: the id is outside the vocabulary.
        """
        index = self._checked(index)
        if self._vocab.types[index] in (TokenType.UNDEFINED, TokenType.UNUSED):
            return b""
        return self._codec.token_bytes(index)

    def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Ids of a text.

        Args:
            text: any valid Unicode.
            add_special: add BOS and EOS where the file asks for them.
            parse_special: read the names of control tokens in `text` as those tokens.

        Raises:
            UserError: `text` is no valid Unicode string.
        """
        self._check_text(text)
        ids = [self._vocab.special["bos"]] if add_special and self.add_bos else []
        after_special = True
        for part in self._split(text, parse_special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._codec.encode(" " + part if after_special and self.add_space_prefix else part)
            after_special = isinstance(part, int)
        if add_special and self.add_eos:
            ids.append(self._vocab.special["eos"])
        return ids

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids of bytes that continue a text: no control tokens, and no space before them.

        Bytes that are no valid UTF-8, such as a part of a character, become the tokens of single bytes. A byte that has
        none is left out.
        """
        ids: list[int] = []
        for part in _valid_parts(data):
            if isinstance(part, bytes):
                single = [self._codec.byte_id(byte) for byte in part]
                ids += [index for index in single if index is not None]
                continue
            for piece in self._split(part, parse_special=False):
                ids += [piece] if isinstance(piece, int) else self._codec.encode(piece)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """The text of some ids; bytes that are no valid UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            skip_special: leave control tokens out instead of printing their names.
            continues: the ids continue a text, so the space that `encode` puts before a text ("spm") stays.

        Raises:
            UserError: an id is outside the vocabulary.
        """
        stream = self.stream(skip_special=skip_special, continues=continues)
        return "".join([stream.push(index) for index in ids]) + stream.flush()

    def stream(self, *, skip_special: bool = True, continues: bool = True) -> "StreamDecoder":
        """A decoder that takes one id at a time; by default for ids that continue a prompt."""
        return StreamDecoder(self, skip_special=skip_special, continues=continues)

    @overload
    def apply_chat_template(
        self,
        messages: "Messages",
        add_generation_prompt: bool = True,
        tokenize: Literal[False] = False,
    ) -> str: ...
    @overload
    def apply_chat_template(
        self, messages: "Messages", add_generation_prompt: bool = True, *, tokenize: Literal[True]
    ) -> list[int]: ...
    def apply_chat_template(
        self, messages: "Messages", add_generation_prompt: bool = True, tokenize: bool = False
    ) -> str | list[int]:
        """Renders a chat with the file's template.

        Args:
            messages: `{"role": ..., "content": ...}`, in order.
            add_generation_prompt: end with the beginning of the assistant's turn.
            tokenize: return ids instead of text. The template writes BOS itself where the model wants it: text that it
                rendered is encoded with `parse_special` and without `add_special`.

        Raises:
            UserError: no template, a template that fails, or messages of another form.
        """
        text = self._chat.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, parse_special=True) if tokenize else text

    @cached_property
    def _chat(self) -> "ChatTemplate":
        from specsparse.engine.text.chat_template import ChatTemplate  # brings jinja2

        tokens = {name: self._vocab.tokens[i] for name, i in self._vocab.special.items()}
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        variables = {f"{short}_token": tokens.get(name, "") for short, name in names.items()}
        return ChatTemplate(self._template, variables, where=self._vocab.where)

    def library(self) -> "tokenizers.Tokenizer":
        """The same tokenizer as one of the `tokenizers` library; it reads special tokens in a text, adds BOS and EOS.

        Ids are the same but for a sentencepiece vocabulary whose merges do not follow from its tokens; compare.
        """
        from specsparse.engine.text.library import as_library

        how = {"bos": self.add_bos, "eos": self.add_eos, "space_prefix": self.add_space_prefix}
        return as_library(self._vocab, self._codec, **how)

    def _adds(self, name: str, value: bool, metadata: Mapping[str, object]) -> bool:
        if not value or name in self._vocab.special:
            return value
        if f"tokenizer.ggml.add_{name}_token" in metadata:
            raise UserError(f"{self._vocab.where}: add_{name}_token is set, but there is no {name}_token_id")
        return False

    def _checked(self, index: int) -> int:
        try:
            index = operator.index(index)
        except TypeError:
            raise UserError(f"{index!r:.40} is not a token id") from None
        if not 0 <= index < len(self._vocab):
            raise UserError(f"token id {index} is outside the vocabulary of {len(self._vocab)}")
        return index

    def _check_text(self, text: str) -> None:
        if not isinstance(text, str):
            raise UserError(f"text must be a string, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"text is not valid Unicode: a lone surrogate at character {error.start}") from None

    def _split(self, text: str, parse_special: bool) -> list[str | int]:
        """Cuts user-defined tokens, and control tokens if asked, out of a text; longer names go first."""
        parts: list[str | int] = [text] if text else []
        for name, index in self._vocab.fixed:
            if name not in text:
                continue
            if not parse_special and self._vocab.types[index] != TokenType.USER_DEFINED:
                continue
            parts = [piece for part in parts for piece in _cut(part, name, index)]
        return parts


class StreamDecoder:
    """Ids to text, one at a time: never half a character, and in sum the same text as `Tokenizer.decode`."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continues: bool = True):
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.add_space_prefix and not continues

    def push(self, index: int) -> str:
        """The text that is complete with this id, which may be none.

        Raises:
            UserError: the id is outside the vocabulary.
        """
        data = self._tokenizer.token_bytes(index)
        if index in self._skip:
            return ""
        if self._strip and data and index not in self._tokenizer.special_ids:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for bytes that no character came of. The decoder can be used again."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def _valid_parts(data: bytes) -> Iterator[str | bytes]:
    """Texts, and between them the bytes that are no valid UTF-8."""
    while data:
        try:
            yield data.decode()
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield data[: error.start].decode()
            yield data[error.start : error.end]
            data = data[error.end :]


def _cut(part: str | int, name: str, index: int) -> list[str | int]:
    if isinstance(part, int) or name not in part:
        return [part]
    pieces: list[str | int] = []
    for piece in part.split(name):
        pieces += [piece, index] if piece else [index]
    return pieces[:-1]
