"""Processes that hold one model together, by the commands: they meet, write one process's tokens, and end together."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

import specsparse
from specsparse import run
from specsparse.cli import main as cli
from specsparse.engine import hosts
from specsparse.engine.hosts import Meeting
from specsparse.errors import UserError
from specsparse.testing import write_tiny_gguf
from tests.engine.mesh.test_sharded import EVEN

PROMPT = "abc abc"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", quant="F32", context_length=512, **EVEN)


@contextlib.contextmanager
def two(*command, option, cwd=None):
    """Two processes of a command, of two CPU devices each; process 0 alone has a prompt to read."""
    env = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), *sys.path])),
        "SPECSPARSE_THREADS": "1", "JAX_NUM_CPU_DEVICES": "2",
    }  # fmt: skip
    place = f"{option}127.0.0.1:{free_port()},2,"
    both = [
        subprocess.Popen(
            [sys.executable, "-m", *map(str, command), f"{place}{index}"], env=env, cwd=cwd, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="replace",
        )
        for index in range(2)
    ]  # fmt: skip
    both[0].stdin.write(PROMPT)
    for process in both:
        process.stdin.close()
        process.stdin = None
    try:
        yield both
    finally:
        for process in both:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


def test_generate_writes_one_process_s_text_and_ends_with_the_other_process(file):
    wanted = specsparse.generate(specsparse.load(file), PROMPT, max_tokens=400, ignore_eos=True).text
    command = ("specsparse", "generate", "-m", file, "-n", 400, "--ignore-eos")
    with two(*command, option="--distributed=") as (first, second):
        assert first.stdout.read(8) == wanted[:8]
        second.send_signal(signal.SIGKILL)
        text, error = first.communicate(timeout=60)
        assert wanted[8:].startswith(text.rstrip("\n\ufffd")) and len(text) < len(wanted)
        assert first.returncode == 2 and error.splitlines()[1:] == [
            "specsparse: process 1 of 2 ended before the others"
        ]
        assert second.communicate() == ("", "")


@pytest.mark.slow
def test_a_run_has_one_record_with_the_tokens_of_one_process(file, tmp_path):
    command = ["specsparse.run", f"model={file}", "max_tokens=6", "data.chat=false", "data.tasks=[chat]"]
    command += ["data.limit_per_task=1", "sampling.ignore_eos=true", "drafter=prompt_lookup"]
    with two(*command, option="model.distributed=", cwd=tmp_path) as both:
        (out, error), (silent, second) = [process.communicate(timeout=150) for process in both]
    assert [process.returncode for process in both] == [0, 0], error + second
    assert silent == second == "" and "same text: all" in out
    [record] = tmp_path.rglob("record.json")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert json.loads(record.read_text())["config"]["model"]["distributed"].endswith(",2,0")


@pytest.mark.slow
def test_the_server_answers_as_one_process_does_and_ends_with_ctrl_c(file):
    pytest.importorskip("uvicorn")
    pytest.importorskip("prometheus_client")
    model = specsparse.load(file)
    asked = {"max_tokens": 6, "ignore_eos": True}
    command = ("specsparse", "serve", file, "--port", 0, "--batch", 2)
    with two(*command, option="--distributed=") as (first, second):
        first.stderr.readline()
        address = re.match(r"m at (http\S+) ", first.stderr.readline())[1]
        for how in ({"temperature": 0}, {"temperature": 0.9, "seed": 3, "logit_bias": {"7": -100}}):
            body = json.dumps({"prompt": PROMPT, **asked, **how}).encode()
            request = urllib.request.Request(f"{address}/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=100) as answer:
                text = json.load(answer)["choices"][0]["text"]
            assert text == specsparse.generate(model, PROMPT, **asked, **{**how, "drafter": "prompt_lookup"}).text
        first.send_signal(signal.SIGINT)
        assert first.wait(30) == 130 and second.wait(30) == 2
        assert second.stderr.read() == "specsparse: process 0 of 2 was stopped\n"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("10.0.0.1:1234,2,1", Meeting("10.0.0.1", 1234, 2, 1)),
        ("[::1]:80,1,0", Meeting("::1", 80, 1, 0)),
        ("auto", None),
        *[(text, UserError) for text in ("", "a:1", "a:1,2", "a:1,2,2", "a:1,0,0", "a:0,2,0", "a:65536,2,0", "a:x,2,0",
                                         ":1,2,0", "::1:80,2,0", "a:1,2,-1", "a:1,2,0,0", "a b:1,2,0")],
    ],
)  # fmt: skip
def test_places(text, place):
    if place is UserError:
        with pytest.raises(UserError, match="distributed="):
            hosts.place_of(text)
    else:
        assert hosts.place_of(text) == place
        assert place is None or place.at == text.partition(",")[0]


@pytest.mark.parametrize(
    ("said", "index", "words"),
    [
        ("process 1 of 3", 0, "did not come within 1 s"),
        ("process 0", 1, "did not answer within 1 s"),
        ("distributed=", 7, "HOST:PORT,COUNT,INDEX"),
    ],
)
def test_who_does_not_come_is_named_in_one_line(capsys, monkeypatch, file, said, index, words):
    monkeypatch.setenv(hosts.SECONDS, "1")
    place = f"127.0.0.1:{free_port()},3,{index}"
    assert cli.main(["generate", "-m", str(file), "-p", PROMPT, "--distributed", place]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert said.replace("1 of 3", "1, 2 of 3") in line and words in line


def test_a_port_that_is_taken_a_wait_of_no_length_and_a_sweep(capsys, monkeypatch, file):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]},2,0"
        own = [f"model={file}", f"model.distributed={place}"]
        for argv, said in ((own, "Address already in use"), (["-m", *own, "policy.gamma=1,2"], "leave -m out")):
            with pytest.raises(SystemExit, match="2"):
                run.main(argv)
            assert said in capsys.readouterr().err
    monkeypatch.setenv(hosts.SECONDS, "soon")
    assert cli.main(["generate", "-m", str(file), "-p", PROMPT, "--distributed", place]) == 2
    assert f"{hosts.SECONDS}=soon" in capsys.readouterr().err


def test_auto_takes_jax_s_detection_and_says_where_it_finds_none(capsys, monkeypatch, file):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "JAX_COORD"))]:
        monkeypatch.delenv(name)
    assert cli.main(["generate", "-m", str(file), "-p", PROMPT, "--distributed", "auto"]) == 2
    assert "auto: JAX finds no" in capsys.readouterr().err
    job = {"JOB_ID": "5", "STEP_NODELIST": "node[07-09]", "NTASKS": "3", "PROCID": "2", "LOCALID": "0"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "1234")
    assert hosts._detected(1) == (Meeting("node07", 1234, 3, 2), [0])


@pytest.mark.parametrize(
    ("number", "index", "same", "said"),
    [(2, 1, "a", "was told of 2 processes"), (3, 0, "a", "the index 0"), (3, 1, "b", "other arguments"),
     (3, 1, "a", "")],
)  # fmt: skip
def test_processes_that_were_told_other_things_are_refused_on_both_sides(number, index, same, said):
    place, found = Meeting("127.0.0.1", free_port(), 3, 0), []

    def other(number, index, same):
        try:
            found.append(hosts._reach(place._replace(count=number, index=index), same, 5))
        except UserError as error:
            found.append(str(error))

    others = [threading.Thread(target=other, args=given) for given in ((number, index, same), (3, 2, "a"))]
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [thread.join() for thread in others])
        for thread in others:
            thread.start()
        with contextlib.suppress(OSError), socket.create_connection(place[:2]) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        if not said:
            assert [peer.index for peer in sorted(hosts._gather(place, "a", 5), key=lambda p: p.index)] == [1, 2]
            return
        with pytest.raises(UserError, match=said):
            hosts._gather(place, "a", 5)
    assert any(isinstance(one, str) and said in one for one in found)
