"""Damaged GGUF files, and the use of a file that loads: tokenizer, weights and a few tokens.

A correct loader answers a damaged file with a clear error or a correct result, never a crash or a hang.
"""

import struct
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from specsparse import api
from specsparse.engine import weights
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import GGUFFile, open_gguf
from specsparse.engine.rope import model_tables
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.testing.tiny import model_of, packed

_DAMAGES = ("flip", "flip", "cut", "overwrite", "overwrite", "overwrite a count", "swap", "repeat", "remove")
_NASTY = (0, 1, 2, 7, 8, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1)


def mutate(blob: bytes, seed: int, *, header: int | None = None) -> bytes:
    """A damaged copy of a file: bytes flipped, cut, fields overwritten, swapped, repeated or removed, or two of these.

    Args:
        blob: a valid file.
        seed: which damage; the same seed gives the same bytes.
        header: bytes before the tensor data, by default a third of the file; damage falls there nine times in ten.
    """
    rng = np.random.default_rng(seed)
    data = bytearray(blob)
    end = min(header or len(blob) // 3, len(blob))
    for _ in range(1 + (seed % 3 == 0)):
        region = end if rng.random() < 0.9 else len(data)
        _damage(data, rng, max(min(region, len(data)), 1))
    return bytes(data)


def _damage(data: bytearray, rng: np.random.Generator, end: int) -> None:
    """One damage before `end`; counts, lengths, types and offsets become nasty numbers."""
    match _DAMAGES[rng.integers(len(_DAMAGES))]:
        case "flip":
            for at in rng.integers(0, end, rng.integers(1, 5)):
                if at < len(data):
                    data[at] ^= 1 << int(rng.integers(8))
        case "cut":
            del data[int(rng.integers(0, end)) :]
        case "overwrite":
            size, at = int(rng.choice([4, 8])), int(rng.integers(0, end))
            value = _NASTY[rng.integers(len(_NASTY))] & (2 ** (8 * size) - 1)
            data[at : at + size] = struct.pack("<Q", value)[:size]
        case "overwrite a count":
            at = 8 + 8 * int(rng.integers(2))
            data[at : at + 8] = struct.pack("<Q", _NASTY[rng.integers(len(_NASTY))])
        case "swap":
            size = int(rng.choice([4, 8]))
            a, b = (int(x) for x in rng.integers(0, end, 2))
            data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
        case "repeat":
            at, size = int(rng.integers(0, end)), int(rng.integers(1, 64))
            data[at:at] = data[at : at + size]
        case "remove":
            at = int(rng.integers(0, end))
            del data[at : at + int(rng.integers(1, 64))]


def load_everything(path: str | Path, *, then: Callable[[GGUFFile, ModelConfig], None] | None = None) -> ModelConfig:
    """Loads everything in a file: header, config, RoPE tables, and every tensor as float32.

    Args:
        path: the file.
        then: a further step, such as running the model.

    Raises:
        UserError: the file is damaged. Any other exception is a bug.
    """
    f = open_gguf(path)
    config = ModelConfig.from_gguf(f)
    factors = f.tensors["rope_freqs.weight"].dequantize() if config.rope.freq_factors else None
    model_tables(config.ropes, min(config.context_length, 1024), factors)
    for tensor in f.tensors.values():
        if tensor.dequantize().shape != tensor.shape:
            raise AssertionError(f"{tensor.name}: shape {tensor.shape} promised")
    if then is not None:
        then(f, config)
    return config


class Runner:
    """Runs open files; the `then` of `load_everything`. Files of one config and layout share their programs.

    Attributes:
        models: by config and structure of the weights.
        ran: files that generated their tokens.
    """

    def __init__(self, tokens: int = 4):
        self.tokens = tokens
        self.models: dict = {}
        self.ran = 0

    def __call__(self, f: GGUFFile, config: ModelConfig) -> None:
        """Encodes a text and generates after it; a file without a tokenizer gives the logits of a few ids.

        Raises:
            UserError: tokenizer or weights are damaged, or the model's logits are not numbers.
        """
        has_tokenizer = any(key.startswith("tokenizer.") for key in f.metadata)
        tokenizer = Tokenizer.from_metadata(f.metadata, where=str(f.path)) if has_tokenizer else None
        params, factors = packed(f, config), weights.rope_factors(f, config)
        layout = config, jax.tree.structure(params)
        if layout not in self.models:
            self.models[layout] = model_of(f, config, None, params)
        own = {"params": params, "path": f.path, "rope_factors": factors, "tokenizer": tokenizer}
        model = self.models[layout].with_own_programs(**own)
        model.programs.tables.clear()
        if tokenizer is None:
            model.logits(np.arange(min(self.tokens, config.vocab_size, config.context_length)))
        else:
            tokenizer.decode(tokenizer.encode("hello, w\u00f6rld", add_special=True, parse_special=True))
            prompt = [config.vocab_size - 1, *range(min(3, config.vocab_size))][-config.context_length :]
            api.generate(model, prompt, max_tokens=self.tokens, ignore_eos=True)
        self.ran += 1
