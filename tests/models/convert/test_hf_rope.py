"""YaRN of a config: a file's rotary embedding turns as transformers' does, or the option that cannot be said is named.

`yarn_of_transformers.json` is what `ROPE_INIT_FUNCTIONS["yarn"]` of transformers 5.23.0 gave for each scaling, for a
Llama of head size 16, theta 10000 and 4096 positions.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import specsparse
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.rope import rope_tables
from specsparse.errors import UserError
from specsparse.models.convert.hf import convert_hf
from specsparse.testing import write_tiny_gguf
from tests.models.convert import checkpoints
from tests.tolerances import FORWARD_NMSE, nmse

THEIRS = {
    case.pop("name"): case for case in json.loads((Path(__file__).parent / "yarn_of_transformers.json").read_text())
}
BY_FACTORS = {"beta_fast", "beta_slow", "truncate", "all"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
IDS = [1, 40, 41, 250, 7, 7, 90, 12, 33, 200, 201, 5, 77, 78, 150, 3] * 3


def converted(tmp_path, scaling, notes=None, **changes):
    config = {**checkpoints.CONFIG, "max_position_embeddings": 4096, "rope_scaling": scaling, **changes}
    w = checkpoints.weights(config, bias=changes == QWEN2)
    folder = checkpoints.save(tmp_path / "in", config, w)
    checkpoints.bpe_tokenizer(folder)
    note = notes.append if notes is not None else lambda line: None
    return config, w, convert_hf(folder, tmp_path / "out.gguf", type_name="f32", note=note)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("name", THEIRS)
def test_the_angles_are_those_of_transformers(tmp_path, name, architecture):
    theirs, notes = THEIRS[name], []
    changes = QWEN2 if architecture == "qwen2" else {}
    if changes and theirs["rope_scaling"].get("truncate") is False:
        with pytest.raises(UserError, match=r"'yarn' with truncate=false has no place in a qwen2 GGUF"):
            converted(tmp_path, theirs["rope_scaling"], **changes)
        return
    _, _, found = converted(tmp_path, theirs["rope_scaling"], notes, **changes)
    f = open_gguf(tmp_path / "out.gguf")
    factors = f.tensors["rope_freqs.weight"].dequantize() if "rope_freqs.weight" in f.tensors else None
    assert (factors is not None) == (name in BY_FACTORS and not changes)
    cos, sin = (table.astype(np.float64) for table in rope_tables(found.rope, 1001, factors))
    for position in (1, 1000):
        angle = position * np.array(theirs["inv_freq"])
        np.testing.assert_allclose(cos[position], np.cos(angle) * theirs["attention_factor"], atol=2e-4)
        np.testing.assert_allclose(sin[position], np.sin(angle) * theirs["attention_factor"], atol=2e-4)
    assert len(notes) == (name in BY_FACTORS and bool(changes))
    assert all("llama.cpp reads no beta_fast" in line for line in notes)


@pytest.mark.parametrize("name", ["attention_factor", "all"])
def test_the_logits_are_those_of_transformers(tmp_path, name):
    theirs = THEIRS[name]
    config, w, _ = converted(tmp_path, theirs["rope_scaling"])
    model = specsparse.load(tmp_path / "out.gguf", kv_dtype="f32")
    wanted = checkpoints.logits(config, w, IDS, np.array(theirs["inv_freq"]), theirs["attention_factor"])
    assert nmse(model.logits(IDS), wanted) <= FORWARD_NMSE["f32"]


def test_trained_positions_beside_the_scaling_come_first(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    _, _, found = converted(tmp_path, scaling, original_max_position_embeddings=1024)
    assert found.rope.original_context == 1024 and found.rope.scaling == "yarn"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"mrope_section": [1, 2]}, "'yarn' with mrope_section is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"truncate": "no"}, "truncate"),
        ({"beta_fast": -1}, "beta_fast is -1"),
        ({"attention_factor": "x"}, "attention_factor"),
        ({"factor": 10**400}, "factor is 1000"),
        ({"original_max_position_embeddings": 0.5}, "original_max_position_embeddings is 0, a whole number"),
        ({"rope_theta": 1.0}, "rope_theta is 1, a number above 1"),
        ({"factor": 0.5}, "factor is 0.5"),
    ],
)
def test_what_cannot_be_said_is_named(tmp_path, more, says):
    with pytest.raises(UserError, match=says):
        converted(tmp_path, {"rope_type": "yarn", "factor": 4.0, **more})


def test_a_logarithmic_multiplier_in_a_file_is_refused(tmp_path):
    key = "llama.rope.scaling.yarn_log_multiplier"
    with pytest.raises(UserError, match=r"yarn_log_multiplier' is 0.5, only 0 is supported"):
        specsparse.load(write_tiny_gguf(tmp_path / "t.gguf", metadata={key: 0.5}))
