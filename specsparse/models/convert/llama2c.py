"""A model of llama2.c (model.bin and tokenizer.bin) -> a GGUF file.

model.bin: seven int32 (width, FFN, layers, heads, key/value heads, vocabulary, context), then float32 tensors, those of
all layers together. A negative vocabulary size means an output matrix of its own. tokenizer.bin: for each token a
float32 score, an int32 length and its bytes, spaces as they are. https://github.com/karpathy/llama2.c
"""

import os
import struct
from pathlib import Path

import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.text.spm import SPACE
from specsparse.engine.text.vocabulary import TokenType
from specsparse.errors import UserError, refuse
from specsparse.models.convert.write import Progress, Source, out_type, size_keys, write_model
from specsparse.support.files import Json

_HEADER = struct.Struct("<7i")
_NEW_MAGIC = 0x616B3432


def convert_llama2c(
    model: str | os.PathLike[str], tokenizer: str | os.PathLike[str], path: str | os.PathLike[str], *,
    type_name: str = "f32", progress: Progress = lambda done, total: None,
) -> ModelConfig:  # fmt: skip
    """Converts model.bin (the first version of the format, float32) and tokenizer.bin. UserError: a file is missing, of
    another format, or of another size than its header asks for.

    Args:
        path: of the new file.
        type_name: of `write.OUT_TYPES`.
        progress: called with (bytes written, bytes in all).
    """
    kind, source = out_type(type_name), Path(model)
    head = _read(source, _HEADER.size)
    numbers = _HEADER.unpack(head.ljust(_HEADER.size, b"\0"))
    d, f, layers, heads, kv_heads, vocab, context = (abs(number) for number in numbers)
    wrong = {
        f"has {len(head)} bytes, and a llama2.c model begins with {_HEADER.size}": len(head) < _HEADER.size,
        "is of a later version of the format; export it with --version 0": numbers[0] == _NEW_MAGIC,
        f"is no model of llama2.c: its header reads {', '.join(map(str, numbers))}":
            min(*numbers[:5], vocab) < 1 or not 1 <= numbers[6] <= max(map(abs, numbers)) <= 1 << 24
            or d % max(heads, 1) or heads % max(kv_heads, 1),
    }  # fmt: skip
    kv = d // max(heads, 1) * kv_heads
    parts = (
        ("token_embd", 0, (vocab, d)), ("attn_norm", layers, (d,)), ("attn_q", layers, (d, d)),
        ("attn_k", layers, (kv, d)), ("attn_v", layers, (kv, d)), ("attn_output", layers, (d, d)),
        ("ffn_norm", layers, (d,)), ("ffn_gate", layers, (f, d)), ("ffn_down", layers, (d, f)),
        ("ffn_up", layers, (f, d)), ("output_norm", 0, (d,)),
        (None, 2, (context, d // max(heads, 1) // 2)),  # tables of cos and sin, which nothing reads
        *(() if numbers[5] > 0 else (("output", 0, (vocab, d)),)),
    )  # fmt: skip
    whole = _HEADER.size + sum(4 * (count or 1) * int(np.prod(shape)) for _, count, shape in parts)
    size = source.stat().st_size
    wrong[f"has {size} bytes, and its header asks for {whole}"] = size != whole
    refuse(wrong, source)

    tensors: list[Source] = []
    at = _HEADER.size
    for name, count, shape in parts:
        for i in range(count or 1):
            start, at = at, at + 4 * int(np.prod(shape))
            if name is not None:
                full = f"blk.{i}.{name}.weight" if count else f"{name}.weight"
                tensors.append(
                    (full, shape, lambda start=start, shape=shape: np.memmap(source, "<f4", "r", start, shape))
                )
    keys = size_keys(
        "llama",
        source.stem,
        vocab=vocab,
        context=context,
        width=d,
        layers=layers,
        ffn=f,
        heads=heads,
        kv_heads=kv_heads,
        eps=1e-5,
        base=10000.0,
        dim=d // heads,
    )
    return write_model(path, keys | _tokenizer(Path(tokenizer), vocab), tensors, kind, progress=progress)


def _read(path: Path, count: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _tokenizer(path: Path, size: int) -> Json:
    """Keys of tokenizer.bin; UserError if it ends too early, or a token is no UTF-8."""
    data, at = _read(path), 4
    tokens, scores = [], []
    try:
        for _ in range(size):
            score, length = struct.unpack_from("<fi", data, at)
            (text,) = struct.unpack_from(f"<{length}s", data, at + 8)
            tokens.append(str(text, "utf-8"))
            scores.append(score)
            at += 8 + length
    except (struct.error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is no tokenizer.bin of {size} tokens: token {len(tokens)}: {error}") from None
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
