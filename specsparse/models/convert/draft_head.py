"""Folders that hold a draft head and not a model (EAGLE, DFlash, Medusa, the speculators library's), and what their
conversions share."""

import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from specsparse.engine.architectures import DRAFT_HEADS
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.errors import UserError
from specsparse.models import hub
from specsparse.models.convert.checkpoint import read_json
from specsparse.models.convert.hf_classes import class_name
from specsparse.speculative.drafters.heads.published_file import PublishedHead
from specsparse.support.json_files import Json

AnyHead = TypeVar("AnyHead", bound=PublishedHead)

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
    algorithm = str(config.get("speculators_model_type") or config.get("model_type"))
    if config.get("speculators_model_type") or algorithm in _ALGORITHMS:
        return _ALGORITHMS.get(algorithm, algorithm)
    names = config.get("architectures")
    first = names[0].lower() if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if "dflash_config" in config or "dflash" in first:
        return "DFlash"
    if "draft_vocab_size" in config or "eagle3" in first:
        return "EAGLE-3"
    if "medusa_num_heads" in config or "medusa" in first:
        return "Medusa"
    return "EAGLE" if "eagle" in first else None


def written_as_gguf(out: Path, *, form: str | None, verifier: str | None, quant: str) -> bool:
    """Whether a head goes into a GGUF file (`*.gguf`), and not into a folder.

    Raises:
        UserError: a form is given for a file, a type of weights for a folder, or a verifier for another form than
            speculators.
    """
    gguf = out.suffix == ".gguf"
    if verifier is not None and (gguf or form != "speculators"):
        raise UserError(f"{out}: --verifier names the target in a folder of --form speculators, and in no other form")
    if gguf and form is not None:
        raise UserError(f"{out}: is a GGUF file, --form is for folders")
    if not gguf and quant.upper() != "F32":
        raise UserError(f"{out}: is a folder, whose weights are F32; --outtype {quant} is for a GGUF file")
    return gguf


def for_verifier(file: AnyHead, verifier: str | None) -> AnyHead:
    """The head with the name and the classes of a target, as the speculators library has them.

    Args:
        file: the head.
        verifier: owner/name of the Hub, or a folder with config.json; None leaves the head as it is.

    Raises:
        UserError: no such folder or repository, or a config.json that names no class.
    """
    if verifier is None:
        return file
    folder = Path(os.path.expanduser(verifier))
    local = folder.is_dir()
    if not local and not re.fullmatch(r"[\w.-]+/[\w.-]+", verifier):
        raise UserError(f"--verifier {verifier}: is no folder; the form is OWNER/NAME, a repository of the Hub")
    try:
        where = folder / "config.json" if local else hub.download(f"{hub.SCHEME}{verifier}/config.json")
    except hub.UnreachableError as error:
        raise UserError(f"{error}; --verifier takes the target's folder too") from None
    name = class_name(read_json(where))
    if name is None:
        raise UserError(f"{where}: names no class of transformers (architectures), which the head's config.json needs")
    return replace(file, target=str(folder.resolve()) if local else verifier, target_classes=(name,))


def tokenizer_of(target: GGUFFile | None, out: Path) -> Json:
    """The `tokenizer.ggml.*` keys of the target, which llama.cpp reads from the head's file.

    Raises:
        UserError: no target is given.
    """
    if target is None:
        raise UserError(f"{out}: llama.cpp reads the target's tokenizer from the head's file: give --target MODEL.gguf")
    return {key: value for key, value in target.metadata.items() if key.startswith("tokenizer.ggml.")}


def layers_of(target: GGUFFile, head: Path, *, width: int, ids: np.ndarray | None) -> int:
    """How many layers the target has, once a head is found to be for a target like it.

    Args:
        target: its GGUF file.
        head: named in messages.
        width: of the target that the head is for.
        ids: that it drafts; None for all.

    Raises:
        UserError: the target has another width, or fewer ids.
    """
    architecture = target.get("general.architecture", "str")
    found, n_layers = (target.get(f"{architecture}.{key}", "int") for key in ("embedding_length", "block_count"))
    if found != width:
        raise UserError(f"{head}: is for a target of width {width}, {target.path.name} has {found}")
    tokens = len(target.get_strings("tokenizer.ggml.tokens") or ())
    if ids is not None and tokens and ids.max() >= tokens:
        raise UserError(f"{head}: drafts id {ids.max()}, {target.path.name} has {tokens} ids")
    return n_layers


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
