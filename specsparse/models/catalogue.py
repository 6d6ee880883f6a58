"""Model names, paths and references to the Hub -> a file on this machine."""

import difflib
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from specsparse.engine.gguf.shards import shard_names
from specsparse.errors import UserError
from specsparse.models import entries, hub
from specsparse.models.entries import Entry
from specsparse.support.files import cache_dir, size_text

COMPANION = "specsparse_models"
"""The package of model files; `specsparse-models` in a checkout of this project."""
_INSTALL_COMPANION = "pip install ./specsparse-models (in a checkout of specsparse)"


class NotHere(UserError):
    """Models of the Hub that are not on this machine.

    Attributes:
        wanted: which, by the setting that names each.
    """

    def __init__(self, wanted: Mapping[str, Entry], why: str = ""):
        """`why`: what keeps them from being downloaded."""
        self.wanted = dict(wanted)
        which = " and ".join(f"{usual_name(e)} ({', '.join(_facts(e))})" for e in self.wanted.values())
        given = " ".join(f"{key}=/path/to/{usual_name(e)}" for key, e in self.wanted.items())
        verb = "is" if len(self.wanted) == 1 else "are"
        super().__init__(f"{which} {verb} not on this machine: {why}give {given}, or put it into {model_folder()}")


def usual_name(entry: Entry) -> str:
    """What the file of an entry is called; a pattern or a folder goes by the entry's name."""
    usual = entry.files[0] if entry.files else entry.name
    return entry.name if "*" in usual else usual


def _facts(entry: Entry) -> list[str]:
    size = [f"{size_text(entry.size)}"] if entry.size else []
    made = [f"converted to {entry.convert.upper()}"] if entry.convert else []
    return [*size, entry.url, *made]


def model_folder() -> Path:
    """Where models are looked for first, and where those lie that specsparse makes."""
    return cache_dir() / "models"


def resolve(spec: str | Path) -> Path:
    """The file of a model.

    Args:
        spec: a name of the catalogue (`models.entries`), the path of a GGUF file (of a split model the first one), or
            `hf://owner/repo/file.gguf[@revision]`, which is downloaded (see `models.hub.download`).

    Raises:
        NotHere: a model of the Hub that is not on this machine; `models.obtain` downloads it.
        UserError: an unknown name (with the nearest), a package that is not installed (with the command), a file that
            is not there or that the Hub does not give.
    """
    text = str(spec)
    if not text:
        raise UserError("no model given: name one of `python -m specsparse models`, or the path of a GGUF file")
    if text.startswith(hub.SCHEME):
        return hub.download(text)
    entry = entries.find(text)
    if entry is not None:
        found = locate(entry, make=True)
        if found is None:
            raise NotHere({"model.path": entry})
        return found
    path = Path(os.path.expanduser(spec))
    if _exists(path):
        return path
    if "/" in text or "\\" in text or text.lower().endswith(".gguf"):
        raise UserError(f"{text}: no such file")
    near = _nearest(text.lower()) or _packaged_names()
    raise UserError(f"unknown model {text!r}: did you mean {' or '.join(near)}? The path of a GGUF file is fine too")


def _nearest(text: str) -> list[str]:
    """The three names most like a text; of equally near ones those first that a package carries."""
    match, carried = difflib.SequenceMatcher(b=text), _packaged_names()
    like = {}
    for name in entries.names():
        match.set_seq1(name)
        like[name] = match.ratio()
    near = [name for name in like if like[name] >= 0.5]
    return sorted(near, key=lambda name: (-like[name], name not in carried))[:3]


def locate(entry: Entry, *, make: bool = False) -> Path | None:
    """The file of an entry, or None where it is a model of the Hub that is not on this machine.

    Args:
        entry: which.
        make: make the file of an entry that is a difference from another model.

    Raises:
        UserError: its package is not installed.
    """
    if entry.package and entry.file:
        return _packaged(entry.name, entry.package, entry.file, entry.install or "")
    if entry.base and entry.delta:
        return _derived(entry.name, entry.base, entry.delta, make=make)
    return next(_places_of(entry), None)


def companion(name: str, what: str) -> Path | None:
    """The file of a model's `what` ("predictors", "activations") in the companion package, or None."""
    entry = entries.find(name)
    return _in_package(COMPANION, f"{name}.{what}.safetensors") if entry is not None and entry.base else None


def _packaged_names() -> list[str]:
    return [entry.name for entry in entries.entries().values() if entry.package]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False


def _places_of(entry: Entry) -> Iterator[Path]:
    """Where a model of the Hub lies here: in the folders of models, then in the Hub's cache."""
    given, cache = os.environ.get("SPECSPARSE_MODELS"), Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    folders = [*([Path(given)] if given else []), model_folder(), Path("models"), cache / "specsparse" / "models"]
    for name in entry.files:
        for folder in folders:
            yield from filter(_whole, sorted(folder.expanduser().glob(name)))
        yield from filter(_whole, hub.cached(name))
    if entry.repo and not entry.convert and not entry.file:
        folders = (path.parent for path in hub.cached("config.json", repo=entry.repo))
        yield from (folder for folder in folders if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")))


def _whole(path: Path) -> bool:
    """Whether the file is there, of a split model all parts."""
    return all((path.parent / name).is_file() for name in shard_names(path.name) or [path.name])


def _packaged(name: str, package: str, file: str, install: str) -> Path:
    path = _in_package(package, file)
    if path is None:
        raise UserError(f"model {name!r} is not installed; run: {install}")
    return path


def _in_package(package: str, file: str) -> Path | None:
    """A file of a package that is installed, without importing it."""
    found = importlib.util.find_spec(package)
    paths = (Path(folder) / file for folder in (found and found.submodule_search_locations) or ())
    return next((path for path in paths if path.is_file()), None)


def _derived(name: str, base: str, file: str, *, make: bool) -> Path:
    """The file in the cache, made now if it is not there or is of another version of the difference."""
    from specsparse.models.convert.edit import apply_delta

    delta = _packaged(name, COMPANION, file, _INSTALL_COMPANION)
    version = hashlib.sha256(delta.read_bytes()).hexdigest()[:12]
    path = model_folder() / f"{name}-{version}.gguf"
    if make and not path.is_file():
        print(f"making {name} of {base} and {file}, once: {path}", file=sys.stderr)
        apply_delta(resolve(base), delta, path)
    return path
