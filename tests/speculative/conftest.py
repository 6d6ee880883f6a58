"""The targets of the published block drafters: the oracles' own, and a tiny one of another vocabulary."""

from pathlib import Path

import pytest

import specsparse
from specsparse.testing import write_tiny_gguf

CAPACITY = 64


@pytest.fixture(scope="module")
def target():
    loaded = specsparse.load(Path(__file__).parents[1] / "data" / "eagle3" / "target.gguf", kv_dtype="f32")
    loaded.params_for(CAPACITY)  # kept by the model: not to be made first inside a trace
    return loaded


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    loaded = specsparse.load(
        write_tiny_gguf(path, quant="F32", vocab_size=300, context_length=CAPACITY), kv_dtype="f32"
    )
    loaded.params_for(CAPACITY)
    return loaded
