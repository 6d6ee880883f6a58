"""What forwards and drafts take where nobody gave times: as measured and kept on this machine, else a safe guess."""

from collections.abc import Mapping

from specsparse import kernels
from specsparse.engine.model import Model
from specsparse.runtime.times import store
from specsparse.runtime.times.stamp import cost_key
from specsparse.speculative.drafters.plan import Bound

V_AVX2 = (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.35, 2.7)
"""v(1).. of a small model on the slower of the machines measured (SmolLM2-135M Q4_1, two cores; docs/LOG.md)."""
V_AVX512 = (1.0, 1.08, 1.2, 1.37, 1.58, 1.82, 2.0, 2.2)
"""The same where the kernels have AVX-512 VNNI."""
V_BATCHED = (1.0, 1.1)
"""On the xla backend."""
V_ROW_BY_ROW = (1.0, 2.0)
"""On the reference, which computes one row after another."""

_GUESSES = {"xla": V_BATCHED, "packed": V_BATCHED, "bf16": V_BATCHED}

STEP_FLOOR = 0.02
"""A drafted token's share of a plain step that is no reading of weights: small calls and the draw."""


def guessed_v(backend: str, rows: int) -> list[float]:
    """v(1)..v(rows) that no draft is far cheaper or dearer than; beyond what was measured by the last slope."""
    known = _native() if backend == "native" else _GUESSES.get(backend, V_ROW_BY_ROW)
    slope = known[-1] - known[-2]
    return [known[n] if n < len(known) else known[-1] + slope * (n + 1 - len(known)) for n in range(rows)]


def _native() -> tuple[float, ...]:
    return V_AVX512 if kernels.status()["isa"] in ("avx512", "amx") else V_AVX2


def draft_share(model: Model, bound: Bound) -> float:
    """c of a drafter with a model by the bytes it reads a token, in plain steps; it is the slower for being small."""
    return bound.bytes_per_token / max(model.footprint.file, 1) + STEP_FLOOR


def policy_times(
    model: Model,
    gamma: int,
    name: str | None,
    options: Mapping[str, object] | None = None,
    *,
    share: float = 0.0,
    levels: int | None = None,
    batch: int = 1,
) -> dict[str, object]:
    """The options `v`, `c`, `c0` of the policies `cost` and `auto_off`, rounded so that programs are not compiled anew.

    Args:
        model: the target.
        gamma: most tokens of a draft.
        name, options: of the drafter, whose cost may have been kept; no name where it is not known.
        share: c where it was not.
        levels: of the trees it drafts, which take the time of a token each; None for chains.
        batch: sequences that are decoded together; times are in their steps.
    """
    table = store.load(model)
    if table is None:
        rows = guessed_v(model.kernels.name, batch * (gamma + 1))
        found = {"v": [t / rows[batch - 1] for t in rows[batch - 1 :: batch]], "c": share, "c0": 0.0}
    else:
        key = None if name is None else cost_key(name, options)
        found = table.policy_options(gamma, key, batch=batch)
        if key not in table.drafts:
            found["c"] = share
    if levels is not None:
        found |= {"c": 0.0, "c0": found["c0"] + levels * found["c"]}
    return {"v": [round(t, 2) for t in found["v"]], "c": round(found["c"], 2), "c0": round(found["c0"], 2)}
