"""Cells of a sweep: one that has finished is known by its hash, and is not run twice.

The hash is over what a result depends on: the config, the files it names, the code, the machine. A sweep that was
stopped is started again by the same command; what had finished is copied into the new sweep, so that it is whole.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from specsparse import kernels
from specsparse.errors import UserError
from specsparse.experiments.methods import measured
from specsparse.experiments.settings import RunConfig
from specsparse.kernels.processor import cpu_info
from specsparse.models import catalogue
from specsparse.report.record import RECORD_FILE
from specsparse.report.runs import CELL_FILE, measurement, record_hash
from specsparse.runtime.manifest import sha256_of
from specsparse.runtime.method import resolve
from specsparse.support.files import kept, to_json, write_atomically
from specsparse.support.registry import source_of

# Keys that change no result: what a run is called, and what is shown while it runs.
_NO_MATTER = frozenset({"name", "stream", "debug", "reuse", "download"})


@dataclass(frozen=True)
class Cell:
    """One combination of a sweep.

    Attributes:
        key: sha256 of what its result depends on.
        name: of the experiment.
    """

    key: str
    name: str

    @classmethod
    def of(cls, cfg: RunConfig) -> "Cell":
        """The cell of a config that has been checked."""
        config = {k: v for k, v in cfg.composed.items() if k not in _NO_MATTER}
        depends = {
            "config": config,
            "files": sorted(_files(cfg)),
            "code": source_hash(),
            "cpu": cpu_info(),
            "kernels": kernels.status(),
        }
        return cls(hashlib.sha256(to_json(depends, sort_keys=True).encode()).hexdigest(), cfg.name)

    def finished(self, sweep: Path) -> Path | None:
        """Where it has finished: in the sweep's directory, or in a sweep of the same name beside it."""
        sweeps = [sweep]
        if sweep.parent.name == self.name:
            sweeps += sorted((d for d in sweep.parent.iterdir() if d.is_dir() and d != sweep), reverse=True)
        for mark in (file for directory in sweeps for file in sorted(directory.glob(f"*/{CELL_FILE}"))):
            found = measurement(mark.parent)
            if found is not None and found.key == self.key:
                return mark.parent
        return None

    def mark(self, directory: Path, objective: float | None) -> None:
        """Say that it has finished; the last thing that is written."""
        mark = {"key": self.key, "objective": objective, "record": record_hash(directory)}
        write_atomically(directory / CELL_FILE, to_json(mark) + "\n")


def reuse(done: Path, directory: Path) -> float | None:
    """Make `directory` hold what `done` holds, the mark last; returns the objective."""
    if done.resolve() != directory.resolve():
        files = [f for f in done.iterdir() if f.is_file() and f.name not in (RECORD_FILE, CELL_FILE)]
        for file in files:
            shutil.copyfile(file, directory / file.name)
        for name in (RECORD_FILE, CELL_FILE):
            write_atomically(directory / name, (done / name).read_text(encoding="utf-8"))
    return kept(done / CELL_FILE).get("objective")


@cache
def source_hash() -> str:
    """sha256 over the package's own code, kernels included: after a change of it everything is measured anew."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for file in sorted(f for f in root.rglob("*") if f.suffix in (".py", ".so")):
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _files(cfg: RunConfig) -> Iterator[str]:
    """sha256 of the models, and of every file that the config names."""
    named = [Path(text).expanduser() for text in _texts(cfg.composed) if "/" in text or "." in text]
    with contextlib.suppress(UserError):  # a kind that needs no model; the others have been checked
        named.append(catalogue.resolve(cfg.model.path))
        named += map(catalogue.resolve, resolve(measured.spec_of(cfg)).files.values())
    for part in (cfg.drafter, cfg.verifier, cfg.tree, cfg.policy, cfg.predictor):
        named += source_of(part.name)
    yield from (sha256_of(path) for path in named if path.is_file())


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _texts(item)
