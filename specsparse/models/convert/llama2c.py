"""A model of llama2.c (model.bin and tokenizer.bin) -> a GGUF file.

model.bin: seven int32 (width, FFN, layers, heads, key/value heads, vocabulary, context), then float32 tensors, those of
all layers together. A negative vocabulary size means an output matrix of its own. https://github.com/karpathy/llama2.c
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.text.spm import SPACE
from specsparse.engine.text.vocabulary import TokenType
from specsparse.errors import UserError
from specsparse.models.convert.write import Progress, Source, out_type, write_model
from specsparse.support.files import Json

_HEADER = struct.Struct("<7i")
_NEW_MAGIC = 0x616B3432


@dataclass(frozen=True)
class Header:
    """The seven numbers; `shared` tells whether the output matrix is the embedding."""

    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    context: int
    shared: bool

    @property
    def kv(self) -> int:
        """Rows of a key matrix."""
        return self.d_model // self.n_heads * self.n_kv_heads


def convert_llama2c(
    model: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    type_name: str = "f32",
    progress: Progress = lambda done, total: None,
) -> ModelConfig:
    """Converts.

    Args:
        model: model.bin in the first version of the format, float32.
        tokenizer: tokenizer.bin.
        path: of the new file.
        type_name: of `write.OUT_TYPES`.
        progress: called with (bytes written, bytes in all).

    Raises:
        UserError: a file is missing, of another format, or of another size than its header asks for.
    """
    kind, source = out_type(type_name), Path(model)
    h = read_header(source)
    tensors = list(_sources(source, h))
    keys = {
        "general.architecture": "llama",
        "general.name": source.stem,
        "llama.vocab_size": h.vocab_size,
        "llama.context_length": h.context,
        "llama.embedding_length": h.d_model,
        "llama.block_count": h.n_layers,
        "llama.feed_forward_length": h.d_ff,
        "llama.attention.head_count": h.n_heads,
        "llama.attention.head_count_kv": h.n_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": h.d_model // h.n_heads,
    }
    return write_model(path, keys | _tokenizer(Path(tokenizer), h.vocab_size), tensors, kind, progress=progress)


def _read(path: Path, count: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_header(path: Path) -> Header:
    """The header of model.bin.

    Raises:
        UserError: too short, a later version, or numbers that make no model.
    """
    data = _read(path, _HEADER.size)
    if len(data) < _HEADER.size:
        raise UserError(f"{path}: has {len(data)} bytes, and a llama2.c model begins with {_HEADER.size}")
    numbers = _HEADER.unpack(data)
    if numbers[0] == _NEW_MAGIC:
        raise UserError(f"{path}: is of a later version of the format; export it with --version 0")
    header = Header(*numbers[:5], abs(numbers[5]), numbers[6], shared=numbers[5] > 0)
    sizes = (*numbers[:5], header.vocab_size, header.context)
    divides = min(sizes) > 0 and header.d_model % header.n_heads == 0 and header.n_heads % header.n_kv_heads == 0
    if not divides or max(sizes) > 1 << 24:
        raise UserError(f"{path}: is no model of llama2.c: its header reads {', '.join(map(str, numbers))}")
    return header


def _sources(path: Path, h: Header) -> Iterator[Source]:
    """Every tensor, where it lies in the file.

    Raises:
        UserError: the file is shorter than its header asks for.
    """
    layers, d, f = h.n_layers, h.d_model, h.d_ff
    parts = (
        ("token_embd", 0, (h.vocab_size, d)), ("attn_norm", layers, (d,)), ("attn_q", layers, (d, d)),
        ("attn_k", layers, (h.kv, d)), ("attn_v", layers, (h.kv, d)), ("attn_output", layers, (d, d)),
        ("ffn_norm", layers, (d,)), ("ffn_gate", layers, (f, d)), ("ffn_down", layers, (d, f)),
        ("ffn_up", layers, (f, d)), ("output_norm", 0, (d,)),
        (None, 2, (h.context, d // h.n_heads // 2)),  # tables of cos and sin, which nothing reads
        *(() if h.shared else (("output", 0, (h.vocab_size, d)),)),
    )  # fmt: skip
    at, size = _HEADER.size, path.stat().st_size
    for name, count, shape in parts:
        for i in range(count or 1):
            start, at = at, at + 4 * int(np.prod(shape))
            if at > size:
                raise UserError(f"{path}: ends at byte {size}, and its header asks for more: truncated")
            if name is not None:
                full = f"blk.{i}.{name}.weight" if count else f"{name}.weight"
                yield full, shape, lambda start=start, shape=shape: np.memmap(path, "<f4", "r", start, shape)
    if at != size:
        raise UserError(f"{path}: has {size} bytes, and its header asks for {at}")


def _tokenizer(path: Path, size: int) -> Json:
    """Keys of tokenizer.bin: for each token a float32 score, an int32 length and its bytes, spaces as they are.

    Raises:
        UserError: it ends too early, or a token is no UTF-8.
    """
    data, at = _read(path), 4
    tokens, scores = [], []
    for i in range(size):
        if at + 8 > len(data):
            raise UserError(f"{path}: holds {i} tokens, and the model has {size}")
        score, length = struct.unpack_from("<fi", data, at)
        at += 8 + length
        if length < 0 or at > len(data):
            raise UserError(f"{path}: token {i} has {length} bytes, which the file does not hold")
        try:
            tokens.append(str(data[at - length : at], "utf-8"))
        except UnicodeDecodeError:
            raise UserError(f"{path}: token {i} is not valid UTF-8; it is no tokenizer.bin of llama2.c") from None
        scores.append(score)
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    types += [TokenType.NORMAL] * (size - len(types))
    rest = [token.replace(" ", SPACE) for token in tokens[len(first) :]]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": (first + rest)[:size],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [int(kind) for kind in types[:size]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }
