"""Measuring a tiny model: the table, what is kept of it, drafts, batches, seeds, and the roofline experiment."""

import dataclasses
import importlib.util
import sys

import jax
import numpy as np
import pytest

import specsparse
from specsparse import kernels
from specsparse.data import prompts
from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.experiments import configured, runner
from specsparse.experiments.settings import from_omegaconf
from specsparse.measure.costs import acceptance, measuring
from specsparse.measure.trials import Loop, Ours
from specsparse.run import conf_dir
from specsparse.runtime import timing_cache
from specsparse.runtime.method import Method
from specsparse.runtime.metrics import Counters
from specsparse.speculative.drafters.synthetic import Scripted
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.verifiers import get_verifier
from specsparse.testing import write_tiny_gguf
from tests.experiments.playing import play

EFFORT = measuring.Effort(ns=(1, 2, 4), near=16, far=64, repeats=2, decode=4, least=1, narrow=1)
ROOT = conf_dir().parent


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("costs") / "tiny.gguf", quant="Q4_0", context_length=512)


@pytest.fixture(scope="module")
def model(path):
    return specsparse.load(path)


@pytest.fixture(scope="module")
def table(model):
    return measuring.measure(model, effort=EFFORT)


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECSPARSE_CACHE", str(tmp_path))
    return tmp_path


def test_what_is_measured(table):
    assert table.ns == (1, 2, 4)
    assert list(table.forward_s) == sorted(table.forward_s)
    assert table.plain_s > 0 and table.bandwidth > 1e8 and table.host_s > 0
    assert min(table.kv_s, table.kv_row_s, table.round_s, table.round_token_s) >= 0
    assert set(table.residuals) == {"spread", "kv", "kv_far", "rising"}
    assert table.identity["file"] == "tiny.gguf"


def test_rows_are_timed_as_those_of_a_text(model, monkeypatch):
    """Rows that repeat themselves would wake fewer experts than a text's, and random ones more."""
    seen = []

    def forward(params, tokens, cache, **given):
        jax.debug.callback(lambda rows: seen.append(np.asarray(rows).tolist()), tokens)
        return model.forward(params, tokens, cache, **given)

    watched, text = dataclasses.replace(model, forward=forward), model.tokenizer.encode("A text of some words")[:4]
    Ours(watched, room=4, forwards=3, ids=np.asarray(text, np.int32)).verify(4)
    jax.effects_barrier()
    assert seen == [[text]] * 3

    class Asked(Exception):
        pass

    def loop(model, method, ids, *, room):
        if method.drafter is not None:
            raise Asked(ids, method.drafter.truth)

    monkeypatch.setattr(measuring, "Loop", loop)
    with pytest.raises(Asked) as asked:
        measuring.measure(model, effort=EFFORT)
    begins = model.tokenizer.encode(prompts.load()[0].text)[:20]
    for ids in asked.value.args:
        assert list(ids[: len(begins)]) == begins


def test_one_loop_times_rounds_of_any_rows_and_from_any_place(model):
    ids = np.arange(3, 23, dtype=np.int32)
    drafter = Scripted.chain(3, (0,), vocab_size=model.config.vocab_size, truth=tuple(range(3, 43)))
    loop, seen = Loop(model, Method(drafter, get_verifier("match"), Fixed(3)), ids, room=16), Counters()
    for start, drafted in ((20, 2), (8, 0), (12, 3)):
        assert loop.again(2, start=start, drafted=drafted) > 0
        now = loop.session.counters()[0]
        assert (now.num_rounds - seen.num_rounds, now.num_draft_tokens - seen.num_draft_tokens) == (2, 2 * drafted)
        assert int(loop.session.state.length[0]) == start + now.num_emitted_tokens - seen.num_emitted_tokens
        seen = now


def test_a_guess_of_a_model_with_experts_counts_those_that_rows_wake(tmp_path, kept):
    file = write_tiny_gguf(tmp_path / "e.gguf", architecture="qwen3moe", d_ff=256, n_experts=16, n_chosen=1)
    read = {
        n: sum(t.nbytes * (1 - (15 / 16) ** n if "_exps" in name else 1) for name, t in open_gguf(file).tensors.items())
        for n in (1, 2, 4)
    }
    skipped = open_gguf(file).tensors["token_embd.weight"].nbytes
    v = timing_cache.policy_times(specsparse.load(file), 3, None)["v"]
    wanted = [(read[n] - skipped) / (read[1] - skipped) for n in (2, 4)]
    assert [v[1], v[3]] == pytest.approx(wanted, abs=0.006) and v[3] > 2


def test_a_table_is_measured_once(model, table, kept, monkeypatch):
    calls = []

    def fake(model, effort=None, done=None):
        calls.append(effort)
        return table

    monkeypatch.setattr(measuring, "measure", fake)
    assert measuring.load_or_measure(model) == table
    assert measuring.load_or_measure(model) == table
    assert len(calls) == 1
    assert measuring.load_or_measure(model, refresh=True) == table
    assert len(calls) == 2
    timing_cache.path_of(model).write_text("{ damaged")
    assert measuring.load_or_measure(model) == table
    assert len(calls) == 3


def test_a_table_belongs_to_one_file_and_machine_and_to_how_the_model_runs(model, monkeypatch):
    where, status = timing_cache.path_of(model), kernels.status()
    for other in ({"kv_dtype": "f32"}, {"ffn": "oracle"}, {"kernels": kernels.get("reference")}):
        assert timing_cache.path_of(dataclasses.replace(model, **other)) != where, other
    for changed in ({"threads": 77}, {"isa": "portable"}):
        monkeypatch.setattr(timing_cache.kernels, "status", lambda new=changed: {**status, **new})
        assert timing_cache.path_of(model) != where, changed
    monkeypatch.undo()
    monkeypatch.setitem(timing_cache.cpu_info(), "model", "another CPU")
    assert timing_cache.path_of(model) != where


def test_a_drafter_is_measured_once(model, table, kept, monkeypatch):
    monkeypatch.setattr(measuring, "load_or_measure", lambda model, bar: timing_cache.load(model) or table)
    found, key = measuring.table_for(model, "prompt_lookup", {})
    cost = found.drafts[key]
    assert key == "prompt_lookup" and cost.token_s >= 0 and cost.fixed_s >= 0
    stages = [key[0][:2] for key in model.programs.compiled]
    assert (stages.count(("round", "verify")), stages.count(("round", "draft"))) == (1, 2)  # the free drafter's too
    assert measuring.table_with_draft(model, key, pytest.fail).drafts[key] == cost


def test_a_level_of_a_tree_is_measured(model, table, kept, monkeypatch):
    monkeypatch.setattr(measuring, "load_or_measure", lambda model, bar: timing_cache.load(model) or table)
    found, key = measuring.table_for(model, "layer_skip", {}, draw="top")
    assert key == "layer_skip, top trees" and found.drafts[key].token_s >= 0


@pytest.mark.parametrize("context", [32, 64, 512, 8192])
@pytest.mark.parametrize("step_s", [1e-4, 0.2])
def test_effort_fits_any_context(context, step_s):
    effort = measuring.Effort().for_model(context, step_s)
    assert effort.far > effort.near >= 1
    assert effort.ns[0] == 1
    assert effort.near + 1 + effort.decode <= context



def config(path, **given):
    """Without drafters and trees unless they are given."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        roof = [f"roofline.{k}={v}" for k, v in {"drafters": "[]", "trees": "[]", **given}.items()]
        overrides = ["+experiment=roofline", "model=custom", f"model.path={path}", "data.chat=false"]
        return from_omegaconf(compose("config", [*overrides, *roof]))


def test_the_roofline_experiment(path, table, kept, monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "measure", lambda *_, **__: table)
    cfg = config(path)
    found, text, written = play(cfg, tmp_path / "run", width=120)
    assert found.as_promised and found.objective > 0
    assert written["summary"]["measured"]["plain_s"] == table.plain_s
    taken = written["summary"]["conditions"]
    assert (taken["read_bandwidth"], taken["plain_tokens_per_second"]) == (table.bandwidth, 1 / table.plain_s)
    for heading in ("v(n)", "KV cache", "weights by quantisation", "a100", "rpi4", "best gamma"):
        assert heading in text
    monkeypatch.setattr(measuring, "measure", pytest.fail)  # kept
    play(cfg, tmp_path / "again")


def test_the_roofline_of_another_device_measures_nothing(path, monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "measure", pytest.fail)
    cfg = config(path, device="a100", kv_length=64)
    record = play(cfg, tmp_path).found
    assert record.summary["measured"] is None
    assert record.summary["device"]["title"].startswith("NVIDIA A100")
    with pytest.raises(UserError, match="v100"):
        runner.check(config(path, device="v100"))


@pytest.mark.slow  # test_ranks.py measures the acceptance of both, above a drafter's time is measured
def test_the_roofline_measures_drafters_and_trees(path, table, kept, monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "measure", lambda *_, **__: table)
    monkeypatch.setattr(acceptance, "ROUNDS", 2)
    cfg = config(path, drafters="[prompt_lookup]", trees="[static]")
    record, text, _ = play(cfg, tmp_path / "run", width=120)
    chain, tree = record.summary["drafting"]
    assert chain["method"] == configured.draft_key(cfg)  # a run with this drafter finds it
    assert tree["method"] == "layer_skip, tree static"
    assert 0 <= chain["alpha"] <= 1 and chain["predicted_speedup"] >= 1
    assert tree["round_s"] >= 0 and tree["token_s"] == 0
    assert 1 <= tree["tokens"] <= 4 and tree["gamma"] == 15  # three levels and a token; every round is given its nodes
    assert "tok/round" in text
    known = record.summary["measured"]
    assert set(known["drafts"]) == {chain["method"], tree["method"]} and len(known["acceptance"]) == 2
    assert known["drafts"][tree["method"]] == {"token_s": 0.0, "fixed_s": tree["round_s"]}
    with pytest.raises(UserError, match="no_such"):
        runner.check(config(path, drafters="[no_such]"))


@pytest.fixture
def script():
    def load(name):
        spec = importlib.util.spec_from_file_location(name, ROOT / "experiments" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.skipif(not (ROOT / "experiments").is_dir(), reason="a checkout is needed")
def test_made_shapes_load_and_run(script, tmp_path):
    shapes = script("make_shapes")
    sizes = {}
    for name, shape in shapes.SHAPES.items():
        small = shape.scaled(16)
        path = tmp_path / f"{small.name}.gguf"
        assert shapes.write(small, path) == path.stat().st_size
        f = open_gguf(path)
        assert {t.type.name for t in f.tensors.values()} == {"F32", shape.kind, shape.output}
        model = specsparse.load(path)
        sizes[name] = model.config.vocab_size
        assert len(specsparse.generate(model, "hello world", max_tokens=3, ignore_eos=True).token_ids) == 3
    alike = tmp_path / "alike.gguf"
    shapes.write(shapes.SHAPES["smallthinker-4b"].scaled(16), alike, alike=0.5)
    rows = open_gguf(alike).tensors["token_embd.weight"].dequantize()
    assert (rows[:, :128] == rows[0, :128]).all() and not (rows[:, 128:] == rows[0, 128:]).any(axis=1)[1:].all()
    assert sizes["7b"] == sizes["160m"]  # target and draft share a vocabulary
    full = shapes.SHAPES["7b"].config()
    assert (full.n_layers, full.d_model, full.d_ff, full.vocab_size) == (32, 4096, 11008, 32000)
    full = shapes.SHAPES["smallthinker-4b"].config()
    assert (full.n_layers, full.d_model, full.head_dim, full.n_experts, full.n_chosen) == (32, 1536, 128, 32, 4)


@pytest.mark.skipif(not (ROOT / "experiments").is_dir(), reason="a checkout is needed")
def test_the_synthetic_check_runs(script, model, table):
    synthetic = script("synthetic_speedup")
    results = synthetic.compare(model, table, [0.3, 0.9], 3, tokens=40, repeats=3)
    assert [r.rate for r in results] == [0.3, 0.9]
    assert results[1].tokens == pytest.approx(3.44, abs=0.8)
    assert all(r.predicted > 0 and r.measured > 0 for r in results)
