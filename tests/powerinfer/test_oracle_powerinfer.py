"""PowerInfer's own logits for three small models with planted sparsity, in F16-faithful mode.

Its F16 sums differ from ours in the last bit, which now and then rounds one activation the other way; the limits are
the specification's. Q4_0 sums whole numbers, so nothing flips there.
"""

import os
from pathlib import Path

import numpy as np
import pytest

import specsparse
from specsparse import kernels
from specsparse.kernels.native import cpu
from tests.cells import cells

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("SPECSPARSE_POWERINFER_ORACLE") or ROOT.parent / "shared" / "oracle" / "powerinfer")
pytestmark = pytest.mark.skipif(not (DATA / "logits.npz").is_file(), reason="PowerInfer's logits are not here")

MAX, MEAN = 2e-3, 3e-4


@pytest.fixture(scope="module")
def wanted():
    with np.load(DATA / "logits.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def load():
    made = {}

    def get(name, **options):
        key = (name, *sorted(options.items()))
        if key not in made:
            made[key] = specsparse.load(DATA / name, faithful_f16=True, **options)
        return made[key]

    return get


def error(model, ids, wanted):
    return np.abs(model.logits(ids) - wanted)


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("exact.powerinfer.gguf", {}, "exact/sparse"),
        ("lossy.powerinfer.gguf", {}, "lossy/sparse"),
        ("lossy.powerinfer.gguf", {"threshold": -1e30}, "lossy/allon"),
        ("lossy.powerinfer.gguf", {"ffn": "dense"}, "lossy/allon"),
        ("lossy.powerinfer.gguf", {"threshold": 1e30}, "lossy/alloff"),
        ("dense_llama.gguf", {}, "dense_llama/silu"),
    ],
    ids=str,
)
def test_f16_logits(load, wanted, name, options, key):
    found = error(load(name, **options), wanted["tokens"], wanted[key])
    assert found.max() <= MAX and found.mean() <= MEAN


def test_q4_logits(load, wanted):
    found = error(load("lossy.q4.powerinfer.gguf"), wanted["tokens"], wanted["lossy.q4/sparse"])
    assert np.quantile(found, 0.99) <= 1e-4 and found.max() <= 2e-2


# The logits of all three files are compared above.
@pytest.mark.parametrize("name", cells(["exact", "lossy", "lossy.q4"], ["lossy.q4"]))
def test_greedy_ids(load, wanted, name):
    ids = wanted[f"{name}/greedy_ids"].tolist()
    made = specsparse.generate(load(f"{name}.powerinfer.gguf"), ids[:16], max_tokens=24, ignore_eos=True)
    assert list(made.token_ids) == ids[16:]


def test_the_predictors_of_lossy_matter(load, wanted):
    """So that a mask that is ignored could not pass."""
    assert error(load("lossy.powerinfer.gguf"), wanted["tokens"], wanted["lossy/allon"]).mean() > 0.1


def test_threads_do_not_change_a_bit(load, wanted):
    if not cpu.available():
        pytest.skip("no native kernels")
    model, before, out = load("lossy.powerinfer.gguf"), cpu.threads(), []
    try:
        for count in (1, 2, 4):
            kernels.set_threads(count)
            out.append(model.logits(wanted["tokens"]))
    finally:
        kernels.set_threads(before)
    assert np.array_equal(out[0], out[1]) and np.array_equal(out[0], out[2])


def test_gpuidx_of_powerinfers_own_solver():
    from specsparse.powerinfer.placement import read_gpuidx

    index = read_gpuidx(DATA / "example.generated.gpuidx")
    assert len(index.hot) == 12 and index.vram_capacity == 123456789
    assert [int(h.sum()) for h in index.hot[:3]] == [256, 512, 512]
