"""A dense model over a mesh of devices: each holds its share of the weights and of the cache.

Tensor parallelism of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): the projections that widen (q, k,
v, gate, up) are cut along their rows, the ones that lead back (attention output, down) along their columns, embedding
and output along the vocabulary. Every device gets the same number of key/value heads with their query heads, of FFN
neurons and of tokens. A rest that does not divide is filled up with zeros, which change nothing: a head of zeros
attends to values of zero, a neuron of zeros is multiplied by a column of zeros.

The forward function is the one of `engine.llama`, run on each device's share under `jax.shard_map`. Two products a
layer, the embedding and the logits cross devices. Partial sums are added in the order of the devices, so a row's bits
depend on their number but not on other rows (contract C1); the `xla` kernels, which promise no bits, take `psum`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as GGML
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specsparse.engine import cache as kv
from specsparse.engine import hosts, llama
from specsparse.engine.cache import KVCache
from specsparse.engine.config import PROJECTIONS, ModelConfig
from specsparse.engine.devices import Devices
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.llama import ForwardFn, Want
from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer, Params
from specsparse.errors import UserError, refuse
from specsparse.kernels import Kernels, QTensor
from specsparse.kernels.packing.pack import layout_of
from specsparse.kernels.qtensor import ROWS

AXIS = "model"
"""Name of the mesh's one axis."""
BY_ROWS = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "token_embd", "output")
"""Matrices of which each device holds some rows."""
BY_COLUMNS = ("attn_output", "ffn_down")
"""Matrices of which each device holds some columns: their products are added up over the devices."""

_ALL = Want()
_CACHE: Any = KVCache._make((P(None, AXIS), P(None, AXIS), P(), None))


def make_mesh(wanted: int | Mesh) -> Mesh:
    """A mesh of one axis: the first `wanted` devices of all processes, or the devices of a mesh in their order."""
    if isinstance(wanted, Mesh):
        return Mesh(wanted.devices.reshape(-1), (AXIS,))
    devices = jax.devices()
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= len(devices):
        hint = "; JAX_NUM_CPU_DEVICES=N makes N of a CPU" if devices[0].platform == "cpu" else ""
        found = f"JAX has {len(devices)} {devices[0].platform} device(s){hint}"
        raise UserError(f"mesh={wanted!r}: a number of devices or a jax.sharding.Mesh is needed; {found}")
    without = jax.process_count() - len({device.process_index for device in devices[:wanted]})
    refuse({
        "processes that share a model are joined by --distributed, model.distributed or specsparse.engine.hosts.joined":
            jax.process_count() != hosts.count(),
        f"{without} of {jax.process_count()} processes have none of these devices; all have {len(devices)}":
            without > 0,
    }, f"mesh={wanted}")  # fmt: skip
    return Mesh(np.array(devices[:wanted]), (AXIS,))


@dataclass(frozen=True)
class Split:
    """Sizes of a model over all devices, filled up to a multiple of their number."""

    ways: int
    # kv_heads, d_ff, vocab_size: at least the model's own
    kv_heads: int
    d_ff: int
    vocab_size: int
    heads_dim: int  # elements of the queries of all heads
    kv_dim: int  # of all keys

    @staticmethod
    def from_gguf(f: GGUFFile, config: ModelConfig, ways: int, *, floats: bool) -> "Split":
        """The split of a dense model among `ways` devices; `floats` says that its weights are kept as float32.

        A device holds whole groups of 16 rows, and of a matrix cut along its columns whole blocks (32 columns, 256 of a
        K-quant). UserError: a device would be left without a head or a neuron; the line names the numbers that would
        do."""

        def unit(name: str) -> int:
            """Columns of the matrix that are cut together, over all layers."""
            tensors = [] if floats else [f.tensors[f"blk.{i}.{name}.weight"] for i in range(config.n_layers)]
            return math.lcm(ROWS, *{layout_of(GGML(t.type)).unit for t in tensors})

        # The keys of a device's heads fill groups of 16 rows, their queries those and blocks of columns.
        queries, columns = config.n_heads // config.n_kv_heads * config.head_dim, unit("attn_output")
        heads = math.lcm(ROWS // math.gcd(ROWS, config.head_dim), columns // math.gcd(columns, queries))
        parts = {"key/value heads": (config.n_kv_heads, heads), "neurons": (config.d_ff, unit("ffn_down"))}

        def share(n: int, name: str) -> int:
            """Heads or neurons of each of `n` devices."""
            count, step = parts[name]
            return -(-count // (n * step)) * step

        def idle(n: int) -> list[str]:
            """The parts of which the last of `n` devices would get nothing."""
            return [name for name, (count, _) in parts.items() if (n - 1) * share(n, name) >= count]

        for name in idle(ways):
            good = ", ".join(str(n) for n in range(1, ways) if not idle(n))
            raise UserError(
                f"mesh={ways}: the model's {parts[name][0]} {name} in shares of {share(ways, name)} leave a device "
                f"without any; numbers of devices that would do: {good}"
            )
        kv_heads = ways * share(ways, "key/value heads")
        return Split(
            ways=ways,
            kv_heads=kv_heads,
            d_ff=ways * share(ways, "neurons"),
            vocab_size=-(-config.vocab_size // (ways * ROWS)) * ways * ROWS,
            heads_dim=kv_heads * queries,
            kv_dim=kv_heads * config.head_dim,
        )

    def size(self, name: str) -> int | None:
        """Rows of a matrix of `BY_ROWS`, columns of one of `BY_COLUMNS`, None for any other name."""
        return {
            "attn_q": self.heads_dim, "attn_k": self.kv_dim, "attn_v": self.kv_dim, "attn_output": self.heads_dim,
            **dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), self.d_ff),
            **dict.fromkeys(("token_embd", "output"), self.vocab_size),
        }.get(name)  # fmt: skip


@dataclass(frozen=True)
class MeshDevices(Devices):
    """The devices of a mesh of one axis, `AXIS`, each with its part of every matrix."""

    mesh: Mesh
    split: Split

    @property
    def ways(self) -> int:
        return self.mesh.size

    def make_forward(self, config: ModelConfig, kernels: Kernels, ffn: Callable | None) -> ForwardFn:
        inner = llama.make_forward(config, across(kernels, config.vocab_size))
        by_rows: Any = P(AXIS)
        whole: Any = P()
        specs = {**{name: _cut(name) for name in PROJECTIONS}, **{name: whole for name in config.layer_norms}}
        layer = Layer(**specs, biases={name: by_rows if name in BY_ROWS else whole for name in config.biases})
        layers = (layer,) * config.n_layers
        params_specs = Params(_cut("token_embd"), layers, whole, _cut("output"), whole, whole)

        def own(w):
            """A device's matrix with the shape of its part."""
            if not isinstance(w, QTensor):
                return w
            (rows, cols), (groups, size) = w.shape, w.data.shape
            return replace(w, shape=(rows * groups // -(-rows // ROWS), cols * size // w.layout.group_bytes(cols)))

        def forward(params: Params, tokens_Bn, cache: KVCache, *, n_valid_B=None, parents_Bn=None, want: Want = _ALL):
            if n_valid_B is None:
                n_valid_B = jnp.full((tokens_Bn.shape[0],), tokens_Bn.shape[1], jnp.int32)

            def part(params, tokens_Bn, cache, n_valid_B, parents_Bn):
                params = jax.tree.map(own, params, is_leaf=lambda x: isinstance(x, QTensor))
                out, cache = inner(params, tokens_Bn, cache, n_valid_B=n_valid_B, parents_Bn=parents_Bn, want=want)
                if out.logits is not None:
                    logits = jax.lax.all_gather(out.logits, AXIS, axis=2, tiled=True)
                    out = out._replace(logits=logits[..., : config.vocab_size])
                return out, cache

            run = jax.shard_map(
                part, mesh=self.mesh, in_specs=(params_specs, P(), _CACHE, P(), P()), out_specs=(P(), _CACHE),
                check_vma=False,  # the outputs of a kernel call are equal everywhere by our word only
            )  # fmt: skip
            return run(params, tokens_Bn, cache, n_valid_B, parents_Bn)

        return forward

    def place_tensor(self, name: str, value: Pytree) -> Pytree:
        """A tensor of the file, filled up and divided; `name` is the file's. Each process sends only its own parts."""
        short = name.split(".")[-2]
        if isinstance(value, QTensor):
            (rows, cols), whole = value.shape, self.split.size(short)
            shape = (whole or rows, cols) if short in BY_ROWS else (rows, whole or cols)
            packed = (-(-shape[0] // ROWS), value.layout.group_bytes(shape[1]))
            return QTensor(self._put(np.asarray(value.data), packed, _cut(short)), value.layout, shape)
        size, spec = value.shape, P()
        if name.endswith(".bias"):
            size = (self.split.size(short) if short in BY_ROWS else value.shape[0],)
            spec = _cut(short) if short in BY_ROWS else P()
        return self._put(np.asarray(value), size, spec)

    def everywhere(self, tree: Pytree) -> Pytree:
        """`tree` with a copy on every device of each array that is not on the mesh yet."""
        whole = NamedSharding(self.mesh, P())

        def put(leaf):
            here = isinstance(leaf, jax.Array) and getattr(leaf.sharding, "mesh", None) == self.mesh
            if here:
                return leaf
            if whole.is_fully_addressable:
                return jax.device_put(np.asarray(leaf), whole)
            return self._put(np.asarray(leaf), np.shape(leaf), P())  # device_put asks all processes whether it is equal

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


def _cut(name: str) -> Any:
    """The `PartitionSpec` in a matrix's place, of its packed bytes [groups, bytes of a group]: equal parts of a group's
    bytes are equal parts of its columns."""
    return P(AXIS) if name in BY_ROWS else P(None, AXIS) if name in BY_COLUMNS else P()


def across(kernels: Kernels, vocab_size: int) -> Kernels:
    """Kernels of one device among others.

    A product with a residual ends a block and is the sum of all devices', as are rows that are normalised and added.
    """

    def in_order(part: jax.Array) -> jax.Array:
        return functools.reduce(jnp.add, list(jax.lax.all_gather(part, AXIS)))

    def once(x: jax.Array) -> jax.Array:
        """x on the first device, zeros on the others: terms that must be added once."""
        return jnp.where(jax.lax.axis_index(AXIS) == 0, x, jnp.float32(0))

    total = functools.partial(jax.lax.psum, axis_name=AXIS) if kernels.name == "xla" else in_order

    def linear(x, weights, *, biases=None, residual=None, **options):
        if residual is None:
            return kernels.linear(x, weights, biases=biases, **options)
        mine = None if biases is None else tuple(None if b is None else once(b) for b in biases)
        (part,) = kernels.linear(x, weights, biases=mine, residual=once(residual), **options)
        return (total(part),)

    def embed(w, ids):
        row = jnp.clip(ids, 0, vocab_size - 1) - jax.lax.axis_index(AXIS) * w.shape[0]
        here = (row >= 0) & (row < w.shape[0])
        return total(jnp.where(here[:, None], kernels.embed(w, row), jnp.float32(0)))

    def add_normed(x, y, norm, **options):
        return kernels.add_normed(x, total(y), norm, **options)

    return replace(kernels, linear=linear, add_normed=add_normed, embed=embed, layers=None)
