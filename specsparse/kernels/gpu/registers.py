"""What kernels do to a warpgroup's registers, on a GPU (Mosaic GPU) and in Pallas's interpreter, where values are plain
arrays and layouts say nothing."""

import jax
import jax.experimental.mosaic.gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import memref

from specsparse.kernels.gpu import jax_versions

Tiling, Replicated = mgpu.fragmented_array.Tiling, mgpu.fragmented_array.Replicated
Layout = mgpu.TiledLayout


class InArrays:
    """What a kernel does, in Pallas's interpreter. A layout says which thread has which numbers: here nothing."""

    def read(self, ref, layout: Layout) -> jax.Array:
        """What a reference holds."""
        return ref[...]

    def read_across(self, ref, layout: Layout) -> jax.Array:
        """A matrix, transposed: numbers that are beside each other in memory go to different threads."""
        return ref[...].T

    def write(self, ref, value: jax.Array, layout: Layout | None = None, order: tuple[int, ...] | None = None) -> None:
        """Stores a value; with `order`, axis i of the reference is axis order[i] of the value, which has `layout`."""
        ref[...] = value if order is None else value.transpose(order)

    def spread(self, value: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...], layout: Layout) -> jax.Array:
        """The value with its axes as `axes` of a larger array."""
        return jax.lax.broadcast_in_dim(value, shape, axes)

    def cast(self, value: jax.Array, layout: Layout) -> jax.Array:
        """A value that all threads have, such as zeros or an iota, in a layout."""
        return value


class InRegisters:
    """The same in a warpgroup's registers."""

    def read(self, ref, layout: Layout) -> jax.Array:
        """As in `InArrays`."""
        return jax_versions.mosaic_load(ref, tiled(layout))

    def read_across(self, ref, layout: Layout) -> jax.Array:
        """As in `InArrays`."""
        shape = ref.shape[::-1]

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=tiled(layout))
        )
        def run(ctx, source):
            return mgpu.FragmentedArray.build(shape, layout, lambda i, j: memref.load(source, [j, i]))

        return run(ref)

    def write(self, ref, value: jax.Array, layout: Layout | None = None, order: tuple[int, ...] | None = None) -> None:
        """As in `InArrays`."""
        if order is None:
            ref[...] = value
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), tiled(layout)))
        def run(ctx, target, registers):
            registers.foreach(lambda number, at: memref.store(number, target, [at[axis] for axis in order]))

        run(ref, value)

    def spread(self, value: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...], layout: Layout) -> jax.Array:
        """As in `InArrays`."""
        return self.cast(jax.lax.broadcast_in_dim(value, shape, axes), layout)

    def cast(self, value: jax.Array, layout: Layout) -> jax.Array:
        """As in `InArrays`."""
        return plgpu.layout_cast(value, tiled(layout))


def arrangement(tiles: tuple[tuple[int, ...], ...], warps: tuple, lanes: tuple, vector: int = -1) -> Layout:
    """A layout by its tiles and by the axes, of the tiled array, that warps, lanes and a register's numbers take."""
    return Layout(Tiling(tiles), warps, lanes, vector, _check_canonical=False).canonicalize()


def tiled(layout: Layout):
    """The layout as Pallas names it."""
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def registers(interpret: bool) -> InArrays | InRegisters:
    """Those of Pallas's interpreter, or a GPU's."""
    return InArrays() if interpret else InRegisters()
