"""A drafter in training: a start, a function to differentiate, a file; and the plainest one, a small Llama."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gguf import quants

from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.gguf.writer import encode
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.engine.rope import RopeConfig, rope_tables
from specsparse.errors import UserError
from specsparse.kernels import QTensor
from specsparse.kernels.packing.dequant import dequantize
from specsparse.kernels.qtensor import take_rows
from specsparse.kernels.reference.dense import rms_norm
from specsparse.models.convert.write import keys_of, out_type, write_model
from specsparse.speculative.drafters.heads.eagle3 import default_layers
from specsparse.speculative.drafters.heads.published import matrix_type
from specsparse.support.options import Count
from specsparse.training.corpus import Features, Text, Window
from specsparse.training.layer import LayerWeights, attend, feed_forward, layer_shapes, times

GUESS_ROWS = 60_000
"""Tokens of answers that a first guess by regression is made of."""
_ROOM = 1 << 30  # bytes of the target's rows that stay in memory


class Frozen(NamedTuple):
    """The target's part, which stays as it is."""

    output_norm: jax.Array
    head: jax.Array  # float32[N, D], the output rows of the draft vocabulary
    ids: jax.Array  # int32[N], which ids those are
    # cos, sin: float32[positions, d / 2]
    cos: jax.Array
    sin: jax.Array


Loss = Literal["kl", "tv", "nla", "lk_hybrid", "kl_tv"]


class Aim(NamedTuple):
    """The target's distribution at the drafting rows: float32[m, N], and its entropy in nats, float32[m]."""

    p: jax.Array
    entropy: jax.Array
    name: Loss  # of the loss

    def loss(self, logits_mN: jax.Array) -> jax.Array:
        """What training lowers at each row, float32[m]: the divergence KL(p, q) in nats, the total variation of p and
        q, -log of its complement, which is the share of q's tokens that verification accepts, or a mixture of the
        first two: `lk_hybrid` weighs the divergence by exp(-3 acceptance) (LK losses, arXiv:2602.23881), `kl_tv` by
        0.1 (DSpark, arXiv:2607.05147)."""
        kl_m = jax.nn.logsumexp(logits_mN, axis=-1) - jnp.sum(self.p * logits_mN, axis=-1) - self.entropy
        accepted_m = self.acceptance(logits_mN)
        match self.name:
            case "kl":
                return kl_m
            case "nla":
                return -jnp.log(jnp.maximum(accepted_m, 1e-6))
            case "lk_hybrid":
                share_m = jax.lax.stop_gradient(jnp.exp(-3 * accepted_m))
            case "kl_tv" | "tv":
                share_m = 0.1 if self.name == "kl_tv" else 0.0
        return share_m * kl_m + (1 - share_m) * (1 - accepted_m)

    def acceptance(self, logits_mN: jax.Array) -> jax.Array:
        """The share of the drafter's tokens that rejection sampling accepts, sum of min(p, q): float32[m]."""
        return jnp.minimum(self.p, jax.nn.softmax(logits_mN, axis=-1)).sum(axis=-1)


@dataclass(frozen=True)
class Form(abc.ABC):
    """Base of the drafters that can be trained. Its weights are a pytree of float32 arrays."""

    name: ClassVar[str]  # the end of its file's name
    drafter: ClassVar[str]  # runs the file
    option: ClassVar[str]  # of that drafter, which takes the file
    loss: ClassVar[Loss] = "kl"  # if `train.loss` is not given

    model: Model  # the target

    @cached_property
    def features(self) -> Features:
        """Reads `layers`, for the first weights, a training and its judge alike."""
        return Features(self.model, self.layers, room=_ROOM)

    @property
    @abc.abstractmethod
    def layers(self) -> tuple[int, ...]:
        """Ids of the target's layers whose entering rows a window holds, side by side; the last is their number."""

    def size(self, wanted: int) -> int:
        """N, if `wanted` ids are asked for; 0 for all."""
        vocab_size = self.model.config.vocab_size
        return min(wanted or vocab_size, vocab_size)

    def ids(self, texts: Sequence[Text], wanted: int) -> np.ndarray:
        """int32[N], ascending: the draft vocabulary, the ids that answers hold most often; equally frequent ones by
        id."""
        order = np.argsort(-id_counts(texts, self.model.config.vocab_size), kind="stable")
        return np.sort(order[: self.size(wanted)]).astype(np.int32)

    @abc.abstractmethod
    def first(self, texts: Sequence[Text]) -> Pytree:
        """The float32 weights that training begins with, from some texts."""

    @abc.abstractmethod
    def zeros(self) -> Pytree:
        """Weights of the same shapes, to read a checkpoint by."""

    @abc.abstractmethod
    def logits(
        self, weights: Pytree, frozen: Frozen, embedding: QTensor, window: Window, count: int
    ) -> list[jax.Array]:
        """float32[m, N] for the s-th token of a draft, s up to `count`, at every drafting row of a window.

        `weights` are differentiated; `embedding` is the target's, as the model keeps it.
        """

    def losses(
        self, weights: Pytree, frozen: Frozen, embedding: QTensor, window: Window, count: int, aim: Aim
    ) -> list[tuple[jax.Array, jax.Array]]:
        """`logits`, and with each float32[m], what training lowers."""
        return [(y_mN, aim.loss(y_mN)) for y_mN in self.logits(weights, frozen, embedding, window, count)]

    @abc.abstractmethod
    def write(self, path: Path, weights: Pytree, ids: np.ndarray, *, quant: str) -> Path:
        """Writes the file; `ids` int32[N] is the draft vocabulary, `quant` the type of the matrices."""

    def written(self, weights: Pytree, quant: str) -> Pytree:
        """The float32 weights that a file of `write` holds: matrices keep what `quant` keeps of them. UserError if
        their rows do not fit its blocks."""
        shapes = [w.shape for w in jax.tree.leaves(weights)]
        kind = matrix_type(quant, shapes, f"train.quantise={quant}")

        def kept(w: jax.Array) -> jax.Array:
            return jnp.asarray(quants.dequantize(encode(np.asarray(w), kind), kind)) if w.ndim > 1 else w

        return jax.tree.map(kept, weights)


@dataclass(frozen=True)
class FeatureForm(Form):
    """Base of drafters that read fused rows of several of the target's layers, as EAGLE-3 and DFlash do."""

    below: tuple[int, ...] = ()  # ids of the layers whose entering rows it reads; () for [2, L / 2, L - 3]

    @property
    def read(self) -> tuple[int, ...]:
        return self.below or default_layers(self.model.config.n_layers)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers in `read`, and the last rows, for the target's distribution."""
        return (*self.read, self.model.config.n_layers)

    def fused(self, texts: Sequence[Text]) -> np.ndarray:
        """float32[D, len(read) D]: the ridge regression of the target's next row on those that it reads, over the
        first `GUESS_ROWS` tokens of answers."""
        D, E = self.model.config.d_model, len(self.read) * self.model.config.d_model
        gram, cross = np.zeros((E, E), np.float32), np.zeros((E, D), np.float32)
        for text in self.features.of(beginning_with(texts, GUESS_ROWS)):
            before, after = text.read[:-1, :E], text.read[1:, -D:]
            gram, cross = gram + before.T @ before, cross + before.T @ after
        return ridge(gram, cross).T

    def output_rows(self, ids: np.ndarray) -> np.ndarray:
        """float32[N, D]: the target's output rows of a draft vocabulary."""
        return np.asarray(dequantize(take_rows(self.model.params.output, np.asarray(ids))))


def last_inputs(model: Model) -> dict[str, jax.Array]:
    """float32 norms, queries, keys, values, gate and up of the target's last layer, as a plain Llama's layer has them.

    If the target normalises queries and keys, their rows are scaled to about the size that the norm gives them: inputs
    are taken as uncorrelated. An FFN without a gate gives `ffn_up` twice, one of experts its first expert, and a layer
    without norms ones.
    """
    last, ones = model.params.layers[-1], jnp.ones((model.config.d_model,), jnp.float32)
    if last.experts is None:
        gate, up, _ = last.dense
    else:
        gate, up = jax.tree.map(lambda each: each[0], (last.experts.gate, last.experts.up))
    found: dict[str, jax.Array] = {name: dequantize(getattr(last, name)) for name in ("attn_q", "attn_k", "attn_v")}
    found |= {"ffn_gate": dequantize(up if gate is None else gate), "ffn_up": dequantize(up)}
    for name in ("attn_norm", "ffn_norm"):
        found[name] = ones if getattr(last, name) is None else getattr(last, name)
    for name, norm in (("attn_q", last.attn_q_norm), ("attn_k", last.attn_k_norm)):
        if norm is not None:
            heads = found[name].reshape(-1, norm.shape[0], found[name].shape[1])
            size = jnp.sqrt(jnp.mean(jnp.sum(jnp.square(heads * found["attn_norm"][None, None]), axis=2), axis=1))
            found[name] = (heads * (norm[None] / size[:, None])[:, :, None]).reshape(found[name].shape)
    return found


def owned(weights: Pytree) -> Pytree:
    return jax.tree.map(lambda a: jnp.array(a, jnp.float32, copy=True), weights)


def ridge(gram_II: np.ndarray, cross_IO: np.ndarray) -> np.ndarray:
    """[I, O]: the ridge regression whose penalty is 0.3 % of the inputs' mean square."""
    penalty = 3e-3 * np.trace(gram_II) / len(gram_II)
    return np.linalg.solve(gram_II + np.eye(len(gram_II), dtype=gram_II.dtype) * penalty, cross_IO)


def unit(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float32)
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(1e-5))


def id_counts(texts: Sequence[Text], vocab_size: int) -> np.ndarray:
    """int64[V]: how often answers hold each id."""
    return np.bincount(np.concatenate([t.tokens[t.prompt :] for t in texts]), minlength=vocab_size)


def beginning_with(texts: Sequence[Text], rows: int) -> Sequence[Text]:
    """The first texts whose answers hold so many tokens; all if they do not."""
    held = np.cumsum([len(text.tokens) - text.prompt for text in texts])
    return texts[: int(np.searchsorted(held, rows)) + 1]


def tokenizer_keys(model: Model, prefix: str = "tokenizer.ggml.") -> dict[str, object]:
    """The keys of a model's file that hold its tokenizer, which llama.cpp reads from a drafter's file too."""
    return {key: value for key, value in open_gguf(model.path).metadata.items() if key.startswith(prefix)}


@dataclass(frozen=True)
class SmallOptions:
    """The shape of a small model."""

    # width, heads, ffn, layers: D, H, F and L of docs/notation.md; every query head has keys of its own
    width: Count = 128
    heads: Count = 4
    ffn: Count = 512
    layers: Count = 3

    def __post_init__(self):
        if self.width % (2 * self.heads):
            raise UserError(f"train.width={self.width} must be a multiple of 2 train.heads, {2 * self.heads}")


class SmallWeights(NamedTuple):
    embedding: jax.Array  # [V, D], of the input and of the output
    layers: tuple[LayerWeights, ...]
    output_norm: jax.Array  # [D]


@dataclass(frozen=True)
class SmallForm(Form):
    """A Llama of its own, distilled from the target's distributions (Hinton et al. 2015, arXiv:1503.02531).

    It drafts from tokens alone, so every stream of a draft is the same function and one is enough to train.
    """

    name: ClassVar[str] = "draft"
    drafter: ClassVar[str] = "model"
    option: ClassVar[str] = "model"

    options: SmallOptions = field(default_factory=SmallOptions)
    seed: int = 0

    @property
    def config(self) -> ModelConfig:
        """A Llama of that shape with the target's vocabulary, context and base of rotation."""
        o, target = self.options, self.model.config
        dim, context = o.width // o.heads, target.context_length
        return ModelConfig(
            architecture="llama",
            n_layers=o.layers,
            d_model=o.width,
            n_heads=o.heads,
            n_kv_heads=o.heads,
            head_dim=dim,
            d_ff=o.ffn,
            vocab_size=target.vocab_size,
            context_length=context,
            norm_eps=target.norm_eps,
            rope=RopeConfig(target.rope.base, dim, "norm", original_context=context),
            tied_output=True,
        )

    @property
    def layers(self) -> tuple[int, ...]:
        return (self.model.config.n_layers,)

    def first(self, texts: Sequence[Text]) -> SmallWeights:
        """The target's output rows along the D directions in which they are largest, weighted by the ids of `texts`;
        random layers that add nothing yet, since their two output matrices are 0."""
        config = self.config
        rows_VD = np.asarray(dequantize(self.model.params.output))
        count_V = np.ones(config.vocab_size, np.float32)
        for text in texts:
            count_V += np.bincount(text.tokens, minlength=config.vocab_size)
        _, directions = np.linalg.eigh((rows_VD * count_V[:, None]).T @ rows_VD)
        embedding = rows_VD @ directions[:, : -config.d_model - 1 : -1]
        length = np.sqrt(np.average(np.sum(embedding**2, axis=1), weights=count_V))
        rng, shapes = np.random.default_rng(self.seed), layer_shapes(config)

        def array(name: str, shape: tuple[int, ...]) -> jax.Array:
            if len(shape) == 1:
                return jnp.ones(shape, jnp.float32)
            if name in ("attn_output", "ffn_down"):
                return jnp.zeros(shape, jnp.float32)
            return jnp.asarray(rng.normal(0, shape[1] ** -0.5, shape), jnp.float32)

        layers = [LayerWeights(**{n: array(n, shape) for n, shape in shapes.items()}) for _ in range(config.n_layers)]
        return SmallWeights(jnp.asarray(embedding / length), tuple(layers), jnp.ones((config.d_model,), jnp.float32))

    def zeros(self) -> SmallWeights:
        c = self.config
        layer = LayerWeights(**{name: jnp.zeros(shape) for name, shape in layer_shapes(c).items()})
        return SmallWeights(jnp.zeros((c.vocab_size, c.d_model)), (layer,) * c.n_layers, jnp.zeros((c.d_model,)))

    def logits(
        self, weights: SmallWeights, frozen: Frozen, embedding: QTensor, window: Window, count: int
    ) -> list[jax.Array]:
        """The same for every stream, whose earlier tokens are the text's.

        Row i of a window holds the token that follows it: a text is seen from its second token on.
        """
        config, positions = self.config, len(window.tokens)
        cos, sin = (jnp.asarray(table)[window.position] for table in rope_tables(config.rope, positions))
        place = jnp.arange(positions)
        seen_nn = (window.text[None] == window.text[:, None]) & (place[None] <= place[:, None])
        x_nD = weights.embedding[window.tokens].astype(jnp.float32)
        for layer in weights.layers:
            x_nD = feed_forward(config, layer, attend(config, layer, x_nD, cos, sin, seen_nn))
        y_mD = rms_norm(x_nD[window.rows], weights.output_norm, config.norm_eps)
        return [times(y_mD, weights.embedding[frozen.ids])] * count

    def write(self, path: Path, weights: SmallWeights, ids: np.ndarray, *, quant: str) -> Path:
        """A GGUF file of the Llama architecture with the target's tokenizer; it scores all ids."""
        kind, keys = out_type(quant), keys_of(self.config, path.stem) | tokenizer_keys(self.model, "tokenizer.")
        arrays = {"token_embd": weights.embedding, "output_norm": weights.output_norm}
        for i, layer in enumerate(weights.layers):
            arrays |= {f"blk.{i}.{name}": array for name, array in layer._asdict().items()}
        sources = [(f"{name}.weight", array.shape, partial(np.asarray, array)) for name, array in arrays.items()]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_model(path, keys, sources, kind, output=kind)
        return path
