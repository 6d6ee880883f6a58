"""Skipping the zeros of a ReLU model gives the dense model's bits, reads no closed neuron, and counts what it saw."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse.engine import cache as kv
from specsparse.engine import llama
from specsparse.engine.config import ACTIVATION_KEY, ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.kernels import SkipWeights, skippable
from specsparse.kernels.native import cpu
from specsparse.kernels.neurons import CHUNK, neuron_blocks
from specsparse.kernels.packing.dequant import dequantize
from specsparse.kernels.packing.pack import SUPPORTED, pack_qtensor
from specsparse.kernels.qtensor import BLOCK, ROWS
from specsparse.powerinfer import zero_skip
from specsparse.powerinfer.fewer import bytes_read, gated
from specsparse.predictors import FFN, get_predictor
from specsparse.testing import random_quantised, write_tiny_gguf
from tests.contracts.rigs import Rig, tiny_rig
from tests.kernels.test_kernels import ISAS, use

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_missing()))

SHAPES = {  # one chunk; half a chunk at the end; an odd number; neurons that fill no group of items
    "small": {"d_model": 64, "d_ff": 96},
    "odd": {"d_model": 160, "d_ff": 224, "n_heads": 5, "n_kv_heads": 5, "head_dim": 32},
    "wide": {"d_model": 576, "d_ff": 1536, "n_heads": 9, "n_kv_heads": 3},
}
IDS = [3, 1, 4, 15, 9, 2, 6]


@pytest.fixture(scope="module", params=[(s, a) for s in SHAPES for a in zero_skip.ACTIVATIONS], ids="-".join)
def pair(request, tmp_path_factory) -> tuple[Rig, Rig]:
    """A ReLU model read whole and with its zeros skipped; an eighth is active in its first layer, half in the other."""
    shape, act = request.param
    rig = tiny_rig(tmp_path_factory.mktemp(shape), quant="Q4_0", n_layers=2, **SHAPES[shape])
    first, *others = rig.params.layers
    gate = np.array(first.ffn_gate.data)
    scales = [r for r in range(ROWS) if r % 4]  # f16 at the beginning of each block
    gate.reshape(-1, 9 * ROWS, 2)[:, scales] = 0
    first = first._replace(ffn_gate=dataclasses.replace(first.ffn_gate, data=jnp.asarray(gate)))
    rig = dataclasses.replace(
        rig, config=dataclasses.replace(rig.config, activation=act), params=rig.params._replace(layers=(first, *others))
    )
    forward = llama.make_forward(rig.config, specsparse.kernels.get("native"))
    assert zero_skip.in_params(rig.params, rig.config, specsparse.kernels.get("native"))
    dense = dataclasses.replace(rig, forward=forward, programs={})
    return dense, dataclasses.replace(dense, params=zero_skip.skipping(rig.params))


def logits_of(rig: Rig) -> np.ndarray:
    """One token at a time, then three, then one more."""
    cache, out = rig.cache(), []
    for piece in [[i] for i in IDS] + [[5, 3, 5], [8]]:
        logits, cache = rig.feed([piece], cache, width=len(piece))
        out.append(logits[0])
    return np.concatenate(out)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", ISAS)
def test_the_bits_are_the_dense_ones(pair, isa, threads):
    dense, skipping = pair
    want = logits_of(dense)
    assert np.isfinite(want).all()
    use(isa, threads)
    np.testing.assert_array_equal(logits_of(skipping), want)


def counted(rig: Rig, tokens, counts):
    n_valid = jnp.asarray(counts, jnp.int32)
    cache = kv.init(
        layers=rig.config.n_layers, batch=len(tokens), kv_heads=rig.config.n_kv_heads, capacity=64,
        head_dim=rig.config.head_dim, dtype=jnp.float16,
    )  # fmt: skip
    out, _ = jax.jit(rig.forward)(rig.params, jnp.asarray(tokens, jnp.int32), cache, n_valid_B=n_valid)
    return jax.tree.map(np.asarray, out.stats)


@pytest.mark.parametrize("counts", [[1, 0], [3, 2]])
def test_counts(pair, counts):
    """Against the neurons of the same rows one by one; a row that does not count has none."""
    dense, skipping = pair
    tokens = [[3, 1, 4], [1, 5, 9]]
    stats = counted(skipping, tokens, counts)
    assert counted(dense, tokens, counts) is None
    ffn = FFN.from_config(dense.config, specsparse.kernels.get("native"))
    rows = first_residuals(dense, tokens, counts)
    live = np.asarray(ffn.neurons(dense.params.layers[0], jnp.asarray(rows), jnp.asarray(counts, jnp.int32))) != 0
    np.testing.assert_array_equal(stats.nonzero[0], live.sum(axis=1))
    assert stats.active[0] == live.any(axis=0).sum() > 0
    np.testing.assert_array_equal(stats.kept, stats.nonzero)


def first_residuals(rig: Rig, tokens, counts) -> np.ndarray:
    """What the first layer's FFN reads: the residual after its attention."""
    attention = jax.jit(llama.make_attention(rig.config, specsparse.kernels.get("native")))
    cache = kv.init(
        layers=1, batch=len(tokens), kv_heads=rig.config.n_kv_heads, capacity=64, head_dim=rig.config.head_dim,
        dtype=jnp.float16,
    )  # fmt: skip
    x = specsparse.kernels.get("native").embed(rig.params.embedding, jnp.asarray(tokens, jnp.int32).reshape(-1))
    n_valid = jnp.asarray(counts, jnp.int32)
    layer = rig.params.layers[0]
    return np.asarray(attention(layer, rig.params, x, cache.k[0], cache.v[0], cache.length, n_valid, None)[0])


def test_closed_neurons_are_not_read(pair):
    """Their up and down may hold anything: here scales that are NaN. Of many open ones the dense down is read."""
    _, skipping = pair
    token = [[7]]
    want, _ = skipping.feed(token, skipping.cache(), width=1)
    layers = skipping.params.layers
    ffn = FFN.from_config(skipping.config, specsparse.kernels.get("native"))
    rows = jnp.asarray(first_residuals(skipping, token, [1]))
    closed = np.asarray(ffn.gate(layers[0], rows, jnp.asarray([1], jnp.int32)))[0] <= 0
    assert 0 < closed.sum() < len(closed)

    def fed(index, **fields):
        own = layers[index]._replace(sparse=layers[index].sparse._replace(**fields))
        other = dataclasses.replace(
            skipping, params=skipping.params._replace(layers=(*layers[:index], own, *layers[index + 1 :]))
        )
        return other.feed(token, other.cache(), width=1)[0]

    up, down = np.array(layers[0].sparse.up.data), np.array(layers[0].sparse.down)
    up[closed] = 0xFF
    _, codes = scales_and_codes(down)
    codes[closed.reshape(-1, BLOCK)] ^= 0xFF
    broken = dataclasses.replace(layers[0].sparse.up, data=jnp.asarray(up))
    np.testing.assert_array_equal(fed(0, up=broken, down=jnp.asarray(down)), want)
    codes[~closed.reshape(-1, BLOCK)] ^= 0xFF
    assert (fed(0, down=jnp.asarray(down)) != want).any()
    np.testing.assert_array_equal(fed(1, down=jnp.zeros_like(layers[1].sparse.down)), want)


@pytest.mark.parametrize("shape", [(64, 96), (160, 224), (576, 64)])
def test_blocks_of_neurons_hold_the_matrix(shape):
    outputs, neurons = shape
    raw = random_quantised("Q4_0", outputs, neurons, 3)
    kind = next(t for t in SUPPORTED if t.name == "Q4_0")
    scales, codes = scales_and_codes(np.asarray(neuron_blocks(pack_qtensor(raw, kind, shape))))
    codes = codes.reshape(*codes.shape[:2], -1, 1, CHUNK // 2)
    numbers = np.concatenate([codes & 15, codes >> 4], axis=3).astype(np.float32) - 8
    values = scales[:, None] * numbers.reshape(*numbers.shape[:2], -1)
    found = values.reshape(neurons, -1).T
    np.testing.assert_array_equal(found[:outputs], np.asarray(dequantize(pack_qtensor(raw, kind, shape))))
    assert (found[outputs:] == 0).all()


def scales_and_codes(down: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of `neuron_blocks`: float16[blocks, outputs] and uint8[blocks, neuron, outputs / 2]."""
    at = down.shape[1] // 9
    return down[:, :at].view("<f2"), down[:, at:].reshape(len(down), BLOCK, -1)


def test_other_types_are_not_skippable():
    kind = next(t for t in SUPPORTED if t.name == "Q8_0")
    matrix = pack_qtensor(random_quantised("Q8_0", 64, 64, 3), kind, (64, 64))
    assert not skippable(matrix)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_gguf(
        tmp_path_factory.mktemp("m") / "m.gguf", quant="Q4_0", d_model=64, d_ff=96, metadata={ACTIVATION_KEY: "relu"}
    )


def test_the_oracle_of_such_a_file(path):
    """Loaded or gated, it is the dense model with fewer bytes, and says what it kept."""
    dense, oracle = specsparse.load(path), specsparse.load(path, ffn="oracle")
    assert all(isinstance(layer.sparse, SkipWeights) for layer in oracle.params.layers)
    predictor = get_predictor("oracle", FFN.from_config(dense.config, dense.kernels))
    other = gated(dense, predictor, [None] * dense.config.n_layers)
    for model in (oracle, other):
        assert specsparse.generate(model, [1, 5, 9], max_tokens=12).token_ids == (
            specsparse.generate(dense, [1, 5, 9], max_tokens=12).token_ids
        )
    own, following = bytes_read(other, predictor)
    gate = sum(layer.ffn_gate.nbytes for layer in dense.params.layers)
    assert own == gate and following > 0


def test_files_it_does_not_serve(path, tmp_path):
    native, reference = (specsparse.kernels.get(name) for name in ("native", "reference"))
    f = open_gguf(path)
    config = ModelConfig.from_gguf(f)
    assert zero_skip.in_file(f, config, native) and not zero_skip.in_file(f, config, reference)
    silu = open_gguf(write_tiny_gguf(tmp_path / "silu.gguf", quant="Q4_0", d_ff=96))
    assert not zero_skip.in_file(silu, ModelConfig.from_gguf(silu), native)
    floats = write_tiny_gguf(tmp_path / "f16.gguf", quant="F16", d_ff=96, metadata={ACTIVATION_KEY: "relu"})
    assert not zero_skip.in_file(open_gguf(floats), ModelConfig.from_gguf(open_gguf(floats)), native)


def test_the_real_model(smollm2):
    """The shipped ReLU model: prompt, plain decoding and verification, all with the dense model's tokens."""
    dense, oracle = (specsparse.load("smollm2-135m-relu", ffn=ffn) for ffn in ("dense", "oracle"))
    prompt = "The river rises in the hills. The river"
    drafted = {"drafter": "prompt_lookup", "verifier": "greedy"}
    runs = (dense, {}), (oracle, {}), (oracle, drafted)
    texts = [specsparse.generate(m, prompt, max_tokens=32, ignore_eos=True, **more).token_ids for m, more in runs]
    assert texts[0] == texts[1] == texts[2]
    cache = oracle.new_cache(1, oracle.capacity_for(4))
    params = oracle.params_for(oracle.capacity_for(4))
    stats = jax.jit(oracle.forward)(params, jnp.asarray([[5]], jnp.int32), cache)[0].stats
    assert 0.15 < np.mean(stats.nonzero) / oracle.config.d_ff < 0.45
