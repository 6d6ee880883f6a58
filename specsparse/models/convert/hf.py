"""A checkpoint of transformers (config.json, weights in safetensors or PyTorch's form, tokenizer) -> a GGUF file."""

import copy
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from specsparse.engine.architectures import DRAFT_HEADS
from specsparse.engine.config import ROUTER, ModelConfig
from specsparse.engine.rope import interleaved
from specsparse.errors import UserError
from specsparse.models import hub
from specsparse.models.convert.hf_config import TEXT_PARTS, HfConfig, class_name, gguf_rope, metadata, notes, read_json
from specsparse.models.convert.hf_experts import expert_sources
from specsparse.models.convert.hf_tokenizer import tokenizer_keys
from specsparse.models.convert.write import Progress, Source, out_type, write_model
from specsparse.powerinfer.torch_zip import read_torch
from specsparse.support.files import Json
from specsparse.support.hub_names import SCHEME, is_reference

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""A layer's tensors in transformers and in a GGUF file."""
QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_ROUTERS = dict.fromkeys(("mlp.gate", "mlp.router", "block_sparse_moe.primary_router"), ROUTER)
_SINKS = {"self_attn.sinks": "attn_sinks"}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IGNORED = ("rotary_emb.inv_freq", "masked_bias")
_ABOVE = ("_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
"""Keys of config.json that hold for its text part, if that does not say otherwise."""
_TEXT_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}
"""Beginnings of a text part's tensors in files of newer releases of transformers and in those on the Hub."""
_FORMS = (("model.safetensors.index.json", "model.safetensors"), ("pytorch_model.bin.index.json", "pytorch_model.bin"))
"""Index of several files, and the name of a single one; safetensors are taken if there are both."""
_KINDS = {
    np.dtype(np.float64): "F64", np.dtype(np.float32): "F32", np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
}  # fmt: skip
_ALGORITHMS = {**DRAFT_HEADS, "eagle": "EAGLE", "medusa": "Medusa", "mlp_speculator": "MLP speculator"}


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint; `kind` is its type as safetensors calls it, `read` gives its values in that type."""

    shape: tuple[int, ...]
    kind: str
    read: Callable[[], np.ndarray]


class Checkpoint:
    """A folder of a model with its config.json and the shapes of its tensors, which are read one at a time."""

    def __init__(self, folder: str | Path):
        """Opens a folder; UserError if its config or a file of its tensors is missing or damaged."""
        self.folder = Path(folder)
        self.config: Json = read_json(self.folder / "config.json")
        self._tensors: dict[str, StoredTensor] = {}
        for name in self._file_names():
            self._tensors |= _stored(self.folder / name)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def part(self, config: Json, names: Mapping[str, str]) -> "Checkpoint":
        """A part with its own config. `names` maps tensor names of this checkpoint to names in the part."""
        found = copy.copy(self)
        found.config = config
        found._tensors = {name: self._tensors[stored] for stored, name in names.items()}
        found.shapes = {name: self.shapes[stored] for stored, name in names.items()}
        return found

    def _file_names(self) -> list[str]:
        for index, single in _FORMS:
            if (self.folder / index).is_file():
                parts = read_json(self.folder / index).get("weight_map")
                if not isinstance(parts, dict) or not parts:
                    raise UserError(f"{self.folder / index}: has no weight_map")
                return sorted(set(map(str, parts.values())))
            if (self.folder / single).is_file():
                return [single]
        others = sorted(p.name for p in self.folder.glob("*.bin")) + sorted(p.name for p in self.folder.glob("*.pth"))
        also = f" ({others[0]} is of PyTorch: save the model again with safe_serialization=True)" if others else ""
        names = " and no ".join(name for form in _FORMS for name in reversed(form))
        raise UserError(f"{self.folder}: has no {names}{also}")

    def load(self, name: str) -> np.ndarray:
        """A tensor as float32; UserError if it holds no floats (a quantised checkpoint), or is not finite."""
        kind, floats = self.kind(name), tuple(_KINDS.values())
        if kind not in floats:
            raise UserError(f"{self.folder}: tensor {name} is of type {kind}; only {', '.join(floats)} are supported")
        values = self._tensors[name].read().astype(np.float32)
        if not np.isfinite(values).all():
            raise UserError(f"{self.folder}: tensor {name} holds values that are not finite; the file is damaged")
        return values

    def kind(self, name: str) -> str:
        """The type that a tensor is stored in, as safetensors calls it."""
        return self._tensors[name].kind

    def integers(self, name: str) -> np.ndarray:
        """A tensor of whole numbers as int64; UserError if it is of another type."""
        values = self._tensors[name].read()
        if values.dtype.kind not in "iu":
            raise UserError(f"{self.folder}: tensor {name} is of type {self.kind(name)}; whole numbers are needed")
        return values.astype(np.int64)


def _stored(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Those of PyTorch's form are all in memory."""
    if not path.name.endswith(".safetensors"):
        found = read_torch(path)
        if not isinstance(found, dict) or not all(isinstance(v, np.ndarray) for v in found.values()):
            raise UserError(f"{path}: holds no tensors by name")
        return {
            str(name): StoredTensor(array.shape, _KINDS.get(array.dtype, str(array.dtype)), lambda array=array: array)
            for name, array in found.items()
        }
    try:
        file = safe_open(path, "np")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors: {str(error).splitlines()[0]}") from None
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return {
        name: StoredTensor(tuple(part.get_shape()), part.get_dtype(), partial(file.get_tensor, name))
        for name, part in slices.items()
    }


def head_kind(config: Json) -> str | None:
    """The kind of draft head that a config.json describes, or None."""
    algorithm = str(config.get("speculators_model_type") or config.get("model_type"))
    if config.get("speculators_model_type") or algorithm in _ALGORITHMS:
        return _ALGORITHMS.get(algorithm, algorithm)
    names = config.get("architectures")
    first = names[0].lower() if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if first == "qwen3dsparkmodel":
        return "DSpark"
    if "dflash_config" in config or "dflash" in first:
        return "DFlash"
    if "draft_vocab_size" in config or "eagle3" in first:
        return "EAGLE-3"
    if "medusa_num_heads" in config or "medusa" in first:
        return "Medusa"
    return "EAGLE" if "eagle" in first else None


def refuse_draft_head(folder: Path) -> None:
    """Raises a UserError if a folder holds a draft head, with its kind and its target.

    EAGLE 1 and 2 have the config of a Llama of one layer; they are known by their tensors, which are read from
    model.safetensors or from the pickle of a torch file.
    """
    config = read_json(folder / "config.json", optional=True)
    kind, names = head_kind(config), set()
    if kind is None:
        known = ("fc.weight", "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight")
        try:
            if (folder / "model.safetensors").is_file():
                with safe_open(folder / "model.safetensors", "np") as file:
                    names = set(file.keys())
            else:
                with zipfile.ZipFile(folder / "pytorch_model.bin") as archive:
                    pickle = next(info for info in archive.infolist() if info.filename.endswith("data.pkl"))
                    content = archive.read(pickle) if pickle.compress_type == zipfile.ZIP_STORED else b""
                names = {name for name in known if b"\0" + name.encode() in content}
        except (OSError, SafetensorError, zipfile.BadZipFile, StopIteration, RuntimeError):
            pass  # whoever reads the tensors says what is wrong with them
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


def convert_hf(
    source: str | os.PathLike[str], path: str | os.PathLike[str], *, type_name: str = "f16", pre: str | None = None,
    progress: Progress = lambda done, total: None, note: Callable[[str], None] = lambda line: None,
) -> ModelConfig:  # fmt: skip
    """Converts a folder, or a repository of the Hub; of a model that sees images too (`TEXT_PARTS`), its text part.
    UserError: a part of it is missing, damaged or not supported.

    Args:
        source: a folder with config.json, weights and a tokenizer; or owner/repo, hf://owner/repo[@revision].
        path: of the new file.
        type_name: of `write.OUT_TYPES`.
        pre: pre-tokenizer of a byte-level BPE, if it cannot be told.
        progress: called with (bytes written, bytes in all).
        note: called, when the file is written, with each line that says how the file differs from the config, or from
            the model that another program makes of it.
    """
    kind, text, folder = out_type(type_name), str(source), Path(os.path.expanduser(source))
    if not folder.is_dir():
        if not is_reference(text):
            raise UserError(f"{text}: no such folder; a folder with config.json or owner/repo of the Hub is needed")
        folder = hub.download_checkpoint(text)
    refuse_draft_head(folder)
    whole = Checkpoint(folder)
    checkpoint = text_part(whole)
    config = HfConfig(folder / "config.json", checkpoint.config)
    named = text.removeprefix(SCHEME).partition("@")[0].rstrip("/").rpartition("/")[2]
    name = checkpoint.config.get("_name_or_path") or (named if named not in ("", ".", "..") else folder.resolve().name)
    keys = metadata(config, name=str(name))
    tensors = list(_sources(checkpoint, config))
    rows = next((shape[0] for target, shape, _ in tensors if target == "token_embd.weight"), 0)
    keys |= tokenizer_keys(folder, checkpoint.config, vocab_size=rows, pre=pre)
    keys[f"{config.architecture}.vocab_size"] = rows
    made = write_model(path, keys, tensors, kind, progress=progress)
    if left_out := len(whole.shapes) - len(checkpoint.shapes):
        note(f"only the text part is converted; {left_out} tensors of other parts are left out: images cannot be read")
    for line in notes(config, made.biases):
        note(line)
    if config.tied and not made.tied_output:
        note(
            "the config says tied, and an lm_head that is not the embedding is stored: it is kept as the output matrix"
        )
    return made


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """The text model of a checkpoint that holds other parts too; any other checkpoint as it is."""
    part = TEXT_PARTS.get(class_name(checkpoint.config) or "")
    if part is None:
        return checkpoint
    own = HfConfig(checkpoint.folder / "config.json", checkpoint.config).get("text_config", dict)
    said = {key: value for key, value in own.items() if value is not None}
    above = {key: value for key, value in checkpoint.config.items() if key in _ABOVE}
    kept = {}
    for name in checkpoint.shapes:
        if not name.removeprefix("model.").startswith(part.left_out):
            old = next((prefix for prefix in _TEXT_PREFIXES if name.startswith(prefix)), "")
            kept[name] = _TEXT_PREFIXES.get(old, "") + name.removeprefix(old)
    return checkpoint.part({**above, **part.defaults, **said, "architectures": [part.hf_class]}, kept)


def _sources(checkpoint: Checkpoint, config: HfConfig) -> Iterator[Source]:
    """Every tensor of the new file, in the order embedding, layers, output; norms and the rows of queries and keys as
    GGUF has them. UserError for a tensor that its architecture does not have: it would be lost."""
    hf_class, named = config.hf_class, {}
    family = hf_class.family
    layer = LAYER | {"post_attention_layernorm": family.ffn_norm} | {_FUSED[name]: name for name in family.fused}
    layer |= (QK_NORMS if family.qk_norm else {}) | (_POST_NORMS if family.post_norms else {})
    layer |= (_ROUTERS if family.routing else {}) | (_SINKS if family.sinks else {})
    experts, of_experts = expert_sources(checkpoint, config.n_experts) if family.routing else ({}, set())
    for name in checkpoint.shapes:
        if name in of_experts:
            continue
        stem, _, kind = (name + ".weight" * name.endswith(".sinks")).rpartition(".")
        number, _, rest = stem.removeprefix("model.layers.").partition(".")
        in_layer = stem.startswith("model.layers.") and len(number) < 10 and number.isdecimal() and rest in layer
        if stem in _TOP:
            named[f"{_TOP[stem]}.{kind}"] = name
        elif in_layer and kind in ("weight", "bias"):
            named[f"blk.{int(number)}.{layer[rest]}.{kind}"] = name
        elif not name.endswith(_IGNORED):
            raise UserError(
                f"{checkpoint.folder}: a {config.architecture} has no tensor {name}; this model cannot be converted"
            )

    # An output matrix that is not the embedding is kept, whatever the config says of tied weights.
    output, embedding = "lm_head.weight", "model.embed_tokens.weight"
    shapes = [checkpoint.shapes.get(name) for name in (output, embedding)]
    if config.tied and (
        shapes[0] is None
        or (shapes[0] == shapes[1] and np.array_equal(checkpoint.load(output), checkpoint.load(embedding)))
    ):
        named.pop("output.weight", None)

    def place(target: str) -> tuple[int, int, str]:
        if target.startswith("blk."):
            return 1, int(target.split(".")[1]), target
        return (0 if target.startswith("token_embd") else 2), 0, target

    heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}
    for target in sorted({**named, **experts}, key=place):
        if target in experts:
            yield experts[target]
            continue
        name, count = named[target], heads.get(target.split(".")[-2])
        load: Callable[[], np.ndarray] = partial(checkpoint.load, name)
        if hf_class.norms_from_one and target.endswith("norm.weight"):
            load = lambda load=load: load() + np.float32(1)  # noqa: E731
        elif count is not None and family.pairing == "norm":
            load = lambda load=load, count=count: interleaved(load(), count)  # noqa: E731
        yield target, checkpoint.shapes[name], load
    factors = gguf_rope(config.rope).factors
    if factors is not None:
        yield "rope_freqs.weight", factors.shape, lambda: factors
