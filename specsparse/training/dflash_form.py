"""DFlash and DSpark block drafters in training (arXiv:2602.06036, 2607.05147): a function to differentiate, a start, a
file.

One pass over a block drafts all of its tokens, so nothing is run on its own rows: block and window are one forward. The
layers are those that decode (`speculative.drafters.heads.dflash`), with the products of training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.rope import RopeConfig, rope_tables
from specsparse.kernels import QTensor
from specsparse.kernels.packing.dequant import embed_rows
from specsparse.kernels.reference.dense import rms_norm
from specsparse.speculative.drafters.heads import dflash, dspark
from specsparse.speculative.drafters.heads.dflash import BlockKeys, BlockLayer, BlockShape, BlockWeights, DFlashFile
from specsparse.speculative.drafters.heads.dspark import DSparkFile, MarkovWeights, SparkShape
from specsparse.training import form
from specsparse.training.corpus import Text, Window, fill, pack
from specsparse.training.form import Aim, FeatureForm, Frozen, Loss, ridge, unit
from specsparse.training.layer import Keys, attention, linear, times

_ROWS, _DRAFTING = 512, 224  # size of the windows that the first weights are fitted on
_FIRST_ROWS = 8_000  # tokens of answers that the first weights are fitted on
_NAMES = {"fc": "fc.weight", "hidden_norm": "enc.output_norm.weight", "output_norm": "output_norm.weight"}
"""Fields of `BlockWeights` beside its layers, and their tensors in the file."""


def blocks(
    shape: BlockShape, w: BlockWeights, features_nE: jax.Array, position_n: jax.Array, embedded_mKD: jax.Array,
    at_m: jax.Array, seen_mn: jax.Array, tables: tuple[jax.Array, ...],
) -> tuple[jax.Array, list[jax.Array]]:  # fmt: skip
    """Blocks at many places of texts at once: f32[m, K, D] before the output norm, and what attention found by layer.

    Args:
        shape, w: of the drafter, and its weights, float32 or halved.
        features_nE: f32[n, len(read) D], the target's rows.
        position_n: int32[n], of each in its text.
        embedded_mKD: the embedded blocks.
        at_m: int32[m], positions at which they begin.
        seen_mn: bool[m, n], rows of the target that stand before a block in its text.
        tables: cos and sin f32[positions, d/2].
    """
    cos, sin = tables
    m, K, D = embedded_mKD.shape
    context = dflash.context_keys(linear, shape, w, features_nE, cos[position_n], sin[position_n])
    row_R = jnp.tile(jnp.arange(K, dtype=jnp.int32), m)
    begin_R, text_Rn = jnp.repeat(at_m, K), jnp.repeat(seen_mn, K, axis=0)
    at_R, found = begin_R + row_R, []

    def attend(i: int, q_RHd: jax.Array, own: BlockKeys) -> jax.Array:
        base = Keys(*(a.swapaxes(0, 1) for a in context[i]))
        k, v = (a.reshape(m, K, *a.shape[1:]) for a in own)
        with jax.ensure_compile_time_eval():
            block = np.asarray(dflash.sees_block(shape, i, K))
        each = []  # row j of its own block for each row
        for j in range(K):
            k_GRd, v_GRd = (jnp.repeat(a[:, j], K, axis=0).swapaxes(0, 1) for a in (k, v))
            each.append(Keys(k_GRd, v_GRd, None if block[:, j].all() else np.tile(block[:, j], m)))
        seen_Rn = text_Rn & dflash.sees_context(shape, i, begin_R, row_R, position_n)
        out_RO = attention(q_RHd, base, seen_Rn, each)
        found.append(out_RO.reshape(m, K, -1))
        return out_RO

    y_RD = dflash.block_rows(linear, shape, w, embedded_mKD.reshape(m * K, D), cos[at_R], sin[at_R], attend)
    return y_RD.reshape(m, K, D), found


@dataclass(frozen=True)
class DFlashForm(FeatureForm):
    """One layer over fused rows of several of the target's, which drafts a block at a time.

    The last token's own row drafts too (`sample_from_anchor`), so that no row of the block is without a token. Every
    query head has keys and values of its own: the target's rows reach the block through values alone.
    """

    name: ClassVar[str] = "dflash"
    drafter: ClassVar[str] = "dflash"
    option: ClassVar[str] = "path"

    block: int = 4  # rows, and tokens that they draft

    @property
    def shape(self) -> BlockShape:
        c = self.model.config
        return BlockShape(
            width=c.d_model, heads=c.n_heads, kv_heads=c.n_heads, head_dim=c.head_dim, d_ff=c.d_ff, eps=c.norm_eps,
            features=self.read, feature_width=c.d_model, windows=(None,), causal=(False,),
        )  # fmt: skip

    @property
    def rope(self) -> RopeConfig:
        """The rotation of the target, without the scaling of its context."""
        return RopeConfig(self.model.config.rope.base, self.model.config.head_dim, "neox")

    @property
    def mask_token(self) -> int:
        """Stands for what is to be drafted: the last control token that neither begins nor ends anything."""
        known = self.model.tokenizer
        others = {known.bos_id, known.eos_id, known.eot_id, known.unknown_id}
        return max(known.special_ids - others, default=self.model.config.vocab_size - 1)

    def zeros(self) -> BlockWeights:
        sizes = dict(dflash.tensor_shapes(self.shape))
        layer = BlockLayer(*(jnp.zeros(sizes[f"blk.0.{name}.weight"]) for name in BlockLayer._fields))
        return BlockWeights(layers=(layer,), **{field: jnp.zeros(sizes[name]) for field, name in _NAMES.items()})

    def first(self, texts: Sequence[Text]) -> BlockWeights:
        """A linear guess.

        All rows of a block but the first hold a mask, so what they know comes through attention, and a random one
        averages over the text. Here `fc` is `FeatureForm.fused`; queries and keys are constant but for their sign, so
        that rotation alone decides and the nearest rows count most: those of the target for two thirds of the heads,
        those of the block for the others. Values are the directions in which these rows vary most, and the output
        matrix is the ridge regression of what the block should find on what attention finds. The feed-forward part,
        with the target's own gate and up of its last layer, adds nothing yet.
        """
        model, zeros = self.model, self.zeros()
        c, own = model.config, form.last_inputs(model)
        H, d = c.n_heads, c.head_dim
        few = self.features.of(form.beginning_with(texts, _FIRST_ROWS))
        fc, norm = self.fused(texts), np.asarray(own["attn_norm"])
        fused_RD = unit(np.concatenate([t.read[:, : fc.shape[1]] for t in few]) @ fc.T) * norm
        tokens = np.concatenate([t.tokens for t in few])
        said_RD, mask_RD = (
            unit(np.asarray(embed_rows(model.params.embedding, jnp.asarray(ids, jnp.int32))))
            for ids in (tokens, np.full(len(tokens), self.mask_token))
        )

        def constant(*lots: tuple[np.ndarray, float]) -> np.ndarray:
            """float32[D]: a direction along which each lot of rows has about its number."""
            gram_DD = np.sum([x.T @ x for x, _ in lots], axis=0)
            return ridge(gram_DD, np.sum([x.sum(axis=0) * y for x, y in lots], axis=0)[:, None])[:, 0]

        def directions(x_RD: np.ndarray, count: int) -> np.ndarray:
            """float32[count, D]: the directions in which rows vary most, and these again if there are too few."""
            _, found = np.linalg.eigh(x_RD.T @ x_RD)
            return found.T[::-1][np.arange(count) % x_RD.shape[1]]

        turns = self.rope.base ** (-np.arange(d // 2) / (d // 2))
        near_d = np.append((turns > 0.1).astype(np.float32), np.zeros(d // 2, np.float32))
        blocks_own = H // 3
        block, text = ((said_RD, 1.0), (mask_RD, 1.0)), (fused_RD, -1.0)
        of_block = constant(*block, text)
        keys = np.repeat(np.stack([-of_block, of_block]), [H - blocks_own, blocks_own], axis=0)
        layer = zeros.layers[0]._replace(
            attn_norm=jnp.ones((c.d_model,)),
            attn_q=jnp.asarray(np.kron(np.tile(constant(*block), (H, 1)), near_d[:, None])),
            attn_k=jnp.asarray(np.kron(keys, near_d[:, None])),
            attn_v=jnp.concatenate([directions(fused_RD, (H - blocks_own) * d), directions(said_RD, blocks_own * d)]),
            attn_q_norm=jnp.ones((d,)),
            attn_k_norm=jnp.ones((d,)),
            ffn_norm=own["ffn_norm"],
            ffn_gate=own["ffn_gate"],
            ffn_up=own["ffn_up"],
        )
        weights = form.owned(BlockWeights(jnp.asarray(fc), own["attn_norm"], (layer,), model.params.output_norm))
        return weights._replace(layers=(weights.layers[0]._replace(attn_output=self._output(weights, few)),))

    def _output(self, weights: BlockWeights, texts: Sequence[Text]) -> jax.Array:
        """f32[D, H d]: the regression of what each place of a block should find on what its attention finds."""
        found_rows, width = jax.jit(self._rows), self.model.config.d_model
        gram = cross = np.zeros((), np.float32)
        for group in pack(texts, range(len(texts)), rows=_ROWS, drafting=_DRAFTING):
            window = fill([texts[i] for i in group], rows=_ROWS, drafting=_DRAFTING, width=width)
            y_mKD, found = found_rows(weights, self.model.params.embedding, jax.tree.map(jnp.asarray, window))
            depth_m, y_mKD, found_mKO = np.asarray(window.depth), np.asarray(y_mKD), np.asarray(found[0])
            for s in range(self.block):
                there = (depth_m >= 0) & (np.roll(depth_m, -s) == depth_m + s)
                x, y = found_mKO[there, s], np.roll(window.after, -s, axis=0)[there] - y_mKD[there, s]
                gram, cross = gram + x.T @ x, cross + x.T @ y
        return jnp.asarray(ridge(gram, cross).T)

    def _rows(self, weights: BlockWeights, embedding: QTensor, window: Window) -> tuple[jax.Array, list[jax.Array]]:
        """`blocks` that begin at the tokens of a window's drafting rows."""
        tables = tuple(map(jnp.asarray, rope_tables(self.rope, len(window.tokens) + self.block)))
        features_nE, rows = window.hidden[:, : weights.fc.shape[1]], window.rows
        tokens_mK = jnp.full((len(rows), self.block), self.mask_token, jnp.int32).at[:, 0].set(window.tokens[rows])
        embedded_mKD = embed_rows(embedding, tokens_mK.reshape(-1)).reshape(*tokens_mK.shape, -1)
        seen_mn = window.same_text() & (jnp.arange(len(window.text))[None] <= rows[:, None])
        at_m = window.position[rows] + 1
        return blocks(self.shape, weights, features_nE, window.position, embedded_mKD, at_m, seen_mn, tables)

    def logits(
        self, weights: BlockWeights, frozen: Frozen, embedding: QTensor, window: Window, count: int
    ) -> list[jax.Array]:
        """Stream s is the s-th place of the block that began s rows before; no more than a block has."""
        return [z_mN for z_mN, _ in self._places(weights, frozen, embedding, window, count)]

    def _places(
        self, weights: BlockWeights, frozen: Frozen, embedding: QTensor, window: Window, count: int
    ) -> list[tuple[jax.Array, jax.Array]]:
        """The block's logits of each stream, and its rows after the output norm."""
        y_mKD, _ = self._rows(weights, embedding, window)
        m, K, D = y_mKD.shape
        h_RD = rms_norm(y_mKD.reshape(m * K, D), weights.output_norm, self.shape.eps)
        z_mKN, h_mKD = times(h_RD, frozen.head).reshape(m, K, -1), h_RD.reshape(m, K, D)
        return [
            (jnp.roll(z_mKN[:, s], s, axis=0), jnp.roll(h_mKD[:, s], s, axis=0)) for s in range(min(count, K))
        ]  # fmt: skip

    def write(self, path: Path, weights: BlockWeights, ids: np.ndarray, *, quant: str) -> Path:
        """A GGUF file for the drafter and for llama.cpp, with the target's output rows of the draft vocabulary."""
        arrays = {name: np.asarray(getattr(weights, field)) for field, name in _NAMES.items()}
        arrays |= {f"blk.0.{name}.weight": np.asarray(a) for name, a in weights.layers[0]._asdict().items()}
        arrays["output.weight"] = self.output_rows(ids)
        kind, own = self._own(weights, ids)
        arrays |= own
        file = kind.from_arrays(
            arrays, path=path, shape=self.shape, block_size=self.block, mask_token=self.mask_token, rope=self.rope,
            context=self.model.config.context_length, ids=ids, from_anchor=True,
        )  # fmt: skip
        return file.write_gguf(path, tokenizer=form.tokenizer_keys(self.model), quant=quant)

    def _own(self, weights: BlockWeights, ids: np.ndarray) -> tuple[type[DFlashFile], dict[str, np.ndarray]]:
        """The class of its file, and its tensors beside those of DFlash."""
        return DFlashFile, {}


@dataclass(frozen=True)
class DSparkForm(DFlashForm):
    """The same with a vanilla Markov head and a confidence head (arXiv:2607.05147), trained as its authors do."""

    name: ClassVar[str] = "dspark"
    drafter: ClassVar[str] = "dspark"
    loss: ClassVar[Loss] = "kl_tv"

    rank: int = 64  # of the Markov head

    @property
    def shape(self) -> SparkShape:
        return SparkShape(**vars(super().shape), markov_rank=self.rank)

    def zeros(self) -> BlockWeights:
        vocab = self.model.config.vocab_size
        sizes = dspark.markov_shapes(self.shape, vocab, vocab)
        own = MarkovWeights(
            *(jnp.zeros(sizes[f"{name}.weight"]) for name in (dspark.W1, dspark.W2)),
            confidence=jnp.zeros(sizes[f"{dspark.CONFIDENCE}.weight"]), confidence_bias=jnp.zeros((1,)),
        )  # fmt: skip
        return super().zeros()._replace(markov=own)

    def first(self, texts: Sequence[Text]) -> BlockWeights:
        """As a DFlash block, to which a random W1 and a W2 of zeros add nothing yet."""
        own: MarkovWeights = self.zeros().markov
        w1 = np.random.default_rng(0).normal(0, 1, own.w1.shape).astype(np.float32)
        return super().first(texts)._replace(markov=own._replace(w1=jnp.asarray(w1)))

    def _places(
        self, weights: BlockWeights, frozen: Frozen, embedding: QTensor, window: Window, count: int
    ) -> list[tuple[jax.Array, jax.Array]]:
        """The token before a place is the one that the text has there, in every stream."""
        bias_mN = times(self._before(weights, window), weights.markov.w2[frozen.ids])
        return [(z_mN + bias_mN, h_mD) for z_mN, h_mD in super()._places(weights, frozen, embedding, window, count)]

    def _before(self, weights: BlockWeights, window: Window) -> jax.Array:
        """W1's rows of the tokens before: float32[m, R]."""
        return weights.markov.w1[window.tokens[window.rows]].astype(jnp.float32)

    def losses(
        self, weights: BlockWeights, frozen: Frozen, embedding: QTensor, window: Window, count: int, aim: Aim
    ) -> list[tuple[jax.Array, jax.Array]]:
        """And the cross entropy of the confidence against the acceptance."""
        before_mr, found = self._before(weights, window), []
        for y_mN, h_mD in self._places(weights, frozen, embedding, window, count):
            c_m = dspark.confidence_logits(linear, self.shape, weights.markov, before_mr, h_mD)
            surprise_m = jax.nn.softplus(c_m) - jax.lax.stop_gradient(aim.acceptance(y_mN)) * c_m
            found.append((y_mN, aim.loss(y_mN) + surprise_m))
        return found

    def _own(self, weights: BlockWeights, ids: np.ndarray) -> tuple[type[DFlashFile], dict[str, np.ndarray]]:
        w: MarkovWeights = weights.markov
        arrays: dict[str, Any] = {f"{dspark.W1}.weight": w.w1, f"{dspark.W2}.weight": np.asarray(w.w2)[ids]}
        arrays |= {f"{dspark.CONFIDENCE}.weight": w.confidence, f"{dspark.CONFIDENCE}.bias": w.confidence_bias}
        return DSparkFile, {name: np.asarray(a) for name, a in arrays.items()}
