"""Every kind of experiment on tiny models or none: what it prints, writes and returns."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from rich.console import Console

import specsparse
from specsparse import run
from specsparse.data.prompts import Prompt
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.experiments import decoding, runner, sweeps
from specsparse.experiments.command_line import shorthand
from specsparse.experiments.kinds import certificate as certify_kind
from specsparse.experiments.kinds import compare
from specsparse.experiments.kinds.certificate import CertifySpec
from specsparse.experiments.kinds.compare import CompareSpec
from specsparse.experiments.settings import FfnSpec, ModelSpec, from_omegaconf
from specsparse.measure import conditions, machine, speedups
from specsparse.measure.conditions import Conditions
from specsparse.measure.costs import measuring
from specsparse.models import catalogue
from specsparse.models.convert.heads import write_folder
from specsparse.report import figures, methods, record, runs
from specsparse.runtime import metrics
from specsparse.runtime.method import MethodSpec, resolve
from specsparse.runtime.timing_cache import CostTable
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.policies.base import Heuristic
from specsparse.speculative.proof import known_bugs, mutants
from specsparse.speculative.proof.mutants import DRIVER_MUTANTS, MUTANTS
from specsparse.support import terminal
from specsparse.support.files import conf_dir
from specsparse.support.registry import Choice
from specsparse.testing import write_tiny_gguf
from specsparse.testing.drafting import random_eagle3
from tests.cells import cells
from tests.experiments import playing
from tests.experiments.playing import GREEDY, replaced, run_config, settings

COSTS = CostTable((1, 4), 10, (0.01, 0.02), 0.0, 0.0, 0.01, 0.001, 0.0, 0.0, 1e9, None, 1e9)
CONTEXT = {"vocab_size": 300, "n_layers": 2, "context_length": 128}


@pytest.fixture(autouse=True)
def bandwidth(monkeypatch):
    monkeypatch.setattr(machine, "read_bandwidth", lambda: 40e9)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target and a draft model of one SPM vocabulary, and two prompts."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_gguf(folder / "target.gguf", tokenizer="spm", **CONTEXT)
    write_tiny_gguf(folder / "draft.gguf", tokenizer="spm", quant="F16", seed=1, **CONTEXT)
    rows = [{"id": f"{task}-1", "task": task, "text": "abc abc abc"} for task in ("chat", "code")]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def cfg(files):
    method = {"drafter": "prompt_lookup", "gamma": 3}
    text = {"text": files / "prompts.jsonl", "chat": False}
    return run_config(files / "target.gguf", **method, **text, sampling=GREEDY, max_tokens=16, stream=False)


def play(cfg, directory):
    return playing.play(cfg, directory, width=140)


def test_a_watched_run_with_a_policy_and_the_host_loop(cfg, tmp_path):
    """One run with everything on: policy, trace, recording, time split, host loop."""
    policy = Choice("auto_off", {"gamma": 3, "v": [1.0, 9.0, 9.0, 9.0], "every": 4})
    cfg = replaced(cfg, policy=policy, loop="host", time_split=8, trace=True, record_laws=8)
    found, text, written = play(cfg, tmp_path)
    assert found.as_promised
    assert found.result.identity.tokens == 16 * 9  # watched 2, warm-up 3, timed 3 x 2, less 2 to compare with
    for part in ("time in draft", "time split: measured", "times as fast as the host loop", "auto_off left", "round 0"):
        assert part in text
    summary = written["summary"]
    assert summary["policy"]["rounds_off"] > 0 and summary["policy"]["predicted_speedup"] < 1
    assert set(summary["exports"]) == {"llama.cpp", "sglang", "spec-bench"}
    rates = summary["speculative"]["rates"]
    assert sum(rates[f"share_{stage}"] for stage in ("draft", "verify", "sample", "commit")) == pytest.approx(1)
    assert (tmp_path / "laws.npz").is_file() and (tmp_path / "trace.jsonl").is_file()
    assert "oracles" in summary and summary["jit_over_host_loop"]["prompts"] == 2


def test_prompts_of_any_length_share_a_program_with_a_fixed_width(tmp_path):
    """Two prompts, of which each would have a cache of its own size."""
    path = write_tiny_gguf(tmp_path / "m.gguf", vocab_size=300, n_layers=1, context_length=512)
    model = specsparse.load(path, backend="xla", width=8)
    texts = ["abc " * count for count in (2, 100)]
    ids = [model.tokenizer.encode(text, add_special=True) for text in texts]
    short, long = (model.capacity_for(len(i) + 4 + model.room_for(0)) for i in ids)
    assert short < long
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    method = {"text": tmp_path / "prompts.jsonl", "chat": False, "sampling": GREEDY, "max_tokens": 4}
    playing.play(run_config(path, **method, stream=False, warmup=False), tmp_path / "run", model=model)
    assert sum(key[0][0] == "decode" for key in model.programs.compiled) == 1
    assert set(model.programs.tables) == {long}  # the size of every cache
    assert model.capacity_for(1) == short  # the model itself is as it was


QWEN3 = {"architecture": "qwen3", "head_dim": 32, "tokenizer": "bpe", "pre": "qwen2", **CONTEXT}
SAME_TEXT = "model x match (lossless: plain decoding's tokens)"
PAIRS = {
    "spec_llama160m": (SAME_TEXT, ["policy.p_min=0.01", "policy.n_min=2"]),
    "spec_qwen3": (SAME_TEXT, []),
    "spec_llama160m_pq": ("model x token (lossless in distribution)", ["policy.p_min=0.01"]),
    **{name: (SAME_TEXT, []) for name in ("spec_llama31_8b", "spec_smollm2_1.7b", "spec_tinyllama")},
}


@pytest.mark.parametrize("method", cells(["tli", "slem"], ["tli"]))
def test_a_pair_of_two_vocabularies_runs_on_tiny_models(cfg, files, tmp_path, method):
    """Llama's vocabulary and SmolLM2's. The record says how they overlap, under TLI and under SLEM."""
    draft = write_tiny_gguf(files / "bpe.gguf", tokenizer="bpe", seed=2, **CONTEXT)
    own = [f"model.path={files / 'target.gguf'}", f"drafter.model={draft}"]
    few = {key: getattr(cfg, key) for key in ("data", "max_tokens", "tracker", "warmup", "time_split", "stream")}
    by_text = ["drafter.vocabulary=slem", "verifier=match", "sampling.temperature=0", "drafter.temperature=0"]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        words = shorthand(["+experiment=spec_two_vocabularies", *own, *(by_text if method == "slem" else [])])
        of_file = from_omegaconf(compose("config", words))
    found, text, written = play(replaced(of_file, **few), tmp_path / method)
    assert found.as_promised and f"drafter.vocabulary={method}: bpe.gguf has other tokens than the target" in text
    about = written["method"]["vocabulary"]
    assert about["method"] == method and about["rounds"] == {"tli": "jitted", "slem": "stepped"}[method]
    assert 250 < about["shared"] < 300 and about["special"][0]["role"] == "eos"
    assert found.result.groups["all"].sides["speculative"].counters.num_drafts > 0


# Both verifiers, both tokenizers; the slow files differ in names of models and in a policy's n_min.
@pytest.mark.parametrize("name", cells(PAIRS, ["spec_qwen3", "spec_llama160m_pq"]))
def test_a_pair_runs_on_tiny_models(cfg, files, tmp_path, name):
    """The experiment files themselves. Drafts of a random model are unsure, so p_min and draft_min are lowered."""
    label, lower = PAIRS[name]
    target, draft = files / "target.gguf", files / "draft.gguf"
    if name == "spec_qwen3":
        target, draft = (write_tiny_gguf(tmp_path / file, seed=seed, **QWEN3) for seed, file in enumerate("td"))
    own = [f"model.path={target}", f"drafter.model={draft}", "policy.gamma=4"]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        of_file = from_omegaconf(compose("config", shorthand([f"+experiment={name}", *own, *lower])))
    few = {key: getattr(cfg, key) for key in ("data", "max_tokens", "tracker", "warmup", "time_split", "stream")}
    found, text, _ = play(replaced(of_file, **few), tmp_path)
    assert found.as_promised and label in text
    assert found.result.groups["all"].sides["speculative"].counters.num_drafts > 0


def test_a_published_head_runs_on_a_tiny_target(cfg, files, tmp_path):
    """The experiment file itself, with a random head in the authors' form."""
    head = write_folder(random_eagle3(specsparse.load(files / "target.gguf"), ids=range(0, 300, 2)), tmp_path / "head")
    own = [f"model.path={files / 'target.gguf'}", f"drafter.path={head}"]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        of_file = from_omegaconf(compose("config", shorthand(["+experiment=eagle3_llama31_8b", *own])))
    few = {key: getattr(cfg, key) for key in ("data", "max_tokens", "tracker", "warmup", "time_split", "stream")}
    found, text, _ = play(replaced(of_file, **few), tmp_path / "run")
    assert found.as_promised and SAME_TEXT.replace("model", "eagle3", 1) in text
    assert found.result.groups["all"].sides["speculative"].counters.num_drafts > 0


@pytest.mark.slow  # tests/experiments/test_sweeps.py runs sweeps, tests/report draws their figures
def test_a_sweep_of_a_pair_draws_acceptance_and_speed_up(files, tmp_path, monkeypatch):
    """The experiment file by its command, on a few cells of stand-ins."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    few = ["policy.gamma=1,2", "sampling.temperature=0.0,0.7", "max_tokens=8", "warmup=false", "tracker.mode=disabled"]
    pair = [f"model.path={files / 'target.gguf'}", f"drafter.model={files / 'draft.gguf'}"]
    data = [f"data.source={files / 'prompts.jsonl'}", "data.tasks=[chat]", "data.chat=false"]
    assert run.main(["-m", "+experiment=sweep_pairs", *few, *pair, *data]) == 0
    found = runs.find([tmp_path / "runs"])
    assert {r.config["tracker"]["group"] for r in found} == {"sweep_pairs"} and len(found) == 4
    made = {figure.name for figure in figures.make(found, methods.from_runs(found))[0]}
    ways = {f"{what}_by_{over}" for what in ("acceptance", "speedup") for over in ("gamma", "temperature")}
    assert ways <= made


def test_where_the_files_are_not_there_one_line_says_which(cfg, monkeypatch, tmp_path):
    for name in ("SPECSPARSE_MODELS", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    cfg = replaced(
        cfg, model=ModelSpec("llama-2-7b"), drafter=Choice("model", {"model": "llama-160m"}),
        verifier=Choice("match"),
    )  # fmt: skip
    with pytest.raises(UserError) as error:
        runner.check(cfg)
    for part in ("3.8 GB", "325 MB", "model.path=/path/to/llama-2-7b.Q4_0.gguf", "drafter.model=/path/to/llama-160m"):
        assert part in str(error.value)
    (tmp_path / "llama-160m.F16.gguf").write_bytes(b"x")
    assert catalogue.resolve("llama-160m") == tmp_path / "llama-160m.F16.gguf"
    with pytest.raises(UserError, match=r"^llama-2-7b.Q4_0.gguf \(3.8 GB, .*\) is not on this machine"):
        runner.check(cfg)


@pytest.mark.slow  # `spec_two_vocabularies` above records the same of one method
def test_compare_says_of_each_method_how_two_vocabularies_go_together(cfg, files, tmp_path):
    other = str(write_tiny_gguf(files / "bpe.gguf", tokenizer="bpe", seed=2, **CONTEXT))
    draft = Choice("model", {"model": other, "vocabulary": "tli"})
    changes = {"kind": "compare", "drafter": draft, "compare": CompareSpec(("model", "suffix"), ("greedy",))}
    written = play(replaced(cfg, **changes), tmp_path).record
    known = {m["name"]: m.get("vocabulary") for m in written["methods"]}
    assert known["model x greedy"]["method"] == "tli" and known["suffix x greedy"] is None


def test_compare_ranks_every_valid_pair_and_predicts_it(cfg, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "table_for", lambda model, name, options, bar: (COSTS, name))
    spec = CompareSpec(("prompt_lookup", "suffix"), ("greedy", "delta", "token"), advise=True)
    found, text, written = play(replaced(cfg, kind="compare", compare=spec), tmp_path)
    advice = {m["name"]: m["advice"] for m in written["methods"] if "advice" in m}
    assert advice.keys() == {
        e.name for e in found.result.entries if e.groups["all"].sides["speculative"].counters.num_drafts
    }
    assert f"of {len(advice)} predictions within" in text and written["summary"]["advice"]["methods"] == len(advice) > 0
    names = {e.name for e in found.result.entries}
    assert names == {f"{d} x {v}" for d in spec.drafters for v in ("greedy", "delta")}
    assert [e.speedup for e in found.result.entries] == sorted((e.speedup for e in found.result.entries), reverse=True)
    assert len(found.result.refused) == 2 and "left out: suffix x token" in text and "best for chat" in text
    assert found.as_promised and written["summary"]["best"] == found.result.entries[0].name
    taken = written["summary"]["conditions"]
    assert taken["read_bandwidth"] == 40e9 and taken["plain_tokens_per_second"] > 0
    assert all(m["conditions"] == taken and "rank" in m for m in written["methods"]) and "taken at: read" in text
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [r["side"] for r in rows].count("plain") == 2
    sides, refused = compare.pairs(settings(replaced(cfg, kind="compare", compare=CompareSpec(("suffix",)))))
    assert list(sides) == ["suffix x greedy", "suffix x delta", "suffix x block"] and not refused  # no alias
    with pytest.raises(UserError, match="no drafter of the list goes with"):
        runner.check(replaced(cfg, kind="compare", compare=CompareSpec(("suffix",), ("token",))))


def test_compare_asks_the_same_behind_more_and_more_text(cfg, files, tmp_path):
    """The last text is the same at every length; v(n) is of each length; the report draws all over the tokens."""
    data = dataclasses.replace(cfg.data, tasks=("code",), lengths=(6, 9))
    spec = CompareSpec(("prompt_lookup",), ("greedy",), widths=(3,))
    cfg = replaced(cfg, kind="compare", data=data, compare=spec, warmup=False)
    cfg = dataclasses.replace(cfg, composed={"data": {"lengths": [6, 9]}})
    _, text, written = play(cfg, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "prompts.jsonl").read_text().splitlines()]
    assert {(r["prompt_id"], r["task"]) for r in rows} == {("code-1 of 6", "6"), ("code-1 of 9", "9")}
    depths = written["summary"]["depths"]
    assert [(d["tokens"], d["rows"]) for d in depths] == [(7, 1), (7, 3), (10, 1), (10, 3)]  # and BOS
    assert all(d["v"] == pytest.approx(d["seconds"] / one["seconds"]) for one, d in zip(depths[::2], depths[1::2]))
    assert "one row, ms" in text and "v(3)" in text
    found = runs.find([tmp_path / "run"])
    (figure,) = (f for f in figures.make(found, methods.from_runs(found))[0] if f.name == "by_context")
    assert {(r["measure"], r["tokens"]) for r in figure.rows} == {
        (measure, tokens) for measure in ("speed-up", "tokens per target pass", "v(n)") for tokens in (6, 9)
    }
    assert figure.png()
    long = dataclasses.replace(data, lengths=(1000,))
    with pytest.raises(UserError, match=r"data\.lengths: 1000 tokens"):
        play(replaced(cfg, data=long), tmp_path / "long")


def test_text_before_a_question_leaves_its_conversation_as_it_is():
    class Letters:
        encode = staticmethod(lambda text: [*map(ord, text)])
        decode = staticmethod(lambda ids: "".join(map(chr, ids)))

    asked = Prompt("a", "chat", "the end", before=("hello",), system="be brief")
    longer = decoding.behind([asked, Prompt("b", "chat", "behind it")], asked, 12, Letters)
    assert longer == asked._replace(id="a of 12", task="12", text=" it\n\nthe end")


def method(name, ratio, half, *, tokens_per_pass=9.0, draws_z=None):
    faster = speedups.speedup([ratio], [1.0], prompts=[0])._replace(low=ratio - half, high=ratio + half, prompts=6)
    rates = {"tokens_per_second": 100.0, "tokens_per_target_pass": tokens_per_pass, "mean_acceptance_length": 3.0}
    side = record.SidePasses(metrics.Counters(), rates, 1, 0.0, 0, 1.0, None, None, draws_z)
    group = record.Group({"plain": side, "speculative": side}, faster)
    return compare.ComparedMethod(
        name, "lossless", {"chat": group, "all": group}, record.identity_of([], verifier="greedy")
    )


def test_a_comparison_marks_ties_and_what_no_method_can_do():
    entries = (method("a", 1.5, 0.1), method("b", 1.4, 0.1), method("c", 1.1, 0.1, tokens_per_pass=1.05))
    found = compare.Comparison(entries, (), Conditions(20e9, 0.2, 160.0))
    out = io.StringIO()
    Console(file=out, width=140).print(compare.table(found))
    rows = [line.split()[:2] for line in out.getvalue().splitlines() if line.strip()]
    assert [row for row in rows if row[1:] in (["a"], ["b"], ["c"])] == [["1=", "a"], ["1=", "b"], ["3", "c"]]
    assert found.warnings[0].startswith("read bandwidth varied by 20%")
    assert found.warnings[1].startswith("c: speed-up 1.10 is impossible with 1.05 tokens per target pass")
    assert compare.lines(found)[:2] == [conditions.TIED, "best for chat: a (1.50; tied with b)"]
    apart = compare.Comparison((method("a", 1.5, 0.1), method("b", 1.2, 0.1)), ())
    assert compare.lines(apart)[0] == "best for chat: a (1.50)" and not apart.warnings


def test_a_comparison_is_not_fooled_by_draws_that_are_not_from_q():
    found = compare.Comparison((method("a", 1.5, 0.1, draws_z=-67.0), method("b", 1.2, 0.1, draws_z=3.0)), ())
    assert [line.partition(",")[0] for line in found.warnings] == ["a: alpha_z is -67.0"]


def test_certify_prints_one_table_and_fails_where_the_promise_is_broken(cfg, tmp_path, monkeypatch):
    spec = CertifySpec(("token", "typical"), vocab=2, gamma=1, known_bugs=False)
    cfg = replaced(cfg, kind="certify", certify=spec, model=ModelSpec("none.gguf"))
    few = {name: DRIVER_MUTANTS[name] for name in ("no_coins_token", "count_ignored_token")}
    rules = {name: MUTANTS[name] for name in list(MUTANTS)[:2]}
    monkeypatch.setattr(mutants, "DRIVER_MUTANTS", few)
    monkeypatch.setattr(mutants, "MUTANTS", rules)
    found, text, written = play(cfg, tmp_path / "a")
    assert found.as_promised and found.objective <= 1e-10
    promises = [row["promise"] for row in written["rows"]]
    assert promises == ["lossless", "lossless", "lossy", *["mutant"] * (len(rules) + len(few))]
    assert [row["part"] for row in written["rows"][:3]] == ["rule", "driver", "rule"]
    assert [row["part"] for row in written["rows"][3:]] == ["rule"] * len(rules) + ["driver"] * len(few)
    assert 1e-10 < written["summary"]["worst_lossless_driver"] <= written["rows"][1]["bound"]
    assert "float64" in written["definitions"]["rule"] and "float32" in written["definitions"]["driver"]
    assert "LOSSY" in text and "argmax_as_sampled" in text and "as promised" in text
    assert "driver mutant" in text and "no_coins_token" in text and "rule: the verifier's rule in float64" in text
    weak = dataclasses.replace(found.result.mutants[0], tv=1e-5)
    weakened = dataclasses.replace(found.result, mutants=(weak, *found.result.mutants[1:]))
    monkeypatch.setattr(certify_kind, "certify", lambda *_, **__: weakened)
    found, text, written = play(cfg, tmp_path / "b")
    assert not found.as_promised and "NOT as promised: mutant argmax_as_sampled" in text
    assert written["failures"] == ["mutant argmax_as_sampled"]


def test_certify_takes_callables_and_the_known_bugs(cfg, tmp_path, monkeypatch):
    (tmp_path / "mine_own.py").write_text(
        "from specsparse import ExternalVerifier\n"
        "first = lambda p, q, drafts, uniforms: [int(uniforms[0] >= p[0, 0])]\n"
        "lazy = ExternalVerifier(first, name='lazy', samples=2000)\n"
        "def eager(p, q, drafts, u):\n    return len(drafts), 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    shown = {name: known_bugs.KNOWN_BUGS[name] for name in ("coin_is_0", "argmax_drafts_q_1")}
    monkeypatch.setattr(known_bugs, "KNOWN_BUGS", shown)
    spec = CertifySpec((), vocab=2, gamma=1, mutants=False, also=("mine_own:lazy",))
    cfg = replaced(cfg, kind="certify", certify=spec, model=ModelSpec("none.gguf"))
    found, text, written = play(cfg, tmp_path / "a")
    assert found.as_promised and found.objective is None
    rows = {row["name"]: row for row in written["rows"]}
    assert list(rows) == ["lazy", "argmax_drafts_q_1", "coin_is_0"]
    assert rows["lazy"]["part"] == "callable" and rows["lazy"]["tv"] <= rows["lazy"]["bound"] < 1e-8
    assert rows["coin_is_0"]["promise"] == "mutant" and rows["coin_is_0"]["bound"] < 1e-8
    assert "every uniform bisected" in text and "float32" not in text
    spec = dataclasses.replace(spec, also=("mine_own:eager",), known_bugs=False)
    found, text, written = play(replaced(cfg, certify=spec), tmp_path / "b")
    assert not found.as_promised and "NOT as promised: eager" in text
    assert written["rows"][0]["texts"][0].startswith("text ")
    for also, words in (
        ("mine_own", "certify.also=mine_own: write MODULE:NAME"),
        ("mine_own:eagre", "did you mean eager"),
        ("no_mod:f", "no module"),
    ):
        with pytest.raises(UserError, match=words):
            runner.check(replaced(cfg, certify=dataclasses.replace(spec, also=(also,))))


def test_a_mesh_is_refused_where_one_device_is_needed(cfg):
    on_mesh = replaced(cfg, model=dataclasses.replace(cfg.model, mesh=2))
    runner.check(on_mesh)
    with pytest.raises(UserError, match=r"kind=roofline .*leave model\.mesh out"):
        runner.check(replaced(on_mesh, kind="roofline"))
    with pytest.raises(UserError, match="dense models: leave ffn out"):
        runner.check(replaced(on_mesh, ffn=FfnSpec("powerinfer")))


def test_unknown_kinds_are_refused(cfg):
    with pytest.raises(UserError, match=r"kind=sped is unknown; did you mean speed\?"):
        runner.check(replaced(cfg, kind="sped"))


DRAFTERS = {
    "prompt_lookup": {"ngram_max": 3, "ngram_min": 2},
    "suffix": {"longest": 64, "min_match": 1, "factor": 1.0, "offset": 0, "min_share": 0.1, "candidates": 8},
}
HEADINGS = (
    "rank", "speed-up", "95 % interval", "tok/s", "plain tok/s", "read GB/s", "tokens/pass", "accept. length",
    "differing",
)  # fmt: skip


def a_sweep(directory):
    """Two drafters, each with options of its own, at two draft lengths; the values of the last row but its names."""

    def record(drafter, gamma, ratio):
        faster = {"ratio_of_totals": ratio, "low": ratio - 0.1, "high": ratio + 0.1}
        taken = Conditions(20e9, plain_tokens_per_second=100.0).to_dict()
        rates = {"tokens_per_second": 100 * ratio, "tokens_per_target_pass": 2.0, "mean_acceptance_length": 2.5}
        side = {"rates": rates}
        summary = {"plain": side, "speculative": side, "speedup": faster, "identity": {"differing": 0},
                   "conditions": taken}  # fmt: skip
        config = {"drafter": {"name": drafter, **DRAFTERS[drafter]}, "policy": {"name": "fixed", "gamma": gamma}}
        return {"name": "s", "summary": summary, "config": {**config, "seed": 0}}

    cells = [(drafter, gamma) for drafter in DRAFTERS for gamma in (1, 16)]
    for index, (drafter, gamma) in enumerate(cells):
        (directory / str(index)).mkdir()
        text = json.dumps(record(drafter, gamma, 0.5 + 0.3 * index))
        (directory / str(index) / "record.json").write_text(text)
    (directory / "4").mkdir()  # a job that failed
    return ("1", "1.40", "1.30-1.50", "140.0", "140.0", "20.0", "2.00", "2.50", "0")


def shown(directory, width):
    """The lines without the footnote, which is there and fits."""
    out = io.StringIO()
    sweeps.show(directory, Console(file=out, width=width))
    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip(" ─")]
    at = next(i for i, line in enumerate(lines) if line.startswith("tokens/pass: "))
    assert " ".join(" ".join(lines[at:-1]).split()).endswith("1 + accepted tokens / rounds that drafted")
    assert max(map(len, lines[at:-1])) <= width
    return [*lines[:at], lines[-1]]


def columns(line):
    return re.split(r"\s{2,}", line.strip())


def test_a_sweep_ends_with_its_table(tmp_path):
    last = a_sweep(tmp_path)
    heading, *rows, where = shown(tmp_path, 160)
    assert columns(heading) == ["drafter", "gamma", *HEADINGS]
    assert [columns(row)[:2] for row in rows] == [[d, g] for d in DRAFTERS for g in ("1", "16")]
    assert columns(rows[-1]) == ["suffix", "16", *last]
    assert where == f"records: {tmp_path}"


def test_the_table_of_a_sweep_is_whole_on_80_columns(tmp_path):
    """What does not fit beside stands below, under the same names."""
    last, names = a_sweep(tmp_path), ["drafter", "gamma"]
    lines = shown(tmp_path, 80)
    assert max(map(len, lines[:-1])) <= 80 and not any("…" in line for line in lines)
    headings = [i for i, line in enumerate(lines) if columns(line)[:2] == names]
    assert [title for i in headings for title in columns(lines[i])[2:]] == list(HEADINGS)
    assert [value for i in headings for value in columns(lines[i + 4])[2:]] == list(last)
    assert all(columns(lines[i + 4])[:2] == ["suffix", "16"] for i in headings)


def test_the_table_of_a_sweep_is_whole_on_a_narrow_terminal(tmp_path):
    """A line a value."""
    last = a_sweep(tmp_path)
    lines = shown(tmp_path, 34)
    assert max(map(len, lines[:-1])) <= 34
    assert [columns(line) for line in lines[-12:-1]] == [
        ["drafter", "suffix"], ["gamma", "16"], *map(list, zip(HEADINGS, last, strict=True))
    ]  # fmt: skip


def test_a_row_of_a_sweep_is_one_line_in_a_pipe(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    last = a_sweep(tmp_path)
    sweeps.show(tmp_path, terminal.console())
    rows = [columns(line) for line in capsys.readouterr().out.splitlines()]
    assert ["drafter", "gamma", *HEADINGS] in rows and ["suffix", "16", *last] in rows


def test_a_sweep_says_which_of_its_cells_are_tied_or_impossible():
    def cell(gamma, ratio, tokens):
        faster = {"ratio_of_totals": ratio, "low": ratio - 0.1, "high": ratio + 0.1, "prompts": 6}
        side = {"rates": {"tokens_per_second": 100.0, "tokens_per_target_pass": tokens}}
        summary = {"plain": side, "speculative": side, "speedup": faster}
        return {"name": "s", "summary": summary, "config": {"policy": {"gamma": gamma}}}

    cells = [cell(1, 1.1, 2.0), cell(2, 1.4, 1.3), cell(4, 1.5, 2.0)]
    assert [str(rank) for rank in sweeps.ranks(cells)] == ["3", "1=", "1="]
    tied, impossible = sweeps.lines(cells)
    assert tied == conditions.TIED
    assert impossible.startswith("gamma 2: speed-up 1.40 is impossible with 1.30 tokens per target pass")
    for each, plain in zip(cells, (160.0, 102.0, 150.0), strict=True):
        each["summary"]["conditions"] = Conditions(20e9, plain_tokens_per_second=plain).to_dict()
    assert sweeps.lines(cells)[1].startswith("taken more than 10% apart: plain decoding 102.0 to 160.0 tok/s")
    one = cell(1, 1.1, 2.0)
    one["summary"]["speedup"] |= {"prompts": 1, "low": 1.1, "high": 1.1}  # as older records have it
    assert [r and str(r) for r in sweeps.ranks([one, *cells[:2]])] == [None, "2", "1"]


def test_synthetic_acceptance_through_the_loop(cfg, tmp_path):
    cfg = replaced(cfg, drafter=Choice("synthetic", {"rate": 0.5}), verifier=Choice("synthetic"), max_tokens=60)
    found, text, _ = play(cfg, tmp_path)
    counters = found.result.groups["all"].sides["speculative"].counters
    assert counters.alpha == pytest.approx(0.5 * counters.num_tested)
    assert abs(counters.num_accepted_tokens - counters.alpha) < 5 * np.sqrt(counters.alpha_var)
    assert found.as_promised and "synthetic acceptance: lossy, not text" in text


def test_synthetic_goes_with_itself_and_with_chains():
    made = get_drafter("synthetic", gamma=3, rate=0.25)
    assert resolve(MethodSpec(made)).verifier.rule.conditional(3) == (0.25,) * 3
    options = {"process": "geometric", "rate": None}
    assert resolve(MethodSpec(made, Choice("synthetic", options))).verifier.rule == made.acceptance
    lookup, warm = get_drafter("prompt_lookup", gamma=2), SamplingParams(temperature=1.0)
    made_up = resolve(MethodSpec(lookup, Choice("synthetic", {"rate": 0.9}), sampling=warm)).verifier
    assert made_up.rule.conditional(2) == (0.9, 0.9)
    with pytest.raises(UserError, match="choose verifier=synthetic"):
        resolve(MethodSpec(made, "greedy"))
    with pytest.raises(UserError, match=r"verifier.speed is no option of synthetic"):
        resolve(MethodSpec(lookup, Choice("synthetic", {"speed": 1})))


def test_policies_go_with_drafters_that_can_follow_them():
    def method(name, policy, **options):
        return resolve(MethodSpec(name, policy=Choice(policy, options)))

    lookup = method("prompt_lookup", "heuristic", gamma=6)
    assert lookup.policy == Heuristic(6) and lookup.max_nodes == 6
    fixed = method("prompt_lookup", "fixed", gamma=6)
    assert fixed.drafter == get_drafter("prompt_lookup", gamma=6) and fixed.policy is None
    with pytest.raises(UserError, match=r"policy=p_min looks at .*PromptLookup has none"):
        method("prompt_lookup", "p_min", p_min=0.5)
    own = method("layer_skip", "p_min", gamma=5, p_min=0.5).drafter
    assert own.style.length_policy.p_min == 0.5 and own.max_nodes == 5
