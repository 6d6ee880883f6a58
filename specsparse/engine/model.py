"""A loaded model: configuration, tokenizer, packed weights and the forward function that belongs to them."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine import cache as kv
from specsparse.engine import rope, weights
from specsparse.engine.config import ModelConfig
from specsparse.engine.devices import Devices, OneDevice
from specsparse.engine.fixed_width import fixed_width, least_width
from specsparse.engine.llama import ForwardFn, Want
from specsparse.engine.prefill import prefill
from specsparse.engine.pytree import Pytree
from specsparse.engine.sampling import pipeline
from specsparse.engine.sampling.probs import SamplingKernels
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.engine.weights import Footprint, Params
from specsparse.errors import ContextTooLong, UserError
from specsparse.kernels import Kernels, QTensor, promise, status
from specsparse.support import notebook

KV_DTYPES = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16, "q8_0": jnp.int8}
_CAPACITY_STEP = 256  # caches come in few sizes, so that few programs are compiled
_MOST_TABLES = 16  # rotary tables that are kept: those of a long context take as much memory as a small model
Program = TypeVar("Program")
"""A compiled function, or one that is timed."""


@dataclass(eq=False)
class Programs:
    """Programs and other things of one model, made when they are first needed, and kept."""

    # programs, by what they close over and the shapes of their arguments
    compiled: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    # drafters built on the model, by spec, so that a draft model is loaded once
    drafters: dict = field(default_factory=dict)
    # rotary tables, by the capacity of the cache
    tables: dict[int, tuple[jax.Array, jax.Array]] = field(default_factory=dict)
    # the models on the same weights, by the width of their steps
    widths: dict[int, "Model"] = field(default_factory=dict)

    def once(self, key: tuple[Any, ...], make: Callable[[], Program]) -> Program:
        """The program of this key, made if there is none yet."""
        if key not in self.compiled:
            self.compiled[key] = make()
        return self.compiled[key]


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A model ready to run: facts and weights. Compared by identity.

    `forward` and `kernels` are static facts of every program, so `dataclasses.replace` makes a model with new
    `Programs`.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    params: Params  # the packed weights; the rotary tables are those of `params_for`
    forward: ForwardFn
    kernels: Kernels
    kv_dtype: str  # "f32", "f16", "bf16" or "q8_0"
    path: Path
    footprint: Footprint  # bytes of weights that one decoding step reads
    ffn: str = "dense"  # "dense", "powerinfer", "oracle" or "predicted"
    rule: str = ""  # the options of this FFN, such as a threshold or a predictor; "" for a dense one
    devices: Devices = field(default_factory=OneDevice)
    load_s: float = 0.0  # seconds that loading took
    rope_factors: np.ndarray | None = None  # f32[d/2] or None
    width: int = 0  # rows of every step (`engine.fixed_width`); 0 if each runs its own
    storage: str = ""  # how matrices are kept on an accelerator and why; "" if they are packed for a CPU
    narrow: ForwardFn | None = None  # `forward` before it got a width that was chosen here and not asked for; else None
    least_slots: int = 0  # of every cache, see `sharing`
    programs: Programs = field(default_factory=Programs, init=False)

    def facts(self) -> dict[str, str]:
        """Facts that tell this model from others, a few words each."""
        isa = f" ({status()['isa']})" if self.kernels.name == "native" else ""
        out = {
            "architecture": self.config.architecture,
            "parameters": f"{self.config.n_parameters / 1e6:,.4g}M",
            "weights": " + ".join(weights.types(self.params)),
            "context": str(self.config.context_length),
            "kernels": self.kernels.name + isa,
        }
        if self.storage:
            out["stored"] = self.storage
        if self.width:
            out["width"] = str(self.width)
        if self.ffn != "dense":
            out["ffn"] = f"{self.ffn} {self.rule}".strip()
        if self.devices.ways is not None:
            out["devices"] = str(self.devices.ways)
        return out

    def __repr__(self) -> str:
        return f"Model({self.path.name!r}, " + ", ".join(f"{k}={v!r}" for k, v in self.facts().items()) + ")"

    def _repr_html_(self) -> str:
        return notebook.table([*self.facts().items(), ("file", str(self.path))], title=self.path.name)

    @property
    def promise(self) -> str:
        """Which equality of speculative and plain text holds, and why."""
        chosen = "as asked for" if self.narrow is None else "the fewest tiles that hold a draft"
        return promise(self.kernels.name, self.width, why=chosen if self.width else "")

    def holding(self, rows: int) -> "Model":
        """The model with an automatic width that holds steps of `rows` rows: itself, or one on the same weights.

        Plain decoding and all that is compared with it run on one such model. A width that was asked for stays. There
        is one model a width, with its own programs. UserError: no width holds them."""
        if self.narrow is None or rows <= self.width:
            return self
        width, kept = least_width(rows), self.programs
        if width not in kept.widths:
            wider = dataclasses.replace(self, width=width, forward=fixed_width(self.narrow, width))
            wider.programs.tables, wider.programs.widths = kept.tables, kept.widths
            kept.widths[width] = wider
        return kept.widths[width]

    def with_own_programs(self, **changes) -> "Model":
        """`dataclasses.replace` of facts that no program closes over, such as the weights: the programs stay."""
        changed = dataclasses.replace(self, **changes)
        object.__setattr__(changed, "programs", self.programs)
        return changed

    @property
    def sampling_kernels(self) -> SamplingKernels:
        return pipeline.kernels_of(self.kernels)

    @property
    def cache_dtype(self):
        return KV_DTYPES[self.kv_dtype]

    def capacity_for(self, tokens: int) -> int:
        """Slots of a cache that holds `tokens` tokens, at least `least_slots` and at most the context."""
        rounded = -(-max(tokens, self.least_slots) // _CAPACITY_STEP) * _CAPACITY_STEP
        context = -(-self.config.context_length // kv.LANES) * kv.LANES
        return min(rounded, context)

    def sharing(self, tokens: int) -> "Model":
        """The model with one size of caches for texts of up to `tokens` tokens, and so one program for them.

        Only if steps have one width: their programs have every layer's operations in them and take long to compile, for
        each capacity anew. Other models are returned as they are.
        """
        return self.with_own_programs(least_slots=tokens + self.width) if self.width else self

    def room_for(self, drafted: int) -> int:
        """Slots that a step needs beyond what is committed; with a fixed width the same for every method."""
        return self.width or drafted

    def params_for(self, capacity: int) -> Params:
        tables = self.programs.tables
        if capacity not in tables:
            cos_sin = rope.model_tables(self.config.ropes, capacity, self.rope_factors)
            for oldest in list(tables)[: 1 - _MOST_TABLES]:
                del tables[oldest]
            tables[capacity] = self.everywhere(jax.device_put(cos_sin))
        cos, sin = tables[capacity]
        return self.params._replace(cos=cos, sin=sin)

    def everywhere(self, tree: Pytree) -> Pytree:
        return self.devices.everywhere(tree)

    def new_cache(self, batch: int, capacity: int) -> kv.KVCache:
        c = self.config
        return self.devices.new_cache(
            layers=c.n_layers, batch=batch, capacity=capacity, kv_heads=c.n_kv_heads, head_dim=c.head_dim,
            dtype=self.cache_dtype,
        )  # fmt: skip

    def check_whole(self, what: str) -> None:
        """Raises a UserError if matrices, which `what` reads on its own, are divided among devices."""
        if self.devices.ways is not None:
            raise UserError(f"{self.path}: {what} needs the whole model on one device: load it without mesh")

    def check_packed(self, what: str) -> None:
        """Raises a UserError if matrices, which `what` reads packed, are kept in another form."""
        if not isinstance(self.params.embedding, QTensor):
            raise UserError(
                f"{self.path}: {what} reads packed matrices, and {self.kernels.name} kernels keep them otherwise here: "
                "load it with backend=xla and width=0"
            )

    def check_ids(self, ids: Sequence[object] | np.ndarray) -> np.ndarray:
        """Token ids as int32[n]; raises UserError if they are not of this vocabulary, too many, or there are none."""
        try:
            array = np.asarray(ids)
        except (TypeError, ValueError):  # lists of several lengths
            array = np.asarray([[]])
        if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
            empty = "the prompt is empty: " if array.shape == (0,) else ""
            raise UserError(f"{empty}token ids must be a flat list of integers, one at least")
        outside = array[(array < 0) | (array >= self.config.vocab_size)]
        if outside.size:
            raise UserError(f"token id {outside[0]} is outside the vocabulary (0 to {self.config.vocab_size - 1})")
        if array.size > self.config.context_length:
            holds = self.config.context_length
            raise ContextTooLong(
                f"the prompt has {array.size} tokens and the context holds {holds}: shorten it, give "
                f"truncate_prompt_tokens=-1 with max_tokens under {holds}, or load it with a larger context_length"
            )
        return array.astype(np.int32)

    @property
    def logits_program(self) -> Callable:
        """One chunk: (params, tokens int32[1, n], valid int32[1], cache) -> (logits f32[n, V], the cache with them)."""

        def chunk(params, tokens, n_valid, cache):
            out, cache = self.forward(params, tokens, cache, n_valid_B=n_valid, want=Want())
            return out.logits[0], kv.commit(cache, n_valid)

        return self.programs.once(("logits",), lambda: self.devices.jit(chunk, donate_argnums=3))

    def logits(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Teacher-forced logits float32[n, V]: row i predicts the token after `ids[i]`. Raises as `check_ids`."""
        array = self.check_ids(ids)
        capacity = self.capacity_for(len(array))
        params, cache = self.params_for(capacity), self.new_cache(1, capacity)
        out = np.empty((len(array), self.config.vocab_size), np.float32)
        program = self.logits_program
        for chunk, rows, _ in prefill(lambda c, kv: program(params, *self.everywhere(c.arrays), kv), [array], cache):
            count = chunk.count[0]
            out[chunk.start : chunk.start + count] = np.asarray(rows)[:count]
        return out
