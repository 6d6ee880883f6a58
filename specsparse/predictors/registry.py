"""Predictors by name."""

from specsparse.predictors.base import Predictor
from specsparse.predictors.ffn import FFN
from specsparse.support.options import read
from specsparse.support.registry import Registry

PREDICTORS: Registry[Predictor] = Registry(
    "predictor",
    "specsparse.predictors.base:Predictor",
    "specsparse.predictors",
    {
        "mlp": "mlp:Mlp",
        "svd": "svd:Svd",
        "signbit": "signbit:SignBit",
        "gate_threshold": "gate_threshold:GateThreshold",
        "sequence": "sequence:Sequence",
        "oracle": "oracle:Oracle",
        "random": "oracle:Random",
        "teal": "teal:Teal",
    },
    aliases={
        "powerinfer": "mlp",
        "dejavu": "mlp",
        "sparseinfer": "signbit",
        "cats": "gate_threshold",
        "griffin": "sequence",
        "coreinfer": "sequence",
    },
)
"""Names of papers stand for the same predictors; coreinfer sets the rule, too."""


def get_predictor(name: str, ffn: FFN, **options: object) -> Predictor:
    """The predictor of that name, or `module:Class`, for an FFN; None is an option that was not given.

    Raises:
        UserError: an unknown name or option (with the nearest valid one), a value of the wrong type or out of range.
    """
    rule = {"rule": name} if name in ("coreinfer", "griffin") and options.get("rule") is None else {}
    return read(PREDICTORS.find(name), {**options, **rule}, group="predictor", name=name, internal={"ffn": ffn})
