"""A peer's process: started, asked and ended; its threads and native libraries stay apart from ours."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from specsparse.errors import UserError
from specsparse.support.files import Json

PYTHON_VARIABLE = "SPECSPARSE_PEER_PYTHON"
_LONGEST_S = 900.0
_PAUSE_S = 0.05
"""After each timed request: OpenMP's threads spin for some milliseconds after their work, which would be our time."""

_FAILURE = re.compile(r"assert|error|abort|terminate", re.IGNORECASE)


@dataclass(frozen=True)
class PeerKind:
    """How a peer is started.

    Attributes:
        script: the child, beside this file.
        needs: what to install, as pip names it.
        arguments: of the script.
        options: more of the "open" request.
        flash: whether it has an "attend" request.
    """

    script: str
    needs: str
    arguments: tuple[str, ...] = ()
    options: Json = field(default_factory=dict)
    flash: bool = False


_TORCH = "transformers torch gguf accelerate"
PEERS = {
    "llama.cpp": PeerKind("child_llama_cpp.py", "llama-cpp-python", flash=True),
    "ik_llama.cpp": PeerKind("child_llama_cpp.py", "ik-llama-cpp-python", ("ik_llama_cpp",), flash=True),
    "transformers": PeerKind("child_transformers.py", _TORCH),
    "transformers-bf16": PeerKind("child_transformers.py", _TORCH, options={"dtype": "bfloat16"}),
}


class PeerError(UserError):
    """A peer failed at what it was asked: its error, or the last words of its process."""


class PeerProcess:
    """A peer's process. Use as a context manager.

    Attributes:
        name: a key of `PEERS`.
        kind: how it is started.
        version, system_info: what it says of itself.
    """

    def __init__(self, name: str, *, option: str = "--peer", environment: Mapping[str, str] | None = None):
        """Starts the child and asks who it is.

        Args:
            name: a key of `PEERS`.
            option: what the user wrote before the name.
            environment: variables of the child beside ours.

        Raises:
            UserError: no such peer, its packages are missing, or the interpreter does not start.
        """
        if name not in PEERS:
            raise UserError(f"unknown peer {name!r}: there are {', '.join(PEERS)}")
        self.name, self.kind, self._option = name, PEERS[name], option
        self._python = os.environ.get(PYTHON_VARIABLE) or sys.executable
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the child
        script = str(Path(__file__).with_name(self.kind.script))
        try:
            self._child = subprocess.Popen(
                [self._python, "-u", script, *self.kind.arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise UserError(f"{PYTHON_VARIABLE}={self._python}: cannot be started: {error.strerror or error}") from None
        try:
            found = self.ask(do="hello")
        except BaseException:
            self.close()
            raise
        self.version, self.system_info = found["version"], found["system_info"]

    def ask(self, **request: object) -> Json:
        """The reply to one request.

        Raises:
            UserError: its packages are missing.
            PeerError: it answered with an error, took more than 15 minutes, or its process ended.
        """
        watchdog = threading.Timer(_LONGEST_S, self._child.kill)
        watchdog.start()
        try:
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
            reply = json.loads(line) if line else {"error": f"its process ended: {self._last_words()}"}
        except (OSError, ValueError):
            reply = {"error": f"its process ended: {self._last_words()}"}
        finally:
            watchdog.cancel()
        if "missing" in reply:
            raise UserError(
                f"{self._option} {self.name} needs {self.kind.needs}: {self._python} -m pip install "
                f"{self.kind.needs}, or name an interpreter that has it in {PYTHON_VARIABLE} ({reply['missing']})"
            )
        if "error" in reply:
            raise PeerError(f"the peer {self.name} failed: {reply['error']}")
        return reply

    def timed(self, **request: object) -> Json:
        """`ask` for a request whose reply has times: what is timed next begins when the child's threads rest."""
        found = self.ask(**request)
        time.sleep(_PAUSE_S)
        return found

    def close(self) -> None:
        """Ends the child."""
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        try:
            self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()
        self._errors.close()

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=2)
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        lines = [line for line in lines if _FAILURE.search(line)] or lines  # a backtrace may follow
        code = self._child.returncode
        ending = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"{ending}: {lines[-1][:300]}" if lines else ending
