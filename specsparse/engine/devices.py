"""The devices of a model: they make its arrays and its forward function, and compile the programs that call it."""

import abc
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from specsparse.engine import cache as kv
from specsparse.engine import llama
from specsparse.engine.cache import KVCache
from specsparse.engine.config import ModelConfig
from specsparse.engine.llama import ForwardFn
from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Params
from specsparse.kernels import Kernels
from specsparse.support.files import need_memory

_LARGE = 1 << 29  # bytes


class Devices(abc.ABC):
    """Base of `OneDevice`, `engine.mesh.MeshDevices` and `powerinfer.hot_cold.TwoDevices`."""

    @property
    def ways(self) -> int | None:
        """Devices that each matrix is divided among; None if matrices are whole."""
        return None

    @property
    def one_program(self) -> bool:
        """Whether a program may contain the forward function; if not, the host steps through it."""
        return True

    @abc.abstractmethod
    def make_forward(self, config: ModelConfig, kernels: Kernels, ffn: Callable | None) -> ForwardFn:
        """`engine.llama.make_forward` for weights and caches that were made here."""

    def place_tensor(self, name: str, value: Pytree) -> Pytree:
        """The form in which a packed tensor is kept; `name` is the file's."""
        return value

    def place(self, params: Params) -> Params:
        """All weights where the forward function reads them."""
        return params

    def everywhere(self, tree: Pytree) -> Pytree:
        """`tree` as programs take it: on a mesh, with a copy on every device."""
        return tree

    def new_cache(self, **shape) -> KVCache:
        """An empty cache; `shape` as for `engine.cache.init`. UserError: there is no memory for it."""
        if jax.default_backend() != "cpu":
            return kv.init(**shape)
        # Zeros that numpy makes: to fill a cache on the device, XLA compiles two programs for each new shape.
        empty = jax.eval_shape(partial(kv.init, **shape))
        size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(empty))
        if size > _LARGE:  # to ask the system takes longer than to make a small one
            what = f"the cache of {shape['batch']} times {shape['capacity']} tokens"
            need_memory(what, size, "give max_tokens, fewer sequences, a smaller context_length or kv_dtype")
        return jax.device_put(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), empty), may_alias=False)

    def jit(self, function: Callable, **options) -> Callable:
        """`jax.jit` for a function that calls the forward function."""
        return jax.jit(function, **options)

    def compile(self, function: Callable, *args: Pytree, donate: tuple[int, ...] = ()) -> Callable:
        """`compiled` for a function that calls the forward function."""
        return compiled(function, *args, donate=donate)


class OneDevice(Devices):
    """The default device holds all of a model."""

    def make_forward(self, config: ModelConfig, kernels: Kernels, ffn: Callable | None) -> ForwardFn:
        return llama.make_forward(config, kernels, ffn)


def compiled(function: Callable, *args: Pytree, donate: tuple[int, ...] = ()) -> Callable:
    """`function` compiled for arguments of these shapes; those at the places `donate` are given up."""
    return jax.jit(function, donate_argnums=donate).lower(*args).compile()
