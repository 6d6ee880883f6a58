"""Folders that hold a draft head and not a model: EAGLE, DFlash, Medusa and what the speculators library saves."""

import zipfile
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from specsparse.engine.architectures import DRAFT_HEADS
from specsparse.errors import UserError
from specsparse.models.convert.checkpoint import read_json
from specsparse.support.json_files import Json

_ALGORITHMS = {**DRAFT_HEADS, "eagle": "EAGLE", "medusa": "Medusa", "mlp_speculator": "MLP speculator"}


def refuse_draft_head(folder: Path) -> None:
    """Goes on where a folder may hold a model.

    Raises:
        UserError: it holds a draft head; the message says of which kind and for which target.
    """
    if not (folder / "config.json").is_file():
        return
    config = read_json(folder / "config.json")
    name = kind(config) or ("EAGLE" if _is_eagle(folder) else None)
    if name is not None:
        target = _at(config, "speculators_config", "verifier", "name_or_path") or config.get("base_model_name_or_path")
        raise UserError(
            f"{folder}: is a draft head ({name}) {f'for {target}' if target else 'of a target'}, not a model: it "
            "writes no text of its own and cannot be converted or run alone"
        )


def kind(config: Json) -> str | None:
    """What kind of draft head a config.json describes; None where it says of none."""
    algorithm = config.get("speculators_model_type") or config.get("model_type")
    if config.get("speculators_model_type") or algorithm in _ALGORITHMS:
        return _ALGORITHMS.get(str(algorithm), str(algorithm))
    names = config.get("architectures")
    first = names[0].lower() if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if "dflash_config" in config or "dflash" in first:
        return "DFlash"
    if "draft_vocab_size" in config or "eagle3" in first:
        return "EAGLE-3"
    if "medusa_num_heads" in config or "medusa" in first:
        return "Medusa"
    return "EAGLE" if "eagle" in first else None


def _is_eagle(folder: Path) -> bool:
    """Whether the tensors are those of EAGLE 1 and 2, whose config is that of a Llama of one layer."""
    names = _tensor_names(folder)
    return "fc.weight" in names and not any(name.startswith("model.") for name in names)


def _tensor_names(folder: Path) -> set[str]:
    """Names of tensors, of model.safetensors or of a torch file; empty where neither can be read."""
    try:
        if (folder / "model.safetensors").is_file():
            with safe_open(folder / "model.safetensors", "np") as file:
                return set(file.keys())
        with zipfile.ZipFile(folder / "pytorch_model.bin") as archive:
            pickle = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            found = archive.read(pickle)
        known = ("fc.weight", "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight")
        return {name for name in known if b"\0" + name.encode() in found}
    except (OSError, SafetensorError, zipfile.BadZipFile, StopIteration):
        return set()


def _at(values: object, *keys: str) -> str | None:
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values if isinstance(values, str) else None
