"""Files of `torch.save` without torch: a zip of a pickle and raw storages.

The pickle is read by an unpickler that knows the handful of names tensors are made of and calls nothing else;
compressed members are refused, so that memory is bounded by the file's size.
"""

import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from specsparse.errors import UserError
from specsparse.support.files import atomically

_STORAGES = {
    "FloatStorage": np.dtype("<f4"), "HalfStorage": np.dtype("<f2"), "DoubleStorage": np.dtype("<f8"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16), "LongStorage": np.dtype("<i8"), "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"), "CharStorage": np.dtype("i1"), "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}  # fmt: skip
_NAME_OF = {dtype: name for name, dtype in _STORAGES.items()}


def read_torch(path: str | os.PathLike[str]) -> Any:
    """The content of a file: an array, or containers of arrays. UserError: the file is missing, damaged, older than
    torch 1.6, or holds anything but tensors and plain values."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _TensorReader(archive).load()
    except Exception as error:  # the zip and pickle modules raise nearly everything on damaged input
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
        why = str(error.strerror) if isinstance(error, OSError) and error.strerror else why
        hint = " (a file of torch before 1.6? save it again)" if isinstance(error, zipfile.BadZipFile) else ""
        raise UserError(f"{path}: is not a readable torch file: {why:.120}{hint}") from None


class _TensorReader(pickle.Unpickler):
    """Rebuilds tensors as numpy arrays. Every name that is not in `_CLASSES` ends the reading, with a ValueError."""

    def __init__(self, archive: zipfile.ZipFile):
        infos = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in infos if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise ValueError(f"it holds {len(pickles)} data.pkl, a torch file holds one")
        for info in infos.values():
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"member {info.filename!r:.60} is compressed; torch stores members as they are")
        self.archive, self.root = archive, pickles[0].removesuffix("data.pkl")
        self.storages: dict[str, bytes] = {}  # read once, however many tensors lie in one
        order = f"{self.root}byteorder"
        if order in infos and archive.read(order) != b"little":
            raise ValueError("it was saved on a big-endian machine; only little-endian files are supported")
        super().__init__(archive.open(pickles[0]))

    def find_class(self, module: str, name: str) -> Callable | np.dtype:
        if (module, name) not in _CLASSES:
            raise ValueError(f"it asks for {module}.{name!s:.60}, which is no part of a tensor; only tensors are read")
        return _CLASSES[module, name]

    def persistent_load(self, pid: tuple) -> np.ndarray:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, np.dtype) or not isinstance(key, str):
            raise ValueError("it refers to something that is no storage")
        data = self.storages[key] = self.storages.get(key) or self.archive.read(f"{self.root}data/{key}")
        if len(data) != count * dtype.itemsize:
            raise ValueError(f"storage {key!r:.20} has {len(data)} bytes, {count} items of {dtype} were announced")
        return np.frombuffer(data, dtype)


def _tensor(
    storage: np.ndarray, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: object
) -> np.ndarray:
    """A read-only view of a storage, checked to lie inside it."""
    whole = isinstance(storage, np.ndarray) and len(shape) == len(stride)
    if not whole or any(type(n) is not int or n < 0 for n in (offset, *shape, *stride)):
        raise ValueError("it holds a tensor without a storage or a shape")
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if prod(shape) > storage.size or (prod(shape) and last >= storage.size):
        raise ValueError(f"it holds a tensor of shape {tuple(shape)!r:.60} over {storage.size} items")
    steps = tuple(step * storage.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], tuple(shape), steps, writeable=False)


_CLASSES: dict[tuple[str, str], Callable | np.dtype] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


def write_torch(path: str | os.PathLike[str], value: np.ndarray | Mapping[str, np.ndarray]) -> None:
    """Writes an array, or a state dict, as `torch.save` does; `torch.load(weights_only=True)` reads it.

    The opcodes of pickle protocol 2 are written by hand, since the classes of tensors are torch's.
    """
    storages: list[np.ndarray] = []

    def text(word: str) -> bytes:
        return b"X" + struct.pack("<I", len(word.encode())) + word.encode()

    def ints(numbers: Iterable[int]) -> bytes:
        return b"".join(b"\x8a\x08" + struct.pack("<q", n) for n in numbers)

    def tensor(array: np.ndarray) -> bytes:
        """The pickle of `torch._utils._rebuild_tensor_v2(storage, 0, shape, stride, requires_grad=False, hooks={})`."""
        array = np.ascontiguousarray(array)
        kind = f"ctorch\n{_NAME_OF[array.dtype]}\n".encode()
        storage = text("storage") + kind + text(str(len(storages))) + text("cpu") + ints([array.size]) + b"tQ"
        shape, stride = ints(array.shape), ints(step // array.itemsize for step in array.strides)
        storages.append(array)
        rest = ints([0]) + b"(" + shape + b"t(" + stride + b"t\x89ccollections\nOrderedDict\n)RtR"
        return b"ctorch._utils\n_rebuild_tensor_v2\n((" + storage + rest

    if isinstance(value, Mapping):
        items = b"".join(text(name) + tensor(np.asarray(array)) for name, array in value.items())
        content = b"ccollections\nOrderedDict\n)R(" + items + b"u"
    else:
        content = tensor(np.asarray(value))
    with atomically(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + content + b".")
        archive.writestr("archive/byteorder", "little")
        for i, array in enumerate(storages):
            archive.writestr(f"archive/data/{i}", array.tobytes())
        archive.writestr("archive/version", "3\n")
