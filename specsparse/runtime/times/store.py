"""Where measured tables are kept: one JSON file for each model file and machine, in the user's cache."""

import contextlib
import hashlib
import json
from pathlib import Path

from specsparse import kernels
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.kernels.processor import cpu_info
from specsparse.runtime.times.kept import CostTable
from specsparse.support.atomic import atomically
from specsparse.support.paths import cache_dir

VERSION = 3
"""Of what is measured and how; tables of another version are measured again."""


def identity(model: Model) -> dict[str, object]:
    """What a table is valid for: file (name, size, time), CPU, threads, kernels, instruction set, cache, FFN, mesh."""
    stat, status = model.path.stat(), kernels.status()
    sparse = {} if model.ffn == "dense" else {"ffn": model.ffn, "rule": model.rule}
    window = {"window": model.config.window} if model.config.window else {}
    mesh = {} if model.devices.ways is None else {"mesh": model.devices.ways}
    return {
        "version": VERSION,
        "file": model.path.name,
        "bytes": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "cpu": cpu_info()["model"],
        "device": status["device"],
        "threads": status["threads"],
        "kernels": model.kernels.name,
        "isa": status["isa"],
        "kv_dtype": model.kv_dtype,
        "context": model.config.context_length,
        **sparse,
        **window,
        **mesh,
    }


def path_of(model: Model) -> Path:
    """Where this model's table is kept."""
    digest = hashlib.sha256(json.dumps(identity(model), sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "costs" / f"{model.path.stem}-{digest}.json"


def load(model: Model) -> CostTable | None:
    """The table measured before, or None; a file that cannot be read counts as none."""
    try:
        return CostTable.from_dict(json.loads(path_of(model).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def save(model: Model, table: CostTable) -> Path:
    """Keeps a table; a cache that cannot be written costs time, nothing else."""
    path = path_of(model)
    with contextlib.suppress(UserError), atomically(path) as file:
        file.write(json.dumps(table.to_dict(), indent=1).encode())
    return path
