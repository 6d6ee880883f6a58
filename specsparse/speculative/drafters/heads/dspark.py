"""DSpark drafters (arXiv:2607.05147): a DFlash block whose distributions a Markov head makes conditional on the token
drafted before, and whose confidence head predicts the acceptance of each token before it is drawn.

With h the row of a slot after the output norm, U its logits and x the token before it, the slot has the logits U + W2 b
and the confidence sigmoid(w [h ; W1 x] + c), where

    vanilla   b = W1 x
    gated     b = sigmoid(G [h ; W1 x]) * W1 x
    rnn       b = tanh(o) and the next s = sigmoid(f) s + (1 - sigmoid(f)) tanh(g), with [f ; g ; o] = J [s ; W1 x ; h]

G and J have biases. The state s is 0 at the block's first row.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.cache import KVCache
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.model import Model
from specsparse.errors import UserError, refuse
from specsparse.kernels.qtensor import take_rows
from specsparse.kernels.reference.dense import rms_norm
from specsparse.speculative.base import DraftContext
from specsparse.speculative.drafters.heads import dflash
from specsparse.speculative.drafters.heads.dflash import (
    BlockDraft,
    BlockShape,
    BlockSource,
    BlockWeights,
    DFlash,
    DFlashFile,
    Each,
    Linear,
    Matrix,
    one_by_one,
)
from specsparse.speculative.drafters.heads.feature_source import pick
from specsparse.speculative.drafters.heads.published import HeadKeys
from specsparse.speculative.drafters.sources import DraftWeights, FedRows
from specsparse.speculative.drafters.spec import bytes_of
from specsparse.support.files import Json

MarkovForm = Literal["vanilla", "gated", "rnn"]
W1, W2, GATE, JOINT, CONFIDENCE = "markov_w1", "markov_w2", "markov_gate", "markov_joint", "conf_proj"
"""Names of the tensors, by llama.cpp as far as it has them."""


@dataclass(frozen=True, kw_only=True)
class SparkShape(BlockShape):
    markov_rank: int  # R, of W1 and W2
    markov_head_type: MarkovForm = "vanilla"  # the form of the Markov head
    enable_confidence_head: bool = True  # whether there is one
    confidence_head_with_markov: bool = True  # whether it reads W1 x beside the block's row

    @property
    def mix(self) -> tuple[str, int, int]:
        """Name, outputs and inputs of the matrix of a gated or recurrent head; no outputs of a vanilla one."""
        R, D = self.markov_rank, self.width
        return {"vanilla": ("", 0, 0), "gated": (GATE, R, D + R), "rnn": (JOINT, 3 * R, 2 * R + D)}[
            self.markov_head_type
        ]


class MarkovWeights(NamedTuple):
    # w1, w2: [V, R] by the token before, and [N, R], a row for each column of the logits
    w1: Matrix
    w2: Matrix
    # mix, mix_bias: of `SparkShape.mix`, and f32[outputs]; None of a vanilla head
    mix: Matrix | None = None
    mix_bias: jax.Array | None = None
    # confidence, confidence_bias: [1, inputs] and f32[1]; None without a confidence head
    confidence: Matrix | None = None
    confidence_bias: jax.Array | None = None


def markov_step(
    linear: Linear, shape: SparkShape, w: MarkovWeights, state_RS: jax.Array, before_Rr: jax.Array, h_RD: jax.Array,
    each: Each = dflash.at_once,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """b f32[R, r] of the module's formulas, and the next state, of rows of any slots.

    `before` are rows of W1, `h` the block's rows after the output norm; the state f32[R, S] is 0 at the first slot, and
    only a recurrent head has one.
    """
    if w.mix is None:
        return before_Rr, state_RS
    parts = (h_RD, before_Rr) if shape.markov_head_type == "gated" else (state_RS, before_Rr, h_RD)
    (mixed,) = linear(jnp.concatenate(parts, axis=-1), (w.mix,))

    def gated(mixed_r, before_r):
        return jax.nn.sigmoid(mixed_r + w.mix_bias) * before_r

    def recurrent(mixed_3S, state_S):
        f, g, o = jnp.split(mixed_3S + w.mix_bias, 3)
        return jnp.concatenate([jnp.tanh(o), jax.nn.sigmoid(f) * state_S + (1 - jax.nn.sigmoid(f)) * jnp.tanh(g)])

    if shape.markov_head_type == "gated":
        return each(gated, mixed, before_Rr), state_RS
    b_Rr, next_RS = jnp.split(each(recurrent, mixed, state_RS), 2, axis=-1)
    return b_Rr, next_RS


def markov_shapes(shape: SparkShape, vocab: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Shapes by name of the tensors of both heads, of a target of `vocab` ids of which `columns` are scored."""
    rank, (name, outputs, inputs) = shape.markov_rank, shape.mix
    shapes: dict[str, tuple[int, ...]] = {f"{W1}.weight": (vocab, rank), f"{W2}.weight": (columns, rank)}
    if outputs:
        shapes |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
    if shape.enable_confidence_head:
        read = shape.width + (rank if shape.confidence_head_with_markov else 0)
        shapes |= {f"{CONFIDENCE}.weight": (1, read), f"{CONFIDENCE}.bias": (1,)}
    return shapes


def confidence_logits(
    linear: Linear, shape: SparkShape, w: MarkovWeights, before_Rr: jax.Array, h_RD: jax.Array
) -> jax.Array:
    """The confidence of the next node before its sigmoid, f32[R]."""
    read = jnp.concatenate([h_RD, before_Rr], axis=-1) if shape.confidence_head_with_markov else h_RD
    assert w.confidence_bias is not None
    (c_R1,) = linear(read, (w.confidence,))
    return c_R1[:, 0] + w.confidence_bias


@dataclass(frozen=True, eq=False, kw_only=True)
class DSparkFile(DFlashFile):
    what: ClassVar[str] = "a DSpark drafter"

    shape: SparkShape
    drafter = "dspark"

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        rows, yields_bias = self.tensors.get(f"{W1}.weight", (0,))[0], f"{CONFIDENCE}.bias" in self.tensors
        yield from super().wanted()
        for name, shape in markov_shapes(self.shape, rows, rows if self.ids is None else len(self.ids)).items():
            if name != f"{CONFIDENCE}.bias" or yields_bias:  # the only one that may be missing
                yield name, shape

    def check_target(self, target: Model, **reads: Any) -> None:
        super().check_target(target, **reads)
        rows, vocab = self.tensors[f"{W1}.weight"][0], target.config.vocab_size
        refuse({f"its Markov head knows {rows} ids, {target.path.name} has {vocab}": rows < vocab}, self.path)

    def gguf_keys(self) -> Json:
        s, said = self.shape, "has no place in a GGUF file of llama.cpp; write safetensors"
        blind = s.enable_confidence_head and not s.confidence_head_with_markov
        inexpressible = {
            f"a {s.markov_head_type} Markov head {said}": s.markov_head_type != "vanilla",
            f"a confidence head that does not read the token before {said}": blind,
        }
        refuse(inexpressible, self.path)
        return super().gguf_keys() | {"dspark.markov_rank": s.markov_rank}

    def packed(self, ids: np.ndarray, *, floats: bool) -> BlockWeights:
        def part(name: str) -> Any:
            return self.part(name, floats=floats) if name in self.tensors else None

        rows = ids if self.ids is None else np.argsort(self.ids)  # ids come ascending: those of a file are scored whole
        name, bias = self.shape.mix[0], part(f"{CONFIDENCE}.bias")
        markov = MarkovWeights(
            w1=part(f"{W1}.weight"),
            w2=take_rows(part(f"{W2}.weight"), rows),
            mix=part(f"{name}.weight"),
            mix_bias=part(f"{name}.bias"),
            confidence=part(f"{CONFIDENCE}.weight"),
            confidence_bias=jnp.zeros((1,)) if bias is None else bias,
        )
        return super().packed(ids, floats=floats)._replace(markov=markov)


def read_gguf(f: GGUFFile) -> DFlashFile:
    """A block drafter of an open GGUF file, of either kind: a `DSparkFile` if it has a Markov head.

    llama.cpp calls both `dflash`, and some earlier files of DSpark `dspark`; UserError as `dflash.read_gguf`.
    """
    architecture = f.get("general.architecture", "str", "")
    if architecture != DSparkFile.drafter and f"{W1}.weight" not in f.tensors:
        return dflash.read_gguf(f)
    ranks = ("dspark.markov_rank", "markov_rank")
    keys = HeadKeys(f, architecture, "block drafter", {*dflash.OWN_KEYS, *ranks})
    fields, tensors = dflash.gguf_fields(keys, from_anchor=True), f.tensors
    rank = (tensors[f"{W1}.weight"].shape if f"{W1}.weight" in tensors else (0, 0))[-1]
    wrong = {keys.size(key, max(rank, 1)) for key in ranks} - {rank}
    if wrong:
        raise UserError(f"{f.path}: its Markov head has rank {rank}, its keys say {min(wrong)}")
    shape = SparkShape(
        **vars(fields["shape"]), markov_rank=rank, enable_confidence_head=f"{CONFIDENCE}.weight" in tensors
    )
    return DSparkFile(**fields | {"shape": shape})


class MarkovRows(NamedTuple):
    h: jax.Array  # f32[B, m, D], the block's rows after the output norm, of the m positions after the last token
    # f32[B, S], the recurrent state before the node that is drafted next (before the first node of a tree)
    root: jax.Array
    rows: jax.Array  # f32[B, r, S], the states after the nodes fed in this draft, for trees
    confidence: jax.Array | None  # f32[B], of the next node of a chain; None if no policy asks


@dataclass(frozen=True)
class DSparkSource(BlockSource):
    """A block drafter whose logits depend on the token before."""

    shape: SparkShape

    independent = False

    def bytes_per_token(self, layers: Any, head: Any) -> int:
        """W2 is read for each token, W1 a row of it."""
        block, markov = layers._replace(markov=None), layers.markov._replace(w1=None)
        return super().bytes_per_token(block, head) + bytes_of(markov)

    def open(
        self, weights: DraftWeights, state: KVCache, ctx: DraftContext, live_B: jax.Array
    ) -> tuple[BlockDraft, jax.Array]:
        draft, y_BnD = self.block(weights, state, ctx, live_B)
        batch, n, D = y_BnD.shape
        assert weights.norm is not None
        norm = functools.partial(rms_norm, norm=weights.norm, eps=self.eps)
        h_BnD = one_by_one(norm, y_BnD.reshape(batch * n, D)).reshape(batch, n, D)
        recurrent, first = self.shape.markov_head_type == "rnn", self.skipped
        state_B1S = jnp.zeros((batch, 1, self.shape.markov_rank if recurrent else 0), jnp.float32)
        last = FedRows(pick(ctx.tokens, ctx.length[:, None] - 1), live_B.astype(jnp.int32))
        if first and recurrent:  # the last token's own row has no logits, but its turn of the state
            state_B1S = self._step(weights, ctx, last, state_B1S, h_BnD[:, :1])[1]
        bias_B1N, state_B1S, confidence_B = self._step(weights, ctx, last, state_B1S, h_BnD[:, first : first + 1])
        rows_BrS = jnp.zeros((batch, 0 if self.tree is None else self.tree.max_rows, state_B1S.shape[2]), jnp.float32)
        kept = MarkovRows(h_BnD[:, first:], state_B1S[:, 0], rows_BrS, confidence_B)
        return draft._replace(markov=kept), draft.logits[:, 0] + bias_B1N[:, 0]

    def feed(
        self, weights: DraftWeights, ctx: DraftContext, cache: BlockDraft, rows: FedRows
    ) -> tuple[jax.Array, BlockDraft]:
        """Logits by position and by the token fed there; a recurrent state is the one after the node's parent."""
        kept: MarkovRows = cache.markov
        n, depth_Bn = rows.tokens.shape[1], self.depths(ctx, cache.length, rows)
        state_BnS = kept.root[:, None]
        if rows.parents is not None:
            state_BnS = jnp.where(rows.parents[:, :, None] < 0, state_BnS, pick(kept.rows, rows.parents))
        bias_BnN, state_BnS, confidence_B = self._step(weights, ctx, rows, state_BnS, pick(kept.h, depth_Bn))
        if rows.parents is None:
            kept = kept._replace(root=state_BnS[:, 0], confidence=confidence_B)
        else:
            kept = kept._replace(rows=kept.rows.at[:, :n].set(state_BnS))
        return pick(cache.logits, depth_Bn) + bias_BnN, cache._replace(markov=kept)

    def confidence(self, cache: BlockDraft) -> jax.Array | None:
        return cache.markov.confidence

    def _step(
        self, weights: DraftWeights, ctx: DraftContext, rows: FedRows, state_BnS: jax.Array, h_BnD: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The Markov head's part of the logits after rows, f32[B, n, N], their states, and f32[B], the confidence
        after the first of them, if a policy asks for it."""
        w: MarkovWeights = weights.params.layers.markov
        batch, n = rows.tokens.shape
        linear = functools.partial(self.kernels.linear, n_valid=rows.n_valid)
        with jax.named_scope("dspark"):
            before_Rr = self.kernels.embed(w.w1, rows.tokens.reshape(-1))
            h_RD, state_RS = (a.reshape(batch * n, a.shape[2]) for a in (h_BnD, state_BnS))
            b_Rr, state_RS = markov_step(linear, self.shape, w, state_RS, before_Rr, h_RD, one_by_one)
            (bias_RN,) = linear(b_Rr, (w.w2,))
            confidence_B = None
            if w.confidence is not None and "confidence" in ctx.needs:
                found = confidence_logits(linear, self.shape, w, before_Rr, h_RD)
                confidence_B = jax.nn.sigmoid(found.reshape(batch, n)[:, 0])
        return bias_RN.reshape(batch, n, -1), state_RS.reshape(batch, n, -1), confidence_B


@dataclass(frozen=True)
class DSpark(DFlash):
    """A block as of `dflash` whose tokens follow each other, and how sure each is (DSpark, arXiv:2607.05147)."""

    kind_of_file = DSparkFile
    source = DSparkSource
