"""DFlash drafters (arXiv:2602.06036): a block of rows over keys and values of the context; the file; the drafter.

A layer is one of Qwen3. Its keys and values are projections of two kinds of rows: the target's features of the context,
fused by one matrix, and the block's own rows [last token, mask, mask, ...]; its queries are of the block only. So the
context is read once, and the whole block is drafted in one pass.

The products are an argument, `kernels.Kernels.linear` or `training.layer.linear`, so that the same lines decode
with quantised weights and are differentiated in float32 (`training.dflash_form`).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine import cache as kv
from specsparse.engine.cache import LANES, KVCache
from specsparse.engine.config import MAX_CONTEXT
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError, refuse
from specsparse.kernels import QTensor
from specsparse.kernels.reference.dense import append, rms_norm, rotate
from specsparse.speculative.base import MAX_GAMMA, DraftContext
from specsparse.speculative.drafters.heads.feature_source import FeatureSource, pick
from specsparse.speculative.drafters.heads.published import (
    EMBEDDING,
    MAX_SIZE,
    OUTPUT,
    HeadKeys,
    LayerShape,
    PublishedHead,
    PublishedSpec,
    PublishedWeights,
)
from specsparse.speculative.drafters.sources import DraftWeights, FedRows
from specsparse.speculative.drafters.spec import Load, LoadedDrafter
from specsparse.speculative.trees.base import TreeShape, node_depths
from specsparse.support.files import Json
from specsparse.support.options import Range

_HIGHEST = jax.lax.Precision.HIGHEST
_NOT = -1e30

Linear = Callable[..., tuple[jax.Array, ...]]
"""(x f32[R, I], matrices, *, norm, eps, residual, act) -> f32[R, O] of each, as `kernels.reference.dense.linear`."""
Matrix = QTensor | jax.Array
"""[outputs, inputs]: packed for the kernels, or float32 for `training.layer.linear`."""


@dataclass(frozen=True)
class BlockShape(LayerShape):
    # layers of the target whose incoming rows are fused, in order; its number of layers stands for the rows that leave
    # the last one
    features: tuple[int, ...]
    feature_width: int  # of one of them, the target's width
    windows: tuple[int | None, ...]  # of each layer, positions that a row sees back, its own among them; None for all
    causal: tuple[bool, ...]  # of each layer, whether a row of the block sees only those before it and itself
    # whether a window is the same for all rows of a block: so many positions before its first row, and the block
    # itself. So the library speculators trains; llama.cpp counts from each row
    windows_of_block: bool = False
    pairing: str = "neox"  # of the rotation

    @property
    def layers(self) -> int:
        return len(self.windows)


class BlockLayer(NamedTuple):
    """Norms f32[D], of heads f32[d], and matrices of a layer."""

    attn_norm: jax.Array
    attn_q: Matrix
    attn_k: Matrix
    attn_v: Matrix
    attn_q_norm: jax.Array
    attn_k_norm: jax.Array
    attn_output: Matrix
    ffn_norm: jax.Array
    ffn_gate: Matrix
    ffn_up: Matrix
    ffn_down: Matrix


class BlockWeights(NamedTuple):
    """The weights of a drafter, without embedding and output matrix, which are mostly the target's."""

    fc: Matrix  # [D, features * feature_width]
    hidden_norm: jax.Array  # f32[D], after it
    layers: tuple[BlockLayer, ...]
    output_norm: jax.Array  # f32[D]
    markov: Any = None  # `dspark.MarkovWeights`, or None


class BlockKeys(NamedTuple):
    """Rotated keys, and values, of R rows in one layer: f32[R, G, d] each."""

    k: jax.Array
    v: jax.Array


Each = Callable[..., jax.Array]
"""(function of a row of each array, arrays) -> the function's results by row: all at once, or one after the other."""


def at_once(function: Callable[..., jax.Array], *rows: jax.Array) -> jax.Array:
    """The function of all rows as one batch, whose bits may depend on how many there are."""
    return jax.vmap(function)(*rows)


def one_by_one(function: Callable[..., jax.Array], *rows: jax.Array) -> jax.Array:
    """The function of each row by itself, so that its bits are its own (contract C1)."""
    return jax.lax.map(lambda row: function(*row), rows)


Attend = Callable[[int, jax.Array, BlockKeys], jax.Array]
"""(layer, queries f32[R, H, d] of the block's rows, their own keys and values) -> f32[R, H * d]."""


def context_keys(
    linear: Linear, shape: BlockShape, w: BlockWeights, features_RE: jax.Array, cos_RP: jax.Array, sin_RP: jax.Array,
    each: Each = at_once,
) -> list[BlockKeys]:  # fmt: skip
    """Keys and values of rows of the context in every layer.

    `features_RE` are the target's rows side by side, f32[R, features * feature_width], and `cos_RP`, `sin_RP` the
    rotation at their positions, f32[R, d/2]. `each` takes the norms of heads over the rows.
    """
    (fused_RD,) = linear(features_RE, (w.fc,))
    found = []
    for layer in w.layers:
        k, v = linear(fused_RD, (layer.attn_k, layer.attn_v), norm=w.hidden_norm, eps=shape.eps)
        found.append(_keys(shape, layer, k, v, cos_RP, sin_RP, each))
    return found


def block_rows(
    linear: Linear, shape: BlockShape, w: BlockWeights, x_RD: jax.Array, cos_RP: jax.Array, sin_RP: jax.Array,
    attend: Attend, each: Each = at_once,
) -> jax.Array:  # fmt: skip
    """Rows of blocks after all layers, before the output norm, f32[R, D], of their embedded tokens `x_RD`.

    `cos_RP` and `sin_RP` are the rotation at their positions, f32[R, d/2]. `attend` is attention over the context and
    the block, and `each` takes the norms of heads over the rows.
    """
    for i, layer in enumerate(w.layers):
        with jax.named_scope(f"block{i}"):
            q, k, v = linear(
                x_RD, (layer.attn_q, layer.attn_k, layer.attn_v), norm=layer.attn_norm, eps=shape.eps
            )  # fmt: skip
            q_RHd = _heads(shape, q, layer.attn_q_norm, cos_RP, sin_RP, each)
            out = attend(i, q_RHd, _keys(shape, layer, k, v, cos_RP, sin_RP, each))
            (x_RD,) = linear(out, (layer.attn_output,), residual=x_RD)
            (h,) = linear(x_RD, (layer.ffn_gate, layer.ffn_up), norm=layer.ffn_norm, eps=shape.eps, act="silu")
            (x_RD,) = linear(h, (layer.ffn_down,), residual=x_RD)
    return x_RD


def masked_attention(
    shape: BlockShape, q_nHd: jax.Array, keys: Sequence[BlockKeys], seen_nm: Sequence[jax.Array]
) -> jax.Array:
    """Attention of each query over the keys that it sees, at least one, of several lots: f32[n, H * d]."""
    q = q_nHd.reshape(len(q_nHd), shape.kv_heads, -1, shape.head_dim) * (shape.head_dim**-0.5)
    scores = [
        jnp.where(seen[None, None], jnp.einsum("ngid,mgd->ginm", q, key.k, precision=_HIGHEST), _NOT)
        for key, seen in zip(keys, seen_nm, strict=True)
    ]
    p = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    v_mGd = jnp.concatenate([key.v for key in keys])
    return jnp.einsum("ginm,mgd->ngid", p, v_mGd, precision=_HIGHEST).reshape(len(q_nHd), -1)


def sees_context(
    shape: BlockShape, layer: int, begin_n: jax.Array, row: jax.Array | int, context_m: jax.Array
) -> jax.Array:
    """Whether rows see keys at positions `context`, which stand before their blocks: bool[n, m]. They are rows `row`,
    int32[n] or one number, of blocks that begin at positions `begin`."""
    window, back_nm = shape.windows[layer], begin_n[:, None] - context_m[None]
    if window is None:
        return back_nm >= 0
    if shape.windows_of_block:
        return (back_nm >= 0) & (back_nm <= window)
    return (back_nm >= 0) & (back_nm + jnp.asarray(row, jnp.int32).reshape(-1, 1) < window)


def sees_block(shape: BlockShape, layer: int, rows: int) -> jax.Array:
    """Whether a row of a block sees another row of it: bool[n, n]."""
    window, ahead = shape.windows[layer], jnp.arange(rows)[None] - jnp.arange(rows)[:, None]
    seen = ahead <= 0 if shape.causal[layer] else jnp.ones((rows, rows), bool)
    return seen if window is None or shape.windows_of_block else seen & (abs(ahead) < window)


def _heads(shape: BlockShape, x_RO: jax.Array, norm_d: jax.Array, cos_RP, sin_RP, each: Each) -> jax.Array:
    """Heads, each normed, then rotated: f32[R, heads, d]."""

    def row(x_O, cos_P, sin_P):
        x_Hd = rms_norm(x_O.reshape(-1, shape.head_dim), norm_d, shape.eps)
        return rotate(x_Hd, cos_P[None], sin_P[None], shape.pairing)

    return each(row, x_RO, cos_RP, sin_RP)


def _keys(shape: BlockShape, layer: BlockLayer, k_RO, v_RO, cos_RP, sin_RP, each: Each) -> BlockKeys:
    k_RGd = _heads(shape, k_RO, layer.attn_k_norm, cos_RP, sin_RP, each)
    return BlockKeys(k_RGd, v_RO.reshape(v_RO.shape[0], -1, shape.head_dim))


MASK = "tokenizer.ggml.mask_token_id"
MAX_BLOCK = 64
"""Most rows of a block."""
OWN_KEYS = ("attention.causal", "attention.sliding_window", "attention.sliding_window_pattern", "block_size",
            "sample_from_anchor")  # fmt: skip
"""Keys beside those of every head."""
_OTHERS = {
    "selector_hidden.weight": "DFlash2 (convolutions and a selector of candidates)",
    "layer_fusion": "DFly (a fusion by layer)",
    "blk.0.attn_sinks.weight": "a drafter with attention sinks",
}
"""Tensors by which to tell drafters of other kinds that share the architecture's name."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DFlashFile(PublishedHead):
    architecture: ClassVar[str] = "dflash"
    what: ClassVar[str] = "a DFlash drafter"

    shape: BlockShape
    block_size: int  # rows of a block, the last token among them
    mask_token: int  # id that stands for the tokens to draft
    from_anchor: bool  # whether the last token's own row drafts too, and so each row the token after its position
    # embedding_scale, logit_scale: factors of embedded tokens and of logits
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float = 0.0  # logits x become softcap * tanh(x / softcap); 0 for none

    def __post_init__(self):
        least, other = 1 if self.from_anchor else 2, [kind for name, kind in _OTHERS.items() if name in self.tensors]
        refuse({
            f"block_size={self.block_size} must lie in {least}..{MAX_BLOCK}": not least <= self.block_size <= MAX_BLOCK,
            f"mask_token_id={self.mask_token} is no token id": not 0 <= self.mask_token < MAX_SIZE,
            f"is {' and '.join(other)}, which is not supported: DFlash and DSpark are": other,
        }, self.path)  # fmt: skip
        self.check_tensors(self.wanted(), most_ids=MAX_SIZE)

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor that it must have."""
        return tensor_shapes(self.shape)

    @property
    def drafts(self) -> int:
        return self.block_size - (0 if self.from_anchor else 1)

    def gguf_keys(self) -> Json:
        s = self.shape
        windows = {window for window in s.windows if window is not None}
        inexpressible = {
            "embedding_scale": self.embedding_scale != 1.0,
            "logit_scale": self.logit_scale != 1.0,
            "softcap": self.softcap != 0.0,
            "sliding_attention beside full_attention, which sees the whole block,": len(set(s.causal)) > 1,
            "ids without an output matrix": self.ids is not None and OUTPUT not in self.tensors,
            f"layers with windows of {sorted(windows)}": len(windows) > 1,
            "a window that is the same for all rows of a block": bool(windows) and s.windows_of_block,
        }
        said = "no place in a dflash GGUF file; write safetensors"
        refuse({f"{what}: {said}": found for what, found in inexpressible.items()}, self.path)
        sliding = {
            "attention.sliding_window": min(windows, default=0),
            "attention.sliding_window_pattern": np.array([window is not None for window in s.windows]),
        }
        return {
            "block_count": s.layers,
            "attention.causal": s.causal[0],
            "block_size": self.block_size,
            "sample_from_anchor": self.from_anchor,
            "target_layers": list(s.features),
            MASK: self.mask_token,
            **(sliding if windows else {}),
        }

    def packed(self, ids: np.ndarray, *, floats: bool) -> BlockWeights:
        def part(name: str) -> Any:
            return self.part(f"{name}.weight", floats=floats)

        layers = range(self.shape.layers)
        return BlockWeights(
            fc=part("fc"),
            hidden_norm=part("enc.output_norm"),
            layers=tuple(BlockLayer(*(part(f"blk.{i}.{name}") for name in BlockLayer._fields)) for i in layers),
            output_norm=part("output_norm"),
        )


def tensor_shapes(shape: BlockShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a drafter must have."""
    D, F, d = shape.width, shape.d_ff, shape.head_dim
    q, kv = shape.heads * d, shape.kv_heads * d
    yield "fc.weight", (D, len(shape.features) * shape.feature_width)
    yield "enc.output_norm.weight", (D,)
    yield "output_norm.weight", (D,)
    layer = {
        "attn_norm": (D,), "attn_q": (q, D), "attn_k": (kv, D), "attn_v": (kv, D), "attn_q_norm": (d,),
        "attn_k_norm": (d,), "attn_output": (D, q), "ffn_norm": (D,), "ffn_gate": (F, D), "ffn_up": (F, D),
        "ffn_down": (D, F),
    }  # fmt: skip
    for i in range(shape.layers):
        yield from ((f"blk.{i}.{name}.weight", size) for name, size in layer.items())


def read_gguf(f: GGUFFile) -> DFlashFile:
    """A drafter of an open GGUF file; UserError for another architecture, and for a key or tensor that is missing,
    wrong or of a drafter of another kind."""
    return DFlashFile(**gguf_fields(HeadKeys(f, DFlashFile.architecture, "DFlash drafter", OWN_KEYS)))


def gguf_fields(keys: HeadKeys, *, from_anchor: bool = False) -> Json:
    """The fields of a `DFlashFile`; `from_anchor` holds where the file does not say."""
    f, sizes, layers = keys.f, keys.sizes(), keys.size("block_count", most=1 << 10)
    features, fields = tuple(keys.numbers("target_layers", "layers").tolist()), keys.fields(sizes["head_dim"])
    fused = (fields["tensors"].get("fc.weight") or (0,))[-1]
    window, pattern = f.get(f"{keys.architecture}.attention.sliding_window", "int", 0), [False] * layers
    if window:
        key = "attention.sliding_window_pattern"
        pattern = keys.numbers(key, f"whether each of the {layers} layers slides", "iub").tolist()[:layers]
    if not features or len(pattern) < layers or not 0 <= window <= MAX_CONTEXT:
        wrong = "attention.sliding_window_pattern" if features else "target_layers"
        raise UserError(f"{f.path}: metadata key '{keys.architecture}.{wrong}' is missing, too short or out of range")
    shape = BlockShape(
        **sizes,
        features=features,
        feature_width=keys.size("target_hidden_size", max(fused // len(features), 1)),
        windows=tuple(window if slides else None for slides in pattern),
        causal=(keys.flag("attention.causal"),) * layers,
    )
    return {
        **fields,
        "shape": shape,
        "block_size": keys.size("block_size", 16, most=MAX_BLOCK),
        "mask_token": f.get(MASK, "int"),
        "from_anchor": keys.flag("sample_from_anchor", from_anchor),
        "load": f.tensors.__getitem__,
        "target": f.get("general.base_model.0.name", "str", ""),
    }


class BlockDraft(NamedTuple):
    """The state while a draft is made, its length counting the drafted tokens too; f32[B, m, N] logits of the m
    positions after the last token; `dspark.MarkovRows`, or None."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    length: jax.Array
    logits: jax.Array
    markov: Any = None


@dataclass(frozen=True)
class BlockSource(FeatureSource):
    """A block drafter with a cache of the context's keys and values. Static."""

    shape: BlockShape
    rows: int  # of a block
    skipped: int  # rows of a block that draft nothing: 1, or 0 if the last token's own row drafts
    mask_token: int  # id of the other rows
    tree: TreeShape | None = None  # the shape of the trees it drafts, None for chains
    # embedding_scale, logit_scale, softcap: as in `DFlashFile`
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float = 0.0

    independent = True
    wants_hidden = property(attrgetter("shape.features"))

    @property
    def drafted_at_once(self) -> int:
        return self.rows - self.skipped

    @property
    def keys_per_token(self) -> int:
        return self.shape.windows.count(None) * self.shape.kv_heads * self.shape.head_dim // self.drafted_at_once

    def capacity(self, tokens: int) -> int:
        """Slots of its cache beside a target's of `tokens`: a block and its last row's copies lie behind them."""
        return -(-(tokens + 2 * self.rows) // LANES) * LANES

    def empty(self, batch: int, tokens: int) -> KVCache:
        s, capacity = self.shape, self.capacity(tokens)
        heads = {"kv_heads": s.kv_heads, "head_dim": s.head_dim}
        return kv.init(layers=s.layers, batch=batch, capacity=capacity, dtype=self.kv_dtype, **heads)

    def room(self, weights: DraftWeights, state: KVCache, ctx: DraftContext) -> jax.Array:
        """Up to the end of the context and of the cache; for a chain no more than a block drafts."""
        left_B = min(self.context, ctx.tokens.shape[1]) - ctx.length + 1
        return jnp.minimum(left_B, self.drafted_at_once) if self.tree is None else left_B

    def open(
        self, weights: DraftWeights, state: KVCache, ctx: DraftContext, live_B: jax.Array
    ) -> tuple[BlockDraft, jax.Array]:
        draft, _ = self.block(weights, state, ctx, live_B)
        return draft, draft.logits[:, 0]

    def block(
        self, weights: DraftWeights, state: KVCache, ctx: DraftContext, live_B: jax.Array
    ) -> tuple[BlockDraft, jax.Array]:
        """The block's logits, of as many positions as the budget asks for, and its rows before the output norm, f32[B,
        n, D]."""
        batch, n, D = ctx.tokens.shape[0], self.rows, self.shape.width
        p: PublishedWeights = weights.params
        last_B1 = pick(ctx.tokens, ctx.length[:, None] - 1)
        masks_Bn = jnp.full((batch, n - 1), self.mask_token, jnp.int32)
        tokens_R = jnp.concatenate([last_B1, masks_Bn], axis=1).reshape(-1)
        at_R = (state.length[:, None] + jnp.arange(n, dtype=jnp.int32)[None]).reshape(-1)
        with jax.named_scope("dflash"):
            embedding = ctx.params.embedding if p.embedding is None else p.embedding
            x_RD = self.kernels.embed(embedding, tokens_R) * jnp.float32(self.embedding_scale)
            valid_B = jnp.where(live_B, n, 0)
            keys, values = list(state.k), list(state.v)

            def attend(i: int, q_RHd: jax.Array, own: BlockKeys) -> jax.Array:
                args = (q_RHd, own, keys[i], values[i], state.length, valid_B)
                chain = self.shape.causal[i] and not self.shape.windows_of_block
                if self.shape.windows[i] is not None and not chain:
                    return self._attend_window(i, *args)
                out_RO, keys[i], values[i] = self._attend_all(i, *args)
                return out_RO

            linear = functools.partial(self.kernels.linear, n_valid=valid_B)
            cos, sin = _pick_rows(p.cos, at_R), _pick_rows(p.sin, at_R)
            y_RD = block_rows(linear, self.shape, p.layers, x_RD, cos, sin, attend, one_by_one)
        wanted_B = jnp.minimum(ctx.budget, self.drafted_at_once if self.tree is None else self.tree.max_depth)
        y_BnD = y_RD.reshape(batch, n, D)
        logits_BmN = self.logits(weights, y_BnD[:, self.skipped :], jnp.where(live_B, wanted_B, 0))
        if self.logit_scale != 1.0:
            logits_BmN = logits_BmN * jnp.float32(self.logit_scale)
        if self.softcap > 0:
            logits_BmN = jnp.tanh(logits_BmN / jnp.float32(self.softcap)) * jnp.float32(self.softcap)
        return BlockDraft(tuple(keys), tuple(values), state.length, logits_BmN), y_BnD

    def feed(
        self, weights: DraftWeights, ctx: DraftContext, cache: BlockDraft, rows: FedRows
    ) -> tuple[jax.Array, BlockDraft]:
        """Logits by position alone: those after a node of depth i are of position i, whatever the draft holds."""
        return pick(cache.logits, self.depths(ctx, cache.length, rows)), cache

    def depths(self, ctx: DraftContext, length_B: jax.Array, rows: FedRows) -> jax.Array:
        """int32[B, n]: of the rows that are fed, 1 for a child of the root; `length` is the cache's."""
        if rows.parents is None:
            return (length_B - ctx.length + 2)[:, None]
        assert self.tree is not None
        return node_depths(rows.parents, max_depth=self.tree.max_depth)

    def close(
        self, weights: DraftWeights, state: KVCache, cache: BlockDraft, ctx: DraftContext
    ) -> tuple[KVCache, Pytree]:
        return KVCache(cache.k, cache.v, state.length), ctx.cache

    def advance(
        self, weights: DraftWeights, ctx: DraftContext, state: KVCache, hidden_BnE: jax.Array, count_B: jax.Array
    ) -> KVCache:
        """Appends the keys and values of the rows."""
        p: PublishedWeights = weights.params
        batch, n, width = hidden_BnE.shape
        at_Bn = state.length[:, None] + jnp.arange(n, dtype=jnp.int32)[None]
        kept_Bn = jnp.arange(n, dtype=jnp.int32)[None] < count_B[:, None]
        cos, sin = _pick_rows(p.cos, at_Bn.reshape(-1)), _pick_rows(p.sin, at_Bn.reshape(-1))
        with jax.named_scope("dflash/context"):
            linear = functools.partial(self.kernels.linear, n_valid=count_B)
            found = context_keys(
                linear, self.shape, p.layers, hidden_BnE.reshape(batch * n, width), cos, sin, one_by_one
            )
        keys, values = [], []
        for k, v, own in zip(state.k, state.v, found, strict=True):
            k_BnGd, v_BnGd = (a.reshape(batch, n, *a.shape[1:]) for a in own)
            k, v = append(k, v, k_BnGd, v_BnGd, at_Bn, kept_Bn)
            keys.append(k)
            values.append(v)
        return KVCache(tuple(keys), tuple(values), state.length + count_B)

    def _attend_all(self, i: int, q_RHd, own: BlockKeys, k, v, length_B, valid_B):
        """Attention by the kernels, which know chains, windows of them, and trees.

        A causal block is a chain. A bidirectional one is a chain of all rows but the last, and under it one leaf for
        each query, all with the keys and values of the last row: each leaf sees the context and the whole block.
        """
        n, rotation = self.rows, jnp.zeros((1, v.shape[2], 0), jnp.float32)  # all is rotated already
        batch = valid_B.shape[0]
        options = {"cos": rotation, "sin": rotation, "length": length_B, "pairing": self.shape.pairing}
        q, k_new, v_new = (a.reshape(batch, n, -1) for a in (q_RHd, *own))
        if self.shape.causal[i] or n == 1:
            flat = (a.reshape(batch * n, -1) for a in (q, k_new, v_new))
            return self.kernels.attend(*flat, k, v, n_valid=valid_B, window=self.shape.windows[i] or 0, **options)
        chain = jnp.arange(-1, n - 2, dtype=jnp.int32)
        parents = jnp.concatenate([chain, jnp.full((n,), n - 2, jnp.int32)])
        k_all, v_all = (jnp.concatenate([a[:, : n - 1], jnp.repeat(a[:, -1:], n, axis=1)], 1) for a in (k_new, v_new))
        q_all = jnp.concatenate([q[:, : n - 1], q], axis=1)
        out, k, v = self.kernels.attend(
            *(a.reshape(batch * (2 * n - 1), -1) for a in (q_all, k_all, v_all)), k, v,
            n_valid=jnp.where(valid_B > 0, 2 * n - 1, 0), parents=jnp.tile(parents[None], (batch, 1)), **options,
        )  # fmt: skip
        return out.reshape(batch, 2 * n - 1, -1)[:, n - 1 :].reshape(batch * n, -1), k, v

    def _attend_window(self, i: int, q_RHd, own: BlockKeys, k, v, length_B, valid_B):
        """Attention with a window that is no chain's, sequence by sequence, so that a sequence's bits are its own."""
        n = self.rows
        batch, groups, capacity, d = v.shape
        block = sees_block(self.shape, i, n)
        slots = jnp.arange(capacity, dtype=jnp.int32)

        def one(args):
            q_nHd, k_nGd, v_nGd, k_G, v_GCd, length = args
            k_GCd = k_G.swapaxes(2, 3).reshape(groups, capacity, d)
            there_C = slots < length
            past = (a.swapaxes(0, 1).astype(jnp.float32) for a in (k_GCd, v_GCd))
            past = BlockKeys(*(jnp.where(there_C[:, None, None], a, jnp.float32(0)) for a in past))
            begin_n, row_n = jnp.full((n,), length), jnp.arange(n, dtype=jnp.int32)
            seen = sees_context(self.shape, i, begin_n, row_n, slots) & there_C[None]
            return masked_attention(self.shape, q_nHd, [past, BlockKeys(k_nGd, v_nGd)], [seen, block])

        by_sequence = [a.reshape(batch, n, *a.shape[1:]) for a in (q_RHd, *own)]
        out = jax.lax.map(one, (*by_sequence, k, v, length_B))
        return jnp.where((valid_B > 0)[:, None, None], out, jnp.float32(0)).reshape(batch * n, -1)


def _pick_rows(table: jax.Array, index_R: jax.Array) -> jax.Array:
    return table[jnp.clip(index_R, 0, len(table) - 1)]


@dataclass(frozen=True)
class DFlash(PublishedSpec):
    """A block of tokens in one forward, from the target's features (DFlash, arXiv:2602.06036), with the target's
    embedding and output matrix or its own.

    Attributes:
        block_size: rows of a block, the last token among them; by default as many as it was trained for.
    """

    block_size: Annotated[int, Range(1, MAX_GAMMA)] | None = None
    reader = "specsparse.models.convert.heads:read_dflash"
    kind_of_file: ClassVar[type[DFlashFile]] = DFlashFile
    source: ClassVar[type[BlockSource]] = BlockSource

    def build(self, target: Model, load: Load) -> LoadedDrafter:
        file: DFlashFile = self.head_file(load)
        if type(file) is not self.kind_of_file:
            raise UserError(f"{file.path}: is {file.what}: take drafter={file.drafter}")
        skipped, tree = 0 if file.from_anchor else 1, self.drafting.shape
        rows = file.block_size if self.block_size is None else self.block_size
        file.check_target(target, layers=file.shape.features, width=file.shape.feature_width)
        known = file.tensors[EMBEDDING][0] if EMBEDDING in file.tensors else target.params.embedding.shape[0]
        refuse({
            f"drafter.block_size={rows} must lie in {1 + skipped}..{file.block_size}, the rows that {file.path} was "
            "trained for": not 1 + skipped <= rows <= file.block_size,
            f"a tree of depth {tree and tree.max_depth} is deeper than the {rows - skipped} tokens of a block of "
            f"{file.path}": tree is not None and tree.max_depth > rows - skipped,
            f"{file.path}: its mask token is {file.mask_token}, the embedding has ids 0 to {known - 1}":
                file.mask_token >= known,
            f"drafter.draft_vocab: {file.path} has a vocabulary of its own":
                file.ids is not None and self.drafting.draft_vocab is not None,
        })  # fmt: skip
        make = functools.partial(
            self.source,
            shape=file.shape,
            rows=rows,
            skipped=skipped,
            mask_token=file.mask_token,
            tree=tree,
            embedding_scale=file.embedding_scale,
            logit_scale=file.logit_scale,
            softcap=file.softcap,
        )
        return self.loaded(file, target, make)
