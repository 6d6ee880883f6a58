"""A model's file with other FFNs, as a plain GGUF that says its activation."""

import os
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as GGML

from specsparse.engine.config import ACTIVATION_KEY
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.training.ffn_model import FfnMatrices


def write_relu(f: GGUFFile, ffn: FfnMatrices, path: str | os.PathLike[str], kind: GGML) -> Path:
    """Writes `f` with the FFNs of `ffn` (leading axis L) in `kind` and ReLU at the gate; all else keeps its bytes.

    Raises:
        UserError: the file cannot be written.
    """
    named = [(name, i, layer) for name in FfnMatrices._fields for i, layer in enumerate(getattr(ffn, name))]
    new = {f"blk.{i}.ffn_{name}.weight": layer for name, i, layer in named}

    def made(t: TensorInfo) -> NewTensor:
        return NewTensor.of(t.name, np.asarray(new[t.name]), kind) if t.name in new else NewTensor.copy(t)

    keys = {**f.metadata, ACTIVATION_KEY: "relu", "general.name": f"{f.get('general.name', 'str', f.path.stem)} ReLU"}
    return write_gguf(path, keys, [made(t) for t in f.tensors.values()])
