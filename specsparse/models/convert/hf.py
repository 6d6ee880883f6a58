"""A checkpoint of transformers -> a GGUF file."""

import os
from collections.abc import Callable
from pathlib import Path

from specsparse.engine.config import ModelConfig
from specsparse.errors import UserError
from specsparse.models import hub
from specsparse.models.convert.checkpoint import Checkpoint
from specsparse.models.convert.draft_head import refuse_draft_head
from specsparse.models.convert.hf_classes import TEXT_PARTS, class_name
from specsparse.models.convert.hf_config import HfConfig, metadata, notes
from specsparse.models.convert.hf_tokenizer import tokenizer_keys
from specsparse.models.convert.tensors import sources
from specsparse.models.convert.write import Progress, out_type, write_model


def convert_hf(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    type_name: str = "f16",
    pre: str | None = None,
    progress: Progress = lambda done, total: None,
    note: Callable[[str], None] = lambda line: None,
) -> ModelConfig:
    """Converts a folder, or a repository of the Hub; of a model that sees images too (`TEXT_PARTS`), its text part.

    Args:
        source: a folder with config.json, safetensors and a tokenizer; or owner/repo, hf://owner/repo[@revision].
        path: of the new file.
        type_name: of `write.OUT_TYPES`.
        pre: pre-tokenizer of a byte-level BPE where it cannot be told.
        progress: called with (bytes written, bytes in all).
        note: called, when the file is written, with each line that says where the file and the config, or another
            program that reads it, part.

    Raises:
        UserError: whatever of it is missing, damaged or not supported.
    """
    kind, folder = out_type(type_name), folder_of(source)
    refuse_draft_head(folder)
    whole = Checkpoint(folder)
    checkpoint = text_part(whole)
    config = HfConfig(folder / "config.json", checkpoint.config)
    name = checkpoint.config.get("_name_or_path") or _name(str(source), folder)
    keys = metadata(config, name=str(name))
    tensors = list(sources(checkpoint, config))
    rows = {target: shape[0] for target, shape, _ in tensors}.get("token_embd.weight")
    if rows is None:
        raise UserError(f"{folder}: has no tensor model.embed_tokens.weight")
    keys |= tokenizer_keys(folder, checkpoint.config, vocab_size=rows, pre=pre)
    keys[f"{config.architecture}.vocab_size"] = rows
    made = write_model(path, keys, tensors, kind, progress=progress)
    tied = "the config says tied, and an lm_head that is not the embedding is stored: it is kept as the output matrix"
    left_out = len(whole.shapes) - len(checkpoint.shapes)
    if left_out:
        note(f"only the text part is converted; {left_out} tensors of other parts are left out: images cannot be read")
    for line in notes(config, made.biases) + ([tied] if config.tied and not made.tied_output else []):
        note(line)
    return made


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """The text model of a checkpoint that holds other parts too; any other checkpoint as it is.

    Raises:
        UserError: its config has no table `text_config`.
    """
    part = TEXT_PARTS.get(class_name(checkpoint.config) or "")
    if part is None:
        return checkpoint
    own = checkpoint.config.get("text_config")
    if not isinstance(own, dict):
        raise UserError(f"{checkpoint.folder / 'config.json'}: text_config is {own!r:.60}, not a table")
    said = {key: value for key, value in own.items() if value is not None}
    above = {key: value for key, value in checkpoint.config.items() if key in _ABOVE}
    called = {name: part.own_name(name) for name in checkpoint.shapes}
    kept = {name: plain for name, plain in called.items() if plain is not None}
    return checkpoint.part({**above, **part.defaults, **said, "architectures": [part.of]}, kept)


_ABOVE = ("_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
"""Keys of config.json that hold for its text part, where that does not say otherwise."""


def folder_of(source: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint: the one given, or that of a repository, downloaded."""
    folder = Path(os.path.expanduser(source))
    text = str(source)
    if folder.is_dir():
        return folder
    if text.startswith(hub.SCHEME) or (text.count("/") == 1 and not text.startswith((".", "/", "~"))):
        return hub.download_checkpoint(text)
    raise UserError(f"{text}: no such folder; a folder with config.json or owner/repo of the Hub is needed")


def _name(text: str, folder: Path) -> str:
    """What to call a model that does not say."""
    named = text.removeprefix(hub.SCHEME).partition("@")[0].rstrip("/").rpartition("/")[2]
    return named if named not in ("", ".", "..") else folder.resolve().name
