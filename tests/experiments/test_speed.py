"""The main job around a scripted engine: what is run, compared, shown and written."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from specsparse.data.prompts import SPEED_BENCH_CATEGORIES
from specsparse.errors import UserError
from specsparse.experiments import runner
from specsparse.experiments.settings import DataSpec, ModelSpec
from specsparse.kernels import processor
from specsparse.measure import machine, speedups
from specsparse.report import record
from specsparse.report.record import PLAIN, SPECULATIVE
from specsparse.runtime import timing_cache
from specsparse.runtime.metrics import Counters, Times
from specsparse.runtime.results import GenerationStats
from specsparse.support.registry import Choice
from tests.experiments import playing
from tests.experiments.playing import run_config


def stats(counters, decode_s=2.0):
    return GenerationStats(
        counters, load_s=0.0, compile_s=0.25, prefill_s=0.5, prefill_tokens=10, decode_s=decode_s, decode_tokens=20,
        cached_tokens=4,
    )  # fmt: skip


@dataclass
class Generation:
    token_ids: list[int]
    text: str
    stats: GenerationStats
    seed: int
    logprobs: None = None
    finish_reason: str = "length"


class Tokenizer:
    def encode(self, text, add_special=False, parse_special=False):
        return [len(text), int(add_special), int(parse_special)]

    def apply_chat_template(self, messages):
        return f"<{messages[0]['role']}>{messages[0]['content']}"


@dataclass
class Config:
    context_length: int = 512


@dataclass
class Footprint:
    file: int = 1000


@dataclass
class Model:
    path: Path
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    footprint: Footprint = field(default_factory=Footprint)
    config: Config = field(default_factory=Config)
    ffn: str = "dense"
    promise: str = "equal bits"
    storage: str | None = None
    programs: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(drafters={}))

    def holding(self, rows):
        assert rows in (1, 4)  # plain decoding, and a draft of three
        return self

    def sharing(self, tokens):
        return self


class Stream:
    def __init__(self, generation):
        self._made = generation

    def __iter__(self):
        for word in self._made.text.split(" "):
            yield word + " "
        self.generation = self._made


@dataclass
class FakeEngine:
    """Plain: 20 rounds in 2 s. Speculative: 10 rounds in 1 s, of 3 drafted tokens one stays. Remembers every call."""

    wrong: bool = False
    verifier: str = "greedy"
    split: bool = False
    context: int = 512
    calls: list = field(default_factory=list)

    def load(self, spec, *, progress, **overrides):
        progress(1, 2)
        self.calls.append(("load", spec, overrides))
        return Model(Path(spec), config=Config(self.context))

    def _make(self, call, model, prompt, *, max_tokens, sampling, seed, drafter=None, verifier=None, loop="jit"):
        assert drafter is None or (drafter.max_nodes, verifier.name) == (3, self.verifier)
        side = SPECULATIVE if drafter else PLAIN
        self.calls.append((call, side, prompt, max_tokens, sampling.temperature, seed))
        ids = list(range(21))
        if not drafter:
            counters = Counters(num_rounds=20, num_emitted_tokens=20, target_passes=21)
            return Generation(ids, "plain text", stats(counters), seed)
        times = Times(draft=0.1, verify=0.7) if self.split else Times()
        counters = Counters(10, 10, 30, 20, 10, (10, 0, 0), 20, 11, times)
        ids[3] += self.wrong
        return Generation(ids, "plain text", stats(counters, decode_s=1.0), seed)

    def generate(self, model, prompt, **options):
        return self._make("generate", model, prompt, **options)

    def stream(self, model, prompt, **options):
        return Stream(self._make("stream", model, prompt, **options))


@pytest.fixture
def cfg(tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"x" * 1000)
    return run_config(
        ModelSpec(str(model), threads=2),
        drafter="prompt_lookup",
        options={"ngram_max": 3},
        gamma=3,
        sampling={"temperature": 0.0},
        data=DataSpec(tasks=("chat", "code"), limit_per_task=2),
        repeats=3,
        composed={"seed": 0},
    )


@pytest.fixture(autouse=True)
def machine_of_the_day(monkeypatch):
    monkeypatch.setattr(machine, "read_bandwidth", lambda: 40_000.0)
    monkeypatch.setattr(timing_cache, "load", lambda model: None)


def play(cfg, tmp_path, engine):
    return playing.play(cfg, tmp_path / "out", engine=engine, width=120)[:2]


def test_sides_are_interleaved_and_the_order_alternates(cfg, tmp_path):
    engine = FakeEngine()
    play(cfg, tmp_path, engine)
    assert engine.calls[0] == ("load", cfg.model.path, {"threads": 2})
    shown = [c for c in engine.calls if c[0] == "stream"]
    assert len(shown) == 4 and {c[1] for c in shown} == {SPECULATIVE}
    timed = [c for c in engine.calls if c[0] == "generate"][2:]  # after one untimed call of each side
    even, odd = [PLAIN, SPECULATIVE, SPECULATIVE, PLAIN], [SPECULATIVE, PLAIN, PLAIN, SPECULATIVE]
    assert [c[1] for c in timed] == even * 2 + odd * 2 + even * 2
    assert all(a[2] == b[2] for a, b in zip(timed[::2], timed[1::2], strict=True))


def test_the_numbers(cfg, tmp_path):
    found, text = play(cfg, tmp_path, FakeEngine())
    everything = found.result.groups["all"]
    assert list(found.result.groups) == ["chat", "code", "all"]
    faster = everything.speedup
    assert (faster.ratio_of_totals, faster.prompts, faster.pairs) == (2.0, 4, 12)
    assert everything.sides[PLAIN].rates["tokens_per_second"] == 10.0
    assert everything.sides[SPECULATIVE].rates["mean_acceptance_length"] == 2.0
    assert everything.sides[PLAIN].bytes_per_second == 20 * 1000 / 2.0
    assert everything.sides[PLAIN].bandwidth_share == 0.25
    assert everything.sides[PLAIN].counters.times.prefill == 12 * 0.5
    assert found.result.identity.differing == 0 and found.result.identity.tokens == 21 * (12 * 2 - 4 + 4 + 2)
    assert found.result.identity.passes == 12 * 2 - 4 + 4 + 2  # untimed ones and repeats, less what they stand beside
    assert found.as_promised and found.objective == 20.0
    assert found.result.compile_s == 0.25 * (24 + 4 + 2)
    for part in ("plain text", "speed-up", "2.00", "100 %", "all 546 tokens", "prompt eval time", "ms per token"):
        assert part in text
    assert "/     72 tokens" in text  # of prompts, that were read: 6 of 10 in each pass
    assert "time in draft, verify, sample and commit: not measured" in text
    said = " ".join(text.split())
    assert "over 26 passes, untimed ones and repeats included, each beside its prompt's first plain one" in said
    assert "emitted tokens / all rounds; mean acceptance length: 1 + accepted tokens / rounds that drafted" in said


def test_the_time_split_is_shown_where_it_was_measured(cfg, tmp_path):
    _, text = play(cfg, tmp_path, FakeEngine(split=True))
    for stage, share in (("draft", "10%"), ("verify", "70%")):
        (line,) = [line for line in text.splitlines() if f"time in {stage}" in line]
        assert line.split() == ["time", "in", stage, share, share, share]
    assert "not measured" not in text


def test_the_record_is_whole(cfg, tmp_path):
    play(cfg, tmp_path, FakeEngine(split=True))
    written = json.loads((tmp_path / "out" / "record.json").read_text())
    manifest = written["manifest"]
    assert {"date", "git", "packages", "cpu", "kernels", "model", "config", "python"} <= set(manifest)
    assert manifest["model"]["bytes"] == 1000 and len(manifest["model"]["sha256"]) == 64
    assert written["config"] == {"seed": 0}
    assert set(written["tasks"]) == {"chat", "code"}
    shares = written["summary"][SPECULATIVE]["rates"]
    assert shares["share_draft"] == pytest.approx(0.1) and shares["share_rest"] == pytest.approx(0.2)
    assert set(shares) <= set(written["definitions"])
    rows = [json.loads(line) for line in (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 24
    assert rows[0]["prompt_id"] == "chat-1" and rows[0]["tokens"] == 21


@dataclass
class Alpha(FakeEngine):
    """Its verifier expected another number of tokens to stay: 20 tested, 10 accepted in a pass."""

    alpha: float = 0.5

    def _make(self, *given, **options):
        made = super()._make(*given, **options)
        if options.get("drafter"):
            sums = {"alpha": 20 * self.alpha, "alpha_var": 20 * self.alpha * (1 - self.alpha), "num_alpha_tested": 20}
            made.stats = replace(made.stats, counters=replace(made.stats.counters, **sums))
        return made


@pytest.mark.parametrize(("alpha", "z"), [(0.9, -11.9), (0.65, -2.8), (0.004, None)])
def test_a_run_is_not_fooled_by_draws_that_are_not_from_q(cfg, tmp_path, alpha, z):
    """Four prompts; three repeats that draw the same prove nothing more. Alphas that are very small prove nothing."""
    found, text = play(cfg, tmp_path, Alpha(alpha=alpha))
    summary = written(tmp_path)
    assert summary[SPECULATIVE]["draws_z"] == (None if z is None else pytest.approx(z, abs=0.05))
    assert abs(summary[SPECULATIVE]["rates"]["alpha_z"]) > 4  # over the repeats
    warned = [line for line in summary["warnings"] if line.startswith(f"speculative: alpha_z is {z}, beyond 4")]
    assert len(warned) == (z is not None and abs(z) > 4)
    assert list(found.result.warnings) == summary["warnings"]
    assert ("beyond 4: tokens are accepted less often than the recorded" in " ".join(text.split())) == bool(warned)


def test_shared_noise_is_that_of_the_passes_of_one_prompt(cfg, tmp_path):
    """All passes of a prompt have the seed of its id, which a part of the prompts keeps; `common_noise` has one."""

    def seeds(**changes):
        engine = FakeEngine()
        play(playing.replaced(cfg, **changes), tmp_path, engine)
        rows = [json.loads(line) for line in (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()]
        found = {row["prompt_id"]: row["seed"] for row in rows}
        assert all(row["seed"] == found[row["prompt_id"]] for row in rows)
        assert {c[-1] for c in engine.calls if c[0] != "load"} == set(found.values())
        return found

    whole = seeds()
    assert len(whole) == len(set(whole.values())) == 4
    assert seeds(data=DataSpec(tasks=("code",), limit_per_task=1)) == {"code-1": whole["code-1"]}
    assert seeds(seed=5, sampling={"temperature": 0.0, "seed": 0}) == whole != seeds(seed=5)
    assert set(seeds(seed=5, common_noise=True).values()) == {5}


def test_the_eleven_categories_of_speed_bench_from_ones_own_files_are_a_row_each(cfg, tmp_path):
    for i, category in enumerate(SPEED_BENCH_CATEGORIES):
        row = {"question_id": f"q{i}", "category": category, "turns": ["abc " * (i + 1)]}
        (tmp_path / f"{category}.jsonl").write_text(json.dumps(row))
    cfg = replace(cfg, data=DataSpec("speed_bench", path=str(tmp_path), tasks=None, limit_per_task=None), repeats=1)
    found, text = play(cfg, tmp_path, FakeEngine())
    assert list(found.result.groups) == [*SPEED_BENCH_CATEGORIES, "all"]
    shown = {cells[0]: cells[1:] for line in text.splitlines() if (cells := line.split())}
    for category in SPEED_BENCH_CATEGORIES:
        assert shown[category] == ["10.0", "20.0", "2.00", "2.00", "2.00", "100", "%"], category


def test_a_broken_promise_is_said_and_fails_the_run(cfg, tmp_path):
    found, text = play(cfg, tmp_path, FakeEngine(wrong=True))
    assert not found.as_promised
    assert found.result.identity.differing == 12 + 4 + 1
    assert "NOT the same text" in text and "chat-1" in text


def test_a_verifier_that_keeps_the_distribution_only_may_differ(cfg, tmp_path):
    cfg = replace(cfg, verifier=Choice("delta"), sampling={"temperature": 1.0})
    found, text = play(cfg, tmp_path, FakeEngine(wrong=True, verifier="delta"))
    assert found.as_promised and found.result.method["label"] == "lossless in distribution"
    assert "keeps the distribution only" in text


def test_plain_decoding_alone(cfg, tmp_path):
    engine = FakeEngine()
    found, text = play(replace(cfg, drafter=Choice("none"), repeats=1), tmp_path, engine)
    assert {c[1] for c in engine.calls if c[0] in ("generate", "stream")} == {PLAIN}
    assert found.result.identity is None and found.result.groups["all"].speedup is None and found.as_promised
    assert found.objective == 10.0
    assert "plain decoding" in text and "speed-up" not in text


def test_without_warm_up_or_text(cfg, tmp_path):
    engine = FakeEngine()
    found, text = play(replace(cfg, warmup=False, stream=False), tmp_path, engine)
    assert not [c for c in engine.calls if c[0] == "stream"]
    assert found.result.first_text_s is None and "plain text" not in text


def test_prompts_go_through_the_chat_template_or_not(cfg, tmp_path):
    chat, raw = FakeEngine(), FakeEngine()
    play(cfg, tmp_path, chat)
    play(replace(cfg, data=replace(cfg.data, chat=False)), tmp_path, raw)
    assert next(c for c in chat.calls if c[0] == "stream")[2][1:] == [0, 1]
    assert next(c for c in raw.calls if c[0] == "stream")[2][1:] == [1, 0]


def test_a_prompt_beyond_the_context_is_told_before_any_is_decoded(cfg, tmp_path):
    engine = FakeEngine(context=2)
    with pytest.raises(UserError, match=r"prompt .* has 3 tokens, more than the 2 .*, as 4 of 4 are: choose"):
        play(cfg, tmp_path, engine)
    assert [call[0] for call in engine.calls] == ["load"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ModelSpec("none.gguf")}, "none.gguf: no such file"),
        ({"drafter": Choice("promt_lookup")}, "drafter=promt_lookup is unknown"),
        ({"drafter": Choice("prompt_lookup", {"ngram_mx": 2})}, "did you mean ngram_max"),
        ({"verifier": Choice("gready")}, "verifier=gready"),
        ({"verifier": Choice("token")}, "verifier=token cannot verify one_hot"),
        ({"sampling": {"temperature": 0.5}}, "greedy cannot verify"),
        ({"tracker": Choice("csv")}, "tracker=csv is unknown"),
        ({"data": DataSpec(source="none.txt")}, "none.txt"),
    ],
)
def test_a_mistake_is_found_before_the_model_is_loaded(cfg, tmp_path, change, message):
    engine = FakeEngine()
    with pytest.raises(UserError, match=message):
        play(replace(cfg, **change), tmp_path, engine)
    assert not [c for c in engine.calls if c[0] == "load"]
    assert not (tmp_path / "out").exists()


def test_different_lengths_are_scaled_to_the_plain_count():
    def one(side, tokens, seconds):
        counters = Counters(num_rounds=tokens, num_emitted_tokens=tokens)
        return record.Pass("a", "t", side, 0, tuple(range(tokens)), "", "stop", counters, 0.1, 5, seconds, 0.0)

    found = record.speedup_of([one(PLAIN, 10, 1.0), one(SPECULATIVE, 5, 0.25)])
    assert found.ratio_of_totals == 2.0
    identity = record.identity_of([one(PLAIN, 10, 1.0), one(SPECULATIVE, 5, 0.25)], verifier="greedy")
    assert (identity.differing, identity.tokens) == (5, 10)


def test_bandwidth_is_measured(monkeypatch):
    monkeypatch.undo()
    assert machine.read_bandwidth(mebibytes=8, passes=2) > 1e8
    info = processor.cpu_info()
    assert info["cores"] >= 1 and isinstance(info["flags"], list)


def test_sha256_is_remembered_until_the_file_changes(tmp_path, monkeypatch):
    from specsparse.measure import manifest

    monkeypatch.setenv("SPECSPARSE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "a.gguf"
    file.write_bytes(b"abc")
    first = manifest.sha256_of(file)
    assert first == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    monkeypatch.setattr(manifest.hashlib, "sha256", None)
    assert manifest.sha256_of(file) == first
    monkeypatch.undo()
    monkeypatch.setenv("SPECSPARSE_CACHE", str(tmp_path / "cache"))
    file.write_bytes(b"abcd")
    assert manifest.sha256_of(file) != first
    (Path(tmp_path) / "cache" / "sha256.json").write_text("{broken")
    assert len(manifest.sha256_of(file)) == 64


def test_a_later_turn_comes_after_the_model_s_own_answer(cfg, tmp_path):
    """The answer is decoded plainly, once, and every method reads it."""
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"question_id": 1, "category": "chat", "turns": ["one", "two"]}))
    both = replace(cfg, data=DataSpec(source=str(file), turns="both"), warmup=False, repeats=1)
    engine = FakeEngine()
    said = []
    model = Model(tmp_path / "model.gguf")
    model.tokenizer.apply_chat_template = lambda messages: said.append([m["content"] for m in messages]) or "text"
    engine.load = lambda spec, progress, **_: model
    play(both, tmp_path, engine)
    assert said == [["one"], ["one"], ["one", "plain text", "two"]]
    with pytest.raises(UserError, match=r"data\.chat=true"):
        runner.check(replace(both, data=replace(both.data, chat=False)))


@dataclass
class Clocked(FakeEngine):
    """Speculative decoding takes these seconds, call by call; then one second as before."""

    took: list = field(default_factory=list)

    def generate(self, model, prompt, **options):
        made = super().generate(model, prompt, **options)
        if options.get("drafter") and self.took:
            made.stats = replace(made.stats, decode_s=self.took.pop(0))
        return made


def written(tmp_path):
    return json.loads((tmp_path / "out" / "record.json").read_text())["summary"]


def test_every_run_says_what_it_was_taken_at(cfg, tmp_path, monkeypatch):
    read = iter([20e9, 30e9, 40e9, 34e9])  # before each of three repeats, and after the last
    monkeypatch.setattr(machine, "read_bandwidth", lambda: next(read))
    found, text = play(cfg, tmp_path, FakeEngine())
    summary = written(tmp_path)
    assert summary["conditions"]["read_bandwidth"] == summary["read_bandwidth"] == 32e9
    assert summary["conditions"]["plain_tokens_per_second"] == 10.0 and summary["conditions"]["plain_deviation"] == 0
    assert summary["repeats"] == {"asked": 3, "done": 3, "stopped": "given", "half_width": None}
    assert "taken at: read bandwidth 32.0 GB/s, plain decoding 10.0 tok/s" in text
    assert found.result.groups["all"].sides[PLAIN].bandwidth_share == 20 * 1000 / 2.0 / 32e9
    assert "read bandwidth varied by 27% between repeats: the machine was busy" in text


def test_a_machine_that_changed_between_the_sides_is_named(cfg, tmp_path):
    """Twenty tokens in ten passes are two a pass, so that four times as fast is not the method's doing."""
    one_task = replace(cfg, data=DataSpec(tasks=("chat",), limit_per_task=2), repeats=1)
    found, text = play(one_task, tmp_path, Clocked(took=[0.5] * 3))
    assert found.result.groups["all"].speedup.ratio_of_totals == 4.0
    assert text.count("speed-up 4.00 is impossible with 2.00 tokens per target pass") == 1
    found, text = play(cfg, tmp_path, Clocked(took=[1.0, 0.5, 0.5]))
    assert [line[:21] for line in found.result.warnings] == ["chat: speed-up 2.40 i", "speed-up 2.18 is impo"]


@pytest.mark.parametrize(
    ("took", "prompts", "done", "stopped"),
    [
        ([1.0] * 40, 1, 6, "narrow"),
        ([1.0, *[1.0, 2.0, 1.2] * 20], 3, 6, "prompts"),  # each prompt gains the same every time
        ([1.0, 1.3] * 20, 1, 7, "limit"),
    ],
)
def test_auto_repeats_until_the_speedup_is_known(cfg, tmp_path, monkeypatch, took, prompts, done, stopped):
    monkeypatch.setattr(speedups, "LIMIT", 7)
    cfg = replace(cfg, repeats="auto", data=DataSpec(tasks=("chat",), limit_per_task=prompts))
    _, text = play(cfg, tmp_path, Clocked(took=took))
    summary = written(tmp_path)["repeats"]
    assert (summary["done"], summary["stopped"]) == (done, stopped)
    assert f"repeats=auto stopped after {done}: " in text
    rows = [json.loads(line) for line in (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * prompts * done and max(row["repeat"] for row in rows) == done - 1


def test_auto_repeats_plain_decoding_alone_until_its_time_is_known(cfg, tmp_path):
    play(replace(cfg, drafter=Choice("none"), repeats="auto"), tmp_path, FakeEngine())
    assert written(tmp_path)["repeats"]["done"] == 6
