"""EAGLE-3 heads as folders of config.json and weights: the authors' form and that of the speculators library.

Both have the same tensors, `midlayer.` in one and `layers.0.` in the other. The library has the layer's own config
inside `transformer_layer_config`. An option that is not known here is refused by name: it would change what the head
computes.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

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
from specsparse.speculative.drafters.heads import head_file
from specsparse.speculative.drafters.heads.eagle3_file import (
    ARCHITECTURE,
    DRAFT_IDS,
    FEATURE_NORM,
    Eagle3File,
    features_of,
    read_gguf,
    write_eagle3_gguf,
)
from specsparse.speculative.drafters.heads.eagle3_head import PROJECTIONS, HeadShape, default_layers
from specsparse.support.atomic import atomically
from specsparse.support.json_files import Json, to_json, write_atomically

Form = Literal["original", "speculators"]

_TOP = {
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "input_norm": FEATURE_NORM.removesuffix(".weight"),
    **{f"fc_norm.{i}": f"fc_norm.{i}" for i in range(16)},
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_HF_TOP = {ours: theirs for theirs, ours in _TOP.items()}
_HF_LAYER = {ours: theirs for theirs, ours in _LAYER.items()}
_PREFIX = {"original": "midlayer.", "speculators": "layers.0."}
_UNREAD = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors that training keeps; decoding needs none of them."""
_STORED = {
    "F32": (GGMLQuantizationType.F32, np.dtype(np.float32)),
    "F16": (GGMLQuantizationType.F16, np.dtype(np.float16)),
    "BF16": (GGMLQuantizationType.BF16, np.dtype(ml_dtypes.bfloat16)),
}
_OPTIONS = {
    "draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual",
    "norm_before_fc", "fc_norm", "norm_output", "eagle_config",
}  # fmt: skip
_OF_LAYER = {
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "hidden_act", "max_position_embeddings", "original_max_position_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "vocab_size", "model_type", "attention_bias", "mlp_bias", "use_sliding_window",
    "sliding_window", "layer_types", "quantization_config", "partial_rotary_factor",
}  # fmt: skip
_OF_LIBRARY = {"speculators_config", "speculators_model_type", "transformer_layer_config"}
_WITHOUT_EFFECT = {
    "architectures", "auto_map", "attention_dropout", "bos_token_id", "dtype", "embed_requires_grad",
    "eos_token_id", "initializer_range", "max_window_layers", "modeling_class", "name_or_path", "_name_or_path",
    "pad_token_id", "pretraining_tp", "return_dict", "speculators_version", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache", "target_model_type", "_attn_implementation", "has_no_defaults_at_init",
    "decoder_start_token_id", "unk_token_id", "sep_token_id", "num_hidden_layers",
}  # fmt: skip
"""Keys that say nothing of what a head computes: names, special ids, the number of layers (some give the target's)."""
_EAGLE_1 = "vLLM, SGLang and llama.cpp read EAGLE-3, and so does drafter=eagle3; this head is EAGLE-1"
_INSIDE = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
"""Keys of eagle_config and the one value of each that is EAGLE-3 as it is here."""


def read_eagle3(path: str | Path) -> Eagle3File:
    """A head of a folder (either form), of a file in one, or of a GGUF file.

    Raises:
        UserError: it is none, is damaged, or has an option that is not supported, which the message names.
    """
    path = Path(os.path.expanduser(path))
    if os.path.isfile(path) and path.suffix in (".safetensors", ".bin", ".json"):
        path = path.parent
    if os.path.isdir(path):
        return read_folder(path)
    f = open_gguf(path)
    if f.get("general.architecture", "str", "") == head_file.ARCHITECTURE:
        raise UserError(f"{path}: {_EAGLE_1}: drafter=head drafter.head={path} drafts with it")
    return read_gguf(f)


def read_folder(folder: Path) -> Eagle3File:
    """A head of a folder with config.json and model.safetensors or pytorch_model.bin.

    Raises:
        UserError: as `read_eagle3`.
    """
    checkpoint = Checkpoint(folder)
    where, config = folder / "config.json", checkpoint.config
    _check_kind(where, config)
    library = "speculators_model_type" in config
    layer = config.get("transformer_layer_config") if library else config
    if not isinstance(layer, dict):
        raise UserError(f"{where}: has no transformer_layer_config")
    _refuse_unknown(where, config, _WITHOUT_EFFECT | _OPTIONS | (_OF_LIBRARY if library else _OF_LAYER))
    if library:
        _refuse_unknown(where, layer, _WITHOUT_EFFECT | _OF_LAYER)
    options, hf = HfConfig(where, config), HfConfig(where, layer)
    _refuse_variants(hf)
    names = _names(checkpoint)
    shapes = {name: checkpoint.shapes[theirs] for name, theirs in names.items()}
    D, H = hf.size("hidden_size"), hf.size("num_attention_heads")
    target_width = options.size("target_hidden_size", D)
    head_dim = hf.size("head_dim", max(D // H, 1))
    context = hf.size("max_position_embeddings", 2048, most=MAX_CONTEXT)
    rope, factors = _rope(hf, head_dim, context)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    shape = HeadShape(
        width=D,
        heads=H,
        kv_heads=hf.size("num_key_value_heads", H),
        head_dim=head_dim,
        d_ff=hf.size("intermediate_size"),
        eps=hf.eps(1e-6),
        features=features_of(shapes.get("fc.weight"), target_width, folder),
        qk_norm="blk.0.attn_q_norm.weight" in names,
        biases=tuple(name for name in PROJECTIONS if f"blk.0.{name}.bias" in names),
        **{flag: options.get(flag, bool, False) for flag in flags},
    )
    about = options.get("speculators_config", dict, {})
    ids = _ids(checkpoint)
    _check_draft_vocabulary(options, shapes, ids)
    return Eagle3File(
        path=folder,
        shape=shape,
        target_width=target_width,
        layers=_layers(options),
        rope=rope,
        rope_factors=factors,
        rope_scaling=hf.get("rope_parameters", dict, None) or hf.get("rope_scaling", dict, None),
        context=context,
        vocab_size=hf.size("vocab_size"),
        ids=ids,
        tensors=shapes,
        load=lambda name: _load(checkpoint, name, names[name]),
        target=_target(about),
        accept_k=_accept_k(about),
    )


def _check_kind(where: Path, config: Json) -> None:
    """Refuses other drafters."""
    kind = draft_head.kind(config)
    if kind == "EAGLE-3":
        return
    if kind == "DFlash":
        raise UserError(f"{where}: is a DFlash drafter: take drafter=dflash")
    if kind == "EAGLE":
        raise UserError(f"{where}: {_EAGLE_1} or EAGLE-2")
    found = f"a {kind} drafter" if kind else "no head of EAGLE-3: it has no draft_vocab_size"
    raise UserError(f"{where}: is {found}; drafter=eagle3 reads EAGLE-3")


def _refuse_unknown(where: Path, values: Json, known: set[str]) -> None:
    unknown = sorted(key for key, value in values.items() if key not in known and value is not None)
    if unknown:
        raise UserError(f"{where}: the option {unknown[0]}={values[unknown[0]]!r:.40} is not supported")


def _refuse_variants(hf: HfConfig) -> None:
    """Layers that are not built."""
    act = hf.get("hidden_act", str, "silu")
    if act not in ("silu", "swish"):
        raise UserError(f"{hf.where}: hidden_act={act} is not supported in an EAGLE-3 head: only silu is")
    slides = "sliding_attention" in hf.get("layer_types", list, [])
    if slides or (hf.get("use_sliding_window", bool, False) and hf.values.get("sliding_window") is not None):
        raise UserError(f"{hf.where}: sliding_window is not supported in an EAGLE-3 head")
    if hf.values.get("quantization_config") is not None:
        raise UserError(f"{hf.where}: quantization_config is not supported: take the head's float weights")


def _layers(options: HfConfig) -> tuple[int, ...]:
    """The layers that the config names, itself or in eagle_config; () for none.

    eagle_config is SGLang's, where ids that begin with 1 are of layers whose output is read, and other ids of layers
    whose input is (github.com/sgl-project/sglang/pull/25454).
    """
    inside = HfConfig(options.where, options.get("eagle_config", dict, {}))
    key = "eagle_aux_hidden_state_layer_ids"
    _refuse_unknown(options.where, inside.values, {*_INSIDE, key})
    for name, value in _INSIDE.items():
        if inside.get(name, bool, value) is not value:
            raise UserError(f"{options.where}: eagle_config.{name}={not value} is not supported")
    own = options.get(key, list, None)
    ids = own or inside.get(key, list, [])
    if any(type(i) is not int or not 0 <= i < 1 << 14 for i in ids):
        raise UserError(f"{options.where}: {key} must be a list of layers, not {ids!r:.60}")
    return tuple(i + 1 for i in ids) if not own and ids and ids[0] == 1 else tuple(ids)


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
        freq_factors=says.factors is not None,
    )
    return rope, says.factors


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    """The checkpoint's tensors by GGUF name; one that is not known keeps its name and is refused with it."""
    names = {}
    for theirs in checkpoint.shapes:
        if theirs in (DRAFT_IDS, *_UNREAD) or theirs.endswith("rotary_emb.inv_freq"):
            continue
        stem, _, kind = theirs.removeprefix("model.").rpartition(".")
        rest = next((stem.removeprefix(p) for p in _PREFIX.values() if stem.startswith(p)), None)
        ours = theirs
        if kind == "weight" and stem in _TOP:
            ours = f"{_TOP[stem]}.weight"
        elif kind in ("weight", "bias") and rest in _LAYER:
            ours = f"blk.0.{_LAYER[rest]}.{kind}"
        if ours in names:
            raise UserError(f"{checkpoint.folder}: tensors {names[ours]} and {theirs} are the same part of a head")
        names[ours] = theirs
    return names


def _ids(checkpoint: Checkpoint) -> np.ndarray | None:
    """The target's ids of the draft vocabulary: offsets `d2t` added to the rows they belong to."""
    if DRAFT_IDS not in checkpoint.shapes:
        return None
    offsets = checkpoint.integers(DRAFT_IDS)
    if offsets.ndim != 1 or not len(offsets):
        raise UserError(f"{checkpoint.folder}: d2t has the shape {offsets.shape}, a row of ids is needed")
    return np.arange(len(offsets)) + offsets


def _check_draft_vocabulary(options: HfConfig, shapes: Mapping[str, tuple[int, ...]], ids: np.ndarray | None) -> None:
    wanted = options.get("draft_vocab_size", int, None)
    rows = next(iter(shapes.get("output.weight", ())), None if ids is None else len(ids))
    if wanted is not None and rows is not None and wanted != rows:
        raise UserError(f"{options.where}: draft_vocab_size is {wanted}, the head scores {rows} ids")


def _target(about: Json) -> str:
    verifier = about.get("verifier")
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return name if isinstance(name, str) else ""


def _accept_k(about: Json) -> int:
    methods = about.get("proposal_methods")
    found = [m.get("verifier_accept_k") for m in methods if isinstance(m, Mapping)] if isinstance(methods, list) else []
    return max([k for k in found if type(k) is int], default=1)


def _load(checkpoint: Checkpoint, name: str, theirs: str) -> TensorInfo:
    values = checkpoint.load(theirs)  # float32, finite
    kind, dtype = _STORED.get(checkpoint.kind(theirs), _STORED["F32"])
    if values.ndim == 1:
        kind, dtype = _STORED["F32"]
    raw = np.ascontiguousarray(values.astype(dtype)).view(np.uint8).reshape(*values.shape[:-1], -1)
    return TensorInfo(name, kind, values.shape, raw, str(checkpoint.folder))


def convert_eagle3(
    source: str | Path, out: Path, *, form: Form | None = None, target: GGUFFile | None = None, quant: str = "F32"
) -> Eagle3File:
    """Writes a head in another form.

    Args:
        source: as `read_eagle3` takes it.
        out: a GGUF file (`*.gguf`), or a folder.
        form: of a folder; the original one by default.
        target: the target's GGUF file, whose tokenizer llama.cpp reads from the head's, and whose layers are those of a
            head that names none.
        quant: type of a GGUF file's matrices.

    Returns:
        What was written.

    Raises:
        UserError: no EAGLE-3 head, or one that the form cannot say.
    """
    file = read_eagle3(source)
    gguf = draft_head.written_as_gguf(out, form=form, quant=quant)
    if target is not None:
        n_layers = draft_head.layers_of(target, file.path, width=file.target_width, ids=file.ids)
        file = file if file.layers else replace(file, layers=default_layers(n_layers))
    if gguf:
        write_eagle3_gguf(file, out, tokenizer=draft_head.tokenizer_of(target, out), quant=quant)
    else:
        write_folder(file, out, form=form or "original")
    return file


def write_folder(file: Eagle3File, folder: Path, *, form: Form = "original") -> Path:
    """Writes config.json and model.safetensors (float32), which vLLM and SGLang read.

    Args:
        file: the head, in whatever form it was read.
        folder: made if need be; files of these names in it are replaced.
        form: "original" (`LlamaForCausalLMEagle3`) or "speculators".

    Raises:
        UserError: config.json cannot say what the head is; the message names what.
    """
    config = _config(file, form)
    tensors = {_hf_name(name, form): file.values(name) for name in file.tensors}
    if file.ids is not None:
        tensors[DRAFT_IDS] = file.ids.astype(np.int64) - np.arange(len(file.ids))
        tensors["t2d"] = np.isin(np.arange(file.vocab_size), file.ids)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror}") from None
    with atomically(folder / "model.safetensors") as out:
        out.write(save(tensors, metadata={"format": "pt"}))
    write_atomically(folder / "config.json", to_json(config, indent=2) + "\n")
    return folder


def _hf_name(name: str, form: Form) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _HF_TOP:
        return f"{_HF_TOP[stem]}.{kind}"
    return f"{_PREFIX[form]}{_HF_LAYER[stem.removeprefix('blk.0.')]}.{kind}"


def _config(file: Eagle3File, form: Form) -> Json:
    s = file.shape
    scored = file.tensors.get("output.weight", (file.vocab_size,))[0] if file.ids is None else len(file.ids)
    options: Json = {
        "draft_vocab_size": scored,
        "target_hidden_size": file.target_width,
        "eagle_aux_hidden_state_layer_ids": list(file.layers) or None,
        "norm_before_residual": s.norm_before_residual,
        "norm_before_fc": s.norm_before_fc,
        "fc_norm": s.fc_norm,
        "norm_output": s.norm_output,
    }
    if form == "original":
        inside = {"eagle_aux_hidden_state_layer_ids": list(file.layers), **_INSIDE}
        own = {"eagle_config": inside} if file.layers and file.layers[0] != 1 else {}  # 1 would mean 2 there
        return {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32", **_layer(file), **options, **own}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "dtype": "float32",
        "speculators_model_type": ARCHITECTURE,
        "speculators_config": {
            "algorithm": ARCHITECTURE,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": [], "name_or_path": file.target},
        },
        "transformer_layer_config": _layer(file),
        **options,
    }


def _layer(file: Eagle3File) -> Json:
    """The layer as a Llama of one layer, or a Qwen3 where queries and keys have norms."""
    s, attention, ffn = file.shape, PROJECTIONS[:4], PROJECTIONS[4:]
    if {*s.biases} not in ({*()}, {*attention}, {*ffn}, {*PROJECTIONS}):
        raise UserError(f"{file.path}: biases of {', '.join(s.biases)} alone have no place in config.json: write GGUF")
    return {
        "model_type": "qwen3" if s.qk_norm else "llama",
        "hidden_size": s.width,
        "intermediate_size": s.d_ff,
        "num_hidden_layers": 1,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": s.eps,
        "attention_bias": "attn_q" in s.biases,
        "mlp_bias": "ffn_gate" in s.biases,
        "max_position_embeddings": file.context,
        "vocab_size": file.vocab_size,
        "rope_theta": file.rope.base,
        "rope_scaling": _rope_scaling(file),
        "tie_word_embeddings": False,
    }


def _rope_scaling(file: Eagle3File) -> Json | None:
    rope = file.rope
    if file.rope_scaling is not None:
        return dict(file.rope_scaling)
    if file.rope_factors is not None or rope.attn_factor != 1.0:
        raise UserError(f"{file.path}: a rotation with frequency factors has no place in a config.json: write GGUF")
    if rope.scaling == "none":
        return None
    found: Json = {"rope_type": rope.scaling, "factor": rope.factor}
    return found | ({"original_max_position_embeddings": rope.original_context} if rope.scaling == "yarn" else {})
