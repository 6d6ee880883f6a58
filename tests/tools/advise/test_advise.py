"""Advice by arithmetic that is done here again: shapes of the catalogue, devices on paper, chains, memory."""

import itertools
import math
from dataclasses import replace

import pytest

from specsparse.data.devices import Device
from specsparse.engine.config import woken
from specsparse.errors import UserError
from specsparse.measure.costs.acceptance import Accepted, AcceptedRates, swept
from specsparse.measure.costs.forecast import Clocks, candidates, forecast
from specsparse.measure.costs.roofline import ModelOutline, another_vocabulary, outline
from specsparse.models import catalogue
from specsparse.runtime.metrics import Counters
from specsparse.speculative import expected
from specsparse.testing import write_tiny_gguf
from specsparse.tools.advise.advise import Question, WokenExperts, advise, verdict

PUBLISHED = {  # weights, as the models' pages give them; bytes of the file where the catalogue has them
    "llama-3.1-8b": 8.03e9, "llama-3.2-1b": 1.24e9, "llama-2-7b": 6.74e9, "qwen2.5-0.5b": 0.494e9, "qwen2.5-3b": 3.09e9,
    "qwen2.5-7b": 7.62e9, "qwen3-0.6b": 0.596e9, "qwen3-1.7b": 1.72e9, "qwen3-4b": 4.02e9, "qwen3-8b": 8.19e9,
    "smollm2-360m": 0.362e9, "smollm2-1.7b": 1.71e9, "tinyllama-1.1b": 1.10e9, "gemma3-270m": 0.268e9,
}  # fmt: skip
SLOW = Device("slow", "a made device", bandwidth=1e9, f32=1e9, int8=1e9, memory=1e6, source="made")
FAST = Device("fast", "a made device", bandwidth=1e9, f32=1e15, int8=1e15, memory=1e12, source="made")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_gguf(folder / "target.gguf", quant="Q8_0", n_layers=4, d_ff=128)
    draft = write_tiny_gguf(folder / "draft.gguf", quant="Q8_0", n_layers=1, seed=1)
    return target, draft


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_of_the_catalogue_has_the_weights_that_its_makers_count(name):
    entry = catalogue.find(name)
    found = ModelOutline.from_shape(name, entry.shape)
    assert found.config.n_parameters == pytest.approx(PUBLISHED[name], rel=0.006)
    if entry.size:
        assert found.nbytes == pytest.approx(entry.size, rel=0.03)  # the header and its vocabulary are not counted


def test_a_shape_of_an_architecture_that_is_not_here_is_refused():
    shape = replace(catalogue.find("llama-2-7b").shape, architecture="mamba")
    with pytest.raises(UserError, match=r"^mine: architecture 'mamba' is not supported"):
        ModelOutline.from_shape("mine", shape)


def test_every_model_of_the_hub_that_decodes_here_has_a_shape():
    sparse = {"prosparse-7b", "relullama-7b"}
    models = {e.name for e in catalogue.entries().values() if e.repo and e.role != "head"}
    assert {name for name in models if catalogue.find(name).shape is None} == sparse


def test_a_header_and_a_shape_say_the_same(pair):
    from_file = ModelOutline.from_file("t", pair[0])
    assert from_file.traffic().weight_bytes == sum(s for n, _, s in from_file.tensors if n != "token_embd.weight")
    half = from_file.traffic(layers=(0, 1))
    assert half.kv_bytes_per_token == from_file.traffic().kv_bytes_per_token / 2
    outside = sum(s for n, _, s in from_file.tensors if n in ("output.weight", "output_norm.weight"))
    assert half.weight_bytes == pytest.approx((from_file.traffic().weight_bytes - outside) / 2 + outside)


def test_where_arithmetic_is_free_a_forward_takes_one_step_and_a_draft_its_bytes(pair):
    target, draft = ModelOutline.from_file("t", pair[0]), ModelOutline.from_file("d", pair[1])
    times = Clocks.on_paper(FAST, target, 100, 1)
    by_name = {c.name: c for c in candidates(target, (draft,))}
    c, c0 = times.expected.costs(by_name["d"], 3)
    wanted = draft.traffic().read_bytes(1, 100) / target.traffic().read_bytes(1, 100)
    assert (times.expected.v(1), c0, c) == (1.0, 0.0, pytest.approx(wanted))
    grown = (target.traffic().read_bytes(9, 100)) / target.traffic().read_bytes(1, 100)
    assert times.expected.v(9) == pytest.approx(grown)  # rows read their own keys and values
    assert times.expected.draft(by_name["suffix"]).token_s == 0


def test_a_model_with_experts_is_told_what_its_rows_wake_and_when_drafts_pay():
    advice = advise(Question("smallthinker-4b-a0.6b", device="h200", contexts=(64,)))
    by = {(e.overlap, e.rows): e for e in advice.cases[0].experts}
    assert by[None, 4].experts == pytest.approx(32 * (1 - (7 / 8) ** 4))
    assert by[0.38, 2].experts == pytest.approx(4 + 4 * 0.62)
    whole = sum(size for name, _, size in advice.target.tensors if "_exps" in name)
    assert by[0.38, 2].nbytes - by[None, 2].nbytes == pytest.approx(whole * (6.48 - 7.5) / 32)
    assert by[None, 4].v == pytest.approx(advice.cases[0].clocks.expected.v(4))  # methods are judged by chance
    e = by[0.26, 8]
    assert expected.expected_tokens(e.break_even, 7) == pytest.approx(e.v)
    assert by[None, 2].break_even == pytest.approx(by[None, 2].v - 1)
    assert {e["rows"] for e in advice.to_dict()["cases"][0]["experts"]} == {2, 4, 8}
    assert not advise(Question("llama-2-7b", device="h200", contexts=(64,))).cases[0].experts


@pytest.mark.parametrize(("every", "chosen"), [(1, 1), (4, 3), (4, 4)])
def test_published_overlaps_are_left_out_if_chance_gives_as_much(tmp_path, every, chosen):
    sizes = {"n_layers": 1, "n_experts": every, "n_chosen": chosen}
    file = write_tiny_gguf(tmp_path / "few.gguf", architecture="qwen3moe", **sizes)
    found = WokenExperts.all_from(ModelOutline.from_file("few", file), FAST, 64, 1)
    assert [(e.overlap, e.rows) for e in found] == [(None, 2), (None, 4), (None, 8)]
    assert [e.experts for e in found] == pytest.approx([every * woken(chosen / every, n) for n in (2, 4, 8)])
    assert woken(0.75, 2, 0.26) == 1


@pytest.mark.parametrize("parents", [(-1, 0, 1, 2), (-1, 0, 0, 0), (-1, 0, 0, 2)], ids=["chain", "siblings", "tree"])
def test_rows_that_take_experts_from_their_parents_wake_as_many_in_every_tree(parents):
    """One expert of a layer, by all its states in four rows; a row has it with the same chance at every place."""
    share, overlap = 0.125, 0.38
    slept = share * (1 - overlap) / (1 - share)
    woken_chance = 0.0
    for states in itertools.product((0, 1), repeat=len(parents)):
        chance = 1.0
        for state, parent in zip(states, parents):
            awake = share if parent < 0 else overlap if states[parent] else slept
            chance *= awake if state else 1 - awake
        woken_chance += chance * any(states)
    assert woken(share, len(parents), overlap) == pytest.approx(woken_chance)
    assert woken(share, 4, share) == pytest.approx(woken(share, 4)) and woken(1, 4, 0.3) == 1


def test_a_forecast_is_leviathans_formula_and_its_break_even_is_where_it_is_one(pair):
    target, draft = ModelOutline.from_file("t", pair[0]), ModelOutline.from_file("d", pair[1])
    times = Clocks.on_paper(FAST, target, 100, 1)
    chosen = next(c for c in candidates(target, (draft,)) if c.name == "d")
    found = forecast(times, chosen, swept(0.9))
    for p in found.points:
        wanted = expected.predicted_speedup(0.9, p.gamma, times.expected.v, c=found.c)
        assert p.speedup == pytest.approx(wanted) and p.low <= p.speedup <= p.high
    assert found.best.speedup == max(p.speedup for p in found.points)
    assert found.break_even is not None
    at = [expected.predicted_speedup(found.break_even, g, times.expected.v, c=found.c) for g in range(1, 17)]
    assert max(at) == pytest.approx(1, abs=1e-9)


def test_a_device_without_arithmetic_to_spare_is_told_so(pair):
    target = ModelOutline.from_file("t", pair[0])
    times = Clocks.on_paper(SLOW, target, 100, 1)
    assert times.expected.v(8) == pytest.approx(8, rel=0.2)
    copied = next(c for c in candidates(target, ()) if c.name == "suffix")
    found = forecast(times, copied, swept(0.6))
    assert not found.pays and "no arithmetic to spare" in found.why_not()


@pytest.mark.parametrize(
    ("alpha", "said"), [(0.05, "0.05 of the drafted tokens are accepted, and"), (0.999, None)], ids=["rarely", "often"]
)
def test_the_reason_names_the_acceptance_that_is_missing(pair, alpha, said):
    target, draft = ModelOutline.from_file("t", pair[0]), ModelOutline.from_file("d", pair[1])
    chosen = next(c for c in candidates(target, (draft,)) if c.name == "d")
    found = forecast(Clocks.on_paper(FAST, target, 100, 1), chosen, swept(alpha)).why_not()
    assert found is said if said is None else said in found


def test_counted_rounds_are_the_rounds_of_the_run():
    """Ten rounds, eight of which drafted three tokens: 22 tokens in rounds that take what rows and drafts take."""
    run = Counters(num_rounds=10, num_drafts=8, num_draft_tokens=24, num_tested=20, num_accepted_tokens=12,
                   num_accepted_tokens_per_pos=(6, 4, 2), num_emitted_tokens=22)  # fmt: skip
    a = Accepted.from_counters(run)
    assert [a.tokens(g) for g in (1, 2, 3)] == pytest.approx([1.6, 2.0, 2.2])
    assert a.rows(2) == 2 and a.rows(9) == 3
    assert a.tokens(5) == a.tokens(3)  # nobody knows what a fourth would have brought
    both = AcceptedRates.from_groups("run", {"all": run + Counters(num_rounds=5, num_emitted_tokens=5), "chat": run,
                                      "code": Counters(num_rounds=5, num_emitted_tokens=5)})  # fmt: skip
    assert both.tasks["code"].tokens(3) == 1.0 and both.alpha == pytest.approx(0.6 * 22 / 27) and both.longest == 3
    assert AcceptedRates.from_groups("run", {"all": Counters(num_rounds=5, num_emitted_tokens=5)}) is None


def test_tasks_are_summed_as_a_run_sums_prompts(pair):
    target = ModelOutline.from_file("t", pair[0])
    times = Clocks.on_paper(FAST, target, 100, 1)
    copied = next(c for c in candidates(target, ()) if c.name == "suffix")
    half = AcceptedRates(
        "made", {"a": Accepted(1.0, (1.0,), 1.0, None, 100.0), "b": Accepted(0.0, (0.0,), 0.0, None, 50.0)}
    )
    found, *longer = forecast(times, copied, half, lengths=(1, 4)).points
    assert not longer  # drafts of four were not counted
    v2 = times.expected.v(2)
    assert found.speedup == pytest.approx(150 / (100 / 2 * v2 + 50))
    assert found.tokens == pytest.approx(150 / 100)


def test_the_answer_has_every_batch_and_context_and_counts_memory(pair):
    target, draft = map(str, pair)
    found = advise(Question(target, (draft,), "h100", batches=(1, 4), contexts=(16, 64)))
    assert [(a.batch, a.context) for a in found.cases] == [(1, 16), (1, 64), (4, 16), (4, 64)]
    last, models = found.cases[-1], (found.target, *found.draft_models)
    kv = sum(2 * m.config.n_layers * m.config.n_kv_heads * m.config.head_dim * 2 for m in models)
    assert last.memory["caches"] == 4 * 64 * kv
    assert found.fits(last) and {f.candidate.name for f in last.forecasts} == {
        "prompt_lookup", "ngram_simple", "suffix", draft, "layer_skip", "eagle3",
        f"{draft} tree", "layer_skip tree", "eagle3 tree",
    }  # fmt: skip
    report = found.to_dict()
    assert report["cases"][0]["v"][1] == 1.0 and report["target"]["bytes"] == found.target.nbytes
    assert "nobody counted an acceptance" in verdict(last)
    one = advise(Question(target, (draft,), "h100", alphas=(0.9,)))
    assert one.cases[0].best is not None and "speculate with" in verdict(one.cases[0])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device": "h10"}, "device h10 is unknown; did you mean h100"),
        ({"contexts": (1 << 20,)}, "has room for 256 tokens"),
        ({"task": "chat"}, "--task chat: nothing was counted on such texts"),
        ({"draft_models": ("relullama-7b",)}, "relullama-7b is not on this machine and the catalogue has no shape"),
    ],
    ids=["device", "context", "task", "shape"],
)
def test_a_mistake_is_one_line(pair, given, said):
    with pytest.raises(UserError, match=said):
        advise(Question(str(pair[0]), **{"device": "h100", **given}))


def test_a_cpu_computes_after_it_has_read_and_a_gpu_meanwhile(pair):
    target, peaks = ModelOutline.from_file("t", pair[0]), {"bandwidth": 1e9, "f32": 4e9}
    load = target.traffic()
    read_s, macs_s = load.read_bytes(8, 100) / 0.8e9, sum(load.macs(8, 100).values()) / 2.4e9
    for overlap, wanted in ((1.0, max(read_s, macs_s)), (0.0, read_s + macs_s)):
        clock = Clocks.on_paper(Device("d", "d", **peaks, overlap=overlap), target, 100, 1).expected
        assert clock.v(8) * clock.step_s == pytest.approx(wanted, rel=1e-12)


def test_a_draft_of_another_vocabulary_is_named(pair, tmp_path):
    target, draft = (ModelOutline.from_file(name, path) for name, path in zip(("t", "d"), pair))
    other = ModelOutline.from_file("o", write_tiny_gguf(tmp_path / "other.gguf", tokenizer="spm", n_layers=1))
    assert another_vocabulary(target, draft) is None
    assert "drafter.vocabulary=tli" in another_vocabulary(target, other)
    assert another_vocabulary(outline("llama-3.1-8b"), outline("llama-3.2-1b")) is None
    assert another_vocabulary(outline("qwen2.5-7b"), outline("qwen2.5-0.5b")) is None  # 152,064 rows and 151,936
    said = another_vocabulary(outline("llama-3.1-8b"), outline("llama-160m"))
    assert said == "llama-160m: 32000 ids, the target has 128256: is it a pair?"
    found = advise(Question("llama-3.1-8b", ("llama-160m",), "h100"))
    assert found.vocabularies == (said,) and found.to_dict()["vocabularies"] == [said]


def test_kernels_that_start_take_their_time_on_an_accelerator():
    target = outline("llama-3.1-8b")
    dispatched = Device("d", "d", bandwidth=1e12, f32=1e15, dispatch=1e-6)
    idle = Clocks.on_paper(Device("d", "d", bandwidth=1e12, f32=1e15), target, 512, 1).expected
    assert Clocks.on_paper(dispatched, target, 512, 1).expected.step_s - idle.step_s == pytest.approx(322e-6)
    assert math.isclose(idle.step_s, target.traffic().read_bytes(1, 512) / 0.8e12)
