"""llama.cpp as a peer: a child process that reads requests and writes replies, one JSON object a line.

Run by `peers.Peer` with any interpreter that has llama-cpp-python; imports nothing of specsparse. Requests:

    {"do": "hello"}                                -> {"version": ..., "system_info": ...}
    {"do": "open", "model": path, "threads": t, "room": r, "depth": d, "tokens": [...]} -> {"seconds": load time}
    {"do": "prompt" | "decode" | "verify", "n": n} -> {"seconds": ...}
    {"do": "speculate", "ids": [...], "n": n, "drafted": k, "draft": path or null}
        -> {"seconds": ..., "tokens": [...], "passes": of the target}

`prompt` is one batch with the logits of its last token (n_batch 2048, n_ubatch 512, as llama-bench), `decode` one token
a call with its logits, `verify` one batch with all logits. Nothing is sampled: the tokens are given. `depth` tokens are
in the cache before each test. `speculate` writes n tokens greedily after a prompt, with the package's own prompt lookup
of k tokens (0: plainly), or with a second model that drafts k tokens greedily, one a call, and keeps what it has read;
its time begins at the first token.
"""

import os
import sys
import time

_FORWARDS = 8  # verify passes of one timing; the first of them is timed too


def hello() -> dict:
    """Version and instruction sets."""
    import llama_cpp

    info = llama_cpp.llama_print_system_info().decode().strip()
    return {"version": f"llama-cpp-python {llama_cpp.__version__}", "system_info": info}


class Context:
    """One model and one context, by the C functions."""

    def __init__(self, lib, model: str, threads: int, room: int):
        self.lib = lib
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(model.encode(), params)
        if not self.model:
            raise RuntimeError("llama.cpp cannot load the file")
        params = lib.llama_context_default_params()
        params.n_ctx = -(-room // 256) * 256
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(params.n_batch, 0, 1)
        self.n_batch = params.n_batch

    def keep(self, count: int) -> None:
        """Back to `count` tokens."""
        self.lib.llama_memory_seq_rm(self.memory, 0, count, -1)

    def feed(self, tokens: list, start: int, *, every: bool) -> None:
        """Decodes tokens behind `start` others in batches, with the logits of all or of the last."""
        batch, count = self.batch, len(tokens)
        for begin in range(0, count, self.n_batch):
            size = min(self.n_batch, count - begin)
            batch.n_tokens = size
            for i in range(size):
                at = begin + i
                batch.token[i] = tokens[at]
                batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = start + at, 1, 0
                batch.logits[i] = every or at == count - 1
            status = self.lib.llama_decode(self.context, batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
        self.lib.llama_synchronize(self.context)

    def best(self) -> int:
        """The likeliest token after the last one fed."""
        import numpy as np

        logits = self.lib.llama_get_logits_ith(self.context, -1)
        size = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        return int(np.ctypeslib.as_array(logits, shape=(size,)).argmax())


class ModelDraft:
    """Drafts `count` tokens with a model: what the package takes as a `draft_model`."""

    def __init__(self, context: Context, count: int):
        self.context, self.count, self.seen = context, count, []

    def __call__(self, input_ids, **_):
        """The tokens after those; what the cache holds of them already is not fed again."""
        import numpy as np

        ids = input_ids.tolist()
        same = next((i for i, (a, b) in enumerate(zip(self.seen, ids)) if a != b), min(len(self.seen), len(ids)))
        same = min(same, len(ids) - 1)
        self.context.keep(same)
        self.context.feed(ids[same:], same, every=False)
        out = [self.context.best()]
        while len(out) < self.count:
            self.context.feed(out[-1:], len(ids) + len(out) - 1, every=False)
            out.append(self.context.best())
        self.seen = ids + out[:-1]
        return np.array(out, np.intc)


class Counted:
    """A draft model that counts its calls: one a pass of the target, but for the prompt's."""

    def __init__(self, draft):
        self.draft, self.calls = draft, 0

    def __call__(self, input_ids, **options):
        """What it says."""
        self.calls += 1
        return self.draft(input_ids, **options)


class Engine:
    """A model, and what is timed with it."""

    def __init__(self, model: str, threads: int, room: int, depth: int, tokens: list):
        import llama_cpp

        self.lib, self.depth, self.tokens = llama_cpp, depth, tokens
        self.threads, self.room = threads, depth + room
        self.writer_options = {"model_path": model, "n_ctx": self.room, "n_threads": threads, "verbose": False}
        self.writers: dict = {}
        llama_cpp.llama_backend_init()
        self.context = Context(llama_cpp, model, threads, self.room)
        if depth:
            self.feed(0, depth, every=False)

    def writer(self, drafted: int, draft: str | None = None):
        """The package's own generator: plain, with prompt lookup, or with a draft model; and its counter."""
        if (drafted, draft) not in self.writers:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            counted = None
            if drafted:
                counted = Counted(
                    LlamaPromptLookupDecoding(num_pred_tokens=drafted)
                    if draft is None
                    else ModelDraft(Context(self.lib, draft, self.threads, self.room), drafted)
                )
            # With a draft it keeps all logits, and makes room for them only where it is told to.
            made = self.lib.Llama(
                **self.writer_options, n_threads_batch=self.threads, draft_model=counted, logits_all=bool(counted)
            )
            self.writers[drafted, draft] = made, counted
        return self.writers[drafted, draft]

    def speculate(self, ids: list, n: int, drafted: int, draft: str | None = None) -> dict:
        """Seconds of n greedy tokens after a first one, end tokens ignored; all n + 1, and the passes of the n."""
        (writer, counted), start, tokens = self.writer(drafted, draft), 0.0, []
        writer.reset()
        if counted:
            counted.calls = 0
        for token in writer.generate(ids, temp=0.0, repeat_penalty=1.0):
            tokens.append(int(token))
            if len(tokens) == 1:
                start = time.perf_counter()
            if len(tokens) == n + 1:
                seconds = time.perf_counter() - start
                return {"seconds": seconds, "tokens": tokens, "passes": counted.calls if counted else n}
        raise RuntimeError("llama.cpp wrote too few tokens")

    def feed(self, start: int, count: int, *, every: bool) -> None:
        """Decodes the given tokens start .. start + count - 1."""
        tokens = [self.tokens[(start + i) % len(self.tokens)] for i in range(count)]
        self.context.feed(tokens, start, every=every)

    def rewind(self) -> None:
        """Back to `depth` tokens."""
        self.context.keep(self.depth)

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
    sys.path.insert(0, os.path.dirname(__file__))  # where an isolated interpreter (-I) does not look
    from peer_child import serve

    serve(hello, Engine)
