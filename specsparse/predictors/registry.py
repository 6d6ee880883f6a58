"""Predictors by name."""

import dataclasses
import difflib
import types
from typing import Any, get_args, get_type_hints

from specsparse.errors import UserError
from specsparse.predictors.base import Predictor
from specsparse.predictors.ffn import FFN
from specsparse.predictors.gate_threshold import GateThreshold
from specsparse.predictors.mlp import Mlp
from specsparse.predictors.oracle import Oracle, Random
from specsparse.predictors.sequence import Sequence
from specsparse.predictors.signbit import SignBit
from specsparse.predictors.svd import Svd
from specsparse.predictors.teal import Teal

PREDICTORS: dict[str, type] = {
    kind.name: kind for kind in (Mlp, Svd, SignBit, GateThreshold, Sequence, Oracle, Random, Teal)
}
"""Classes by name."""

ALIASES = {
    "powerinfer": "mlp",
    "dejavu": "mlp",
    "sparseinfer": "signbit",
    "cats": "gate_threshold",
    "griffin": "sequence",
    "coreinfer": "sequence",
}
"""Names of papers for the same predictors; coreinfer sets the rule, too."""


def get_predictor(name: str, ffn: FFN, **options: Any) -> Predictor:
    """The predictor of that name for an FFN; None is an option that was not given.

    Raises:
        UserError: an unknown name or option (with the nearest valid one), a value of the wrong type or out of range.
    """
    if name not in PREDICTORS and name not in ALIASES:
        raise UserError(f"predictor={name} is unknown; {_nearest(name, [*PREDICTORS, *ALIASES])}")
    kind = PREDICTORS[ALIASES.get(name, name)]
    given = {key: value for key, value in options.items() if value is not None}
    if name in ("coreinfer", "griffin"):
        given.setdefault("rule", name)
    hints = get_type_hints(kind)
    valid = [f.name for f in dataclasses.fields(kind) if f.name != "ffn"]
    for key, value in given.items():
        if key not in valid:
            raise UserError(f"predictor.{key} is no option of {name}; {_nearest(key, valid)}")
        given[key] = checked(f"predictor.{key}", hints[key], value)
    return kind(ffn, **given)


def checked(label: str, hint: Any, value: Any) -> Any:
    """The value as its field's type; an int is taken for a float."""
    kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    wanted = next((k for k in kinds if k in (bool, int, float)), str)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not wanted:
        raise UserError(f"{label}={value!r} must be of type {wanted.__name__}")
    return value


def _nearest(name: str, valid: list[str]) -> str:
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"valid: {', '.join(valid) or 'none'}"
