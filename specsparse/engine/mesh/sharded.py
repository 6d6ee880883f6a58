"""A dense model over a mesh of devices: each holds its share of the weights and of the cache (see `engine.mesh.split`).

The forward function is the one of `engine.llama`, run on each device's share under `jax.shard_map`. Two products a
layer, the embedding and the logits cross devices. What is added up is added in the order of the devices, so a row's
bits depend on their number but not on other rows (contract C1); the `xla` kernels, which promise no bits, take `psum`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specsparse.engine import cache as kv
from specsparse.engine import llama
from specsparse.engine.cache import KVCache
from specsparse.engine.config import PROJECTIONS, ModelConfig
from specsparse.engine.devices import Devices
from specsparse.engine.llama import ForwardFn, Want
from specsparse.engine.mesh.split import BY_COLUMNS, BY_ROWS, Split
from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer, Params
from specsparse.errors import UserError
from specsparse.kernels import Kernels, QTensor
from specsparse.kernels.qtensor import ROWS

AXIS = "model"
"""Name of the mesh's one axis."""

_ALL = Want()
_CACHE = KVCache(k=P(None, AXIS), v=P(None, AXIS), length=P())  # type: ignore[arg-type]


def mesh_of(wanted: int | Mesh) -> Mesh:
    """A mesh of one axis: the first `wanted` devices of all processes, or the devices of a mesh in their order.

    Raises:
        UserError: neither of these, or more devices than there are.
    """
    if isinstance(wanted, Mesh):
        return Mesh(wanted.devices.reshape(-1), (AXIS,))
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise UserError(f"mesh={wanted!r}: a number of devices or a jax.sharding.Mesh is needed")
    devices = jax.devices()
    if len(devices) < wanted:
        hint = f"; JAX_NUM_CPU_DEVICES={wanted} makes as many of a CPU" if devices[0].platform == "cpu" else ""
        raise UserError(f"mesh={wanted}: JAX has {len(devices)} {devices[0].platform} device(s){hint}")
    return Mesh(np.array(devices[:wanted]), (AXIS,))


@dataclass(frozen=True)
class MeshDevices(Devices):
    """The devices of a mesh, each with its part of every matrix.

    Attributes:
        mesh: of one axis, `AXIS`.
        split: the sizes of the parts.
    """

    mesh: Mesh
    split: Split

    @property
    def ways(self) -> int:
        """Devices of the mesh."""
        return self.mesh.size

    def make_forward(self, config: ModelConfig, kernels: Kernels, ffn: Callable | None) -> ForwardFn:
        """The forward function of a dense model over the mesh."""
        return make_forward(config, kernels, self.mesh)

    def place_tensor(self, name: str, value: Pytree) -> Pytree:
        """A tensor of the file, filled up and divided; `name` is the file's. Each process sends only its own parts."""
        short = name.split(".")[-2]
        if isinstance(value, QTensor):
            shape = (self.split.rows(short) or value.shape[0], self.split.columns(short) or value.shape[1])
            packed = (-(-shape[0] // ROWS), value.layout.group_bytes(shape[1]))
            return QTensor(self._put(np.asarray(value.data), packed, _matrix(short)), value.layout, shape)
        size = (self.split.rows(short) or value.shape[0],) if name.endswith(".bias") else value.shape
        return self._put(np.asarray(value), size, _bias(short) if name.endswith(".bias") else P())

    def everywhere(self, tree: Pytree) -> Pytree:
        """`tree` with a copy on every device of what is not on the mesh yet."""
        whole = NamedSharding(self.mesh, P())

        def put(leaf):
            here = isinstance(leaf, jax.Array) and getattr(leaf.sharding, "mesh", None) == self.mesh
            return leaf if here else jax.device_put(np.asarray(leaf), whole)

        return jax.tree.map(put, tree)

    def new_cache(self, **shape) -> KVCache:
        """`engine.cache.init` with the heads of the split in place of `kv_heads`; no device ever holds all of it."""
        return _cache_program(self.mesh, **{**shape, "kv_heads": self.split.kv_heads})()

    def _put(self, array: np.ndarray, shape: tuple[int, ...], spec: P) -> jax.Array:
        """`array` filled up with zeros, on the mesh."""
        if array.shape != shape:
            array = np.pad(array, [(0, wanted - got) for wanted, got in zip(shape, array.shape, strict=True)])
        sharding = NamedSharding(self.mesh, spec)
        # A view would keep the other processes' parts in this one's memory.
        cut = array.__getitem__ if sharding.is_fully_addressable else lambda index: array[index].copy()
        return jax.make_array_from_callback(shape, sharding, cut)


@functools.cache
def _cache_program(mesh: Mesh, **shape) -> Callable[[], KVCache]:
    """One program for all caches of a shape: a new function would be compiled again for every sequence."""
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), _CACHE)
    return jax.jit(lambda: kv.init(**shape), out_shardings=shardings)


def _matrix(name: str) -> P:
    """Of the packed bytes [groups, bytes of a group]: equal parts of a group's bytes are equal parts of its columns."""
    return P(AXIS) if name in BY_ROWS else P(None, AXIS) if name in BY_COLUMNS else P()


def _bias(name: str) -> P:
    return P(AXIS) if name in BY_ROWS else P()


def _specs(config: ModelConfig) -> Params:
    """Where each parameter is cut; a specification of a matrix is that of its bytes."""
    layer = Layer(
        **{name: _matrix(name) for name in PROJECTIONS},
        **{name: P() for name in config.layer_norms},
        biases={name: _bias(name) for name in config.biases},
    )  # type: ignore[arg-type]
    out = _matrix("output")
    return Params(_matrix("token_embd"), (layer,) * config.n_layers, P(), out, P(), P())  # type: ignore[arg-type]


def make_forward(config: ModelConfig, kernels: Kernels, mesh: Mesh) -> ForwardFn:
    """`engine.llama.make_forward` of a dense model over a mesh; parameters and cache are those of `MeshDevices`."""
    inner = llama.make_forward(config, across(kernels, config.vocab_size))

    def forward(params: Params, tokens_Bn, cache: KVCache, *, n_valid_B=None, parents_Bn=None, want: Want = _ALL):
        if n_valid_B is None:
            n_valid_B = jnp.full((tokens_Bn.shape[0],), tokens_Bn.shape[1], jnp.int32)

        def part(params, tokens_Bn, cache, n_valid_B, parents_Bn):
            out, cache = inner(_own(params), tokens_Bn, cache, n_valid_B=n_valid_B, parents_Bn=parents_Bn, want=want)
            if out.logits is not None:
                logits = jax.lax.all_gather(out.logits, AXIS, axis=2, tiled=True)
                out = out._replace(logits=logits[..., : config.vocab_size])
            return out, cache

        run = jax.shard_map(
            part, mesh=mesh, in_specs=(_specs(config), P(), _CACHE, P(), P()), out_specs=(P(), _CACHE),
            check_vma=False,  # what comes out of a kernel call is equal everywhere by our word only
        )  # fmt: skip
        return run(params, tokens_Bn, cache, n_valid_B, parents_Bn)

    return forward


def _own(params: Params) -> Params:
    """A device's parameters, each matrix with the shape of its part."""

    def part(w):
        if not isinstance(w, QTensor):
            return w
        (rows, cols), (groups, size) = w.shape, w.data.shape
        own = (rows * groups // -(-rows // ROWS), cols * size // w.layout.group_bytes(cols))
        return replace(w, shape=own)

    return jax.tree.map(part, params, is_leaf=lambda x: isinstance(x, QTensor))


def across(kernels: Kernels, vocab_size: int) -> Kernels:
    """Kernels of one device among others. A product with a residual ends a block, or rows that are
    normalised and added: they are the sum of all devices'."""
    total = functools.partial(jax.lax.psum, axis_name=AXIS) if kernels.name == "xla" else _in_order

    def linear(x, weights, *, biases=None, residual=None, **options):
        if residual is None:
            return kernels.linear(x, weights, biases=biases, **options)
        mine = None if biases is None else tuple(None if b is None else _first(b) for b in biases)
        (part,) = kernels.linear(x, weights, biases=mine, residual=_first(residual), **options)
        return (total(part),)

    def embed(w, ids):
        row = jnp.clip(ids, 0, vocab_size - 1) - jax.lax.axis_index(AXIS) * w.shape[0]
        here = (row >= 0) & (row < w.shape[0])
        return total(jnp.where(here[:, None], kernels.embed(w, row), jnp.float32(0)))

    def add_normed(x, y, norm, **options):
        return kernels.add_normed(x, total(y), norm, **options)

    return replace(kernels, linear=linear, add_normed=add_normed, embed=embed, layers=None)


def _first(x: jax.Array) -> jax.Array:
    """x on the first device, zeros on the others: what must be added once."""
    return jnp.where(jax.lax.axis_index(AXIS) == 0, x, jnp.float32(0))


def _in_order(part: jax.Array) -> jax.Array:
    """The sum over the devices, first to last."""
    parts = jax.lax.all_gather(part, AXIS)
    return functools.reduce(jnp.add, list(parts))
