"""The contract every predictor keeps."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
from omegaconf import OmegaConf

from specsparse.errors import UserError
from specsparse.predictors import Needs, get_predictor
from specsparse.predictors.base import PREDICTORS
from specsparse.run import conf_dir
from specsparse.testing.predictor_contract import (
    PREDICTOR_CHECKS,
    F,
    PredictorCase,
    a_row_does_not_depend_on_its_neighbours,
    check_predictor,
    plant,
)
from tests.cells import cells

CASES = {  # a recall or a share of a score is a threshold, which changes no program: test_rules.py
    "mlp": {},
    "svd": {"rank": 8},
    "signbit": {"alpha": 1.02},
    "gate_threshold": {"share": 0.3},
    "sequence": {"share": 0.3},
    "coreinfer": {"share": 0.3},
    "hot": {"share": 0.3},
    "oracle": {},
    "oracle_share": {"share": 0.1},
    "random": {"share": 0.3},
    "teal": {"share": 0.3},
}


@pytest.fixture(scope="module")
def planted():
    return plant()


@pytest.fixture(params=CASES, scope="module")
def case(request, planted):
    return PredictorCase.fitted(planted, request.param.removesuffix("_share"), **CASES[request.param])


@pytest.mark.parametrize("check", PREDICTOR_CHECKS, ids=lambda check: check.__name__)
def test_contract(case, check):
    check(case)


def test_a_mask_keeps_some_and_leaves_some(case):
    assert set(np.unique(case.mask(case.planted.held_out[:15], [5, 5, 5]))) == {0, 1}


# One that reads its own weights and one that reads the layer's.
@pytest.mark.parametrize("name", cells(["svd", "gate_threshold", "oracle", "teal"], ["svd", "oracle"]))
def test_the_reference_kernels_keep_the_contract_too(name):
    a_row_does_not_depend_on_its_neighbours(PredictorCase.fitted(plant(rows=60, kernel="reference"), name))


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
        ("oracle", {"rank": 4}, "no option of oracle; valid: share"),
    ],
)
def test_mistakes_are_named(planted, name, options, message):
    with pytest.raises(UserError, match=message):
        get_predictor(name, planted.ffn, **options)


@pytest.mark.parametrize("name", [n for n in CASES if not n.endswith("_share")])
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
    wrong: str = ""
    needs = Needs.NOTHING

    def fit(self, layer, rows_ND=None, *, index=0):
        return None

    def keep(self, weights, layer, x_RD, n_valid_B):
        import jax.numpy as jnp
        width = layer.ffn_gate.shape[0]
        first_F = jnp.arange(width) < round(self.share * width)
        if self.wrong == "neighbours":
            first_F = jnp.arange(width) < x_RD.shape[0]
        keep_RF = jnp.broadcast_to(first_F, (x_RD.shape[0], width))
        return keep_RF.astype(jnp.uint8) if self.wrong == "rows" else as_mask(keep_RF, n_valid_B)
"""


def test_a_predictor_of_one_s_own(planted, tmp_path, monkeypatch):
    (tmp_path / "own_predictor_of_the_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = "own_predictor_of_the_test:First"
    predictor = get_predictor(name, planted.ffn, share=0.25)
    assert predictor.name == "First" and predictor.share == 0.25
    check_predictor(name, share=0.25)
    got = PredictorCase.fitted(planted, name, share=0.25).mask(planted.held_out[:3], [3])
    np.testing.assert_array_equal(got, np.broadcast_to(np.arange(F) < round(0.25 * F), (3, F)))
    for wrong, words in {"neighbours": "depends on its neighbours", "rows": "beyond n_valid"}.items():
        with pytest.raises(AssertionError, match=words):
            check_predictor(name, wrong=wrong)
    with pytest.raises(UserError, match=r"predictor\.share=2 must be a number above 0 and at most 1"):
        get_predictor(name, planted.ffn, share=2)
    with pytest.raises(UserError, match=f"predictor.shape is no option of {name}; did you mean share"):
        get_predictor(name, planted.ffn, shape=1)
