"""EAGLE-3 heads as folders of config.json and weights: the authors' form and that of the speculators library.

Both have the same tensors, `midlayer.` in one and `layers.0.` in the other. The library has the layer's own config
inside `transformer_layer_config`. An option that is not known here is refused by name: it would change what the head
computes.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

from specsparse.engine.config import MAX_CONTEXT
from specsparse.engine.gguf.reader import GGUFFile, open_gguf
from specsparse.errors import UserError
from specsparse.models.convert import heads
from specsparse.models.convert.checkpoint import Checkpoint
from specsparse.models.convert.hf_config import HfConfig
from specsparse.speculative.drafters.heads import head
from specsparse.speculative.drafters.heads.eagle3 import (
    ARCHITECTURE,
    FEATURE_NORM,
    PROJECTIONS,
    Eagle3File,
    HeadShape,
    default_layers,
    features_of,
    read_gguf,
    write_eagle3_gguf,
)
from specsparse.speculative.drafters.heads.published import DRAFT_IDS
from specsparse.support.files import Json

FolderForm = Literal["original", "speculators"]

_TOP = {
    **heads.HEAD_TOP,
    "input_norm": FEATURE_NORM.removesuffix(".weight"),
    **{f"fc_norm.{i}": f"fc_norm.{i}" for i in range(16)},
}
_LAYER = {**heads.HEAD_LAYER, "hidden_norm": "attn_norm_2"}
_HF_TOP = {ours: theirs for theirs, ours in _TOP.items()}
_HF_LAYER = {ours: theirs for theirs, ours in _LAYER.items()}
_PREFIX = {"original": "midlayer.", "speculators": "layers.0."}
_UNREAD = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors that training keeps; decoding needs none of them."""
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
        UserError: no such head, a damaged one, or an option that is not supported, which the message names.
    """
    path = Path(os.path.expanduser(path))
    if os.path.isfile(path) and path.suffix in (".safetensors", ".bin", ".json"):
        path = path.parent
    if os.path.isdir(path):
        return read_folder(path)
    f = open_gguf(path)
    if f.get("general.architecture", "str", "") == head.ARCHITECTURE:
        raise UserError(f"{path}: {_EAGLE_1}: drafter=head drafter.head={path} drafts with it")
    return read_gguf(f)


def read_folder(folder: Path) -> Eagle3File:
    """A head of a folder with config.json and model.safetensors or pytorch_model.bin.

    Raises:
        UserError: as `read_eagle3`.
    """
    checkpoint = Checkpoint(folder)
    where, config = folder / "config.json", checkpoint.config
    kind = heads.head_kind(config)
    if kind == "DFlash":
        raise UserError(f"{where}: is a DFlash drafter: take drafter=dflash")
    if kind == "EAGLE":
        raise UserError(f"{where}: {_EAGLE_1} or EAGLE-2")
    if kind != "EAGLE-3":
        found = f"a {kind} drafter" if kind else "no head of EAGLE-3: it has no draft_vocab_size"
        raise UserError(f"{where}: is {found}; drafter=eagle3 reads EAGLE-3")

    library = "speculators_model_type" in config
    layer = config.get("transformer_layer_config") if library else config
    if not isinstance(layer, dict):
        raise UserError(f"{where}: has no transformer_layer_config")
    _refuse_unknown(where, config, _WITHOUT_EFFECT | _OPTIONS | (_OF_LIBRARY if library else _OF_LAYER))
    if library:
        _refuse_unknown(where, layer, _WITHOUT_EFFECT | _OF_LAYER)
    options, hf = HfConfig(where, config), HfConfig(where, layer)
    heads.refuse_activation(hf, "an EAGLE-3 head")
    slides = "sliding_attention" in hf.get("layer_types", list, [])
    if slides or (hf.get("use_sliding_window", bool, False) and hf.values.get("sliding_window") is not None):
        raise UserError(f"{where}: sliding_window is not supported in an EAGLE-3 head")
    if hf.values.get("quantization_config") is not None:
        raise UserError(f"{where}: quantization_config is not supported: take the head's float weights")

    names = _names(checkpoint)
    D, H = hf.size("hidden_size"), hf.size("num_attention_heads")
    target_width = options.size("target_hidden_size", D)
    head_dim = hf.size("head_dim", max(D // H, 1))
    context = hf.size("max_position_embeddings", 2048, most=MAX_CONTEXT)
    about = options.get("speculators_config", dict, {})
    known = heads.head_fields(checkpoint, names, hf, about=about, head_dim=head_dim, context=context)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    shape = HeadShape(
        width=D,
        heads=H,
        kv_heads=hf.size("num_key_value_heads", H),
        head_dim=head_dim,
        d_ff=hf.size("intermediate_size"),
        eps=hf.eps(1e-6),
        features=features_of(known["tensors"].get("fc.weight"), target_width, folder),
        qk_norm="blk.0.attn_q_norm.weight" in names,
        biases=tuple(name for name in PROJECTIONS if f"blk.0.{name}.bias" in names),
        **{flag: options.get(flag, bool, False) for flag in flags},
    )
    wanted, ids = options.get("draft_vocab_size", int, None), known["ids"]
    rows = next(iter(known["tensors"].get("output.weight", ())), None if ids is None else len(ids))
    if wanted is not None and rows is not None and wanted != rows:
        raise UserError(f"{where}: draft_vocab_size is {wanted}, the head scores {rows} ids")
    return Eagle3File(
        **known,
        shape=shape,
        target_width=target_width,
        layers=_layers(options),
        vocab_size=hf.size("vocab_size"),
    )


def _refuse_unknown(where: Path, values: Json, known: set[str]) -> None:
    unknown = sorted(key for key, value in values.items() if key not in known and value is not None)
    if unknown:
        raise UserError(f"{where}: the option {unknown[0]}={values[unknown[0]]!r:.40} is not supported")


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


def convert_eagle3(
    source: str | Path,
    out: Path,
    *,
    form: FolderForm | None = None,
    target: GGUFFile | None = None,
    verifier: str | None = None,
    quant: str = "F32",
) -> Eagle3File:
    """Writes a head in another form.

    Args:
        source: as `read_eagle3` takes it.
        out: a GGUF file (`*.gguf`), or a folder.
        form: of a folder; by default speculators with a verifier, else the original one.
        target: the target's GGUF file, whose tokenizer llama.cpp reads from the head's, and whose layers are those of a
            head that names none.
        verifier: the target by name, which a speculators folder must have: owner/name of the Hub, or a folder. By
            default the one that the source names.
        quant: type of a GGUF file's matrices.

    Returns:
        The head that was written.

    Raises:
        UserError: no EAGLE-3 head, one for another target, or one that the form cannot say.
    """
    file = read_eagle3(source)
    if target is not None:
        n_layers = heads.target_layers(target, file.path, width=file.target_width, ids=file.ids)
        file = file if file.layers else replace(file, layers=default_layers(n_layers))
    return heads.convert_head(
        file, out, form=form, target=target, verifier=verifier, quant=quant, to_gguf=write_eagle3_gguf,
        to_folder=write_folder,
    )  # fmt: skip


def write_folder(file: Eagle3File, folder: Path, *, form: FolderForm | None = None) -> Path:
    """Writes config.json and model.safetensors (float32), which vLLM and SGLang read.

    Args:
        file: the head, in whatever form it was read.
        folder: made if need be; files of these names in it are replaced.
        form: "original" (`LlamaForCausalLMEagle3`), also by default, or "speculators".

    Raises:
        UserError: config.json cannot say what the head is; the message names what.
    """
    s, form, names = file.shape, form or "original", {}
    for name in file.tensors:
        stem, _, kind = name.rpartition(".")
        theirs = _HF_TOP.get(stem) or f"{_PREFIX[form]}{_HF_LAYER[stem.removeprefix('blk.0.')]}"
        names[name] = f"{theirs}.{kind}"

    attention, ffn = PROJECTIONS[:4], PROJECTIONS[4:]
    if {*s.biases} not in ({*()}, {*attention}, {*ffn}, {*PROJECTIONS}):
        raise UserError(f"{file.path}: biases of {', '.join(s.biases)} alone have no place in config.json: write GGUF")
    layer = heads.layer_config(
        file,
        vocab_size=file.vocab_size,
        model_type="qwen3" if s.qk_norm else "llama",
        num_hidden_layers=1,
        attention_bias="attn_q" in s.biases,
        mlp_bias="ffn_gate" in s.biases,
    )
    scored = file.tensors.get("output.weight", (file.vocab_size,))[0] if file.ids is None else len(file.ids)
    config: Json = {
        "draft_vocab_size": scored,
        "target_hidden_size": file.target_width,
        "eagle_aux_hidden_state_layer_ids": list(file.layers) or None,
        "norm_before_residual": s.norm_before_residual,
        "norm_before_fc": s.norm_before_fc,
        "fc_norm": s.fc_norm,
        "norm_output": s.norm_output,
    }
    if form == "speculators":
        about = heads.library_config(file, algorithm=ARCHITECTURE, kind="Eagle3Speculator", tokens=3, layer=layer)
        config = {**about, **config}
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32", **layer, **config}
        if file.layers and file.layers[0] != 1:  # 1 would mean 2 there
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(file.layers), **_INSIDE}
    return heads.write_head(file, folder, config, names, vocab_size=file.vocab_size)
