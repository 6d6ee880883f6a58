"""DFlash drafters as folders of config.json and safetensors: the authors' form and that of the speculators library.

The two differ in the place of the options, and in the meaning of a layer's id: the authors' `target_layer_ids` are
layers whose output is read, the library's `aux_hidden_state_layer_ids` layers whose input is. Here ids are of inputs.
"""

import os
from pathlib import Path
from typing import Any, Literal

from specsparse.engine.config import MAX_CONTEXT
from specsparse.engine.gguf.reader import GGUFFile, open_gguf
from specsparse.errors import UserError
from specsparse.models.convert import heads
from specsparse.models.convert.checkpoint import Checkpoint
from specsparse.models.convert.hf_config import HfConfig
from specsparse.speculative.drafters.heads.dflash import BlockShape, DFlashFile, read_gguf, write_dflash_gguf
from specsparse.speculative.drafters.heads.published import EMBEDDING, OUTPUT
from specsparse.support.files import Json

FolderForm = Literal["authors", "speculators"]

_TOP = {**heads.HEAD_TOP, "hidden_norm": "enc.output_norm"}
_HF_TOP = {ours: theirs for theirs, ours in _TOP.items()}
_HF_LAYER = {ours: theirs for theirs, ours in heads.HEAD_LAYER.items()}
_OPTIONS = {
    "block_size", "mask_token_id", "target_layer_ids", "is_causal", "input_embedding_scale", "output_multiplier",
    "final_logit_softcapping", "num_target_layers",
}  # fmt: skip
"""Keys of dflash_config that are read, and one that nothing needs."""
_DEFAULT_BLOCK = 16


def read_dflash(path: str | Path) -> DFlashFile:
    """A drafter of a folder (either form) or of a GGUF file.

    Raises:
        UserError: no such drafter, a damaged one, or an option that is not supported, which the message names.
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
    model_type = hf.get("model_type", str, "qwen3")
    if model_type != "qwen3":
        raise UserError(f"{where}: layers of a {model_type} are not supported in a DFlash drafter: only Qwen3's are")
    if hf.get("attention_bias", bool, False):
        raise UserError(f"{where}: attention_bias=true is not supported in a DFlash drafter")
    heads.refuse_activation(hf, "a DFlash drafter")
    windows, causal = _attention(hf, options.pop("causal"), hf.size("num_hidden_layers", most=1 << 10))
    features = options.pop("features")
    fc = checkpoint.shapes.get("fc.weight", (0, 0))
    if len(fc) != 2 or not features or not fc[1] or fc[1] % len(features):
        raise UserError(f"{folder}: tensor fc.weight is {fc}, which does not fit the {len(features)} layers of {where}")

    names = {}  # by GGUF name; a tensor of another drafter keeps its name and is refused with it
    for theirs in checkpoint.shapes:
        stem, _, kind = theirs.rpartition(".")
        number, _, rest = stem.removeprefix("layers.").partition(".")
        if kind == "weight" and stem in _TOP:
            names[f"{_TOP[stem]}.weight"] = theirs
        elif kind == "weight" and stem.startswith("layers.") and number.isdecimal() and rest in heads.HEAD_LAYER:
            names[f"blk.{int(number)}.{heads.HEAD_LAYER[rest]}.weight"] = theirs
        elif theirs not in ("d2t", "t2d") and not theirs.endswith("rotary_emb.inv_freq"):
            names[theirs] = theirs
    head_dim, context = hf.size("head_dim", 128), hf.size("max_position_embeddings", 32768, most=MAX_CONTEXT)
    about = HfConfig(where, config).get("speculators_config", dict, {})
    known = heads.head_fields(checkpoint, names, hf, about=about, head_dim=head_dim, context=context)
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
    return DFlashFile(**known, **options, shape=shape)


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
    }


def _layer_ids(where: Path, key: str, ids: list[Any]) -> list[int]:
    if not ids or any(type(i) is not int or not 0 <= i < 1 << 14 for i in ids):
        raise UserError(f"{where}: {key} must be a list of layers, not {ids!r:.60}")
    return ids


def _attention(hf: HfConfig, causal: bool | None, layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
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
    return (
        tuple(size if slide else None for slide in slides),
        tuple(slide if causal is None else causal for slide in slides),
    )


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
        The drafter that was written.

    Raises:
        UserError: no DFlash drafter, one for another target, or one that the form cannot say.
    """
    file = read_dflash(source)
    if target is not None:
        n_layers = heads.target_layers(target, file.path, width=file.shape.feature_width, ids=file.ids)
        beyond = [layer for layer in file.shape.features if layer > n_layers]
        if beyond:
            raise UserError(
                f"{file.path}: reads the target's features at layer {beyond[0]}, {target.path.name} has {n_layers} "
                "layers"
            )
    return heads.convert_head(
        file, out, form=form, target=target, verifier=verifier, quant=quant, to_gguf=write_dflash_gguf,
        to_folder=write_folder,
    )  # fmt: skip


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
    s = file.shape
    reasons = {"authors": _not_in_authors(file), "speculators": _not_in_speculators(file)}
    chosen = form or next((name for name, why in reasons.items() if why is None), "speculators")
    if reasons[chosen] is not None:
        raise UserError(f"{file.path}: {reasons[chosen]} has no place in the form {chosen} of a DFlash folder")
    names = {}
    for name in file.tensors:
        theirs = _HF_TOP.get(name.removesuffix(".weight"))
        if theirs is None:
            _, number, rest = name.removesuffix(".weight").split(".", 2)
            theirs = f"layers.{number}.{_HF_LAYER[rest]}"
        names[name] = f"{theirs}.weight"

    rows = [file.tensors[name][0] for name in (EMBEDDING, OUTPUT) if name in file.tensors]
    ids = [] if file.ids is None else [int(file.ids.max()) + 1]
    vocab_size = max([*rows, file.mask_token + 1, *ids])  # as far as the drafter knows
    windows = {window for window in s.windows if window is not None}
    if len(windows) > 1:
        raise UserError(f"{file.path}: layers with windows of {sorted(windows)} have no place in one config.json")
    layer = heads.layer_config(
        file,
        vocab_size=vocab_size,
        model_type="qwen3",
        num_hidden_layers=s.layers,
        attention_bias=False,
        layer_types=["full_attention" if window is None else "sliding_attention" for window in s.windows],
        use_sliding_window=bool(windows),
        sliding_window=next(iter(windows), None),
    )
    if chosen == "authors":
        scales = {"input_embedding_scale": (file.embedding_scale, 1.0), "output_multiplier": (file.logit_scale, 1.0),
                  "final_logit_softcapping": (file.softcap, 0.0)}  # fmt: skip
        config = {
            "architectures": ["DFlashDraftModel"],
            "dtype": "float32",
            "block_size": file.block_size,
            **layer,
            **({} if s.causal == _slides(file) else {"is_causal": s.causal[0]}),
            "dflash_config": {
                "block_size": file.block_size,
                "mask_token_id": file.mask_token,
                "target_layer_ids": [layer - 1 for layer in s.features],
                **{name: value for name, (value, default) in scales.items() if value != default},
            },
        }
    else:
        config = {
            **heads.library_config(file, algorithm="dflash", kind="DFlashDraftModel", tokens=file.drafts, layer=layer),
            "aux_hidden_state_layer_ids": list(s.features),
            "block_size": file.block_size,
            "mask_token_id": file.mask_token,
            "draft_vocab_size": len(file.ids) if file.ids is not None else vocab_size,
            "sample_from_anchor": file.from_anchor,
            "sliding_window_non_causal": any(_slides(file)) and not any(s.causal),
            "target_hidden_size": None if s.feature_width == s.width else s.feature_width,
        }
    return heads.write_head(file, folder, config, names, vocab_size=vocab_size)


def _slides(file: DFlashFile) -> tuple[bool, ...]:
    return tuple(window is not None for window in file.shape.windows)


def _not_in_authors(file: DFlashFile) -> str | None:
    s = file.shape
    if file.ids is not None or OUTPUT in file.tensors or EMBEDDING in file.tensors:
        return "an embedding, output matrix or vocabulary of its own"
    if file.from_anchor:
        return "sample_from_anchor"
    if 0 in s.features:
        return "the embedding as a feature"
    return None if s.causal == _slides(file) or len(set(s.causal)) == 1 else "causality by layer"


def _not_in_speculators(file: DFlashFile) -> str | None:
    scaled = {"embedding_scale": file.embedding_scale != 1, "logit_scale": file.logit_scale != 1,
              "softcap": file.softcap != 0}  # fmt: skip
    other = next((name for name, found in scaled.items() if found), None)
    if other:
        return other
    causal = file.shape.causal
    return None if causal == _slides(file) or not any(causal) else "full attention that is causal inside the block"
