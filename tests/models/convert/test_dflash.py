"""`convert dflash` and `inspect` of DFlash drafters in their three forms."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import specsparse
from specsparse.cli import main as cli
from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.models.convert.heads import convert_head, read_dflash, write_folder
from specsparse.speculative.drafters import get_drafter
from specsparse.support import registry
from specsparse.testing import write_tiny_gguf
from specsparse.testing.drafting import random_dflash

DATA = Path(__file__).parents[2] / "data"
ORACLE, TARGET = DATA / "dflash", DATA / "eagle3" / "target.gguf"


def test_the_command_line(tmp_path, capsys):
    """From the library's folder to llama.cpp's form, to both forms of a folder; each is inspected, text and JSON."""
    drafter, gguf, folder = str(ORACLE), str(tmp_path / "d.gguf"), str(tmp_path / "d")
    assert cli.main(["convert", "dflash", drafter, gguf, "--target", str(TARGET), "--outtype", "f16"]) == 0
    assert "F16" in {t.type.name for t in open_gguf(Path(gguf)).tensors.values()}
    assert open_gguf(Path(gguf)).metadata["tokenizer.ggml.mask_token_id"] == 511
    assert cli.main(["convert", "dflash", gguf, folder]) == 0
    out = capsys.readouterr().out
    assert "config.json, model.safetensors (DFlash, 2 layers of width 32" in out
    assert json.loads((tmp_path / "d" / "config.json").read_text())["dflash_config"]["block_size"] == 6
    assert cli.main(["convert", "dflash", folder, f"{folder}s", "--form", "speculators"]) == 2
    assert "give --verifier OWNER/NAME" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert cli.main(["convert", "dflash", folder, f"{folder}s", "--verifier", str(tmp_path)]) == 0
    config = json.loads((tmp_path / "ds" / "config.json").read_text())["speculators_config"]
    assert config["verifier"] == {"name_or_path": str(tmp_path), "architectures": ["Qwen3ForCausalLM"]}
    for path in (drafter, gguf, folder, f"{folder}s"):
        capsys.readouterr()
        assert cli.main(["inspect", path]) == 0
        out = capsys.readouterr().out
        assert "what enters layers 1, 4, 6" in out and "6 rows, 5 tokens drafted, mask token 511" in out
        assert (f"drafter=dflash drafter.path={gguf}" in out.replace("\n", "")) == (path == gguf)
    assert cli.main(["inspect", drafter, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"] == "all ids of the target"
    assert cli.main(["inspect", gguf, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["head"]["options"] == "none"
    assert cli.main(["convert", "dflash", drafter, folder]) == 2  # it is there already
    assert cli.main(["inspect", str(TARGET), "--draft", gguf]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_options_are_shown(tmp_path, capsys):
    model = specsparse.load(write_tiny_gguf(tmp_path / "m.gguf"))
    options = {"windows": (5, None), "causal": (True, False), "windows_of_block": True}
    written = random_dflash(model, ids=range(9), from_anchor=True, **options)
    assert cli.main(["inspect", str(write_folder(written, tmp_path / "d"))]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "9 ids" in out and "output matrix" in out
    of_blocks = "a window of 5 on 1 of 2, the same for all rows of a block, causal inside the block on 1 of 2"
    assert f"{of_blocks}, sample_from_anchor" in out


def test_what_cannot_be_converted(tmp_path):
    model = write_tiny_gguf(tmp_path / "m.gguf")
    with pytest.raises(UserError, match="is for a target of width 32"):
        convert_head("dflash", ORACLE, tmp_path / "x.gguf", target=open_gguf(model))
    shallow = write_tiny_gguf(tmp_path / "s.gguf", d_model=32, n_layers=2, vocab_size=512)
    with pytest.raises(UserError, match=r"features at layer 6, s\.gguf has 2 layers"):
        convert_head("dflash", ORACLE, tmp_path / "x.gguf", target=open_gguf(shallow))
    with pytest.raises(UserError, match="give --target MODEL"):
        convert_head("dflash", ORACLE, tmp_path / "x.gguf")
    with pytest.raises(UserError, match="--outtype q8_0 is for a GGUF file"):
        convert_head("dflash", ORACLE, tmp_path / "x", quant="q8_0")
    with pytest.raises(UserError, match="is a GGUF file, --form is for folders"):
        convert_head("dflash", ORACLE, tmp_path / "x.gguf", form="authors")
    with pytest.raises(UserError, match="is no DFlash drafter: its architecture is 'llama'"):
        convert_head("dflash", TARGET, tmp_path / "x")
    assert not (tmp_path / "x").exists() and not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("mask_token_id", -1, "mask_token_id=-1 is no token id"), ("speculators_model_type", [3], "model_type")],
)
def test_wrong_values_are_one_line(tmp_path, capsys, key, value, words):
    folder = shutil.copytree(ORACLE, tmp_path / "d")
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(config))
    for command in (["inspect", str(folder)], ["convert", "dflash", str(folder), str(tmp_path / "o")]):
        assert cli.main(command) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and (words in err or "draft head" in err)


def test_frequency_factors_go_through_gguf(tmp_path):
    """A scaling as Llama 3.1's divides frequencies one by one: the file holds the divisors, of which no
    folder can be made."""
    folder = shutil.copytree(ORACLE, tmp_path / "d")
    config = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    config["transformer_layer_config"]["rope_parameters"] = scaling
    (folder / "config.json").write_text(json.dumps(config))
    first = read_dflash(folder)
    convert_head("dflash", folder, tmp_path / "d.gguf", target=open_gguf(TARGET))
    second = read_dflash(tmp_path / "d.gguf")
    assert first.rope_factors is not None and (first.rope_factors != 1).any()
    convert_head("dflash", folder, tmp_path / "again")  # config.json keeps what config.json said
    np.testing.assert_array_equal(read_dflash(tmp_path / "again").rope_factors, first.rope_factors)
    np.testing.assert_array_equal(second.rope_factors, first.rope_factors.astype(np.float32))
    with pytest.raises(UserError, match="write GGUF"):
        convert_head("dflash", tmp_path / "d.gguf", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_what_a_file_asks_for_and_does_not_get_is_said(tmp_path, capsys):
    folder = shutil.copytree(ORACLE, tmp_path / "d")
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["proposal_methods"][0]["verifier_accept_k"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    plan = get_drafter("dflash", path=str(folder))
    assert plan.head_file(lambda kind, spec: registry.load(kind, "")(Path(spec))).accept_k == 3
    assert "asks for verifier_accept_k=3, which is lossy" in capsys.readouterr().err
