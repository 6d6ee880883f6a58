"""Where measured tables are kept: one JSON file for each model file and machine, in the user's cache."""

import contextlib
import hashlib
import json
from pathlib import Path

from specsparse import kernels
from specsparse.engine.config import ModelConfig
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.kernels.processor import cpu_info
from specsparse.runtime.times.kept import CostTable
from specsparse.support.files import atomically, cache_dir

VERSION = 4
"""Of what is measured and how; tables of another version are measured again."""


def identity(model: Model) -> dict[str, object]:
    """What a table is valid for: file (name, size, time), CPU, threads, kernels, instruction set, cache, FFN, mesh."""
    sparse = {} if model.ffn == "dense" else {"ffn": model.ffn, "rule": model.rule}
    mesh = {} if model.devices.ways is None else {"mesh": model.devices.ways}
    plain = _dense(model.path, model.config, kernels_name=model.kernels.name, kv_dtype=model.kv_dtype)
    return {**plain, **sparse, **mesh}


def _dense(path: Path, config: ModelConfig, *, kernels_name: str, kv_dtype: str) -> dict[str, object]:
    """The same of a dense model on one device, which need not be loaded."""
    window = {"window": config.window} if config.window else {}
    stat, status = path.stat(), kernels.status()
    return {
        "version": VERSION,
        "file": path.name,
        "bytes": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "cpu": cpu_info()["model"],
        "device": status["device"],
        "threads": status["threads"],
        "kernels": kernels_name,
        "isa": status["isa"],
        "kv_dtype": kv_dtype,
        "context": config.context_length,
        **window,
    }


def path_of(model: Model) -> Path:
    """Where this model's table is kept."""
    return _place(model.path, identity(model))


def _place(path: Path, valid_for: dict[str, object]) -> Path:
    digest = hashlib.sha256(json.dumps(valid_for, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "costs" / f"{path.stem}-{digest}.json"


def load(model: Model) -> CostTable | None:
    """The table measured before, or None; a file that cannot be read counts as none."""
    return _read(path_of(model))


def find(path: Path, config: ModelConfig, *, kv_dtype: str = "f16") -> CostTable | None:
    """The same of a dense model that is not loaded, as one would be without options.

    Args:
        path: the file.
        config: of the model.
        kv_dtype: of the cache.
    """
    return _read(_place(path, _dense(path, config, kernels_name=kernels.get().name, kv_dtype=kv_dtype)))


def _read(path: Path) -> CostTable | None:
    try:
        return CostTable.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def save(model: Model, table: CostTable) -> Path:
    """Keeps a table; a cache that cannot be written costs time, nothing else."""
    path = path_of(model)
    with contextlib.suppress(UserError), atomically(path) as file:
        file.write(json.dumps(table.to_dict(), indent=1).encode())
    return path
