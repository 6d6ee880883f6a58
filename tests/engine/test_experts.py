"""Models with experts against an independent transcription in float64 numpy, from the file's metadata and tensors.

Promised: the router's order of steps is llama.cpp's, ties go to the lower index, and each architecture reads what it
should: the router's input, gating, norms, sinks, windows, layers without RoPE, the activation. `test_hf.py` compares
the same architectures with transformers, `test_c1.py` says that a row's bits depend on its own path alone.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

import specsparse
from specsparse.cli import main as cli
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import GGUFFile, open_gguf
from specsparse.engine.rope import RopeConfig, angles
from specsparse.errors import UserError
from specsparse.measure.costs.roofline import Traffic
from specsparse.models.catalogue import entries
from specsparse.testing import write_tiny_gguf
from tests.cells import cells
from tests.tolerances import FORWARD_NMSE, nmse

IDS = np.random.default_rng(0).integers(0, 300, 20).tolist()
MODELS = {
    "qwen3moe": {"architecture": "qwen3moe", "head_dim": 32},
    "olmoe": {"architecture": "olmoe", "n_kv_heads": 4},
    "smallthinker": {"architecture": "smallthinker", "tied": True},
    "smallthinker-window": {"architecture": "smallthinker", "window": 4096, "gating": "sigmoid"},
    "gpt-oss": {"architecture": "gpt-oss", "window": 6, "rope_scaling": "yarn", "rope_factor": 8.0,
                "original_context": 32},
}  # fmt: skip


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def transcription(f: GGUFFile, ids) -> np.ndarray:
    """Logits float64[n, V], row by row."""
    arch = f.metadata["general.architecture"]
    small, oss = arch == "smallthinker", arch == "gpt-oss"

    def key(name, default=None):
        return f.metadata.get(f"{arch}.{name}", default)

    def tensor(name):
        return f.tensors[name].dequantize().astype(np.float64) if name in f.tensors else None

    heads, groups, k = key("attention.head_count"), key("attention.head_count_kv"), key("expert_used_count")
    d = key("attention.key_length", key("embedding_length") // heads)
    radians, magnitude = key("rope.freq_base") ** (-np.arange(0, d, 2) / d), 1.0
    if oss and key("rope.scaling.type"):  # a ramp between pairs that are no whole numbers, as gpt-oss was trained
        turns = [d * np.log(32 / (t * 2 * np.pi)) / (2 * np.log(key("rope.freq_base"))) for t in (32.0, 1.0)]
        low, high = max(turns[0], 0.0), min(turns[1], d - 1.0)
        ramp = np.clip((np.arange(d // 2) - low) / max(high - low, 0.001), 0, 1)
        radians, magnitude = radians * (1 - ramp) + radians / 8 * ramp, 1 + 0.1 * np.log(8)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + key("attention.layer_norm_rms_epsilon")) * tensor(name)

    def turned(x):
        z = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * np.exp(1j * np.arange(len(x))[:, None, None] * radians)
        return magnitude * np.concatenate([z.real, z.imag], -1)

    def expert(at, e, x):
        gate, up, down = (
            (tensor(f"{at}ffn_{name}_exps.weight")[e], tensor(f"{at}ffn_{name}_exps.bias"))
            for name in ("gate", "up", "down")
        )
        g, u = (w @ x + (0 if b is None else b[e]) for w, b in (gate, up))
        if oss:
            g, u = np.minimum(g, 7), np.clip(u, -7, 7) + 1
            h = g * sigmoid(1.702 * g) * u
        else:
            h = np.maximum(g, 0) * u if small else g * sigmoid(g) * u
        return down[0] @ h + (0 if down[1] is None else down[1][e])

    def routed(at, r, x):
        """As the models' own code has it: the best logits, and their weights."""
        logits = tensor(f"{at}ffn_gate_inp.weight") @ r
        logits = logits if not oss else logits + tensor(f"{at}ffn_gate_inp.bias")
        best = np.argsort(-logits, kind="stable")[:k]
        if small and key("expert_gating_func") == 2:
            weights = sigmoid(logits[best]) / sigmoid(logits[best]).sum()
        else:
            weights = softmax(logits)[best] if arch == "olmoe" else softmax(logits[best])
        return sum(w * expert(at, e, x) for w, e in zip(weights, best, strict=True))

    x = tensor("token_embd.weight")[ids]
    for i in range(key("block_count")):
        at, entered = f"blk.{i}.", x
        z = norm(x, at + "attn_norm.weight")
        q, k_, v = (
            z @ tensor(f"{at}attn_{n}.weight").T + (tensor(f"{at}attn_{n}.bias") if oss else 0) for n in "qkv"
        )
        if arch == "olmoe":
            q, k_ = norm(q, at + "attn_q_norm.weight"), norm(k_, at + "attn_k_norm.weight")
        q, k_, v = (part.reshape(len(ids), -1, d) for part in (q, k_, v))
        if arch == "qwen3moe":
            q, k_ = norm(q, at + "attn_q_norm.weight"), norm(k_, at + "attn_k_norm.weight")
        if not (small and key("attention.sliding_window") and i % 4 == 0):
            q, k_ = turned(q), turned(k_)
        k_, v = (part.repeat(heads // groups, 1) for part in (k_, v))
        back = np.arange(len(ids))[:, None] - np.arange(len(ids))
        seen = (back >= 0) & ((back < key("attention.sliding_window")) if oss and i % 2 == 0 else True)
        scores = np.where(seen, np.einsum("qhd,khd->hqk", q, k_) / np.sqrt(d), -np.inf)
        mass = np.exp(scores)
        sinks = np.exp(tensor(at + "attn_sinks.weight"))[:, None, None] if oss else 0
        mixed = np.einsum("hqk,khd->qhd", mass / (mass.sum(-1, keepdims=True) + sinks), v).reshape(len(ids), -1)
        x = x + mixed @ tensor(at + "attn_output.weight").T + (tensor(at + "attn_output.bias") if oss else 0)
        z = norm(x, at + ("post_attention_norm.weight" if oss else "ffn_norm.weight"))
        x = x + np.array([routed(at, r, row) for r, row in zip(entered if small else z, z, strict=True)])
    output = tensor("output.weight") if "output.weight" in f.tensors else tensor("token_embd.weight")
    return norm(x, "output_norm.weight") @ output.T


# test_hf.py has the others.
@pytest.fixture(scope="module", params=cells(MODELS, ["smallthinker-window", "gpt-oss"]))
def path(request, tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", d_ff=32, **MODELS[request.param])


def test_logits_of_experts_equal_the_transcription(path):
    model = specsparse.load(path, kv_dtype="f32")
    assert nmse(model.logits(IDS), transcription(open_gguf(path), IDS)) <= FORWARD_NMSE["f32"]


@pytest.mark.parametrize("path", ["gpt-oss"], indirect=True)
def test_batched_kernels_run_experts_and_sinks(path):
    model = specsparse.load(path, kv_dtype="f32", backend="xla")
    assert nmse(model.logits(IDS), transcription(open_gguf(path), IDS)) <= FORWARD_NMSE["f32"]


def test_yarn_of_gpt_oss_is_rounded_if_asked(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", d_ff=32, **MODELS["gpt-oss"])
    ours, theirs = (specsparse.load(path, yarn=yarn).config.rope for yarn in (None, "llama.cpp"))
    assert not np.allclose(angles(ours)[0], angles(theirs)[0])
    released = [RopeConfig(150000.0, 64, "neox", "yarn", 32.0, 4096, rounds_yarn=rounds) for rounds in (False, True)]
    for rope, (low, high) in zip(released, ((8.0928, 17.3980), (8, 18)), strict=True):
        whole = angles(RopeConfig(150000.0, 64, "neox"))[0]
        kept = (angles(rope)[0] / whole - 1 / 32) / (1 - 1 / 32)
        np.testing.assert_allclose(kept, 1 - np.clip((np.arange(32) - low) / (high - low), 0, 1), atol=1e-4)


@pytest.mark.parametrize("quant", cells(["F16", "Q8_0", "Q4_K", "MXFP4"], ["MXFP4"]))
def test_quantised_experts_are_those_of_their_values(tmp_path, quant):
    """All of them are chosen, since a rounded row may choose others."""
    wide = {"d_model": 256, "d_ff": 256} if quant == "Q4_K" else {"d_ff": 32}
    wide |= {"architecture": "qwen3moe", "n_layers": 1, "n_experts": 2, "n_chosen": 2}
    path = write_tiny_gguf(tmp_path / "m.gguf", quant=quant, **wide)
    got, exact = (specsparse.load(path, kv_dtype="f32", float_weights=floats).logits(IDS) for floats in (False, True))
    assert nmse(got, exact) <= FORWARD_NMSE["Q8_0/f16"]


@pytest.mark.parametrize("drafter", cells(["prompt_lookup", "layer_skip"], ["prompt_lookup"]))
def test_speculation_with_experts_writes_the_same_text(tmp_path, drafter):
    path = write_tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", architecture="qwen3moe", d_ff=32, n_layers=2)
    model = specsparse.load(path)
    options = {"sampling": specsparse.SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True), "seed": 3}
    plain = specsparse.generate(model, ["hello hello hello"], **options)
    spec = specsparse.generate(model, ["hello hello hello"], drafter=drafter, **options)
    assert spec[0].token_ids == plain[0].token_ids


def test_inspect_says_what_experts_read(tmp_path, capsys):
    path = write_tiny_gguf(tmp_path / "m.gguf", architecture="qwen3moe", d_ff=32, n_experts=8, n_chosen=2)
    f = open_gguf(path)
    config, experts = ModelConfig.from_gguf(f), sum(t.nbytes for n, t in f.tensors.items() if "_exps" in n)
    load = Traffic.from_gguf(f, config)
    others = sum(t.nbytes for n, t in f.tensors.items() if "_exps" not in n and n != "token_embd.weight")
    assert load.weight_bytes == pytest.approx(others + experts / 4)
    assert load.read_weights(2) == pytest.approx(others + experts * (1 - 0.75**2))
    assert specsparse.load(path).footprint.file == pytest.approx(load.weight_bytes, abs=1)
    assert cli.main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "2 of 8 experts by softmax" in found["model"]["FFN"]
    assert found["rates"]["rows_bytes"]["8"] == pytest.approx(load.read_weights(8))


ODD = {
    "shared experts": "blk.0.ffn_up_shexp.weight",
    "biases of the choice": "blk.0.exp_probs_b.bias",
    "gate and up of experts in one": "blk.0.ffn_gate_up_exps.weight",
    "scales of experts": "blk.0.ffn_up_exps.scale",
}
KEYS = {
    "expert_weights_scale": 2.5,
    "expert_weights_norm": False,
    "expert_gating_func": 2,
    "expert_used_count": 9,
    "expert_feed_forward_length": 24,
    "attention.clamp_kqv": 8.0,
}


def test_experts_that_are_not_built_are_refused_by_name(tmp_path):
    f = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", architecture="qwen3moe", d_ff=32))
    any_tensor = next(iter(f.tensors.values()))
    for says, name in ODD.items():
        with pytest.raises(UserError, match=f"{says}.*{name}"):
            ModelConfig.from_gguf(replace(f, tensors={**f.tensors, name: any_tensor}))
    for key, value in KEYS.items():
        with pytest.raises(UserError, match=key):
            ModelConfig.from_gguf(replace(f, metadata={**f.metadata, f"qwen3moe.{key}": value}))
    for options in ({"mesh": 1}, {"activation": "relu"}, {"faithful_f16": True}):
        with pytest.raises(UserError, match=r"is for (dense|PowerInfer's) models"):
            specsparse.load(f.path, **options)


def test_the_catalogue_knows_models_with_experts():
    sizes = {name: e.shape for name, e in entries().items() if e.shape is not None and e.shape.experts}
    assert {s.architecture for s in sizes.values()} == {"qwen3moe", "olmoe", "smallthinker", "gpt-oss"}


def test_the_oracle_leaves_idle_neurons_of_relu_experts_out_and_keeps_every_bit(tmp_path):
    sizes = {"quant": "Q4_0", "n_layers": 2, "d_ff": 64}
    file = write_tiny_gguf(tmp_path / "relu.gguf", architecture="smallthinker", **sizes)
    dense, oracle = specsparse.load(file, backend="native"), specsparse.load(file, backend="native", ffn="oracle")
    assert oracle.params.layers[1].experts.skip is not None and oracle.footprint == dense.footprint
    np.testing.assert_array_equal(oracle.logits(IDS).view(np.uint32), dense.logits(IDS).view(np.uint32))
    for other in ({"architecture": "qwen3moe", **sizes}, {"architecture": "smallthinker", "quant": "Q8_0"}):
        with pytest.raises(UserError, match="ffn='oracle'"):
            specsparse.load(write_tiny_gguf(tmp_path / "other.gguf", **other), backend="native", ffn="oracle")
