"""The contract every predictor keeps."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from omegaconf import OmegaConf

from specsparse.errors import UserError
from specsparse.predictors import Needs, get_predictor
from specsparse.predictors.mlp import mlp_weights
from specsparse.predictors.registry import PREDICTORS
from specsparse.predictors.svd import as_mlp, factorise, normed_gate
from specsparse.run import conf_dir
from tests.predictors.planted import D, F, plant

CASES = {
    "mlp": {},
    "svd": {"rank": 8},
    "svd_recall": {"rank": 8, "recall": 0.9},
    "signbit": {"alpha": 1.02},
    "gate_threshold": {"share": 0.3},
    "sequence": {"share": 0.3},
    "coreinfer": {"share": 0.3},
    "oracle": {},
    "random": {"share": 0.3},
    "teal": {"share": 0.3},
}
B, N = 3, 5


@pytest.fixture(scope="module")
def planted():
    return plant()


@pytest.fixture(params=CASES, scope="module")
def case(request, planted):
    """Predictor, its weights, and `keep` compiled."""
    name = request.param.removesuffix("_recall")
    predictor = get_predictor(name, planted.ffn, **CASES[request.param])
    if predictor.needs is Needs.TRAINING:
        weights = mlp_weights(*as_mlp(*factorise(normed_gate(planted.layer), 8)))
    else:
        weights = predictor.fit(planted.layer, jnp.asarray(planted.rows), index=1)
    return predictor, weights, jax.jit(predictor.keep)


def mask(case, planted, rows, n_valid):
    _, weights, keep = case
    return np.asarray(keep(weights, planted.layer, jnp.asarray(rows), jnp.asarray(n_valid, jnp.int32)))


def test_a_mask_is_uint8_of_zeros_and_ones(case, planted):
    got = mask(case, planted, planted.held_out[: B * N], [N] * B)
    assert got.shape == (B * N, F) and got.dtype == np.uint8
    assert set(np.unique(got)) == {0, 1}


def test_rows_that_do_not_count_keep_nothing_and_change_nothing(case, planted):
    rows = planted.held_out[: B * N].reshape(B, N, D)
    whole = mask(case, planted, rows.reshape(-1, D), [N] * B).reshape(B, N, F)
    dirty = rows.copy()
    dirty[0, 2:], dirty[1] = np.nan, 1e30
    got = mask(case, planted, dirty.reshape(-1, D), [2, 0, N]).reshape(B, N, F)
    assert not got[0, 2:].any() and not got[1].any()
    np.testing.assert_array_equal(got[0, :2], whole[0, :2])
    np.testing.assert_array_equal(got[2], whole[2])


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1), (3, 5)])
def test_a_row_does_not_depend_on_its_neighbours(case, planted, shape):
    """Contract C1, by equality: the same rows at every place of every batch."""
    batch, n = shape
    rows = planted.held_out[: batch * n]
    alone = np.concatenate([mask(case, planted, row[None], [1]) for row in rows])
    np.testing.assert_array_equal(mask(case, planted, rows, [n] * batch), alone)
    np.testing.assert_array_equal(mask(case, planted, rows[::-1].copy(), [n] * batch), alone[::-1])


@pytest.mark.parametrize("name", ["svd", "gate_threshold", "oracle", "teal"])
def test_the_reference_kernels_keep_the_contract_too(name):
    planted = plant(rows=60, kernel="reference")
    predictor = get_predictor(name, planted.ffn)
    weights, keep = predictor.fit(planted.layer, jnp.asarray(planted.rows)), jax.jit(predictor.keep)
    case, rows = (predictor, weights, keep), planted.held_out[:15]
    alone = np.concatenate([mask(case, planted, row[None], [1]) for row in rows])
    np.testing.assert_array_equal(mask(case, planted, rows, [5, 5, 5]), alone)


def test_predictors_are_static_and_their_weights_are_arrays(case):
    predictor, weights, _ = case
    assert hash(predictor) == hash(predictor) and predictor.name in PREDICTORS.names()
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(weights))


@pytest.mark.parametrize("name", sorted(PREDICTORS.names()))
def test_every_predictor_has_a_config_with_its_defaults(name, planted):
    options = OmegaConf.to_container(OmegaConf.load(conf_dir() / "predictor" / f"{name}.yaml"))
    assert options.pop("name") == name
    assert get_predictor(name, planted.ffn, **options) == get_predictor(name, planted.ffn)


def test_there_is_no_config_without_a_predictor():
    assert {p.stem for p in (conf_dir() / "predictor").glob("*.yaml")} == {*PREDICTORS.names(), "none"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("signbits", {}, "did you mean signbit"),
        ("svd", {"rnak": 3}, r"predictor.rnak is no option of svd; did you mean rank"),
        ("svd", {"rank": 0}, "rank=0 must be a whole number of at least 1"),
        ("svd", {"rank": 2.5}, "predictor.rank=2.5 must be a whole number"),
        ("svd", {"recall": 1.5}, "recall=1.5 must be a number above 0 and at most 1"),
        ("svd", {"codes": "q4"}, "must be one of f32, f16, bf16"),
        ("signbit", {"alpha": 0}, "alpha=0 must be a number above 0"),
        ("random", {"share": float("nan")}, "share=nan"),
        ("random", {"seed": -1}, "seed=-1"),
        ("sequence", {"rule": "core"}, "must be one of griffin, coreinfer"),
        ("oracle", {"share": 0.5}, "no option of oracle; valid: none"),
    ],
)
def test_mistakes_are_named(planted, name, options, message):
    with pytest.raises(UserError, match=message):
        get_predictor(name, planted.ffn, **options)


@pytest.mark.parametrize("name", [n for n in CASES if not n.endswith("_recall")])
def test_what_is_missing_for_a_fit_is_named(planted, name):
    predictor = get_predictor(name, planted.ffn)
    if predictor.needs is Needs.NOTHING:
        predictor.fit(planted.layer)
        return
    with pytest.raises(UserError, match="is trained or read" if name == "mlp" else f"predictor {predictor.name} needs"):
        predictor.fit(planted.layer)
    if name != "mlp":
        with pytest.raises(UserError, match='load it with ffn="dense"'):
            predictor.fit(planted.layer._replace(ffn_down=None), jnp.asarray(planted.rows))


OWN = """
from dataclasses import dataclass
from typing import Annotated

from specsparse.predictors import FFN, Needs, Predictor
from specsparse.predictors.base import as_mask
from specsparse.support.options import Internal, Share

@dataclass(frozen=True)
class First(Predictor):
    ffn: Annotated[FFN, Internal()]
    share: Share = 0.5
    needs = Needs.NOTHING

    def fit(self, layer, rows_ND=None, *, index=0):
        return None

    def keep(self, weights, layer, x_RD, n_valid_B):
        import jax.numpy as jnp
        width = layer.ffn_gate.shape[0]
        first_F = jnp.arange(width) < round(self.share * width)
        return as_mask(jnp.broadcast_to(first_F, (x_RD.shape[0], width)), n_valid_B)
"""


def test_a_predictor_of_one_s_own(planted, tmp_path, monkeypatch):
    (tmp_path / "own_predictor_of_the_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = "own_predictor_of_the_test:First"
    predictor = get_predictor(name, planted.ffn, share=0.25)
    assert predictor.name == "First" and predictor.share == 0.25
    got = mask((predictor, None, jax.jit(predictor.keep)), planted, planted.held_out[:3], [3])
    np.testing.assert_array_equal(got, np.broadcast_to(np.arange(F) < round(0.25 * F), (3, F)))
    with pytest.raises(UserError, match=r"predictor\.share=2 must be a number above 0 and at most 1"):
        get_predictor(name, planted.ffn, share=2)
    with pytest.raises(UserError, match=f"predictor.shape is no option of {name}; did you mean share"):
        get_predictor(name, planted.ffn, shape=1)
