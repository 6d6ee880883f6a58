"""A predictor judged on a model and a text: each layer on its own, the whole model, and what it costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.llama import Want, make_forward
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Layer
from specsparse.predictors.base import Needs, Predictor
from specsparse.predictors.ffn import FFN
from specsparse.predictors.fit.collect import make_collector
from specsparse.predictors.fit.cost import Cost, cost_of
from specsparse.predictors.fit.quality import LayerQuality, ModelQuality, layer_sums, model_sums
from specsparse.predictors.masked import masked_ffn, with_weights


@dataclass(frozen=True)
class Evaluation:
    """What was found.

    Attributes:
        name: of the predictor.
        layers: on the residuals of the dense model, so that no layer answers for another's mistakes.
        mean: the same over all layers together.
        model: with the predictor in every layer.
        cost: of one token in one layer, on average.
    """

    name: str
    layers: tuple[LayerQuality, ...]
    mean: LayerQuality
    model: ModelQuality
    cost: Cost


@dataclass(eq=False)
class Evaluator:
    """Judges predictors on the same windows of text.

    The first half of a window is a prompt, which the dense model reads; the second half is judged. So every predictor
    starts from the same cache, and one that needs a prompt has one.

    Attributes:
        model: with dense matrices.
        windows_Wn: int32[W, n], n even.
    """

    model: Model
    windows_Wn: np.ndarray
    ffn: FFN = field(init=False)

    def __post_init__(self):
        self.ffn = FFN.of(self.model.config, self.model.kernels)
        self._half = self.windows_Wn.shape[1] // 2
        self._capacity = self.model.capacity_for(2 * self._half)
        self._dense = make_collector(self.model, logits=True)
        self._params = self.model.params_for(self._capacity)

    def __call__(
        self,
        predictor: Predictor,
        weights: Sequence[Pytree] | None = None,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Evaluation:
        """Judges a predictor.

        Args:
            predictor: of this model's `ffn`.
            weights: of each layer; None where the predictor fits itself to each prompt.
            progress: called with the windows done.
        """
        sums = jax.jit(partial(layer_sums, predictor, self.ffn))
        sparse = self._sparse_program(predictor)
        by_layer, whole, own = None, None, weights
        for w, tokens in enumerate(self.windows_Wn):
            prompt, rest = jnp.asarray(tokens[None, : self._half]), jnp.asarray(tokens[None, self._half :])
            _, prompt_LnD, cache = self._dense(self._params, prompt, self.model.new_cache(1, self._capacity))
            dense_nV, rows_LnD, _ = self._dense(self._params, rest, cache)
            if predictor.needs is Needs.PROMPT:
                own = fit_layers(predictor, self._params.layers, prompt_LnD)
            found = [sums(o, layer, x) for o, layer, x in zip(own, self._params.layers, rows_LnD, strict=True)]
            by_layer = _added(by_layer, found)
            sparse_nV = sparse(with_weights(self._params, own), rest, cache)
            whole = _added(whole, model_sums(dense_nV[:-1], sparse_nV[:-1], rest[0, 1:]))
            if progress is not None:
                progress(w + 1)
        return self._result(predictor, own, by_layer, whole)

    def _sparse_program(self, predictor: Predictor) -> Callable:
        forward = make_forward(self.model.config, self.model.kernels, masked_ffn(predictor, self.ffn))

        @jax.jit
        def program(params, tokens_1n, cache):
            return forward(params, tokens_1n, cache, want=Want())[0].logits[0]

        return program

    def _result(self, predictor: Predictor, weights: Sequence[Pytree], by_layer, whole) -> Evaluation:
        layers = tuple(LayerQuality.of(sums) for sums in by_layer)
        mean = LayerQuality.of(jax.tree.map(lambda *each: sum(each), *by_layer))
        middle = len(layers) // 2
        return Evaluation(
            name=predictor.name,
            layers=layers,
            mean=mean,
            model=ModelQuality.of(whole),
            cost=cost_of(
                predictor, self.ffn, weights[middle], self._params.layers[middle], kept=mean.kept,
                width=self.model.config.d_model,
            ),
        )  # fmt: skip


def fit_layers(
    predictor: Predictor, layers: Sequence[Layer], rows_LND: np.ndarray | jax.Array | None
) -> tuple[Pytree, ...]:
    """A predictor's weights of every layer, from residuals f32[L, N, D] where it needs some."""
    return tuple(
        predictor.fit(layer, None if rows_LND is None else jnp.asarray(rows_LND[i]), index=i)
        for i, layer in enumerate(layers)
    )


def _added(total: Pytree | None, more: Pytree) -> Pytree:
    """Sums in float64 on the host."""
    more = jax.tree.map(lambda x: np.float64(x), more)
    return more if total is None else jax.tree.map(np.add, total, more)
