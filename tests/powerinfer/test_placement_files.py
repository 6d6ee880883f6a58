"""From a model file to a placement: counts over text, bytes by part, and the gpuidx file a run goes by."""

import dataclasses

import jax
import numpy as np
import pytest

import specsparse
from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.powerinfer import profiler
from specsparse.powerinfer.placement import (
    GpuIndex,
    Hardware,
    ModelParts,
    kept_or_solved,
    optimal,
    path_for,
    read_gpuidx,
    write_gpuidx,
)
from specsparse.powerinfer.profiler import ActivationStats
from specsparse.predictors.base import FFN
from specsparse.testing import write_tiny_gguf
from tests.powerinfer.tiny import write_tiny_powerinfer

TEXT = np.random.default_rng(0).integers(3, 250, (3, 16)).astype(np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = write_tiny_powerinfer(tmp_path_factory.mktemp("m") / "m.powerinfer.gguf", d_ff=128)
    return specsparse.load(path, ffn="dense")


@pytest.fixture(scope="module")
def stats(model):
    active, params = profiler.of_file(open_gguf(model.path), model)
    done = []
    found = profiler.profile(model, TEXT, active, params=params, progress=lambda *so_far: done.append(so_far))
    assert [i for i, _ in done] == [1, 2, 3]
    assert done[-1][1] == pytest.approx(np.mean(found.counts) / TEXT.size)
    return found


@pytest.fixture
def problem(model, stats, tmp_path):
    parts = ModelParts.from_gguf(open_gguf(model.path), model.config, context=64)
    hardware = Hardware(1e12, 1e11, 1e10)
    whole = sum(parts.in_order().values())
    return parts.problem(
        model.config, profiler.probabilities(stats),
        budget=whole - sum(parts.neurons) // 2, hardware=hardware, granularity=32,
    )  # fmt: skip


def test_counts_are_those_of_the_models_own_masks(model, stats):
    """The sparse model of the same file says how many neurons each row of the first layer kept."""
    sparse = specsparse.load(model.path)
    forward, capacity = jax.jit(sparse.forward), sparse.capacity_for(16)
    passes = (forward(sparse.params_for(capacity), ids[None], sparse.new_cache(1, capacity))[0] for ids in TEXT)
    kept = sum(int(np.asarray(out.stats.kept[0]).sum()) for out in passes)
    assert stats.tokens == TEXT.size and int(stats.counts[0].sum()) == kept
    assert max(c.max() for c in stats.counts) <= TEXT.size


def test_oracle_and_largest(model):
    ffn = FFN.from_config(model.config, model.kernels)
    found = profiler.profile(model, TEXT, profiler.nonzero(ffn))
    assert 0 < sum(c.sum() for c in found.counts) < TEXT.size * 2 * 128
    largest = profiler.profile(model, TEXT, profiler.largest(ffn, 0.25))
    assert all(c.sum() == TEXT.size * 32 for c in largest.counts)
    with pytest.raises(UserError, match=r"give placement\.active_share"):
        profiler.nonzero(dataclasses.replace(ffn, act="silu"))


def test_probabilities():
    counts = (np.array([0, 2, 8]),)
    assert np.array_equal(profiler.probabilities(ActivationStats(counts, 8))[0], [0, 0.25, 1])
    assert np.allclose(profiler.probabilities(ActivationStats(counts, 8), rows=2)[0], [0, 0.4375, 1])
    assert np.array_equal(profiler.probabilities(ActivationStats(counts))[0], [0, 0.25, 1])
    shares = (np.array([0.0, 0.5]),)
    assert np.array_equal(profiler.probabilities(ActivationStats(shares))[0], [0, 0.5])
    with pytest.raises(UserError, match="go up to 8 over 4 tokens"):
        profiler.probabilities(ActivationStats(counts, 4))


def test_parts_are_the_whole_file(model):
    f = open_gguf(model.path)
    parts = ModelParts.from_gguf(f, model.config, context=64)
    without_embedding = sum(t.nbytes for n, t in f.tensors.items() if n != "token_embd.weight")
    assert sum(parts.in_order().values()) - parts.cache * 2 == without_embedding
    assert parts.neurons == (3 * 128 * 64 * 2,) * 2 and parts.predictors[1] == 2 * parts.predictors[0]
    assert list(parts.in_order()) == ["attention", "predictors", "FFN norms", "output", "cache", "neurons"]


def test_a_placement_is_solved_once_and_then_read(model, problem, tmp_path):
    f, path = open_gguf(model.path), tmp_path / "m.gpuidx"
    calls = []

    def solve(p):
        calls.append(p)
        return optimal(p)

    def settled(p=problem, **options):
        return kept_or_solved(f, p, solve, rule="optimal", path=path, **options)

    first = settled()
    assert first.fresh and "there was none" in first.note and len(calls) == 1
    assert 0 < sum(h.sum() for h in first.index.hot) < 256
    again = settled()
    assert not again.fresh and "read from" in again.note and len(calls) == 1
    assert all(np.array_equal(a, b) for a, b in zip(first.index.hot, again.index.hot, strict=True))
    assert read_gpuidx(path).vram_capacity == problem.neuron_budget
    assert "reset_gpu_index" in settled(reset=True).note and len(calls) == 2
    off = settled(disable=True)
    assert not any(h.any() for h in off.index.hot) and len(calls) == 2
    for changes, why in (
        ({"budget": problem.budget - 20000}, "are left for neurons"),
        ({"budget": problem.budget + 20000}, "other settings"),
        ({"granularity": 64}, "other settings"),
        ({"read": tuple(p[::-1] for p in problem.read)}, "other settings or activations"),
    ):
        settled()
        before = len(calls)
        found = settled(dataclasses.replace(problem, **changes))
        assert found.fresh and why in found.note and "\n" not in found.note and len(calls) == before + 1
        settled(reset=True)


def test_a_stale_or_foreign_file_leads_to_a_fresh_placement(model, problem, tmp_path):
    f, path = open_gguf(model.path), tmp_path / "m.gpuidx"
    right = GpuIndex(optimal(problem).hot, problem.neuron_budget)
    other_rank = write_tiny_powerinfer(tmp_path / "o.powerinfer.gguf", d_ff=128, rank=64)
    other_weights = write_tiny_powerinfer(tmp_path / "w.powerinfer.gguf", d_ff=128, seed=1)
    for other in (other_rank, other_weights):
        kept_or_solved(open_gguf(other), problem, optimal, rule="optimal", path=path)
        assert "another model file" in kept_or_solved(f, problem, optimal, rule="optimal", path=path).note
    for wrong, why in (
        (GpuIndex(right.hot + right.hot[:1], 0), "places 3 layers"),
        (GpuIndex(tuple(h[:64] for h in right.hot), 0), "places 2 layers of 64 neurons"),
    ):
        write_gpuidx(path, wrong)
        found = kept_or_solved(f, problem, optimal, rule="optimal", path=path)
        assert found.fresh and why in found.note
    for blob in (b"", b"PWRI", np.random.default_rng(0).bytes(4000), path.read_bytes()[:300]):
        path.write_bytes(blob)
        assert kept_or_solved(f, problem, optimal, rule="optimal", path=path).fresh
    write_gpuidx(path, right)  # PowerInfer's own, which says less about itself
    assert not kept_or_solved(f, problem, optimal, rule="optimal", path=path).fresh


@pytest.mark.parametrize("options", [{}, {"reset": True}])
def test_a_model_is_never_overwritten(model, problem, tmp_path, options):
    f = open_gguf(write_tiny_powerinfer(tmp_path / "m.gguf", d_ff=128))
    (tmp_path / "same.gpuidx").hardlink_to(f.path)
    sparse = write_tiny_powerinfer(tmp_path / "other.gguf", d_ff=128, seed=1)
    dense = write_tiny_gguf(tmp_path / "dense.gguf")
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(dense.read_bytes()[:5000])
    for path, why in (
        (f.path, "is a model"), (tmp_path / "same.gpuidx", "is a model"),
        (sparse, "no placement"), (dense, "no placement"), (torn, "no placement"),
    ):  # fmt: skip
        before = path.read_bytes()
        with pytest.raises(UserError, match=why):
            kept_or_solved(f, problem, optimal, rule="optimal", path=path, **options)
        assert path.read_bytes() == before


def test_a_place_that_cannot_be_written_does_not_end_the_run(model, problem, tmp_path):
    (tmp_path / "file").write_text("")
    found = kept_or_solved(open_gguf(model.path), problem, optimal, rule="optimal", path=tmp_path / "file" / "m.gpuidx")
    assert found.fresh and "not kept" in found.note
    assert str(path_for(model.path)).endswith("m.powerinfer.gguf.generated.gpuidx")
