"""A peer's process: requests and replies, one JSON object a line, and what its engines have in common.

Imported by the scripts beside it, which run with any interpreter that has the peer; nothing of specsparse is imported.
"""

import abc
import json
import os
import sys
import time
from typing import Any


class RowWriter(abc.ABC):
    """Texts and logits of an engine."""

    @abc.abstractmethod
    def begin(self, prompt: list, chunk: int) -> None:
        """Leaves the prompt alone in the cache, fed by `chunk` tokens."""

    @abc.abstractmethod
    def next_token(self, prompt: list, chunk: int) -> int:
        """The likeliest token after the prompt, which is read in chunks."""

    @abc.abstractmethod
    def logits_of(self, tokens: list, start: int) -> Any:
        """float32[n, V] of tokens behind `start` others."""

    def write(self, prompt: list, count: int, chunk: int) -> dict:
        """The greedy continuation, one token a pass; no token ends it."""
        out = [self.next_token(prompt, chunk)]
        while len(out) < count:
            out.append(int(self.logits_of(out[-1:], len(prompt) + len(out) - 1)[0].argmax()))
        return {"tokens": out}

    def rows(self, prompt: list, text: list, width: int, chunk: int, file: str) -> dict:
        """The logits of a text in passes of `width` tokens, into `file`."""
        self.begin(prompt, chunk)
        vocabulary = 0
        with open(file, "wb") as out:
            for start in range(0, len(text), width):
                logits = self.logits_of(text[start : start + width], len(prompt) + start)
                out.write(logits.tobytes())
                vocabulary = logits.shape[1]
        return {"vocabulary": vocabulary}


def serve(hello, engine_of) -> None:
    """Answers until the input ends.

    `hello` says version and instruction sets. `engine_of` takes the keywords of an "open" request; the methods of its
    engine answer the other requests, with seconds or with a whole reply.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints on it, too
    engine = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            do = request.pop("do")
            if do == "hello":
                reply = hello()
            elif do == "open":
                start = time.perf_counter()
                engine = engine_of(**request)
                reply = {"seconds": time.perf_counter() - start}
            else:
                reply = getattr(engine, do)(**request)
                reply = reply if isinstance(reply, dict) else {"seconds": reply}
        except ImportError as error:
            reply = {"missing": str(error)}
        except Exception as error:  # the parent says it
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
