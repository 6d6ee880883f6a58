"""An attack with real decoding behind it: nothing but the attacker's own requests ends, and those do end."""

import asyncio
import contextlib
import socket
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from starlette.applications import Starlette  # noqa: E402
from starlette.responses import Response  # noqa: E402
from starlette.routing import Route  # noqa: E402

import specsparse  # noqa: E402
from specsparse.runtime.method import MethodSpec  # noqa: E402
from specsparse.testing import write_tiny_gguf  # noqa: E402
from specsparse.tools.serve import app  # noqa: E402
from specsparse.tools.serve.worker import MAX_DRAFTERS, RequestHandle  # noqa: E402
from tests.tools.serve.attack import BROKEN, attack, half_a_body  # noqa: E402
from tests.tools.serve.serving import service_of, serving, until  # noqa: E402

ASKED = {"prompt": "abc abc abc", "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return specsparse.load(write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", n_layers=1, context_length=4096))


def value_of(url, name):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_who_attacks_harms_nobody_else(model):
    expected = specsparse.generate(model, ASKED["prompt"], max_tokens=12, ignore_eos=True).text
    service = service_of(model, room=4)
    model.programs.drafters |= dict.fromkeys(range(99))  # of so many temperatures
    with serving(service) as url:
        ask = lambda: httpx.post(f"{url}/v1/completions", json=ASKED, timeout=60)  # noqa: E731
        assert ask().json()["choices"][0]["text"] == expected
        found = attack(url, tokens=4000, many=20)
        assert found[400] == len(BROKEN) and found[413] == 1 and found["slow"] == 4
        assert found["left"] + found[200] + found[503] == 24 and found[503] > 0 < found["left"]
        assert until(lambda: value_of(url, "vllm:num_requests_running") == 0 == service.bodies.coming)
        aborted = value_of(url, 'vllm:request_success_total{engine="0",finished_reason="abort"')
        assert 0 < aborted <= found["left"]
        assert value_of(url, "vllm:generation_tokens_total") < 4000 * found["left"]
        assert len(model.programs.drafters) <= MAX_DRAFTERS + 1
        assert ask().json()["choices"][0]["text"] == expected


def test_bodies_that_do_not_come_and_more_than_may_be_read(model, monkeypatch):
    with serving(service_of(model)) as url:
        monkeypatch.setattr(app, "MAX_BODIES", 1)
        with half_a_body(url) as first:
            wanted = lambda: httpx.post(f"{url}/v1/completions", json=ASKED, timeout=60)  # noqa: E731
            assert until(lambda: wanted().status_code == 503)
            error = wanted().json()["error"]
            assert error["code"] == "queue_full" and "1 requests are being read already" in error["message"]
            first.sendall(b' "abc", "max_tokens": 2}'.ljust(90))
            assert first.recv(100).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(app, "PATIENCE_S", 0.1)
        with half_a_body(url) as slow:
            answer = b""
            while part := slow.recv(4096):  # until the server hangs up
                answer += part
            assert answer.startswith(b"HTTP/1.1 408") and b"did not come within 0.1 seconds" in answer


def test_connections_without_a_request_end_and_too_many_are_not_taken(model, monkeypatch):
    monkeypatch.setattr(app, "PATIENCE_S", 0.3)
    with serving(service_of(model)) as url, contextlib.ExitStack() as opened:
        place = urlsplit(url)

        def connected(data=b""):
            out = opened.enter_context(socket.create_connection((place.hostname, place.port), timeout=30))
            out.sendall(data)
            return out

        health = f"GET /health HTTP/1.1\r\nHost: {place.netloc}\r\n".encode()
        silent, half, once = connected(), connected(health), connected(health + b"\r\n")
        silence, nothing, answer = (b"".join(iter(lambda c=c: c.recv(4096), b"")) for c in (silent, half, once))
        assert silence == nothing == b"" and answer.startswith(b"HTTP/1.1 200")  # all three were ended
        text = httpx.post(f"{url}/v1/completions", json={**ASKED, "max_tokens": 400}, timeout=60)  # longer than 0.3 s
        assert text.status_code == 200
        monkeypatch.setattr(app, "MAX_CONNECTIONS", 2)
        monkeypatch.setattr(app, "PATIENCE_S", 60)
        held = [connected(), connected()]
        assert connected().recv(4096) == b""
        held[0].close()
        answered = []

        def asked():
            with contextlib.suppress(ConnectionResetError):  # the server has not seen yet that one has gone
                answered.append(connected(health + b"\r\n").recv(4096)[:12])
            return b"HTTP/1.1 200" in answered

        assert until(asked)


def test_an_answer_that_nobody_reads_ends_its_connection(monkeypatch):
    monkeypatch.setattr(app, "PATIENCE_S", 0.3)
    big = Starlette(routes=[Route("/", lambda _: Response(b"x" * 2**25))])  # more than sockets buffer
    with serving(SimpleNamespace(app=lambda: big)) as url:
        place = urlsplit(url)
        with socket.create_connection((place.hostname, place.port), timeout=30) as out:
            out.sendall(f"GET / HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
            time.sleep(1.5)
            out.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                read = sum(map(len, iter(lambda: out.recv(2**20), b"")))
                assert read < 2**25
        assert len(httpx.get(url).content) == 2**25


def test_a_client_that_does_not_read_ends_its_decoding(monkeypatch):
    monkeypatch.setattr(app, "PATIENCE_S", 0.05)
    handle = RequestHandle([], MethodSpec(), lambda event: None)

    async def parts():
        yield b"data"

    async def never(*_):
        await asyncio.sleep(60)

    stream = app.EventStream(parts(), handle)
    asyncio.run(stream({"type": "http", "asgi": {"spec_version": "2.3"}}, never, never))
    assert handle.gone.is_set()
