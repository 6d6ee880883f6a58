"""What an EAGLE-3 head computes (Li et al., arXiv:2503.01840), as functions of arrays for decoding and training.

At position i the head reads the target's features of position i and the embedding of token i + 1, and scores the token
after it. From the second drafted token on it reads its own row in place of the features.

    g = fuse(features)                          # or again(y) of the row before
    entered = enter(embedding, g)               # q, k, v of one layer over 2 D inputs, and the residual
    y = leave(attention of q, k, v, entered.residual)
    logits = output times RMS norm(y, output_norm)

Arrays are rows: [R, ..]. The products are injected: those of `kernels` on packed weights, or any that can be
differentiated.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo
from specsparse.engine.model import Model
from specsparse.engine.rope import halves, interleaved, rope_tables
from specsparse.errors import UserError
from specsparse.kernels import QTensor
from specsparse.speculative.base import DraftContext
from specsparse.speculative.drafters.heads.feature_source import HeadState, OneLayerSource, of_target
from specsparse.speculative.drafters.heads.published import (
    EMBEDDING,
    MAX_SIZE,
    HeadKeys,
    LayerShape,
    PublishedHead,
    PublishedSpec,
    check_target,
    fields_of_arrays,
    scored,
    write_head_gguf,
)
from specsparse.speculative.drafters.sources import DraftWeights, FedRows
from specsparse.speculative.drafters.spec import Load, LoadedDrafter, bytes_of

PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""Matrices of the layer by their GGUF names."""


@dataclass(frozen=True)
class HeadShape(LayerShape):
    """Shape and options of a head.

    Attributes:
        features: how many layers' features it reads.
        norm_before_residual: the residual is the normalised row, not the row itself.
        norm_before_fc: one RMS norm over all features before they are fused.
        fc_norm: one RMS norm for each layer's features before they are fused (EAGLE-3.1).
        norm_output: what the head reads in place of features is its row after the output norm, not before (EAGLE-3.1).
        qk_norm: an RMS norm over each head of queries and keys (Qwen3).
        biases: projections with a bias.
    """

    features: int = 3
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    biases: tuple[str, ...] = ()


class Eagle3Weights(NamedTuple):
    """Weights of a head. Matrices are [outputs, inputs], packed for decoding, plain arrays for training.

    Attributes:
        fc: [D, features * target's D].
        feature_norm: [features * target's D] with `norm_before_fc`, else None.
        fc_norms: [target's D] for each layer with `fc_norm`, else ().
        token_norm, hidden_norm: [D], of the embedding and of the fused features.
        attn_q, attn_k, attn_v: [heads * head_dim, 2 D] and so on; embedding first.
        attn_output, ffn_gate, ffn_up, ffn_down: as in a Llama layer.
        ffn_norm, output_norm: [D].
        q_norm, k_norm: [head_dim] with `qk_norm`, else None.
        biases: by projection.
    """

    fc: Any
    token_norm: jax.Array
    hidden_norm: jax.Array
    attn_q: Any
    attn_k: Any
    attn_v: Any
    attn_output: Any
    ffn_norm: jax.Array
    ffn_gate: Any
    ffn_up: Any
    ffn_down: Any
    output_norm: jax.Array
    feature_norm: jax.Array | None = None
    fc_norms: tuple[jax.Array, ...] = ()
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None
    biases: dict[str, jax.Array] = {}  # noqa: RUF012 (never changed)

    def bias(self, *names: str) -> tuple[jax.Array | None, ...] | None:
        """Biases of the named projections, None where there is none at all."""
        return tuple(self.biases.get(name) for name in names) if self.biases else None


class Products(NamedTuple):
    """What the head is computed with.

    Attributes:
        linear: linear(x, weights, norm=None, biases=None, residual=None, act=None) -> a tuple of rows, as
            `kernels.reference.dense.linear` defines it.
        normalise: normalise(x, norm): RMS norm over the last axis.
    """

    linear: Callable[..., tuple[jax.Array, ...]]
    normalise: Callable[[jax.Array, jax.Array], jax.Array]


class HeadRows(NamedTuple):
    """Rows on their way into the head's attention.

    Attributes:
        q: [R, heads * head_dim], before RoPE.
        k, v: [R, kv_heads * head_dim], keys before RoPE.
        residual: [R, D].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    residual: jax.Array


def default_layers(n_layers: int) -> tuple[int, int, int]:
    """Ids of the target's layers whose incoming rows a head reads that names none."""
    return 2, n_layers // 2, n_layers - 3


def fuse(shape: HeadShape, w: Eagle3Weights, products: Products, features_RE: jax.Array) -> jax.Array:
    """g [R, D]: what the head reads of the target's features."""
    if shape.fc_norm:
        parts = jnp.split(features_RE, shape.features, axis=-1)
        parts = [products.normalise(part, norm) for part, norm in zip(parts, w.fc_norms, strict=True)]
        features_RE = jnp.concatenate(parts, axis=-1)
    (g_RD,) = products.linear(features_RE, (w.fc,), norm=w.feature_norm)
    return g_RD


def enter(shape: HeadShape, w: Eagle3Weights, products: Products, embedded_RD: jax.Array, g_RD: jax.Array) -> HeadRows:
    """Queries, keys and values of rows, and the residual to add to what attention finds."""
    normed_RD = products.normalise(g_RD, w.hidden_norm)
    both_RD = jnp.concatenate([products.normalise(embedded_RD, w.token_norm), normed_RD], axis=-1)
    names = ("attn_q", "attn_k", "attn_v")
    q, k, v = products.linear(both_RD, (w.attn_q, w.attn_k, w.attn_v), biases=w.bias(*names))
    if shape.qk_norm:
        q, k = (_by_head(products, x, norm) for x, norm in ((q, w.q_norm), (k, w.k_norm)))
    return HeadRows(q, k, v, normed_RD if shape.norm_before_residual else g_RD)


def leave(w: Eagle3Weights, products: Products, attended: jax.Array, residual_RD: jax.Array) -> jax.Array:
    """y [R, D]: the head's rows, before the output norm, of what attention found."""
    (x_RD,) = products.linear(attended, (w.attn_output,), biases=w.bias("attn_output"), residual=residual_RD)
    biases = w.bias("ffn_gate", "ffn_up")
    (h_RF,) = products.linear(x_RD, (w.ffn_gate, w.ffn_up), norm=w.ffn_norm, biases=biases, act="silu")
    (y_RD,) = products.linear(h_RF, (w.ffn_down,), biases=w.bias("ffn_down"), residual=x_RD)
    return y_RD


def again(shape: HeadShape, w: Eagle3Weights, products: Products, y_RD: jax.Array) -> jax.Array:
    """What the head reads in place of g at the next position, of its own rows y."""
    return products.normalise(y_RD, w.output_norm) if shape.norm_output else y_RD


def _by_head(products: Products, x: jax.Array, norm: jax.Array) -> jax.Array:
    return products.normalise(x.reshape(-1, norm.shape[0]), norm).reshape(x.shape)


ARCHITECTURE = "eagle3"
"""`general.architecture` of these files."""
FEATURE_NORM = "enc.output_norm.weight"
_FC_NORM = "fc_norm"  # no GGUF file has it
_FLAGS = ("norm_before_residual", "norm_before_fc")
"""Keys of GGUF files beside those of every head."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Eagle3File(PublishedHead):
    """An EAGLE-3 head as its file describes it.

    Attributes:
        shape: of the head, and its options.
        target_width: D of the target.
        layers: ids of the target's layers whose incoming rows it reads; () for 2, L/2 and L - 3 of the target's L.
        vocab_size: ids of the target.
    """

    what: ClassVar[str] = "an EAGLE-3 head with these options"

    shape: HeadShape
    target_width: int
    layers: tuple[int, ...]
    vocab_size: int

    def __post_init__(self):
        s = self.shape
        if self.layers and len(self.layers) != s.features:
            raise UserError(
                f"{self.path}: fc.weight reads {s.features} layers' features of width {self.target_width}, the file "
                f"names {len(self.layers)} layers: {', '.join(map(str, self.layers))}"
            )
        if not self.layers and s.features != 3:
            raise UserError(f"{self.path}: fc.weight reads {s.features} layers' features, and the file names no layers")
        self.check(tensor_shapes(s, self.target_width), most_ids=self.vocab_size)


def of_arrays(
    arrays: Mapping[str, np.ndarray],
    shape: HeadShape,
    *,
    target: ModelConfig,
    layers: tuple[int, ...],
    rope_factors: np.ndarray | None = None,
    ids: np.ndarray | None = None,
    path: Path = Path("head"),
) -> Eagle3File:
    """A head of arrays, such as a trained one: rotation, context and vocabulary are the target's.

    Args:
        arrays: float32 by the GGUF names of `tensor_shapes`, queries and keys as in transformers; without
            `token_embd.weight` and `output.weight` those of the target.
        shape: of the head.
        target: the target's config.
        layers: ids of the target's layers whose incoming rows it reads.
        rope_factors: of the target's rotation, where it has any.
        ids: int[N], the target's ids of the rows of the output matrix; None for all.
        path: names it in messages.

    Raises:
        UserError: an array is missing, is of another shape, or is none of a head's.
    """
    return Eagle3File(
        **fields_of_arrays(arrays, ids, path),
        shape=shape,
        target_width=target.d_model,
        layers=layers,
        rope=replace(target.rope, dim=shape.head_dim, pairing="neox"),
        rope_factors=rope_factors,
        context=target.context_length,
        vocab_size=target.vocab_size,
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


def features_of(fc: tuple[int, ...] | None, target_width: int, where: Path) -> int:
    """How many layers' features a matrix of that shape reads.

    Raises:
        UserError: it is missing, or no multiple of the target's width.
    """
    if fc is None or len(fc) != 2 or not fc[1] or fc[1] % target_width:
        found = "is missing" if fc is None else f"is {fc}"
        raise UserError(f"{where}: tensor fc.weight {found}; it reads some layers' features of width {target_width}")
    return fc[1] // target_width


def read_gguf(f: GGUFFile) -> Eagle3File:
    """A head of an open GGUF file.

    Raises:
        UserError: another architecture, a key or tensor that is missing or wrong, or an option that is not known.
    """
    keys = HeadKeys(f, ARCHITECTURE, "EAGLE-3 head", _FLAGS)
    if keys.size("block_count") != 1:
        raise UserError(f"{f.path}: has {keys.size('block_count')} layers; an EAGLE-3 head of one layer is supported")
    sizes, known = keys.of_layers(), keys.of_file()
    target_width = keys.size("target_hidden_size", sizes["width"])
    tokens, embedding = f.get("tokenizer.ggml.tokens", "strings", None), f.tensors.get(EMBEDDING)
    rows = len(tokens or ()) or MAX_SIZE if embedding is None else embedding.shape[0]

    def load(name: str) -> TensorInfo:
        heads = _turned_heads(name, shape)
        t = f.tensors[name]
        if heads is None:
            return t
        by_row = t.raw.reshape(t.shape[0], -1)  # of a bias, one element each
        return replace(t, raw=halves(by_row, heads).reshape(t.raw.shape))

    shape = HeadShape(
        **sizes,
        features=features_of(known["tensors"].get("fc.weight"), target_width, f.path),
        **{flag: keys.flag(flag) for flag in _FLAGS},
        qk_norm="blk.0.attn_q_norm.weight" in f.tensors,
        biases=tuple(name for name in PROJECTIONS if f"blk.0.{name}.bias" in f.tensors),
    )
    return Eagle3File(
        **known,
        shape=shape,
        target_width=target_width,
        layers=keys.layers,
        vocab_size=keys.size("vocab_size", rows),
        load=load,
    )


def _turned_heads(name: str, shape: HeadShape) -> int | None:
    """How many heads the rows of a tensor are of, where llama.cpp rotates neighbours; None for other tensors."""
    return {"blk.0.attn_q": shape.heads, "blk.0.attn_k": shape.kv_heads}.get(name.rpartition(".")[0])


def write_eagle3_gguf(
    file: Eagle3File, path: Path, *, tokenizer: Mapping[str, object], quant: str = "F32", name: str = ""
) -> Path:
    """Writes a head as GGUF; the arguments are those of `published.write_head_gguf`.

    Raises:
        UserError: a type that cannot be written, or an option of the head that llama.cpp has no key for.
    """
    s = file.shape
    for option in ("fc_norm", "norm_output", "qk_norm"):
        if getattr(s, option):
            raise UserError(
                f"{file.path}: {option} has no place in a GGUF file: llama.cpp loads one and computes something else; "
                "write the original form or that of speculators"
            )
    if not file.layers:
        raise UserError(
            f"{file.path}: names no layers (eagle_aux_hidden_state_layer_ids), and a GGUF file must: give the target"
        )
    own = {
        "block_count": 1,
        "vocab_size": file.vocab_size,
        "target_layers": list(file.layers),
        "target_hidden_size": file.target_width,
        **{flag: getattr(s, flag) for flag in _FLAGS},
    }

    def values(name: str) -> np.ndarray:
        heads = _turned_heads(name, s)
        return file.values(name) if heads is None else interleaved(file.values(name), heads)

    return write_head_gguf(
        file, path, own, architecture=ARCHITECTURE, tokenizer=tokenizer, quant=quant, name=name, values=values
    )


class Eagle3Params(NamedTuple):
    """What a head drafts with, beside its output matrix.

    Attributes:
        head: its weights.
        cos, sin: f32[1, C, head_dim / 2], its own rotary table.
        embedding: QTensor [V, D], or None for the target's.
    """

    head: Eagle3Weights
    cos: jax.Array
    sin: jax.Array
    embedding: QTensor | None


@dataclasses.dataclass(frozen=True)
class Eagle3Source(OneLayerSource):
    """A head of three layers' features.

    Attributes:
        shape: of the head.
        layers: ids of the target's layers whose incoming rows it reads.
    """

    shape: HeadShape
    layers: tuple[int, ...]

    wants_hidden = property(attrgetter("layers"))

    def read(self, weights: DraftWeights, hidden_BnE: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        batch, n, width = hidden_BnE.shape
        with jax.named_scope("head/fuse"):
            features_RE = hidden_BnE.reshape(batch * n, width)
            g_RD = fuse(self.shape, weights.params.head, self._products(n_valid_B), features_RE)
        return g_RD.reshape(batch, n, -1)

    def again(self, weights: DraftWeights, y_BnD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """Its own rows, normalised where the head was trained so."""
        y_RD, products = y_BnD.reshape(-1, y_BnD.shape[-1]), self._products(n_valid_B)
        return again(self.shape, weights.params.head, products, y_RD).reshape(y_BnD.shape)

    def run(
        self, weights: DraftWeights, ctx: DraftContext, state: HeadState, read_BnD: jax.Array, rows: FedRows
    ) -> tuple[jax.Array, HeadState]:
        """One layer that reads embedding and features side by side."""
        batch, n, width = read_BnD.shape
        params: Eagle3Params = weights.params
        w, products = params.head, self._products(rows.n_valid)
        embedding = ctx.params.embedding if params.embedding is None else params.embedding
        with jax.named_scope("head"):
            e_RD = self.kernels.embed(embedding, self.vocab.to_draft(rows.tokens).reshape(-1))
            entered = enter(self.shape, w, products, e_RD, read_BnD.reshape(batch * n, width))
            out, k, v = self.kernels.attend(
                entered.q, entered.k, entered.v, state.k[0], state.v[0], cos=params.cos, sin=params.sin,
                length=state.length, n_valid=rows.n_valid, parents=rows.parents, pairing="neox",
            )  # fmt: skip
            y_RD = leave(w, products, out, entered.residual)
        return y_RD.reshape(batch, n, width), state._replace(k=(k,), v=(v,))

    def logits(self, weights: DraftWeights, y_BnD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        norm = weights.params.head.output_norm
        with jax.named_scope("head/output"):
            logits_RN = self.score_rows(weights, y_BnD, n_valid_B, norm=norm, eps=self.shape.eps)
        return logits_RN.reshape(*y_BnD.shape[:2], -1)

    def _products(self, n_valid_B: jax.Array) -> Products:
        eps = self.shape.eps

        def linear(x, weights, **options):
            return self.kernels.linear(x, weights, eps=eps, n_valid=n_valid_B, **options)

        return Products(linear, lambda x, norm: self.kernels.normalise(x, norm, eps=eps))


@dataclasses.dataclass(frozen=True)
class Eagle3(PublishedSpec):
    """One layer on the features of three of the target's layers, as other projects publish it (EAGLE-3,
    arXiv:2503.01840), with the target's embedding and output matrix where its file has none."""

    reader = "specsparse.models.convert.heads:read_eagle3"

    def build(self, target: Model, load: Load) -> LoadedDrafter:
        file = self.head_file(load)
        c, shape = target.config, file.shape
        layers = file.layers or default_layers(c.n_layers)
        check_target(file, target, layers=layers, width=file.target_width)
        floats = target.kernels.name != "native"
        weights, columns = scored(file, self.drafting, target, floats=floats)
        head = _packed(file, floats=floats)
        embedding = file.matrix("token_embd", floats=floats) if EMBEDDING in file.tensors else None
        source = Eagle3Source(
            **of_target(target, columns),
            width=shape.width,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            tree_rows=0 if self.drafting.shape is None else self.drafting.shape.max_rows,
            shape=shape,
            layers=layers,
        )

        @functools.cache
        def weights_for(capacity: int) -> DraftWeights:
            cos, sin = rope_tables(file.rope, capacity, file.rope_factors)
            return weights._replace(
                params=Eagle3Params(head, jnp.asarray(cos)[None], jnp.asarray(sin)[None], embedding)
            )

        return LoadedDrafter(self.drafting.drafter(source, target), weights_for, bytes_of(head, weights.head))


def _packed(file: Eagle3File, *, floats: bool) -> Eagle3Weights:
    s, vector = file.shape, file.vector
    return Eagle3Weights(
        fc=file.matrix("fc", floats=floats),
        token_norm=vector("blk.0.attn_norm.weight"),
        hidden_norm=vector("blk.0.attn_norm_2.weight"),
        ffn_norm=vector("blk.0.ffn_norm.weight"),
        output_norm=vector("output_norm.weight"),
        feature_norm=vector(FEATURE_NORM) if s.norm_before_fc else None,
        fc_norms=tuple(vector(f"fc_norm.{i}.weight") for i in range(s.features)) if s.fc_norm else (),
        q_norm=vector("blk.0.attn_q_norm.weight") if s.qk_norm else None,
        k_norm=vector("blk.0.attn_k_norm.weight") if s.qk_norm else None,
        biases={name: vector(f"blk.0.{name}.bias") for name in s.biases},
        **{name: file.matrix(f"blk.0.{name}", floats=floats) for name in PROJECTIONS},
    )
