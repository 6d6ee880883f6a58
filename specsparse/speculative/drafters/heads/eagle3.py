"""EAGLE-3 heads (Li et al., arXiv:2503.01840): the computation, for decoding and training; the file; the drafter.

At position i the head reads the target's features of position i and the embedding of token i + 1, and scores the token
after it. From the second drafted token on it reads its own row in place of the features.

    g = fuse(features)                          # or again(y) of the row before
    entered = enter(embedding, g)               # q, k, v of one layer over 2 D inputs, and the residual
    y = leave(attention of q, k, v, entered.residual)
    logits = output times RMS norm(y, output_norm)

Arrays are rows: [R, ..]. The products are injected: those of `kernels` on packed weights, or any that can be
differentiated.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.config import PROJECTIONS, ModelConfig
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo
from specsparse.engine.model import Model
from specsparse.engine.rope import halves, interleaved
from specsparse.errors import UserError
from specsparse.speculative.base import DraftContext
from specsparse.speculative.drafters.heads.feature_source import HeadState, OneLayerSource
from specsparse.speculative.drafters.heads.published import (
    EMBEDDING,
    MAX_SIZE,
    HeadKeys,
    LayerShape,
    PublishedHead,
    PublishedSpec,
    PublishedWeights,
)
from specsparse.speculative.drafters.sources import DraftWeights, FedRows
from specsparse.speculative.drafters.spec import Load, LoadedDrafter
from specsparse.support.files import Json


@dataclass(frozen=True)
class HeadShape(LayerShape):
    features: int = 3  # how many layers' features it reads
    norm_before_residual: bool = False  # the residual is the normalised row, not the row itself
    norm_before_fc: bool = False  # one RMS norm over all features before they are fused
    fc_norm: bool = False  # one RMS norm for each layer's features before they are fused (EAGLE-3.1)
    # in place of features the head reads its row after the output norm, not before (EAGLE-3.1)
    norm_output: bool = False
    qk_norm: bool = False  # an RMS norm over each head of queries and keys (Qwen3)
    biases: tuple[str, ...] = ()  # projections with a bias


class Eagle3Weights(NamedTuple):
    """Weights of a head. Matrices are [outputs, inputs], packed for decoding, plain arrays for training.

    Names that a Llama layer has too are of the same shapes.
    """

    fc: Any  # [D, features * target's D]
    # token_norm, hidden_norm: [D], of the embedding and of the fused features
    token_norm: jax.Array
    hidden_norm: jax.Array
    # attn_q, attn_k, attn_v: [heads * head_dim, 2 D] and so on; embedding first
    attn_q: Any
    attn_k: Any
    attn_v: Any
    attn_output: Any
    ffn_norm: jax.Array
    ffn_gate: Any
    ffn_up: Any
    ffn_down: Any
    output_norm: jax.Array
    feature_norm: jax.Array | None = None  # [features * target's D] with `norm_before_fc`, else None
    fc_norms: tuple[jax.Array, ...] = ()  # [target's D] for each layer with `fc_norm`, else ()
    # q_norm, k_norm: [head_dim] with `qk_norm`, else None
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None
    biases: dict[str, jax.Array] = {}  # noqa: RUF012 (by projection; never changed)

    def bias(self, *names: str) -> tuple[jax.Array | None, ...] | None:
        """Biases of the named projections, or None if the head has no bias."""
        return tuple(self.biases.get(name) for name in names) if self.biases else None


class Products(NamedTuple):
    # linear(x, weights, norm=None, biases=None, residual=None, act=None) -> a tuple of rows, as
    # `kernels.reference.dense.linear` defines it
    linear: Callable[..., tuple[jax.Array, ...]]
    normalise: Callable[[jax.Array, jax.Array], jax.Array]  # normalise(x, norm): RMS norm over the last axis


class HeadRows(NamedTuple):
    """Rows on their way into the head's attention."""

    q: jax.Array  # [R, heads * head_dim], before RoPE
    # k, v: [R, kv_heads * head_dim], keys before RoPE
    k: jax.Array
    v: jax.Array
    residual: jax.Array  # [R, D]


def default_layers(n_layers: int) -> tuple[int, int, int]:
    """Ids of the target's layers whose incoming rows a head reads if its file names no layers."""
    return 2, n_layers // 2, n_layers - 3


def fuse(shape: HeadShape, w: Eagle3Weights, products: Products, features_RE: jax.Array) -> jax.Array:
    """The head's input of the target's features, g [R, D]."""
    if shape.fc_norm:
        parts = jnp.split(features_RE, shape.features, axis=-1)
        parts = [products.normalise(part, norm) for part, norm in zip(parts, w.fc_norms, strict=True)]
        features_RE = jnp.concatenate(parts, axis=-1)
    (g_RD,) = products.linear(features_RE, (w.fc,), norm=w.feature_norm)
    return g_RD


def enter(shape: HeadShape, w: Eagle3Weights, products: Products, embedded_RD: jax.Array, g_RD: jax.Array) -> HeadRows:
    """Queries, keys and values of rows, and the residual to add to the attention's output."""
    normed_RD = products.normalise(g_RD, w.hidden_norm)
    both_RD = jnp.concatenate([products.normalise(embedded_RD, w.token_norm), normed_RD], axis=-1)
    names = ("attn_q", "attn_k", "attn_v")
    q, k, v = products.linear(both_RD, (w.attn_q, w.attn_k, w.attn_v), biases=w.bias(*names))
    if w.q_norm is not None and w.k_norm is not None:
        by_head = ((x, x.reshape(-1, shape.head_dim), norm) for x, norm in ((q, w.q_norm), (k, w.k_norm)))
        q, k = (products.normalise(x_Rd, norm).reshape(x.shape) for x, x_Rd, norm in by_head)
    return HeadRows(q, k, v, normed_RD if shape.norm_before_residual else g_RD)


def leave(w: Eagle3Weights, products: Products, attended: jax.Array, residual_RD: jax.Array) -> jax.Array:
    """The head's rows before the output norm, y [R, D]."""
    (x_RD,) = products.linear(attended, (w.attn_output,), biases=w.bias("attn_output"), residual=residual_RD)
    biases = w.bias("ffn_gate", "ffn_up")
    (h_RF,) = products.linear(x_RD, (w.ffn_gate, w.ffn_up), norm=w.ffn_norm, biases=biases, act="silu")
    (y_RD,) = products.linear(h_RF, (w.ffn_down,), biases=w.bias("ffn_down"), residual=x_RD)
    return y_RD


def again(shape: HeadShape, w: Eagle3Weights, products: Products, y_RD: jax.Array) -> jax.Array:
    """The head's input in place of g at the next position, of its own rows y."""
    return products.normalise(y_RD, w.output_norm) if shape.norm_output else y_RD


FEATURE_NORM = "enc.output_norm.weight"
_FC_NORM = "fc_norm"  # no GGUF file has it
_FLAGS = ("norm_before_residual", "norm_before_fc")  # keys of GGUF files beside those of every head


@dataclass(frozen=True, eq=False, kw_only=True)
class Eagle3File(PublishedHead):
    architecture: ClassVar[str] = "eagle3"
    what: ClassVar[str] = "an EAGLE-3 head with these options"

    shape: HeadShape
    target_width: int  # D of the target
    # ids of the target's layers whose incoming rows it reads; () for 2, L/2 and L - 3 of the target's L
    layers: tuple[int, ...]
    vocab_size: int  # ids of the target

    def __post_init__(self):
        features, layers = self.shape.features, self.layers
        self.check_tensors(tensor_shapes(self.shape, self.target_width), most_ids=self.vocab_size)
        if features != (len(layers) or 3):
            named = f"{len(layers)} layers: {', '.join(map(str, layers))}" if layers else "no layers"
            raise UserError(
                f"{self.path}: fc.weight reads {features} layers' features of width {self.target_width}, the file "
                f"names {named}"
            )

    @classmethod
    def for_target(cls, arrays: Mapping[str, np.ndarray], target: ModelConfig, *, shape: HeadShape, **facts) -> Self:
        """`from_arrays` with the target's rotation, context and vocabulary. Queries and keys are as in transformers."""
        return cls.from_arrays(
            arrays,
            shape=shape,
            target_width=target.d_model,
            rope=replace(target.rope, dim=shape.head_dim, pairing="neox"),
            context=target.context_length,
            vocab_size=target.vocab_size,
            **facts,
        )

    def gguf_keys(self) -> Json:
        s = self.shape
        unknown = [option for option in ("fc_norm", "norm_output", "qk_norm") if getattr(s, option)]
        if unknown or not self.layers:
            what = unknown[0] if unknown else "a head without layers (eagle_aux_hidden_state_layer_ids)"
            raise UserError(
                f"{self.path}: {what} has no place in a GGUF file: write the original form or that of speculators, or "
                "give the target whose layers it reads"
            )
        return {
            "block_count": 1,
            "vocab_size": self.vocab_size,
            "target_layers": list(self.layers),
            "target_hidden_size": self.target_width,
            **{flag: getattr(s, flag) for flag in _FLAGS},
        }

    def gguf_values(self, name: str) -> np.ndarray:
        heads = _interleaved_heads(name, self.shape)
        return self.values(name) if heads is None else interleaved(self.values(name), heads)

    def packed(self, ids: np.ndarray, *, floats: bool) -> Eagle3Weights:
        def part(name: str) -> Any:
            return self.part(name, floats=floats)

        s = self.shape
        return Eagle3Weights(
            fc=part("fc.weight"),
            token_norm=part("blk.0.attn_norm.weight"),
            hidden_norm=part("blk.0.attn_norm_2.weight"),
            ffn_norm=part("blk.0.ffn_norm.weight"),
            output_norm=part("output_norm.weight"),
            feature_norm=part(FEATURE_NORM) if s.norm_before_fc else None,
            fc_norms=tuple(part(f"{_FC_NORM}.{i}.weight") for i in range(s.features)) if s.fc_norm else (),
            q_norm=part("blk.0.attn_q_norm.weight") if s.qk_norm else None,
            k_norm=part("blk.0.attn_k_norm.weight") if s.qk_norm else None,
            biases={name: part(f"blk.0.{name}.bias") for name in s.biases},
            **{name: part(f"blk.0.{name}.weight") for name in PROJECTIONS},
        )


def tensor_shapes(shape: HeadShape, target_width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a head of that shape must have."""
    D, F, q, kv = shape.width, shape.d_ff, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "fc.weight", (D, shape.features * target_width)
    if shape.norm_before_fc:
        yield FEATURE_NORM, (shape.features * target_width,)
    if shape.fc_norm:
        yield from ((f"{_FC_NORM}.{i}.weight", (target_width,)) for i in range(shape.features))
    for name in ("attn_norm", "attn_norm_2", "ffn_norm"):
        yield f"blk.0.{name}.weight", (D,)
    sizes = {
        "attn_q": (q, 2 * D), "attn_k": (kv, 2 * D), "attn_v": (kv, 2 * D), "attn_output": (D, q),
        "ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F),
    }  # fmt: skip
    for name in PROJECTIONS:
        yield f"blk.0.{name}.weight", sizes[name]
        if name in shape.biases:
            yield f"blk.0.{name}.bias", sizes[name][:1]
    if shape.qk_norm:
        yield from ((f"blk.0.{name}.weight", (shape.head_dim,)) for name in ("attn_q_norm", "attn_k_norm"))
    yield "output_norm.weight", (D,)


def read_gguf(f: GGUFFile) -> Eagle3File:
    """A head of an open GGUF file; UserError for another architecture, an unknown option, and for a key or tensor that
    is missing or wrong."""
    keys = HeadKeys(f, Eagle3File.architecture, "EAGLE-3 head", _FLAGS)
    if keys.size("block_count") != 1:
        raise UserError(f"{f.path}: has {keys.size('block_count')} layers; an EAGLE-3 head of one layer is supported")
    sizes = keys.sizes()
    known, target_width = keys.fields(sizes["head_dim"]), keys.size("target_hidden_size", sizes["width"])
    tokens, embedding = f.get("tokenizer.ggml.tokens", "strings", None), f.tensors.get(EMBEDDING)
    rows = len(tokens or ()) or MAX_SIZE if embedding is None else embedding.shape[0]

    def load(name: str) -> TensorInfo:
        heads, t = _interleaved_heads(name, shape), f.tensors[name]
        if heads is None:
            return t
        by_row = t.raw.reshape(t.shape[0], -1)  # of a bias, one element each
        return replace(t, raw=halves(by_row, heads).reshape(t.raw.shape))

    shape = HeadShape(
        **sizes,
        features=(known["tensors"].get("fc.weight") or (0,))[-1] // target_width,
        **{flag: keys.flag(flag) for flag in _FLAGS},
        qk_norm="blk.0.attn_q_norm.weight" in f.tensors,
        biases=tuple(name for name in PROJECTIONS if f"blk.0.{name}.bias" in f.tensors),
    )
    return Eagle3File(
        **known,
        shape=shape,
        target_width=target_width,
        layers=tuple(keys.numbers("target_layers", "layers").tolist()),
        vocab_size=keys.size("vocab_size", rows),
        load=load,
    )


def _interleaved_heads(name: str, shape: HeadShape) -> int | None:
    """Heads in the rows of a tensor if llama.cpp rotates neighbours there; None for other tensors."""
    return {"blk.0.attn_q": shape.heads, "blk.0.attn_k": shape.kv_heads}.get(name.rpartition(".")[0])


@dataclass(frozen=True)
class Eagle3Source(OneLayerSource):
    """A head of three layers' features."""

    shape: HeadShape
    layers: tuple[int, ...]  # ids of the target's layers whose incoming rows it reads

    wants_hidden = property(attrgetter("layers"))

    def read(self, weights: DraftWeights, hidden_BnE: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        batch, n, width = hidden_BnE.shape
        with jax.named_scope("head/fuse"):
            features_RE = hidden_BnE.reshape(batch * n, width)
            g_RD = fuse(self.shape, weights.params.layers, self._products(n_valid_B), features_RE)
        return g_RD.reshape(batch, n, -1)

    def again(self, weights: DraftWeights, y_BnD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        y_RD, products = y_BnD.reshape(-1, y_BnD.shape[-1]), self._products(n_valid_B)
        return again(self.shape, weights.params.layers, products, y_RD).reshape(y_BnD.shape)

    def run(
        self, weights: DraftWeights, ctx: DraftContext, state: HeadState, read_BnD: jax.Array, rows: FedRows
    ) -> tuple[jax.Array, HeadState]:
        """One layer that reads embedding and features side by side."""
        batch, n, width = read_BnD.shape
        params: PublishedWeights = weights.params
        w, products = params.layers, self._products(rows.n_valid)
        embedding = ctx.params.embedding if params.embedding is None else params.embedding
        with jax.named_scope("head"):
            e_RD = self.kernels.embed(embedding, self.vocab.to_draft(rows.tokens).reshape(-1))
            entered = enter(self.shape, w, products, e_RD, read_BnD.reshape(batch * n, width))
            out, k, v = self.kernels.attend(
                entered.q, entered.k, entered.v, state.k[0], state.v[0], cos=params.cos[None], sin=params.sin[None],
                length=state.length, n_valid=rows.n_valid, parents=rows.parents, pairing="neox",
            )  # fmt: skip
            y_RD = leave(w, products, out, entered.residual)
        return y_RD.reshape(batch, n, width), state._replace(k=(k,), v=(v,))

    def _products(self, n_valid_B: jax.Array) -> Products:
        return Products(
            functools.partial(self.kernels.linear, eps=self.eps, n_valid=n_valid_B),
            functools.partial(self.kernels.normalise, eps=self.eps),
        )


@dataclass(frozen=True)
class Eagle3(PublishedSpec):
    """One layer on the features of three of the target's layers, as other projects publish it (EAGLE-3,
    arXiv:2503.01840), with the target's embedding and output matrix if its file has none."""

    reader = "specsparse.models.convert.heads:read_eagle3"

    def build(self, target: Model, load: Load) -> LoadedDrafter:
        file = self.head_file(load)
        layers, shape = file.layers or default_layers(target.config.n_layers), file.shape
        file.check_target(target, layers=layers, width=file.target_width)
        make = functools.partial(
            Eagle3Source,
            width=shape.width,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            tree_rows=0 if self.drafting.shape is None else self.drafting.shape.max_rows,
            shape=shape,
            layers=layers,
        )
        return self.loaded(file, target, make)
