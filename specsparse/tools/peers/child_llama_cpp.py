"""llama.cpp as a peer: a child process that reads requests and writes replies, one JSON object a line.

Run by `peer.Peer` with any interpreter that has llama-cpp-python, or with the argument `ik_llama_cpp` for
ik-llama-cpp-python; imports nothing of specsparse. Requests:

    {"do": "hello"}                                -> {"version": ..., "system_info": ...}
    {"do": "open", "model": path, "threads": t, "room": r, "depth": d, "tokens": [...], "flash": true, false or null}
        -> {"seconds": load time}
    {"do": "attend", "flash": true or false} -> {"seconds": ...}
    {"do": "prompt" | "decode" | "verify", "n": n} -> {"seconds": ...}
    {"do": "batch", "prompts": [[...], ...], "n": n, "flash": true or false} -> {"seconds": ...}
    {"do": "speculate", "ids": [...], "n": n, "drafted": k, "draft": path or null, "flash": true or false}
        -> {"seconds": ..., "tokens": [...], "passes": of the target}
    {"do": "write", "prompt": [...], "count": n, "chunk": p} -> {"tokens": [...]}
    {"do": "rows", "prompt": [...], "text": [...], "width": w, "chunk": p, "file": path} -> {"vocabulary": V}
    {"do": "routing", "prompt": [...], "text": [...], "width": w, "chunk": p, "file": path}
        -> {"layers": L, "chosen": k}

`prompt` is one batch with the logits of its last token (n_batch 2048, n_ubatch 512, as llama-bench), `decode` one token
a call with its logits, `verify` one batch with all logits. Nothing is sampled: the tokens are given. `depth` tokens are
in the cache before each test. `batch` decodes n given tokens of each sequence behind its prompt, one of each sequence a
call, all in one `llama_batch`; prompts that are in the cache already are not fed again. `attend` goes on with flash
attention or without, in a second context of the same weights. `speculate` writes n tokens greedily after a prompt, with
the package's own prompt lookup of k tokens (0: plainly), or with a second model that drafts k tokens greedily, one a
call, and keeps what it has read; its time begins at the first token. `write` continues a prompt greedily, one token a
batch. `rows` feeds a text behind a prompt in batches of w tokens; its logits go to a file, float32[len(text), V]. Both
feed the prompt by p tokens. `routing` does as `rows` in a context whose graph is watched; the experts of the rows and
their weights go to the file, int32[L, len(text), k] and float32[L, len(text), k].
"""

import ctypes
import os
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))  # where an isolated interpreter (-I) does not look
from child import RowWriter, serve

_FORWARDS = 8  # verify passes of one timing; the first of them is timed too


class LlamaCpp:
    """llama-cpp-python: its C functions, and those that the two packages spell differently."""

    def __init__(self):
        import llama_cpp

        self.c, self.version = llama_cpp, f"llama-cpp-python {llama_cpp.__version__}"

    def info(self) -> bytes:
        return self.c.llama_print_system_info()

    def set_flash(self, params, on: bool) -> None:
        """Flash attention or not; what the library chooses by itself depends on its version."""
        params.flash_attn_type = int(on)

    def keep(self, context, count: int, sequence: int = -1) -> None:
        """Drops the tokens from `count` on, of one sequence or of every one."""
        self.c.llama_memory_seq_rm(self.c.llama_get_memory(context), sequence, count, -1)

    def copy(self, context, source: int, target: int) -> bool:
        """One sequence as another, with memory of its own; whether that was done."""
        self.c.llama_memory_seq_cp(self.c.llama_get_memory(context), source, target, -1, -1)
        return True

    def wait(self, context) -> None:
        self.c.llama_synchronize(context)


class IkLlamaCpp:
    """ik-llama-cpp-python, which binds some of the C functions only."""

    def __init__(self):
        import ik_llama_cpp
        from ik_llama_cpp import _ctypes_api

        self.c, self.version = _ctypes_api, f"ik-llama-cpp-python {ik_llama_cpp.__version__}"
        library = _ctypes_api._lib
        self.info, self._remove, self._wait = (
            getattr(library, f"llama_{n}") for n in ("print_system_info", "kv_cache_seq_rm", "synchronize")
        )
        self.info.restype, self.info.argtypes = ctypes.c_char_p, []
        self._remove.restype = ctypes.c_bool
        self._remove.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
        self._wait.restype, self._wait.argtypes = None, [ctypes.c_void_p]

    def set_flash(self, params, on: bool) -> None:
        params.flash_attn = on

    def keep(self, context, count: int, sequence: int = -1) -> None:
        self._remove(context, sequence, count, -1)

    def copy(self, context, source: int, target: int) -> bool:
        """Its copies share their memory and would be read once: none is made."""
        return False

    def wait(self, context) -> None:
        self._wait(context)


def library():
    """The package that the script's argument names."""
    return IkLlamaCpp() if sys.argv[1:] == ["ik_llama_cpp"] else LlamaCpp()


def hello() -> dict:
    lib = library()
    return {"version": lib.version, "system_info": lib.info().decode().strip()}


def load(lib, path: str):
    lib.c.llama_backend_init()
    params = lib.c.llama_model_default_params()
    params.n_gpu_layers = 0
    model = lib.c.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise RuntimeError(f"{lib.version} cannot load the file")
    return model


class Tensor(ctypes.Structure):
    """`ggml_tensor`, as far as it is read."""

    _fields_ = (
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int), ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10), ("view_src", ctypes.c_void_p), ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p), ("name", ctypes.c_char * 64),
    )  # fmt: skip


class RoutingWatch:
    """Experts and weights of each layer, kept as a graph computes them; `callback` is of the context's options."""

    WEIGHTS = ("ffn_moe_weights", "ffn_moe_weights_softmax", "ffn_moe_weights_norm", "ffn_moe_weights_scaled")
    """By what is done to them; the last one counts."""

    def __init__(self, lib):
        self.experts: dict = {}
        self.weights: dict = {}
        self.callback = lib.c.ggml_backend_sched_eval_callback(self.see)

    def see(self, address: int, ask: bool, _) -> bool:
        """Whether to wait for a tensor; when it is there, what it holds is kept."""
        import numpy as np

        tensor = Tensor.from_address(address)
        name, _, layer = tensor.name.decode().partition("-")
        if not layer.isdecimal():  # "0 (reshaped)" is another tensor
            return not ask
        if ask:
            return name == "ffn_moe_topk" or name in self.WEIGHTS
        k, rows, more, _ = tensor.ne
        if name == "ffn_moe_topk":  # the first columns of a sorted matrix
            each = [(ctypes.c_int32 * k).from_address(tensor.data + row * tensor.nb[1]) for row in range(rows)]
            self.experts[int(layer)] = np.array(each)
        elif name in self.WEIGHTS:
            self.weights[int(layer)] = np.array((ctypes.c_float * (k * rows * more)).from_address(tensor.data))
        return True


class Context:
    """One context of a model that `load` gave, by the C functions."""

    def __init__(
        self, lib, model, threads: int, room: int, flash: "bool | None" = None, sequences: int = 1,
        watch: "RoutingWatch | None" = None,
    ):  # fmt: skip
        self.lib, self.model, c = lib, model, lib.c
        self.room = room
        self.prefix: list | None = None  # prompt (a list of several), or `depth` tokens: how the cache begins
        self.filled = False
        self.vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        params = c.llama_context_default_params()
        params.n_ctx = -(-room // 256) * 256 * sequences
        params.n_seq_max = sequences
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = threads
        if flash is not None:
            lib.set_flash(params, flash)
        if watch is not None:
            params.cb_eval = watch.callback
        self.context = c.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"{lib.version} cannot make a context")
        self.batch = c.llama_batch_init(params.n_batch, 0, 1)
        self.n_batch = params.n_batch

    def keep(self, count: int, sequence: int = -1) -> None:
        """Back to `count` tokens, of one sequence or of every one."""
        self.lib.keep(self.context, count, sequence)

    def close(self) -> None:
        self.lib.c.llama_batch_free(self.batch)
        self.lib.c.llama_free(self.context)

    def feed(self, tokens: list, start: int, *, every: bool) -> None:
        """Decodes tokens behind `start` others in batches, with the logits of all or of the last."""
        last = len(tokens) - 1
        self.feed_rows([(token, start + at, 0, every or at == last) for at, token in enumerate(tokens)])

    def feed_rows(self, rows: list) -> None:
        """Decodes rows of (token, position, sequence, whether its logits are wanted) in batches."""
        batch = self.batch
        for begin in range(0, len(rows), self.n_batch):
            part = rows[begin : begin + self.n_batch]
            batch.n_tokens = len(part)
            for i, (token, position, sequence, wanted) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            status = self.lib.c.llama_decode(self.context, batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
        self.lib.wait(self.context)

    def logits(self, row: int):
        """float32[V] of one row of the last batch that was fed with all its logits, or -1 of the last one."""
        import numpy as np

        return np.ctypeslib.as_array(self.lib.c.llama_get_logits_ith(self.context, row), shape=(self.vocabulary,))

    def best(self) -> int:
        return int(self.logits(-1).argmax())


class ModelDraft:
    """Drafts `count` tokens with a model; a `draft_model` of the package."""

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
        self.calls += 1
        return self.draft(input_ids, **options)


class Engine(RowWriter):
    def __init__(self, model: str, threads: int, room: int, depth: int, tokens: list, flash: "bool | None" = None):
        self.lib, self.depth, self.tokens = library(), depth, tokens
        self.threads, self.room = threads, depth + room
        self.writer_options = {"model_path": model, "n_ctx": self.room, "n_threads": threads, "verbose": False}
        self.writers: dict = {}
        self.context = Context(self.lib, load(self.lib, model), threads, self.room, flash)
        self.contexts = {flash: self.context}
        self.batched: dict = {}
        self.watch = None

    def attend(self, flash: bool) -> float:
        """Seconds to go on in the context with flash attention or without; each is made once."""
        start = time.perf_counter()
        if flash not in self.contexts:
            self.contexts[flash] = Context(self.lib, self.context.model, self.threads, self.room, flash)
        self.context = self.contexts[flash]
        return time.perf_counter() - start

    def writer(self, drafted: int, draft: "str | None", flash: bool):
        """The package's own generator: plain, with prompt lookup, or with a draft model; and its counter."""
        key = drafted, draft, flash
        if key not in self.writers:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            counted = None
            if drafted:
                counted = Counted(
                    LlamaPromptLookupDecoding(num_pred_tokens=drafted)
                    if draft is None
                    else ModelDraft(Context(self.lib, load(self.lib, draft), self.threads, self.room, flash), drafted)
                )
            # With a draft it keeps all logits, and makes room for them only if it is told to.
            made = self.lib.c.Llama(
                **self.writer_options, n_threads_batch=self.threads, draft_model=counted, logits_all=bool(counted),
                flash_attn=flash,
            )  # fmt: skip
            self.writers[key] = made, counted
        return self.writers[key]

    def speculate(self, ids: list, n: int, drafted: int, draft: "str | None" = None, flash: bool = False) -> dict:
        """Seconds of n greedy tokens after a first one, end tokens ignored; all n + 1, and the passes of the n."""
        (writer, counted), start, tokens = self.writer(drafted, draft, flash), 0.0, []
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
        """Back to `depth` tokens; they are fed if the cache holds others."""
        self.context.keep(self.depth if self.context.filled else 0)
        if self.depth and not self.context.filled:
            self.feed(0, self.depth, every=False)
        self.context.filled, self.context.prefix = True, None

    def prompt(self, n: int) -> float:
        self.rewind()
        start = time.perf_counter()
        self.feed(self.depth, n, every=False)
        return time.perf_counter() - start

    def decode(self, n: int) -> float:
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

    def batch(self, prompts: list, n: int, flash: bool) -> float:
        """Seconds of n tokens of each sequence, one of each a call, with its logits; prompts are not timed."""

        def step(context: Context, i: int) -> None:
            """The i-th token behind each prompt, all in one call."""
            tokens = self.tokens
            context.feed_rows([(tokens[(i + s) % len(tokens)], len(p) + i, s, True) for s, p in enumerate(prompts)])

        key, room = (len(prompts), flash), max(len(prompt) for prompt in prompts) + n
        context = self.batched.get(key)
        if context is None or context.room < room:
            if context is not None:
                context.close()
            context = self.batched[key] = Context(self.lib, self.context.model, self.threads, room, flash, len(prompts))
        if context.prefix != prompts:
            context.keep(0)
            for s, prompt in enumerate(prompts):
                if not (prompt in prompts[:s] and self.lib.copy(context.context, prompts.index(prompt), s)):
                    context.feed_rows([(token, at, s, False) for at, token in enumerate(prompt)])
            context.prefix = prompts
            step(context, 0)  # copies are made by the next call
        for s, prompt in enumerate(prompts):
            context.keep(len(prompt), s)
        start = time.perf_counter()
        for i in range(n):
            step(context, i)
        return time.perf_counter() - start

    def begin(self, prompt: list, chunk: int) -> None:
        """A cache of the prompt alone; fed anew if it is another than before, else what came behind is dropped."""
        if prompt == self.context.prefix:
            self.context.keep(len(prompt))
            return
        self.context.keep(0)
        self.context.prefix, self.context.filled = prompt, False
        for start in range(0, len(prompt), chunk):
            self.context.feed(prompt[start : start + chunk], start, every=False)

    def next_token(self, prompt: list, chunk: int) -> int:
        self.context.prefix = None  # the logits of its last token are needed
        self.begin(prompt, chunk)
        return self.context.best()

    def logits_of(self, tokens: list, start: int):
        import numpy as np

        self.context.feed(tokens, start, every=True)
        return np.stack([self.context.logits(row) for row in range(len(tokens))])

    def routing(self, prompt: list, text: list, width: int, chunk: int, file: str) -> dict:
        """The experts of a text's rows in passes of `width` tokens, and their weights, into `file`."""
        import numpy as np

        if self.watch is None:
            self.watch = RoutingWatch(self.lib)
            self.context = Context(self.lib, self.context.model, self.threads, self.room, watch=self.watch)
        self.begin(prompt, chunk)
        if len(self.watch.experts) != self.lib.c.llama_model_n_layer(self.context.model):
            raise RuntimeError(f"{self.lib.version} showed the experts of {len(self.watch.experts)} layers")
        experts, weights = [], []
        for start in range(0, len(text), width):
            self.context.feed(text[start : start + width], len(prompt) + start, every=True)
            experts.append(np.stack([self.watch.experts[layer] for layer in sorted(self.watch.experts)]))
            weights.append(np.stack([self.watch.weights[layer] for layer in sorted(self.watch.weights)]))
        chosen = np.concatenate(experts, axis=1)
        with open(file, "wb") as out:
            out.write(chosen.astype(np.int32).tobytes())
            parts = [part.reshape(len(chosen), -1, chosen.shape[2]) for part in weights]
            out.write(np.concatenate(parts, axis=1).astype(np.float32).tobytes())
        return {"layers": chosen.shape[0], "chosen": chosen.shape[2]}


if __name__ == "__main__":
    serve(hello, Engine)
