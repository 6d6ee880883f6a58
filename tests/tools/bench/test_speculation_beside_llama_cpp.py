"""`experiments/speculation_beside_llama_cpp.py`, beside a scripted llama-server; beside the real one where it is."""

import json
import os
import shutil
import sys

import pytest

import specsparse
from experiments import speculation_beside_llama_cpp as beside
from specsparse.errors import UserError
from specsparse.testing import write_tiny_gguf
from specsparse.tools.peers.peer import TimedText

SCRIPT = """#!{python} -IS
import http.server, json, os, sys
folder, given = {folder!r}, sys.argv[1:]
if given == ["--help"]:
    print("--spec-type none,draft-mtp,ngram-simple,ngram-new   types of speculation")
    sys.exit()
option = dict(zip(given[::2], given[1::2]))
if option["-m"] == "broken":
    print("srv: loading\\nerror: no model")
    sys.exit(1)
open(os.path.join(folder, str(os.getpid())), "w").close()
class Server(http.server.BaseHTTPRequestHandler):
    def answer(self, status, reply):
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        Server.asked = getattr(Server, "asked", 0) + 1
        self.answer(200 if self.path == "/health" and Server.asked > 1 else 503, {{}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(asked["prompt"]) > int(option["-c"]):
            return self.answer(400, {{"error": "too long"}})
        n, drafts = asked["n_predict"] - 1, option.get("--spec-type")
        quick = 4 if "--spec-ngram-simple-size-n" in option else 2 if drafts == "ngram-new" else 1
        timings = {{"predicted_ms": 1e3 * n / quick, **({{"draft_n_accepted": n // 2}} if drafts else {{}})}}
        self.answer(200, {{"tokens": [7] * n + [8 if drafts == "ngram-new" else 7], "timings": timings}})
http.server.HTTPServer((option["--host"], int(option["--port"])), Server).serve_forever()
"""
OPTIONS = ["-m", "file", "-c", "9"]


@pytest.fixture
def binary(tmp_path):
    """A llama-server that writes a token a second, four in n-grams of three, two by its newest method."""
    path = tmp_path / "llama-server"
    (tmp_path / "processes").mkdir()
    path.write_text(SCRIPT.format(python=sys.executable, folder=str(tmp_path / "processes")))
    path.chmod(0o755)
    return str(path)


def steady(rate, tokens, last=1):
    return lambda ids: TimedText(tokens / rate, [1] * tokens + [last], tokens)


def test_each_text_has_a_server_of_its_own_which_ends_with_it(binary, tmp_path):
    theirs = beside.servers_of(binary, OPTIONS, 6)
    assert list(theirs) == [beside.SERVER_PLAIN, "llama-server ngram-simple", "llama-server ngram-simple, short",
                            "llama-server ngram-new"]  # fmt: skip
    ours = {beside.PLAIN: steady(3.0, 6), "ours mixed": steady(8.0, 6)}
    found = beside.measure(ours, theirs, [("chat", [5] * 9)], repeats=1)
    processes = list((tmp_path / "processes").iterdir())
    assert len(processes) == 4
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(int(process.name), 0)
    table = beside.rates(found, 6)
    assert [round(row["all"], 6) for row in table.values()] == [3, 8, 1, 1, 4, 2]
    assert beside.ratios(table) == (2.0, 2.0)
    assert beside.plain_texts(found) == {**dict.fromkeys(table, 1), "llama-server ngram-new": 0}
    assert found[0][1]["llama-server ngram-simple"][0].passes == 3


def test_a_server_that_ends_or_refuses_is_one_line(binary, tmp_path):
    with pytest.raises(UserError, match=r"--server .*error: no model"):
        beside.servers_of(binary, ["-m", "broken"], 6)[beside.SERVER_PLAIN]([5])
    with pytest.raises(UserError, match=r"--server .*400.*too long"):
        beside.servers_of(binary, OPTIONS, 6)[beside.SERVER_PLAIN]([5] * 10)
    (process,) = (tmp_path / "processes").iterdir()
    with pytest.raises(ProcessLookupError):
        os.kill(int(process.name), 0)
    with pytest.raises(UserError, match="--server"):
        beside.servers_of(shutil.which("true"), OPTIONS, 6)


def test_a_program_that_is_not_there_is_one_line(capsys):
    assert beside.main(["--server", "no-such-llama-server"]) == 2
    assert "--server no-such-llama-server" in capsys.readouterr().err


def test_a_tasks_rate_is_of_its_prompts_medians_and_texts_are_compared_with_their_own_plain_one():
    def sides(seconds, last):
        texts = [TimedText(s, [1, last], 1) for s in seconds]
        return {beside.PLAIN: [TimedText(1.0, [1, 2], 1)] * 3, "ours mixed": texts}

    found = [("a", sides([9.0, 1.0, 2.0], 2)), ("a", sides([4.0, 4.0, 4.0], 3)), ("b", sides([6.0, 6.0, 6.0], 2))]
    assert beside.rates(found, 12)["ours mixed"] == {"a": 12 * 2 / 6, "b": 2.0, "all": 12 * 3 / 12}
    assert beside.plain_texts(found) == {beside.PLAIN: 3, "ours mixed": 2}


def test_the_goal_is_over_their_speculation_and_their_best_is_said_beside():
    theirs = {beside.SERVER_PLAIN: 6.0, "llama-server ngram-mod": 3.0, "llama-server ngram-cache": 2.0}
    rows = {beside.PLAIN: 99.0, "ours prompt_lookup": 9.0, "ours mixed": 12.0, **theirs}
    assert beside.ratios({name: {"all": rate} for name, rate in rows.items()}) == (4.0, 2.0)


def test_our_sides_write_as_many_tokens_and_no_end(tmp_path):
    model = specsparse.load(write_tiny_gguf(tmp_path / "m.gguf", n_layers=1, vocab_size=300, context_length=256))
    (text,) = (write([5, 6, 7] * 6) for write in beside.ours_of(model, [], 24).values())
    assert len(text.tokens) == 25 and not set(text.tokens) & set(model.tokenizer.stop_ids)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("llama-server") is None, reason="llama-server is not on the PATH")
def test_beside_llama_server(capsys, smollm2):
    code = beside.main(["--tasks", "chat", "--limit", "1", "--tokens", "16"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == (0 if found["ratio"] >= beside.GOAL else 1)
    assert all(row["all"] > 0 for row in found["tok_s"].values())
