"""llama.cpp as a peer: a child process that reads requests and writes replies, one JSON object a line.

Run by `peers.Peer` with any interpreter that has llama-cpp-python; imports nothing of specsparse. Requests:

    {"do": "hello"}                                -> {"version": ..., "system_info": ...}
    {"do": "open", "model": path, "threads": t, "room": r, "depth": d, "tokens": [...]} -> {"seconds": load time}
    {"do": "prompt" | "decode" | "verify", "n": n} -> {"seconds": ...}
    {"do": "lookup", "ids": [...], "n": n, "drafted": k} -> {"seconds": ...}

`prompt` is one batch with the logits of its last token (n_batch 2048, n_ubatch 512, as llama-bench), `decode` one token
a call with its logits, `verify` one batch with all logits. Nothing is sampled: the tokens are given. `depth` tokens are
in the cache before each test. `lookup` writes n tokens greedily after a prompt, with the package's own prompt lookup of
k tokens (0: plainly); its time begins at the first token.
"""

import json
import os
import sys
import time

_FORWARDS = 8  # verify passes of one timing; the first of them is timed too


def main() -> None:
    """Answers until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no reply
    engine = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            do = request.pop("do")
            if do == "hello":
                reply = hello()
            elif do == "open":
                start = time.perf_counter()
                engine = Engine(**request)
                reply = {"seconds": time.perf_counter() - start}
            else:
                reply = {"seconds": getattr(engine, do)(**request)}
        except ImportError as error:
            reply = {"missing": str(error)}
        except Exception as error:  # the parent says it
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


def hello() -> dict:
    """Version and instruction sets."""
    import llama_cpp

    info = llama_cpp.llama_print_system_info().decode().strip()
    return {"version": f"llama-cpp-python {llama_cpp.__version__}", "system_info": info}


class Engine:
    """One model and one context."""

    def __init__(self, model: str, threads: int, room: int, depth: int, tokens: list):
        import llama_cpp

        self.lib, self.depth, self.tokens = llama_cpp, depth, tokens
        self.writer_options = {"model_path": model, "n_ctx": depth + room, "n_threads": threads, "verbose": False}
        self.writers: dict = {}
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), params)
        if not self.model:
            raise RuntimeError("llama.cpp cannot load the file")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = -(-(depth + room) // 256) * 256
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self.n_batch = params.n_batch
        if depth:
            self.feed(0, depth, every=False)

    def writer(self, drafted: int):
        """The package's own generator, with prompt lookup or without."""
        if drafted not in self.writers:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            draft = LlamaPromptLookupDecoding(num_pred_tokens=drafted) if drafted else None
            threads = self.writer_options["n_threads"]
            # With a draft it keeps all logits, and makes room for them only where it is told to.
            self.writers[drafted] = self.lib.Llama(
                **self.writer_options, n_threads_batch=threads, draft_model=draft, logits_all=draft is not None
            )
        return self.writers[drafted]

    def lookup(self, ids: list, n: int, drafted: int) -> float:
        """Seconds of n greedy tokens after a first one, end tokens ignored."""
        writer, start = self.writer(drafted), 0.0
        writer.reset()
        for i, _ in enumerate(writer.generate(ids, temp=0.0, repeat_penalty=1.0)):
            if i == 0:
                start = time.perf_counter()
            if i == n:
                return time.perf_counter() - start
        raise RuntimeError("llama.cpp wrote too few tokens")

    def feed(self, start: int, count: int, *, every: bool) -> None:
        """Decodes tokens start .. start + count - 1 in batches, with the logits of all or of the last."""
        batch = self.batch
        for begin in range(start, start + count, self.n_batch):
            size = min(self.n_batch, start + count - begin)
            batch.n_tokens = size
            for i in range(size):
                batch.token[i] = self.tokens[(begin + i) % len(self.tokens)]
                batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = begin + i, 1, 0
                batch.logits[i] = every or begin + i == start + count - 1
            status = self.lib.llama_decode(self.context, batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
        self.lib.llama_synchronize(self.context)

    def rewind(self) -> None:
        """Back to `depth` tokens."""
        self.lib.llama_memory_seq_rm(self.memory, 0, self.depth, -1)

    def prompt(self, n: int) -> float:
        """Seconds of n prompt tokens."""
        self.rewind()
        start = time.perf_counter()
        self.feed(self.depth, n, every=False)
        return time.perf_counter() - start

    def decode(self, n: int) -> float:
        """Seconds of n single tokens."""
        self.rewind()
        start = time.perf_counter()
        for i in range(n):
            self.feed(self.depth + i, 1, every=True)
        return time.perf_counter() - start

    def verify(self, n: int) -> float:
        """Mean seconds of a batch of n tokens with all logits."""
        seconds = 0.0
        for _ in range(_FORWARDS):
            self.rewind()
            start = time.perf_counter()
            self.feed(self.depth, n, every=True)
            seconds += time.perf_counter() - start
        return seconds / _FORWARDS


if __name__ == "__main__":
    main()
