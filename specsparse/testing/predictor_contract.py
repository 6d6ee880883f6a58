"""The contract of a predictor, for anybody's own: `check_predictor("mine:First")` is one line in a test."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse import kernels
from specsparse.engine.weights import Layer
from specsparse.kernels.packing.dequant import pack_float
from specsparse.predictors import FFN, Needs, Predictor, get_predictor
from specsparse.predictors.scored import as_mlp, factorise, mlp_weights, normed_gate

D, F, RANK, EPS = 64, 192, 6, 1e-5
"""Width, neurons, rank of the gate, and epsilon of the norm."""


class Planted(NamedTuple):
    """A layer, its FFN, and residuals f32[N, D] of two texts."""

    ffn: FFN
    layer: Layer
    rows: np.ndarray
    held_out: np.ndarray


def plant(*, act: str = "relu", up_act: str | None = None, rows: int = 400, kernel: str | None = None) -> Planted:
    """An FFN with a gate of low rank; one neuron in six is active in a row, and rows differ in size tenfold.

    Args:
        act, up_act: as in `FFN`.
        rows: of both texts together.
        kernel: name of the kernels; None for those of this machine.
    """
    rng = np.random.default_rng(0)
    basis = rng.normal(0, 1, (RANK, D)) / np.sqrt(D)
    gate = rng.normal(0, 1, (F, RANK)) @ basis + rng.normal(0, 0.05 / np.sqrt(D), (F, D))
    gate[:, 0] = -rng.uniform(0.2, 0.6, F)
    up, down = (rng.normal(0, 1 / np.sqrt(D), shape) for shape in ((F, D), (D, F)))
    norm = rng.uniform(0.5, 1.5, D) * rng.choice([-1.0, 1.0], D)
    file = {"ffn_gate": gate / norm, "ffn_up": up, "ffn_down": down}  # the file's gate is before norm
    packed: dict[str, Any] = {name: pack_float(jnp.asarray(m, jnp.float32)) for name, m in file.items()}
    unread: dict[str, Any] = dict.fromkeys(("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"))
    layer = Layer(**unread, **packed, ffn_norm=jnp.asarray(norm, jnp.float32), biases={})
    x = rng.normal(0, 1, (rows, D))
    x[:, 0] = 6.0
    x *= 10 ** rng.uniform(-0.5, 0.5, (rows, 1))
    x = x.astype(np.float32)
    return Planted(FFN(kernels.get(kernel), EPS, act, up_act), layer, x[: rows // 2], x[rows // 2 :])


def check_predictor(name: str, **options: Any) -> None:
    """Refuses a predictor that breaks the contract of `predictors.base`, on an FFN with planted sparsity.

    Args:
        name: of a predictor, or `module:Class`.
        options: its own.

    Raises:
        AssertionError: says what is broken.
        UserError: it is unknown, or takes no such option.
    """
    case = PredictorCase.fitted(plant(), name, **options)
    for check in PREDICTOR_CHECKS:
        check(case)


class PredictorCase(NamedTuple):
    """A predictor under test, its weights for a planted layer, and `keep`, compiled."""

    predictor: Predictor
    weights: Any
    keep: Any
    planted: Planted

    @classmethod
    def fitted(cls, planted: Planted, name: str, **options: Any) -> "PredictorCase":
        """Fitted to the first text of the layer; a trained predictor has the gate's own largest singular values."""
        predictor = get_predictor(name, planted.ffn, **options)
        if predictor.needs is Needs.TRAINING:
            weights: Any = mlp_weights(*as_mlp(*factorise(normed_gate(planted.layer), 8)))
        else:
            weights = predictor.fit(planted.layer, jnp.asarray(planted.rows), index=1)
        return cls(predictor, weights, jax.jit(predictor.keep), planted)

    def mask(self, rows_ND: np.ndarray, n_valid: list[int]) -> np.ndarray:
        """The neurons that it keeps of each row."""
        given = (jnp.asarray(rows_ND), jnp.asarray(n_valid, jnp.int32))
        return np.asarray(self.keep(self.weights, self.planted.layer, *given))


def static_with_arrays_for_weights(case: PredictorCase) -> None:
    """It is hashable, and its weights are a pytree of arrays."""
    assert hash(case.predictor) == hash(case.predictor), "its hash changes"
    kinds = {type(leaf).__name__ for leaf in jax.tree.leaves(case.weights) if not isinstance(leaf, jax.Array)}
    assert not kinds, f"its weights hold {kinds}, not arrays alone"


def a_mask_is_uint8_of_zeros_and_ones(case: PredictorCase) -> None:
    """`keep` gives uint8[R, F] that holds nothing but 0 and 1."""
    got = case.mask(case.planted.held_out[:15], [5, 5, 5])
    assert got.shape == (15, F) and got.dtype == np.uint8, f"keep gives {got.dtype}{got.shape}, not uint8{(15, F)}"
    assert {*np.unique(got)} <= {0, 1}, "a mask holds other numbers than 0 and 1"


def rows_that_do_not_count_keep_and_change_nothing(case: PredictorCase) -> None:
    """Rows beyond `n_valid` keep no neuron and change no other row, even if they hold NaN."""
    rows = case.planted.held_out[:15].reshape(3, 5, D)
    whole = case.mask(rows.reshape(-1, D), [5, 5, 5]).reshape(3, 5, F)
    dirty = rows.copy()
    dirty[0, 2:], dirty[1] = np.nan, 1e30
    got = case.mask(dirty.reshape(-1, D), [2, 0, 5]).reshape(3, 5, F)
    assert not got[0, 2:].any() and not got[1].any(), "it keeps neurons in rows beyond n_valid"
    same = np.array_equal(got[0, :2], whole[0, :2]) and np.array_equal(got[2], whole[2])
    assert same, "rows beyond n_valid change others"


def a_row_does_not_depend_on_its_neighbours(case: PredictorCase) -> None:
    """Contract C1, by equality: the same rows at every place of every batch."""
    for batch, n in ((1, 1), (1, 7), (5, 1), (3, 5)):
        rows = case.planted.held_out[: batch * n]
        alone = np.concatenate([case.mask(row[None], [1]) for row in rows])
        for there, mine in ((rows, alone), (rows[::-1].copy(), alone[::-1])):
            assert np.array_equal(case.mask(there, [n] * batch), mine), "a row's mask depends on its neighbours"


PREDICTOR_CHECKS = (
    static_with_arrays_for_weights,
    a_mask_is_uint8_of_zeros_and_ones,
    rows_that_do_not_count_keep_and_change_nothing,
    a_row_does_not_depend_on_its_neighbours,
)
"""The parts of the contract, each a function of a `PredictorCase`."""
