"""What folders of EAGLE-3 heads and DFlash drafters have in common: config.json, tensors and their names, both ways."""

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import save

from specsparse.engine.config import RopeConfig
from specsparse.engine.gguf.reader import TensorInfo
from specsparse.errors import UserError
from specsparse.models.convert import tensors
from specsparse.models.convert.checkpoint import Checkpoint
from specsparse.models.convert.hf_config import HfConfig
from specsparse.models.convert.hf_rope import HfRope, said
from specsparse.speculative.drafters.heads.published_file import DRAFT_IDS, PublishedHead
from specsparse.support.atomic import atomically
from specsparse.support.json_files import Json, to_json, write_atomically

LAYER = {**tensors.LAYER, **tensors.QK_NORMS}
"""Names of a layer's tensors, by ours of a GGUF file."""
TOP = {"fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd"}
"""Names of the tensors outside the layers, likewise."""
_STORED = {
    "F32": (GGMLQuantizationType.F32, np.dtype(np.float32)),
    "F16": (GGMLQuantizationType.F16, np.dtype(np.float16)),
    "BF16": (GGMLQuantizationType.BF16, np.dtype(ml_dtypes.bfloat16)),
}


def of_folder(
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
    scaling = layer.get("rope_parameters", dict, None) or layer.get("rope_scaling", dict, None)
    rope, factors = _rope(layer, scaling or {}, head_dim, context)
    verifier, methods = about.get("verifier"), about.get("proposal_methods")
    verifier = verifier if isinstance(verifier, Mapping) else {}
    target, classes = verifier.get("name_or_path"), verifier.get("architectures")
    accept = (
        [m.get("verifier_accept_k") for m in methods if isinstance(m, Mapping)] if isinstance(methods, list) else []
    )
    return {
        "path": checkpoint.folder,
        "rope": rope,
        "rope_factors": factors,
        "rope_scaling": scaling,
        "context": context,
        "ids": _ids(checkpoint),
        "tensors": {name: checkpoint.shapes[theirs] for name, theirs in names.items()},
        "load": lambda name: _load(checkpoint, name, names[name]),
        "target": target if isinstance(target, str) else "",
        "target_classes": tuple(filter(None, map(str, classes))) if isinstance(classes, list) else (),
        "accept_k": max([k for k in accept if type(k) is int], default=1),
    }


def _rope(hf: HfConfig, scaling: Json, head_dim: int, context: int) -> tuple[RopeConfig, np.ndarray | None]:
    base = hf.theta(scaling, 10000.0)
    partial = {"partial_rotary_factor": hf.get("partial_rotary_factor", float, None)}
    pretrained = hf.get("original_max_position_embeddings", int, None)
    says = said(HfRope(hf.where, "llama", partial | scaling, base, head_dim, context, pretrained))
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


def _ids(checkpoint: Checkpoint) -> np.ndarray | None:
    """The target's ids of the draft vocabulary: offsets `d2t` added to the rows they belong to."""
    if DRAFT_IDS not in checkpoint.shapes:
        return None
    offsets = checkpoint.integers(DRAFT_IDS)
    if offsets.ndim != 1 or not len(offsets):
        raise UserError(f"{checkpoint.folder}: d2t has the shape {offsets.shape}, a row of ids is needed")
    return np.arange(len(offsets)) + offsets


def _load(checkpoint: Checkpoint, name: str, theirs: str) -> TensorInfo:
    values = checkpoint.load(theirs)  # float32, finite
    kind, dtype = _STORED.get("F32" if values.ndim == 1 else checkpoint.kind(theirs), _STORED["F32"])
    raw = np.ascontiguousarray(values.astype(dtype)).view(np.uint8).reshape(*values.shape[:-1], -1)
    return TensorInfo(name, kind, values.shape, raw, str(checkpoint.folder))


def refuse_activation(hf: HfConfig, what: str) -> None:
    """Goes on where the layers' activation is SiLU; `what` names the head in the message.

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
    s = file.shape
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
        "rope_theta": file.rope.base,
        "rope_scaling": _rope_scaling(file),
        "tie_word_embeddings": False,
        **own,
    }


def _rope_scaling(file: PublishedHead) -> Json | None:
    rope = file.rope
    if file.rope_scaling is not None:
        return dict(file.rope_scaling)
    if file.rope_factors is not None or rope.attn_factor != 1.0:
        raise UserError(f"{file.path}: a rotation with frequency factors has no place in a config.json: write GGUF")
    if rope.scaling == "none":
        return None
    found: Json = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "yarn":
        found |= {
            "original_max_position_embeddings": rope.original_context,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
        }
    return found


def library_config(file: PublishedHead, *, algorithm: str, kind: str, tokens: int, layer: Json) -> Json:
    """config.json of the speculators library but for the options: what drafts so many tokens for which target.

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


def write(file: PublishedHead, folder: Path, config: Json, names: Mapping[str, str], *, vocab_size: int) -> Path:
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
