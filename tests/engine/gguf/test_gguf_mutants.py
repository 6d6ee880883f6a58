"""Damaged copies of small models: an error in one line or a result and nothing else, from the header to four tokens."""

import time

import pytest

from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.testing import Runner, load_everything, mutate, write_tiny_gguf

N = 300
KINDS = {
    "bpe": {"quant": "Q4_0", "d_model": 32, "d_ff": 32, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 262},
    "spm": {"tokenizer": "spm", "quant": "F16", "d_model": 16, "d_ff": 16, "n_heads": 2, "vocab_size": 262},
    "bare": {"tokenizer": "none", "vocab_size": 11, "rope_scaling": "yarn", "rope_factor": 2.0, "freq_factors": True},
}
COMPILING_S = 20  # a mutant of a new shape compiles its own program


@pytest.mark.parametrize("kind", KINDS)
def test_mutants_end_in_one_line_or_a_result(tmp_path, kind):
    valid = write_tiny_gguf(tmp_path / "valid.gguf", n_layers=1, **KINDS[kind])
    blob = valid.read_bytes()
    header = len(blob) - sum(tensor.nbytes for tensor in open_gguf(valid).tensors.values())
    path = tmp_path / "mutant.gguf"
    refused, run = 0, Runner()
    load_everything(valid, then=run)
    assert run.ran == 1
    for seed in range(N // len(KINDS)):
        path.write_bytes(mutate(blob, seed, header=header))
        start = time.perf_counter()
        try:
            load_everything(path, then=run)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 1500
        except Exception as error:
            raise AssertionError(f"mutant {seed} of {kind}") from error
        assert time.perf_counter() - start < COMPILING_S
    assert run.ran > 2
    assert refused > N // len(KINDS) // 3  # the damage is real


def test_mutants_are_repeatable_and_differ():
    blob = bytes(range(256)) * 4
    assert mutate(blob, 5) == mutate(blob, 5)
    assert len({mutate(blob, seed) for seed in range(50)}) > 45
