"""A small mixture of ReLU experts trained from nothing on source texts, with a vocabulary of its own: SmallThinker's
architecture, so that the engine runs its file.

The loss is the cross entropy of the next token, and for each layer the balance of the experts (Switch Transformers,
Fedus et al. 2021, arXiv:2101.03961, eq. 4). A step computes every expert for every row, of which the router's weights
keep the chosen ones: at this size one large product is faster than many small ones.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specsparse.engine.config import GATINGS, ModelConfig
from specsparse.engine.experts import choice_options
from specsparse.engine.pytree import Pytree
from specsparse.engine.rope import RopeConfig, rope_tables
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.engine.text.vocabulary import TokenType
from specsparse.errors import UserError, refuse
from specsparse.kernels.reference.experts import choice
from specsparse.models.convert.write import keys_of, out_type, write_model
from specsparse.support.files import Json
from specsparse.support.options import Count, Internal, Positive, Range
from specsparse.training.corpus import Document
from specsparse.training.layer import LayerWeights, Precision, attend, halved, layer_shapes, rms_norm, times
from specsparse.training.training_loop import OnStep, adamw, endless, rates, train, updated

_END = "<|endoftext|>"  # id 0, before each document and after it
_BYTES = 256


@dataclass(frozen=True)
class MixtureOptions:
    """The shape of a mixture and its training; the file's context is a window.

    `width`, `heads`, `ffn` and `layers` are D, H, F and L of docs/notation.md, `experts` and `chosen` E and k.
    """

    vocab: Annotated[int, Range(_BYTES + 1)] = 2048
    width: Annotated[int, Range(16)] = 128
    heads: Count = 4  # each with keys and values of its own
    ffn: Annotated[int, Range(16)] = 96  # of one expert
    layers: Count = 3
    experts: Count = 16
    chosen: Count = 2
    steps: Count = 300
    windows: Count = 2  # of a step
    rows: Count = 512  # of a window
    learning_rate: Positive = 3e-3  # of AdamW (arXiv:1711.05101)
    weight_decay: Annotated[float, Range(0)] = 0.1  # of the matrices
    clip: Positive = 1.0  # largest norm of a gradient
    warmup: Count = 40  # steps in which the rate rises from 0
    decay: Annotated[float, Range(0, 1)] = 0.5  # share of the steps, the last ones, in which it falls to 0
    balance: Annotated[float, Range(0)] = 0.05  # weight of the balance of the experts in the loss
    precision: Precision = "auto"
    seed: Annotated[int, Internal()] = 0

    def __post_init__(self):
        refuse({
            f"train.width={self.width} must be a multiple of 16 and of 2 train.heads, {2 * self.heads}":
                self.width % 16 or self.width % (2 * self.heads),
            f"train.ffn={self.ffn} must be a multiple of 16": self.ffn % 16,
            f"train.chosen={self.chosen} is more than train.experts={self.experts}": self.chosen > self.experts,
        })  # fmt: skip

    @property
    def config(self) -> ModelConfig:
        dim = self.width // self.heads
        return ModelConfig(
            architecture="smallthinker", n_layers=self.layers, d_model=self.width, n_heads=self.heads,
            n_kv_heads=self.heads, head_dim=dim, d_ff=self.ffn, vocab_size=self.vocab, context_length=self.rows,
            norm_eps=float(np.float32(1e-6)), rope=RopeConfig(10000.0, dim, "neox", original_context=self.rows),
            tied_output=True, activation="relu", n_experts=self.experts, n_chosen=self.chosen,
        )  # fmt: skip


class MixtureLayer(NamedTuple):
    attention: LayerWeights  # without FFN
    router: jax.Array  # [E, D]
    gate: jax.Array  # [E, F, D]
    up: jax.Array  # [E, F, D]
    down: jax.Array  # [E, D, F]


class MixtureWeights(NamedTuple):
    embedding: jax.Array  # [V, D], of the input and of the output
    layers: tuple[MixtureLayer, ...]
    output_norm: jax.Array  # [D]


class MixtureState(NamedTuple):
    """All that a restart needs."""

    weights: MixtureWeights
    optimiser: optax.OptState
    step: jax.Array  # int32[], steps done


class MixtureLosses(NamedTuple):
    loss: jax.Array  # cross entropy in nats
    balance: jax.Array  # mean over the layers; 1 if experts are chosen equally often
    share_LE: jax.Array  # of the choices


def source_documents() -> list[Document]:
    """This package's own source files, in the order of their names."""
    root = Path(__file__).parents[1]
    return [Document(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py")) if path.stat().st_size]


def fitted_vocabulary(documents: Sequence[Document], size: int) -> Json:
    """GGUF keys of a byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) of `size` tokens, unused ones if the texts
    have too few pairs; words are cut as GPT-2 cuts them. Id 0 begins and ends texts."""
    import tokenizers  # at the first text, as in engine.text
    from tokenizers import models, pre_tokenizers, trainers

    bpe, byte_level = tokenizers.Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = byte_level
    how = {"special_tokens": [_END], "initial_alphabet": byte_level.alphabet(), "show_progress": False}
    bpe.train_from_iterator((d.text for d in documents), trainers.BpeTrainer(vocab_size=size, **how))
    found = json.loads(bpe.to_str())["model"]
    tokens = sorted(found["vocab"], key=found["vocab"].get)
    types = [TokenType.CONTROL] + [TokenType.NORMAL] * (len(tokens) - 1) + [TokenType.UNUSED] * (size - len(tokens))
    tokens += [f"<unused{i}>" for i in range(size - len(tokens))]
    own = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [int(t) for t in types],
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in found["merges"]],
        "bos_token_id": 0, "eos_token_id": 0, "add_bos_token": True,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in own.items()}


def windows_of(documents: Sequence[Document], keys: Json, rows: int) -> np.ndarray:
    """int32[W, rows + 1]: the documents one after the other, cut; each row's next token stands behind it.

    Raises:
        UserError: there is not one window.
    """
    tokenizer = Tokenizer.from_metadata(keys, where="the vocabulary")
    each = [np.asarray([0, *tokenizer.encode(d.text)], np.int32) for d in documents]
    stream = np.concatenate([*each, [np.int32(0)]])
    count = (len(stream) - 1) // rows
    if not count:
        raise UserError(
            f"train.rows={rows}: the texts to train on, or those held out, have {len(stream)} tokens: give more "
            "train.documents, or fewer rows"
        )
    return np.lib.stride_tricks.sliding_window_view(stream, rows + 1)[: count * rows : rows]


def first_weights(options: MixtureOptions) -> MixtureWeights:
    """Normal numbers that keep the size of their inputs; what a layer adds begins small."""
    c, rng = options.config, np.random.default_rng(options.seed)
    E, F, D, small = c.n_experts, c.d_ff, c.d_model, (2 * c.n_layers) ** -0.5

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(0, scale * shape[-1] ** -0.5, shape), jnp.float32)

    def layer() -> MixtureLayer:
        shapes = list(layer_shapes(c).items())[:6]
        own = {
            name: jnp.ones(shape, jnp.float32) if len(shape) == 1
            else normal(*shape, scale=small if name == "attn_output" else 1.0)
            for name, shape in shapes
        }  # fmt: skip
        experts = normal(E, F, D), normal(E, F, D), normal(E, D, F, scale=small)
        return MixtureLayer(LayerWeights(**own), normal(E, D), *experts)

    layers = tuple(layer() for _ in range(c.n_layers))
    return MixtureWeights(normal(c.vocab_size, D), layers, jnp.ones((D,), jnp.float32))


def rows_of(
    config: ModelConfig, weights: MixtureWeights, tokens_wn: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalised last rows [w n, D] of windows that do not see each other; balance and share of the choices by layer,
    f32[L] and f32[L, E]."""
    (w, n), E, k = tokens_wn.shape, config.n_experts, config.n_chosen
    cos, sin = map(jnp.asarray, rope_tables(config.rope, n))
    sees_nn, balance_L, share_LE = jnp.tri(n, dtype=bool), [], []
    x_RD = weights.embedding[tokens_wn.reshape(-1)].astype(jnp.float32)
    at_R = jnp.arange(len(x_RD))[:, None]
    for layer in weights.layers:
        logits_RE = x_RD @ layer.router.astype(jnp.float32).T  # of the rows that enter the layer
        own = partial(attend, config, layer.attention, cos=cos, sin=sin, sees_nn=sees_nn)
        x_RD = jax.vmap(own)(x_RD.reshape(w, n, -1)).reshape(x_RD.shape)
        z_RD = rms_norm(x_RD, layer.attention.ffn_norm, config.norm_eps)
        experts_Rk, weights_Rk = choice(logits_RE, **choice_options(config))
        weight_RE, chosen_RE = (
            jnp.zeros_like(logits_RE).at[at_R, experts_Rk].set(value) for value in (weights_Rk, 1.0)
        )
        gate_REF, up_REF = (times(z_RD, m.reshape(-1, m.shape[-1])).reshape(len(z_RD), E, -1) for m in layer[2:4])
        h_REF = jax.nn.relu(gate_REF) * up_REF * weight_RE[..., None]
        down_DI = layer.down.swapaxes(0, 1).reshape(layer.down.shape[1], -1)
        x_RD = x_RD + times(h_REF.reshape(len(z_RD), -1), down_DI)
        share_LE.append(chosen_RE.mean(axis=0) / k)
        balance_L.append(E * jnp.sum(share_LE[-1] * jax.nn.softmax(logits_RE).mean(axis=0)))
    return rms_norm(x_RD, weights.output_norm, config.norm_eps), jnp.stack(balance_L), jnp.stack(share_LE)


class MixtureTrainer:
    """Trains a mixture; a step depends on state and windows alone, so a restart changes nothing."""

    def __init__(self, options: MixtureOptions):
        self.options, self.config = options, options.config
        rate = rates(options.learning_rate, options)
        self._optimiser = adamw(rate, decay=options.weight_decay, clip=options.clip)
        self._step = jax.jit(self._one_step, donate_argnums=0)
        self._losses_of = jax.jit(self._losses)

    def start(self) -> MixtureState:
        weights: Pytree = first_weights(self.options)
        return MixtureState(weights, self._optimiser.init(weights), jnp.int32(0))

    def run(self, state: MixtureState, windows_Wn: np.ndarray, *, on_step: OnStep | None = None) -> MixtureState:
        """The state after the last step; see `training_loop.train`."""
        o = self.options

        def plan(order: np.ndarray) -> Iterator[np.ndarray]:
            order = np.resize(order, -(-len(order) // o.windows) * o.windows)  # the last batch is filled up
            return iter(order.reshape(-1, o.windows))

        groups = endless(plan, len(windows_Wn), seed=o.seed, start=int(state.step))
        batches = (windows_Wn[group] for _, group in groups)
        return train(state, batches, self._step, steps=o.steps, on_step=on_step)

    def judge(self, weights: MixtureWeights, windows_Wn: np.ndarray) -> MixtureLosses:
        """Of windows that it has not seen, one after the other."""
        each = [self._losses_of(weights, window[None])[1] for window in windows_Wn]
        return jax.tree.map(lambda *found: np.mean([np.asarray(x) for x in found], axis=0), *each)

    def _losses(self, weights: MixtureWeights, windows_wn: jax.Array) -> tuple[jax.Array, MixtureLosses]:
        weights = halved(weights, self.options.precision)
        y_RD, balance_L, share_LE = rows_of(self.config, weights, windows_wn[:, :-1])
        log_RV = jax.nn.log_softmax(times(y_RD, weights.embedding), axis=-1)
        loss = -jnp.take_along_axis(log_RV, windows_wn[:, 1:].reshape(-1, 1), axis=1).mean()
        balance = balance_L.mean()
        return loss + self.options.balance * balance, MixtureLosses(loss, balance, share_LE)

    def _one_step(self, state: MixtureState, windows_wn: jax.Array) -> tuple[MixtureState, MixtureLosses]:
        grads, losses = jax.grad(self._losses, has_aux=True)(state.weights, windows_wn)
        weights, optimiser = updated(self._optimiser, grads, state.optimiser, state.weights)
        return MixtureState(weights, optimiser, state.step + 1), losses


def write_mixture(options: MixtureOptions, weights: MixtureWeights, keys: Json, path: Path, quant: str) -> Path:
    """A GGUF file of SmallThinker's architecture; `keys` are of its vocabulary, `quant` is the type of its matrices."""
    c, kind = options.config, out_type(quant)
    sizes = keys_of(c, path.stem)
    of_experts = {
        "expert_count": c.n_experts, "expert_used_count": c.n_chosen, "expert_feed_forward_length": c.d_ff,
        "expert_gating_func": GATINGS.index(c.gating),
    }  # fmt: skip
    arrays = {"token_embd": weights.embedding, "output_norm": weights.output_norm}
    for i, layer in enumerate(weights.layers):
        own = {name: w for name, w in layer.attention._asdict().items() if w is not None}
        own |= {"ffn_gate_inp": layer.router, "ffn_gate_exps": layer.gate, "ffn_up_exps": layer.up}
        arrays |= {f"blk.{i}.{name}": w for name, w in {**own, "ffn_down_exps": layer.down}.items()}
    sources = [(f"{name}.weight", w.shape, partial(np.asarray, w)) for name, w in arrays.items()]
    sizes |= {f"{c.architecture}.{key}": value for key, value in of_experts.items()}
    write_model(path, sizes | keys, sources, kind, output=kind)
    return path
