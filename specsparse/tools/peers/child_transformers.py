"""transformers + torch on the CPU as a peer: see `child_llama_cpp` for the protocol.

transformers dequantises the GGUF file to float32 or bfloat16. `decode` is greedy `generate`, so that a token costs what
its users pay; `prompt` and `verify` call the model. "open" takes `dtype` beside the rest; `flash` is attention by
torch's fused kernels (sdpa) and not by single operations (eager).
"""

import os
import sys
import time
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))  # where an isolated interpreter (-I) does not look
from child import RowWriter, serve

_FORWARDS = 2


def hello() -> dict:
    import accelerate  # noqa: F401 - reading a GGUF file needs both: missed now and not when a model is opened
    import gguf  # noqa: F401
    import torch
    import transformers

    info = torch.backends.cpu.get_cpu_capability()
    return {"version": f"transformers {transformers.__version__}, torch {torch.__version__}", "system_info": info}


class Engine(RowWriter):
    def __init__(
        self, model: str, threads: int, room: int, depth: int, tokens: list, dtype: str = "float32",
        flash: "bool | None" = None,
    ):  # fmt: skip
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch, self.depth, self.make_cache = torch, depth, DynamicCache
        folder, name = os.path.split(model)
        kind = getattr(torch, dtype)
        more = {} if flash is None else {"attn_implementation": "sdpa" if flash else "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=kind, **more).eval()
        self.ids = torch.tensor([tokens])
        self.cache, self.filled = DynamicCache(), False
        self.prefix: list | None = None
        self.last: Any = None

    def fill(self) -> None:
        if not self.filled or not self.depth:
            self.cache = self.make_cache()
            if self.depth:
                self.model(self.ids[:, : self.depth], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.filled, self.prefix = True, None
        extra = self.cache.get_seq_length() - self.depth
        if extra > 0:
            self.cache.crop(-extra)

    def forward(self, n: int, keep: int) -> float:
        """Seconds of one pass over n tokens; logits of the last `keep` (0: all)."""
        self.fill()
        ids = self.ids[:, self.depth : self.depth + n]
        start = time.perf_counter()
        self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=keep)
        return time.perf_counter() - start

    def prompt(self, n: int) -> float:
        return self.forward(n, 1)

    def decode(self, n: int) -> float:
        """Seconds of greedy generation of n tokens; the first comes from the last prompt token."""
        self.fill()
        ids = self.ids[:, : self.depth + 1]
        mask = self.torch.ones_like(ids)
        options = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False, "past_key_values": self.cache}
        start = time.perf_counter()
        self.model.generate(ids, attention_mask=mask, **options)
        return time.perf_counter() - start

    def verify(self, n: int) -> float:
        """Mean seconds of a pass over n tokens with all logits."""
        return sum(self.forward(n, 0) for _ in range(_FORWARDS)) / _FORWARDS

    def begin(self, prompt: list, chunk: int) -> None:
        """A cache of the prompt alone; fed anew if it is another than before, else what came behind is dropped."""
        if prompt == self.prefix and prompt:
            extra = self.cache.get_seq_length() - len(prompt)
            if extra > 0:
                self.cache.crop(-extra)  # transformers 5 takes what to drop, not what to keep
            return
        self.cache, self.prefix, self.filled = self.make_cache(), prompt, False
        for start in range(0, len(prompt), chunk):
            self.last = self.logits_of(prompt[start : start + chunk], start)[-1]

    def next_token(self, prompt: list, chunk: int) -> int:
        self.begin(prompt, chunk)
        return int(self.last.argmax())

    def logits_of(self, tokens: list, start: int):
        ids = self.torch.tensor([tokens])
        return self.model(ids, past_key_values=self.cache, use_cache=True).logits[0].float().numpy()


if __name__ == "__main__":
    serve(hello, Engine)
