"""Models without their weights: shape and tensor types, read from a file's header or from the catalogue."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from specsparse.engine.architectures import ARCHITECTURES
from specsparse.engine.config import PROJECTIONS, ModelConfig
from specsparse.engine.gguf.reader import GGUFFile, open_gguf
from specsparse.engine.rope_config import RopeConfig
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError
from specsparse.measure.costs.roofline import Traffic, bits_per_weight, kv_bytes
from specsparse.models import catalogue, hub
from specsparse.models.catalogue import Shape
from specsparse.speculative import vocab

KERNELS_A_LAYER = 10
"""Kernels that a layer is on an accelerator: two norms, queries to values, rotation and cache, attention, its output,
gate and up, activation, down, and the sums."""
_PADDING = 0.01  # rows beyond the vocabulary, as a share of it


@dataclass(frozen=True)
class ModelOutline:
    """A model's shape and tensors; no weights.

    Attributes:
        name: as it was asked for.
        config: its shape.
        tensors: (name, GGUF type, bytes) of each.
        source: where that is from, in words.
        path: the file, if it is on this machine.
        file: its open header.
    """

    name: str
    config: ModelConfig
    tensors: tuple[tuple[str, str, float], ...]
    source: str
    path: Path | None = None
    file: GGUFFile | None = None

    @classmethod
    def from_file(cls, name: str, path: Path, *, source: str = "the header of the file") -> "ModelOutline":
        """From a file's header.

        Raises:
            UserError: no GGUF file, or no model that runs here.
        """
        f = open_gguf(path)
        config = ModelConfig.from_gguf(f)
        tensors = tuple((key, t.type.name, float(t.nbytes)) for key, t in f.tensors.items())
        return cls(name, config, tensors, source, None if hub.is_header(path) else path, f)

    @classmethod
    def from_shape(cls, name: str, shape: Shape) -> "ModelOutline":
        """From a shape of the catalogue.

        Raises:
            UserError: an architecture that does not run here.
        """
        config = config_from_shape(name, shape)
        tensors = tuple(
            (key, kind, math.prod(size) * bits_per_weight(kind) / 8)
            for key, kind, size in shape.typed(config.tensor_shapes())
        )
        return cls(name, config, tensors, f"its shape in the catalogue, weights in {shape.weights}")

    @cached_property
    def nbytes(self) -> float:
        """Of all tensors."""
        return sum(size for _, _, size in self.tensors)

    def traffic(self, *, kv_dtype: str = "f16", layers: tuple[int, ...] | None = None) -> Traffic:
        """Of a forward; `layers`: of those alone, and the output."""
        left_out = [f"blk.{i}." for i in range(self.config.n_layers) if layers is not None and i not in layers]
        kept = [t for t in self.tensors if not any(t[0].startswith(prefix) for prefix in left_out)]
        whole = Traffic.from_tensors(self.config, kept, kv_dtype=kv_dtype)
        share = 1.0 if layers is None else len(layers) / self.config.n_layers
        cache, attention = whole.kv_bytes_per_token * share, whole.attention_macs * share
        return replace(whole, kv_bytes_per_token=cache, attention_macs=attention)

    def kernels(self, layers: int | None = None) -> int:
        """How many kernels a forward starts on an accelerator."""
        return KERNELS_A_LAYER * (self.config.n_layers if layers is None else layers) + 2

    def kv_bytes(self, tokens: float, kv_dtype: str = "f16") -> float:
        """Of the cache of one sequence."""
        return kv_bytes(self.config, tokens, kv_dtype)


def outline(spec: str) -> ModelOutline:
    """The model of a name, a path or a reference to the Hub; weights are neither needed nor read.

    Raises:
        UserError: an unknown name, a file that is no model, or a model that is not here and whose shape nobody knows.
    """
    if spec.startswith(hub.SCHEME):
        return ModelOutline.from_file(spec, hub.download_header(spec), source="its header on the Hub")
    entry = catalogue.find(spec)
    if entry is None:
        return ModelOutline.from_file(spec, catalogue.resolve(spec))
    path = catalogue.locate(entry, make=True) if entry.package or entry.base else catalogue.locate(entry)
    if path is not None and not path.is_dir():
        return ModelOutline.from_file(spec, path)
    if entry.shape is None:
        raise UserError(f"{spec} is not on this machine and the catalogue has no shape of it: give the file")
    return ModelOutline.from_shape(spec, entry.shape)


def config_from_shape(name: str, shape: Shape) -> ModelConfig:
    """The config of a shape; what no traffic depends on (epsilon, base of the rotation) is made up."""
    if shape.architecture not in ARCHITECTURES:
        raise UserError(f"{name}: architecture {shape.architecture} is none of {', '.join(ARCHITECTURES)}")
    family, head_dim = ARCHITECTURES[shape.architecture], shape.head_dim or shape.width // shape.heads
    return ModelConfig(
        architecture=shape.architecture, n_layers=shape.layers, d_model=shape.width, n_heads=shape.heads,
        n_kv_heads=shape.kv_heads or shape.heads, head_dim=head_dim, d_ff=shape.ff, vocab_size=shape.vocab,
        context_length=shape.context, norm_eps=1e-5, rope=RopeConfig(10000.0, head_dim, family.pairing),
        tied_output=shape.tied, biases=tuple(name for name in PROJECTIONS if name in family.biases),
        activation=family.activation, window=shape.window, full_every=family.full_every if shape.window else 0,
    )  # fmt: skip


def another_vocabulary(target: ModelOutline, draft: ModelOutline) -> str | None:
    """Why a draft model cannot draft the target's ids, in a line, or None if nothing speaks against it.

    Of shapes only the sizes are compared; a difference of a hundredth is taken for a padded matrix.
    """
    if target.file is not None and draft.file is not None:
        both = (Tokenizer.from_metadata(f.metadata, where=str(f.path)) for f in (target.file, draft.file))
        differences = vocab.compare(*both)
        if not differences:
            return None
        if all(d.special for d in differences):
            return f"{draft.name}: special ids differ; drafter.special_tokens=target goes on with the target's"
        return (
            f"{draft.name}: its vocabulary is another; drafter.vocabulary=tli or slem drafts all the same, less often"
        )
    own, wanted = draft.config.vocab_size, target.config.vocab_size
    alike = abs(own - wanted) <= _PADDING * wanted
    return None if alike else f"{draft.name}: {own} ids, the target has {wanted}: is it a pair?"
