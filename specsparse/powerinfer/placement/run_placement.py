"""The placement that a run uses: the one of `MODEL.generated.gpuidx` where it fits, else a fresh one.

PowerInfer ends a run with "failed to apply previously generated gpu split" where its file does not fit. Here such a
file is replaced, and one line says why.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from specsparse.engine.gguf.digest import model_digest
from specsparse.engine.gguf.reader import MAGIC, GGUFFile, open_gguf
from specsparse.errors import UserError
from specsparse.powerinfer.files.gpuidx import ARCHITECTURE, GpuIndex, path_for, read_gpuidx, write_gpuidx
from specsparse.powerinfer.placement.problem import Placement, Problem


@dataclass(frozen=True, eq=False)
class RunPlacement:
    """What a run goes by.

    Attributes:
        index: hot neurons.
        fresh: whether it was solved now.
        note: one line on where it came from, and why.
    """

    index: GpuIndex
    fresh: bool
    note: str


def problem_digest(problem: Problem, rule: str) -> str:
    """Tells placement problems apart, activations and the rule included."""
    rest = asdict(problem)
    seen = hashlib.sha256(rule.encode())
    for p in rest.pop("read"):
        seen.update(p.astype("<f8").tobytes())
    seen.update(repr(sorted(rest.items())).encode())
    return seen.hexdigest()[:32]


def kept_or_solved(
    f: GGUFFile,
    problem: Problem,
    solve: Callable[[Problem], Placement],
    *,
    rule: str,
    path: str | os.PathLike[str] | None = None,
    reset: bool = False,
    disable: bool = False,
) -> RunPlacement:
    """The placement to run with.

    Args:
        f: the model's file.
        problem: of this run.
        solve: called where a fresh placement is needed; the result is written to `path`.
        rule: its name.
        path: of the gpuidx file; None is PowerInfer's place for it.
        reset: solve in any case (PowerInfer's --reset-gpu-index).
        disable: no hot neurons, and no file read or written (--disable-gpu-index).

    Raises:
        UserError: `path` is a model: it would be overwritten.
    """
    path = Path(path or path_for(f.path))
    _refuse_model(path, f)
    if disable:
        none = tuple(np.zeros(len(p), bool) for p in problem.read)
        return RunPlacement(GpuIndex(none, problem.neuron_budget), False, "no hot neurons: disable_gpu_index")
    digest, asked = model_digest(f), problem_digest(problem, rule)
    if reset:
        why = "solved: reset_gpu_index"
    elif not path.exists():
        why = "solved: there was none"
    else:
        found = _fitting(path, problem, digest, asked)
        if isinstance(found, GpuIndex):
            return RunPlacement(found, False, f"placement read from {path}")
        why = f"solved again: {found}"
    index = GpuIndex(solve(problem).hot, problem.neuron_budget, digest, asked)
    try:
        write_gpuidx(path, index)
        why += f"; written to {path}"
    except UserError as error:
        why += f"; not kept ({error})"
    return RunPlacement(index, True, f"placement {why}")


def _refuse_model(path: Path, f: GGUFFile) -> None:
    """Garbage and stale placements may be written over; a model may not, nor what is left of one."""
    if not path.is_file():
        return
    if path.samefile(f.path):
        raise UserError(f"{path}: is the model itself, a placement would overwrite it; name another file")
    try:
        with path.open("rb") as file:
            model = file.read(len(MAGIC)) == MAGIC  # a placement begins with PWRI
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}), it may be a model; name another file") from None
    with suppress(UserError):
        model = model or open_gguf(path).metadata.get("general.architecture") != ARCHITECTURE
    if model:
        raise UserError(f"{path}: is a GGUF file and no placement, which would overwrite it; name another file")


def _fitting(path: Path, problem: Problem, model: str, asked: str) -> GpuIndex | str:
    """What the file holds, or why that is of no use here."""
    try:
        found = read_gpuidx(path)
        found.check(layers=problem.layers, d_ff=len(problem.read[0]), where=str(path))
    except UserError as error:
        return str(error)
    if found.model not in (None, model):
        return f"{path}: was made for another model file"
    if found.vram_capacity > problem.neuron_budget:
        return f"{path}: was made for {found.vram_capacity} bytes, {problem.neuron_budget} are left for neurons"
    if found.problem not in (None, asked):
        return f"{path}: answers other settings or activations"
    return found
