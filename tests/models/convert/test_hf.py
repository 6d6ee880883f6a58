"""Checkpoints of transformers: the converted file has their logits, ids and template; mistakes are one line."""

import dataclasses
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

import specsparse
from specsparse.cli import main as cli
from specsparse.engine import llama
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError
from specsparse.kernels.native import cpu
from specsparse.models.convert.hf import Checkpoint, convert_hf, text_part
from specsparse.models.convert.hf_config import HfConfig, metadata
from specsparse.models.convert.hf_tokenizer import PROBE
from specsparse.powerinfer.torch_zip import write_torch
from tests.cells import cells
from tests.models.convert import checkpoints
from tests.models.convert.checkpoints import CONFIG, LLAMA3_ROPE
from tests.models.convert.make_transformers_logits import IDS as ORACLE_IDS
from tests.models.convert.make_transformers_logits import OUT as LOGITS
from tests.models.convert.make_transformers_logits import ROWS
from tests.tolerances import FORWARD_NMSE, nmse

IDS = [1, 40, 41, 250, 7, 7, 90, 12, 33, 200, 201, 5, 77, 78, 150, 3] * 3


def llama3_inv_freq(config):
    """What transformers computes for rope_type "llama3": by wavelength."""
    rope, head = config["rope_scaling"], config["hidden_size"] // config["num_attention_heads"]
    out = []
    for freq in config["rope_theta"] ** (-np.arange(0, head, 2) / head):
        wave, old = 2 * np.pi / freq, rope["original_max_position_embeddings"]
        if wave < old / rope["high_freq_factor"]:
            out.append(freq)
        elif wave > old / rope["low_freq_factor"]:
            out.append(freq / rope["factor"])
        else:
            mix = (old / wave - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            out.append((1 - mix) * freq / rope["factor"] + mix * freq)
    return np.array(out)


FORMS = {
    "llama-160m": {"num_key_value_heads": 4},
    "llama-3": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500.0},
    "smollm2": {"tie_word_embeddings": True},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "own head size": {"head_dim": 32},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 64},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_logits_are_those_of_transformers(tmp_path, form):
    config = {**CONFIG, **FORMS[form]}
    w = checkpoints.weights(config, bias=form == "qwen2")
    folder = checkpoints.save(tmp_path / "in", config, w, parts=2 if form == "llama-3" else 1)
    checkpoints.bpe_tokenizer(folder)
    found = convert_hf(folder, tmp_path / "out.gguf", type_name="f32")
    model = specsparse.load(tmp_path / "out.gguf", kv_dtype="f32")
    assert found == model.config and model.config.tied_output == config["tie_word_embeddings"]
    inv_freq = None
    if form == "llama-3":
        inv_freq = llama3_inv_freq(config)
        assert len(set(inv_freq / config["rope_theta"] ** (-np.arange(0, 16, 2) / 16))) >= 3  # all three kinds of pairs
    if form == "linear":
        inv_freq = config["rope_theta"] ** (-np.arange(0, 16, 2) / 16) / 2
    assert nmse(model.logits(IDS), checkpoints.logits(config, w, IDS, inv_freq)) <= FORWARD_NMSE["f32"]


@pytest.fixture(scope="module")
def of_transformers():
    with np.load(LOGITS) as found:
        return dict(found)


MATRIX = [(family, backend) for family in checkpoints.FAMILIES for backend in ("native", "xla")]


# xla's kernels once.
@pytest.mark.parametrize(
    ("family", "backend"), cells(MATRIX, [m for m in MATRIX if m[1] == "native" or m[0] == "qwen3"])
)
def test_other_architectures_have_the_logits_of_transformers(tmp_path, of_transformers, family, backend):
    """Of transformers itself, as `make_transformers_logits` wrote them."""
    if backend == "native" and not cpu.available():
        pytest.skip(f"no native kernels: {cpu.why_missing()}")
    config = {**CONFIG, **checkpoints.FAMILIES[family]}
    folder, notes = checkpoints.save(tmp_path / "in", config, checkpoints.weights(config)), []
    checkpoints.bpe_tokenizer(folder)
    found = convert_hf(folder, tmp_path / "out.gguf", type_name="f32", note=notes.append)
    assert found.architecture == ("llama" if family == "mistral" else family)
    assert [("llama.cpp reads it" in line) for line in notes] == [True] * (family in ("mistral", "phi3"))
    model = specsparse.load(tmp_path / "out.gguf", kv_dtype="f32", backend=backend)
    assert model.config == found
    got = model.logits(ORACLE_IDS)[list(ROWS)]
    assert nmse(got, of_transformers[family]) <= FORWARD_NMSE["f32"]
    if found.window and not found.n_experts:  # test_experts.py sees theirs
        assert nmse(got[:3], of_transformers[family][:3]) <= FORWARD_NMSE["f32"]
        wide = specsparse.load(tmp_path / "out.gguf", kv_dtype="f32", backend=backend)
        forward = llama.make_forward(dataclasses.replace(found, window=64), wide.kernels)
        wide = dataclasses.replace(wide, forward=forward)
        assert nmse(wide.logits(ORACLE_IDS)[list(ROWS)], of_transformers[family]) > 1e-4  # the window is seen


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_model_that_sees_images_the_text_part_is_converted(tmp_path, capsys, of_transformers, prefix):
    """transformers ran the whole model, under the names that files on the Hub have."""
    folder = checkpoints.save(tmp_path / "in", checkpoints.MULTIMODAL, checkpoints.multimodal_weights(prefix))
    checkpoints.bpe_tokenizer(folder)
    assert cli.main(["convert", "hf", str(folder), str(tmp_path / "out.gguf"), "--outtype", "f32"]) == 0
    assert "note: only the text part is converted; 2 tensors of other parts are left out" in capsys.readouterr().err
    model = specsparse.load(tmp_path / "out.gguf", kv_dtype="f32")
    c = model.config
    assert (c.architecture, c.tied_output, c.rope.factor, c.local_rope.factor) == ("gemma3", True, 2.0, 1.0)
    assert nmse(model.logits(ORACLE_IDS)[list(ROWS)], of_transformers["multimodal"]) <= FORWARD_NMSE["f32"]


def test_a_text_part_has_the_usual_values_of_its_class(tmp_path):
    """Those of Gemma 3 4B leave out all but these; transformers fills in the rest."""
    said = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    said |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "head_dim": None}
    config = {**checkpoints.MULTIMODAL, "text_config": said}
    folder = checkpoints.save(tmp_path / "in", config, checkpoints.multimodal_weights())
    part = text_part(Checkpoint(folder))
    keys = metadata(HfConfig(folder / "config.json", part.config), name="x")
    wanted = {
        "vocab_size": 262208, "context_length": 131072, "attention.head_count": 8, "attention.head_count_kv": 4,
        "attention.key_length": 256, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
        "rope.scaling.factor": 8.0, "attention.sliding_window": 1024,
    }  # fmt: skip
    assert {key: keys[f"gemma3.{key}"] for key in wanted} == wanted
    assert sorted(part.shapes) == sorted(checkpoints.weights({**CONFIG, **checkpoints.FAMILIES["gemma3"]}))


@pytest.mark.parametrize("same", [True, False])
def test_a_stored_output_matrix_is_kept_where_it_is_not_the_embedding(tmp_path, same):
    config = {**CONFIG, "tie_word_embeddings": True}
    w = checkpoints.weights({**CONFIG, "tie_word_embeddings": False})
    if same:
        w["lm_head.weight"] = w["model.embed_tokens.weight"]
    folder, notes = checkpoints.save(tmp_path / "in", config, w), []
    checkpoints.bpe_tokenizer(folder)
    found = convert_hf(folder, tmp_path / "out.gguf", type_name="f32", note=notes.append)
    assert found.tied_output == same and ["it is kept" in line for line in notes] == [True] * (not same)
    model = specsparse.load(tmp_path / "out.gguf", kv_dtype="f32")
    assert nmse(model.logits(IDS), checkpoints.logits(config, w, IDS)) <= FORWARD_NMSE["f32"]


@pytest.mark.parametrize(("activation", "noted"), [("relu", True), ("silu", False)])
def test_an_activation_that_llama_cpp_does_not_run_is_noted(tmp_path, capsys, activation, noted):
    config = {**CONFIG, "hidden_act": activation}
    folder = checkpoints.save(tmp_path / "in", config, checkpoints.weights(config))
    checkpoints.bpe_tokenizer(folder)
    assert cli.main(["convert", "hf", str(folder), str(tmp_path / "out.gguf")]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(lines) == noted and all("llama.cpp does not read it and runs this file with SiLU" in x for x in lines)


@pytest.mark.parametrize(("family", "noted"), [("qwen3", True), ("llama", False)])
def test_biases_that_llama_cpp_does_not_read_are_noted(tmp_path, family, noted):
    """A Qwen3 with attention_bias: llama.cpp finds tensors that it does not know, and refuses the file."""
    config = {**CONFIG, **checkpoints.FAMILIES.get(family, {}), "attention_bias": True}
    w = checkpoints.weights(config)
    for name in [name for name in w if name.endswith("self_attn.o_proj.weight")]:
        w[name.replace("weight", "bias")] = np.ones(len(w[name]), np.float32)
    checkpoints.bpe_tokenizer(checkpoints.save(tmp_path / "in", config, w))
    lines = []
    convert_hf(tmp_path / "in", tmp_path / "out.gguf", note=lines.append)
    assert lines == noted * [
        "biases of attn_output: llama.cpp has no place for them in qwen3 files and refuses to load this one; "
        "specsparse runs it"
    ]


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "gemma3_text"])
def test_a_config_without_architectures_is_read_by_its_model_type(model_type):
    config = {**CONFIG, "architectures": None, "model_type": model_type, "sliding_window": 32}
    found = metadata(HfConfig(Path("config.json"), config), name="x")
    assert found["general.architecture"] == {"mistral": "llama", "gemma3_text": "gemma3"}.get(model_type, model_type)
    with pytest.raises(UserError, match="architecture gpt2 is not supported"):
        metadata(HfConfig(Path("config.json"), {**config, "model_type": "gpt2"}), name="x")


HEADS = {
    "EAGLE-3": {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000},
    "DFlash": {"architectures": ["DFlashDraftModel"], "dflash_config": {"block_size": 16}},
    "Medusa": {"medusa_num_heads": 4, "base_model_name_or_path": "someone/target"},
    "peagle": {"speculators_model_type": "peagle", "architectures": ["LlamaForCausalLM"]},
}


READ = {"EAGLE-3", "DFlash"}
"""Heads whose tensors `inspect` shows: their tests are beside those of their files."""


@pytest.mark.parametrize(
    ("command", "name"),
    [("convert", name) for name in HEADS] + [("inspect", name) for name in HEADS if name not in READ],
)
def test_a_draft_head_is_called_one(tmp_path, capsys, command, name):
    (tmp_path / "config.json").write_text(json.dumps(HEADS[name]))
    (tmp_path / "pytorch_model.bin").touch()
    argv = {"inspect": ["inspect", str(tmp_path)], "convert": ["convert", "hf", str(tmp_path), "out.gguf"]}[command]
    assert cli.main(argv) == 2
    said = capsys.readouterr().err
    if (command, name) == ("inspect", "EAGLE-3"):  # is read, to be described
        assert "pytorch_model.bin: is not a readable torch file" in said and said.count("\n") == 1
        return
    assert f"is a draft head ({name}) " in said and "not a model" in said and said.count("\n") == 1
    assert ("for someone/target" in said) == (name == "Medusa")


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_an_eagle_of_the_first_kind_is_known_by_its_tensors(tmp_path, form):
    """Its config is that of a Llama of one layer."""
    w = {"layers.0.mlp.up_proj.weight": np.ones((96, 64), np.float32), "fc.weight": np.ones((64, 128), np.float32)}
    if form == "safetensors":
        checkpoints.save(tmp_path, CONFIG, w)
    else:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        write_torch(tmp_path / "pytorch_model.bin", w)
    with pytest.raises(UserError, match=r"is a draft head \(EAGLE\) of a target, not a model"):
        convert_hf(tmp_path, tmp_path / "out.gguf")


def test_inspect_says_what_a_folder_of_transformers_is(tmp_path, capsys):
    checkpoints.save(tmp_path, CONFIG, checkpoints.weights(CONFIG))
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "is a folder of transformers; `specsparse convert hf" in capsys.readouterr().err


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])
def test_a_byte_level_tokenizer(tmp_path, pre):
    folder = checkpoints.save(tmp_path / "in", CONFIG, checkpoints.weights(CONFIG), bf16=True)
    theirs = checkpoints.bpe_tokenizer(folder, pre)
    convert_hf(folder, tmp_path / "out.gguf", type_name="q8_0")
    f = open_gguf(tmp_path / "out.gguf")
    ours = Tokenizer.from_metadata(f.metadata, where="out")
    assert f.metadata["tokenizer.ggml.pre"] == pre and ours.vocab_size == 300
    for text in (PROBE, "hello world", "<|im_start|>x"):
        wanted = theirs.encode(text, add_special_tokens=True).ids
        assert ours.encode(text, add_special=True, parse_special=True) == wanted
    assert (ours.bos_id, ours.eos_id, ours.add_bos) == (296, 2, pre == "llama-bpe")
    assert ours.token_text(299) == "[PAD299]" and 296 in ours.special_ids
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}]).startswith("<|im_start|>user\nhi<|im_end|>")
    assert f.tensors["blk.0.attn_q.weight"].type.name == "Q8_0" and f.metadata["general.file_type"] == 7


@pytest.mark.parametrize("form", ["tokenizer.model", "tokenizer.json"])
def test_a_sentencepiece_tokenizer(tmp_path, form):
    folder = checkpoints.save(tmp_path / "in", CONFIG, checkpoints.weights(CONFIG))
    sp = checkpoints.spm_tokenizer(folder)
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": sp.get_piece_size()}))
    if form == "tokenizer.json":
        checkpoints.spm_as_json(folder, sp)
    convert_hf(folder, tmp_path / "out.gguf", type_name="f16")
    ours = Tokenizer.from_metadata(open_gguf(tmp_path / "out.gguf").metadata, where="out")
    assert ours.type == "spm" and ours.add_bos and ours.add_space_prefix and (ours.bos_id, ours.eos_id) == (1, 2)
    for text in (PROBE, "hello the world", "  two spaces", "\u00fc"):
        assert ours.encode(text) == sp.encode(text)
    assert ours.token_text(sp.get_piece_size()) == "<pad>"


def test_an_added_token_without_a_row_is_left_out(tmp_path):
    """Gemma's tokenizer has one for images that its text models have no embedding of."""
    config = {**CONFIG, "vocab_size": 296}
    folder = checkpoints.save(tmp_path / "in", config, checkpoints.weights(config))
    checkpoints.bpe_tokenizer(folder)
    convert_hf(folder, tmp_path / "out.gguf", type_name="f16")
    ours = Tokenizer.from_metadata(open_gguf(tmp_path / "out.gguf").metadata, where="out")
    assert ours.vocab_size == 296 and ours.token_text(295) != "<|begin|>"


@pytest.mark.parametrize(("name", "kind"), [("bf16", "BF16"), ("q4_0", "Q4_0"), ("q4_1", "Q4_1")])
def test_types(tmp_path, name, kind):
    folder = checkpoints.save(tmp_path / "in", CONFIG, checkpoints.weights(CONFIG))
    checkpoints.bpe_tokenizer(folder)
    seen = []
    convert_hf(folder, tmp_path / "out.gguf", type_name=name, progress=lambda *done: seen.append(done))
    f = open_gguf(tmp_path / "out.gguf")
    assert (
        f.tensors["blk.1.ffn_down.weight"].type.name == kind and f.tensors["blk.1.ffn_norm.weight"].type.name == "F32"
    )
    assert f.tensors["output.weight"].type.name == ("Q8_0" if name.startswith("q4") else kind)
    assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for t in f.tensors.values())
    ModelConfig.from_gguf(f)


def test_from_the_command_line(tmp_path, capsys):
    folder = checkpoints.save(tmp_path / "in", CONFIG, checkpoints.weights(CONFIG))
    checkpoints.bpe_tokenizer(folder)
    argv = ["convert", "hf", str(folder), str(tmp_path / "out.gguf"), "--outtype", "q8_0"]
    assert cli.main(argv) == 0
    assert "out.gguf: 0.1 M weights" in capsys.readouterr().out
    argv = ["convert", "quantize", str(tmp_path / "out.gguf"), str(tmp_path / "q4.gguf"), "q4_0"]
    assert cli.main(argv) == 0
    for wrong in ([*argv[:4], "Q4_K_M"], ["convert", "hf", str(folder), argv[3], "--outtype=q4_k_m"]):
        assert cli.main([*wrong, "--overwrite"]) == 2 and "did you mean q4_k?" in capsys.readouterr().err.lower()
    assert open_gguf(tmp_path / "q4.gguf").tensors["blk.0.attn_q.weight"].type.name == "Q4_0"


def refused(tmp_path, folder, **options):
    with pytest.raises(UserError) as caught:
        convert_hf(folder, tmp_path / "out.gguf", **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*out.gguf*"))  # nor half a file
    return str(caught.value)


CHANGES = {
    "architecture GPT2LMHeadModel is not supported": {"architectures": ["GPT2LMHeadModel"]},
    "has no hidden_size": {"hidden_size": None},
    "rms_norm_eps is 'small', not of type float": {"rms_norm_eps": "small"},
    "hidden_act=gelu is not supported": {"hidden_act": "gelu"},
    "sliding_window=32 is not supported": {
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 32,
        "use_sliding_window": True,
    },
    "MixtralForCausalLM (a model with experts) is not": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
    },
    "Qwen3NextForCausalLM (a model with experts and recurrent layers) is not": {
        "architectures": ["Qwen3NextForCausalLM"],
        "num_experts": 512,
        "linear_num_key_heads": 16,
    },
    "has no text_config": {"architectures": ["Gemma3ForConditionalGeneration"]},
    "LlavaForConditionalGeneration (a model with a vision or audio part) is not": {
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": {},
    },
    "only every 4th layer without RoPE": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [0, 1]},
    "final_logit_softcapping=30.0 is not supported": {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 8,
        "final_logit_softcapping": 30.0,
    },
    "query_pre_attn_scalar=": {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
    },
    "layer_types are not supported": {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 8,
        "hidden_act": None,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "num_hidden_layers is 1099511627776": {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 1 << 40},
    "num_hidden_layers is 0": {"num_hidden_layers": 0},
    "hidden_size is 1000": {"hidden_size": 10**400},
    "head_dim is 0, a whole number from 1 to 16777216 is needed": {"head_dim": 0},
    "rms_norm_eps is nan, a number above 0 and up to 1 is needed": {"rms_norm_eps": float("nan")},
    "partial_rotary_factor is nan, a finite number is needed": {"partial_rotary_factor": float("nan")},
    "RoPE of the layers with a window is 5": {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 8,
        "rope_parameters": {"full_attention": {}, "sliding_attention": 5},
    },
    "sliding_window' is 0, 1 to": {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 0, "hidden_act": None},
    "sliding_window is 'wide', not of type int": {"architectures": ["Gemma3ForCausalLM"], "sliding_window": "wide"},
    "has no sliding_window": {"architectures": ["Gemma3ForCausalLM"]},
    "RoPE of the layers with a window is": {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 8,
        "rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "yarn"}},
    },
    "rope scaling 'longrope' is not supported": {"rope_scaling": {"type": "longrope"}},
    "factor is 'x', not of type float": {"rope_scaling": {"type": "linear", "factor": "x"}},
    "low_freq_factor=1 must be below high_freq_factor=1": {"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}},
    "low_freq_factor=8 must be below high_freq_factor=4": {"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 8.0}},
    "tensor 'blk.0.ffn_gate.weight' has shape (96, 64), its metadata asks for (95, 64)": {"intermediate_size": 95},
    "tensor 'blk.2.attn_norm.weight' of shape (64,) is missing": {"num_hidden_layers": 3},
    "an even head dimension": {"num_attention_heads": 48},
}


@pytest.mark.parametrize("says", CHANGES)
def test_configs_that_are_refused(tmp_path, says):
    folder = checkpoints.save(tmp_path / "in", CONFIG, checkpoints.weights(CONFIG))
    (folder / "config.json").write_text(json.dumps({**CONFIG, **CHANGES[says]}))
    checkpoints.bpe_tokenizer(folder)
    assert says in refused(tmp_path, folder)


def test_folders_that_are_refused(tmp_path):
    w = checkpoints.weights(CONFIG)
    assert "no such folder" in refused(tmp_path, tmp_path / "none")
    folder = checkpoints.save(tmp_path / "in", CONFIG, w)
    assert "has no tokenizer.model and no tokenizer.json" in refused(tmp_path, folder)
    checkpoints.bpe_tokenizer(folder, "unknown")
    assert "its pre-tokenizer is none that is known; name one with --pre" in refused(tmp_path, folder)
    assert "works in a way that GGUF cannot say" in refused(tmp_path, folder, pre="smollm")
    checkpoints.bpe_tokenizer(folder)
    assert "type 'q9': choose one of f32, f16" in refused(tmp_path, folder, type_name="q9")
    checkpoints.save(folder, CONFIG, {**w, "model.layers.0.self_attn.sinks": np.ones(4, np.float32)})
    assert "a llama has no tensor model.layers.0.self_attn.sinks" in refused(tmp_path, folder)
    checkpoints.save(folder, CONFIG, {**w, f"model.layers.{'1' * 5000}.mlp.up_proj.weight": np.ones(8, np.float32)})
    assert "a llama has no tensor model.layers.1111" in refused(tmp_path, folder)
    checkpoints.save(folder, CONFIG, {**w, "model.norm.weight": np.full(64, np.nan, np.float32)})
    assert "model.norm.weight holds values that are not finite" in refused(tmp_path, folder)
    checkpoints.save(folder, CONFIG, {**w, "model.embed_tokens.weight": w["model.embed_tokens.weight"][:290]})
    assert "the tokenizer has 297 tokens and the embedding 290 rows" in refused(tmp_path, folder)
    checkpoints.save(folder, CONFIG, {**w, "model.norm.weight": np.ones(64, np.int8)})
    assert "model.norm.weight is of type I8" in refused(tmp_path, folder)
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    assert "cannot be read as safetensors" in refused(tmp_path, folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").touch()
    assert "pytorch_model.bin: is not a readable torch file" in refused(tmp_path, folder)
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    locked = bytearray((folder / "pytorch_model.bin").read_bytes())
    locked[6] = locked[locked.index(b"PK\x01\x02") + 8] = 1  # with a password
    (folder / "pytorch_model.bin").write_bytes(locked)
    assert "pytorch_model.bin: is not a readable torch file" in refused(tmp_path, folder)
    write_torch(folder / "pytorch_model.bin", np.ones(3, np.float32))
    assert "pytorch_model.bin: holds no tensors by name" in refused(tmp_path, folder)
    (folder / "pytorch_model.bin").rename(folder / "consolidated.00.pth")
    assert "consolidated.00.pth is of PyTorch" in refused(tmp_path, folder)
    (folder / "config.json").write_text("[1]")
    assert "config.json: holds no JSON object" in refused(tmp_path, folder)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("added_tokens.json", {"<x>": "first"}, "is no table of tokens and ids"),
        ("added_tokens.json", {"<x>": 10**12}, "added token 1000000000000 "),
        ("added_tokens.json", {"<x>": -1}, "added token -1 "),
        ("tokenizer_config.json", {"added_tokens_decoder": ["<x>"]}, "is no table of tokens and ids"),
        ("tokenizer_config.json", {"chat_template": "\ud800"}, "not valid Unicode"),
        ("chat_template.jinja", None, "not UTF-8"),
    ],
)
def test_tokens_that_are_refused(tmp_path, name, content, says):
    folder = checkpoints.save(tmp_path / "in", CONFIG, checkpoints.weights(CONFIG))
    checkpoints.bpe_tokenizer(folder)
    (folder / name).write_bytes(b"\xff" if content is None else json.dumps(content).encode())
    assert says in refused(tmp_path, folder)


SMALLTHINKER = {
    **CONFIG, "architectures": ["SmallThinkerForCausalLM"], "model_type": "smallthinker", "intermediate_size": None,
    "moe_num_primary_experts": 3, "moe_num_active_primary_experts": 2, "moe_ffn_hidden_size": 32,
    "moe_primary_router_apply_softmax": False, "moe_enable_early_router": True, "moe_layer_layout": [1, 1],
    "rope_layout": [0, 1], "sliding_window_layout": [0, 1], "sliding_window_size": 4096, "hidden_act": None,
}  # fmt: skip


def smallthinker(folder: Path, **changes) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint under its published names."""
    rng, w = np.random.default_rng(1), checkpoints.weights(CONFIG)
    w = {name: value for name, value in w.items() if ".mlp." not in name}
    for i in range(2):
        at = f"model.layers.{i}.block_sparse_moe."
        w[f"{at}primary_router.weight"] = rng.normal(0, 1, (3, 64)).astype(np.float32)
        for e in range(3):
            for name, shape in {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}.items():
                w[f"{at}experts.{e}.{name}.weight"] = rng.normal(0, 1, shape).astype(np.float32)
    config = {key: value for key, value in {**SMALLTHINKER, **changes}.items() if value is not None}
    checkpoints.save(folder, config, w)
    checkpoints.bpe_tokenizer(folder)
    return folder, w


def test_experts_of_smallthinker_are_stacked(tmp_path):
    folder, w = smallthinker(tmp_path / "in")
    found = convert_hf(folder, tmp_path / "out.gguf", type_name="f32")
    assert (found.n_experts, found.n_chosen, found.d_ff, found.gating, found.window) == (3, 2, 32, "sigmoid", 4096)
    tensors = open_gguf(tmp_path / "out.gguf").tensors
    for name in ("gate", "up", "down"):
        stack = tensors[f"blk.1.ffn_{name}_exps.weight"].dequantize()
        for e in range(3):
            assert (stack[e] == w[f"model.layers.1.block_sparse_moe.experts.{e}.{name}.weight"]).all()
    router = w["model.layers.0.block_sparse_moe.primary_router.weight"]
    assert (tensors["blk.0.ffn_gate_inp.weight"].dequantize() == router).all()


def test_mxfp4_experts_keep_their_values(tmp_path):
    """The codes of gpt-oss's release: column 2 i in the low half of byte i, gate and up in turn."""
    config, rng = {**CONFIG, **checkpoints.FAMILIES["gpt-oss"]}, np.random.default_rng(2)
    w = checkpoints.weights(config)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    wanted = {}
    for i in range(2):
        for name, (outputs, inputs) in {"gate_up_proj": (64, 64), "down_proj": (64, 32)}.items():
            at = f"model.layers.{i}.mlp.experts.{name}"
            del w[at]
            w[at + "_blocks"] = blocks = rng.integers(0, 256, (6, outputs, inputs // 32, 16)).astype(np.uint8)
            w[at + "_scales"] = scales = rng.integers(118, 126, (6, outputs, inputs // 32)).astype(np.uint8)
            pairs = np.stack([table[blocks & 15], table[blocks >> 4]], -1).reshape(6, outputs, -1, 32)
            wanted[i, name] = (pairs * np.exp2(scales[..., None].astype(np.float32) - 127)).reshape(6, outputs, inputs)
    folder = checkpoints.save(tmp_path / "in", config, w)
    checkpoints.bpe_tokenizer(folder)
    convert_hf(folder, tmp_path / "out.gguf", type_name="mxfp4")
    tensors = open_gguf(tmp_path / "out.gguf").tensors
    parts = {"gate": ("gate_up_proj", slice(0, None, 2)), "up": ("gate_up_proj", slice(1, None, 2)),
             "down": ("down_proj", slice(None))}  # fmt: skip
    for name, (source, rows) in parts.items():
        tensor = tensors[f"blk.1.ffn_{name}_exps.weight"]
        assert tensor.type.name == "MXFP4" and (tensor.dequantize() == wanted[1, source][:, rows]).all()
    types = {tensors[f"blk.0.{name}.weight"].type.name for name in ("attn_q", "ffn_gate_inp")}
    assert types == {"Q8_0", "F32"}
    w["model.layers.1.mlp.experts.down_proj_scales"] = scales[:, :-1]
    with pytest.raises(UserError, match=r"down_proj_blocks of shape .* is not of gpt-oss's form"):
        convert_hf(checkpoints.save(tmp_path / "damaged", config, w), tmp_path / "none.gguf", type_name="mxfp4")


EXPERTS_REFUSED = {
    "only a window, and RoPE, on all layers but every 4th": {"sliding_window_layout": [1, 0]},
    "sliding_window_size=512 is not supported": {"sliding_window_size": 512},
    "moe_shared_primary_experts=1 is not supported": {"moe_shared_primary_experts": 1},
    "dense layers among those with experts": {"moe_layer_layout": [0, 1]},
    "needs 4 experts of one shape; it has 3": {"moe_num_primary_experts": 4},
}


@pytest.mark.parametrize("says", EXPERTS_REFUSED)
def test_experts_that_are_refused(tmp_path, says):
    assert says in refused(tmp_path, smallthinker(tmp_path / "in", **EXPERTS_REFUSED[says])[0])


def test_keys_of_experts_that_are_refused(tmp_path):
    config = {**CONFIG, **checkpoints.FAMILIES["olmoe"]}
    for key, value in {"clip_qkv": 8.0, "norm_topk_prob": True}.items():
        folder = checkpoints.save(tmp_path / key, {**config, key: value}, checkpoints.weights(config))
        checkpoints.bpe_tokenizer(folder)
        assert key in refused(tmp_path, folder)
