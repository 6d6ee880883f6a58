"""How a model is divided: the sizes of the parts, what is refused, and a mesh of one device bit for bit."""

import jax
import numpy as np
import pytest

import specsparse
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.mesh import Split, make_mesh
from specsparse.errors import UserError
from specsparse.speculative.drafters import get_drafter
from specsparse.testing import write_tiny_gguf
from tests.powerinfer.tiny import write_tiny_powerinfer

IDS = list(range(5, 25))


def split_of(tmp_path, ways, *, floats=False, **model):
    f = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", n_layers=1, **model))
    return Split.from_gguf(f, ModelConfig.from_gguf(f), ways, floats=floats)


@pytest.mark.parametrize(
    ("model", "ways", "kv_heads", "d_ff", "vocab_size"),
    [
        ({"quant": "F32"}, 2, 2, 96, 320),  # 48 neurons each
        ({"quant": "Q8_0"}, 2, 2, 128, 320),  # 64: whole blocks of 32
        ({"quant": "Q8_0", "n_heads": 6, "n_kv_heads": 3, "d_model": 96}, 2, 4, 128, 320),  # two heads and one
        ({"quant": "F32", "n_heads": 8, "n_kv_heads": 8}, 2, 8, 96, 320),  # heads of 8 elements: pairs of them
        ({"quant": "Q4_K", "d_model": 512, "d_ff": 768, "n_heads": 8, "n_kv_heads": 4}, 2, 4, 1024, 320),
    ],
)
def test_parts_are_equal_and_hold_whole_heads_and_blocks(tmp_path, model, ways, kv_heads, d_ff, vocab_size):
    found = split_of(tmp_path, ways, **model)
    assert (found.kv_heads, found.d_ff, found.vocab_size) == (kv_heads, d_ff, vocab_size)


def test_a_device_without_a_head_or_a_neuron_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"8 key/value heads in shares of 2 .* would do: 1, 2, 4$"):
        split_of(tmp_path, 5, quant="F32", n_heads=8, n_kv_heads=8, d_ff=128)


def test_float_weights_have_no_blocks(tmp_path):
    model = {"quant": "Q4_K", "d_model": 512, "d_ff": 768, "n_heads": 4, "n_kv_heads": 4, "head_dim": 256}
    with pytest.raises(UserError, match=r"768 neurons in shares of 256 .* would do: 1, 2$"):
        split_of(tmp_path, 4, **model)
    assert split_of(tmp_path, 4, floats=True, **model).d_ff == 768


def test_a_mesh_of_one_device_gives_the_bits_of_none(tmp_path):
    """The vocabulary is filled up (300 to 304), and layers run as calls of their own instead of one for all."""
    path = write_tiny_gguf(tmp_path / "m.gguf", quant="Q4_1", n_layers=1)
    one, mesh = specsparse.load(path), specsparse.load(path, mesh=1)
    assert mesh.params.output.shape == (304, 64)
    assert np.array_equal(mesh.logits(IDS), one.logits(IDS))


@pytest.mark.parametrize("wanted", [0, -1, True, "2", 2.0])
def test_a_mesh_is_a_number_or_a_mesh(wanted):
    with pytest.raises(UserError, match=r"a number of devices or a jax\.sharding\.Mesh is needed"):
        make_mesh(wanted)


def test_more_devices_than_there_are():
    wanted = len(jax.devices()) + 1
    with pytest.raises(UserError, match=f"mesh={wanted}: .*JAX has {wanted - 1} "):
        make_mesh(wanted)


def test_what_reads_whole_matrices_is_refused(tmp_path):
    path = write_tiny_powerinfer(tmp_path / "m.powerinfer.gguf", n_layers=1, d_ff=64)
    with pytest.raises(UserError, match="mesh is for dense models"):
        specsparse.load(path, mesh=1)
    model = specsparse.load(write_tiny_gguf(tmp_path / "m.gguf", quant="F32"), mesh=1)
    for drafter in ("sparse_self", get_drafter("layer_skip", draft_vocab=50)):
        with pytest.raises(UserError, match="needs the whole model on one device: load it without mesh"):
            specsparse.generate(model, IDS, max_tokens=2, drafter=drafter, verifier="greedy")
