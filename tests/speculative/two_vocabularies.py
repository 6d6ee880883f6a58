"""A pair of tiny models with different vocabularies, and the vocabularies that models have."""

from pathlib import Path

import pytest

from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.testing import write_tiny_gguf

VOCAB = Path(__file__).resolve().parents[3] / "shared" / "data" / "vocab"


def write_pair(folder: Path) -> dict[str, Path]:
    """Files of one model with a byte-level vocabulary like SmolLM2's and one of SentencePiece like Llama's; the context
    of the first ends inside the longest text."""
    config = {"quant": "Q4_0", "d_model": 64, "d_ff": 96, "n_layers": 1, "context_length": 80}
    other = {**config, "context_length": 96, "seed": 1}
    return {
        "bpe": write_tiny_gguf(folder / "bpe.gguf", tokenizer="bpe", vocab_size=300, **config),
        "spm": write_tiny_gguf(folder / "spm.gguf", tokenizer="spm", vocab_size=309, **other),
    }


def gpt_2_and_llama() -> tuple[Tokenizer, Tokenizer]:
    """Their tokenizers, of llama.cpp's test vocabularies; the test is skipped where those are not there."""
    found = []
    for name in ("gpt-2", "llama-spm"):
        path = VOCAB / f"ggml-vocab-{name}.gguf"
        if not path.exists():
            pytest.skip(f"{path} is missing: llama.cpp's test vocabularies are no part of the project")
        found.append(Tokenizer.from_metadata(open_gguf(path).metadata, where=path.name))
    return found[0], found[1]
