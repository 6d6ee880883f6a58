"""DFlash drafters written as folders: the names of their tensors, and what each of the two forms can say."""

from pathlib import Path
from typing import Literal

from specsparse.errors import UserError
from specsparse.models.convert import head_folder
from specsparse.speculative.drafters.heads.dflash_file import DFlashFile
from specsparse.speculative.drafters.heads.published_file import EMBEDDING, OUTPUT
from specsparse.support.json_files import Json

FolderForm = Literal["authors", "speculators"]

TOP = {**head_folder.TOP, "hidden_norm": "enc.output_norm"}
"""Names of the tensors outside the layers, by ours of a GGUF file."""
_HF_TOP = {ours: theirs for theirs, ours in TOP.items()}
_HF_LAYER = {ours: theirs for theirs, ours in head_folder.LAYER.items()}


def write_folder(file: DFlashFile, folder: Path, *, form: FolderForm | None = None) -> Path:
    """Writes config.json and model.safetensors (float32), which vLLM and SGLang read.

    Args:
        file: the drafter.
        folder: made if need be; files of these names in it are replaced.
        form: "authors" (`DFlashDraftModel` with dflash_config), "speculators", or the first of the two that can say
            what the drafter is.

    Raises:
        UserError: the form cannot say what the drafter is; the message names what.
    """
    reasons = {"authors": _not_in_authors(file), "speculators": _not_in_speculators(file)}
    chosen = form or next((name for name, why in reasons.items() if why is None), "speculators")
    if reasons[chosen] is not None:
        raise UserError(f"{file.path}: {reasons[chosen]} has no place in the form {chosen} of a DFlash folder")
    config = _authors_config(file) if chosen == "authors" else _speculators_config(file)
    names = {name: _hf_name(name) for name in file.tensors}
    return head_folder.write(file, folder, config, names, vocab_size=_vocabulary(file))


def _hf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _HF_TOP:
        return f"{_HF_TOP[stem]}.weight"
    _, number, rest = stem.split(".", 2)
    return f"layers.{number}.{_HF_LAYER[rest]}.weight"


def _vocabulary(file: DFlashFile) -> int:
    """Ids of the target, as far as the drafter knows."""
    rows = [file.tensors[name][0] for name in (EMBEDDING, OUTPUT) if name in file.tensors]
    return max([*rows, file.mask_token + 1, *([] if file.ids is None else [int(file.ids.max()) + 1])])


def _not_in_authors(file: DFlashFile) -> str | None:
    s = file.shape
    slides = tuple(window is not None for window in s.windows)
    if file.ids is not None or OUTPUT in file.tensors or EMBEDDING in file.tensors:
        return "an embedding, output matrix or vocabulary of its own"
    if file.from_anchor:
        return "sample_from_anchor"
    if 0 in s.features:
        return "the embedding as a feature"
    return None if s.causal == slides or len(set(s.causal)) == 1 else "causality by layer"


def _not_in_speculators(file: DFlashFile) -> str | None:
    s = file.shape
    slides = tuple(window is not None for window in s.windows)
    scaled = {"embedding_scale": file.embedding_scale != 1, "logit_scale": file.logit_scale != 1,
              "softcap": file.softcap != 0}  # fmt: skip
    other = next((name for name, found in scaled.items() if found), None)
    if other:
        return other
    return None if s.causal == slides or not any(s.causal) else "full attention that is causal inside the block"


def _layer_config(file: DFlashFile) -> Json:
    """The Qwen3 config of the layers."""
    s, windows = file.shape, {window for window in file.shape.windows if window is not None}
    if len(windows) > 1:
        raise UserError(f"{file.path}: layers with windows of {sorted(windows)} have no place in one config.json")
    return head_folder.layer_config(
        file,
        vocab_size=_vocabulary(file),
        model_type="qwen3",
        num_hidden_layers=s.layers,
        attention_bias=False,
        layer_types=["full_attention" if window is None else "sliding_attention" for window in s.windows],
        use_sliding_window=bool(windows),
        sliding_window=windows.pop() if windows else None,
    )


def _authors_config(file: DFlashFile) -> Json:
    s = file.shape
    slides = tuple(window is not None for window in s.windows)
    own: Json = {
        "block_size": file.block_size,
        "mask_token_id": file.mask_token,
        "target_layer_ids": [layer - 1 for layer in s.features],
    }
    if s.causal != slides:
        own["is_causal"] = s.causal[0]
    scales = {"input_embedding_scale": (file.embedding_scale, 1.0), "output_multiplier": (file.logit_scale, 1.0),
              "final_logit_softcapping": (file.softcap, 0.0)}  # fmt: skip
    own |= {name: value for name, (value, default) in scales.items() if value != default}
    extra = {"is_causal": own.pop("is_causal")} if "is_causal" in own else {}
    top: Json = {"architectures": ["DFlashDraftModel"], "dtype": "float32", "block_size": file.block_size}
    return top | _layer_config(file) | extra | {"dflash_config": own}


def _speculators_config(file: DFlashFile) -> Json:
    s = file.shape
    slides = any(window is not None for window in s.windows)
    return {
        **head_folder.library_config(
            file, algorithm="dflash", kind="DFlashDraftModel", tokens=file.drafts, layer=_layer_config(file)
        ),
        "aux_hidden_state_layer_ids": list(s.features),
        "block_size": file.block_size,
        "mask_token_id": file.mask_token,
        "draft_vocab_size": len(file.ids) if file.ids is not None else _vocabulary(file),
        "sample_from_anchor": file.from_anchor,
        "sliding_window_non_causal": slides and not any(s.causal),
        "target_hidden_size": None if s.feature_width == s.width else s.feature_width,
    }
