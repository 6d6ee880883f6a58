"""Placements against brute force over every choice of neurons, PowerInfer's greedy rule, and llama.cpp's layers."""

import dataclasses
import itertools

import numpy as np
import pytest

from specsparse.errors import UserError
from specsparse.powerinfer.placement import (
    RULES,
    Hardware,
    Problem,
    layers,
    layers_placed,
    neurons_placed,
    none,
    optimal,
    powerinfer,
)

FAST = Hardware(1e9, 1e8, 2e8, latency_s=1e-7, call_s=1e-8)


def problem(seed=0, *, shape=(2, 6), granularity=2, neurons=7, overlap=True, **changes) -> Problem:
    """Power-law frequencies; room for `neurons` neurons of the first layer's size."""
    rng = np.random.default_rng(seed)
    read = tuple(rng.random(shape[1]) ** 3 for _ in range(shape[0]))
    sizes = tuple(int(s) for s in rng.integers(80, 121, shape[0]))
    fixed = {"dense_bytes": (50,) * shape[0], "cache_bytes": 10, "output_bytes": 30}
    reserved = 60 * shape[0] + 30
    given = {
        "read": read, "neuron_bytes": sizes, "exchange_bytes": 40, "border_bytes": 16, "width": 4,
        "budget": reserved + neurons * sizes[0], "hardware": dataclasses.replace(FAST, overlap=overlap),
        "granularity": granularity, **fixed,
    }  # fmt: skip
    return Problem(**{**given, **changes})


def brute_force(p: Problem) -> float:
    """Seconds of the best of all sets of neurons with allowed counts that fit."""
    menus = []
    for i in range(p.layers):
        d_ff = len(p.read[i])
        sets = [s for k in p.ranked(i)[1] for s in itertools.combinations(range(d_ff), int(k))]
        menus.append([np.isin(np.arange(d_ff), s) for s in sets])
    found = []
    for hot in itertools.product(*menus):
        size = sum(int(m.sum()) * b for m, b in zip(hot, p.neuron_bytes, strict=True))
        if size <= p.neuron_budget:
            found.append(neurons_placed("any", p, hot).seconds)
    return min(found)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dense_hot", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_optimal_is_as_fast_as_any_choice(seed, overlap, dense_hot):
    p = problem(seed, overlap=overlap, dense_hot=dense_hot, neurons=2 + seed)
    found = optimal(p)
    best = brute_force(p)
    assert found.bytes_on_device <= p.budget
    assert found.bound_s <= best * (1 + 1e-12)
    assert found.seconds == pytest.approx(best, rel=1e-12)
    for other in (powerinfer(p), none(p)):
        assert best <= other.seconds * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_where_the_accelerator_is_the_slower_one_the_bound_still_holds(seed):
    """Then colder neurons may balance better than the hottest: within one bucket, and `bound_s` knows."""
    p = problem(seed, neurons=12, hardware=Hardware(1e8, 1.5e8, 1e12))
    found, best = optimal(p), brute_force(p)
    bucket = sum(np.sort(r)[-p.granularity :].sum() * s for r, s in zip(p.read, p.neuron_bytes, strict=True)) / 1e8
    assert found.bound_s <= best <= found.seconds <= best + bucket


def test_a_finer_granularity_is_never_slower_and_rounding_up_never_overfills(monkeypatch):
    times = [optimal(problem(3, shape=(3, 96), granularity=g, neurons=60)).seconds for g in (96, 32, 8, 1)]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    p = problem(3, shape=(3, 96), granularity=8, neurons=60)
    monkeypatch.setattr("specsparse.powerinfer.placement._CELLS", 40)
    coarse = optimal(p)
    assert coarse.bytes_on_device <= p.budget and coarse.bound_s <= times[2] <= coarse.seconds < 1.2 * times[2]


def test_the_optimum_sees_what_greedy_does_not():
    """A layer that fits whole needs no exchange: worth more than hotter buckets spread over both layers."""
    read = (np.array([0.9, 0.8, 0.5, 0.5]), np.array([0.95, 0.85, 0.1, 0.1]))
    slow_link = Hardware(1e9, 1e8, 1e6)
    p = problem(read=read, shape=(2, 4), neurons=4, neuron_bytes=(100, 100), budget=150 + 400, hardware=slow_link)
    assert [int(h.sum()) for h in optimal(p).hot] == [4, 0]
    assert [int(h.sum()) for h in powerinfer(p).hot] == [2, 2]


def test_powerinfers_rule_takes_the_largest_buckets():
    p = problem(1, shape=(3, 1024), granularity=256, neurons=0, width=384, neuron_bytes=(2304,) * 3)
    p = dataclasses.replace(p, budget=p.reserved_bytes + 5 * 256 * 2304 + 1000)
    found = powerinfer(p)
    sums = [np.sort(r)[::-1].reshape(-1, 256).sum(1) for r in p.read]
    best = sorted(((s, i) for i, each in enumerate(sums) for s in each), reverse=True)
    room = int((5 * 256 * 2304 + 1000) / (1024 * 2 * 4.5)) * 4 // 256
    assert room == 5
    for i, mask in enumerate(found.hot):
        wanted = 256 * sum(layer == i for _, layer in best[:room])
        assert mask.sum() == wanted and np.array_equal(
            np.sort(p.read[i])[::-1][:wanted], np.sort(p.read[i][mask])[::-1]
        )
    wide = dataclasses.replace(p, width=96)  # its formula takes F for the width: here that is four times the room
    assert powerinfer(wide).bytes_on_device <= wide.budget


def test_layers_go_whole_from_the_last_on():
    p = problem(0, shape=(4, 6), neurons=14)
    found = layers(p)
    assert found.bytes_on_device <= p.budget < found.bytes_on_device + 60 + 6 * p.neuron_bytes[1]
    fitting = sum(bool(h.all()) for h in found.hot)
    assert found.host_layers == frozenset(range(4 - fitting)) and not any(h.any() for h in found.hot[: 4 - fitting])
    with pytest.raises(UserError, match=f"n_gpu_layers={fitting + 1}: {fitting} fit"):
        layers(p, n_gpu_layers=fitting + 1)
    roomy = dataclasses.replace(p, budget=10**9)
    assert layers(roomy).output_on_host is False and layers(roomy, n_gpu_layers=4).output_on_host
    times = [layers_placed(p, n, output=False).seconds for n in range(5)]
    assert times == sorted(times, reverse=True)


def test_everything_fits_and_nothing_fits():
    p = problem(0, neurons=100)
    assert all(h.all() for h in optimal(p).hot) and optimal(p).hot_share(p) == pytest.approx(1)
    tight = dataclasses.replace(p, budget=p.reserved_bytes - 1)
    for rule in ("optimal", "powerinfer", "none"):
        found = RULES[rule](tight)
        assert found.hot_neurons == 0 and found.seconds == none(tight).seconds
