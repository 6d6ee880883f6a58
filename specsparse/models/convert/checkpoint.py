"""A Hugging Face checkpoint: config.json and tensors in safetensors or PyTorch's form, one file or several."""

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from specsparse.errors import UserError
from specsparse.powerinfer.torch_zip import read_torch
from specsparse.support.files import Json

_FORMS = (("model.safetensors.index.json", "model.safetensors"), ("pytorch_model.bin.index.json", "pytorch_model.bin"))
"""Index of several files, and the name of a single one; safetensors are taken if there are both."""
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""A layer's tensors in transformers and in a GGUF file."""
QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_FLOATS = ("F64", "F32", "F16", "BF16")


class Checkpoint:
    """A folder of a model, its tensors read one at a time.

    Attributes:
        folder: where it is.
        config: config.json.
        shapes: shape of each tensor, by name.
    """

    def __init__(self, folder: str | Path):
        """Opens a folder.

        Raises:
            UserError: no folder, no config, no tensors, a file missing or damaged.
        """
        self.folder = Path(folder)
        if not os.path.isdir(self.folder):
            raise UserError(f"{self.folder}: no such folder; a checkpoint has config.json and model.safetensors")
        self.config: Json = read_json(self.folder / "config.json")
        self._files = {name: self._open(name) for name in self._file_names()}
        self._home = {tensor: (file, tensor) for file in self._files.values() for tensor in file.keys()}  # noqa: SIM118
        self.shapes = {name: tuple(self._slice(name).get_shape()) for name in self._home}

    def part(self, config: Json, names: Mapping[str, str]) -> "Checkpoint":
        """A part of it, with a config of its own.

        Args:
            config: in place of config.json.
            names: of its tensors, by their names in this checkpoint.
        """
        found = copy.copy(self)
        found.config = config
        found._home = {name: self._home[tensor] for tensor, name in names.items()}
        found.shapes = {name: self.shapes[tensor] for tensor, name in names.items()}
        return found

    def _file_names(self) -> list[str]:
        for index, single in _FORMS:
            if (self.folder / index).is_file():
                parts = read_json(self.folder / index).get("weight_map")
                if not isinstance(parts, dict) or not parts:
                    raise UserError(f"{self.folder / index}: has no weight_map")
                return sorted(set(map(str, parts.values())))
            if (self.folder / single).is_file():
                return [single]
        others = sorted(p.name for p in self.folder.glob("*.bin")) + sorted(p.name for p in self.folder.glob("*.pth"))
        also = f" ({others[0]} is of PyTorch: save the model again with safe_serialization=True)" if others else ""
        names = " and no ".join(name for form in _FORMS for name in reversed(form))
        raise UserError(f"{self.folder}: has no {names}{also}")

    def _open(self, name: str) -> "safe_open | _TorchFile":
        path = self.folder / name
        if not os.path.isfile(path):
            raise UserError(f"{path}: is missing, and the index names it")
        if not name.endswith(".safetensors"):
            return _TorchFile(path)
        try:
            return safe_open(path, "np")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: is no safetensors file: {str(error).splitlines()[0]}") from None

    def load(self, name: str) -> np.ndarray:
        """A tensor as float32.

        Raises:
            UserError: it is of another type than F64, F32, F16 or BF16 (a quantised checkpoint), or not finite.
        """
        kind = self.kind(name)
        if kind not in _FLOATS:
            raise UserError(f"{self.folder}: tensor {name} is of type {kind}; only {', '.join(_FLOATS)} are supported")
        values = self._values(name).astype(np.float32)
        if not np.isfinite(values).all():
            raise UserError(f"{self.folder}: tensor {name} holds values that are not finite; the file is damaged")
        return values

    def kind(self, name: str) -> str:
        """The type that a tensor is stored in, as safetensors calls it."""
        return self._slice(name).get_dtype()

    def integers(self, name: str) -> np.ndarray:
        """A tensor of whole numbers as int64.

        Raises:
            UserError: it is of another type.
        """
        values = self._values(name)
        if values.dtype.kind not in "iu":
            raise UserError(f"{self.folder}: tensor {name} is of type {self.kind(name)}; whole numbers are needed")
        return values.astype(np.int64)

    def _slice(self, name: str) -> "_TorchSlice":
        file, stored = self._home[name]
        return file.get_slice(stored)

    def _values(self, name: str) -> np.ndarray:
        file, stored = self._home[name]
        return file.get_tensor(stored)


_KINDS = {
    np.dtype(np.float64): "F64", np.dtype(np.float32): "F32", np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
}  # fmt: skip


class _TorchSlice(NamedTuple):
    array: np.ndarray

    def get_shape(self) -> list[int]:
        return list(self.array.shape)

    def get_dtype(self) -> str:
        return _KINDS.get(self.array.dtype, str(self.array.dtype))


class _TorchFile:
    """A file of `torch.save` that answers as an open safetensors file does; all of it is in memory."""

    def __init__(self, path: Path):
        found = read_torch(path)
        if not isinstance(found, dict) or not all(isinstance(v, np.ndarray) for v in found.values()):
            raise UserError(f"{path}: holds no tensors by name")
        self._arrays = {str(name): array for name, array in found.items()}

    def keys(self) -> list[str]:
        return list(self._arrays)

    def get_slice(self, name: str) -> _TorchSlice:
        return _TorchSlice(self._arrays[name])

    def get_tensor(self, name: str) -> np.ndarray:
        return self._arrays[name]


def read_json(path: Path, *, optional: bool = False) -> Json:
    """A JSON object; {} for a file that is not there and need not be.

    Raises:
        UserError: it is missing, or no JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise UserError(f"{path}: is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no JSON object")
    return found
