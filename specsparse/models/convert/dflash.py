"""DFlash drafters as folders of config.json and safetensors: the authors' form and that of the speculators library.

The two differ in where options stand, and in what a layer's id means: the authors' `target_layer_ids` are layers whose
output is read, the library's `aux_hidden_state_layer_ids` layers whose input is. Here an id is of an input.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import save

from specsparse.engine.config import MAX_CONTEXT, RopeConfig
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo, open_gguf
from specsparse.errors import UserError
from specsparse.models.convert import draft_head
from specsparse.models.convert.checkpoint import Checkpoint
from specsparse.models.convert.hf_config import HfConfig
from specsparse.models.convert.hf_rope import HfRope, said
from specsparse.speculative.drafters.dflash_block import BlockShape
from specsparse.speculative.drafters.dflash_file import (
    DRAFT_IDS,
    EMBEDDING,
    OUTPUT,
    DFlashFile,
    read_gguf,
    write_dflash_gguf,
)
from specsparse.support.atomic import atomically
from specsparse.support.json_files import Json, to_json, write_atomically

Form = Literal["authors", "speculators"]

_TOP = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "embed_tokens": "token_embd",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_HF_TOP = {ours: theirs for theirs, ours in _TOP.items()}
_HF_LAYER = {ours: theirs for theirs, ours in _LAYER.items()}
_OPTIONS = {
    "block_size", "mask_token_id", "target_layer_ids", "is_causal", "input_embedding_scale", "output_multiplier",
    "final_logit_softcapping", "num_target_layers",
}  # fmt: skip
"""Keys of dflash_config that are read, and one that nothing needs."""
_DEFAULT_BLOCK = 16
_STORED = {
    "F32": (GGMLQuantizationType.F32, np.dtype(np.float32)),
    "F16": (GGMLQuantizationType.F16, np.dtype(np.float16)),
    "BF16": (GGMLQuantizationType.BF16, np.dtype(ml_dtypes.bfloat16)),
}


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
        options, model, library = _speculators(where, config), config.get("transformer_layer_config"), True
        if not isinstance(model, dict):
            raise UserError(f"{where}: has no transformer_layer_config")
    else:
        options, model, library = _authors(where, config), config, False
    hf = HfConfig(where, model)
    _refuse(hf)
    layers, features = hf.size("num_hidden_layers", most=1 << 10), options["features"]
    windows, causal = _attention(hf, options, layers)
    fc = checkpoint.shapes.get("fc.weight", (0, 0))
    if len(fc) != 2 or not features or not fc[1] or fc[1] % len(features):
        raise UserError(f"{folder}: tensor fc.weight is {fc}, which does not fit the {len(features)} layers of {where}")
    head_dim, context = hf.size("head_dim", 128), hf.size("max_position_embeddings", 32768, most=MAX_CONTEXT)
    rope, factors = _rope(hf, head_dim, context)
    names = _names(checkpoint)
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
        path=folder,
        shape=shape,
        block_size=options["block_size"],
        mask_token=options["mask_token"],
        from_anchor=options["from_anchor"],
        rope=rope,
        rope_factors=factors,
        context=context,
        ids=_ids(checkpoint) if library else None,
        tensors={name: checkpoint.shapes[theirs] for name, theirs in names.items()},
        load=lambda name: _load(checkpoint, name, names[name]),
        embedding_scale=options["embedding_scale"],
        logit_scale=options["logit_scale"],
        softcap=options["softcap"],
        target=options["target"],
        accept_k=options["accept_k"],
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
        "target": "",
        "accept_k": 1,
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
    about = get("speculators_config", dict, {})
    verifier = about.get("verifier") if isinstance(about.get("verifier"), Mapping) else {}
    methods = about.get("proposal_methods")
    accept = (
        [m.get("verifier_accept_k") for m in methods if isinstance(m, Mapping)] if isinstance(methods, list) else []
    )
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
        "target": verifier.get("name_or_path") if isinstance(verifier.get("name_or_path"), str) else "",
        "accept_k": max([k for k in accept if type(k) is int], default=1),
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
    act = hf.get("hidden_act", str, "silu")
    if act not in ("silu", "swish"):
        raise UserError(f"{hf.where}: hidden_act={act} is not supported in a DFlash drafter: only silu is")


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


def _rope(hf: HfConfig, head_dim: int, context: int) -> tuple[RopeConfig, np.ndarray | None]:
    found = hf.get("rope_parameters", dict, None) or hf.get("rope_scaling", dict, {})
    base = hf.theta(found, 10000.0)
    partial = {"partial_rotary_factor": hf.get("partial_rotary_factor", float, None)}
    pretrained = hf.get("original_max_position_embeddings", int, None)
    says = said(HfRope(hf.where, "llama", partial | found, base, head_dim, context, pretrained))
    keys = {key.removeprefix("rope.scaling."): value for key, value in says.keys.items()}
    rope = RopeConfig(
        base=base,
        dim=head_dim,
        pairing="neox",
        scaling=keys.get("type", "none"),
        factor=keys.get("factor", 1.0),
        original_context=keys.get("original_context_length", context),
        attn_factor=keys.get("attn_factor", 1.0),
        beta_fast=keys.get("yarn_beta_fast", 32.0),
        beta_slow=keys.get("yarn_beta_slow", 1.0),
        freq_factors=says.factors is not None,
    )
    return rope, says.factors


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    """The checkpoint's tensors by GGUF name; one of another drafter keeps its name and is refused with it."""
    names = {}
    for theirs in checkpoint.shapes:
        stem, _, kind = theirs.rpartition(".")
        if theirs in ("d2t", "t2d"):
            continue
        number, _, rest = stem.removeprefix("layers.").partition(".")
        if kind == "weight" and stem in _TOP:
            names[f"{_TOP[stem]}.weight"] = theirs
        elif kind == "weight" and stem.startswith("layers.") and number.isdecimal() and rest in _LAYER:
            names[f"blk.{int(number)}.{_LAYER[rest]}.weight"] = theirs
        elif not theirs.endswith("rotary_emb.inv_freq"):
            names[theirs] = theirs
    return names


def _ids(checkpoint: Checkpoint) -> np.ndarray | None:
    """Target ids of the draft vocabulary: offsets `d2t` added to the rows they belong to."""
    if "d2t" not in checkpoint.shapes:
        return None
    offsets = checkpoint.integers("d2t")
    if offsets.ndim != 1 or not len(offsets):
        raise UserError(f"{checkpoint.folder}: d2t has the shape {offsets.shape}, a row of ids is needed")
    ids = np.arange(len(offsets)) + offsets
    if ids.min() < 0 or ids.max() >= 1 << 24:
        raise UserError(f"{checkpoint.folder}: d2t leads to id {ids.min() if ids.min() < 0 else ids.max()}")
    return ids.astype(np.int32)


def _load(checkpoint: Checkpoint, name: str, theirs: str) -> TensorInfo:
    values = checkpoint.load(theirs)  # float32, finite
    kind, dtype = _STORED.get(checkpoint.kind(theirs), _STORED["F32"])
    if values.ndim == 1:
        kind, dtype = _STORED["F32"]
    raw = np.ascontiguousarray(values.astype(dtype)).view(np.uint8).reshape(*values.shape[:-1], -1)
    return TensorInfo(name, kind, values.shape, raw, str(checkpoint.folder))


def convert_dflash(
    source: str | Path, out: Path, *, form: Form | None = None, target: GGUFFile | None = None, quant: str = "F32"
) -> DFlashFile:
    """Writes a drafter in another form.

    Args:
        source: as `read_dflash` takes it.
        out: a GGUF file (`*.gguf`), or a folder.
        form: of a folder; by default as `write_folder` chooses.
        target: the target's GGUF file, whose tokenizer llama.cpp reads from the drafter's.
        quant: type of a GGUF file's matrices.

    Returns:
        What was written.

    Raises:
        UserError: no DFlash drafter, one for another target, or one that the form cannot say.
    """
    file = read_dflash(source)
    gguf = draft_head.written_as_gguf(out, form=form, quant=quant)
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


def write_folder(file: DFlashFile, folder: Path, *, form: Form | None = None) -> Path:
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
    tensors = {_hf_name(name): _values(file, name) for name in file.tensors if name != DRAFT_IDS}
    if file.ids is not None:
        count = len(file.ids)
        tensors["d2t"] = file.ids.astype(np.int64) - np.arange(count)
        tensors["t2d"] = np.isin(np.arange(_vocabulary(file)), file.ids)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror}") from None
    with atomically(folder / "model.safetensors") as out:
        out.write(save(tensors, metadata={"format": "pt"}))
    write_atomically(folder / "config.json", to_json(config, indent=2) + "\n")
    return folder


def _values(file: DFlashFile, name: str) -> np.ndarray:
    return np.array(file.load(name).dequantize(), np.float32).reshape(file.tensors[name])


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
    return {
        "model_type": "qwen3",
        "hidden_size": s.width,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.d_ff,
        "hidden_act": "silu",
        "rms_norm_eps": s.eps,
        "attention_bias": False,
        "max_position_embeddings": file.context,
        "vocab_size": _vocabulary(file),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in s.windows],
        "use_sliding_window": bool(windows),
        "sliding_window": windows.pop() if windows else None,
        "rope_theta": file.rope.base,
        "rope_scaling": _rope_scaling(file),
        "tie_word_embeddings": False,
    }


def _rope_scaling(file: DFlashFile) -> Json | None:
    rope = file.rope
    if file.rope_factors is not None or rope.attn_factor != 1.0:
        raise UserError(f"{file.path}: a rotation with frequency factors is not written as safetensors: write GGUF")
    if rope.scaling == "none":
        return None
    found: Json = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "yarn":
        found |= {"original_max_position_embeddings": rope.original_context, "beta_fast": rope.beta_fast,
                  "beta_slow": rope.beta_slow}  # fmt: skip
    return found


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
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": file.drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "dtype": "float32",
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": [], "name_or_path": file.target},
        },
        "transformer_layer_config": _layer_config(file),
        "aux_hidden_state_layer_ids": list(s.features),
        "block_size": file.block_size,
        "mask_token_id": file.mask_token,
        "draft_vocab_size": len(file.ids) if file.ids is not None else _vocabulary(file),
        "sample_from_anchor": file.from_anchor,
        "sliding_window_non_causal": slides and not any(s.causal),
        "target_hidden_size": None if s.feature_width == s.width else s.feature_width,
    }
