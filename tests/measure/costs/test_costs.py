"""The cost model's arithmetic: devices, traffic, rooflines, expected tokens, tables, and the terms of a run."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from specsparse.data.devices import Device, sheets
from specsparse.engine.cache import LayerWindows
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.measure.costs import measuring
from specsparse.measure.costs.acceptance import Accepted
from specsparse.measure.costs.explain import speedup_terms
from specsparse.measure.costs.measuring import above_noise, fit_draft, fit_kv, fit_overhead, polish, rising
from specsparse.measure.costs.roofline import KV_BYTES, Matrix, Roofline, Traffic, bits_per_weight, get_device, kv_bytes
from specsparse.runtime.metrics import Counters, Times
from specsparse.runtime.timing_cache import CostTable, DraftCost
from specsparse.speculative import expected
from specsparse.speculative.drafters.synthetic import Scripted, SyntheticRates
from specsparse.testing import tiny_config, write_tiny_gguf

LLAMA_7B = tiny_config(
    n_layers=32, d_model=4096, n_heads=32, n_kv_heads=32, d_ff=11008, vocab_size=32000, context_length=4096
)


def table(**changes) -> CostTable:
    fields = dict(
        ns=(1, 2, 4, 8), kv_base=100, forward_s=(0.010, 0.011, 0.013, 0.020), kv_s=1e-6, kv_row_s=1e-7, plain_s=0.011,
        round_s=0.0005, round_token_s=0.0001, host_s=0.002, bandwidth=30e9, int8=300e9, f32=50e9,
    )  # fmt: skip
    return CostTable(**{**fields, **changes})


def weights(count: float) -> Traffic:
    """So many weights at one byte each, without a cache."""
    return Traffic((Matrix("Q8_0", count, count),), 0.0, 0.0)


def of_shape(config: ModelConfig, kind: str) -> Traffic:
    """A model that is only a shape: matrices in one type, vectors in F32."""
    tensors = []
    for name, shape in config.tensor_shapes():
        own = kind if len(shape) == 2 else "F32"
        tensors.append((name, own, math.prod(shape) * bits_per_weight(own) / 8))
    return Traffic.from_tensors(config, tensors)


def test_a_7b_model_at_one_byte_a_weight_on_an_a100():
    roofline = Roofline(get_device("a100"), weights(7e9))
    assert roofline.tokens_per_second() == pytest.approx(277, rel=0.005)
    assert roofline.v(8) == 1.0  # memory bound far beyond


def test_a_tree_of_one_branch_is_predicted_as_a_chain_and_costs_what_its_nodes_cost():
    t, chain = table(), DraftCost(token_s=0.0011)
    tokens = expected.expected_tokens(0.6, 3)
    as_tree = t.predict_tree(tokens, 3, room=3, draft=DraftCost(fixed_s=3 * 0.0011))
    assert as_tree == pytest.approx(t.predict(0.6, 3, draft=chain))
    step, bush = 0.011, t.predict_tree(2.0, 7, room=7, draft=DraftCost(fixed_s=0.0022))
    assert bush == pytest.approx(2.0 / (1 + 0.010 / step + 0.0022 / step + (0.0005 + 7 * 0.0001) / step))


@pytest.mark.parametrize("name", sheets())
def test_named_devices_have_sane_peaks(name):
    device = get_device(name)
    assert device.bandwidth > 1e9
    assert device.peak("int8") >= device.peak("f16") >= device.peak("f32") > 0
    assert device.memory > 1e9 and device.source and 0 <= device.dispatch < 1e-5


def test_an_unknown_device_is_refused():
    with pytest.raises(UserError, match="device a10 is unknown; did you mean a100"):
        get_device("a10")


def test_traffic_of_a_file_counts_each_tensor_in_its_own_type(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", quant="Q4_0", embedding_quant="F16", tied=False)
    f = open_gguf(path)
    config = ModelConfig.from_gguf(f)
    load = Traffic.from_gguf(f, config)
    wanted = sum(t.nbytes for name, t in f.tensors.items() if name != "token_embd.weight")
    assert load.weight_bytes == wanted
    assert set(load.by_type()) == {"Q4_0", "F16", "F32"}
    macs = load.macs(1, 0)
    assert macs["f16"] == config.vocab_size * config.d_model + load.attention_macs  # one position: itself
    assert load.macs(3, 10)["int8"] == 3 * macs["int8"]
    kv = 2 * config.n_layers * config.n_kv_heads * config.head_dim * 2
    assert load.read_bytes(3, 10) == wanted + 13 * kv
    assert load.read_bytes(3, 10, batch=2) == wanted + 26 * kv


def test_traffic_of_a_shape_is_that_of_its_file(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", tied=True)
    f = open_gguf(path)
    config = ModelConfig.from_gguf(f)
    from_file, shape = Traffic.from_gguf(f, config), of_shape(config, "Q8_0")
    assert from_file.weight_bytes == shape.weight_bytes
    assert from_file.macs(2, 5) == shape.macs(2, 5)
    assert from_file.requantised("Q4_0").weight_bytes < from_file.weight_bytes


@pytest.mark.parametrize(
    ("windows", "model"),
    [
        ((8, 8, 8, 8, 8, 0, 8), {"architecture": "gemma3", "n_layers": 7}),
        ((5, 5), {"window": 5}),
        ((0, 0), {}),
    ],
)
@pytest.mark.parametrize(("rows", "before"), [(1, 0), (1, 4), (1, 100), (3, 0), (6, 3), (6, 100), (12, 2)])
def test_what_windows_spare_is_counted_row_by_row(windows, model, rows, before):
    config = tiny_config(**model)
    read = macs = 0
    for window in windows:
        seen = [set(range(max(before + i + 1 - window, 0) if window else 0, before + i + 1)) for i in range(rows)]
        read, macs = read + len(set.union(*seen)), macs + sum(map(len, seen))
    found = LayerWindows.from_config(config)
    assert bool(found) == any(windows)
    assert found.read(rows, before) * len(windows) == pytest.approx(read, rel=1e-12)
    assert found.attended(rows, before) * len(windows) == pytest.approx(macs, rel=1e-12)
    load = of_shape(config, "F32")
    of_head = 2 * config.n_kv_heads * config.head_dim * KV_BYTES["f16"]
    assert load.read_bytes(rows, before) - load.weight_bytes == pytest.approx(of_head * read)
    assert load.macs(rows, before)["f16"] == pytest.approx(2 * config.n_heads * config.head_dim * macs)


def test_a_measured_table_goes_on_by_what_its_layers_read():
    whole, half = table(), table(windows=LayerWindows(((201, 0.5), (0, 0.5))))
    assert half.forward(3, 150) == whole.forward(3, 150)  # within the window
    assert half.forward(3, 300) == pytest.approx(whole.forward(3, 250))
    assert half.forward(3, 1000) == pytest.approx(whole.forward(3, 600))
    assert table(windows=LayerWindows(((50, 1.0),))).forward(3, 1000) == whole.forward(3)
    assert CostTable.from_dict(json.loads(json.dumps(half.to_dict()))) == half
    kept = whole.to_dict()
    del kept["windows"]
    assert CostTable.from_dict(kept) == whole


def test_sizes_of_llama_2_7b():
    sizes = {kind: of_shape(LLAMA_7B, kind).weight_bytes / 1e9 for kind in ("F16", "Q8_0", "Q4_0")}
    assert sizes == pytest.approx({"F16": 13.2, "Q8_0": 7.02, "Q4_0": 3.72}, rel=0.01)  # without the embedding
    assert kv_bytes(LLAMA_7B, 4096, "f16") == 2 * 2**30


def test_the_roofline_turns_from_memory_to_compute():
    device = Device("d", "d", bandwidth=1e9, f32=1e9, int8=4e9)
    roofline = Roofline(device, weights(1e9))
    assert roofline.balance() == 4
    assert roofline.v(4) == 1.0
    assert roofline.v(8) == pytest.approx(2.0)
    assert roofline.forward_s(1) == pytest.approx(1.0)
    assert roofline.tokens_per_second(batch=4) == pytest.approx(4.0)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_expected_tokens_is_leviathans_equation(alpha, gamma):
    closed = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert expected.expected_tokens(alpha, gamma) == pytest.approx(closed)
    rates = SyntheticRates(rate=alpha) if gamma else None
    if rates:
        assert 1 + sum(rates.unconditional(gamma)) == pytest.approx(closed)
        chain = expected.expected_tokens_tree(range(-1, gamma - 1), rates.conditional(gamma))
        assert chain == pytest.approx(closed)


def test_expected_tokens_of_a_tree():
    # Two first tokens (0.6, 0.3), one child of the first (0.5).
    assert expected.expected_tokens_tree([-1, -1, 0], [0.6, 0.3, 0.5]) == pytest.approx(1 + 0.6 + 0.3 + 0.3)


def test_best_gamma_weighs_time_against_tokens():
    assert expected.best_gamma(0.9, lambda n: 1.0, most=16)[0] == 16  # verifying is free
    assert expected.best_gamma(0.3, lambda n: float(n))[0] == 0  # nothing gained
    gamma, gain = expected.best_gamma(0.7, lambda n: 1 + 0.1 * (n - 1), c=0.05)
    assert 1 < gamma < 16
    assert gain == pytest.approx(expected.predicted_speedup(0.7, gamma, lambda n: 1 + 0.1 * (n - 1), c=0.05))


def test_a_table_interpolates_and_knows_the_cache():
    t = table()
    assert t.forward(3) == pytest.approx(0.012)
    assert t.forward(16) == pytest.approx(0.034)  # by the last slope
    assert t.forward(4, 1100) == pytest.approx(0.013 + 1000 * (1e-6 + 4e-7))
    assert t.v(1) == t.v(1, 5000) == 1.0
    assert t.v(8) == pytest.approx(1 + 0.010 / 0.011)
    assert t.round(8, 7) == pytest.approx(0.021 + 0.0012)
    by_hand = expected.expected_tokens(0.6, 7) / (t.v(8) + 0.0012 / 0.011)
    assert t.predict(0.6, 7) == pytest.approx(by_hand)
    assert t.best_gamma(0.0) == (0, 1.0)


def test_a_table_gives_the_policies_their_options():
    from specsparse.speculative.policies import get_policy

    t = table().with_draft("model", DraftCost(token_s=0.0022, fixed_s=0.0011))
    options = t.policy_options(7, "model")
    assert options["v"][0] == 1.0 and len(options["v"]) == 8

    def bare(n: int, room: int = 7) -> float:  # without what the text of the measurement adds
        return t.round(n, room) - t.kv_base * (t.kv_s + n * t.kv_row_s)

    alone = bare(1)
    assert alone == pytest.approx(0.011 + 0.0012 - 100 * 1.1e-6)  # with room for seven tokens, and no draft
    assert options["c"] == pytest.approx(0.0022 / alone)
    cost = get_policy("cost", gamma=7, **options).cost
    assert cost.time(7) == pytest.approx((bare(8) + 7 * 0.0022 + 0.0011) / alone)
    assert t.policy_options(7, "unknown")["c"] == 0
    together = t.policy_options(3, "model", batch=4)
    assert together["v"] == pytest.approx([bare(n, 3) / bare(4, 3) for n in (4, 8, 12, 16)])
    assert (together["c"], together["c0"]) == tuple(t.policy_options(3, "model")[key] for key in ("c", "c0"))
    for share in (0.0, 0.7):  # of what a row reads of the text, what drafting a token reads
        cost = get_policy("cost", gamma=7, **t.policy_options(7, "model", kv_share=share)).cost
        row = 2000 * (t.kv_s + t.kv_row_s)
        by_hand = bare(4) + 3 * (0.0022 + share * row) + 0.0011 + 2000 * (t.kv_s + 4 * t.kv_row_s)
        deep = cost.drafted(range(8), np.array([2000]))[0]
        assert deep[3] == pytest.approx(by_hand / (alone + row), rel=1e-5)
        assert cost.token(np.array([2000]))[0] == pytest.approx((0.0022 + share * row) / (alone + row), rel=1e-5)


def test_a_table_survives_json():
    t = table().with_draft("ngram", DraftCost(1e-5, 2e-5))
    assert CostTable.from_dict(json.loads(json.dumps(t.to_dict()))) == t


@pytest.mark.parametrize("change", [{"ns": (2, 4, 8, 16)}, {"ns": (1, 2)}, {"plain_s": 0.0}, {"ns": (1, 4, 2, 8)}])
def test_a_broken_table_is_refused(change):
    with pytest.raises(ValueError, match="cost table"):
        table(**change)


def test_polish_tells_slow_repeats_from_slow_things():
    rng = np.random.default_rng(0)
    true = {"a": 1.0, "b": 3.0, "c": 0.5}
    speed = np.where(np.arange(11) % 3 == 0, 2.5, 1.0)  # a neighbour comes and goes
    times, spread = polish({k: (t * speed * np.exp(rng.normal(0, 0.01, 11))).tolist() for k, t in true.items()})
    for name, t in true.items():
        assert times[name] == pytest.approx(t, rel=0.03)
        assert spread[name] < 0.03


def test_rising_pools_what_falls():
    assert rising([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert rising([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]


def test_fit_kv_finds_the_slopes():
    ns, near = (1, 4, 16), [0.01, 0.02, 0.05]
    far = [t + 900 * (2e-6 + 3e-7 * n) for n, t in zip(ns, near, strict=True)]
    a, b, errors = fit_kv(ns, near, far, 900)
    assert (a, b) == (pytest.approx(2e-6), pytest.approx(3e-7))
    assert max(map(abs, errors)) < 1e-9
    assert min(fit_kv(ns, near, [t * 0.9 for t in near], 900)[:2]) >= 0  # noise never makes a cache pay
    assert fit_kv(ns, near, near, 0) == (0.0, 0.0, [0.0] * len(ns))  # a window shorter than both


def test_overhead_and_draft_lines_are_never_negative():
    assert fit_overhead((2, 7), [0.003, 0.008]) == (pytest.approx(0.001), pytest.approx(0.001))
    assert min(fit_overhead((2, 7), [-0.003, 0.001])) >= 0
    assert fit_draft([(2.0, 0.03), (7.0, 0.08)]) == DraftCost(pytest.approx(0.01), pytest.approx(0.01))
    assert fit_draft([(1.0, 0.02), (1.2, 0.04)]) == DraftCost(0.0, pytest.approx(0.03))
    assert fit_draft([]) == DraftCost()


def sides(accepted=60, drafts=20, rounds=25, drafted=100, tested=75, plain_s=1.2, method_s=0.7):
    plain = Counters(num_rounds=85, num_emitted_tokens=85, times=Times(total=plain_s))
    method = Counters(
        num_rounds=rounds, num_drafts=drafts, num_draft_tokens=drafted, num_tested=tested, num_accepted_tokens=accepted,
        num_emitted_tokens=rounds + accepted, times=Times(total=method_s),
    )  # fmt: skip
    return plain, method


def test_the_terms_multiply_to_the_measured_speedup():
    found = speedup_terms(*sides(), table(), gamma=7, draft=DraftCost(1e-4, 1e-4), calls=(2, 2), kv_length=300)
    assert found.alpha == pytest.approx(0.8)
    costs = {"draft": DraftCost(1e-4, 1e-4), "kv_length": 300, "share": 0.8}  # 20 of 25 rounds draft
    assert found.predicted == pytest.approx(table().predict(0.8, 7, **costs))
    assert found.measured == pytest.approx(1.2 / 0.7)
    assert found.predicted * math.prod(f.value for f in found.factors) == pytest.approx(found.measured)
    assert len(list(found.lines())) == len(found.factors) + 2
    json.dumps(dataclasses.asdict(found))


def test_a_run_and_advise_weigh_silent_rounds_by_one_formula():
    """Of a drafter that finds something every third round; drafts are of gamma tokens, so that nothing is left over."""
    t, gamma = table(host_s=0.0), 4
    plain, method = sides(accepted=60, drafts=20, rounds=60, drafted=80, tested=80)
    found = speedup_terms(plain, method, t, gamma=gamma)
    advised = Accepted(found.alpha, share=20 / 60)
    cost = expected.round_cost(t.v, advised.rows(gamma), c0=t.overhead(gamma), share=advised.share)
    assert found.predicted == pytest.approx(advised.tokens(gamma) / cost)
    assert found.predicted < t.predict(found.alpha, gamma) - 0.3  # as if every round drafted
    assert found.share == pytest.approx(1 / 3) and "33% of the rounds that draft" in next(found.lines())


def test_a_run_just_as_the_table_says_needs_no_factors():
    t, gamma, rounds = table(host_s=0.0), 4, 100
    seconds = rounds * t.round(gamma + 1, gamma)
    plain, method = sides(
        accepted=gamma * rounds, drafts=rounds, rounds=rounds, drafted=gamma * rounds, tested=gamma * rounds,
        plain_s=85 * t.step(), method_s=seconds,
    )  # fmt: skip
    found = speedup_terms(plain, method, t, gamma=gamma)
    assert [f.value for f in found.factors] == pytest.approx([1.0] * 4)
    assert found.measured == pytest.approx(found.predicted)


def test_a_run_without_drafts_has_no_terms():
    plain, method = sides(accepted=0, drafts=0, drafted=0, tested=0)
    assert speedup_terms(plain, method, table(), gamma=7) is None


def test_measured_stages_stand_beside_the_predicted_ones():
    plain, method = sides()
    method = dataclasses.replace(method, times=Times(total=0.7, draft=0.05, verify=0.5, sample=0.1))
    stages = speedup_terms(plain, method, table(), gamma=7).stages
    assert stages["verify"]["measured_s"] == pytest.approx(0.02)
    assert stages["rest"]["predicted_s"] == pytest.approx(0.8 * 0.0012)  # of the rounds that draft


def test_rounds_without_a_draft_are_plain_steps():
    v = lambda n: 1 + 0.1 * (n - 1)  # noqa: E731
    assert expected.round_cost(v, 4, c=0.1, c0=0.2) == pytest.approx(1.4 + 0.4 + 0.2)
    assert expected.round_cost(v, 4, c=0.1, c0=0.2, share=0.25) == pytest.approx(0.25 * 2.0 + 0.75)
    assert expected.round_cost(v, 0, c=0.1, c0=0.2) == 1.0


def test_a_cost_counts_if_nearly_all_stretches_show_it():
    shown = [3e-4, 4e-4, 2e-4, 3e-4, 5e-4, 3e-4, 3e-4, 4e-4, 3e-4, 2e-4, -1e-4, 3e-4]
    assert above_noise(shown) == pytest.approx(3e-4)
    assert above_noise([*shown[:6], *[-1e-4] * 6]) == above_noise(shown[:3]) == 0.0  # half of them, too few


class ClockedLoop:
    """Rounds of the host by an exact clock; the first takes three times as long. A draft takes `model` seconds a token
    and 1 ms a round, and the target's pass what the table says."""

    def __init__(self, model, method, ids, *, room, loop):
        self.token_s, self.drafted, self.counts = model, method.drafter.max_depth, Counters()
        self.session = SimpleNamespace(counters=lambda: [self.counts])

    def run(self, rounds):
        cold = 1.0 if self.counts.num_rounds else 3.0
        draft, verify = (cold * s for s in (1e-3 + self.drafted * self.token_s, table().forward(1 + self.drafted)))
        times = Times(draft=draft / 2, commit=draft / 2, verify=verify, sample=1.0, host=1.0, total=2 + draft + verify)
        self.counts += Counters(num_rounds=1, num_drafts=1, num_draft_tokens=self.drafted, times=times)


def test_drafts_are_timed_alone_once_their_weights_are_in_the_caches(monkeypatch):
    monkeypatch.setattr(measuring, "Loop", ClockedLoop)
    for gamma, token_s in ((2, 3e-4), (7, 3e-4), (7, 0.0)):
        method = SimpleNamespace(drafter=SimpleNamespace(max_depth=gamma))
        timed = (gamma, pytest.approx(1e-3 + gamma * token_s), pytest.approx(table().forward(1 + gamma)))
        assert measuring.time_rounds(token_s, method, [], 12) == [timed] * 12


def test_a_draft_costs_what_it_takes_beyond_a_free_one_at_the_speed_of_the_table(monkeypatch):
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=64, context_length=512))
    half = table().forward(2, 33) * 2  # the machine is half as fast as it was for the table

    def timed(model, method, ids, rounds, drafted=None):
        own = 0.0 if isinstance(method.drafter, Scripted) else drafted * 6e-4
        return [(drafted, 1e-3 + own, half)] * rounds

    monkeypatch.setattr(measuring, "time_rounds", timed)
    chain, tree = (SimpleNamespace(drafter=SimpleNamespace(tree=tree)) for tree in (False, True))
    for method, sizes, token_s in ((chain, {2: 2, 7: 7}, 3e-4), (tree, {3: 1, 9: 3}, 9e-4)):
        cost = measuring.measure_draft(model, table(), method, sizes)
        assert (cost.token_s, cost.fixed_s) == (pytest.approx(token_s), pytest.approx(0.0, abs=1e-12))
