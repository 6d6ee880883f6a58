"""The manifest of a record, which traces its numbers: code, packages, machine, kernels, model file."""

import contextlib
import datetime
import hashlib
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from specsparse import kernels
from specsparse.errors import UserError
from specsparse.kernels.processor import cpu_info
from specsparse.support.files import Json, cache_dir, git_commit, kept, to_json, write_atomically

PACKAGES = ("specsparse", "jax", "jaxlib", "numpy", "gguf", "hydra-core", "tokenizers", "sentencepiece", "wandb")


def build(config: Mapping[str, object], model_file: Path | None) -> Json:
    """The manifest of a run: `config` is the whole composed config, `model_file` the GGUF that was decoded with."""
    model = None
    if model_file is not None:
        model = {"file": model_file.name, "bytes": model_file.stat().st_size, "sha256": sha256_of(model_file)}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git": git_commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "packages": package_versions(),
        "cpu": cpu_info(),
        "kernels": kernels.status(),
        "model": model,
        "config": dict(config),
    }


def package_versions() -> dict[str, str]:
    """Installed versions of `PACKAGES`; one that is missing says so."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def sha256_of(path: Path) -> str:
    """sha256 of a file, remembered by path, size and modification time, so that a large file is read once."""
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    store = cache_dir() / "sha256.json"
    known = kept(store)
    if isinstance(known.get(key), str):
        return known[key]
    with path.open("rb") as file:
        known[key] = hashlib.file_digest(file, "sha256").hexdigest()
    with contextlib.suppress(UserError):  # a cache that cannot be written costs time, nothing else
        write_atomically(store, to_json(known))
    return known[key]
