"""A server in a thread, on loopback and a free port, for the tests of this folder."""

import contextlib
import socket
import threading
import time

import uvicorn

from specsparse.engine.sampling.params import SamplingParams
from specsparse.runtime.method import MethodSpec, resolve
from specsparse.tools.serve.app import Service, uvicorn_config

NAME = "tiny"


def service_of(model, drafter="prompt_lookup", **options):
    """A service of a model; greedy unless a request says otherwise."""

    def spec_at(temperature):
        return MethodSpec(**MethodSpec(drafter, sampling=SamplingParams(temperature=temperature)).arguments())

    nodes = None if drafter is None else resolve(spec_at(0.0), model).max_nodes
    return Service(model, NAME, spec_at, positions=nodes, defaults={"temperature": 0.0}, **options)


@contextlib.contextmanager
def serving(service, **gate):
    """Its address, for as long as the block runs."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server = uvicorn.Server(uvicorn_config(service.app(**gate), grace_s=1, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        assert until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def until(true, seconds=60.0):
    """Waits until something is so; whether it became so."""
    end = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.01)
    return found
