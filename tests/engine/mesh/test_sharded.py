"""A model over two and four CPU devices against one. JAX must know of them before it starts: a process of its own."""

import os
from pathlib import Path

import numpy as np
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.engine.noise import NoiseStream, seed_words, uniform
from specsparse.testing import write_tiny_gguf
from tests.other_process import found_by
from tests.tolerances import MESH_NMSE, nmse

IDS = [(17 * i + 5) % 300 for i in range(28)]  # from all over the vocabulary
SEEDS = np.stack([seed_words(seed) for seed in (0, 3, 2**40 + 1)])
GREEDY = {"max_tokens": 12, "ignore_eos": True}
SAMPLED = SamplingParams(temperature=0.9, **GREEDY)
EVEN = {"n_heads": 8, "n_kv_heads": 4, "d_model": 128, "d_ff": 256, "n_layers": 1}
MODELS = {
    "float": {"quant": "F32", **EVEN},
    "q4_1": {"quant": "Q4_1", **EVEN},
    "super": {"quant": "Q4_K", **EVEN, "d_model": 512, "d_ff": 512},
    "gemma3": {"quant": "F32", "architecture": "gemma3", "full_every": 2, "head_dim": 32},
    "uneven": {"quant": "Q8_0", "architecture": "qwen2", "bias": True, "n_heads": 6, "n_kv_heads": 3, "d_model": 96},
}
"""Nothing of the last divides: 3 key/value heads, 96 neurons in blocks of 32, 300 tokens."""

COMMON = """
import sys
from functools import partial
from pathlib import Path
import jax
import numpy as np
import specsparse
from specsparse.engine.noise import NoiseStream, uniform
from specsparse.errors import UserError
from specsparse.speculative.drafters import get_drafter
from tests.engine.mesh.test_sharded import GREEDY, IDS, SAMPLED, SEEDS

folder, out = Path(sys.argv[1]), {}

def load(name, mesh, **options):
    return specsparse.load(folder / f"{name}.gguf", mesh=mesh, **options)

def tokens(model, **how):
    return specsparse.generate(model, IDS, **how).token_ids
"""

FORWARD = """
def bytes_of(trees):
    each = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(trees):
        for shard in leaf.addressable_shards:
            each[shard.device] += shard.data.nbytes
    return np.array([n for n in each.values() if n])

for ways in (2, 4):
    model = load("q4_1", ways)
    out[f"q4_1 {ways}"] = model.logits(IDS)
    out[f"greedy {ways}"] = tokens(model, **GREEDY)
    out[f"bytes {ways}"] = bytes_of([[l.attn_q, l.attn_output, l.ffn_up, l.ffn_down] for l in model.params.layers])
    out[f"all bytes {ways}"] = bytes_of(model.params)
    out[f"cache bytes {ways}"] = bytes_of(model.new_cache(2, 64).k)
stream = specsparse.stream(model, IDS, **GREEDY)
list(stream)
out["stream"] = stream.generation.token_ids
out["lookup"] = tokens(model, drafter="prompt_lookup", verifier="greedy", **GREEDY)
for name in ("super", "uneven"):
    out[f"{name} 2"] = load(name, 2).logits(IDS)
out["gemma3 2"] = load("gemma3", 2, kv_dtype="f32").logits(IDS)  # norms of what the devices add up
devices = np.array(jax.devices())[[3, 1, 0, 2]]
chosen = load("float", jax.sharding.Mesh(devices, ("x",)), kv_dtype="f32")
out["float 4"] = chosen.logits(IDS)
everywhere = jax.sharding.NamedSharding(chosen.params.output.data.sharding.mesh, jax.sharding.PartitionSpec())
out["noise 4"] = jax.jit(partial(uniform, stream=NoiseStream.ACCEPT, position=5), in_shardings=everywhere)(SEEDS)
out["where"] = np.array([d.id for d in chosen.params.output.data.sharding.mesh.devices])
for name, ask in {"head": {"drafter": "head"}, "devices": {"mesh": 8}, "heads": {"name": "uneven"}}.items():
    try:
        asked = load(ask.get("name", "q4_1"), ask.get("mesh", 4))
        tokens(asked, drafter=ask["drafter"], **GREEDY)
    except UserError as error:
        out[f"refused {name}"] = str(error)
np.savez(sys.argv[2], **out)
"""

DECODING = """
out["xla"] = load("float", 2, kv_dtype="f32", backend="xla").logits(IDS)
model = load("uneven", 3)
out["sampled"] = tokens(model, sampling=SAMPLED, seed=3)
spec = {"verifier": "match", "sampling": SAMPLED, "seed": 3}
for drafter in ("prompt_lookup", "layer_skip"):
    out[drafter] = tokens(model, drafter=drafter, **spec)
    out[f"{drafter} host"] = tokens(model, drafter=drafter, loop="host", **spec)
out["model"] = tokens(model, drafter=get_drafter("model", model=str(folder / "float.gguf")), **spec)
batch = specsparse.generate(model, [IDS, IDS[:5]], sampling=SAMPLED, seed=3)
out["batch"] = batch[0].token_ids
np.savez(sys.argv[2], **out)
"""


def run(code: str, folder: Path, *, devices: int) -> dict[str, np.ndarray]:
    """What `code` finds in a process that has so many CPU devices."""
    env = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
        "SPECSPARSE_THREADS": "1",  # of each device
    }
    out = folder / "out.npz"
    return found_by(COMMON + code, folder, out, out=out, env=env)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    for name, options in MODELS.items():
        write_tiny_gguf(folder / f"{name}.gguf", **options)
    return folder


@pytest.fixture(scope="module")
def mesh(folder):
    return run(FORWARD, folder, devices=4)


@pytest.fixture(scope="module")
def one(folder):
    """Loads a model on one device."""
    loaded = {}

    def load(name, **options):
        key = name, *options.items()
        if key not in loaded:
            loaded[key] = specsparse.load(folder / f"{name}.gguf", **options)
        return loaded[key]

    return load


def test_logits_of_float_weights(one, mesh):
    wanted = one("float", kv_dtype="f32").logits(IDS)
    assert nmse(mesh["float 4"], wanted) < MESH_NMSE["f32"]
    assert nmse(mesh["gemma3 2"], one("gemma3", kv_dtype="f32").logits(IDS)) < MESH_NMSE["f32"]
    assert list(mesh["where"]) == [3, 1, 0, 2]  # a mesh that was given is taken as it is


def test_logits_of_packed_weights(one, mesh):
    for name, ways in (("q4_1", 2), ("q4_1", 4), ("super", 2), ("uneven", 2)):
        assert nmse(mesh[f"{name} {ways}"], one(name).logits(IDS)) < MESH_NMSE["quantised"], name


def test_tokens(one, mesh):
    wanted = specsparse.generate(one("q4_1"), IDS, **GREEDY).token_ids
    for name in ("greedy 2", "greedy 4", "stream", "lookup"):
        assert tuple(mesh[name]) == wanted, name


def test_noise(mesh):
    assert np.array_equal(mesh["noise 4"], uniform(SEEDS, stream=NoiseStream.ACCEPT, position=5))


@pytest.mark.slow
def test_speculation_on_a_mesh_is_plain_decoding_on_it(one, folder):
    """Contract C1 on three devices, bit for bit: neither drafts, nor other sequences, nor the loop change a token."""
    found = run(DECODING, folder, devices=3)
    assert nmse(found["xla"], one("float", kv_dtype="f32").logits(IDS)) < MESH_NMSE["f32"]
    for name in ("prompt_lookup", "prompt_lookup host", "layer_skip", "layer_skip host", "model", "batch"):
        assert np.array_equal(found[name], found["sampled"]), name


def test_each_device_holds_its_share(one, mesh):
    layers = one("q4_1").params.layers
    whole = sum(w.nbytes for layer in layers for w in (layer.attn_q, layer.attn_output, layer.ffn_up, layer.ffn_down))
    cache = sum(k.nbytes for k in one("q4_1").new_cache(2, 64).k)
    everything = one("q4_1").footprint.packed + one("q4_1").params.embedding.nbytes
    for ways in (2, 4):
        assert list(mesh[f"bytes {ways}"]) == [whole // ways] * ways
        assert list(mesh[f"cache bytes {ways}"]) == [cache // ways] * ways
        # Norms are everywhere, and the vocabulary is filled up to a multiple of 16 tokens a device.
        assert max(mesh[f"all bytes {ways}"]) < 1.1 * everything / ways


def test_what_cannot_be_divided_is_refused(mesh):
    assert str(mesh["refused heads"]) == (
        "mesh=4: the model's 3 key/value heads in shares of 1 leave a device without any; "
        "numbers of devices that would do: 1, 2, 3"
    )
    assert "JAX has 4 cpu device(s); JAX_NUM_CPU_DEVICES=N" in str(mesh["refused devices"])
    assert "needs the whole model on one device: load it without mesh" in str(mesh["refused head"])
