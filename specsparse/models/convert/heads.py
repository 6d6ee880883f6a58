"""EAGLE-3 heads, DFlash and DSpark drafters as folders of config.json and weights, read, written, and between forms.

A kind of head has three forms: a GGUF file (`speculative.drafters.heads`), its authors' folder, and a folder of the
speculators library, which has the layers' own config inside `transformer_layer_config`. An EAGLE-3 layer is called
`midlayer.` by its authors and `layers.0.` by the library. Of DFlash, the authors' `target_layer_ids` are layers whose
output is read, and the library's `aux_hidden_state_layer_ids` layers whose input is read; here ids are of inputs.

An option that is not known here is refused by name: it would change what the head computes.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import save

from specsparse.engine.architectures import DRAFT_HEADS
from specsparse.engine.config import MAX_CONTEXT, PROJECTIONS, RopeConfig
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo, open_gguf
from specsparse.errors import UserError, refuse
from specsparse.models import hub
from specsparse.models.convert.hf import LAYER, QK_NORMS, Checkpoint, head_kind
from specsparse.models.convert.hf_config import HfConfig, class_name, gguf_rope, read_json
from specsparse.speculative.drafters.heads import dspark, eagle3, head
from specsparse.speculative.drafters.heads.dflash import BlockShape, DFlashFile
from specsparse.speculative.drafters.heads.dspark import DSparkFile, SparkShape
from specsparse.speculative.drafters.heads.eagle3 import Eagle3File, HeadShape
from specsparse.speculative.drafters.heads.published import DRAFT_IDS, EMBEDDING, OUTPUT
from specsparse.support.files import Json, atomically, to_json, write_atomically
from specsparse.support.hub_names import SCHEME

HeadFile = Eagle3File | DFlashFile
HeadKind = Literal["eagle3", "dflash", "dspark"]

_TOP = {
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "input_norm": "enc.output_norm",  # of EAGLE-3
    "hidden_norm": "enc.output_norm",  # of DFlash
    **{f"fc_norm.{i}": f"fc_norm.{i}" for i in range(16)},
    "markov_head.markov_w1": dspark.W1,
    "markov_head.markov_w2": dspark.W2,
    "markov_head.gate_proj": dspark.GATE,
    "markov_head.joint_proj": dspark.JOINT,
    "confidence_head.proj": dspark.CONFIDENCE,
}
"""Names of tensors outside the layers in a folder and in a GGUF file."""
_LAYER = {**LAYER, **QK_NORMS, "hidden_norm": "attn_norm_2"}
_IN_LAYER = re.compile(r"(?:midlayer|layers\.(\d+))\.(.+)")
_UNREAD = (DRAFT_IDS, "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Ids, which are read apart, and tensors that training keeps and decoding does not need."""
_STORED = {
    "F32": (GGMLQuantizationType.F32, np.dtype(np.float32)),
    "F16": (GGMLQuantizationType.F16, np.dtype(np.float16)),
    "BF16": (GGMLQuantizationType.BF16, np.dtype(ml_dtypes.bfloat16)),
}

_EAGLE3_OPTIONS = {
    "draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual",
    "norm_before_fc", "fc_norm", "norm_output", "eagle_config",
}  # fmt: skip
_EAGLE3_LAYER = {
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "hidden_act", "max_position_embeddings", "original_max_position_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "vocab_size", "model_type", "attention_bias", "mlp_bias", "use_sliding_window",
    "sliding_window", "layer_types", "partial_rotary_factor",
}  # fmt: skip
_LIBRARY = {"speculators_config", "speculators_model_type", "transformer_layer_config"}
_WITHOUT_EFFECT = {
    "architectures", "auto_map", "attention_dropout", "bos_token_id", "dtype", "embed_requires_grad",
    "eos_token_id", "initializer_range", "max_window_layers", "modeling_class", "name_or_path", "_name_or_path",
    "pad_token_id", "pretraining_tp", "return_dict", "speculators_version", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache", "target_model_type", "_attn_implementation", "has_no_defaults_at_init",
    "decoder_start_token_id", "unk_token_id", "sep_token_id", "num_hidden_layers",
}  # fmt: skip
"""Keys that do not change what an EAGLE-3 head computes: names, special ids, the number of layers (at times the
target's)."""
_EAGLE_1 = "vLLM, SGLang and llama.cpp read EAGLE-3, and so does drafter=eagle3; this head is EAGLE-1"
_EAGLE_CONFIG = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
"""Keys of eagle_config, and for each the one value that is supported."""
_DFLASH_CONFIG = {
    "block_size", "mask_token_id", "target_layer_ids", "is_causal", "input_embedding_scale", "output_multiplier",
    "final_logit_softcapping", "num_target_layers",
}  # fmt: skip
"""Keys of dflash_config that are read, and one that nothing needs."""
_SPARK_FLAGS = ("enable_confidence_head", "confidence_head_with_markov")


def read_eagle3(path: str | Path) -> Eagle3File:
    """An EAGLE-3 head: a folder, a file in one, or a GGUF file. UserError: no such head, a damaged one, or an option
    that is not supported, which the message names."""
    path = Path(os.path.expanduser(path))
    if os.path.isfile(path) and path.suffix in (".safetensors", ".bin", ".json"):
        path = path.parent
    if not os.path.isdir(path):
        f = open_gguf(path)
        if f.get("general.architecture", "str", "") == head.ARCHITECTURE:
            raise UserError(f"{path}: {_EAGLE_1}: drafter=head drafter.head={path} drafts with it")
        return eagle3.read_gguf(f)

    checkpoint = Checkpoint(path)
    where, config = path / "config.json", checkpoint.config
    kind = head_kind(config)
    if kind != "EAGLE-3":
        blocks = {name: f"is a {name} drafter: take drafter={name.lower()}" for name in ("DFlash", "DSpark")}
        known = {**blocks, "EAGLE": f"{_EAGLE_1} or EAGLE-2"}
        found = f"a {kind} drafter" if kind else "no head of EAGLE-3: it has no draft_vocab_size"
        raise UserError(f"{where}: {known.get(str(kind), f'is {found}; drafter=eagle3 reads EAGLE-3')}")
    options, hf = HfConfig(where, config), _layer_config_of(where, config)
    if hf.values is config:
        _refuse_unknown(where, config, _WITHOUT_EFFECT | _EAGLE3_OPTIONS | _EAGLE3_LAYER)
    else:
        _refuse_unknown(where, config, _WITHOUT_EFFECT | _EAGLE3_OPTIONS | _LIBRARY)
        _refuse_unknown(where, hf.values, _WITHOUT_EFFECT | _EAGLE3_LAYER)
    hf.need(hidden_act="silu")
    slides = "sliding_attention" in hf.get("layer_types", list, [])
    if slides or (hf.get("use_sliding_window", bool, False) and hf.values.get("sliding_window") is not None):
        raise UserError(f"{where}: sliding_window is not supported in an EAGLE-3 head")

    # eagle_config is SGLang's: ids that begin with 1 are of layers whose output is read, and other ids of layers
    # whose input is read (github.com/sgl-project/sglang/pull/25454).
    key = "eagle_aux_hidden_state_layer_ids"
    inside = HfConfig(where, options.get("eagle_config", dict, {}))
    _refuse_unknown(where, inside.values, {*_EAGLE_CONFIG, key})
    inside.need(**_EAGLE_CONFIG)
    own = _layer_ids(options, key)
    layers = own or _layer_ids(inside, key)
    if not own and layers[:1] == (1,):
        layers = tuple(i + 1 for i in layers)

    names = _gguf_names(checkpoint, layers=1)
    D, H = hf.size("hidden_size"), hf.size("num_attention_heads")
    head_dim, target_width = hf.size("head_dim", max(D // H, 1)), options.size("target_hidden_size", D)
    fields = _head_fields(checkpoint, names, hf, head_dim=head_dim, default_context=2048)
    shape = HeadShape(
        width=D,
        heads=H,
        kv_heads=hf.size("num_key_value_heads", H),
        head_dim=head_dim,
        d_ff=hf.size("intermediate_size"),
        eps=hf.eps(1e-6),
        features=(fields["tensors"].get("fc.weight") or (0,))[-1] // target_width,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        biases=tuple(name for name in PROJECTIONS if f"blk.0.{name}.bias" in names),
        **{
            flag: options.get(flag, bool, False)
            for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        },
    )
    return Eagle3File(**fields, shape=shape, target_width=target_width, layers=layers, vocab_size=hf.size("vocab_size"))


def read_dflash(path: str | Path) -> DFlashFile:
    """A DFlash or DSpark drafter: a folder or a GGUF file. UserError: no such drafter, a damaged one, or an option that
    is not supported, which the message names."""
    path = Path(os.path.expanduser(path))
    if not os.path.isdir(path):
        return dspark.read_gguf(open_gguf(path))
    checkpoint = Checkpoint(path)
    where, config = path / "config.json", checkpoint.config
    hf, given = _layer_config_of(where, config), HfConfig(where, config)
    library, spark = hf.values is not config, head_kind(config) == "DSpark"
    if library:
        kind = "dspark" if spark else "dflash"
        given.need(speculators_model_type=kind, projector_type=kind, shift_label=False)
        features = _layer_ids(given, "aux_hidden_state_layer_ids", least=1)
        causal = False if given.get("sliding_window_non_causal", bool, False) else None
        options: Json = {"block_size": given.get("block_size", int), "mask_token": given.get("mask_token_id", int),
                   "from_anchor": given.get("sample_from_anchor", bool, spark)}  # fmt: skip
    elif spark:  # DeepSpec's: -1 is the embedding, and what is not told is as it trains
        features = tuple(i + 1 for i in _layer_ids(given, "target_layer_ids", least=1, lowest=-1))
        causal = False
        options = {"block_size": given.get("block_size", int), "mask_token": given.get("mask_token_id", int),
                   "from_anchor": True}  # fmt: skip
    else:
        names = config.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        if first != "DFlashDraftModel":
            raise UserError(
                f"{where}: architectures is {first!r}: DFlashDraftModel, Qwen3DSparkModel and folders of speculators "
                "are supported"
            )
        inside = given.get("dflash_config", dict, {})
        _refuse_unknown(where, inside, _DFLASH_CONFIG)
        given = HfConfig(where, {key: config.get(key) for key in _DFLASH_CONFIG} | inside)
        features = tuple(i + 1 for i in _layer_ids(given, "target_layer_ids", least=1))
        causal = given.get("is_causal", bool, None)
        options = {
            "block_size": given.get("block_size", int, 16),
            "mask_token": given.get("mask_token_id", int),
            "from_anchor": False,
            "embedding_scale": given.get("input_embedding_scale", float, 1.0),
            "logit_scale": given.get("output_multiplier", float, 1.0),
            "softcap": max(given.get("final_logit_softcapping", float, 0.0), 0.0),
        }
    hf.need(model_type="qwen3", attention_bias=False, hidden_act="silu")

    n_layers = hf.size("num_hidden_layers", most=1 << 10)
    windowed = hf.values.get("sliding_window") is not None and hf.get("use_sliding_window", bool, False)
    kinds = hf.get("layer_types", list, None)
    if kinds is None:
        after = hf.get("max_window_layers", int, 28) if windowed else n_layers
        kinds = ["full_attention" if i < after else "sliding_attention" for i in range(n_layers)]
    if len(kinds) != n_layers or any(kind not in ("sliding_attention", "full_attention") for kind in kinds):
        raise UserError(
            f"{where}: layer_types must name full_attention or sliding_attention for each of {n_layers} layers"
        )
    slides = tuple(kind == "sliding_attention" for kind in kinds)
    given_window = windowed or (any(slides) and hf.values.get("sliding_window") is not None)
    window = hf.size("sliding_window", most=MAX_CONTEXT) if given_window else None
    head_dim, fc = hf.size("head_dim", 128), checkpoint.shapes.get("fc.weight", ())
    names = _gguf_names(checkpoint, layers=n_layers)
    markov: Json = {}
    if spark:
        form, known = given.get("markov_head_type", str, "vanilla").lower(), get_args(dspark.MarkovForm)
        refuse({f"markov_head_type is {form!r}: {', '.join(known)} are known": form not in known}, where)
        flags = {name: given.get(name, bool, True) for name in _SPARK_FLAGS}
        markov = {"markov_rank": given.size("markov_rank", 256), "markov_head_type": form, **flags}
    facts: Json = dict(
        width=hf.size("hidden_size"),
        heads=hf.size("num_attention_heads"),
        kv_heads=hf.size("num_key_value_heads"),
        head_dim=head_dim,
        d_ff=hf.size("intermediate_size"),
        eps=hf.eps(1e-6),
        features=features,
        feature_width=(fc[-1] if fc else 0) // len(features),
        windows=tuple(window if slide else None for slide in slides),
        causal=tuple(slide if causal is None else causal for slide in slides),  # by default layers that slide are
        windows_of_block=library and any(slides) and window is not None,
    )
    options |= _head_fields(checkpoint, names, hf, head_dim=head_dim, default_context=32768)
    if spark:
        return DSparkFile(**options, shape=SparkShape(**facts, **markov))
    return DFlashFile(**options, shape=BlockShape(**facts))


def _layer_config_of(where: Path, config: Json) -> HfConfig:
    """The config of the layers: inside the library's, or the authors' as it is."""
    layer = config.get("transformer_layer_config") if "speculators_model_type" in config else config
    if not isinstance(layer, dict):
        raise UserError(f"{where}: has no transformer_layer_config")
    return HfConfig(where, layer)


def _refuse_unknown(where: Path, values: Json, known: set[str]) -> None:
    unknown = sorted(key for key, value in values.items() if key not in known and value is not None)
    if unknown:
        raise UserError(f"{where}: the option {unknown[0]}={values[unknown[0]]!r:.40} is not supported")


def _layer_ids(config: HfConfig, key: str, *, least: int = 0, lowest: int = 0) -> tuple[int, ...]:
    ids = config.get(key, list, [])
    if len(ids) < least or any(type(i) is not int or not lowest <= i < 1 << 14 for i in ids):
        raise UserError(f"{config.where}: {key} must be a list of layers, not {ids!r:.60}")
    return tuple(ids)


def _gguf_names(checkpoint: Checkpoint, *, layers: int) -> dict[str, str]:
    """The checkpoint's tensors by GGUF name; an unknown one keeps its name, and is refused with it later."""
    names = {}
    for theirs in checkpoint.shapes:
        if theirs in _UNREAD or theirs.endswith("rotary_emb.inv_freq"):
            continue
        stem, _, kind = theirs.removeprefix("model.").rpartition(".")
        ours, in_layer = theirs, _IN_LAYER.fullmatch(stem)
        number = int(in_layer[1] or 0) if in_layer else 0
        if kind in ("weight", "bias") and stem in _TOP:
            ours = f"{_TOP[stem]}.{kind}"
        elif kind in ("weight", "bias") and in_layer and number < layers and in_layer[2] in _LAYER:
            ours = f"blk.{number}.{_LAYER[in_layer[2]]}.{kind}"
        if ours in names:
            raise UserError(f"{checkpoint.folder}: tensors {names[ours]} and {theirs} are the same part of a head")
        names[ours] = theirs
    return names


def _head_fields(
    checkpoint: Checkpoint, names: Mapping[str, str], layer: HfConfig, *, head_dim: int, default_context: int
) -> Json:
    """The fields of a `PublishedHead` that both kinds read alike: `names` are the tensors by GGUF name, `layer` is the
    config of the layers."""
    context = layer.size("max_position_embeddings", default_context, most=MAX_CONTEXT)
    hf_rope = layer.rotation(layer.ropes, "llama", base=10000.0, dim=head_dim, context=context)
    keys, factors, _ = gguf_rope(hf_rope)
    scaling = {key.removeprefix("rope.scaling."): value for key, value in keys.items()}
    rope = RopeConfig(
        base=hf_rope.base,
        dim=head_dim,
        pairing="neox",
        scaling=scaling.get("type", "none"),
        factor=scaling.get("factor", 1.0),
        original_context=scaling.get("original_context_length", context),
        attn_factor=scaling.get("attn_factor", 1.0),
        freq_factors=factors is not None,
    )
    ids = None
    if DRAFT_IDS in checkpoint.shapes:  # offsets of the ids from their rows
        offsets = checkpoint.integers(DRAFT_IDS).reshape(-1)
        ids = np.arange(len(offsets)) + offsets

    def load(name: str) -> TensorInfo:
        values = checkpoint.load(names[name])  # float32, finite
        kind, dtype = _STORED.get("F32" if values.ndim == 1 else checkpoint.kind(names[name]), _STORED["F32"])
        raw = np.ascontiguousarray(values.astype(dtype)).view(np.uint8).reshape(*values.shape[:-1], -1)
        return TensorInfo(name, kind, values.shape, raw, str(checkpoint.folder))

    about = HfConfig(layer.where, checkpoint.config).get("speculators_config", dict, {})
    verifier, methods = about.get("verifier"), about.get("proposal_methods")
    verifier = verifier if isinstance(verifier, Mapping) else {}
    target, classes = verifier.get("name_or_path"), verifier.get("architectures")
    methods = [m for m in methods if isinstance(m, Mapping)] if isinstance(methods, list) else []
    accept = [m.get("verifier_accept_k") for m in methods]
    return {
        "path": checkpoint.folder,
        "rope": rope,
        "rope_factors": factors,
        "rope_scaling": layer.ropes or None,
        "context": context,
        "ids": ids,
        "tensors": {name: checkpoint.shapes[theirs] for name, theirs in names.items()},
        "load": load,
        "target": target if isinstance(target, str) else "",
        "target_classes": tuple(filter(None, map(str, classes))) if isinstance(classes, list) else (),
        "accept_k": max([k for k in accept if type(k) is int], default=1),
    }


def convert_head(
    kind: HeadKind, source: str | Path, out: Path, *, form: str | None = None, target: GGUFFile | None = None,
    verifier: str | None = None, quant: str = "F32",
) -> HeadFile:  # fmt: skip
    """Writes a head in another form. UserError: no such head, one for another target, options that do not go together,
    or a head that the form cannot say.

    Args:
        kind: of the head.
        source: as `read_eagle3` or `read_dflash` takes it.
        out: a GGUF file (`*.gguf`), or a folder.
        form: of a folder, as in `write_folder`; speculators if there is a verifier.
        target: the target's GGUF file, whose tokenizer llama.cpp reads from the head's. An EAGLE-3 head that names no
            layers reads the default ones of this target.
        verifier: the target by name, which a speculators folder must have: owner/name of the Hub, or a folder with
            config.json. By default the one that the source names.
        quant: type of a GGUF file's matrices.

    Returns:
        The head that was written.
    """
    file: HeadFile = read_eagle3(source) if kind == "eagle3" else read_dflash(source)
    if file.drafter != kind:
        raise UserError(f"{file.path}: is {file.what}: take convert {file.drafter}")
    if target is not None:
        file = _for_target(file, target)
    form, gguf = form or (None if verifier is None else "speculators"), out.suffix == ".gguf"
    refuse({
        "--verifier names the target in a folder of --form speculators, and in no other form":
            verifier is not None and (gguf or form != "speculators"),
        "is a GGUF file, --form is for folders": gguf and form is not None,
        f"is a folder, whose weights are F32; --outtype {quant} is for a GGUF file":
            not gguf and quant.upper() != "F32",
        "llama.cpp reads the target's tokenizer from the head's file: give --target MODEL.gguf":
            gguf and target is None,
    }, out)  # fmt: skip
    if gguf and target is not None:
        keys = {key: value for key, value in target.metadata.items() if key.startswith("tokenizer.ggml.")}
        file.write_gguf(out, tokenizer=keys, quant=quant)
        return file
    if verifier is not None:
        folder = Path(os.path.expanduser(verifier))
        local = folder.is_dir()
        if not local and not re.fullmatch(r"[\w.-]+/[\w.-]+", verifier):
            raise UserError(f"--verifier {verifier}: is no folder; the form is OWNER/NAME, a repository of the Hub")
        where = folder / "config.json" if local else hub.download(f"{SCHEME}{verifier}/config.json")
        name = class_name(read_json(where))
        if name is None:
            raise UserError(f"{where}: names no class of transformers (architectures), and the head's config needs it")
        file = replace(file, target=str(folder.resolve()) if local else verifier, target_classes=(name,))
    write_folder(file, out, form=form)
    return file


def _for_target(file: HeadFile, target: GGUFFile) -> HeadFile:
    """The head, with layers, or UserError if it is for a target of another width, fewer ids or fewer layers."""
    architecture, name = target.get("general.architecture", "str"), target.path.name
    found, n_layers = (target.get(f"{architecture}.{key}", "int") for key in ("embedding_length", "block_count"))
    if isinstance(file, Eagle3File):
        width, highest = file.target_width, 0
        file = file if file.layers else replace(file, layers=eagle3.default_layers(n_layers))
    else:
        width, highest = file.shape.feature_width, max(file.shape.features)
    tokens = len(target.get("tokenizer.ggml.tokens", "strings", None) or ())
    last = 0 if file.ids is None else file.ids.max()
    refuse({
        f"is for a target of width {width}, {name} has {found}": found != width,
        f"drafts id {last}, {name} has {tokens} ids": 0 < tokens <= last,
        f"reads the target's features at layer {highest}, {name} has {n_layers} layers": highest > n_layers,
    }, file.path)  # fmt: skip
    return file


def write_folder(file: HeadFile, folder: Path, *, form: str | None = None) -> Path:
    """Writes config.json and model.safetensors (float32), which vLLM and SGLang read. UserError: the form cannot say
    what the head is; the message names what.

    Args:
        file: the head, in whatever form it was read.
        folder: made if need be; files of these names in it are replaced.
        form: "speculators", or the authors' own: "original" of EAGLE-3 (`LlamaForCausalLMEagle3`), "authors" of DFlash
            (`DFlashDraftModel` with dflash_config) and DSpark (`Qwen3DSparkModel`). By default the authors' if it can
            say what the head is.
    """
    config, prefix, vocab_size = (
        _eagle3_config(file, form) if isinstance(file, Eagle3File) else _dflash_config(file, form)
    )
    feature_norm = "input_norm" if isinstance(file, Eagle3File) else "hidden_norm"
    top = {ours: theirs for theirs, ours in _TOP.items()} | {"enc.output_norm": feature_norm}
    in_layer = {ours: theirs for theirs, ours in _LAYER.items()}
    arrays = {}
    for name in file.tensors:
        stem, _, kind = name.rpartition(".")
        theirs = top.get(stem)
        if theirs is None:
            _, number, rest = stem.split(".", 2)
            theirs = prefix.format(number) + in_layer[rest]
        arrays[f"{theirs}.{kind}"] = file.values(name)
    if file.ids is not None:
        arrays[DRAFT_IDS] = file.ids.astype(np.int64) - np.arange(len(file.ids))
        arrays["t2d"] = np.isin(np.arange(vocab_size), file.ids)
    with atomically(folder / "model.safetensors") as out:
        out.write(save(arrays, metadata={"format": "pt"}))
    write_atomically(folder / "config.json", to_json(config, indent=2) + "\n")
    return folder


def _eagle3_config(file: Eagle3File, form: str | None) -> tuple[Json, str, int]:
    """config.json, what the names of a layer's tensors begin with, and the target's ids."""
    s, attention, ffn = file.shape, PROJECTIONS[:4], PROJECTIONS[4:]
    alone = {*s.biases} not in ({*()}, {*attention}, {*ffn}, {*PROJECTIONS})
    layer = _layer_config(
        file,
        f"biases of {', '.join(s.biases)} alone" if alone else None,
        vocab_size=file.vocab_size,
        model_type="qwen3" if s.qk_norm else "llama",
        num_hidden_layers=1,
        attention_bias="attn_q" in s.biases,
        mlp_bias="ffn_gate" in s.biases,
    )
    config: Json = {
        "draft_vocab_size": file.tensors.get(OUTPUT, (file.vocab_size,))[0] if file.ids is None else len(file.ids),
        "target_hidden_size": file.target_width,
        "eagle_aux_hidden_state_layer_ids": list(file.layers) or None,
        "norm_before_residual": s.norm_before_residual,
        "norm_before_fc": s.norm_before_fc,
        "fc_norm": s.fc_norm,
        "norm_output": s.norm_output,
    }
    if form == "speculators":
        about = _library_config(file, algorithm="eagle3", kind="Eagle3Speculator", tokens=3, layer=layer)
        return about | config, "layers.{}.", file.vocab_size
    config = {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32", **layer, **config}
    if file.layers and file.layers[0] != 1:  # 1 would mean 2 there
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(file.layers), **_EAGLE_CONFIG}
    return config, "midlayer.", file.vocab_size


def _dflash_config(file: DFlashFile, form: str | None) -> tuple[Json, str, int]:
    """As `_eagle3_config`; the target's ids as far as the drafter knows."""
    s, slides = file.shape, tuple(window is not None for window in file.shape.windows)
    own = file.ids is not None or OUTPUT in file.tensors or EMBEDDING in file.tensors
    by_layer = s.causal != slides
    scales = {"input_embedding_scale": (file.embedding_scale, 1.0), "output_multiplier": (file.logit_scale, 1.0),
              "final_logit_softcapping": (file.softcap, 0.0)}  # fmt: skip
    scaled = {key: value for key, (value, default) in scales.items() if value != default}
    windows, spark = sorted({window for window in s.windows if window is not None}), isinstance(s, SparkShape)
    scale, no_bias = f"a scale ({', '.join(scaled)})", False
    markov: Json = {}
    if isinstance(s, SparkShape):
        no_bias = s.enable_confidence_head and f"{dspark.CONFIDENCE}.bias" not in file.tensors
        markov = {name: getattr(s, name) for name in ("markov_rank", "markov_head_type", *_SPARK_FLAGS)}
    reasons = {
        "authors": {
            "the target's embedding or output matrix": not {EMBEDDING, OUTPUT} <= file.tensors.keys(),
            "a vocabulary of its own": file.ids is not None,
            "no sample_from_anchor": not file.from_anchor,
            "causality inside the block": any(s.causal),
            scale: bool(scaled),
        } if spark else {
            "an embedding, output matrix or vocabulary of its own": own,
            "sample_from_anchor": file.from_anchor,
            "the embedding as a feature": 0 in s.features,
            "causality by layer": by_layer and len(set(s.causal)) > 1,
        },
        "speculators": {
            scale: bool(scaled),
            "full attention that is causal inside the block": by_layer and any(s.causal),
            "a window that counts from each row of a block": bool(windows) and not s.windows_of_block,
        },
    }  # fmt: skip
    reasons["authors"]["a window that is the same for all rows of a block"] = bool(windows) and s.windows_of_block
    for why in reasons.values():
        why["a confidence head without a bias"] = no_bias
    able = (name for name, why in reasons.items() if not any(why.values()))
    chosen = form or next(able, "speculators")
    reason = next((why for why, holds in reasons[chosen].items() if holds), None)
    if reason is None and len(windows) > 1:
        reason = f"layers with windows of {windows}"
    rows = [file.tensors[name][0] for name in (EMBEDDING, OUTPUT, f"{dspark.W1}.weight") if name in file.tensors]
    vocab_size = max([*rows, file.mask_token + 1, *([] if file.ids is None else [int(file.ids.max()) + 1])])
    layer = _layer_config(
        file,
        reason,
        vocab_size=vocab_size,
        model_type="qwen3",
        num_hidden_layers=s.layers,
        attention_bias=False,
        layer_types=["sliding_attention" if slide else "full_attention" for slide in slides],
        use_sliding_window=bool(windows),
        sliding_window=next(iter(windows), None),
    )
    if chosen == "authors" and spark:
        config = {
            "architectures": ["Qwen3DSparkModel"],
            "dtype": "float32",
            "block_size": file.block_size,
            "mask_token_id": file.mask_token,
            "target_layer_ids": [layer - 1 for layer in s.features],
            "num_anchors": 512,  # of a training step: the authors' class must be told
            **layer,
            **markov,
        }
    elif chosen == "authors":
        config = {
            "architectures": ["DFlashDraftModel"],
            "dtype": "float32",
            "block_size": file.block_size,
            **layer,
            **({"is_causal": s.causal[0]} if by_layer else {}),
            "dflash_config": {
                "block_size": file.block_size,
                "mask_token_id": file.mask_token,
                "target_layer_ids": [layer - 1 for layer in s.features],
                **scaled,
            },
        }
    else:
        config = {
            **_library_config(
                file, algorithm=file.drafter, kind=f"{DRAFT_HEADS[file.drafter]}DraftModel", tokens=file.drafts,
                layer=layer,
            ),
            **markov,
            "aux_hidden_state_layer_ids": list(s.features),
            "block_size": file.block_size,
            "mask_token_id": file.mask_token,
            "draft_vocab_size": len(file.ids) if file.ids is not None else vocab_size,
            "sample_from_anchor": file.from_anchor,
            "sliding_window_non_causal": any(slides) and not any(s.causal),
            "target_hidden_size": None if s.feature_width == s.width else s.feature_width,
        }
    return config, "layers.{}.", vocab_size


def _layer_config(file: HeadFile, reason: str | None, *, vocab_size: int, **own: object) -> Json:
    """The layers as config.json has them; `own` are keys that only one kind of head has. UserError: config.json cannot
    say what the head is: for `reason`, or for its rotation."""
    s, rope, scaling = file.shape, file.rope, file.rope_scaling
    if scaling is None and (file.rope_factors is not None or rope.attn_factor != 1.0):
        reason = reason or "a rotation with frequency factors"
    if reason:
        raise UserError(f"{file.path}: {reason} has no place in this form of config.json: write GGUF or another form")
    if scaling is None and rope.scaling != "none":
        scaling = {"rope_type": rope.scaling, "factor": rope.factor}
        if rope.scaling == "yarn":
            scaling |= {
                "original_max_position_embeddings": rope.original_context,
                "beta_fast": rope.beta_fast,
                "beta_slow": rope.beta_slow,
            }
    return {
        "hidden_size": s.width,
        "intermediate_size": s.d_ff,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": s.eps,
        "max_position_embeddings": file.context,
        "vocab_size": vocab_size,
        "rope_theta": rope.base,
        "rope_scaling": scaling,
        "tie_word_embeddings": False,
        **own,
    }


def _library_config(file: HeadFile, *, algorithm: str, kind: str, tokens: int, layer: Json) -> Json:
    """config.json of the speculators library without the head's options; `tokens` are drafted at once. UserError: the
    head names no target. The library loads the target's matrices with the head, by its name."""
    if not file.target:
        raise UserError(
            f"{file.path}: does not say which model it is for, and a speculators folder must: give --verifier "
            "OWNER/NAME, the target on the Hub or its folder"
        )
    method = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": [kind],
        "dtype": "float32",
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": list(file.target_classes), "name_or_path": file.target},
        },
        "transformer_layer_config": layer,
    }


def head_facts(file: HeadFile) -> dict[str, str]:
    """The shape of a head, what it is for, and its options, a line each."""
    s, rows = file.shape, file.tensors.get(OUTPUT, (None,))[0] if file.ids is None else len(file.ids)
    sizes = f"FFN {s.d_ff}, {s.heads} heads of {s.head_dim}, {s.kv_heads} for keys"
    if isinstance(file, Eagle3File):
        facts = {
            "head": f"EAGLE-3, width {s.width}, {sizes}",
            "target": f"{file.target or 'not named'}, width {file.target_width}, {file.vocab_size} ids",
            "features": f"what enters layers {', '.join(map(str, file.layers)) or '2, L/2 and L - 3 of the target'}",
            "scores": f"{rows or file.vocab_size} ids",
        }
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
        options: Sequence[str] = [flag for flag in flags if getattr(file.shape, flag)]
    else:
        facts = {
            "head": f"{DRAFT_HEADS[file.drafter]}, {file.shape.layers} layers of width {s.width}, {sizes}",
            "target": f"{file.target or 'not named'}, width {file.shape.feature_width}",
            "features": f"what enters layers {', '.join(map(str, file.shape.features))}",
            "block": f"{file.block_size} rows, {file.drafts} tokens drafted, mask token {file.mask_token}",
            "scores": "all ids of the target" if rows is None else f"{rows} ids",
        }
        shape, windows = file.shape, [window for window in file.shape.windows if window is not None]
        if isinstance(shape, SparkShape):
            facts["Markov head"] = f"{shape.markov_head_type}, rank {shape.markov_rank}"
            reads = "the block's row" + (" and the token before" if shape.confidence_head_with_markov else "")
            facts["confidence head"] = f"reads {reads}" if shape.enable_confidence_head else "none"
        holds = {
            f"a window of {' and '.join(map(str, sorted({*windows})))} on {len(windows)} of {shape.layers}": windows,
            "the same for all rows of a block": shape.windows_of_block,
            f"causal inside the block on {sum(shape.causal)} of {shape.layers}": any(shape.causal),
            "sample_from_anchor": file.from_anchor,
            f"embedding_scale={file.embedding_scale:g}": file.embedding_scale != 1.0,
            f"logit_scale={file.logit_scale:g}": file.logit_scale != 1.0,
            f"softcap={file.softcap:g}": file.softcap > 0,
        }
        options = [text for text, there in holds.items() if there]
    own = [what for name, what in ((EMBEDDING, "embedding"), (OUTPUT, "output matrix")) if name in file.tensors]
    facts["of its own"] = " and ".join(own) or "neither embedding nor output matrix: the target's"
    facts["options"] = ", ".join(options) or "none"
    facts["drafter"] = file.drafter
    if file.accept_k > 1:
        lossy = f"verifier_accept_k={file.accept_k}: lossy where it is honoured; here drafts are verified without loss"
        facts["verifier"] = lossy
    return facts
