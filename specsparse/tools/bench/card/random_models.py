"""The plan of the stages, and models with random weights of a catalogue model's shape, made on the device."""

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as GGML

from specsparse import kernels
from specsparse.engine.config import ModelConfig
from specsparse.engine.devices import OneDevice
from specsparse.engine.fixed_width import fixed_width
from specsparse.engine.model import Model
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.engine.weights import Footprint, Layer, Params
from specsparse.errors import UserError
from specsparse.kernels import Fragments, Matrix, QTensor
from specsparse.kernels.gpu import fragments
from specsparse.kernels.gpu.weights import Kept, plain
from specsparse.kernels.packing.dequant import pack_float
from specsparse.kernels.packing.pack import layout_of
from specsparse.kernels.qtensor import BLOCK, ROWS, Layout
from specsparse.measure.costs.roofline import config_from_shape
from specsparse.models import catalogue
from specsparse.models.catalogue import Shape

TINY = Shape("llama", layers=2, width=64, heads=4, kv_heads=2, ff=96, vocab=256, context=256, weights="Q8_0")
"""For the tests of the bench itself."""
WIDTHS = (kernels.TILE_ROWS, 2 * kernels.TILE_ROWS)
"""Rows of the padded steps that are compared; tiny plans take the first."""
_CODES_STD = {"nibble": math.sqrt((16**2 - 1) / 12), "int8": math.sqrt((256**2 - 1) / 12)}


@dataclasses.dataclass(frozen=True)
class CardPlan:
    """The options of every stage."""

    device: str = "gpu"  # "gpu", "tpu" or "cpu"
    tiny: bool = False  # shapes for the tests of the bench itself
    layers: int | None = None  # of the large shape; None is all
    tokens: int = 64  # to decode
    repeats: int = 3  # timings of each figure
    backend: str | None = None  # of the kernels; None is the default of the device

    @property
    def small(self) -> str:
        return "tiny" if self.tiny else "smollm2-135m"

    @property
    def large(self) -> str:
        return "tiny" if self.tiny else "llama-2-7b"


class _NoText:
    """In place of a tokenizer: these models write ids."""

    stop_ids = frozenset[int]()

    def encode(self, *_: object, **__: object) -> list[int]:
        raise UserError("a model made from its shape has no vocabulary")


def shape_of(name: str) -> Shape:
    """The shape of a catalogue model that has one, or "tiny"."""
    entry = None if name == "tiny" else catalogue.find(name)
    shape = TINY if name == "tiny" else entry and entry.shape
    assert shape is not None, f"{name}: the catalogue has no shape of it"
    return shape


def random_model(
    name: str, kind: str, *, layers: int | None = None, backend: str | None = None, width: int | None = None
) -> Model:
    """A model of a shape of the catalogue, or "tiny", with random weights on the default device.

    All matrices are of one GGUF type: a float, or one with a scale a block and nothing else, as Q4_0 and Q8_0. `width`
    is the rows of every step; None is the automatic one, `kernels.TILE_ROWS` if kernels need one; 0 is none.
    """
    shape = shape_of(name)
    shape = shape if layers is None else dataclasses.replace(shape, layers=layers)
    config, chosen = config_from_shape(name, shape), kernels.get(backend)
    params, nbytes = random_params(config, kind, chosen.kept)
    forward = OneDevice().make_forward(config, chosen, None)
    model = Model(
        config=config, tokenizer=cast(Tokenizer, _NoText()), params=params, forward=forward, kernels=chosen,
        kv_dtype="bf16" if kind == "BF16" else "f16", path=Path(f"{name}.{kind}"), footprint=Footprint(nbytes, nbytes),
    )  # fmt: skip
    width = kernels.automatic_width(chosen.name) if width is None else width
    return wide(model, width) if width else model


def wide(model: Model, width: int) -> Model:
    """The model with steps of `width` rows, on the same weights; 0 is none."""
    narrow = model.narrow or model.forward
    forward = fixed_width(narrow, width) if width else narrow
    return dataclasses.replace(model, forward=forward, narrow=narrow if width else None, width=width)


def padded(model: Model) -> Model:
    """The model if its steps have a width, else with steps of `kernels.TILE_ROWS` rows."""
    return model if model.width else wide(model, kernels.TILE_ROWS)


def random_params(config: ModelConfig, kind: str, kept: Kept | None = None) -> tuple[Params, int]:
    """Weights of a Llama without biases, and the bytes of them that a step reads; `kept` as in `random_matrix`."""
    made: dict[str, jax.Array | Matrix] = {}
    for i, (name, shape) in enumerate(config.tensor_shapes()):
        std = 1.0 if "embd" in name else None
        one = len(shape) == 1
        made[name] = jnp.ones(shape, jnp.float32) if one else random_matrix(i, kind, shape, std=std, kept=kept)
    layers = []
    for i in range(config.n_layers):
        prefix = f"blk.{i}."
        own = {n.split(".")[2]: t for n, t in made.items() if n.startswith(prefix)}
        layers.append(Layer(**own, biases={}))
    embedding = made["token_embd.weight"]
    output = embedding if config.tied_output else made["output.weight"]
    params = Params(embedding, tuple(layers), made["output_norm.weight"], output)
    read = [t.nbytes for name, t in made.items() if name != "token_embd.weight"]
    return params, sum(read) + (output.nbytes if config.tied_output else 0)


def random_matrix(
    seed: int, kind: str, shape: tuple[int, int], *, std: float | None = None, kept: Kept | None = None
) -> Matrix:
    """A random matrix of a GGUF type, packed where it is made, on the default device.

    The type is a float or has one f16 scale a block of 32. `std` of the weights is 1 / sqrt(columns) by default; `kept`
    is how the kernels keep matrices, `Kernels.kept`.
    """
    layout = layout_of(GGML[kind])
    std = shape[1] ** -0.5 if std is None else std
    if kept is not None and (layout.is_float or kept == "bf16"):
        return plain(_normal(seed, std, shape=shape), layout)
    if layout.is_float:
        return pack_float(_normal(seed, std, shape=shape), layout.codes)  # type: ignore[arg-type]
    assert layout.scales == "d" and layout.codes in _CODES_STD and not layout.lut, f"{kind}: has no single scale"
    if kept is not None:
        return _fragments(seed, std / _CODES_STD[layout.codes], layout=layout, shape=shape)
    scale = np.float16(std / _CODES_STD[layout.codes]).tobytes()
    return QTensor(_blocks(seed, scale=scale, layout=layout, shape=shape), layout, shape)


@partial(jax.jit, static_argnames="shape")
def _normal(seed: int, std: float, *, shape: tuple[int, int]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32) * std


@partial(jax.jit, static_argnames=("layout", "shape"))
def _fragments(seed: int, scale: float, *, layout: Layout, shape: tuple[int, int]) -> Fragments:
    """One scale for all blocks, random codes."""
    like = fragments.abstract(layout, shape)
    codes = jax.random.bits(jax.random.key(seed), like.codes.shape, jnp.uint32)
    scales = jnp.broadcast_to(jnp.asarray(scale).astype(like.scales.dtype), like.scales.shape)
    return Fragments(jax.lax.bitcast_convert_type(codes, jnp.int32), scales, None, layout, shape)


@partial(jax.jit, static_argnames=("scale", "layout", "shape"))
def _blocks(seed: int, *, scale: bytes, layout: Layout, shape: tuple[int, int]) -> jax.Array:
    """`QTensor.data` of a matrix with one f16 scale, of these bytes, for all blocks and random codes.

    The packed layouts have a block's scales before its codes: uint8[groups, blocks * (2 * ROWS + bytes of codes)].
    """
    groups, blocks = -(-shape[0] // ROWS), shape[1] // BLOCK
    size = layout.group_bytes(shape[1]) // blocks - 2 * ROWS
    codes = jax.random.bits(jax.random.key(seed), (groups, blocks, size), jnp.uint8)
    scales = jnp.broadcast_to(jnp.asarray(np.frombuffer(scale * ROWS, np.uint8)), (groups, blocks, 2 * ROWS))
    return jnp.concatenate([scales, codes], axis=2).reshape(groups, -1)
