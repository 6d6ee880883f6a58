"""Named tensors and metadata -> a GGUF file in one type, checked by the engine's own rules before a byte is written."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType as GGML

from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import DEFAULT_ALIGNMENT, MAGIC, GGUFFile, TensorInfo
from specsparse.engine.gguf.requantise import file_type, type_for
from specsparse.engine.gguf.writer import VERSION, NewTensor, encode, write_gguf
from specsparse.errors import UserError
from specsparse.support.files import Json, need_folder
from specsparse.support.options import nearest

OUT_TYPES = {
    name.lower(): GGML[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q4_1", "MXFP4")
}
"""Types of a new file, by name."""
Progress = Callable[[int, int], None]
Source = tuple[str, tuple[int, ...], Callable[[], np.ndarray]]
"""Name in the GGUF file, shape, and a function that loads the values as float32."""


def out_type(name: str) -> GGML:
    """The type of that name, in any case; UserError, with those there are, for another one."""
    if name.lower() not in OUT_TYPES:
        raise UserError(f"type {name!r}: choose one of {', '.join(OUT_TYPES)}{nearest(name.lower(), OUT_TYPES)}")
    return OUT_TYPES[name.lower()]


def size_keys(
    architecture: str, name: str, *, vocab: int, context: int, width: int, layers: int, ffn: int, heads: int,
    kv_heads: int, eps: float, base: float, dim: int,
) -> Json:  # fmt: skip
    own = {
        "vocab_size": vocab, "context_length": context, "embedding_length": width, "block_count": layers,
        "feed_forward_length": ffn, "attention.head_count": heads, "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": eps, "rope.freq_base": base, "rope.dimension_count": dim,
    }  # fmt: skip
    about = {"general.architecture": architecture, "general.name": name}
    return about | {f"{architecture}.{key}": value for key, value in own.items()}


def keys_of(config: ModelConfig, name: str) -> Json:
    """The keys of a model file that say the sizes of a config, and its name."""
    c = config
    return size_keys(
        c.architecture, name, vocab=c.vocab_size, context=c.context_length, width=c.d_model, layers=c.n_layers,
        ffn=c.d_ff, heads=c.n_heads, kv_heads=c.n_kv_heads, eps=c.norm_eps, base=c.rope.base, dim=c.rope.dim,
    )  # fmt: skip


def write_model(
    path: str | os.PathLike[str], metadata: Json, sources: Iterable[Source], kind: GGML, *, output: GGML | None = None,
    progress: Progress = lambda done, total: None,
) -> ModelConfig:  # fmt: skip
    """Writes a model and returns its config; one tensor at a time is in memory, and the file appears when it is whole.
    UserError: tensors and metadata do not make a model that runs here, or the file cannot be written.

    Args:
        path: of the new file; replaced if it is there.
        metadata: keys of the model and its tokenizer.
        kind: of the matrices, by the rules of `engine.gguf.requantise.type_for`; vectors are float32.
        output: of the output matrix, if it is not to go by those rules.
        progress: called with (bytes written, bytes in all).
    """
    need_folder(path)
    sources = list(sources)
    tied = all(name != "output.weight" for name, _, _ in sources)
    done, nothing = 0, np.empty(0, np.uint8)

    def coded(load: Callable[[], np.ndarray], to: GGML) -> np.ndarray:
        nonlocal done
        raw = encode(load(), to)
        done += raw.nbytes
        progress(done, total)
        return raw

    tensors = []
    for name, shape, load in sources:
        to = type_for(name, shape, kind, tied=tied)
        if output is not None and name == ("token_embd.weight" if tied else "output.weight"):
            to = output
        tensors.append(NewTensor(name, to, shape, lambda load=load, to=to: coded(load, to)))
    total = sum(t.nbytes for t in tensors)
    keys = {k: float(np.float32(v)) if isinstance(v, float) else v for k, v in metadata.items()}  # as files have them
    keys |= {"general.file_type": file_type(kind), "general.quantization_version": 2}
    infos = {t.name: TensorInfo(t.name, t.type, t.shape, nothing, str(path)) for t in tensors}  # without its data
    config = ModelConfig.from_gguf(GGUFFile(Path(path), MAGIC, VERSION, DEFAULT_ALIGNMENT, keys, infos))
    write_gguf(path, keys, tensors)
    return config
