"""An EAGLE-3 head drafts: one layer on the features of three of the target's (Li et al., arXiv:2503.01840)."""

import dataclasses
import functools
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.model import Model
from specsparse.engine.rope import rope_tables
from specsparse.engine.weights import pack_matrix
from specsparse.kernels import QTensor
from specsparse.speculative.base import DraftContext
from specsparse.speculative.drafters.heads import eagle3_head
from specsparse.speculative.drafters.heads.eagle3_file import FEATURE_NORM, Eagle3File
from specsparse.speculative.drafters.heads.eagle3_head import (
    PROJECTIONS,
    Eagle3Weights,
    HeadShape,
    Products,
    default_layers,
)
from specsparse.speculative.drafters.heads.feature_source import HeadState, OneLayerSource, of_target
from specsparse.speculative.drafters.heads.published import PublishedPlan, check_target, scored
from specsparse.speculative.drafters.heads.published_file import EMBEDDING
from specsparse.speculative.drafters.plan import Bound, Load, bytes_of
from specsparse.speculative.drafters.sources import DraftWeights, FedRows


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
        """The target's features, fused."""
        batch, n, width = hidden_BnE.shape
        with jax.named_scope("head/fuse"):
            features_RE = hidden_BnE.reshape(batch * n, width)
            g_RD = eagle3_head.fuse(self.shape, weights.params.head, self._products(n_valid_B), features_RE)
        return g_RD.reshape(batch, n, -1)

    def again(self, weights: DraftWeights, y_BnD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """Its own rows, normalised where the head was trained so."""
        y_RD, products = y_BnD.reshape(-1, y_BnD.shape[-1]), self._products(n_valid_B)
        return eagle3_head.again(self.shape, weights.params.head, products, y_RD).reshape(y_BnD.shape)

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
            entered = eagle3_head.enter(self.shape, w, products, e_RD, read_BnD.reshape(batch * n, width))
            out, k, v = self.kernels.attend(
                entered.q, entered.k, entered.v, state.k[0], state.v[0], cos=params.cos, sin=params.sin,
                length=state.length, n_valid=rows.n_valid, parents=rows.parents, pairing="neox",
            )  # fmt: skip
            y_RD = eagle3_head.leave(w, products, out, entered.residual)
        return y_RD.reshape(batch, n, width), state._replace(k=(k,), v=(v,))

    def logits(self, weights: DraftWeights, y_BnD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """By the head's output matrix."""
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
class Eagle3Plan(PublishedPlan):
    """One layer on the features of three of the target's layers, as other projects publish it (EAGLE-3,
    arXiv:2503.01840), with the target's embedding and output matrix where its file has none."""

    reader = "specsparse.models.convert.eagle3:read_eagle3"

    def prepare(self, target: Model, load: Load) -> Bound:
        """Reads the head's file; no model is loaded."""
        file = self.head_file(load)
        c, shape = target.config, file.shape
        layers = file.layers or default_layers(c.n_layers)
        check_target(file, target, layers=layers, width=file.target_width)
        floats = target.kernels.name != "native"
        weights, columns = scored(file, self.drafting, target, floats=floats)
        head = _packed(file, floats=floats)
        embedding = pack_matrix(file.load(EMBEDDING), floats=floats) if EMBEDDING in file.tensors else None
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

        return Bound(self.drafting.drafter(source, target), weights_for, bytes_of(head, weights.head))


def _packed(file: Eagle3File, *, floats: bool) -> Eagle3Weights:
    def matrix(name: str) -> QTensor:
        return pack_matrix(file.load(f"{name}.weight"), floats=floats)

    def vector(name: str) -> jax.Array:
        return jnp.asarray(file.values(name).reshape(-1))

    s = file.shape
    return Eagle3Weights(
        fc=matrix("fc"),
        token_norm=vector("blk.0.attn_norm.weight"),
        hidden_norm=vector("blk.0.attn_norm_2.weight"),
        ffn_norm=vector("blk.0.ffn_norm.weight"),
        output_norm=vector("output_norm.weight"),
        feature_norm=vector(FEATURE_NORM) if s.norm_before_fc else None,
        fc_norms=tuple(vector(f"fc_norm.{i}.weight") for i in range(s.features)) if s.fc_norm else (),
        q_norm=vector("blk.0.attn_q_norm.weight") if s.qk_norm else None,
        k_norm=vector("blk.0.attn_k_norm.weight") if s.qk_norm else None,
        biases={name: vector(f"blk.0.{name}.bias") for name in s.biases},
        **{name: matrix(f"blk.0.{name}") for name in PROJECTIONS},
    )
