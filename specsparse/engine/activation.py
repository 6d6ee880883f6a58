"""Activations of the FFN, by name: silu, gelu_tanh, relu, drelu, relu2 and fatrelu(t)."""

import math
import re

from specsparse.errors import UserError
from specsparse.kernels.reference import sparse

Act = str | tuple[str, float]
"""What the kernels call one: "silu", "gelu_tanh", "relu", "relu2", ("fatrelu", t)."""

NAMES = ("silu", "gelu_tanh", "relu", "drelu", "relu2", "fatrelu(t)")
_FATRELU = re.compile(r"fatrelu\(\s*([^)]*?)\s*\)")


def parse_activation(name: object, *, where: str = "activation") -> tuple[Act, Act | None]:
    """(activation of the gate, activation of up or None) of a name.

    gelu_tanh is GELU by its tanh formula (Hendrycks and Gimpel 2016, arXiv:1606.08415); relu is
    ReGLU; drelu is relu of gate and up (TurboSparse, arXiv:2406.05955); relu2 is relu squared; fatrelu(t) is x where
    x > t, else 0 (ProSparse, arXiv:2402.13516).

    Raises:
        UserError: another name, or a t that is no finite number of at least 0; `where` begins the line.
    """
    if name in ("silu", "gelu_tanh", "relu", "relu2"):
        return name, None
    if name == "drelu":
        return "relu", "relu"
    found = _FATRELU.fullmatch(name) if isinstance(name, str) else None
    if found:
        try:
            threshold = float(found[1])
        except ValueError:
            threshold = math.nan
        if math.isfinite(threshold) and threshold >= 0:
            return ("fatrelu", threshold), None
    raise UserError(f"{where} is {name!r:.60}; it must be one of {', '.join(NAMES)}, t a number of at least 0")


activate = sparse.apply
"""act(x), elementwise; x itself for None."""
