"""DFlash drafters as folders of config.json and safetensors: the authors' form and that of the speculators library.

The two differ in where options stand, and in what a layer's id means: the authors' `target_layer_ids` are layers whose
output is read, the library's `aux_hidden_state_layer_ids` layers whose input is. Here an id is of an input.
"""

import os
from pathlib import Path
from typing import Any

from specsparse.engine.config import MAX_CONTEXT
from specsparse.engine.gguf.reader import GGUFFile, open_gguf
from specsparse.errors import UserError
from specsparse.models.convert import draft_head, head_folder
from specsparse.models.convert.checkpoint import Checkpoint
from specsparse.models.convert.dflash_folder import TOP, FolderForm, write_folder
from specsparse.models.convert.hf_config import HfConfig
from specsparse.speculative.drafters.heads.dflash_block import BlockShape
from specsparse.speculative.drafters.heads.dflash_file import DFlashFile, read_gguf, write_dflash_gguf
from specsparse.support.json_files import Json

_OPTIONS = {
    "block_size", "mask_token_id", "target_layer_ids", "is_causal", "input_embedding_scale", "output_multiplier",
    "final_logit_softcapping", "num_target_layers",
}  # fmt: skip
"""Keys of dflash_config that are read, and one that nothing needs."""
_DEFAULT_BLOCK = 16


def read_dflash(path: str | Path) -> DFlashFile:
    """A drafter of a folder (either form) or of a GGUF file.

    Raises:
        UserError: it is none, is damaged, or has an option that is not supported, which the message names.
    """
    path = Path(os.path.expanduser(path))
    return read_folder(path) if os.path.isdir(path) else read_gguf(open_gguf(path))


def read_folder(folder: Path) -> DFlashFile:
    """A drafter of a folder with config.json and model.safetensors.

    Raises:
        UserError: as `read_dflash`.
    """
    checkpoint = Checkpoint(folder)
    where, config = folder / "config.json", checkpoint.config
    if "speculators_model_type" in config:
        options, model = _speculators(where, config), config.get("transformer_layer_config")
        if not isinstance(model, dict):
            raise UserError(f"{where}: has no transformer_layer_config")
    else:
        options, model = _authors(where, config), config
    hf = HfConfig(where, model)
    _refuse(hf)
    layers, features = hf.size("num_hidden_layers", most=1 << 10), options["features"]
    windows, causal = _attention(hf, options, layers)
    fc = checkpoint.shapes.get("fc.weight", (0, 0))
    if len(fc) != 2 or not features or not fc[1] or fc[1] % len(features):
        raise UserError(f"{folder}: tensor fc.weight is {fc}, which does not fit the {len(features)} layers of {where}")
    head_dim, context = hf.size("head_dim", 128), hf.size("max_position_embeddings", 32768, most=MAX_CONTEXT)
    about = HfConfig(where, config).get("speculators_config", dict, {})
    known = head_folder.of_folder(checkpoint, _names(checkpoint), hf, about=about, head_dim=head_dim, context=context)
    shape = BlockShape(
        width=hf.size("hidden_size"),
        heads=hf.size("num_attention_heads"),
        kv_heads=hf.size("num_key_value_heads"),
        head_dim=head_dim,
        d_ff=hf.size("intermediate_size"),
        eps=hf.eps(1e-6),
        features=features,
        feature_width=fc[1] // len(features),
        windows=windows,
        causal=causal,
    )
    return DFlashFile(
        **known,
        shape=shape,
        block_size=options["block_size"],
        mask_token=options["mask_token"],
        from_anchor=options["from_anchor"],
        embedding_scale=options["embedding_scale"],
        logit_scale=options["logit_scale"],
        softcap=options["softcap"],
    )


def _authors(where: Path, config: Json) -> Json:
    """Options of the authors' form: in dflash_config, or beside it."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    if first != "DFlashDraftModel":
        raise UserError(f"{where}: architectures is {first!r}, not DFlashDraftModel: only DFlash itself is supported")
    own = HfConfig(where, config).get("dflash_config", dict, {})
    unknown = sorted(own.keys() - _OPTIONS)
    if unknown:
        raise UserError(f"{where}: dflash_config.{unknown[0]} is not supported: only DFlash itself is, with "
                        f"{', '.join(sorted(_OPTIONS))}")  # fmt: skip
    get = HfConfig(where, {key: config.get(key) for key in _OPTIONS} | own).get
    softcap = get("final_logit_softcapping", float, 0.0)
    return {
        "block_size": get("block_size", int, _DEFAULT_BLOCK),
        "mask_token": get("mask_token_id", int),
        "features": tuple(i + 1 for i in _layer_ids(where, "target_layer_ids", get("target_layer_ids", list))),
        "from_anchor": False,
        "causal": get("is_causal", bool, None),
        "embedding_scale": get("input_embedding_scale", float, 1.0),
        "logit_scale": get("output_multiplier", float, 1.0),
        "softcap": max(softcap, 0.0),
    }


def _speculators(where: Path, config: Json) -> Json:
    """Options of the speculators library's form."""
    get = HfConfig(where, config).get
    kind = get("speculators_model_type", str)
    if kind != "dflash":
        raise UserError(f"{where}: is a drafter of the kind {kind}, not dflash")
    if get("projector_type", str, "dflash") != "dflash":
        raise UserError(f"{where}: projector_type={config['projector_type']} is not supported: only dflash is")
    if get("shift_label", bool, False):
        raise UserError(f"{where}: shift_label=true is not supported: see sample_from_anchor")
    ids = get("aux_hidden_state_layer_ids", list)
    return {
        "block_size": get("block_size", int),
        "mask_token": get("mask_token_id", int),
        "features": tuple(_layer_ids(where, "aux_hidden_state_layer_ids", ids)),
        "from_anchor": get("sample_from_anchor", bool, False),
        "causal": False if get("sliding_window_non_causal", bool, False) else None,
        "embedding_scale": 1.0,
        "logit_scale": 1.0,
        "softcap": 0.0,
    }


def _layer_ids(where: Path, key: str, ids: list[Any]) -> list[int]:
    if not ids or any(type(i) is not int or not 0 <= i < 1 << 14 for i in ids):
        raise UserError(f"{where}: {key} must be a list of layers, not {ids!r:.60}")
    return ids


def _refuse(hf: HfConfig) -> None:
    """Variants of the layer that are not built."""
    model = hf.get("model_type", str, "qwen3")
    if model != "qwen3":
        raise UserError(f"{hf.where}: layers of a {model} are not supported in a DFlash drafter: only Qwen3's are")
    if hf.get("attention_bias", bool, False):
        raise UserError(f"{hf.where}: attention_bias=true is not supported in a DFlash drafter")
    head_folder.refuse_activation(hf, "a DFlash drafter")


def _attention(hf: HfConfig, options: Json, layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Window and causality of each layer. Without a word on it, layers that slide are causal inside the block."""
    given = hf.values.get("sliding_window") is not None
    windowed = given and hf.get("use_sliding_window", bool, False)
    kinds = hf.get("layer_types", list, None)
    if kinds is None:
        first = hf.get("max_window_layers", int, 28)
        kinds = ["sliding_attention" if windowed and i >= first else "full_attention" for i in range(layers)]
    known = ("sliding_attention", "full_attention")
    if len(kinds) != layers or any(kind not in known for kind in kinds):
        raise UserError(f"{hf.where}: layer_types must name one of {' and '.join(known)} for each of {layers} layers")
    slides = [kind == known[0] for kind in kinds]
    size = hf.size("sliding_window", most=MAX_CONTEXT) if given and (windowed or any(slides)) else None
    causal = options["causal"]
    return (
        tuple(size if slide else None for slide in slides),
        tuple(slide if causal is None else causal for slide in slides),
    )


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    """The checkpoint's tensors by GGUF name; one of another drafter keeps its name and is refused with it."""
    names = {}
    for theirs in checkpoint.shapes:
        stem, _, kind = theirs.rpartition(".")
        if theirs in ("d2t", "t2d"):
            continue
        number, _, rest = stem.removeprefix("layers.").partition(".")
        if kind == "weight" and stem in TOP:
            names[f"{TOP[stem]}.weight"] = theirs
        elif kind == "weight" and stem.startswith("layers.") and number.isdecimal() and rest in head_folder.LAYER:
            names[f"blk.{int(number)}.{head_folder.LAYER[rest]}.weight"] = theirs
        elif not theirs.endswith("rotary_emb.inv_freq"):
            names[theirs] = theirs
    return names


def convert_dflash(
    source: str | Path,
    out: Path,
    *,
    form: FolderForm | None = None,
    target: GGUFFile | None = None,
    verifier: str | None = None,
    quant: str = "F32",
) -> DFlashFile:
    """Writes a drafter in another form.

    Args:
        source: as `read_dflash` takes it.
        out: a GGUF file (`*.gguf`), or a folder.
        form: of a folder; by default speculators with a verifier, else as `write_folder` chooses.
        target: the target's GGUF file, whose tokenizer llama.cpp reads from the drafter's.
        verifier: the target by name, which a speculators folder must have: owner/name of the Hub, or a folder. By
            default the one that the source names.
        quant: type of a GGUF file's matrices.

    Returns:
        What was written.

    Raises:
        UserError: no DFlash drafter, one for another target, or one that the form cannot say.
    """
    file = read_dflash(source)
    form = form or (None if verifier is None else "speculators")
    gguf = draft_head.written_as_gguf(out, form=form, verifier=verifier, quant=quant)
    file = draft_head.for_verifier(file, verifier)
    if target is not None:
        _check_target(file, target)
    if gguf:
        write_dflash_gguf(file, out, tokenizer=draft_head.tokenizer_of(target, out), quant=quant)
    else:
        write_folder(file, out, form=form)
    return file


def _check_target(file: DFlashFile, target: GGUFFile) -> None:
    n_layers = draft_head.layers_of(target, file.path, width=file.shape.feature_width, ids=file.ids)
    beyond = [layer for layer in file.shape.features if layer > n_layers]
    if beyond:
        raise UserError(
            f"{file.path}: reads the target's features at layer {beyond[0]}, {target.path.name} has {n_layers} layers"
        )
