"""The quality of a predictor on a model and a text, layer by layer and of the whole model, and its cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine import cache as kv
from specsparse.engine.llama import ForwardFn, Want, dense_ffn, make_forward
from specsparse.engine.model import Model
from specsparse.engine.prefill import prefill
from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer, Params
from specsparse.kernels import QTensor
from specsparse.predictors.base import FFN, Needs, Predictor, gate_matrix
from specsparse.predictors.rules import GateThreshold, Oracle, Teal
from specsparse.support.interleaved import interleaved, seconds

_REPEATS, _CALLS = 7, 20  # timings of a predictor's cost, and calls of each timing


def kept_neurons(
    predictor: Predictor, ffn: FFN, weights: Pytree, layer: Layer, x_RD: jax.Array, n_valid_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(neurons f32[R, F] with those left out at zero, mask uint8[R, F])."""
    keep_RF = predictor.keep(weights, layer, x_RD, n_valid_B)
    if isinstance(predictor, Teal):
        return predictor.neurons(weights, layer, x_RD, n_valid_B), keep_RF
    a_RF = ffn.neurons(layer, x_RD, n_valid_B)
    return jnp.where(keep_RF != 0, a_RF, jnp.float32(0)), keep_RF


def fit_layers(
    predictor: Predictor, layers: Sequence[Layer], rows_LND: np.ndarray | jax.Array | None
) -> tuple[Pytree, ...]:
    """A predictor's weights of every layer, from residuals f32[L, N, D] if it needs some."""
    return tuple(
        predictor.fit(layer, None if rows_LND is None else jnp.asarray(rows_LND[i]), index=i)
        for i, layer in enumerate(layers)
    )


def with_weights(params: Params, weights: Sequence[Pytree]) -> Params:
    pairs = zip(params.layers, weights, strict=True)
    return params._replace(layers=tuple(layer._replace(sparse=w) for layer, w in pairs))


Sums = dict[str, Any]
"""By name: f32[] of one window, on the device, or the float64 of several, on the host."""


@dataclass(frozen=True)
class LayerQuality:
    """Rates of one layer; a rate over nothing is NaN."""

    active: float  # share of neurons that are not zero
    kept: float  # share of neurons that are computed
    recall: float  # share of the active ones that are kept
    precision: float  # share of the kept ones that are active
    energy: float  # share of the squares of all neurons that the kept ones hold
    error: float  # |sparse - dense| / |dense| of the FFN's output, without the residual

    @staticmethod
    def from_sums(sums: Sums) -> "LayerQuality":
        return LayerQuality(
            active=_ratio(sums, "active", "neurons"),
            kept=_ratio(sums, "kept", "neurons"),
            recall=_ratio(sums, "both", "active"),
            precision=_ratio(sums, "both", "kept"),
            energy=_ratio(sums, "kept_energy", "energy"),
            error=_ratio(sums, "error", "output") ** 0.5,
        )


@dataclass(frozen=True)
class ModelQuality:
    """The whole model with the predictor in every layer, against the dense one."""

    tokens: int  # judged
    kl: float  # mean KL(dense, sparse) of the next token's distribution, nats
    perplexity_dense: float  # of the text
    perplexity: float  # of the text
    same_top: float  # share of tokens with the same most likely successor

    @staticmethod
    def from_sums(sums: Sums) -> "ModelQuality":
        kl, dense, sparse, same = (_ratio(sums, name, "tokens") for name in ("kl", "dense", "sparse", "same"))
        return ModelQuality(int(sums["tokens"]), kl, float(np.exp(dense)), float(np.exp(sparse)), same)


_sum = partial(jnp.sum, dtype=jnp.float32)


def layer_sums(predictor: Predictor, ffn: FFN, weights: Pytree, layer: Layer, x_RD: jax.Array) -> Sums:
    """Sums over rows f32[R, D], all of which count: of neurons (all, not zero, kept, and both), of their squares (all,
    kept), and of the squares of the dense output and of its difference to the sparse one."""
    n = jnp.asarray([x_RD.shape[0]], jnp.int32)
    dense_RF = ffn.neurons(layer, x_RD, n)
    sparse_RF, keep_RF = kept_neurons(predictor, ffn, weights, layer, x_RD, n)
    dense_RD, sparse_RD = ffn.down(layer, dense_RF, n), ffn.down(layer, sparse_RF, n)
    active, kept = dense_RF != 0, keep_RF != 0
    return {
        "neurons": jnp.float32(dense_RF.size),
        "active": _sum(active),
        "kept": _sum(kept),
        "both": _sum(active & kept),
        "energy": _sum(dense_RF**2),
        "kept_energy": _sum(jnp.where(kept, dense_RF, jnp.float32(0)) ** 2),
        "output": _sum(dense_RD**2),
        "error": _sum((sparse_RD - dense_RD) ** 2),
    }


@jax.jit
def model_sums(dense_RV: jax.Array, sparse_RV: jax.Array, next_R: jax.Array) -> Sums:
    """Sums over logits f32[R, V] of both models: KL(dense, sparse) in nats, negative log-likelihoods of the tokens
    `next_R` int32[R] that follow, and rows whose most likely token is the same."""
    p, q = jax.nn.log_softmax(dense_RV), jax.nn.log_softmax(sparse_RV)
    at = next_R[:, None]
    return {
        "tokens": jnp.float32(next_R.shape[0]),
        "kl": _sum(jnp.exp(p) * (p - q)),
        "dense": -_sum(jnp.take_along_axis(p, at, axis=1)),
        "sparse": -_sum(jnp.take_along_axis(q, at, axis=1)),
        "same": _sum(jnp.argmax(p, axis=1) == jnp.argmax(q, axis=1)),
    }


@partial(jax.jit, static_argnums=0)
def _calls(part: FFN | Predictor, weights: Pytree, layer: Layer, x_RD: jax.Array) -> jax.Array:
    """A row through the FFN or the predictor, many times in one program, each after the last."""
    one = jnp.ones((1,), jnp.int32)

    def again(_, x_RD):  # depends on all of the result, and changes nothing
        if isinstance(part, FFN):
            total = jnp.sum(part.down(layer, part.neurons(layer, x_RD, one), one))
        else:
            total = jnp.sum(part.keep(weights, layer, x_RD, one).astype(jnp.int32))
        return jnp.where(total == jnp.asarray(12345, total.dtype), -x_RD, x_RD)

    return jax.lax.fori_loop(0, _CALLS, again, x_RD)


def _ratio(sums: Sums, part: str, whole: str) -> float:
    return float(sums[part]) / float(sums[whole]) if sums[whole] else float("nan")


@dataclass(frozen=True)
class Cost:
    """The cost of a predictor for one token in one layer, beside the dense FFN."""

    predictor_bytes: int  # weights that the prediction reads; an oracle is a bound and reads nothing
    sparse_bytes: int  # of the FFN's matrices, for the kept neurons
    dense_bytes: int  # of the FFN's matrices, all of them
    predictor_s: float  # seconds of the prediction, by the model's kernels
    dense_s: float  # seconds of the dense FFN

    @property
    def bytes_share(self) -> float:
        """Bytes of prediction and kept neurons over those of the dense FFN."""
        return (self.predictor_bytes + self.sparse_bytes) / self.dense_bytes


def matrices(layer: Layer) -> list[QTensor]:
    return [m for m in (layer.ffn_gate, layer.ffn_up, layer.ffn_down) if m is not None]


def cost_of(predictor: Predictor, ffn: FFN, weights: Pytree, layer: Layer, *, kept: float, width: int) -> Cost:
    """Counts and measures; `kept` is the share of neurons kept, `width` is D."""
    whole = sum(m.nbytes for m in matrices(layer))
    own, rest = sum(leaf.nbytes for leaf in jax.tree.leaves(weights)), whole
    if isinstance(predictor, GateThreshold):  # its gate is read in full, and not again
        own, rest = own + gate_matrix(layer).nbytes, rest - gate_matrix(layer).nbytes
    x_RD = jnp.ones((1, width), jnp.float32)

    def timed(part: FFN | Predictor, weights: Pytree) -> Callable[[], float]:
        return lambda: seconds(lambda: _calls(part, weights, layer, x_RD).block_until_ready()) / _CALLS

    taken = interleaved({"keep": timed(predictor, weights), "dense": timed(ffn, None)}, repeats=_REPEATS)
    return Cost(
        predictor_bytes=0 if isinstance(predictor, Oracle) else own,
        sparse_bytes=round(kept * rest),
        dense_bytes=whole,
        predictor_s=median(taken["keep"]),
        dense_s=median(taken["dense"]),
    )


@dataclass(frozen=True)
class Evaluation:
    name: str  # of the predictor
    # on the residuals of the dense model, so that no layer answers for another's mistakes
    layers: tuple[LayerQuality, ...]
    mean: LayerQuality  # the same over all layers together
    model: ModelQuality  # with the predictor in every layer
    cost: Cost  # of one token in one layer, on average


class Evaluator:
    """Judges predictors on the same windows of text.

    The dense model reads the first half of a window, the prompt; the second half is judged. So every predictor starts
    from the same cache, and a predictor that needs a prompt has one.

    Args:
        model: with dense matrices.
        windows_Wn: int32[W, n], n even.
    """

    def __init__(self, model: Model, windows_Wn: np.ndarray):
        model.check_whole("judging predictors")
        self.model, self.windows_Wn = model, windows_Wn
        self.ffn = FFN.from_config(model.config, model.kernels)
        dense = dense_ffn(model.config, model.kernels)
        watched = make_forward(model.config, model.kernels, lambda layer, x, n: (dense(layer, x, n)[0], x))
        self._dense = _program(watched)

    def __call__(
        self, predictor: Predictor, weights: Sequence[Pytree] | None = None, *,
        progress: Callable[[int], None] | None = None,
    ) -> Evaluation:  # fmt: skip
        """Judges a predictor of this model's `ffn`; `weights` of each layer are None if it fits itself to each prompt.
        `progress` is called with the windows done."""

        def masked_ffn(layer: Layer, x_RD, n_valid_B):
            a_RF, _ = kept_neurons(predictor, self.ffn, layer.sparse, layer, x_RD, n_valid_B)
            return self.ffn.down(layer, a_RF, n_valid_B, residual=x_RD), None

        half, c = self.windows_Wn.shape[1] // 2, self.model.config
        capacity = self.model.capacity_for(2 * half)
        params, sums = self.model.params_for(capacity), jax.jit(partial(layer_sums, predictor, self.ffn))
        masked = _program(make_forward(c, self.model.kernels, masked_ffn))
        fitted = weights or ()
        by_layer: Pytree = None
        whole: Pytree = None
        for w, tokens in enumerate(self.windows_Wn):
            prompt, rest = jnp.asarray(tokens[None, :half]), jnp.asarray(tokens[None, half:])
            _, prompt_LnD, cache = self._dense(params, prompt, self.model.new_cache(1, capacity))
            dense_nV, rows_LnD, _ = self._dense(params, rest, cache)
            if predictor.needs is Needs.PROMPT:
                fitted = fit_layers(predictor, params.layers, prompt_LnD)
            found = [sums(own, layer, x) for own, layer, x in zip(fitted, params.layers, rows_LnD, strict=True)]
            by_layer = _added(by_layer, found)
            sparse_nV, _, _ = masked(with_weights(params, fitted), rest, cache)
            whole = _added(whole, model_sums(dense_nV[:-1], sparse_nV[:-1], rest[0, 1:]))
            if progress is not None:
                progress(w + 1)
        mean = LayerQuality.from_sums(jax.tree.map(lambda *each: sum(each), *by_layer))
        middle = c.n_layers // 2
        return Evaluation(
            name=predictor.name,
            layers=tuple(map(LayerQuality.from_sums, by_layer)),
            mean=mean,
            model=ModelQuality.from_sums(whole),
            cost=cost_of(predictor, self.ffn, fitted[middle], params.layers[middle], kept=mean.kept, width=c.d_model),
        )


def _program(forward: ForwardFn) -> Callable:
    """program(params, tokens_1n, cache, count_B=None) -> (logits f32[n, V], statistics by layer, cache).

    The cache has `count` tokens more, all n if it is None.
    """

    @jax.jit
    def program(params, tokens_1n, cache, count_B=None):
        out, cache = forward(params, tokens_1n, cache, n_valid_B=count_B, want=Want())
        count_B = jnp.full((1,), tokens_1n.shape[1], jnp.int32) if count_B is None else count_B
        return out.logits[0], out.stats, kv.commit(cache, count_B)

    return program


def _added(total: Pytree, more: Pytree) -> Pytree:
    more = jax.tree.map(np.float64, more)
    return more if total is None else jax.tree.map(np.add, total, more)


def quality_in_chunks(dense: Model, model: Model, windows_Wn: np.ndarray, *, rows: int) -> ModelQuality:
    """Both models on the second half of each window, after the dense one has read the first for both.

    `model` is another FFN on the weights of `dense`, and reads `rows` tokens at once; the windows int32[W, n] have an
    even n. By contract C1 `rows` changes nothing, except for a rule that looks at the rows of a pass together
    (`UnionCap`); a verification sees passes of `rows` right tokens at best.
    """
    half = windows_Wn.shape[1] // 2
    whole, chunks = (m.programs.once(("quality",), partial(_program, m.forward)) for m in (dense, model))
    capacity = dense.capacity_for(2 * half + rows)
    params, own = dense.params_for(capacity), model.params_for(capacity)
    total: Pytree = None

    def read(chunk, cache):
        tokens_1n, count_B = chunk.arrays
        logits_nV, _, cache = chunks(own, tokens_1n, cache, count_B)
        return logits_nV, cache

    for tokens in windows_Wn:
        _, _, cache = whole(params, jnp.asarray(tokens[None, :half]), dense.new_cache(1, capacity))
        wanted, _, _ = whole(params, jnp.asarray(tokens[None, half : 2 * half]), cache)
        found = [
            np.asarray(out)[: chunk.count[0]]
            for chunk, out, _ in prefill(read, [tokens[half : 2 * half]], cache, rows=rows)
        ]
        following = jnp.asarray(tokens[half + 1 : 2 * half])
        total = _added(total, model_sums(wanted[:-1], jnp.asarray(np.concatenate(found))[:-1], following))
    return ModelQuality.from_sums(total)
