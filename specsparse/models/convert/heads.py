"""Draft heads: folders that hold one and no model (EAGLE, DFlash, Medusa, the speculators library's), and the parts of
reading, writing and converting that EAGLE-3 heads and DFlash drafters share."""

import os
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from specsparse.engine.architectures import DRAFT_HEADS
from specsparse.engine.config import RopeConfig
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo
from specsparse.errors import UserError
from specsparse.models import hub
from specsparse.models.convert.checkpoint import LAYER, QK_NORMS, Checkpoint, read_json
from specsparse.models.convert.hf_config import HfConfig, class_name, gguf_rope
from specsparse.speculative.drafters.heads.dflash import DFlashFile
from specsparse.speculative.drafters.heads.eagle3 import Eagle3File
from specsparse.speculative.drafters.heads.published import DRAFT_IDS, EMBEDDING, OUTPUT, PublishedHead
from specsparse.support.files import Json, atomically, to_json, write_atomically

AnyHead = TypeVar("AnyHead", bound=PublishedHead)

HEAD_LAYER = {**LAYER, **QK_NORMS}
"""Names of a layer's tensors in a folder and in a GGUF file."""
HEAD_TOP = {"fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd"}
"""Names of the tensors outside the layers, likewise."""
_ALGORITHMS = {**DRAFT_HEADS, "eagle": "EAGLE", "medusa": "Medusa", "mlp_speculator": "MLP speculator"}
_STORED = {
    "F32": (GGMLQuantizationType.F32, np.dtype(np.float32)),
    "F16": (GGMLQuantizationType.F16, np.dtype(np.float16)),
    "BF16": (GGMLQuantizationType.BF16, np.dtype(ml_dtypes.bfloat16)),
}


def head_kind(config: Json) -> str | None:
    """The kind of draft head that a config.json describes; None if it describes none."""
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


def refuse_draft_head(folder: Path) -> None:
    """Goes on if a folder may hold a model.

    Raises:
        UserError: it holds a draft head; the message says of which kind and for which target.
    """
    if not (folder / "config.json").is_file():
        return
    config = read_json(folder / "config.json")
    kind = head_kind(config)
    if kind is None:  # EAGLE 1 and 2 have the config of a Llama of one layer, and tensors of their own
        names = _tensor_names(folder)
        kind = "EAGLE" if "fc.weight" in names and not any(n.startswith("model.") for n in names) else None
    if kind is None:
        return
    target: object = config
    for key in ("speculators_config", "verifier", "name_or_path"):
        target = target.get(key) if isinstance(target, Mapping) else None
    target = (target if isinstance(target, str) else None) or config.get("base_model_name_or_path")
    raise UserError(
        f"{folder}: is a draft head ({kind}) {f'for {target}' if target else 'of a target'}, not a model: it "
        "writes no text of its own and cannot be converted or run alone"
    )


def _tensor_names(folder: Path) -> set[str]:
    """Names of tensors, of model.safetensors or of a torch file; empty if neither can be read."""
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


def head_fields(
    checkpoint: Checkpoint, names: Mapping[str, str], layer: HfConfig, *, about: Json, head_dim: int, context: int
) -> Json:
    """The fields of a `PublishedHead` that are read alike in every folder.

    Args:
        checkpoint: the folder.
        names: its tensors by GGUF name.
        layer: config of the layers.
        about: speculators_config, {} without one.
        head_dim: elements of a head.
        context: positions the head was made for.

    Raises:
        UserError: a rotation that is not supported, or a d2t that is no row of numbers.
    """
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
    if DRAFT_IDS in checkpoint.shapes:  # offsets from the rows they belong to
        offsets = checkpoint.integers(DRAFT_IDS)
        if offsets.ndim != 1 or not len(offsets):
            raise UserError(f"{checkpoint.folder}: d2t has the shape {offsets.shape}, a row of ids is needed")
        ids = np.arange(len(offsets)) + offsets

    def load(name: str) -> TensorInfo:
        values = checkpoint.load(names[name])  # float32, finite
        kind, dtype = _STORED.get("F32" if values.ndim == 1 else checkpoint.kind(names[name]), _STORED["F32"])
        raw = np.ascontiguousarray(values.astype(dtype)).view(np.uint8).reshape(*values.shape[:-1], -1)
        return TensorInfo(name, kind, values.shape, raw, str(checkpoint.folder))

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


def refuse_activation(hf: HfConfig, what: str) -> None:
    """Goes on if the layers' activation is SiLU; `what` names the head in the message.

    Raises:
        UserError: it is another.
    """
    act = hf.get("hidden_act", str, "silu")
    if act not in ("silu", "swish"):
        raise UserError(f"{hf.where}: hidden_act={act} is not supported in {what}: only silu is")


def layer_config(file: PublishedHead, *, vocab_size: int, **own: object) -> Json:
    """The layers as config.json has them; `own` are keys that only one kind of head has.

    Raises:
        UserError: config.json cannot say how the head rotates.
    """
    s, rope, scaling = file.shape, file.rope, file.rope_scaling
    if scaling is None:
        if file.rope_factors is not None or rope.attn_factor != 1.0:
            raise UserError(f"{file.path}: a rotation with frequency factors has no place in a config.json: write GGUF")
        if rope.scaling != "none":
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


def library_config(file: PublishedHead, *, algorithm: str, kind: str, tokens: int, layer: Json) -> Json:
    """config.json of the speculators library but for the options: `tokens` are drafted at once for the target.

    Raises:
        UserError: the head names no target: the library loads the target's matrices with the head, by its name.
    """
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


def write_head(file: PublishedHead, folder: Path, config: Json, names: Mapping[str, str], *, vocab_size: int) -> Path:
    """Writes config.json and model.safetensors (float32), which vLLM and SGLang read.

    Args:
        file: the head.
        folder: made if need be; files of these names in it are replaced.
        config: config.json.
        names: of the folder's tensors, by GGUF name.
        vocab_size: ids of the target.

    Raises:
        UserError: the folder cannot be written.
    """
    arrays = {names[name]: file.values(name) for name in file.tensors}
    if file.ids is not None:
        arrays[DRAFT_IDS] = file.ids.astype(np.int64) - np.arange(len(file.ids))
        arrays["t2d"] = np.isin(np.arange(vocab_size), file.ids)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror}") from None
    with atomically(folder / "model.safetensors") as out:
        out.write(save(arrays, metadata={"format": "pt"}))
    write_atomically(folder / "config.json", to_json(config, indent=2) + "\n")
    return folder


def target_layers(target: GGUFFile, head: Path, *, width: int, ids: np.ndarray | None) -> int:
    """The number of the target's layers, once a head is found to be for a target like it.

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


def convert_head(
    file: AnyHead, out: Path, *, form: str | None, target: GGUFFile | None, verifier: str | None, quant: str,
    to_gguf: Callable[..., Path], to_folder: Callable[..., Path],
) -> AnyHead:  # fmt: skip
    """Writes a head into a GGUF file (`*.gguf`) or a folder.

    Args:
        file: the head.
        out: a GGUF file or a folder.
        form: of a folder; None for speculators with a verifier, else for the one that `to_folder` chooses.
        target: the target's GGUF file, whose tokenizer llama.cpp reads from the head's.
        verifier: the target's name in a speculators folder: owner/name of the Hub, or a folder with config.json.
        quant: type of a GGUF file's matrices.
        to_gguf: (file, out, *, tokenizer, quant) writes the GGUF file.
        to_folder: (file, out, *, form) writes the folder.

    Returns:
        The head that was written.

    Raises:
        UserError: options that do not go together, no target for a GGUF file, or a verifier that is not there or
            names no class of transformers.
    """
    form, gguf = form or (None if verifier is None else "speculators"), out.suffix == ".gguf"
    if verifier is not None and (gguf or form != "speculators"):
        raise UserError(f"{out}: --verifier names the target in a folder of --form speculators, and in no other form")
    if gguf and form is not None:
        raise UserError(f"{out}: is a GGUF file, --form is for folders")
    if not gguf and quant.upper() != "F32":
        raise UserError(f"{out}: is a folder, whose weights are F32; --outtype {quant} is for a GGUF file")
    if gguf:
        if target is None:
            raise UserError(
                f"{out}: llama.cpp reads the target's tokenizer from the head's file: give --target MODEL.gguf"
            )
        keys = {key: value for key, value in target.metadata.items() if key.startswith("tokenizer.ggml.")}
        to_gguf(file, out, tokenizer=keys, quant=quant)
        return file
    if verifier is not None:
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
            raise UserError(f"{where}: names no class of transformers (architectures), and the head's config needs it")
        file = replace(file, target=str(folder.resolve()) if local else verifier, target_classes=(name,))
    to_folder(file, out, form=form)
    return file


def head_facts(file: Eagle3File | DFlashFile) -> dict[str, str]:
    """The shape of an EAGLE-3 head or a DFlash drafter and what it is for, a line each."""
    facts, options = _eagle3_facts(file) if isinstance(file, Eagle3File) else _dflash_facts(file)
    own = [what for name, what in ((EMBEDDING, "embedding"), (OUTPUT, "output matrix")) if name in file.tensors]
    facts["of its own"] = " and ".join(own) or "neither embedding nor output matrix: the target's"
    facts["options"] = ", ".join(options) or "none"
    if file.accept_k > 1:
        lossy = f"verifier_accept_k={file.accept_k}: lossy where it is honoured; here drafts are verified without loss"
        facts["verifier"] = lossy
    return facts


def _eagle3_facts(file: Eagle3File) -> tuple[dict[str, str], list[str]]:
    """Facts of the head alone, and the options that are set."""
    s = file.shape
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
    facts = {
        "head": f"EAGLE-3, width {s.width}, FFN {s.d_ff}, {s.heads} heads of {s.head_dim}, {s.kv_heads} for keys",
        "target": f"{file.target or 'not named'}, width {file.target_width}, {file.vocab_size} ids",
        "features": f"what enters layers {', '.join(map(str, file.layers)) or '2, L/2 and L - 3 of the target'}",
        "scores": f"{file.vocab_size if file.ids is None else len(file.ids)} ids",
    }
    return facts, [flag for flag in flags if getattr(s, flag)]


def _dflash_facts(file: DFlashFile) -> tuple[dict[str, str], list[str]]:
    s = file.shape
    rows = file.tensors[OUTPUT][0] if OUTPUT in file.tensors else None
    scored = rows if file.ids is None else len(file.ids)
    facts = {
        "head": f"DFlash, {s.layers} layers of width {s.width}, FFN {s.d_ff}, {s.heads} heads of {s.head_dim}, "
        f"{s.kv_heads} for keys",
        "target": f"{file.target or 'not named'}, width {s.feature_width}",
        "features": f"what enters layers {', '.join(map(str, s.features))}",
        "block": f"{file.block_size} rows, {file.drafts} tokens drafted, mask token {file.mask_token}",
        "scores": "all ids of the target" if scored is None else f"{scored} ids",
    }
    windows = [window for window in s.windows if window is not None]
    options = {
        f"a window of {' and '.join(map(str, sorted({*windows})))} on {len(windows)} of {s.layers}": windows,
        f"causal inside the block on {sum(s.causal)} of {s.layers}": any(s.causal),
        "sample_from_anchor": file.from_anchor,
        f"embedding_scale={file.embedding_scale:g}": file.embedding_scale != 1.0,
        f"logit_scale={file.logit_scale:g}": file.logit_scale != 1.0,
        f"softcap={file.softcap:g}": file.softcap > 0,
    }
    return facts, [text for text, there in options.items() if there]
