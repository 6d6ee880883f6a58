"""EAGLE-3 heads in three forms: what is read, what is written, and what is refused by name."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specsparse
from specsparse.cli import main as cli
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.rope import interleaved
from specsparse.errors import UserError
from specsparse.models.convert.heads import convert_head, read_eagle3, write_folder
from specsparse.powerinfer.torch_zip import write_torch
from specsparse.testing import write_tiny_gguf
from specsparse.testing.drafting import random_eagle3, random_head

ORACLE = Path(__file__).parents[2] / "data" / "eagle3"
TARGET = ORACLE / "target.gguf"
FORMS = ["original", "speculators", "gguf"]


def same(a, b) -> None:
    """The same head: options, layers, ids, and the bits of every tensor."""
    parts = ("target_width", "layers", "context", "vocab_size", "tensors")
    assert replace(a.shape, eps=float(np.float32(a.shape.eps))) == replace(b.shape, eps=float(np.float32(b.shape.eps)))
    assert {p: getattr(a, p) for p in parts} == {p: getattr(b, p) for p in parts}
    assert a.rope == b.rope or replace(a.rope, original_context=b.rope.original_context) == b.rope
    np.testing.assert_array_equal(a.ids, b.ids)
    for name in a.tensors:
        np.testing.assert_array_equal(a.values(name), b.values(name))


def write(source, folder, form):
    out = folder / (f"{form}.gguf" if form == "gguf" else form)
    named = {"verifier": str(verifier(folder))} if form == "speculators" else {}
    options = {"target": open_gguf(TARGET)} if form == "gguf" else {"form": form}
    convert_head("eagle3", source, out, **options, **named)
    return out


def verifier(folder):
    """A folder that says what the target is, by its model_type alone."""
    (folder / "target").mkdir(exist_ok=True)
    (folder / "target" / "config.json").write_text('{"model_type": "llama"}')
    return folder / "target"


def test_a_speculators_folder_names_its_verifier(tmp_path, capsys):
    head, out = write(ORACLE / "default", tmp_path, "gguf"), tmp_path / "s"
    assert cli.main(["convert", "eagle3", str(head), str(out), "--form", "speculators"]) == 2
    assert "give --verifier OWNER/NAME" in capsys.readouterr().err and not out.exists()
    assert cli.main(["convert", "eagle3", str(head), str(out), "--verifier", str(verifier(tmp_path))]) == 0
    wanted = {"name_or_path": str(tmp_path / "target"), "architectures": ["LlamaForCausalLM"]}
    for folder in (out, convert_head("eagle3", out, tmp_path / "again", form="speculators") and tmp_path / "again"):
        assert json.loads((folder / "config.json").read_text())["speculators_config"]["verifier"] == wanted
    for options, says in (
        ({"form": "original", "verifier": "a/b"}, "--verifier names the target in a folder of --form speculators"),
        ({"verifier": "no-such"}, "--verifier no-such: is no folder"),
        ({"verifier": str(tmp_path / "again")}, "names no class"),
    ):
        if says == "names no class":
            (tmp_path / "again" / "config.json").write_text("{}")
        with pytest.raises(UserError, match=says):
            convert_head("eagle3", head, tmp_path / "x", **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head", ["default", "nbr"])
def test_a_head_goes_through_every_form(tmp_path, head, form):
    first = read_eagle3(ORACLE / head)
    out = write(ORACLE / head, tmp_path, form)
    same(first, read_eagle3(out))
    same(first, read_eagle3(write(out, tmp_path, next(f for f in FORMS if f != form))))


def test_biases_go_through_gguf(tmp_path):
    """llama.cpp turns neighbours: biases of queries and keys change places with the rows."""
    target = write_tiny_gguf(tmp_path / "m.gguf", quant="F32")
    file = random_eagle3(specsparse.load(target), biases=("attn_q", "attn_k", "attn_v"))
    same(file, read_eagle3(file.write_gguf(tmp_path / "h.gguf", tokenizer={})))


def test_paths_that_no_system_has_are_one_line(tmp_path):
    for path in ("~nobody-of-that-name/x", "x" * 5000):
        with pytest.raises(UserError):
            read_eagle3(path)
    folder = changed(tmp_path / "head")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(UserError, match=r"xxx: "):
        read_eagle3(folder)
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="cannot be read: maximum recursion depth"):
        read_eagle3(folder)


def test_the_gguf_form_is_the_one_that_llama_cpp_was_given(tmp_path):
    """The oracle's file was compared with llama.cpp; ours has its keys, its tensors and their bits."""
    theirs, ours = open_gguf(ORACLE / "default" / "eagle3.gguf"), open_gguf(write(ORACLE / "default", tmp_path, "gguf"))
    assert {name: t.shape for name, t in ours.tensors.items()} == {name: t.shape for name, t in theirs.tensors.items()}
    for name, tensor in theirs.tensors.items():
        assert ours.tensors[name].type == tensor.type and np.array_equal(ours.tensors[name].raw, tensor.raw), name
    keys = set(theirs.metadata) - {"tokenizer.ggml.add_bos_token"}
    assert keys <= set(ours.metadata)
    for key in keys:
        assert np.array_equal(ours.metadata[key], theirs.metadata[key]), key
    rows = np.arange(24).reshape(12, 2)
    assert interleaved(rows, 2)[:, 0].tolist() == [0, 6, 2, 8, 4, 10, 12, 18, 14, 20, 16, 22]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_pytorch_model_bin_and_a_single_file_are_read(tmp_path, dtype):
    tensors = {name: t.astype(dtype) if t.dtype.kind == "f" else t for name, t in weights("default").items()}
    write_torch(tmp_path / "pytorch_model.bin", tensors)
    shutil.copy(ORACLE / "default" / "config.json", tmp_path)
    first = read_eagle3(tmp_path / "pytorch_model.bin")
    assert first.load("fc.weight").type.name == ("F16" if dtype is np.float16 else "F32")
    np.testing.assert_array_equal(first.ids, read_eagle3(ORACLE / "default").ids)


def weights(name):
    return load_file(ORACLE / name / "model.safetensors")


def changed(folder: Path, config=None, layer=None, tensors=None) -> Path:
    """The oracle's head with parts of it replaced; None takes a key or a tensor away."""
    found = json.loads((ORACLE / "default" / "config.json").read_text())
    found |= config or {}
    found["transformer_layer_config"] |= layer or {}
    arrays = {k: v for k, v in (weights("default") | (tensors or {})).items() if v is not None}
    folder.mkdir(exist_ok=True)
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({k: v for k, v in found.items() if v != "gone"}))
    return folder


def yarn(**scaling):
    """A layer with YaRN, some of its numbers changed."""
    plain = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    return {"layer": {"rope_parameters": plain | scaling}}


REFUSED = {
    "an option": ({"config": {"use_magic": True}}, "the option use_magic=True is not supported"),
    "of the layer": ({"layer": {"clip_qkv": 8}}, "the option clip_qkv=8 is not supported"),
    "layers": ({"tensors": {"layers.1.mlp.up_proj.weight": np.ones((2, 2), np.float32)}}, "'layers.1.mlp.up_proj"),
    "elsewhere": ({"layer": {"norm_output": True}}, "the option norm_output=True is not supported"),
    "scalar": ({"tensors": {"lm_head.weight": np.float32(1)[...]}}, r"tensor output.weight is \(\), rows of 32"),
    "act": ({"layer": {"hidden_act": "gelu"}}, "hidden_act=gelu is not supported"),
    "eps": ({"layer": {"rms_norm_eps": float("nan")}}, "rms_norm_eps is nan, a number above 0"),
    "no eps": ({"layer": {"rms_norm_eps": 0}}, "rms_norm_eps is 0, a number above 0 and up to 1 is needed"),
    "endless eps": ({"layer": {"rms_norm_eps": 10**400}}, "rms_norm_eps is 1000.*, not of type float"),
    "theta": (yarn(rope_theta=1.0), "rope_theta is 1, a number above 1"),
    "endless theta": (yarn(rope_theta=10**400), "rope_theta is 1000.*, not of type float"),
    "positions": (yarn(original_max_position_embeddings=0.5), "is 0, a whole number from 1 to 16777216"),
    "factor": (yarn(factor=10**400), "factor is 1000.*, not of type float"),
    "magnitude": (yarn(attention_factor=1e300), r"attention_factor is 1e\+300"),
    "window": ({"layer": {"use_sliding_window": True, "sliding_window": 4}}, "sliding_window is not supported"),
    "quantised": ({"layer": {"quantization_config": {"bits": 4}}}, "quantization_config"),
    "inside": ({"config": {"eagle_config": {"use_mtp_layernorm": True}}}, "use_mtp_layernorm=True is not"),
    "ids": ({"config": {"eagle_aux_hidden_state_layer_ids": [2, "x"]}}, "must be a list of layers"),
    "two ids": ({"config": {"eagle_aux_hidden_state_layer_ids": [2, 4]}}, "fc.weight reads 3 layers' features"),
    "another": ({"config": {"speculators_model_type": "dflash"}}, "is a DFlash drafter: take drafter=dflash"),
    "peagle": ({"config": {"speculators_model_type": "peagle"}}, "drafter=eagle3 reads EAGLE-3"),
    "no layer": ({"config": {"transformer_layer_config": 3}}, "has no transformer_layer_config"),
    "type": ({"config": {"norm_output": "yes"}}, "norm_output is 'yes', not of type bool"),
    "heads": ({"layer": {"num_key_value_heads": 3}}, "heads must divide"),
    "no fc": ({"tensors": {"fc.weight": None}}, "tensor fc.weight is missing"),
    "fc": ({"tensors": {"fc.weight": np.ones((32, 95), np.float32)}}, r"tensor fc.weight is \(32, 95\)"),
    "norm": ({"config": {"fc_norm": True}}, "tensor fc_norm.0.weight is missing"),
    "d2t": ({"tensors": {"d2t": np.full(128, -5)}}, "d2t must name 128 different ids"),
    "d2t beyond": ({"tensors": {"d2t": np.full(128, 500)}}, "d2t must name 128 different ids"),
    "d2t twice": ({"tensors": {"d2t": -np.arange(128)}}, "d2t must name 128 different ids"),
    "d2t float": ({"tensors": {"d2t": np.ones(128, np.float32)}}, "whole numbers are needed"),
    "d2t short": ({"tensors": {"d2t": np.zeros(12, np.int64)}}, "d2t must name 128 different ids"),
    "foreign": ({"tensors": {"layers.0.extra.weight": np.ones(3, np.float32)}}, "is none of an EAGLE-3 head"),
    "twice": ({"tensors": {"midlayer.hidden_norm.weight": np.ones(32, np.float32)}}, "are the same part of a head"),
    "shape": ({"tensors": {"norm.weight": np.ones(31, np.float32)}}, r"output_norm.weight is \(31,\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_named(tmp_path, case):
    parts, message = REFUSED[case]
    if case == "no layer":
        folder = changed(tmp_path / "head")
        config = json.loads((folder / "config.json").read_text()) | parts["config"]
        (folder / "config.json").write_text(json.dumps(config))
    else:
        folder = changed(tmp_path / "head", **parts)
    with pytest.raises(UserError, match=message):
        read_eagle3(folder)


def test_options_are_read_from_the_original_form_too(tmp_path):
    """AngelSlim's and NVIDIA's way: layers inside eagle_config, no d2t, no embedding, a Qwen3 layer."""
    file = random_eagle3(specsparse.load(write_tiny_gguf(tmp_path / "m.gguf")), qk_norm=True, norm_output=True)
    folder = tmp_path / "head"
    written = write_folder(file, folder)
    config = json.loads((written / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (folder / "config.json").write_text(json.dumps(config))
    found = read_eagle3(folder)
    assert found.layers == file.layers and found.shape == file.shape and found.ids is None
    assert config["model_type"] == "qwen3" and "embed_tokens.weight" not in load_file(folder / "model.safetensors")
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 1, 2]  # SGLang's: outputs, if the first is 1
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 36, "decoder_start_token_id": 1}))
    assert read_eagle3(folder).layers == (2, 2, 3)
    with pytest.raises(UserError, match="norm_output has no place in a GGUF file"):
        convert_head("eagle3", folder, tmp_path / "x.gguf", target=open_gguf(tmp_path / "m.gguf"))


def test_gguf_files_that_are_none(tmp_path):
    with pytest.raises(UserError, match="is no EAGLE-3 head: its architecture is"):
        read_eagle3(TARGET)
    ours = random_head(tmp_path, specsparse.load(write_tiny_gguf(tmp_path / "m.gguf")))
    with pytest.raises(UserError, match="read EAGLE-3, and so does drafter=eagle3; this head is EAGLE-1"):
        read_eagle3(ours)
    with pytest.raises(UserError, match="is for a target of width 32"):
        convert_head("eagle3", ORACLE / "default", tmp_path / "x.gguf", target=open_gguf(tmp_path / "m.gguf"))
    with pytest.raises(UserError, match=r"is a folder, whose weights are F32; --outtype q8_0"):
        convert_head("eagle3", ORACLE / "default", tmp_path / "x", quant="q8_0")
    with pytest.raises(UserError, match="is a GGUF file, --form is for folders"):
        convert_head("eagle3", ORACLE / "default", tmp_path / "x.gguf", form="original")
    bare = random_eagle3(specsparse.load(tmp_path / "m.gguf"))
    with pytest.raises(UserError, match="give --target MODEL"):
        convert_head("eagle3", write_folder(bare, tmp_path / "bare"), tmp_path / "x.gguf")


def test_the_command_line(tmp_path, capsys):
    head = str(ORACLE / "default")
    options = ["--target", str(TARGET), "--outtype", "f16"]
    assert cli.main(["convert", "eagle3", head, str(tmp_path / "h.gguf"), *options]) == 0
    assert "F16" in {t.type.name for t in open_gguf(tmp_path / "h.gguf").tensors.values()}
    assert cli.main(["convert", "eagle3", str(tmp_path / "h.gguf"), str(tmp_path / "o")]) == 0
    assert "config.json, model.safetensors" in capsys.readouterr().out
    for path in (head, str(tmp_path / "h.gguf"), str(tmp_path / "o")):
        assert cli.main(["inspect", path]) == 0
        out = capsys.readouterr().out
        assert "EAGLE-3, width 32" in out and "what enters layers 2, 4, 5" in out and "128 ids" in out
    assert cli.main(["inspect", head, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"] == "128 ids"
    assert cli.main(["convert", "eagle3", head, str(tmp_path / "o")]) == 2  # it is there already
    folder = changed(tmp_path / "k", config={"speculators_config": {"proposal_methods": [{"verifier_accept_k": 3}]}})
    assert cli.main(["inspect", str(folder)]) == 0 and "verifier_accept_k=3: lossy" in capsys.readouterr().out
    for pair in ([str(folder), str(ORACLE / "target.gguf")], [str(ORACLE / "target.gguf"), str(folder)]):
        assert cli.main(["inspect", *pair]) == 2 and "is a head in a folder" in capsys.readouterr().err
