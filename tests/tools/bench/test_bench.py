"""The benchmark, end to end on a tiny model: what it prints is checked, never how fast it was."""

import dataclasses
import importlib.util
import json
import math
import os
import sys

import pytest

from specsparse.cli.main import main
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.kernels import processor
from specsparse.measure import trials
from specsparse.measure.trials import Ours, TrialPlan, paired_ratio, timings
from specsparse.runtime.load import load
from specsparse.testing import write_tiny_gguf
from specsparse.tools import bench as command
from specsparse.tools import peers
from specsparse.tools.bench import one_sequence
from specsparse.tools.peers import peer as timed
from specsparse.tools.peers.logits import Check

HAS_LLAMA_CPP = peers.PYTHON_VARIABLE in os.environ or importlib.util.find_spec("llama_cpp") is not None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("bench") / "tiny.gguf", quant="Q8_0")


def bench(capsys, *args):
    """Exit code, standard output and standard error of one call."""
    code = main(["bench", *map(str, args)])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_end_to_end(tiny, tmp_path, capsys):
    saved = tmp_path / "report.json"
    code, out, err = bench(
        capsys, tiny, "--pp", 40, "--tg", 4, "--widths", "2,3", "--depth", 5, "--repeats", 1, "--json", saved
    )
    assert (code, err) == (0, "")
    assert f"report: {saved}" in out and "{" not in out  # the report is in the file alone
    found = json.loads(saved.read_text())
    rows = {r["test"]: r for r in found["results"]}
    assert list(rows) == ["pp40", "tg4", "v1", "v2", "v3"]
    for row in rows.values():
        assert row["engine"] == "specsparse"
        assert len(row["seconds"]) == 1
        rate = row["tokens_per_second"]
        assert rate["median"] == pytest.approx(row["tokens"] / row["seconds"][0])
        assert rate["sd"] == 0.0
        assert row["share_of_read_bandwidth"] > 0
    assert found["v"]["specsparse"]["1"]["median"] == 1.0
    assert set(found["v"]["specsparse"]) == {"1", "2", "3"}
    assert list(found["attention"]) == ["1", "2", "3"] and "of f32" in out
    alone = {int(n): row["bytes_per_second"] * row["seconds"][0] for n, row in found["attention"].items()}
    moved = [read / (5 + n) for n, read in alone.items()]
    assert moved == pytest.approx(moved[:1] * 3)  # a position's keys and values, read once for all rows
    assert found["peers"] == [] and found["ratios"] == {}
    assert found["machine"]["read_bytes_per_second"]["median"] > 1e8
    assert {c["program"] for c in found["compiled"]} >= {"decode loop", "verify of 2 rows"}
    memory_bytes = found["peak_memory_bytes"]
    # Each is the peak of its own stage; in a process that ran other tests, memory may be given back between.
    assert memory_bytes["load_and_warm_up"] > 0 and memory_bytes["load"] > 0
    assert "tg4 @ d5" in out
    assert "v(n)" in out


def test_newcomer_gives_a_model_and_gets_no_report_unless_it_is_asked_for(tiny, capsys):
    args = (tiny, "--pp", 0, "--tg", 2, "--widths", "none", "--repeats", 1)
    code, out, _ = bench(capsys, *args)
    assert code == 0 and "tg2" in out and "{" not in out
    code, out, _ = bench(capsys, *args, "--json")
    *tables, last = out.splitlines()
    assert code == 0 and json.loads(last)["results"] and not any("{" in line for line in tables)


def test_speed_is_the_sub_command_if_none_is_named():
    for given in ("m.gguf --widths 1,4", "--tg 4 m.gguf", "--model m.gguf -n 8 -p 4", ""):
        assert command.rewritten(given.split()) == ["speed", *given.split()]
    for given in ("speed m.gguf", "batch 1,2", "--help"):
        assert command.rewritten(given.split()) == given.split()


def test_verify_in_a_program_of_more_rows(tiny, capsys):
    args = ("--pp", 0, "--tg", 0, "--widths", "1..3", "--rows", 4, "--repeats", 2, "--json")
    code, out, _ = bench(capsys, tiny, *args)
    found = json.loads(out.splitlines()[-1])
    assert code == 0
    assert [c["program"] for c in found["compiled"]] == ["verify of 4 rows"]
    assert [len(r["seconds"]) for r in found["results"]] == [2, 2, 2]


def test_another_type_of_the_same_model(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SPECSPARSE_CACHE", str(tmp_path))
    args = (tiny, "--pp", 0, "--tg", 2, "--widths", "none", "--repeats", 1, "--quantise", "q4_0", "--json")
    code, out, _ = bench(capsys, *args)
    found = json.loads(out.splitlines()[-1])
    assert code == 0
    assert found["model"]["main_type"] == "Q4_0"
    (made,) = (tmp_path / "requantised").iterdir()
    assert any(str(made) in note for note in found["notes"])
    stamp = made.stat().st_mtime_ns
    assert bench(capsys, *args)[0] == 0
    assert made.stat().st_mtime_ns == stamp  # made once


@pytest.mark.parametrize(
    "args, says",
    [
        (("--widths", "1..99"), "64 is the most"),
        (("--widths", "4..2"), "the smaller first"),
        (("--widths", "x"), "not a whole number"),
        (("--pp", "-1"), "not a whole number"),
        (("--repeats", "0"), "1 is the least"),
        (("--widths", "0"), "0 is too small, 1 is the least; none leaves v(n) out"),
        (("--widths", "2,0"), "0 is too small"),
        (("--json", "missing/report.json"), "there is no folder missing to write it in"),
        (("--json", "."), ".: is a folder"),
        (("--publish", "."), ".: is a folder"),
        (("--publish", "mine.json", "--widths", "1"), "--widths must go beyond 1"),
        (("--publish", "mine.json", "--widths", "none"), "--widths must go beyond 1"),
        (("--pp", "0", "--tg", "0", "--widths", "none"), "nothing to measure"),
        (("--widths", "8", "--rows", "4"), "--rows 4 is less"),
        (("--peer", "vllm"), "llama.cpp, ik_llama.cpp, transformers"),
        (("--quantise", "Q9"), "choose one of"),
        (("--kernels", "fast"), "do not exist"),
        (("--kv-dtype", "f64"), "kv_dtype"),
        (("--threads", "10000"), "1 to 1024"),
        (("--depth", "4000"), "the context holds 256"),
        (("no/such.gguf",), "no such file"),
        (("--repeat", "2"), "--repeats"),
    ],
)
def test_mistakes_are_one_line(tiny, capsys, args, says):
    code, _, err = bench(capsys, *(() if "no/such.gguf" in args else (tiny,)), *args)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("data", [None, b"GGUF", b"what"])
def test_a_file_that_is_no_model_is_refused_before_the_machine_is_waited_for(capsys, monkeypatch, tmp_path, data):
    monkeypatch.setattr("specsparse.measure.machine.timing_lock", pytest.fail)
    if data is not None:
        (tmp_path / "a.gguf").write_bytes(data)
    code, _, err = bench(capsys, tmp_path / "a.gguf")
    assert code == 2 and "a.gguf: " in err and err.count("\n") == 1


def test_entries_replace_no_file_of_another_kind(tiny, tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text('{"a": 1}')
    code, _, err = bench(capsys, tiny, "--publish", other)
    assert code == 2 and err.count("\n") == 1
    assert "--publish replaces files of entries alone; " in err and "is no file of v(n)" in err
    assert other.read_text() == '{"a": 1}'


def test_a_peer_that_is_not_installed(tiny, capsys, monkeypatch, tmp_path):
    python = tmp_path / "python"  # without site packages, so that no peer is found
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv(peers.PYTHON_VARIABLE, str(python))
    for name, needs in (("llama.cpp", "llama-cpp-python"), ("transformers", "torch")):
        code, _, err = bench(capsys, tiny, "--peer", name)
        assert code == 2
        assert needs in err
        assert f"{python} -m pip install" in err
        assert len(err.strip().splitlines()) == 1


def test_a_peer_that_dies(tiny, capsys, monkeypatch, peer_python, tmp_path):
    peer_python("#!/bin/sh\necho what went wrong >&2\nexit 3\n")
    code, _, err = bench(capsys, tiny, "--peer", "llama.cpp")
    assert code == 2
    assert "what went wrong" in err
    monkeypatch.setenv(peers.PYTHON_VARIABLE, str(tmp_path / "none"))
    assert "cannot be started" in bench(capsys, tiny, "--peer", "llama.cpp")[2]


def test_ratios_against_a_peer(tiny, capsys, scripted_peer):
    scripted_peer(
        {
            "*rows*": """echo '{"error": "it writes no logits"}'""",
            "*attend*true*": """decoding=0.9; echo '{"seconds": 0}'""",
            "*attend*false*": """decoding=0.5; echo '{"seconds": 0}'""",
            "*decode*": """echo "{\\"seconds\\": $decoding}\"""",
            "*": """echo '{"seconds": 0.5}'""",
        },
        before="decoding=0.9",
    )
    args = ("--pp", 8, "--tg", 2, "--widths", "2", "--repeats", 2, "--json")
    code, out, _ = bench(capsys, tiny, "--peer", "llama.cpp,transformers", *args)
    found = json.loads(out.splitlines()[-1])
    assert code == 0
    with_choice, without = found["peers"]
    assert with_choice["version"] == without["version"] == "scripted 1"
    # Without flash attention it decodes faster and does nothing else faster.
    assert with_choice["flash"] == {"prompt": True, "decode": False, "verify": True} and without["flash"] == {}
    assert "flash attention, the faster of on and off: on for prompts, off for decoding, on for v(n)" in out
    assert [peer["check"] for peer in found["peers"]] == [None, None]
    assert sum("its perplexity was not compared with ours" in note for note in found["notes"]) == 2
    assert list(found["ratios"]) == ["llama.cpp", "transformers"] and "over transformers" in out
    assert set(found["ratios"]["llama.cpp"]) == {"pp8", "tg2", "v1", "v2"}
    rows = {(r["test"], r["engine"]): r for r in found["results"]}
    ours, theirs = rows["tg2", "specsparse"]["seconds"], rows["tg2", "llama.cpp"]["seconds"]
    assert theirs == [0.5, 0.5]
    assert found["ratios"]["llama.cpp"]["tg2"]["median"] == pytest.approx((0.5 / ours[0] + 0.5 / ours[1]) / 2)
    assert rows["tg2", "transformers"]["seconds"] == [0.9, 0.9]
    assert found["v"]["llama.cpp"]["2"]["median"] == 1.0


def test_a_peer_with_other_logits_is_named():
    facts = {"name": "other", "unchecked": None, "check": {"one_row": {}, "widest": {}}}
    for how, nll in (("one_row", 3.0), ("widest", 4.4)):
        facts["check"][how] = Check(tokens=10, nll=10 * nll, ours_nll=30.0, rows=10, kl=0.01).to_dict()
    (line,) = timed.wrong_logits(facts)
    assert "other computes other logits than this model's in wide batches: perplexity 81.45, ours 20.09" in line


@pytest.mark.skipif(not HAS_LLAMA_CPP, reason="no llama-cpp-python here, and SPECSPARSE_PEER_PYTHON is not set")
def test_llama_cpp_on_the_same_file(tmp_path, capsys):
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf", quant="Q8_0", head_dim=16)
    args = ("--pp", 16, "--tg", 4, "--widths", "1,2", "--depth", 3, "--repeats", 1, "--json")
    code, out, err = bench(capsys, tiny, "--peer", "llama.cpp", *args)
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert all(r["median"] > 0 for r in found["ratios"]["llama.cpp"].values())
    assert set(found["peers"][0]["flash"]) == {"prompt", "decode", "verify"}
    assert not any(part["wrong"] for part in found["peers"][0]["check"].values())


def test_every_timing_does_the_same_work(tiny):
    """Tests may repeat in any order: each starts from the same cache and computes the same tokens."""
    side = Ours(load(tiny), depth=3, room=32)
    plan = TrialPlan(pp=16, tg=5, ns=(1, 4))
    for _ in range(2):
        for test in reversed(plan.tests()):
            assert test.run(side) > 0
    session = side._loops[5].session
    first = session.tokens()[0].copy()
    side.prompt(16), side.decode(5)
    assert len(first) == 5
    assert (session.tokens()[0] == first).all()
    assert int(side._cache.length[0]) == 3 + 16


def test_sides_take_turns():
    class Counting:
        def __init__(self, name, calls):
            self.name, self.calls = name, calls

        def _call(self, n):
            self.calls.append((self.name, n))
            return 1.0

        prompt = decode = verify = _call

    calls = []
    results = trials.run(TrialPlan(pp=7, tg=5, ns=(1, 2), repeats=2), [Counting("a", calls), Counting("b", calls)])
    assert calls[:4] == [("a", 7), ("b", 7), ("a", 5), ("b", 5)]
    assert calls[8:12] == [("a", 2), ("b", 2), ("a", 1), ("b", 1)]  # the second repeat runs backwards
    assert results.seconds["tg5"]["b"] == [1.0, 1.0]


def test_timings():
    found = timings((0.5, 0.25, 1.0), tokens=2)
    assert found["tokens_per_second"] | {"sd": 0} == {"mean": 14 / 3, "sd": 0, "median": 4.0, "min": 2.0, "max": 8.0}
    assert found["ms_per_token"] == 250.0
    assert paired_ratio([2.0, 9.0], [1.0, 3.0])["median"] == 2.5


def test_work_counts_what_a_step_reads_and_multiplies(tiny):
    model = load(tiny)
    c = model.config
    one = one_sequence.work_of(model, "decode", 1, depth=0)
    layer = sum(math.prod(c.projection_shape(p)) for p in c.projections)
    matrices = layer * c.n_layers + c.vocab_size * c.d_model
    assert one.macs == matrices + 2 * c.n_layers * c.n_heads * c.head_dim
    token_kv = 2 * c.n_layers * c.n_kv_heads * c.head_dim * 2
    assert one.file_bytes == model.footprint.file + token_kv
    ten = one_sequence.work_of(model, "decode", 10, depth=100, forwards=10)
    assert ten.file_bytes == 10 * model.footprint.file + token_kv * sum(range(101, 111))
    windowed = dataclasses.replace(model, config=dataclasses.replace(c, window=40))
    ten = one_sequence.work_of(windowed, "decode", 10, depth=36, forwards=10)
    assert ten.file_bytes == 10 * model.footprint.file + token_kv * (37 + 38 + 39 + 7 * 40)


def test_a_slow_peer_is_named(tiny):
    shape = {"n_layers": 30, "d_model": 576, "vocab_size": 49152}
    config = ModelConfig.from_gguf(open_gguf(tiny))
    real = type("Shape", (), shape)()
    assert timed.below_expectation(config, "Q4_1", 1.0, ["avx512f"], 2) is None  # another model
    assert timed.below_expectation(real, "Q4_1", 125.0, ["avx512f"], 2) is None
    assert timed.below_expectation(real, "Q6_K", 1.0, ["avx512f"], 2) is None
    assert timed.below_expectation(real, "Q4_1", 29.0, ["avx512f"], 2, depth=4096) is None  # slower for its context
    assert "busy machine" in timed.below_expectation(real, "Q4_1", 100.0, ["avx512f"], 2)
    assert "lacks" in timed.below_expectation(real, "Q4_1", 100.0, ["avx2"], 2)


def test_peaks_are_positive_with_and_without_the_library(monkeypatch):
    buffer = processor.ReadBuffer(8)
    assert buffer.rate(1) > 0
    assert processor.f32_rate(0.001) > 0
    if processor.int8_rate(0.001) is not None:
        assert processor.int8_rate(0.001) > 0
    monkeypatch.setattr(processor.cpu, "library", lambda: None)
    assert buffer.rate(1) > 0
    assert processor.f32_rate() > 0
    assert processor.int8_rate() is None


def test_peak_memory_is_at_least_what_is_there():
    one_sequence.reset_peak_memory()
    assert one_sequence.peak_memory() > 2**20
