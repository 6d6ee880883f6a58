"""`python -m specsparse serve`: mistakes are said before anything is loaded; Ctrl-C ends it."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

import specsparse
from specsparse.cli import main as cli
from specsparse.testing import write_tiny_gguf

pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--host", "0.0.0.0"], "lets other machines in: give --api-key KEY"),
        (["--host", "no such host"], "--host no such host"),
        (["--port", "70000"], "70000 is too large"),
        (["--api-key", ""], "the API key must be ASCII"),
        (["--api-key", "schl\u00fcssel"], "the API key must be ASCII"),
        (["--api-key", "key\udcff"], "the API key must be ASCII"),
        (["--api-key", "key "], "the API key must be ASCII"),
        (["--batch", "0"], "--batch"),
        (["--warm-up", "0"], "--warm-up"),
        (["--drafter", "sufix"], "did you mean suffix?"),
        (["--drafter", "suffix", "--verifier", "token"], "cannot verify"),
        (["--speculative-config", '{"method": "medusa"}'], "give one of the methods"),
        (["--verifier", "match", "--drafter", "none"], "--verifier needs --drafter NAME"),
        (["--temperature", "-1"], "temperature=-1"),
        (["--port", "0"], "no-such-model.gguf"),
    ],
)
def test_a_mistake_is_one_line_before_the_model_is_loaded(capsys, argv, said):
    assert cli.main(["serve", "no-such-model.gguf", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specsparse: ") and said in error and error.count("\n") == 1


def test_a_port_that_is_taken_and_a_package_that_is_missing(capsys, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "x.gguf", "--port", port]) == 2
    assert f"port {port}: Address already in use; --port 0 takes a free one" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve", "x.gguf"]) == 2
    assert f"{sys.executable} -m pip install 'starlette>=" in capsys.readouterr().err


def test_it_serves_until_ctrl_c(tmp_path):
    file = write_tiny_gguf(tmp_path / "m.gguf", n_layers=1, context_length=256)
    expected = specsparse.generate(specsparse.load(file), "abc", max_tokens=5)
    command = [sys.executable, "-m", "specsparse", "serve", str(file), "--port", "0", "--temperature", "0"]
    command += ["--max-tokens", "5", "--speculative-config", '{"method": "suffix", "num_speculative_tokens": 3}']
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline()
            address = re.match(r"m at (http://127\.0\.0\.1:\d+/v1) \(drafter suffix\); Ctrl-C ends$", line)[1]
            body = json.dumps({"prompt": "abc"}).encode()
            asked = urllib.request.Request(f"{address}/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert json.load(answer)["choices"][0]["text"] == expected.text
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130 and process.stderr.read() == "specsparse: stopped\n"
        finally:
            process.kill()
