"""ModelConfig: what files say, what users override, and one clear line for what is wrong."""

from dataclasses import replace

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from specsparse.engine.config import PROJECTIONS, ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.models import catalogue
from specsparse.testing import tiny_config, write_tiny_gguf


def written(tmp_path, **kw) -> ModelConfig:
    return ModelConfig.from_gguf(open_gguf(write_tiny_gguf(tmp_path / "t.gguf", **kw)))


@pytest.mark.parametrize(
    "kw",
    [
        {},
        {"tied": True, "n_kv_heads": 4},
        {"n_kv_heads": 1, "n_layers": 1, "d_ff": 160, "norm_eps": 1e-6},
        {"head_dim": 24},
        {"bias": True},
        {"bias": ["attn_output"]},
        {"architecture": "qwen2"},
        {"rope_base": 500000.0, "freq_factors": True},
        {"rope_scaling": "linear", "rope_factor": 2.0},
        {"architecture": "qwen3", "head_dim": 32},
        {"architecture": "smollm3", "n_layers": 5},
        {"window": 9},
        {"window": 9, "full_every": 2},
        {"architecture": "gemma3", "n_layers": 7},
        {"architecture": "gemma3", "full_every": 2, "window": 5, "rope_scaling": "linear", "rope_factor": 8.0},
        {"rope_scaling": "yarn", "rope_factor": 4.0, "original_context": 64, "attn_factor": 0.5},
        {"architecture": "phi3", "window": 9},
        {"architecture": "olmo2"},
        {"architecture": "qwen3moe", "d_ff": 32, "n_experts": 5, "n_chosen": 5},
        {"architecture": "smallthinker", "d_ff": 32, "gating": "sigmoid", "window": 4096, "n_layers": 5},
        {"architecture": "gpt-oss", "d_ff": 32, "rope_scaling": "yarn", "rope_factor": 4.0, "original_context": 64},
    ],
    ids=str,
)
def test_reads_what_was_written(tmp_path, kw):
    config = written(tmp_path, **kw)
    assert config == tiny_config(**kw)
    assert hash(config) == hash(tiny_config(**kw))


def test_reads_each_tokenizer_and_type(tmp_path):
    assert written(tmp_path, tokenizer="spm", vocab_size=309).vocab_size == 309
    assert written(tmp_path, tokenizer="none", vocab_size=37).vocab_size == 37
    assert written(tmp_path, quant="Q4_K").d_model == 256


def test_the_real_model():
    try:
        path = catalogue.resolve("smollm2-135m")
    except UserError as error:
        pytest.skip(str(error))
    config = ModelConfig.from_gguf(open_gguf(path))
    assert (config.n_layers, config.d_model, config.n_heads, config.n_kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.d_ff, config.vocab_size, config.context_length, config.tied_output) == (1536, 49152, 8192, True)
    assert config.rope.base == 100000.0 and config.rope.pairing == "norm" and not config.biases


def test_the_layers_of_the_architectures():
    gemma = tiny_config(architecture="gemma3", n_layers=8, window=5)
    assert [gemma.kind(i) for i in range(8)] == [*[(5, 1)] * 5, (0, 0), *[(5, 1)] * 2]
    assert gemma.ropes == (gemma.rope, replace(gemma.rope, base=10000.0, original_context=0))
    assert gemma.embedding_scale == 8.0 and gemma.query_scale == 1.0
    largest = tiny_config(architecture="gemma3", n_layers=62, d_model=168, n_heads=1, head_dim=128)
    assert largest.query_scale == pytest.approx((128 / 168) ** 0.5)
    smollm3 = tiny_config(architecture="smollm3", n_layers=5)
    assert [smollm3.kind(i) for i in range(5)] == [(0, 0)] * 3 + [(0, 1), (0, 0)] and smollm3.ropes[1] is None
    assert {tiny_config(window=7).kind(i) for i in range(2)} == {(7, 0)}
    small = tiny_config(architecture="smallthinker", n_layers=5, window=4096)
    assert [small.kind(i) for i in range(5)] == [(0, 1), *[(4096, 0)] * 3, (0, 1)] and small.ropes[1] is None
    assert tiny_config(architecture="smallthinker").ropes == (tiny_config(architecture="smallthinker").rope,)
    oss = tiny_config(architecture="gpt-oss", n_layers=3)
    assert [oss.kind(i).window for i in range(3)] == [8, 0, 8]
    keys = oss.n_kv_heads * oss.head_dim
    assert (oss.endless_kv(), oss.endless_kv([0, 2]), gemma.endless_kv([5, 6])) == (keys, 0, keys)


def test_qwen2_is_a_llama_with_biases(tmp_path):
    config = written(tmp_path, architecture="qwen2")
    assert config.rope.pairing == "neox" and config.biases == ("attn_q", "attn_k", "attn_v")


def test_projection_shapes(tmp_path):
    config = tiny_config(head_dim=24)
    assert [config.projection_shape(name) for name in PROJECTIONS] == [
        (96, 64), (48, 64), (48, 64), (64, 96), (96, 64), (96, 64), (64, 96),
    ]  # fmt: skip


A = "llama."
BAD_KEYS = {
    "another architecture": ({"general.architecture": "gpt2"}, "'gpt2' is not supported; supported are llama, qwen2"),
    "another with experts": (
        {"general.architecture": "deepseek2", "deepseek2.expert_count": 128},
        r"'deepseek2' \(a model with experts\) is not supported",
    ),
    "another with recurrence": (
        {"general.architecture": "jamba", "jamba.ssm.state_size": 16, "jamba.expert_count": 16},
        r"'jamba' \(a model with experts and recurrent layers\) is not supported",
    ),
    "a negative window": ({A + "attention.sliding_window": -4}, "sliding_window' is -4, 1 to"),
    "a window in words": ({A + "attention.sliding_window": "wide"}, "sliding_window' should be an integer"),
    "a window on no layer": (
        {A + "attention.sliding_window": 4, A + "attention.sliding_window_pattern": -1},
        "sliding_window_pattern' is -1",
    ),
    "other layers with a window": (
        {A + "attention.sliding_window": 4, A + "attention.sliding_window_pattern": [True, False]},
        "sliding_window_pattern' is .* only a window on all layers",
    ),
    "an architecture of 3": ({"general.architecture": 3}, "'general.architecture' should be a string, found 3"),
    "no heads": ({A + "attention.head_count": 0}, "head_count' is 0, 1 to"),
    "heads that do not divide": (
        {A + "attention.head_count": 6},
        "head_count' is 6, which does not divide the width 64",
    ),
    "groups that do not divide": (
        {A + "attention.head_count_kv": 3},
        "head_count_kv' is 3, which does not divide the 4",
    ),
    "heads in words": ({A + "attention.head_count": "four"}, "should be an integer, found 'four'"),
    "heads as a float": ({A + "attention.head_count": 4.0}, "should be an integer, found 4.0"),
    "heads as true": ({A + "attention.head_count": True}, "should be an integer"),
    "heads by layer": ({A + "attention.head_count": [4, 2]}, "differs between layers"),
    "heads as words": ({A + "attention.head_count": ["4", "4"]}, "should be an integer, found an array of 2"),
    "a context of 0": ({A + "context_length": 0}, "context_length' is 0"),
    "an absurd context": ({A + "context_length": 2**31}, "context_length' is 2147483648"),
    "a negative width": ({A + "embedding_length": -64}, "embedding_length' is -64"),
    "absurd layers": ({A + "block_count": 2**31}, "block_count' is 2147483648"),
    "too many layers": ({A + "block_count": 3}, "'blk.2.attn_norm.weight' of shape .* is missing"),
    "too few layers": ({A + "block_count": 1}, "'blk.1.* is not one that a llama model"),
    "another width": (
        {A + "embedding_length": 128, A + "rope.dimension_count": 32},
        r"'token_embd.weight' has shape \(300, 64\).*\(300, 128\)",
    ),
    "another FFN": ({A + "feed_forward_length": 128}, r"'blk.0.ffn_gate.weight' has shape \(96, 64\).*\(128, 64\)"),
    "another vocabulary": ({"tokenizer.ggml.tokens": ["a"]}, r"'token_embd.weight' has shape \(300, 64\).*\(1, 64\)"),
    "a vocabulary of numbers": ({"tokenizer.ggml.tokens": [1, 2]}, "should be an array of strings"),
    "an epsilon of 0": ({A + "attention.layer_norm_rms_epsilon": 0.0}, "epsilon' is 0.0"),
    "an epsilon of NaN": ({A + "attention.layer_norm_rms_epsilon": float("nan")}, "epsilon' is nan"),
    "an odd head": ({A + "attention.key_length": 15}, "15"),
    "other values": ({A + "attention.value_length": 8}, "value_length' is 8, the head dimension 16"),
    "partial RoPE": ({A + "rope.dimension_count": 8}, "dimension_count' is 8, the head dimension 16"),
    "a base of 0": ({A + "rope.freq_base": 0.0}, "freq_base' is 0.0"),
    "a base of infinity": ({A + "rope.freq_base": float("inf")}, "freq_base' is inf"),
    "another scaling": ({A + "rope.scaling.type": "longrope"}, "'longrope', supported are none, linear, yarn"),
    "a negative factor": ({A + "rope.scaling.factor": -1.0}, "factor' is -1.0"),
    "a small YaRN": ({A + "rope.scaling.type": "yarn", A + "rope.scaling.factor": 0.5}, "YaRN needs at least 1"),
    "half a YaRN": ({A + "rope.scaling.yarn_ext_factor": 0.5}, "only 1 is supported"),
    "experts": ({A + "expert_count": 8}, "expert_count' is 8, only 0"),
    "no causality": ({A + "attention.causal": False}, "attention.causal' is False, only True"),
}


@pytest.mark.parametrize("what", BAD_KEYS)
def test_wrong_metadata_is_refused_in_one_line(tmp_path, what):
    keys, says = BAD_KEYS[what]
    if "general.architecture" in keys:  # the writer adds this one itself
        f = open_gguf(write_tiny_gguf(tmp_path / "t.gguf"))
        f.metadata.update(keys)
    else:
        f = open_gguf(write_tiny_gguf(tmp_path / "t.gguf", metadata=keys))
    with pytest.raises(UserError, match=says) as caught:
        ModelConfig.from_gguf(f)
    assert "t.gguf" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["general.architecture", A + "block_count", A + "context_length"])
def test_a_missing_key_is_named(tmp_path, name):
    f = open_gguf(write_tiny_gguf(tmp_path / "t.gguf"))
    del f.metadata[name]
    with pytest.raises(UserError, match=f"'{name}' is missing"):
        ModelConfig.from_gguf(f)


def test_a_missing_unknown_or_weightless_tensor_is_named(tmp_path):
    for name in [name for name, _ in tiny_config(bias=["ffn_up"], tied=True).tensor_shapes()]:
        f = open_gguf(write_tiny_gguf(tmp_path / "t.gguf", bias=["ffn_up"], tied=True))
        tensor = f.tensors.pop(name)
        if name != "blk.0.ffn_up.bias":
            with pytest.raises(UserError, match=f"'{name}' of shape"):
                ModelConfig.from_gguf(f)
        f.tensors[name + ".more"] = tensor
        with pytest.raises(UserError, match=r"is missing|is not one that"):
            ModelConfig.from_gguf(f)
    f = open_gguf(write_tiny_gguf(tmp_path / "t.gguf", quant="Q8_0"))
    f.tensors["output.weight"] = replace(f.tensors["output.weight"], type=GGMLQuantizationType.I32)
    with pytest.raises(UserError, match=r"'output.weight' has type I32; supported are F32"):
        ModelConfig.from_gguf(f)


def test_tensors_of_old_converters_are_ignored(tmp_path):
    f = open_gguf(write_tiny_gguf(tmp_path / "t.gguf"))
    f.tensors["blk.0.attn_rot_embd.weight"] = f.tensors["output_norm.weight"]
    assert ModelConfig.from_gguf(f) == tiny_config()


def test_layers_that_agree_may_be_an_array(tmp_path):
    assert written(tmp_path, metadata={A + "attention.head_count_kv": [2, 2]}) == tiny_config()


def override(tmp_path, given, **kw) -> ModelConfig:
    return ModelConfig.from_gguf(open_gguf(write_tiny_gguf(tmp_path / "t.gguf", **kw)), overrides=given)


def test_overrides(tmp_path):
    base = tiny_config()
    assert override(tmp_path, {"rope_base": None, "context_length": None}) == base
    assert override(tmp_path, {"rope_base": 5e5}).rope.base == 5e5
    assert override(tmp_path, {"context_length": np.int64(512)}).context_length == 512
    linear = override(tmp_path, {"rope_scale": 2}).rope
    assert (linear.scaling, linear.factor, linear.original_context) == ("linear", 2.0, 256)
    yarn = override(tmp_path, {"rope_scale": 2, "rope_scaling": "yarn", "context_length": 512})
    assert (yarn.rope.scaling, yarn.rope.original_context, yarn.context_length) == ("yarn", 256, 512)
    scaled = {"rope_scaling": "yarn", "rope_factor": 4.0}
    assert override(tmp_path, {"rope_scale": 8}, **scaled).rope.scaling == "yarn"
    assert override(tmp_path, {"rope_scaling": "linear"}, **scaled).rope.factor == 4.0
    off = override(tmp_path, {"rope_scaling": "none"}, **scaled).rope
    assert (off.scaling, off.factor) == ("none", 1.0)


@pytest.mark.parametrize(
    "given",
    [
        *({"rope_bsae": 1}, {"rope_base": "big"}, {"rope_base": 0}, {"rope_base": float("nan")}),
        *({"rope_scale": -2.0}, {"rope_scale": True}, {"rope_scale": 2, "rope_scaling": "none"}),
        *({"rope_scaling": "ntk"}, {"rope_scaling": ["yarn"]}, {"rope_scaling": "yarn"}, {"activation": "gelu"}),
        *({"rope_scale": 0.5, "rope_scaling": "yarn"}, {"context_length": 0}, {"context_length": -1}),
        *({"context_length": 2.5}, {"context_length": "many"}, {"context_length": True}, {"context_length": 2**40}),
    ],
    ids=str,
)
def test_bad_overrides_are_refused(tmp_path, given):
    with pytest.raises(UserError, match=next(iter(given))):
        override(tmp_path, given)
