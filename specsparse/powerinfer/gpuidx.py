"""PowerInfer's `*.generated.gpuidx`, which neurons of each layer lie on the GPU, and the placement that a run uses.

PowerInfer ends a run with "failed to apply previously generated gpu split" if its file does not fit. Here such a file
is replaced, and one line says why.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType

from specsparse.engine.gguf.reader import MAGIC, POWERINFER_MAGIC, GGUFFile, model_digest, open_gguf
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.errors import UserError
from specsparse.powerinfer.placement import Placement, Problem

ARCHITECTURE = "generic.gpu_index"
_BLOCKS = f"{ARCHITECTURE}.block_count"
_CAPACITY = "split.vram_capacity"
_MODEL, _PROBLEM = "specsparse.model", "specsparse.problem"
"""Keys of our own, which PowerInfer does not look at."""


def path_for(model: str | os.PathLike[str]) -> Path:
    """Where PowerInfer looks for the file that belongs to a model."""
    return Path(f"{os.fspath(model)}.generated.gpuidx")


@dataclass(frozen=True, eq=False)
class GpuIndex:
    """A placement.

    Attributes:
        hot: L masks bool[F], true on the GPU.
        vram_capacity: bytes it was made for; PowerInfer reads the file only with at least that budget.
        model, problem: digests of the model file and of the placement problem it answers; None in PowerInfer's own.
    """

    hot: tuple[np.ndarray, ...]
    vram_capacity: int
    model: str | None = None
    problem: str | None = None

    def bucket(self, layer: int) -> np.ndarray:
        """Ids of the layer's hot neurons, ascending, int32[k]."""
        return np.flatnonzero(self.hot[layer]).astype(np.int32)

    def check(self, *, layers: int, d_ff: int, where: str) -> None:
        """Refuses, with a UserError that begins with `where`, a placement of other layers or neurons."""
        other = [len(hot) for hot in self.hot if len(hot) != d_ff]
        if len(self.hot) != layers or other:
            found = f"{other[0]} neurons in a layer" if other else f"{len(self.hot)} layers"
            needed = d_ff if other else layers
            raise UserError(f"{where}: places {found}, the model has {needed}: it belongs to another model")


def read_gpuidx(path: str | os.PathLike[str]) -> GpuIndex:
    """A file's placement. Tensors are taken by position, 2i and 2i + 1, as PowerInfer does; their names must agree.

    Raises:
        UserError: no gpuidx file, or one that contradicts itself; the line names the file and the layer.
    """
    f = open_gguf(path)
    if f.magic != POWERINFER_MAGIC or f.metadata.get("general.architecture") != ARCHITECTURE:
        raise UserError(
            f"{f.path}: is no gpuidx file (magic PWRI, architecture {ARCHITECTURE}); solve the placement again"
        )
    layers, tensors = f.get(_BLOCKS, "int"), list(f.tensors.values())
    capacity = f.get(_CAPACITY, "int")
    if len(tensors) != 2 * layers or layers < 1 or capacity < 0:
        raise UserError(f"{f.path}: has {len(tensors)} tensors for {layers} layers and {capacity} bytes: damaged")
    hot = tuple(_layer(f, tensors[2 * i : 2 * i + 2], i) for i in range(layers))
    return GpuIndex(hot, capacity, *(f.get(key, "str", None) for key in (_MODEL, _PROBLEM)))


def _layer(f: GGUFFile, pair: list, i: int) -> np.ndarray:
    """bool[F], the mask of a layer, of its tensors gpu_idx and gpu_bucket."""
    for tensor, name in zip(pair, ("gpu_idx", "gpu_bucket"), strict=True):
        if tensor.name != f"blk.{i}.{name}" or tensor.type != GGMLQuantizationType.I32 or len(tensor.shape) != 1:
            raise UserError(f"{f.path}: {tensor.name!r:.60} should be 'blk.{i}.{name}', a vector of I32")
    index, bucket = (np.ascontiguousarray(t.raw).view("<i4") for t in pair)
    if not np.isin(index, (0, 1)).all() or not np.array_equal(np.flatnonzero(index), bucket):
        raise UserError(
            f"{f.path}: 'blk.{i}.gpu_bucket' is not the ascending list of the neurons that are 1 in gpu_idx: damaged"
        )
    return index.astype(bool)


def write_gpuidx(path: str | os.PathLike[str], index: GpuIndex) -> Path:
    """Writes a file that PowerInfer reads; its CUDA kernels want a multiple of 256 hot neurons a layer."""
    tensors = []
    for i, hot in enumerate(index.hot):
        for name, values in (("gpu_idx", np.asarray(hot).astype("<i4")), ("gpu_bucket", index.bucket(i))):
            tensors.append(
                NewTensor(f"blk.{i}.{name}", GGMLQuantizationType.I32, values.shape, lambda values=values: values)
            )
    keys = {"general.architecture": ARCHITECTURE, _BLOCKS: len(index.hot), _CAPACITY: np.uint64(index.vram_capacity)}
    keys |= {key: value for key, value in ((_MODEL, index.model), (_PROBLEM, index.problem)) if value is not None}
    return write_gguf(path, keys, tensors, magic=POWERINFER_MAGIC)


@dataclass(frozen=True, eq=False)
class RunPlacement:
    """The placement that a run goes by.

    Attributes:
        index: hot neurons.
        fresh: whether it was solved now.
        note: one line on where it came from, and why.
    """

    index: GpuIndex
    fresh: bool
    note: str


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
    """The placement to run with: the one of `MODEL.generated.gpuidx` if it fits, else a fresh one.

    Args:
        f: the model's file.
        problem: of this run.
        solve: called if a fresh placement is needed; the result is written to `path`.
        rule: the name of `solve`.
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
    digest, asked = model_digest(f), _problem_digest(problem, rule)
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


def _problem_digest(problem: Problem, rule: str) -> str:
    """Tells placement problems apart, activations and the rule included."""
    rest = asdict(problem)
    seen = hashlib.sha256(rule.encode())
    for p in rest.pop("read"):
        seen.update(p.astype("<f8").tobytes())
    seen.update(repr(sorted(rest.items())).encode())
    return seen.hexdigest()[:32]


def _refuse_model(path: Path, f: GGUFFile) -> None:
    """Garbage and stale placements may be written over; a model may not, nor a torn one."""
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
    """The placement of the file, or why it is of no use here."""
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
