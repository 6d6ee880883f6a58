"""A head on the target's features as a source of logits (EAGLE, Li et al., arXiv:2401.15077).

One layer, a plain Llama's of the target's sizes, reads h_i, the target's row before its output norm, and the token
after it, and predicts h_{i+1}; the target's own output matrix turns that into logits. Behind drafted tokens it reads
its own rows in place of h. A head may also read rows of layers below, and then has a matrix of its own for its own rows
(as EAGLE-3 has, arXiv:2503.01840).
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from gguf.constants import GGMLQuantizationType
from jax.typing import ArrayLike

from specsparse.engine.cache import KVCache
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import GGUFFile, open_gguf
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.engine.llama import make_layers
from specsparse.engine.model import Model
from specsparse.engine.pytree import ABSENT
from specsparse.engine.weights import Layer, Params, pack_matrix
from specsparse.errors import UserError, refuse
from specsparse.kernels import QTensor
from specsparse.speculative.base import DraftContext
from specsparse.speculative.drafters.heads import eagle3
from specsparse.speculative.drafters.heads.feature_source import HeadState, OneLayerSource, of_target
from specsparse.speculative.drafters.heads.published import matrix_type
from specsparse.speculative.drafters.lookup import Either, NGramSizes, PromptLookup
from specsparse.speculative.drafters.sources import DraftWeights, FedRows
from specsparse.speculative.drafters.spec import (
    ChainDrafting,
    DrafterSpec,
    Drafting,
    HeadDrafting,
    Load,
    LoadedDrafter,
    bytes_of,
    drafting_with,
)
from specsparse.speculative.policies.base import Policy
from specsparse.support.options import Inline


class Input(NamedTuple):
    """One input of a head: RMS norm f32[D], and QTensor [D, D] of the normalised rows."""

    norm: jax.Array
    matrix: QTensor


class HeadParams(NamedTuple):
    # hidden_norm, token_norm: f32[D], RMS norms of its inputs
    hidden_norm: jax.Array
    token_norm: jax.Array
    # fc_hidden, fc_token: QTensor [D, D]; their products are added
    fc_hidden: QTensor
    fc_token: QTensor
    layer: Layer  # of `ModelConfig.plain`
    output_norm: jax.Array  # f32[D]
    below: tuple[Input, ...] = ()  # of the target's rows that enter layers below; their products are added too
    own: Input | None = None  # in place of `hidden_norm` and `fc_hidden` for the head's own rows, or None for the same


@dataclasses.dataclass(frozen=True)
class HeadSource(OneLayerSource):
    """The head of EAGLE 1 and 2: reads the target's rows before its output norm, and of layers below if it has matrices
    for them.
    """

    layers: Callable  # `engine.llama.make_layers` of the head's one layer
    # ids of the layers whose entering rows it reads, as `engine.llama.Want.hidden`; the last rows are last
    features: tuple[int, ...] = ()

    @property
    def wants_hidden(self) -> bool | tuple[int, ...]:
        """The rows that it reads: those before the output norm if there are no others."""
        return self.features or True

    def read(self, weights: DraftWeights, hidden_BnE: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        w: HeadParams = weights.params
        return self._sum((*w.below, Input(w.hidden_norm, w.fc_hidden)), hidden_BnE, n_valid_B)

    def again(self, weights: DraftWeights, y_BnD: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        w: HeadParams = weights.params
        return self._sum((w.own or Input(w.hidden_norm, w.fc_hidden),), y_BnD, n_valid_B)

    def run(
        self, weights: DraftWeights, ctx: DraftContext, state: HeadState, read_BnD: jax.Array, rows: FedRows
    ) -> tuple[jax.Array, HeadState]:
        """Adds the product of the token's embedding to the input, and runs one layer."""
        batch, n, width = read_BnD.shape
        w: HeadParams = weights.params
        tokens_R = self.vocab.to_draft(rows.tokens).reshape(-1)
        with jax.named_scope("head"):
            e_RD, read_RD = self.kernels.embed(ctx.params.embedding, tokens_R), read_BnD.reshape(batch * n, width)
            (x_RD,) = self.kernels.linear(
                e_RD, (w.fc_token,), norm=w.token_norm, eps=self.eps, residual=read_RD, n_valid=rows.n_valid
            )
            params = Params(ctx.params.embedding, (w.layer,), w.output_norm, ABSENT, ctx.params.cos, ctx.params.sin)
            cache = KVCache(state.k, state.v, state.length)
            y_RD, cache, *_ = self.layers(params, x_RD, cache, rows.n_valid, rows.parents, (0,))
        return y_RD.reshape(batch, n, width), state._replace(k=cache.k, v=cache.v)

    def _sum(self, inputs: Sequence[Input], rows_BnW: jax.Array, n_valid_B: jax.Array) -> jax.Array:
        """Sum of the products of `inputs`, float32[B, n, D]; each has D numbers of `rows_BnW`, side by side."""
        batch, n, _ = rows_BnW.shape
        rows_RW, x_RD = rows_BnW.reshape(batch * n, -1), None
        with jax.named_scope("head/read"):
            for i, each in enumerate(inputs):
                h_RD = rows_RW[:, i * self.width : (i + 1) * self.width]
                (x_RD,) = self.kernels.linear(
                    h_RD, (each.matrix,), norm=each.norm, eps=self.eps, residual=x_RD, n_valid=n_valid_B
                )
        assert x_RD is not None
        return x_RD.reshape(batch, n, -1)


ARCHITECTURE = "specsparse-head"
"""`general.architecture` of these files."""
TARGET, DRAFT_IDS, VOCAB_SIZE, BELOW = (
    f"{ARCHITECTURE}.{key}" for key in ("target", "draft_ids", "vocab_size", "layers_below")
)
"""Keys: `fingerprint` of the target, ids of the head's columns in ascending order, size of the target's vocabulary, ids
of the layers whose entering rows the head reads beside the last ones (absent if it reads no others)."""
SHIPPED = Path(__file__).parents[3] / "data" / "heads"
"""Heads that travel with specsparse, by file name."""
NORMS = ("hidden_norm", "token_norm", "output_norm")
LAYER_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True)
class HeadFile:
    params: HeadParams
    ids: np.ndarray  # int32[N], ascending, the target's ids of its columns
    below: tuple[int, ...]  # ids of the layers whose entering rows it reads beside the last ones
    path: Path


def fingerprint(output_norm: ArrayLike) -> str:
    """A hash of the target's output norm f32[D], which no quantisation of its matrices changes."""
    return hashlib.sha256(np.asarray(output_norm, np.float32).tobytes()).hexdigest()[:16]


def find(spec: str | Path | None, output_norm: ArrayLike | None) -> Path:
    """The file of a head: a path, the name of a shipped one, or None for the shipped one that fits the target."""
    shipped = sorted(SHIPPED.glob("*.gguf"))
    if spec is None:
        if output_norm is not None and (own := shipped_for(output_norm)) is not None:
            return own.path
        raise UserError("no head was trained for this model: give drafter.head=FILE, or +experiment=train_drafter")
    for path in (SHIPPED / f"{spec}.gguf", Path(os.path.expanduser(spec))):
        if path.is_file():
            return path
    names = ", ".join(path.stem for path in shipped) or "none"
    raise UserError(f"drafter.head={spec}: no such file; heads with a name: {names}")


def shipped_for(output_norm: ArrayLike) -> GGUFFile | None:
    """The head that travels with specsparse for a target of that output norm f32[D], open, or None."""
    wanted = fingerprint(output_norm)
    return next((f for f in map(open_gguf, sorted(SHIPPED.glob("*.gguf"))) if f.get(TARGET, "str", "") == wanted), None)


def tensor_shapes(config: ModelConfig, below: int = 0) -> dict[str, tuple[int, ...]]:
    """Shapes of a head's tensors by name, if it reads so many layers below: matrices [outputs, inputs], norms [D]."""
    D, F = config.d_model, config.d_ff
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    layer = dict(zip(LAYER_MATRICES, ((q, D), (kv, D), (kv, D), (D, q), (F, D), (F, D), (D, F)), strict=True))
    matrices = ["fc_hidden", "fc_token", *(["fc_own"] if below else []), *(f"fc_below.{i}" for i in range(below))]
    norms = [*NORMS, *(["own_norm"] if below else []), *(f"below_norm.{i}" for i in range(below))]
    return {
        **{f"{name}.weight": (D, D) for name in matrices},
        **{f"blk.0.{name}.weight": shape for name, shape in layer.items()},
        **{f"{name}.weight": (D,) for name in (*norms, "blk.0.attn_norm", "blk.0.ffn_norm")},
    }


def read_head(path: Path, config: ModelConfig, *, floats: bool) -> HeadFile:
    """Reads a head for a target of that config; `floats` keeps float32 for kernels without quantised products.
    UserError for another kind of file, or a head for a model of other shapes."""
    f = open_gguf(path)
    if f.get("general.architecture", "str", "") != ARCHITECTURE:
        raise UserError(f"{path}: is no head; +experiment=train_drafter makes one")
    size = f.get(VOCAB_SIZE, "int")
    found, ids = (f.get(key, "numbers", np.zeros(0, np.int32)) for key in (BELOW, DRAFT_IDS))
    below = tuple(int(i) for i in found)
    wrong = {
        f"is a head for {size} ids, the target has {config.vocab_size}": size != config.vocab_size,
        f"{BELOW}={list(below)}: the target has layers 0 to {config.n_layers}":
            any(not 0 <= i <= config.n_layers for i in below),
        f"{DRAFT_IDS} must hold ascending ids below {size}":
            not len(ids) or bool((np.diff(ids) <= 0).any()) or ids[0] < 0 or ids[-1] >= size,
    }  # fmt: skip
    for name, shape in tensor_shapes(config, len(below)).items():
        own = tuple(f.tensors[name].shape) if name in f.tensors else "missing"
        wrong[f"tensor {name} is {own}, the target needs {shape}"] = own != shape
    refuse(wrong, path)

    def matrix(name: str) -> QTensor:
        return pack_matrix(f.tensors[f"{name}.weight"], floats=floats)

    def vector(name: str):
        return jnp.asarray(f.tensors[f"{name}.weight"].dequantize().astype(np.float32).reshape(-1))

    fields: dict[str, Any] = {name: matrix(f"blk.0.{name}") for name in LAYER_MATRICES}
    fields |= {name: vector(f"blk.0.{name}") for name in ("attn_norm", "ffn_norm")}
    params = HeadParams(
        fc_hidden=matrix("fc_hidden"),
        fc_token=matrix("fc_token"),
        layer=Layer(**fields, biases={}),
        **{name: vector(name) for name in NORMS},
        below=tuple(Input(vector(f"below_norm.{i}"), matrix(f"fc_below.{i}")) for i in range(len(below))),
        own=Input(vector("own_norm"), matrix("fc_own")) if below else None,
    )
    return HeadFile(params, np.asarray(ids, np.int32), below, path)


def write_head(
    path: Path, target: Model, tensors: Mapping[str, np.ndarray], ids: np.ndarray, *, quant: str = "F32",
    below: Sequence[int] = (),
) -> Path:  # fmt: skip
    """Writes a head; the file appears whole or not at all.

    Args:
        tensors: float32 by the names of `tensor_shapes`.
        ids: int32[N], ascending, the target's ids of its columns.
        quant: type of the matrices: F32, F16, Q8_0, Q4_0, Q4_1 or another that gguf can write and that fits the width.
        below: ids of the layers whose entering rows it reads beside the last ones.
    """
    kind = matrix_type(quant, tensor_shapes(target.config).values(), path)
    keys = {
        "general.architecture": ARCHITECTURE,
        "general.name": path.stem,
        TARGET: fingerprint(target.params.output_norm),
        VOCAB_SIZE: target.config.vocab_size,
        DRAFT_IDS: np.asarray(ids, np.int32),
    }
    if below:
        keys[BELOW] = np.asarray(below, np.int32)
    vector = GGMLQuantizationType.F32
    return write_gguf(
        path,
        keys,
        [NewTensor.from_values(key, value, vector if value.ndim == 1 else kind) for key, value in tensors.items()],
    )


HEAD_P_MIN = 0.6
"""Top probability under which a head beside a lookup stops if the length of a draft is fixed."""


@dataclasses.dataclass(frozen=True)
class Head(DrafterSpec):
    """One layer on the target's features, before the target's output matrix (EAGLE, arXiv:2401.15077).

    Without ids of its own it scores those of the head's file. A GGUF file of an EAGLE-3 head is one of `eagle3`.

    Attributes:
        head: its file, or a name; by default the one that was trained for the target.
    """

    head: str | Path | None = None
    drafting: Annotated[HeadDrafting, Inline()] = dataclasses.field(default=HeadDrafting(), kw_only=True)

    def build(self, target: Model, load: Load) -> LoadedDrafter:
        c, style = target.config, self.drafting
        path = find(self.head, target.params.output_norm)
        f = open_gguf(path)
        if f.get("general.architecture", "str", "") == eagle3.Eagle3File.architecture:
            return eagle3.Eagle3(eagle3.read_gguf(f), drafting=self.drafting).build(target, load)
        found = read_head(path, c, floats=target.kernels.name != "native")
        if style.draft_vocab is None:
            style = dataclasses.replace(style, draft_vocab=tuple(found.ids.tolist()))
        weights, columns = style.trim(target, target.params.output, c.vocab_size)
        source = HeadSource(
            **of_target(target, columns, c.norm_eps),
            layers=make_layers(c.plain, target.kernels),
            width=c.d_model,
            kv_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            tree_rows=0 if style.shape is None else style.shape.max_rows,
            features=(*found.below, c.n_layers) if found.below else (),
        )
        weights = weights._replace(params=found.params, norm=found.params.output_norm)
        reads = bytes_of(found.params.layer, found.params.fc_token, found.params.fc_hidden, weights.head)
        return LoadedDrafter(style.drafter(source, target), lambda capacity: weights, reads, source.keys_per_token)


@dataclasses.dataclass(frozen=True)
class LookupHead(DrafterSpec, NGramSizes):
    """Prompt lookup where the text repeats itself, else a head. Each is under the policy; its gamma is that of both.

    Attributes:
        head: its file, or a name; by default the one that was trained for the target.
    """

    head: str | Path | None = None
    # Fewer options than a `Drafting`: `style` is the head's.
    drafting: Annotated[ChainDrafting, Inline()] = dataclasses.field(  # pyrefly: ignore[bad-override]
        default=ChainDrafting(), kw_only=True
    )

    def __post_init__(self):
        NGramSizes.__post_init__(self)
        assert self.second  # refuses options that exclude each other before a model is loaded

    @functools.cached_property
    def second(self) -> Head:
        """The head, which stops early by default if the length of a draft is fixed."""
        how = self.drafting
        fixed = how.policy is None and how.max_nodes is not None
        ends = how.p_min if how.p_min is not None else HEAD_P_MIN if fixed else 0.0
        given = {field.name: getattr(how, field.name) for field in dataclasses.fields(how)}
        return Head(head=self.head, drafting=HeadDrafting(**given | {"p_min": ends}))

    @functools.cached_property
    def first(self) -> PromptLookup:
        """The lookup; a policy that is put upon the spec later leaves it the room it had."""
        gamma = self.drafting.max_nodes or self.second.max_nodes
        return PromptLookup(self.ngram_max, self.ngram_min, gamma)

    @property
    def style(self) -> Drafting:
        return self.second.drafting

    @property
    def max_nodes(self) -> int:
        return max(self.first.max_nodes, self.second.max_nodes)

    def with_policy(self, policy: Policy) -> Self:
        how = dataclasses.replace(drafting_with(self.drafting, policy), max_nodes=self.first.max_nodes)
        return dataclasses.replace(self, drafting=how)

    def build(self, target: Model, load: Load) -> LoadedDrafter:
        loaded = self.second.build(target, load)
        return loaded._replace(drafter=Either(self.first, loaded.drafter))
