"""PowerInfer's `*.generated.gpuidx`: which neurons of each layer lie on the GPU."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType

from specsparse.engine.gguf.reader import POWERINFER_MAGIC, GGUFFile, open_gguf
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.errors import UserError

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
        """Refuses a placement that was made for another model; `where` begins the line.

        Raises:
            UserError: another number of layers or neurons.
        """
        if len(self.hot) != layers:
            raise UserError(
                f"{where}: places {len(self.hot)} layers, the model has {layers}: it belongs to another model"
            )
        for i, hot in enumerate(self.hot):
            if len(hot) != d_ff:
                raise UserError(
                    f"{where}: places {len(hot)} neurons in layer {i}, the model has {d_ff}: "
                    "it belongs to another model"
                )


def read_gpuidx(path: str | os.PathLike[str]) -> GpuIndex:
    """Reads and validates a file.

    Tensors are taken by position, 2i and 2i + 1, as PowerInfer does; their names must agree.

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
    if len(tensors) != 2 * layers or layers < 1:
        raise UserError(f"{f.path}: has {len(tensors)} tensors for {layers} layers, two each are needed")
    if capacity < 0:
        raise UserError(f"{f.path}: metadata key '{_CAPACITY}' is {capacity}, bytes are needed")
    hot = tuple(_layer(f, tensors[2 * i : 2 * i + 2], i) for i in range(layers))
    return GpuIndex(hot, capacity, *(f.get(key, "str", None) for key in (_MODEL, _PROBLEM)))


def _layer(f: GGUFFile, pair: list, i: int) -> np.ndarray:
    for tensor, name in zip(pair, ("gpu_idx", "gpu_bucket"), strict=True):
        if tensor.name != f"blk.{i}.{name}":
            raise UserError(
                f"{f.path}: tensor {2 * i} or {2 * i + 1} is {tensor.name!r:.60}, 'blk.{i}.{name}' belongs there"
            )
        if tensor.type != GGMLQuantizationType.I32 or len(tensor.shape) != 1:
            raise UserError(f"{f.path}: tensor '{tensor.name}' should be a vector of I32")
    index, bucket = (np.ascontiguousarray(t.raw).view("<i4") for t in pair)
    if not np.isin(index, (0, 1)).all():
        raise UserError(f"{f.path}: 'blk.{i}.gpu_idx' holds something other than 0 and 1: damaged")
    if not np.array_equal(np.flatnonzero(index), bucket):
        raise UserError(f"{f.path}: 'blk.{i}.gpu_bucket' is not the ascending list of the neurons of gpu_idx: damaged")
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
