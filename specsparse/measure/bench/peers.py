"""Other engines on the same file: each in a child process, so that its threads and libraries stay apart from ours."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specsparse.engine.config import ModelConfig
from specsparse.errors import UserError
from specsparse.measure.bench.sides import token_ids
from specsparse.support.json_files import Json

PYTHON_VARIABLE = "SPECSPARSE_PEER_PYTHON"
_LONGEST_S = 900.0
_PAUSE_S = 0.05
"""After each request: OpenMP's threads spin for some milliseconds after their work, which would be our time."""


@dataclass(frozen=True)
class PeerKind:
    """How a peer is started.

    Attributes:
        script: the child, beside this file.
        needs: what to install, as pip names it.
        options: more of the "open" request.
    """

    script: str
    needs: str
    options: Json = field(default_factory=dict)


PEERS = {
    "llama.cpp": PeerKind("peer_llama_cpp.py", "llama-cpp-python"),
    "transformers": PeerKind("peer_transformers.py", "transformers torch gguf accelerate"),
    "transformers-bf16": PeerKind("peer_transformers.py", "transformers torch gguf accelerate", {"dtype": "bfloat16"}),
}

EXPECTED_TG = {"Q4_1": 149.0, "Q4_0": 201.0, "Q8_0": 165.0}
"""llama.cpp's tokens per second on SmolLM2-135M: native build, two threads, a machine with AVX-512 VNNI and 34 GB/s."""
_EXPECTED_SHAPE = (30, 576, 49152)


@dataclass(frozen=True)
class WrittenText:
    """A text after its first token.

    Attributes:
        seconds: of all tokens but the first.
        tokens: ids, the first one too.
        passes: of the target, for all tokens but the first.
    """

    seconds: float
    tokens: Sequence[int]
    passes: float


class Peer:
    """A peer's process: a `sides.Side` once it is open. Use as a context manager."""

    def __init__(self, name: str):
        """Starts the child and asks who it is.

        Raises:
            UserError: no such peer, its packages are missing, or the interpreter does not start.
        """
        if name not in PEERS:
            raise UserError(f"unknown peer {name!r}: there are {', '.join(PEERS)}")
        self.name, self._kind = name, PEERS[name]
        python = os.environ.get(PYTHON_VARIABLE) or sys.executable
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the child
        script = str(Path(__file__).with_name(self._kind.script))
        try:
            self._child = subprocess.Popen(
                [python, "-u", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
            )
        except OSError as error:
            self._errors.close()
            raise UserError(f"{PYTHON_VARIABLE}={python}: cannot be started: {error.strerror or error}") from None
        try:
            found = self._ask(do="hello")
        except BaseException:
            self.close()
            raise
        self.version, self.system_info = found["version"], found["system_info"]
        self.load_s = 0.0

    def open(self, model: Path, config: ModelConfig, *, threads: int, room: int, depth: int) -> None:
        """Loads `model` for tests of up to `room` tokens after `depth`."""
        tokens = token_ids(depth + room, config.vocab_size).tolist()
        request = {"model": str(model.resolve()), "threads": threads, "room": room, "depth": depth, "tokens": tokens}
        self.load_s = self._ask(do="open", **request, **self._kind.options)["seconds"]

    def prompt(self, n: int) -> float:
        """See `Side`."""
        return self._ask(do="prompt", n=n)["seconds"]

    def decode(self, n: int) -> float:
        """See `Side`."""
        return self._ask(do="decode", n=n)["seconds"]

    def verify(self, n: int) -> float:
        """See `Side`."""
        return self._ask(do="verify", n=n)["seconds"]

    def speculate(self, ids: list[int], n: int, *, drafted: int, draft: Path | None = None) -> "WrittenText":
        """n greedy tokens after a prompt and a first token, with drafts of a second model, else by prompt lookup.

        `drafted` 0 is plain decoding. llama.cpp only.
        """
        path = None if draft is None else str(draft.resolve())
        return WrittenText(**self._ask(do="speculate", ids=ids, n=n, drafted=drafted, draft=path))

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

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _ask(self, **request: object) -> Json:
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
                f"--peer {self.name} needs {self._kind.needs}: pip install 'specsparse[peers]' (or pip install "
                f"{self._kind.needs}), or name an interpreter that has it in {PYTHON_VARIABLE} ({reply['missing']})"
            )
        if "error" in reply:
            raise UserError(f"the peer {self.name} failed: {reply['error']}")
        time.sleep(_PAUSE_S)
        return reply

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=2)
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"exit code {self._child.returncode}"


def below_expectation(config: ModelConfig, kind: str, rate: float, flags: list[str], threads: int) -> str | None:
    """A line that says so where llama.cpp decodes more than 20 % under its known figure, else None.

    Args:
        config, kind: the model and its main tensor type; the figures are for SmolLM2-135M.
        rate: tokens per second.
        flags: of the processor; the figures need AVX-512.
        threads: the figures are for two.
    """
    expected = EXPECTED_TG.get(kind)
    shape = (config.n_layers, config.d_model, config.vocab_size)
    if expected is None or shape != _EXPECTED_SHAPE or threads < 2 or rate >= 0.8 * expected:
        return None
    line = f"llama.cpp decodes {rate:.0f} tok/s, {1 - rate / expected:.0%} under the {expected:.0f} known for {kind}"
    if "avx512f" not in flags:
        return f"{line} on a machine with AVX-512, which this one lacks"
    return f"{line}: a build without AVX-512, or a busy machine; take the ratio with care"
