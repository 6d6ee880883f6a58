"""Text to token ids and back, from the metadata of a GGUF file. Ids are equal to llama.cpp's."""

import codecs
import operator
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Literal, overload

from specsparse.engine.text.bpe import BpeCodec
from specsparse.engine.text.spm import SpmCodec
from specsparse.engine.text.vocabulary import HIDDEN, TokenType, Vocab, read_vocab
from specsparse.errors import UserError

if TYPE_CHECKING:
    import tokenizers

    from specsparse.engine.text.chat_template import ChatTemplate, Messages


class Tokenizer:
    """A vocabulary and its rules; made by `from_metadata`.

    Attributes:
        type: "spm" or "bpe".
        bos_id, eos_id, unknown_id, eot_id: the tokens that begin and end a sequence, stand for text without a token,
            and end a turn of a chat; or None.
        stop_ids: all tokens that end a generation: EOS, end of turn, and others of that kind.
        add_bos: whether `encode(..., add_special=True)` puts BOS first.
        add_eos: whether it puts EOS last.
        add_space_prefix: whether a text and text after a special token begin with a space ("spm").
    """

    def __init__(self, vocab: Vocab, codec: SpmCodec | BpeCodec, *, add_bos: bool):
        self._vocab, self._codec, self.type, keys = vocab, codec, vocab.kind, vocab.keys
        adds = {"bos": keys.flag("add_bos_token", add_bos), "eos": keys.flag("add_eos_token", False)}
        for name, value in adds.items():
            if value and name not in vocab.special and keys.get(f"add_{name}_token") is not None:
                keys.fail(f"add_{name}_token is set, but there is no {name}_token_id")
        self.add_bos, self.add_eos = (value and name in vocab.special for name, value in adds.items())
        self.add_space_prefix = keys.flag("add_space_prefix", True) and vocab.kind == "spm"
        self.vocab_size, self.stop_ids = len(vocab), vocab.stop_ids
        self.bos_id, self.eos_id, self.unknown_id, self.eot_id = map(
            vocab.special.get, ("bos", "eos", "unknown", "eot")
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], *, where: str) -> "Tokenizer":
        """Reads `tokenizer.*` of GGUF keys and values; `where` names the file in messages. Raises as `read_vocab`."""
        vocab = read_vocab(metadata, where=where)
        if vocab.kind == "spm":
            return cls(vocab, SpmCodec(vocab), add_bos=True)
        codec = BpeCodec(vocab)
        return cls(vocab, codec, add_bos=codec.pre.add_bos)

    @property
    def special_ids(self) -> frozenset[int]:
        """Control and unknown tokens, which `skip_special` hides."""
        return self._vocab.special_ids

    @property
    def byte_ids(self) -> frozenset[int]:
        """Tokens that stand for one byte if a character has no token of its own (<0x00> to <0xFF> of "spm")."""
        return frozenset(i for i, kind in enumerate(self._vocab.types) if kind == TokenType.BYTE)

    def token_text(self, index: int) -> str:
        """A token as the file writes it, for showing."""
        return self._vocab.tokens[self._checked(index)]

    def token_bytes(self, index: int) -> bytes:
        """The bytes of a token, perhaps part of a character, or a control token's name. UserError for an unknown id."""
        index = self._checked(index)
        text, kind = self._vocab.tokens[index], self._vocab.types[index]
        if kind in (TokenType.UNDEFINED, TokenType.UNUSED):
            return b""
        if kind == TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        return self._codec.text_bytes(text) if kind == TokenType.NORMAL else text.encode()

    def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Ids of a text. UserError: `text` is not a valid Unicode string.

        Args:
            text: any valid Unicode.
            add_special: add BOS and EOS if the file asks for them.
            parse_special: read the names of control tokens in `text` as those tokens.
        """
        try:
            text.encode()
        except (AttributeError, UnicodeEncodeError):
            raise UserError(f"text={text!r:.40} must be a valid Unicode string, without lone surrogates") from None
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

        Bytes that are not valid UTF-8, such as part of a character, become the tokens of single bytes. A byte without
        a token is left out.
        """
        ids: list[int] = []
        while data:
            try:
                text, wrong, data = data.decode(), b"", b""
            except UnicodeDecodeError as error:
                text, wrong, data = data[: error.start].decode(), data[error.start : error.end], data[error.end :]
            for piece in self._split(text, parse_special=False):
                ids += [piece] if isinstance(piece, int) else self._codec.encode(piece)
            ids += [index for byte in wrong if (index := self._codec.byte_id(byte)) is not None]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """The text of some ids; bytes that are not valid UTF-8 become U+FFFD. UserError: an id is outside the
        vocabulary.

        Args:
            skip_special: leave control tokens out instead of printing their names.
            continues: the ids continue a text, so the space that `encode` puts before a text ("spm") stays.
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
        add_generation_prompt: bool = ...,
        tokenize: Literal[False] = ...,
        chat_template_kwargs: Mapping[str, object] | None = ...,
    ) -> str: ...
    @overload
    def apply_chat_template(
        self,
        messages: "Messages",
        add_generation_prompt: bool = ...,
        *,
        tokenize: Literal[True],
        chat_template_kwargs: Mapping[str, object] | None = ...,
    ) -> list[int]: ...
    def apply_chat_template(
        self, messages: "Messages", add_generation_prompt: bool = True, tokenize: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> str | list[int]:  # fmt: skip
        """Renders a chat with the file's template. UserError: no template, a template that fails, or messages of
        another form.

        Args:
            add_generation_prompt: end with the beginning of the assistant's turn.
            tokenize: return ids instead of text. The template writes BOS itself if the model wants it: text that it
                rendered is encoded with `parse_special` and without `add_special`.
            chat_template_kwargs: further variables of the template, such as {"enable_thinking": False}.
        """
        text = self._chat.render(messages, add_generation_prompt=add_generation_prompt, more=chat_template_kwargs)
        return self.encode(text, parse_special=True) if tokenize else text

    @cached_property
    def _chat(self) -> "ChatTemplate":
        from specsparse.engine.text.chat_template import ChatTemplate  # brings jinja2

        keys, tokens = self._vocab.keys, {name: self._vocab.tokens[i] for name, i in self._vocab.special.items()}
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        variables = {f"{short}_token": tokens.get(name, "") for short, name in names.items()}
        return ChatTemplate(keys.metadata.get("tokenizer.chat_template"), variables, where=keys.where)

    def library(self) -> "tokenizers.Tokenizer":
        """The same tokenizer as one of the `tokenizers` library; it reads special tokens in a text, adds BOS and EOS.

        Ids are the same but for a sentencepiece vocabulary whose merges do not follow from its tokens; compare.
        """
        import tokenizers
        from tokenizers import processors

        vocab, library = self._vocab, self._codec.library(space_prefix=self.add_space_prefix)
        for text, index in vocab.fixed:
            token = tokenizers.AddedToken(text, normalized=False)
            (library.add_special_tokens if vocab.types[index] in HIDDEN else library.add_tokens)([token])
        ends = {name: vocab.special[name] for name, adds in (("bos", self.add_bos), ("eos", self.add_eos)) if adds}
        if ends:
            texts = {name: [vocab.tokens[index]] for name, index in ends.items()}
            single = [*texts.get("bos", []), "$A", *texts.get("eos", [])]
            pair = [*single, *(part.replace("$A", "$B") + ":1" for part in single)]
            special = [(vocab.tokens[index], index) for index in ends.values()]
            library.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
        return library

    def _checked(self, index: int) -> int:
        try:
            found = operator.index(index)
        except TypeError:
            raise UserError(f"{index!r:.40} is not a token id") from None
        if not 0 <= found < len(self._vocab):
            raise UserError(f"token id {found!r:.40} is outside the vocabulary of {len(self._vocab)}")
        return found

    def _split(self, text: str, parse_special: bool) -> list[str | int]:
        """Cuts user-defined tokens, and control tokens if asked, out of a text; longer names go first.

        A name is looked for in the whole text, not part by part: a text of many such tokens has as many parts.
        """
        taken, found = bytearray(len(text)), []
        for name, index in self._vocab.fixed:
            if not (parse_special or self._vocab.types[index] == TokenType.USER_DEFINED):
                continue
            at = text.find(name)
            while at >= 0:
                end, last = at + len(name), taken.rfind(1, at, at + len(name))
                if last < 0:
                    taken[at:end] = bytes([1]) * len(name)
                    found.append((at, index, end))
                at = text.find(name, end if last < 0 else last + 1)
        parts: list[str | int] = []
        at = 0
        for start, index, end in sorted(found):
            parts += [text[at:start], index] if at < start else [index]
            at = end
        return [*parts, text[at:]] if at < len(text) else parts


class StreamDecoder:
    """Ids to text, one at a time: never half a character, and in sum the same text as `Tokenizer.decode`."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continues: bool = True):
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.add_space_prefix and not continues

    def push(self, index: int) -> str:
        """The text that is complete with this id, which may be empty. Raises UserError for an unknown id."""
        data = self._tokenizer.token_bytes(index)
        if index in self._skip:
            return ""
        if self._strip and data and index not in self._tokenizer.special_ids:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The text that is left at the end: U+FFFD for part of a character. The decoder can be used again."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text
