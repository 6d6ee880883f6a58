"""An FFN of experts: the router chooses them and their weights for each row, and the kernels compute them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine.config import ROUTER, ModelConfig
from specsparse.engine.weights import Layer
from specsparse.kernels import Experts, Kernels


class ChosenExperts(NamedTuple):
    """The experts of rows, best first, as llama.cpp orders its steps; ties go to the lower index."""

    experts: jax.Array  # int32[R, k]; -1 in rows that do not count
    weights: jax.Array  # f32[R, k]
    active: jax.Array | None = None  # bool[R, k, F], neurons that are not idle, if `experts_ffn` is asked for them


def choice_options(config: ModelConfig) -> dict[str, Any]:
    """How `kernels.choose` chooses the experts of a row."""
    assert config.family.routing is not None
    return {"k": config.n_chosen, "gating": config.gating, "normalised": config.family.routing.normalised}


def experts_ffn(config: ModelConfig, kernels: Kernels, *, neurons: bool = False) -> Callable:
    """ffn(layer, x_RD, n_valid_B, entered_RD) -> (x + its experts' sum, `ChosenExperts`).

    `entered_RD` are the rows that entered the layer, which an early router reads (SmallThinker, arXiv:2507.20984).
    With `neurons` it computes every expert's gate for every row once more, and says which neurons are not idle: all,
    unless the activation is ReLU.
    """
    routing = config.family.routing
    assert routing is not None

    def ffn(layer: Layer, x_RD, n_valid_B, entered_RD):
        zeros_RD = jnp.zeros_like(x_RD)  # the fused norm is that of a sum
        z_RD = kernels.add_normed(zeros_RD, x_RD, layer.ffn_norm, n_valid=n_valid_B, eps=config.norm_eps)
        read_RD, biases = entered_RD if routing.early else z_RD, layer.bias(ROUTER)
        (logits_RE,) = kernels.linear(read_RD, (layer.router,), biases=biases, n_valid=n_valid_B)
        chosen = ChosenExperts(*kernels.choose(logits_RE, n_valid=n_valid_B, **choice_options(config)))
        y_RD = x_RD + kernels.experts(z_RD, chosen.experts, chosen.weights, layer.experts)
        if neurons and layer.experts is not None:
            chosen = chosen._replace(active=active(layer.experts, z_RD, n_valid_B, chosen.experts))
        return y_RD, chosen

    def active(experts: Experts, z_RD, n_valid_B, experts_Rk):
        counts_Rk1 = (experts_Rk >= 0)[..., None]
        if config.activation != "relu":
            return jnp.broadcast_to(counts_Rk1, (*experts_Rk.shape, config.d_ff))
        # A compiled loop, not E calls: a model has thousands of experts.
        open_ERF = jax.lax.map(lambda gate: kernels.linear(z_RD, (gate,), n_valid=n_valid_B)[0] > 0, experts.gate)
        return open_ERF[experts_Rk, jnp.arange(len(z_RD))[:, None]] & counts_Rk1

    return ffn
