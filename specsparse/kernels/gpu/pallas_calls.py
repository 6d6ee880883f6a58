"""Calls of Pallas's Mosaic GPU that differ between jax's versions (0.10 and later), and between a GPU's registers and
Pallas's interpreter, where values are plain arrays and layouts mean nothing."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import memref

Tiling, Replicated = mgpu.fragmented_array.Tiling, mgpu.fragmented_array.Replicated
Layout = mgpu.TiledLayout


def mosaic_kernel(
    body: Callable[..., None], *, out: jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...], scratch: list,
    num_threads: int, interpret: bool, **grid: Any,
) -> Callable[..., Any]:  # fmt: skip
    """`plgpu.kernel`: `out_shape` and `scratch_shapes` became `out_type` and `scratch_types`.

    Kernels are lowered thread by thread: 0.12 lowers whole warpgroups by default. `interpret` runs the kernel on a CPU,
    very slowly; `grid` are `grid`, `grid_names` and `thread_name`.
    """
    suffix = "type" if "out_type" in inspect.signature(plgpu.kernel).parameters else "shape"
    options: dict[str, Any] = {f"out_{suffix}": out, f"scratch_{suffix}s": scratch}
    if interpret:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # it has no public name yet

        options["interpret"] = InterpretGPUParams()
    by_thread = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    return plgpu.kernel(body, **options, num_threads=num_threads, compiler_params=by_thread, **grid)


def meet(barrier) -> None:
    """Waits for the other warpgroups of the block."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


class InArrays:
    """The operations of a kernel in Pallas's interpreter. Layouts, which say where numbers lie, are ignored."""

    def read(self, ref, layout: Layout) -> jax.Array:
        return ref[...]

    def read_across(self, ref, layout: Layout) -> jax.Array:
        """A matrix, transposed: neighbours in memory go to different threads."""
        return ref[...].T

    def write(self, ref, value: jax.Array, layout: Layout | None = None, order: tuple[int, ...] = ()) -> None:
        """Stores a value; with `order`, axis i of the reference is axis order[i] of the value, which has `layout`."""
        ref[...] = value.transpose(order) if order else value

    def spread(self, value: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...], layout: Layout) -> jax.Array:
        """The value with its axes as `axes` of a larger array."""
        return jax.lax.broadcast_in_dim(value, shape, axes)

    def cast(self, value: jax.Array, layout: Layout) -> jax.Array:
        """A value that all threads have, such as zeros or an iota, in a layout."""
        return value


class InRegisters:
    """The same operations in a warpgroup's registers."""

    def read(self, ref, layout: Layout) -> jax.Array:
        index = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()  # of 0.10
        return plgpu.load(ref, *index, layout=tiled(layout), optimized=False)

    def read_across(self, ref, layout: Layout) -> jax.Array:
        shape = ref.shape[::-1]

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=tiled(layout))
        )
        def run(ctx, source):
            return mgpu.FragmentedArray.build(shape, layout, lambda i, j: memref.load(source, [j, i]))

        return run(ref)

    def write(self, ref, value: jax.Array, layout: Layout | None = None, order: tuple[int, ...] = ()) -> None:
        if layout is None:
            ref[...] = value
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), tiled(layout)))
        def run(ctx, target, registers):
            registers.foreach(lambda number, at: memref.store(number, target, [at[axis] for axis in order]))

        run(ref, value)

    def spread(self, value: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...], layout: Layout) -> jax.Array:
        return self.cast(jax.lax.broadcast_in_dim(value, shape, axes), layout)

    def cast(self, value: jax.Array, layout: Layout) -> jax.Array:
        return plgpu.layout_cast(value, tiled(layout))


def arrangement(tiles: tuple[tuple[int, ...], ...], warps: tuple, lanes: tuple, vector: int = -1) -> Layout:
    """A layout by its tiles and by the axes, of the tiled array, that warps, lanes and a register's numbers take."""
    return Layout(Tiling(tiles), warps, lanes, vector, _check_canonical=False).canonicalize()


def tiled(layout: Layout):
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def registers(interpret: bool) -> InArrays | InRegisters:
    return InArrays() if interpret else InRegisters()
