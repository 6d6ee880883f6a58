"""A checkpoint of transformers -> a GGUF file."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.rope import interleaved
from specsparse.errors import UserError
from specsparse.models import hub
from specsparse.models.convert.checkpoint import LAYER, QK_NORMS, Checkpoint
from specsparse.models.convert.heads import refuse_draft_head
from specsparse.models.convert.hf_config import TEXT_PARTS, HfConfig, class_name, gguf_rope, metadata, notes
from specsparse.models.convert.tokenizer import tokenizer_keys
from specsparse.models.convert.write import Progress, Source, out_type, write_model

_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IGNORED = ("rotary_emb.inv_freq", "masked_bias")
_ABOVE = ("_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
"""Keys of config.json that hold for its text part, if that does not say otherwise."""
_TEXT_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}
"""Beginnings of a text part's tensors in files of newer releases of transformers and in those on the Hub."""


def convert_hf(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    type_name: str = "f16",
    pre: str | None = None,
    progress: Progress = lambda done, total: None,
    note: Callable[[str], None] = lambda line: None,
) -> ModelConfig:
    """Converts a folder, or a repository of the Hub; of a model that sees images too (`TEXT_PARTS`), its text part.

    Args:
        source: a folder with config.json, safetensors and a tokenizer; or owner/repo, hf://owner/repo[@revision].
        path: of the new file.
        type_name: of `write.OUT_TYPES`.
        pre: pre-tokenizer of a byte-level BPE, if it cannot be told.
        progress: called with (bytes written, bytes in all).
        note: called, when the file is written, with each line that says how the file differs from the config, or from
            the model that another program makes of it.

    Raises:
        UserError: a part of it is missing, damaged or not supported.
    """
    kind, text, folder = out_type(type_name), str(source), Path(os.path.expanduser(source))
    if not folder.is_dir():
        if not text.startswith(hub.SCHEME) and (text.count("/") != 1 or text.startswith((".", "/", "~"))):
            raise UserError(f"{text}: no such folder; a folder with config.json or owner/repo of the Hub is needed")
        folder = hub.download_checkpoint(text)
    refuse_draft_head(folder)
    whole = Checkpoint(folder)
    checkpoint = text_part(whole)
    config = HfConfig(folder / "config.json", checkpoint.config)
    named = text.removeprefix(hub.SCHEME).partition("@")[0].rstrip("/").rpartition("/")[2]
    name = checkpoint.config.get("_name_or_path") or (named if named not in ("", ".", "..") else folder.resolve().name)
    keys = metadata(config, name=str(name))
    tensors = list(_sources(checkpoint, config))
    rows = {target: shape[0] for target, shape, _ in tensors}.get("token_embd.weight")
    if rows is None:
        raise UserError(f"{folder}: has no tensor model.embed_tokens.weight")
    keys |= tokenizer_keys(folder, checkpoint.config, vocab_size=rows, pre=pre)
    keys[f"{config.architecture}.vocab_size"] = rows
    made = write_model(path, keys, tensors, kind, progress=progress)
    left_out = len(whole.shapes) - len(checkpoint.shapes)
    if left_out:
        note(f"only the text part is converted; {left_out} tensors of other parts are left out: images cannot be read")
    for line in notes(config, made.biases):
        note(line)
    if config.tied and not made.tied_output:
        note(
            "the config says tied, and an lm_head that is not the embedding is stored: it is kept as the output matrix"
        )
    return made


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """The text model of a checkpoint that holds other parts too; any other checkpoint as it is.

    Raises:
        UserError: its config has no table `text_config`.
    """
    part = TEXT_PARTS.get(class_name(checkpoint.config) or "")
    if part is None:
        return checkpoint
    own = checkpoint.config.get("text_config")
    if not isinstance(own, dict):
        raise UserError(f"{checkpoint.folder / 'config.json'}: text_config is {own!r:.60}, not a table")
    said = {key: value for key, value in own.items() if value is not None}
    above = {key: value for key, value in checkpoint.config.items() if key in _ABOVE}
    kept = {}
    for name in checkpoint.shapes:
        if not name.removeprefix("model.").startswith(part.left_out):
            old = next((prefix for prefix in _TEXT_PREFIXES if name.startswith(prefix)), "")
            kept[name] = _TEXT_PREFIXES.get(old, "") + name.removeprefix(old)
    return checkpoint.part({**above, **part.defaults, **said, "architectures": [part.hf_class]}, kept)


def _sources(checkpoint: Checkpoint, config: HfConfig) -> Iterator[Source]:
    """Every tensor of the new file, in the order embedding, layers, output.

    Norms and the rows of queries and keys are as GGUF has them.

    Raises:
        UserError: a tensor that its architecture does not have (it would be lost), or heads that do not divide the
            rows.
    """
    hf_class, named = config.hf_class, {}
    family = hf_class.family
    layer = LAYER | (QK_NORMS if family.qk_norm else {}) | (_POST_NORMS if family.post_norms else {})
    for name in checkpoint.shapes:
        stem, _, kind = name.rpartition(".")
        number, _, rest = stem.removeprefix("model.layers.").partition(".")
        in_layer = stem.startswith("model.layers.") and number.isdecimal() and rest in layer
        if stem in _TOP:
            named[f"{_TOP[stem]}.{kind}"] = name
        elif in_layer and kind in ("weight", "bias"):
            named[f"blk.{int(number)}.{layer[rest]}.{kind}"] = name
        elif not name.endswith(_IGNORED):
            raise UserError(
                f"{checkpoint.folder}: tensor {name} is none of a {config.architecture}; this model cannot be converted"
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
    for target in sorted(named, key=place):
        name = named[target]
        shape, count = checkpoint.shapes[name], heads.get(target.split(".")[-2])
        load: Callable[[], np.ndarray] = partial(checkpoint.load, name)
        if hf_class.norms_from_one and target.endswith("norm.weight"):
            load = lambda load=load: load() + np.float32(1)  # noqa: E731
        elif count is not None and family.pairing == "norm":
            if count < 1 or shape[0] % (2 * count):
                raise UserError(f"{checkpoint.folder}: tensor {name} has {shape[0]} rows for {count} heads")
            load = lambda load=load, count=count: interleaved(load(), count)  # noqa: E731
        yield target, shape, load
    factors = gguf_rope(config.rope).factors
    if factors is not None:
        yield "rope_freqs.weight", factors.shape, lambda: factors
