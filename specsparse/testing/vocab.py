"""Small vocabularies of both tokenizer families, and a tokenizer that needs no file."""

from collections.abc import Sequence

TYPE_NORMAL, TYPE_UNKNOWN, TYPE_CONTROL, TYPE_UNUSED, TYPE_BYTE = 1, 2, 3, 5, 6
"""Values of `tokenizer.ggml.token_type` in use here."""

_SPECIAL: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES: tuple[str, ...] = (
    "Ġ t", "h e", "Ġ a", "i n", "r e", "Ġt he", "o n", "Ġ s", "e r", "a t", "Ġ w", "o r", "e n", "n d", "Ġ o", "Ġ c",
    "Ġa nd", "in g", "o u", "Ġ f", "e s", "i s", "Ġt o", "Ġ m", "l l", "Ġ Ġ", "Ġo f", "Ġ h", "i t", "l o", "Ġh e",
    "ll o", "Ġhe llo", "Ġw or", "l d", "Ġwor ld", "Ð ¿", "Ã ©", "1 2", "' s", "Ċ Ċ",
)  # fmt: skip
_PIECES: tuple[str, ...] = (
    "▁", "e", "t", "a", "o", "i", "n", "s", "h", "r", "d", "l", "u", "c", "m", "w", "f", "g", "y", "p", "b", "v", "k",
    ".", ",", "'", "▁t", "he", "▁a", "in", "▁the", "er", "on", "re", "▁s", "▁w", "or", "ll", "▁h", "▁he", "llo",
    "▁hello", "ld", "▁world", "▁wor", "é", "an", "nd", "▁and", "▁▁",
)  # fmt: skip


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 byte values, in order of the byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def bpe_vocabulary(size: int = 300) -> tuple[list[str], list[int], list[str]]:
    """Tokens, types and merges of a byte-level BPE: 3 special tokens, 256 bytes, merges, then unused ones up to `size`.

    `<|endoftext|>` is 0, `<|im_start|>` 1 and `<|im_end|>` 2; byte b is 3 + b.

    Raises:
        ValueError: size is below 259.
    """
    tokens = [*_SPECIAL, *byte_characters()]
    if size < len(tokens):
        raise ValueError(f"a byte-level vocabulary needs at least {len(tokens)} tokens, {size} asked for")
    merges = list(_MERGES[: size - len(tokens)])
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [TYPE_CONTROL] * len(_SPECIAL) + [TYPE_NORMAL] * (len(tokens) - len(_SPECIAL))
    tokens, types = _fill(tokens, types, size)
    return tokens, types, merges


def spm_vocabulary(size: int = 309) -> tuple[list[str], list[int], list[float]]:
    """Tokens, types and scores of a SentencePiece vocabulary with byte fallback, unused tokens filling up to `size`.

    `<unk>` is 0, `<s>` 1, `</s>` 2; byte b is 3 + b.

    Raises:
        ValueError: size is below 259.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    if size < len(tokens):
        raise ValueError(f"a vocabulary with byte fallback needs at least {len(tokens)} tokens, {size} asked for")
    types = [TYPE_UNKNOWN, TYPE_CONTROL, TYPE_CONTROL] + [TYPE_BYTE] * 256
    pieces = list(_PIECES[: size - len(tokens)])
    # Longer pieces score higher, so that every merge that can happen does.
    scores = [0.0] * len(tokens) + [10.0 * len(piece) - rank for rank, piece in enumerate(pieces)]
    tokens, types = _fill([*tokens, *pieces], types + [TYPE_NORMAL] * len(pieces), size)
    return tokens, types, scores + [-1000.0] * (size - len(scores))


def _fill(tokens: list[str], types: list[int], size: int) -> tuple[list[str], list[int]]:
    missing = size - len(tokens)
    return tokens + [f"<unused{i}>" for i in range(missing)], types + [TYPE_UNUSED] * missing


class DummyTokenizer:
    """Bytes as tokens: id b + 3 is byte b; 0 is padding, 1 begins a text, 2 ends it.

    Attributes:
        vocab_size: 259 or more; ids past the bytes decode to nothing.
        bos_id, eos_id: 1 and 2.
    """

    type = "bytes"
    add_bos = True
    add_eos = False
    bos_id = 1
    eos_id = 2
    unknown_id = 0
    stop_ids = frozenset({2})

    def __init__(self, vocab_size: int = 259):
        self.vocab_size = vocab_size

    def token_text(self, index: int) -> str:
        """A name for an id."""
        return f"<{index}>"

    def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """UTF-8 bytes of the text, after `bos_id` where `add_special`. There are no special strings to parse."""
        return [self.bos_id] * add_special + [byte + 3 for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the byte ids; half a character becomes U+FFFD, every other id nothing."""
        return bytes(i - 3 for i in ids if 3 <= i < 259).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> str:
        """One `role: content` line a message, and the assistant's turn opened."""
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "
