"""What could draft for a target, and what drafting a token would read and compute."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from specsparse.engine.config import ModelConfig
from specsparse.measure.costs import traffic
from specsparse.measure.costs.subjects import Subject
from specsparse.measure.costs.traffic import Matrix, Traffic
from specsparse.speculative.drafters.heads import head_file
from specsparse.speculative.drafters.self_draft import default_layers

LOOKUPS = ("prompt_lookup", "ngram_simple", "suffix")
"""Drafters that copy from the text."""
EAGLE_IDS = 32000
"""Ids that a published EAGLE-3 head scores (Li et al. 2025, arXiv:2503.01840)."""


TREE = " tree"
"""What the name of a drafter of trees ends in."""


@dataclass(frozen=True)
class Candidate:
    """A drafter for one target.

    Attributes:
        name: in tables; of a draft model the model's.
        drafter: name of the drafter, as in configs.
        options: of it.
        token: what drafting a token reads and computes; None: next to nothing.
        kernels: that an accelerator starts for it.
        nbytes: of weights beside the target's.
        kv_per_token: bytes of a cache of its own.
        assumed: whether its weights are made up, as those of a head that nobody named.
        tree: whether it drafts trees; their levels cost what the chain's tokens do.
    """

    name: str
    drafter: str
    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    token: Traffic | None = None
    kernels: int = 0
    nbytes: float = 0.0
    kv_per_token: float = 0.0
    assumed: bool = False
    tree: bool = False

    @property
    def chain(self) -> str:
        """The name of the same drafter of chains."""
        return self.name.removesuffix(TREE) if self.tree else self.name


def candidates(target: Subject, drafts: tuple[Subject, ...], *, kv_dtype: str = "f16") -> Iterator[Candidate]:
    """The drafters that copy, the draft models, the target's own layers, its trained head or one of EAGLE-3's shape.

    Those that score tokens stand there twice: they draft chains, and trees.
    """
    for name in LOOKUPS:
        yield Candidate(name, name)
    for one in _scoring(target, drafts, kv_dtype):
        yield one
        yield replace(one, name=one.name + TREE, tree=True)


def _scoring(target: Subject, drafts: tuple[Subject, ...], kv_dtype: str) -> Iterator[Candidate]:
    for draft in drafts:
        load = draft.traffic(kv_dtype=kv_dtype)
        yield Candidate(
            draft.name, "model", {"model": draft.name}, load, draft.kernels(), draft.nbytes, load.kv_bytes_per_token
        )
    layers = default_layers(target.config.n_layers)
    own = target.traffic(kv_dtype=kv_dtype, layers=layers)
    yield Candidate("layer_skip", "layer_skip", {}, own, target.kernels(len(layers)))
    yield _trained(target) or eagle3(target)


def _trained(target: Subject) -> Candidate | None:
    """The head that travels with specsparse for this target, by its header; None where there is none."""
    if target.file is None or "output_norm.weight" not in target.file.tensors:
        return None
    head = head_file.shipped_for(target.file.tensors["output_norm.weight"].dequantize())
    if head is None:
        return None
    ids = head.get_numbers(head_file.DRAFT_IDS)
    share = (target.config.vocab_size if ids is None else len(ids)) / target.config.vocab_size
    own = [Matrix(t.type.name, t.nbytes, math.prod(t.shape) if len(t.shape) == 2 else 0) for t in head.tensors.values()]
    output = [_part(m, share) for m in target.traffic().matrices if m.macs_per_row == _output(target.config)]
    nbytes = sum(m.nbytes for m in own)
    kv = traffic.kv_bytes(target.config, 1, "f16") / target.config.n_layers
    load = Traffic((*own, *output[-1:]), kv, 2 * target.config.n_heads * target.config.head_dim)
    return Candidate("head", "head", {}, load, target.kernels(1), nbytes, kv)


def _output(config: ModelConfig) -> int:
    return config.vocab_size * config.d_model


def _part(m: Matrix, share: float) -> Matrix:
    return Matrix(m.type_name, m.nbytes * share, m.macs_per_row * share)


def eagle3(target: Subject, type_name: str = "F16") -> Candidate:
    """A head of EAGLE-3's shape for the target: three streams joined, one layer on two of them, 32,000 ids."""
    c = target.config
    D, F, q, kv = c.d_model, c.d_ff, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    shapes = (3 * D * D, 2 * D * q, 2 * D * kv, 2 * D * kv, q * D, 3 * D * F, min(EAGLE_IDS, c.vocab_size) * D)
    bits = traffic.bits_per_weight(type_name)
    own = tuple(Matrix(type_name, macs * bits / 8, macs) for macs in shapes)
    cache = traffic.kv_bytes(c, 1, "f16") / c.n_layers
    load = Traffic(own, cache, 2 * c.n_heads * c.head_dim)
    return Candidate("eagle3", "eagle3", {}, load, target.kernels(1), load.weight_bytes, cache, assumed=True)
