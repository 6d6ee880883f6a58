"""The directory of a training: whose it is, so that a run that was stopped goes on and another one is refused."""

import json
from collections.abc import Mapping
from pathlib import Path

from specsparse.engine.gguf.digest import model_digest
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.support import files

_SETTINGS = "settings.json"


def identity(model: Model, overrides: Mapping[str, object]) -> dict[str, object]:
    """What tells a model from a retrained one of the same name and size."""
    kept = {name: value for name, value in overrides.items() if name != "threads"}
    return {"digest": model_digest(open_gguf(model.path)), "overrides": kept}


def claim(folder: Path, settings: Mapping[str, object]) -> None:
    """Makes the directory that of a training with these settings, or finds that it is already.

    Raises:
        UserError: it holds another training, or cannot be read or written.
    """
    path, wanted = folder / _SETTINGS, json.loads(files.to_json(settings))
    if path.exists():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({error}); remove {folder} to begin again") from error
        different = sorted(key for key in wanted if not isinstance(found, Mapping) or found.get(key) != wanted[key])
        if different:
            raise UserError(
                f"{folder} holds a training with another {different[0]}: give train.output=ANOTHER, or remove it"
            )
    files.write_atomically(path, files.to_json(wanted, indent=1) + "\n")
