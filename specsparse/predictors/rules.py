"""Predictors by a rule: the true set and other bounds, quantiles over a text, one set for a sequence."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer
from specsparse.kernels import NeuronChoice
from specsparse.kernels.packing.dequant import dequantize
from specsparse.kernels.reference.dense import activate
from specsparse.predictors.base import FFN, InOneCall, Needs, Predictor, as_mask, gate_matrix, quantile, require_rows
from specsparse.support.options import Internal, Range, Share


@dataclass(frozen=True)
class Oracle(InOneCall):
    """keep_j if the neuron is not zero: recall and precision are 1, the output is the dense one.

    Attributes:
        share: of the neurons to keep instead, the largest |a|, on average over a text; a bound that nothing decodes by.
    """

    name: ClassVar[str] = "oracle"
    ffn: Annotated[FFN, Internal()]
    share: Share | None = None

    @property
    def needs(self) -> Needs:
        return Needs.NOTHING if self.share is None else Needs.TEXT

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> "GateWeights | None":
        if self.share is None:
            return None
        rows_ND = require_rows(self, rows_ND)
        size_NF = jnp.abs(self.ffn.neurons(layer, rows_ND, jnp.asarray([rows_ND.shape[0]], jnp.int32)))
        return GateWeights(_above_zero(quantile(size_NF, 1 - self.share)))

    def keep(
        self, weights: "GateWeights | None", layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array
    ) -> jax.Array:
        a_RF = self.ffn.neurons(layer, x_RD, n_valid_B)
        return as_mask(a_RF != 0 if weights is None else jnp.abs(a_RF) >= weights.threshold, n_valid_B)

    def choice(self, weights: None, layer: Layer) -> NeuronChoice:
        return NeuronChoice()


@dataclass(frozen=True)
class Random(Predictor):
    """keep_j for a random share of the neurons, drawn anew for each row; recall and kept share are the share.

    The draw hashes the row's own bits, so that it does not depend on where in a batch the row stands (contract C1).

    Attributes:
        share: of the neurons to keep.
        seed: 0 to 2^32 - 1.
    """

    name: ClassVar[str] = "random"
    ffn: Annotated[FFN, Internal()]
    share: Share = 0.5
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> jax.Array:
        """The salt uint32[F] that tells neurons and layers apart."""
        key = jax.random.fold_in(jax.random.key(self.seed), index)
        return jax.random.bits(key, (layer.dense.up.shape[0],), jnp.uint32)

    def keep(self, weights: jax.Array, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        place_D = 2 * jnp.arange(x_RD.shape[1], dtype=jnp.uint32) + jnp.uint32(1)
        words_RD = jax.lax.bitcast_convert_type(x_RD, jnp.uint32)
        row_R = _mixed(jnp.sum(words_RD * place_D[None], axis=1, dtype=jnp.uint32))
        drawn_RF = _mixed(row_R[:, None] ^ weights[None]) >> jnp.uint32(8)
        return as_mask(drawn_RF < jnp.uint32(round(self.share * (1 << 24))), n_valid_B)


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of uint32 that spreads every bit (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))


@dataclass(frozen=True)
class UnionCap(Predictor):
    """Of the neurons that some row keeps, those that are most likely to be of use: round(share * F) at most.

    Row i of a draft counts only if all before it are accepted, so a neuron is worth the sum of decay^i over the rows i
    that keep it; ties go to the lower index. The same idea for experts is MoE-Spec's (arXiv:2602.16052). Lossy, and
    contract C1 does not hold: a row's neurons depend on the rows beside it, so speculation and prefix caching may write
    another text than plain decoding. Rows are taken to be a chain; nodes of a tree count by their order.

    Attributes:
        inner: the predictor that is capped.
        share: of the neurons that one pass may read.
        decay: chance that a drafted token is accepted.
        rows: of each sequence up to which a pass is capped; longer ones read a prompt.
    """

    name: ClassVar[str] = "union_cap"
    inner: Predictor
    share: Share
    decay: Share = 0.7
    rows: int = 16

    @property
    def needs(self) -> Needs:
        return self.inner.needs

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> Pytree:
        return self.inner.fit(layer, rows_ND, index=index)

    def keep(self, weights: Pytree, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        keep_RF = self.inner.keep(weights, layer, x_RD, n_valid_B)
        n = x_RD.shape[0] // n_valid_B.shape[0]
        if n > self.rows:
            return keep_RF
        place_R = jnp.arange(x_RD.shape[0], dtype=jnp.int32) % n
        worth_F = (jnp.float32(self.decay) ** place_R.astype(jnp.float32)) @ keep_RF.astype(jnp.float32)
        return keep_RF * _largest(worth_F, self.share).astype(jnp.uint8)[None]


class GateWeights(NamedTuple):
    """One layer's threshold, f32[], on |act(gate)|, or on |a| of an oracle."""

    threshold: jax.Array


@dataclass(frozen=True)
class GateThreshold(InOneCall):
    """keep_j if |act(gate_j z)| >= threshold, a quantile over a text (CATS, arXiv:2404.08763, eq. 3).

    The gate is computed in full; neurons with a small activation are left out of up and down.

    Attributes:
        share: of the neurons to keep, on average over the text, the same in every layer.
    """

    name: ClassVar[str] = "gate_threshold"
    needs = Needs.TEXT
    ffn: Annotated[FFN, Internal()]
    share: Share = 0.5

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> GateWeights:
        rows_ND = require_rows(self, rows_ND)
        score_NF = self._score(layer, rows_ND, jnp.asarray([rows_ND.shape[0]], jnp.int32))
        return GateWeights(_above_zero(quantile(score_NF, 1 - self.share)))

    def _score(self, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        return jnp.abs(activate(self.ffn.gate(layer, x_RD, n_valid_B), self.ffn.act))

    def keep(self, weights: GateWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        return as_mask(self._score(layer, x_RD, n_valid_B) >= weights.threshold, n_valid_B)

    def choice(self, weights: GateWeights, layer: Layer) -> NeuronChoice:
        return NeuronChoice(least=weights.threshold)


def _above_zero(threshold: np.float32) -> jax.Array:
    """`threshold`, or the least positive number: if a text has more zeros than are to go, 0 would keep them all."""
    return jnp.asarray(np.maximum(threshold, np.finfo(np.float32).tiny))


class TealWeights(NamedTuple):
    """One layer's thresholds, f32[]: `inputs` on |z|, the input of gate and up, `threshold` on |a|, that of down."""

    inputs: jax.Array
    threshold: jax.Array


@dataclass(frozen=True)
class Teal(Predictor):
    """Inputs under a quantile of their size are zero (TEAL, arXiv:2408.14690, eq. 2), in the FFN's three matrices.

    For quality only: no kernel here skips columns. Attention keeps all its inputs. `keep` is the mask of down's inputs.

    Attributes:
        share: of the inputs to keep, the same for every matrix.
    """

    name: ClassVar[str] = "teal"
    needs = Needs.TEXT
    ffn: Annotated[FFN, Internal()]
    share: Share = 0.5

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> TealWeights:
        """Quantiles over `rows_ND`, those of down with the inputs of gate and up thresholded already."""
        rows_ND = require_rows(self, rows_ND)
        n = jnp.asarray([rows_ND.shape[0]], jnp.int32)
        inputs = jnp.asarray(quantile(jnp.abs(self._normed(layer, rows_ND)), 1 - self.share))
        values = self._values(TealWeights(inputs, jnp.float32(0)), layer, rows_ND, n)
        return TealWeights(inputs, _above_zero(quantile(jnp.abs(values), 1 - self.share)))

    def _normed(self, layer: Layer, x_RD: jax.Array) -> jax.Array:
        """rmsnorm(x) * ffn_norm, row by row, so that no row depends on how many there are."""

        def one(x_D):
            return x_D * jax.lax.rsqrt(jnp.mean(x_D * x_D) + jnp.float32(self.ffn.eps)) * layer.ffn_norm

        return jax.lax.map(one, x_RD)

    def _values(self, weights: TealWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        z_RD = self._normed(layer, x_RD)
        z_RD = jnp.where(jnp.abs(z_RD) >= weights.inputs, z_RD, jnp.float32(0))
        matrices = [gate_matrix(layer), *([] if layer.ffn_gate is None else [layer.ffn_up])]
        gate_RF, *up = self.ffn.kernels.linear(z_RD, tuple(matrices), n_valid=n_valid_B)
        a_RF = activate(gate_RF, self.ffn.act)
        return a_RF * activate(up[0], self.ffn.up_act) if up else a_RF

    def keep(self, weights: TealWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        values_RF = self._values(weights, layer, x_RD, n_valid_B)
        return as_mask(jnp.abs(values_RF) >= weights.threshold, n_valid_B)

    def neurons(self, weights: TealWeights, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """The neurons' values f32[R, F] from thresholded inputs, small ones zero."""
        values_RF = self._values(weights, layer, x_RD, n_valid_B)
        return jnp.where(jnp.abs(values_RF) >= weights.threshold, values_RF, jnp.float32(0))


@dataclass(frozen=True)
class Sequence(Predictor):
    """The neurons that matter most for the prompt, and no others after it: the cheapest mask there is for verification.

    Attributes:
        share: of the neurons to keep.
        rule: "griffin" ranks by the norm over the prompt of a / |a|, per neuron (arXiv:2404.01365, eq. 6);
            "coreinfer" by how many tokens have the neuron among their `token_share` largest (arXiv:2410.18311).
        token_share: of coreinfer.
    """

    name: ClassVar[str] = "sequence"
    needs = Needs.PROMPT
    ffn: Annotated[FFN, Internal()]
    share: Share = 0.5
    rule: Literal["griffin", "coreinfer"] = "griffin"
    token_share: Share = 0.4

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> jax.Array:
        """bool[1, F], the set of one prompt; those of a batch are bool[B, F], one below the other."""
        rows_ND = require_rows(self, rows_ND)
        a_NF = self.ffn.neurons(layer, rows_ND, jnp.asarray([rows_ND.shape[0]], jnp.int32))
        if self.rule == "griffin":
            norm = jnp.linalg.norm(a_NF, axis=1, keepdims=True)
            rank_F = jnp.sqrt(jnp.sum((a_NF / jnp.maximum(norm, jnp.float32(1e-30))) ** 2, axis=0))
        else:  # counts of neurons that are not zero, a tie decided by the mean size
            size = jnp.abs(a_NF)
            chosen = jax.vmap(lambda a: _largest(a, self.token_share))(size) & (size > 0)
            mean = jnp.mean(size, axis=0)
            rank_F = jnp.sum(chosen, axis=0).astype(jnp.float32) + mean / (jnp.max(mean) + jnp.float32(1e-30)) / 2
        return _largest(rank_F, self.share)[None]

    def keep(self, weights: jax.Array, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """Each row has the set of its sequence; one set serves all sequences."""
        batch = n_valid_B.shape[0]
        sets_BF = jnp.broadcast_to(weights, (batch, weights.shape[1]))
        return as_mask(jnp.repeat(sets_BF, x_RD.shape[0] // batch, axis=0), n_valid_B)


@dataclass(frozen=True)
class Hot(Predictor):
    """One set of neurons for every token of every text: those that add most to the output over a text, by the sum of
    |down_j|^2 a_j^2. PowerInfer's hot neurons without the cold ones (arXiv:2312.12456).

    Attributes:
        share: of the neurons to keep.
    """

    name: ClassVar[str] = "hot"
    needs = Needs.TEXT
    ffn: Annotated[FFN, Internal()]
    share: Share = 0.5

    def fit(self, layer: Layer, rows_ND: jax.Array | None = None, *, index: int = 0) -> jax.Array:
        rows_ND = require_rows(self, rows_ND)
        a_NF = self.ffn.neurons(layer, rows_ND, jnp.asarray([rows_ND.shape[0]], jnp.int32))
        added_F = jnp.sum(a_NF**2, axis=0) * jnp.sum(dequantize(layer.dense.down) ** 2, axis=0)
        return _largest(added_F, self.share)

    def keep(self, weights: jax.Array, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        return as_mask(jnp.broadcast_to(weights, (x_RD.shape[0], weights.shape[0])), n_valid_B)


def _largest(values_F: jax.Array, share: float) -> jax.Array:
    """bool[F]: the round(share * F) largest values, at least one; of equal values the lower index comes first."""
    count = max(1, round(share * values_F.shape[0]))
    _, ids = jax.lax.top_k(values_F, count)
    return jnp.zeros(values_F.shape, bool).at[ids].set(True)
