"""`audit`: an engine that forks where it was told to, ours on tiny models, and peers where they are installed."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import specsparse
from specsparse.cli.main import main
from specsparse.testing import write_tiny_gguf
from specsparse.tools.audit import audit_page, same_bits
from specsparse.tools.audit.same_bits import AuditPlan, AuditWindow
from specsparse.tools.peers.logits import OurRows

CUT = [AuditWindow("token 0", (3, 1, 4), (1, 5, 9, 2, 6, 5)), AuditWindow("token 9", (2, 7), (1, 8, 2, 8, 1, 8))]
REAL = [3, 1, 4, 1, 5, 9, 2, 6]
PLAN = AuditPlan("m", widths=(1, 2, 3, 4, 6), tokens=6)


class Scripted:
    """Logits that are a function of the two last tokens, but for what `change` does to those of a width."""

    version = "scripted 1"

    def __init__(self, change=lambda logits, width, call: logits):
        self.table = np.random.default_rng(0).normal(0, 1, (10, 10, 10)).astype(np.float32)
        self.change, self.calls, self.widths = change, 0, set()

    def rows(self, prompt, text, width):
        assert len(text) % width == 0  # whole batches only
        self.calls, ids = self.calls + 1, [0, *prompt, *text]
        self.widths.add(width)
        out = np.stack([self.table[a, b] for a, b in itertools.pairwise(ids)])[len(prompt) :]
        return self.change(out.copy(), width, self.calls)

    def write(self, prompt, count):
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.rows((), ids, 1)[-1].argmax()))
        return ids[len(prompt) :]

    def close(self):
        pass


def swap_first_two(logits, width, call):
    """From four rows on, the two most likely tokens of the second row change places."""
    if width >= 4:
        second, first = logits[1].argsort()[-2:]
        logits[1, [first, second]] = logits[1, [second, first]]
    return logits


def test_an_engine_that_forks_at_a_known_width():
    found = same_bits.audit(Scripted(swap_first_two), PLAN, CUT, REAL)
    assert found["verdict"] == same_bits.FORKS and found["repeatable"]
    alone, wide = found["groups"]
    assert (alone["widths"], wide["widths"]) == ((1, 2, 3), (4, 6))
    assert [(f["window"], f["position"]) for f in wide["flips"]] == [("token 0", 1), ("token 9", 1)]
    assert wide["first_flips"] == {"token 0": 1, "token 9": 1} and wide["fork_rate"]["per_1000"] == pytest.approx(
        1e3 / 6
    )
    for flip in wide["flips"]:
        assert flip["one_row"] == found["texts"][flip["window"]][2]  # the token that decoding would write otherwise


def test_one_group_is_one_group_and_real_text_is_as_it_is():
    plan = AuditPlan("m", widths=PLAN.widths, tokens=6, greedy=False)
    found = same_bits.audit(Scripted(), plan, CUT, REAL)
    assert found["verdict"] == same_bits.ONE_GROUP and len(found["groups"]) == 1
    assert found["texts"] == {window.name: list(window.following) for window in CUT}


def test_other_bits_without_another_token():
    def change(logits, width, call):
        logits[0, logits[0].argmin()] -= np.float32(width == 3)
        return logits

    found = same_bits.audit(Scripted(change), PLAN, CUT, REAL)
    assert found["verdict"] == same_bits.BITS and [g["widths"] for g in found["groups"]] == [(1, 2, 4, 6), (3,)]
    assert found["groups"][1]["largest_difference"] == pytest.approx(1.0)


def test_an_engine_that_does_not_repeat_itself():
    def change(logits, width, call):
        logits[0, 0] += np.float32(2.0**-10 * call)
        return logits

    assert same_bits.audit(Scripted(change), PLAN, CUT, REAL)["verdict"] == same_bits.UNSTEADY


def test_wrong_logits_are_not_called_a_fork():
    def from_four(logits, width, call):
        return logits if width < 4 else -3 * logits

    found = same_bits.audit(Scripted(from_four), PLAN, CUT, REAL, ours=Scripted())
    assert found["verdict"] == same_bits.WRONG and [g["wrong"] for g in found["groups"]] == [False, True]
    assert not found["check"]["one_row"]["wrong"] and found["check"]["widest"]["wrong"]
    report = made(found)
    row = dict(zip(audit_page.HEADS, audit_page.cells(report["cases"][0], [1, 2, 3, 4, 6])))
    assert row["verdict"] == "wrong logits from 4" and row["forks from"] == row["other bits from"] == "-"


def test_nothing_is_said_of_an_engine_of_another_perplexity():
    engine = Scripted(lambda logits, width, call: -3 * logits)
    found = same_bits.audit(engine, PLAN, CUT, REAL, ours=Scripted())
    assert found["verdict"] == same_bits.WRONG and found["groups"] == [] and engine.widths == {1, 6}
    assert "nothing is said of its forks" in " ".join(audit_page.lines(made(found)))


def made(found, **more):
    case = {"engine": "llama.cpp", "version": "1", "weights": "Q4_1", "file": "m.gguf", "threads": 1, "flash": True}
    plan = {"widths": PLAN.widths, "windows": 2, "tokens": 6, "greedy": True, "prompt_tokens": 3, "model": "m"}
    return {"audit": "a", "version": 1, "plan": plan, "cases": [{**case, **found, **more}], "manifest": {}}


def test_the_page_and_the_picture(tmp_path):
    report = made(same_bits.audit(Scripted(swap_first_two), PLAN, CUT, REAL))
    audit_page.write_page(report, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "1-3 | 4-6" in page and "data:image/svg+xml" in page and "http" not in page.split("<img")[0]
    figure = audit_page.figure(report)
    assert [row["state"] for row in figure.rows] == ["bits of one row"] * 3 + ["another token"] * 2
    assert figure.png().startswith(b"\x89PNG")
    assert "llama.cpp, Q4_1: one row at a time has 2 kinds" in " ".join(
        audit_page.lines({**report, "cases": [report["cases"][0], {**report["cases"][0], "one_row_bits": "x"}]})
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", quant="Q4_0", n_layers=1)


def run(capsys, *argv):
    code = main(["audit", *map(str, argv)])
    said = capsys.readouterr()
    return code, said.out, said.err


SMALL = ("--windows", 2, "--prompt-tokens", 9, "--tokens", 7)


def test_ours_is_one_group(tiny, capsys, tmp_path):
    code, out, err = run(
        capsys, "--model", tiny, "--widths", "2,3,7", "--threads", "1,2", *SMALL, "--json",
        "--html", tmp_path / "p.html", "--figure", tmp_path / "f.png",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["complete"] and found["version"] == same_bits.VERSION
    assert [case["verdict"] for case in found["cases"]] == [same_bits.ONE_GROUP] * 2
    assert {case["one_row_bits"] for case in found["cases"]} == {found["cases"][0]["one_row_bits"]}
    (group,) = found["cases"][0]["groups"]
    assert group["widths"] == [1, 2, 3, 7] and group["positions"] == 14 and "the same bits in its 2 settings" in out
    assert (tmp_path / "p.html").stat().st_size > 1000 and (tmp_path / "f.png").stat().st_size > 1000


def test_our_rows_are_the_models_logits_and_its_greedy_text(tiny):
    model = specsparse.load(tiny)
    engine, prompt = OurRows(model, 64), [5, 6, 7, 8] * 5
    text = engine.write(prompt, 6)
    assert text == list(specsparse.generate(model, prompt, max_tokens=6, temperature=0.0, ignore_eos=True).token_ids)
    wanted = model.logits(prompt + text)[len(prompt) :]
    for width in (6, 2):
        np.testing.assert_array_equal(engine.rows(prompt, text, width), wanted)
    np.testing.assert_array_equal(engine.rows((), prompt + text, 4)[len(prompt) :], wanted)


def test_a_broken_promise_of_ours_is_exit_code_one(tiny, capsys, monkeypatch):
    rows = OurRows.rows
    monkeypatch.setattr(OurRows, "rows", lambda self, p, t, width: rows(self, p, t, width) + np.float32(width == 3))
    code, out, _ = run(capsys, "--model", tiny, "--widths", "2,3", *SMALL)
    assert code == 1 and same_bits.BITS in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--engine", "vllm"), "unknown engine 'vllm': there are specsparse, llama.cpp"),
        (("--widths", "0"), "1 is the least"),
        (("--widths", "1..65"), "64 is the most"),
        (("--flash", "maybe"), "on, off or on,off"),
        (("--engine", ","), "names between commas"),
        (("--quantise", "Q9"), "choose one of"),
        (("--threads", "0"), "1 is the least"),
        (("--tokens", "1"), "1 is too small, 2 is the least"),
        (("--tokens", "250"), "the context holds 256"),
        (("--windows", "100000"), "give a longer --text"),
        (("--text", "none.txt"), "--text none.txt: cannot be read"),
        (("--json", "missing/a.json"), "there is no folder missing"),
        (("--json", "."), ".: is a folder; name a file to write"),
        (("--html", ""), "is a folder; name a file"),
        (("--figure", "a.svg"), "a.svg: figures are written as PNG"),
        (("--sides", "a"), "unknown argument --sides"),
        (("diff", "a"), "are required: B"),
        (("--width", "2"), "did you mean --widths?"),
        (("--model", "no/such.gguf"), "no such file"),
    ],
)
def test_mistakes_are_one_line(tiny, capsys, argv, says):
    model = () if "--model" in argv or "diff" in argv else ("--model", tiny)
    code, _, err = run(capsys, *model, *argv)
    assert code == 2 and says in err and err.count("\n") == 1


def test_the_report_replaces_no_file_that_is_read(tiny, capsys):
    before = Path(tiny).read_bytes()
    code, _, err = run(capsys, "--model", tiny, "--json", tiny)
    assert code == 2 and "is a file that is read; give another file to write" in err
    assert Path(tiny).read_bytes() == before


def test_a_peer_that_is_missing_says_what_to_install(tiny, capsys, peer_python):
    peer_python(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    for name, needs in (("ik_llama.cpp", "ik-llama-cpp-python"), ("transformers", "torch")):
        code, _, err = run(capsys, "--model", tiny, "--engine", name)
        assert code == 2 and f"--engine {name} needs" in err and needs in err.partition(" -m pip install ")[2]
        assert err.count("\n") == 1


def test_a_native_crash_of_a_peer_is_one_line_and_the_others_go_on(tiny, capsys, scripted_peer):
    dies = "echo 'GGML_ASSERT(S > 0) failed' >&2; echo 'a backtrace' >&2; kill -ABRT $$"
    scripted_peer({"*open*": """echo '{"seconds": 0.5}'""", "*": dies})
    code, out, err = run(
        capsys, "--model", tiny, "--engine", "llama.cpp,specsparse", "--flash", "on", "--widths", "2", *SMALL, "--json"
    )
    assert code == 0 and err == ""
    peer, ours = json.loads(out.splitlines()[-1])["cases"]
    assert peer["verdict"] == same_bits.FAILED and "signal 6: GGML_ASSERT(S > 0) failed" in peer["failed"]
    assert ours["verdict"] == same_bits.ONE_GROUP and "GGML_ASSERT(S > 0)" in out


def test_a_stopped_run_loses_no_case(tiny, capsys, monkeypatch, tmp_path):
    """The second case is interrupted: the first is in the file before, and on the screen."""
    file, audit, kept = tmp_path / "a.json", same_bits.audit, []

    def stopped(engine, *args, **options):
        if file.exists():
            kept.append(json.loads(file.read_text())["cases"])
            raise KeyboardInterrupt
        return audit(engine, *args, **options)

    monkeypatch.setattr(same_bits, "audit", stopped)
    code, out, err = run(capsys, "--model", tiny, "--threads", "2,1", "--widths", "2", *SMALL, "--json", file)
    assert code == 130 and err == "specsparse: stopped\n"
    report = json.loads(file.read_text())
    assert not report["complete"] and report["cases"] == kept[0] and report["cases"][0]["threads"] == 2
    assert "stopped: 1 cases were done, and not all that were asked" in out and same_bits.ONE_GROUP in out


@pytest.mark.parametrize("name", ["llama.cpp", "ik_llama.cpp", "transformers"])
def test_a_peer_on_the_same_file(name, tmp_path, capsys):
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf", quant="Q8_0", head_dim=16, tokenizer="spm")
    code, out, err = run(capsys, "--model", tiny, "--engine", name, "--threads", 1, "--widths", "2,3", *SMALL, "--json")
    if code == 2 and f"--engine {name} needs" in err:
        pytest.skip(f"{name} is not installed here, and SPECSPARSE_PEER_PYTHON names no interpreter that has it")
    assert code == 0, err
    for case in json.loads(out.splitlines()[-1])["cases"]:
        assert case["failed"] is None and case["repeatable"] and case["verdict"] != same_bits.WRONG
