"""Peers that answer from a script, so that tests need none of the real ones."""

import pytest

from specsparse.tools import peers

HELLO = '{"version": "scripted 1", "system_info": "TEST = 1"}'


@pytest.fixture
def peer_python(tmp_path, monkeypatch):
    """Call it with the text of a program: peers run in it as if it were a Python."""

    def use(text):
        python = tmp_path / "python"
        python.write_text(text)
        python.chmod(0o755)
        monkeypatch.setenv(peers.PYTHON_VARIABLE, str(python))

    return use


@pytest.fixture
def scripted_peer(peer_python):
    """Call it with what a peer does, by shell patterns of the requests; the first that fits counts."""

    def use(replies, before=""):
        cases = "\n".join(
            f"    {pattern}) {does};;" for pattern, does in {"*hello*": f"echo '{HELLO}'", **replies}.items()
        )
        peer_python(f'#!/bin/sh\n{before}\nwhile read line; do\n  case "$line" in\n{cases}\n  esac\ndone\n')

    return use
