"""Unions of experts: how many experts the rows of one forward wake together, how many of their neurons stay idle in all
of those rows, and the bytes that the forward reads for it.

    bytes(n) = dense + sum over layers of U(n) (gate + (1 - z(n)) (up + down))      of one expert's matrices

Rows that choose k of E experts by chance wake E (1 - (1 - k/E)^n), which is what `Traffic.read_weights` supposes; real
rows do not. A dense FFN is one expert that all rows choose.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from specsparse.engine.experts import ChosenExperts, experts_ffn
from specsparse.engine.llama import Want, dense_ffn, make_forward
from specsparse.engine.model import Model
from specsparse.kernels.reference.dense import valid
from specsparse.measure.costs.roofline import ModelOutline

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)(?:_exps)?\.weight")


@dataclass(frozen=True)
class Union:
    """What forwards of `rows` rows wake, means over `sets` of them."""

    rows: int
    sets: int
    experts_L: np.ndarray  # U(n), f64[L], experts that some row chooses
    active_L: np.ndarray  # f64[L], neurons of those that are not idle in some row that chose them
    chosen: int  # k
    width: int  # F

    @property
    def idle_L(self) -> np.ndarray:
        """z(n), f64[L]: the share of the woken experts' neurons that is idle in all rows that chose their expert."""
        return 1 - self.active_L / (self.experts_L * self.width)

    @property
    def rows_an_expert(self) -> float:
        """Rows that a woken expert computes, mean over the layers' totals."""
        return self.rows * self.chosen * len(self.experts_L) / float(self.experts_L.sum())

    @classmethod
    def from_rows(cls, seen: ChosenExperts, sets_Sn: Sequence[Sequence[int]] | np.ndarray) -> "Union":
        """Of sets of n rows each, by their places among the R rows that were seen.

        `seen` has arrays of all layers: int32[L, R, k] and bool[L, R, k, F]; the rows of the sets count.
        """
        sets_Sn, experts_LRk, active_LRkF = (np.asarray(a) for a in (sets_Sn, seen.experts, seen.active))
        (L, _, k, F), (S, n) = active_LRkF.shape, sets_Sn.shape
        woken_SE, open_SEF = (np.zeros((S, int(experts_LRk.max()) + 1, *more), bool) for more in ((), (F,)))
        experts_L, active_L = np.zeros(L), np.zeros(L)
        for layer, (experts_Rk, active_RkF) in enumerate(zip(experts_LRk, active_LRkF, strict=True)):
            woken_SE[:], open_SEF[:] = False, False
            for i, j in itertools.product(range(n), range(k)):
                rows_S = sets_Sn[:, i]
                at = np.arange(S), experts_Rk[rows_S, j]
                woken_SE[at] = True
                open_SEF[at] |= active_RkF[rows_S, j]
            experts_L[layer], active_L[layer] = woken_SE.sum() / S, open_SEF.sum() / S
        return cls(n, S, experts_L, active_L, k, F)

    def read_bytes(self, model: ModelOutline) -> float:
        """Bytes of weights that such a forward reads if it leaves idle neurons out, of up and down."""

        def scaled(name: str, nbytes: float) -> float:
            """The bytes that make `Traffic`, which reads k of E experts, read U(n)."""
            if (found := _EXPERTS.fullmatch(name)) is None:
                return nbytes
            layer = int(found[1])
            active = 1.0 if found[2] == "gate" else 1 - self.idle_L[layer]
            return nbytes * self.experts_L[layer] / self.chosen * active

        tensors = tuple((name, kind, scaled(name, nbytes)) for name, kind, nbytes in model.tensors)
        return replace(model, tensors=tensors).traffic().weight_bytes


def watching(model: Model) -> Model:
    """The same with a forward function whose `stats` are `ChosenExperts` with their active neurons; slower."""
    config, kernels = model.config, model.kernels
    if config.n_experts:
        return replace(model, forward=make_forward(config, kernels, experts_ffn(config, kernels, neurons=True)))
    dense = dense_ffn(config, kernels)

    def one_expert(layer, x_RD, n_valid_B):
        how = {"norm": layer.ffn_norm, "eps": config.norm_eps, "n_valid": n_valid_B}
        (gate_RF,) = kernels.linear(x_RD, (layer.ffn_gate,), **how)
        counts_R1 = valid(n_valid_B, len(x_RD))[:, None]
        open_RF = gate_RF > 0 if config.activation in ("relu", "relu2") else jnp.broadcast_to(counts_R1, gate_RF.shape)
        chosen = ChosenExperts(jnp.where(counts_R1, 0, -1), jnp.ones_like(gate_RF[:, :1]), open_RF[:, None])
        return dense(layer, x_RD, n_valid_B)[0], chosen

    return replace(model, forward=make_forward(config, kernels, one_expert))


def of_text(model: Model, ids: Sequence[int]) -> ChosenExperts:
    """The arrays of all layers and tokens of a text, of a model that `watching` made; the text fits the context."""

    def program(params, tokens_1n, cache):
        return model.forward(params, tokens_1n, cache, want=Want("none"))[0].stats

    capacity, tokens = model.capacity_for(len(ids)), jnp.asarray([ids], jnp.int32)
    run = model.programs.once(("unions", len(ids)), lambda: model.devices.jit(program))
    return run(model.params_for(capacity), tokens, model.new_cache(1, capacity))
