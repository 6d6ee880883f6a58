"""What jax's versions call differently, in one place: 0.10 and what came after."""

import inspect
from collections.abc import Callable
from typing import Any

import jax


def mosaic_kernel(
    body: Callable[..., None],
    *,
    out: jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...],
    scratch: list,
    num_threads: int,
    interpret: bool,
    **grid: Any,
) -> Callable[..., Any]:
    """`pallas.mosaic_gpu.kernel`: `out_shape` and `scratch_shapes` became `out_type` and `scratch_types`.

    Kernels are lowered thread by thread: 0.12 lowers whole warpgroups unless it is told. `interpret` runs the kernel on
    a CPU; `grid` are `grid`, `grid_names` and `thread_name`.
    """
    from jax.experimental.pallas import mosaic_gpu

    names = inspect.signature(mosaic_gpu.kernel).parameters
    given = dict(
        zip(("out_type", "scratch_types") if "out_type" in names else ("out_shape", "scratch_shapes"), (out, scratch))
    )
    if interpret:
        given["interpret"] = _interpreter()
    by_thread = mosaic_gpu.CompilerParams(lowering_semantics=mosaic_gpu.LoweringSemantics.Lane)
    return mosaic_gpu.kernel(body, **given, num_threads=num_threads, compiler_params=by_thread, **grid)


def _interpreter() -> Any:
    """Parameters of the interpreter of Mosaic GPU kernels, which has no public name yet."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def mosaic_load(ref: Any, layout: Any) -> jax.Array:
    """`pallas.mosaic_gpu.load` of a whole reference into registers of that layout; 0.10 wants an index."""
    from jax.experimental.pallas import mosaic_gpu

    index = ((),) if "idx" in inspect.signature(mosaic_gpu.load).parameters else ()
    return mosaic_gpu.load(ref, *index, layout=layout, optimized=False)
