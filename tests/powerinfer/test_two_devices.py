"""Two CPU devices against one, bit for bit. JAX must know of them before it starts, so they have their own process."""

from functools import partial

import jax
import numpy as np
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.engine.architectures import LayerKind
from specsparse.engine.llama import Want
from specsparse.errors import UserError
from specsparse.kernels.native import cpu
from specsparse.powerinfer import model_files
from specsparse.powerinfer.hot_cold import waiting
from specsparse.powerinfer.placement import GpuIndex, write_gpuidx
from tests.other_process import found_by
from tests.powerinfer.test_hot_cold import D_FF, IDS, LAYERS, index
from tests.powerinfer.tiny import write_tiny_powerinfer

if not cpu.available():
    pytest.skip("only the native kernels promise equal bits from program to program", allow_module_level=True)

OTHER = """
import sys
import numpy as np
import specsparse
from specsparse import SamplingParams
from specsparse.engine.llama import Want
from specsparse.powerinfer.placement import Placement, read_gpuidx

path, file, out, ids = sys.argv[1], sys.argv[2], sys.argv[3], [int(i) for i in sys.argv[4].split(",")]
model = specsparse.load(path, placement=file, devices=2)
two = model.devices
assert two.devices.hot != two.devices.cold and not two.one_program
where = {layer.sparse.cold.up.data.device for layer in model.params.layers if layer.sparse.cold}
assert where == {two.devices.cold}, where
found = {"logits": model.logits(ids)}
two.overlap = False
found["in turn"] = model.logits(ids)
two.overlap, seen = True, []
two.watch = lambda *span: seen.append(span)
found["watched"] = model.logits(ids)
two.watch = None
before = dict(two.crossed)
model.logits(ids[:1])
found["crossed"] = [two.crossed[side] - before[side] for side in ("cold", "hot")]
found["parts"] = np.array([f"{part} {layer}" for part, layer, begin, end in sorted(seen, key=lambda s: (s[1], s[0]))])
spans = {(part, layer): (begin, end) for part, layer, begin, end in seen}
found["begins"] = np.array([[spans[part, 0][0] for part in ("attention", "cold", "hot")]])
want = Want("none", hidden=(2, 0, model.config.n_layers))
rows, _ = model.forward(model.params_for(64), np.array([ids], np.int32), model.new_cache(1, 64), want=want)
found["features"] = rows.hidden
found["greedy"] = specsparse.generate(model, ids, max_tokens=10, ignore_eos=True).token_ids
sampled = SamplingParams(temperature=0.9, max_tokens=10, ignore_eos=True)
found["sampled"] = specsparse.generate(model, ids, sampling=sampled, seed=3).token_ids
spec = specsparse.generate(model, ids, max_tokens=10, ignore_eos=True, drafter="prompt_lookup", verifier="greedy")
found["speculative"] = spec.token_ids
text = specsparse.stream(model, ids, max_tokens=10, ignore_eos=True, drafter="prompt_lookup", verifier="greedy")
assert "".join(text) == spec.text
found["streamed"] = text.generation.token_ids
hot = [np.full(len(h), i > 1) for i, h in enumerate(read_gpuidx(file).hot)]
layers = Placement("layers", tuple(hot), 0.0, 0, host_layers=frozenset({0, 1}), output_on_host=True)
for other in sys.argv[6:]:
    every = specsparse.load(other, placement=sys.argv[5], devices=2)
    found[other] = np.concatenate([every.logits(ids), every.logits([*ids, *ids, *ids])])
model = specsparse.load(path, placement=layers, devices=("cpu:1", "cpu:0"))
assert [d.id for d in (model.devices.devices.hot, model.devices.devices.cold)] == [1, 0]
found["layers"] = model.logits(ids)
found["layers greedy"] = specsparse.generate(model, ids, max_tokens=4, ignore_eos=True).token_ids
try:
    specsparse.generate(model, ids, max_tokens=4, drafter="prompt_lookup", verifier="greedy")
except specsparse.errors.UserError as error:
    found["refused"] = str(error)
np.savez(out, **found)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m")
    return write_tiny_powerinfer(folder / "m.powerinfer.gguf", n_layers=LAYERS, d_ff=D_FF)


OTHERS = {
    "smollm3": {"architecture": "smollm3"},
    "window": {"window": 6},
}


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Files of models whose layers are not a plain Llama's. PowerInfer itself would not read a SmolLM3's, so
    `convert powerinfer` refuses to write it; the reader takes it."""
    folder = tmp_path_factory.mktemp("others")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_files, "unreadable", lambda config: {})
        return {
            name: write_tiny_powerinfer(folder / f"{name}.gguf", n_layers=LAYERS + 1, d_ff=D_FF, **given)
            for name, given in OTHERS.items()
        }


def longer_index() -> GpuIndex:
    """A layer more: the fourth is the one without RoPE."""
    return GpuIndex((*index().hot, index().hot[0]), 0)


@pytest.fixture(scope="module")
def two(path, others, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    file = write_gpuidx(folder / "x.gpuidx", index())
    longer = write_gpuidx(folder / "y.gpuidx", longer_index())
    out, ids = folder / "out.npz", ",".join(map(str, IDS))
    return found_by(OTHER, path, file, out, ids, longer, *others.values(), out=out, env={"JAX_NUM_CPU_DEVICES": "2"})


@pytest.fixture(scope="module")
def one(path):
    return specsparse.load(path, placement=index())


def test_the_same_bits(one, two):
    wanted = one.logits(IDS)
    for name in ("logits", "in turn", "watched"):
        assert np.array_equal(two[name], wanted), name


@pytest.mark.parametrize("name", OTHERS)
def test_the_same_bits_of_other_architectures(others, two, name):
    one = specsparse.load(others[name], placement=longer_index())
    assert one.config.kind(3) != LayerKind()
    np.testing.assert_array_equal(two[str(others[name])], [*one.logits(IDS), *one.logits([*IDS, *IDS, *IDS])])


def test_features_of_layers(one, two):
    want = Want("none", hidden=(2, 0, LAYERS))
    run = jax.jit(partial(one.forward, want=want))
    out, _ = run(one.params_for(64), np.array([IDS], np.int32), one.new_cache(1, 64))
    np.testing.assert_array_equal(two["features"], out.hidden)


def test_the_same_tokens(one, two):
    greedy = specsparse.generate(one, IDS, max_tokens=10, ignore_eos=True).token_ids
    sampling = SamplingParams(temperature=0.9, max_tokens=10, ignore_eos=True)
    assert tuple(two["greedy"]) == tuple(two["speculative"]) == tuple(two["streamed"]) == greedy
    assert tuple(two["sampled"]) == specsparse.generate(one, IDS, sampling=sampling, seed=3).token_ids


def test_every_layer_has_the_parts_it_should(two):
    """Layer 1 is all hot and layer 2 has none hot; cold neurons begin after the attention they need."""
    want = [f"{part} {i}" for i in range(LAYERS) for part in ("attention", "cold", "hot")]
    assert list(two["parts"]) == [name for name in want if name not in ("cold 1", "hot 2")]
    attention, cold, hot = two["begins"][0]
    assert attention < cold and attention < hot


def test_what_crosses_is_a_row_each_way_and_the_mask_of_the_cold_neurons(path, two):
    config, rows = specsparse.load(path, ffn="dense").config, 32  # of the piece that holds one token
    cold = [int((~hot).sum()) for hot in index().hot]
    row = 4 * rows * config.d_model
    to_cold, to_hot = two["crossed"]
    assert to_cold == sum(row + rows * count for count in cold if count)
    assert to_hot >= row * (1 + sum(count > 0 for count in cold))  # the embedding's, and each cold part's; statistics


def test_who_waits_is_who_ends_first():
    """Two passes of a layer that has both parts, and a layer without cold neurons."""
    spans = [("hot", 0, 0.0, 2.0), ("cold", 0, 0.0, 5.0), ("hot", 1, 6.0, 9.0), ("attention", 1, 5.0, 6.0)]
    spans += [("cold", 0, 10.0, 10.5), ("hot", 0, 10.0, 12.0)]
    assert waiting(spans) == {"hot": 3.0, "cold": 1.5}


def test_a_device_that_is_not_here_is_one_line(path):
    for devices, says in (
        (("cuda:0", "cpu"), r"device 'cuda:0' is not here: there are cpu:0"),
        (("cpu:7", "cpu"), r"device 'cpu:7' is not here"),
        (("cpu",), "must be 1 or 2, or two names such as"),
        (3, "must be 1 or 2"),
    ):
        with pytest.raises(UserError, match=says):
            specsparse.load(path, placement=index(), devices=devices)


def test_whole_layers_on_the_host_are_the_same_model(path, two):
    hot = [np.full(D_FF, i > 1) for i in range(LAYERS)]
    one = specsparse.load(path, placement=GpuIndex(tuple(hot), 0))
    assert np.array_equal(two["layers"], one.logits(IDS))
    assert "place neurons, not layers" in str(two["refused"])  # its cache lies on both
    assert tuple(two["layers greedy"]) == specsparse.generate(one, IDS, max_tokens=4, ignore_eos=True).token_ids
