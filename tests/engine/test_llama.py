"""The forward pass against an independent transcription of Llama in float64 numpy.

Promised for every variant the loader knows: grouped heads, tied or separate output, biases, both pairings of RoPE, its
scalings (linear, YaRN, frequency factors) and magnitudes, explicit head sizes. The float kernels agree to rounding; the
native ones, whose f16 cache and int8 rows cost more, to the table of `tests/tolerances.py`.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse.engine import llama
from specsparse.engine.config import PROJECTIONS
from specsparse.engine.devices import OneDevice
from specsparse.engine.gguf.reader import GGUFFile, open_gguf
from specsparse.errors import UserError
from specsparse.kernels.native import cpu
from specsparse.testing import write_tiny_gguf
from tests.cells import cells
from tests.tolerances import FORWARD_NMSE, nmse

VARIANTS = {
    "plain": {"n_layers": 2},
    "one-key-head": {"n_kv_heads": 1},
    "all-key-heads": {"n_kv_heads": 4},
    "tied": {"tied": True},
    "biases": {"bias": True, "norm_eps": 1e-2},
    "some-biases": {"bias": ("attn_v", "ffn_down")},
    "neox": {"architecture": "qwen2"},
    "head-dim": {"head_dim": 32, "d_model": 80, "d_ff": 77},
    "base": {"rope_base": 500.0},
    "linear": {"rope_scaling": "linear", "rope_factor": 4.0},
    "yarn": {"rope_scaling": "yarn", "rope_factor": 4.0, "original_context": 32, "rope_base": 100.0},
    "yarn-neox-magnitude": {
        "architecture": "qwen2", "rope_scaling": "yarn", "rope_factor": 8.0, "original_context": 64, "attn_factor": 0.9,
    },
    "factors": {"freq_factors": True, "rope_base": 500000.0},
}  # fmt: skip
LENGTH = 45


def yarn_angles(d: int, base: float, factor: float, original: int) -> tuple[np.ndarray, float]:
    """Angles and magnitude of YaRN (Peng et al., arXiv:2309.00071), beta 32 and 1, pair by pair."""

    def pair(turns: float) -> float:
        return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0.0, math.floor(pair(32.0))), min(d - 1.0, math.ceil(pair(1.0)))
    angles = []
    for i in range(d // 2):
        plain = base ** (-2.0 * i / d)
        mix = min(1.0, max(0.0, (i - low) / max(0.001, high - low)))  # 0: turns fast, kept; 1: slow, stretched
        angles.append(plain * (1 - mix) + plain / factor * mix)
    return np.array(angles), 1 + 0.1 * math.log(factor)


def oracle(f: GGUFFile, ids: list[int]) -> np.ndarray:
    """Logits [n, V] in float64, from the file's metadata and tensors, position by position and head by head."""
    meta, arch = f.metadata, f.metadata["general.architecture"]

    def key(name, default=None):
        return meta.get(f"{arch}.{name}", default)

    def tensor(name):
        return f.tensors[name].dequantize().astype(np.float64) if name in f.tensors else None

    heads, groups = key("attention.head_count"), key("attention.head_count_kv")
    d = key("attention.key_length", key("embedding_length") // heads)
    base, factor = key("rope.freq_base"), key("rope.scaling.factor", 1.0)
    angles, magnitude = base ** (-np.arange(0, d, 2) / d), key("rope.scaling.attn_factor", 1.0)
    if (divisors := tensor("rope_freqs.weight")) is not None:
        angles = angles / divisors
    if key("rope.scaling.type") == "linear":
        angles = angles / factor
    if key("rope.scaling.type") == "yarn":
        angles, more = yarn_angles(d, base, factor, key("rope.scaling.original_context_length"))
        magnitude *= more

    def norm(x, weight):
        return x / np.sqrt((x * x).mean() + key("attention.layer_norm_rms_epsilon")) * weight

    def turn(x, position):
        """One head; complex numbers do the rotation."""
        half = d // 2
        z = x[:half] + 1j * x[half:] if arch == "qwen2" else x[0::2] + 1j * x[1::2]
        z = z * np.exp(1j * angles * position) * magnitude
        return np.concatenate([z.real, z.imag]) if arch == "qwen2" else np.stack([z.real, z.imag], 1).reshape(-1)

    layers = []
    for i in range(key("block_count")):
        names = ("attn_norm", "ffn_norm", *PROJECTIONS)
        layers.append({n: (tensor(f"blk.{i}.{n}.weight"), tensor(f"blk.{i}.{n}.bias")) for n in names})

    def times(layer, name, x):
        weight, bias = layer[name]
        return weight @ x + (0 if bias is None else bias)

    embedding, out_norm = tensor("token_embd.weight"), tensor("output_norm.weight")
    output = tensor("output.weight") if "output.weight" in f.tensors else embedding
    past = [([], []) for _ in layers]
    logits = []
    for position, token in enumerate(ids):
        x = embedding[token]
        for layer, (keys, values) in zip(layers, past, strict=True):
            h = norm(x, layer["attn_norm"][0])
            q, k, v = (times(layer, n, h).reshape(-1, d) for n in ("attn_q", "attn_k", "attn_v"))
            keys.append([turn(row, position) for row in k])
            values.append(v)
            mixed = []
            for head in range(heads):
                g = head // (heads // groups)
                scores = np.array([turn(q[head], position) @ old[g] for old in keys]) / math.sqrt(d)
                weights = np.exp(scores - scores.max())
                mixed.append(sum(w * old[g] for w, old in zip(weights, values, strict=True)) / weights.sum())
            x = x + times(layer, "attn_output", np.concatenate(mixed))
            h = norm(x, layer["ffn_norm"][0])
            gate = times(layer, "ffn_gate", h)
            x = x + times(layer, "ffn_down", gate / (1 + np.exp(-gate)) * times(layer, "ffn_up", h))
        logits.append(output @ norm(x, out_norm))
    return np.array(logits)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return np.random.default_rng(0).integers(0, 300, LENGTH).tolist()


@pytest.fixture(scope="module", params=VARIANTS)
def case(request, tmp_path_factory, ids):
    """Of one layer where the plain one has two: what varies is within a layer."""
    variant = {"n_layers": 1} | VARIANTS[request.param]
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", context_length=64, **variant)
    return path, oracle(open_gguf(path), ids)


# Tables that both backends read, with one magnitude or pairing; what the layers hand to the kernels of either.
ALIKE = ("linear", "yarn", "factors", "base", "tied", "some-biases", "all-key-heads")
MATRIX = [(name, backend) for name in VARIANTS for backend in ("reference", "native")]


@pytest.mark.parametrize(
    ("case", "backend"), cells(MATRIX, [m for m in MATRIX if m[1] == "native" or m[0] not in ALIKE]), indirect=["case"]
)
def test_logits_equal_the_transcription(case, ids, backend):
    path, wanted = case
    if backend == "native" and not cpu.available():
        pytest.skip(f"no native kernels: {cpu.why_missing()}")
    got = specsparse.load(path, backend=backend, kv_dtype="f32").logits(ids)
    assert nmse(got, wanted) <= FORWARD_NMSE["f32"]


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16"])
@pytest.mark.parametrize("quant", ["F32", "Q8_0"])
def test_a_smaller_cache_and_quantised_weights_cost_what_they_cost(tmp_path, ids, kv_dtype, quant):
    path = write_tiny_gguf(tmp_path / "m.gguf", context_length=64, quant=quant)
    got = specsparse.load(path, kv_dtype=kv_dtype).logits(ids)
    assert nmse(got, oracle(open_gguf(path), ids)) <= FORWARD_NMSE[f"{quant}/{kv_dtype}"]


def test_what_a_forward_pass_returns(tmp_path, ids):
    """The last row alone, hidden states, some layers only: parts of the whole, bit for bit."""
    model = specsparse.load(write_tiny_gguf(tmp_path / "m.gguf", context_length=64))
    params, tokens = model.params_for(64), jnp.asarray([ids[:8], ids[8:16]], jnp.int32)
    n_valid = jnp.array([8, 5], jnp.int32)

    def run(**want):
        return model.forward(params, tokens, model.new_cache(2, 64), n_valid_B=n_valid, want=llama.Want(**want))[0]

    whole = run(hidden=True)
    assert whole.logits.shape == (2, 8, 300) and whole.hidden.shape == (2, 8, 64) and whole.stats is None
    last = run(logits="last")
    np.testing.assert_array_equal(last.logits[:, 0], np.stack([whole.logits[0, 7], whole.logits[1, 4]]))
    assert last.hidden is None and run(logits="none").logits is None
    assert (np.asarray(whole.logits)[1, 5:] == 0).all() and (np.asarray(whole.hidden)[1, 5:] == 0).all()
    some, every = run(layers=(0,)), run(layers=(0, 1))
    np.testing.assert_array_equal(every.logits, whole.logits)
    assert not np.array_equal(some.logits, whole.logits)


def test_a_cache_larger_than_the_memory_is_refused_before_it_is_made():
    with pytest.raises(UserError, match="max_tokens"):
        OneDevice().new_cache(layers=8, batch=64, kv_heads=8, capacity=1 << 20, head_dim=128)


def test_a_server_of_many_lengths_keeps_few_rotary_tables(tmp_path):
    model = specsparse.load(write_tiny_gguf(tmp_path / "t.gguf", n_layers=1, context_length=8192))
    for tokens in range(256, 8192, 256):
        assert model.params_for(tokens).cos.shape[1] == tokens
    assert len(model.programs.tables) <= 16 and 7936 in model.programs.tables
