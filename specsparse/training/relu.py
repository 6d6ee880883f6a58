"""A model of SiLU made one of ReLU: its FFNs rebuilt layer by layer, then trained as a whole; they alone change.

**Rebuilt.** Each layer is to give the same output from the same inputs, with fewer neurons; layers do not depend on
each other. The loss is the squared error of the output, relative to its size at each token, plus a measure of how many
neurons are active whose weight follows their share (the sparsity term of ProSparse, Song et al., arXiv:2402.13516,
raised step by step; the measure is Hoyer's square, DeepHoyer, arXiv:1908.09979, eq. 5, which does not change with the
size of the activations).

**Distilled.** The whole model is trained until it says what the original says. The loss is KL(original, this model)
over candidate ids, plus the squared distance of the two normalised last rows, plus such a measure (see `MEASURES`). The
matrices are rounded to Q4_0 in every step, and the gradient passes straight through (Bengio et al., arXiv:1308.3432):
so the trained values are the file's.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gguf import GGMLQuantizationType as GGML
from safetensors import SafetensorError, safe_open

from specsparse.engine.architectures import LayerKind
from specsparse.engine.config import ACTIVATION_KEY, ModelConfig
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.engine.rope import model_tables
from specsparse.errors import UserError
from specsparse.kernels.packing.dequant import dequantize, embed_rows
from specsparse.kernels.reference.dense import rms_norm
from specsparse.support.files import write_tensors
from specsparse.support.options import Count, Internal, Positive, Range, Share
from specsparse.training.corpus import Features, Text, fill_up, pack
from specsparse.training.layer import LayerWeights, Precision, attend, halved, times
from specsparse.training.training_loop import OnStep, endless, learning_rate, rates, train, trapezoid, updated

_PART = 8  # windows of a file of inputs

_SEARCHED = 20480  # tokens that the start of a rebuilt layer is fitted on


# The model's layers as a function of its FFNs: attention and norms stay as they are.


class FfnMatrices(NamedTuple):
    """float32 matrices [outputs, inputs] of one layer, or of all with a leading axis L."""

    # gate, up: [F, D]
    gate: jax.Array
    up: jax.Array
    down: jax.Array  # [D, F]


class FrozenLayers(NamedTuple):
    """Norms and attention, each with a leading axis L."""

    layers: LayerWeights  # without their FFNs
    norms: tuple[jax.Array | None, jax.Array | None]  # of heads of queries and of keys, or (None, None)
    kinds: LayerKind  # int32[L] each, `ModelConfig.kind` of every layer
    # cos, sin: float32[T, positions, d / 2], the tables that layers choose from
    cos: jax.Array
    sin: jax.Array


class PackedTexts(NamedTuple):
    """Texts side by side in n rows."""

    tokens: jax.Array  # int32[n]
    position: jax.Array  # int32[n], in its text
    text: jax.Array  # int32[n], which text a row belongs to; -1 for none
    hidden: jax.Array  # float32[n, D], the original's rows before the output norm; [n, 0] if the texts are without
    answer: jax.Array  # bool[n], rows that the answer's tokens are said by: its own, and the prompt's last


def check(config: ModelConfig) -> None:
    """Refuses, with a UserError, a model whose FFN has no gate or no SiLU or is normalised, or that has biases."""
    config.check_sums("turning FFNs to ReLU")
    if config.activation != "silu" or not config.gated or config.biases:
        found = f"activation={config.activation}, gate: {config.gated}, biases: {', '.join(config.biases) or 'none'}"
        raise UserError(f"only a gated FFN of SiLU without biases is turned to ReLU here; this model has {found}")


def frozen_layers(model: Model, positions: int) -> FrozenLayers:
    """The norms and the attention of a dense model, dequantised."""
    model.check_packed("training")
    layers, config = model.params.layers, model.config

    def stacked(name: str) -> jax.Array:
        each = [getattr(layer, name) for layer in layers]
        return jnp.stack([jnp.asarray(w if isinstance(w, jax.Array) else dequantize(w), jnp.float32) for w in each])

    attention = {name: stacked(name) for name in LayerWeights._fields[:6]}
    norms = (stacked("attn_q_norm"), stacked("attn_k_norm")) if config.family.qk_norm else (None, None)
    kinds: Any = jax.tree.map(lambda *each: jnp.array(each, jnp.int32), *map(config.kind, range(config.n_layers)))
    tables = map(jnp.asarray, model_tables(config.ropes, positions, model.rope_factors))
    return FrozenLayers(LayerWeights(**attention), norms, kinds, *tables)


def ffn_of(model: Model, layer: int) -> FfnMatrices:
    found = model.params.layers[layer]
    return FfnMatrices(*(dequantize(getattr(found, f"ffn_{n}")) for n in FfnMatrices._fields))


def ffns_of(model: Model) -> FfnMatrices:
    return jax.tree.map(lambda *each: jnp.stack(each), *(ffn_of(model, i) for i in range(model.config.n_layers)))


def pack_texts(texts: Sequence[Text], rows: int) -> PackedTexts:
    """Texts one after the other in `rows` rows; the last one loses its end if it does not fit."""
    width = 0 if texts[0].hidden is None else texts[0].hidden.shape[1]
    out: dict[str, Any] = dict(
        tokens=np.zeros(rows, np.int32),
        position=np.zeros(rows, np.int32),
        text=np.full(rows, -1, np.int32),
        hidden=np.zeros((rows, width), np.float32),
        answer=np.zeros(rows, bool),
    )
    at = 0
    for index, text in enumerate(texts):
        count = min(len(text.tokens), rows - at)
        here = slice(at, at + count)
        out["tokens"][here], out["position"][here] = text.tokens[:count], np.arange(count)
        out["text"][here] = index
        if text.hidden is not None:
            out["hidden"][here] = text.hidden[:count]
        out["answer"][at + text.prompt - 1 : at + count] = True
        at += count
    return PackedTexts(**out)


def forward(
    config: ModelConfig, frozen: FrozenLayers, ffn: FfnMatrices, x_nD: jax.Array, texts: PackedTexts,
    act: Callable[[jax.Array], jax.Array], watch: Callable[[jax.Array, jax.Array], Pytree], *,
    precision: Precision = "float32",
) -> tuple[jax.Array, Pytree]:  # fmt: skip
    """All layers on embedded tokens [n, D].

    Args:
        ffn: with a leading axis L.
        texts: say which rows see which.
        act: of the gate.
        watch: called with the FFN's normalised inputs z [n, D] and act(gate z) [n, F]; its results are stacked.

    Returns:
        Rows before the output norm [n, D], and the stacked results of `watch`, with a leading axis L.
    """
    before_nn = texts.position[:, None] - texts.position[None]
    sees_nn = (texts.text[None] == texts.text[:, None]) & (before_nn >= 0)

    def layer(x, weights):
        (w, f), norms, kind = halved(weights[:2], precision), weights[2], weights[3]
        cos, sin = (each[kind.table][texts.position] for each in (frozen.cos, frozen.sin))
        x = attend(config, w, x, cos, sin, sees_nn & ((kind.window == 0) | (before_nn < kind.window)), norms)
        z = rms_norm(x, w.ffn_norm, config.norm_eps)
        a = act(times(z, f.gate))
        return x + times(a * times(z, f.up), f.down), watch(z, a)

    # A layer is run again for its gradient: keeping what it made, 30 MB and its halved weights, takes longer.
    return jax.lax.scan(jax.checkpoint(layer), x_nD, (frozen.layers, ffn, frozen.norms, frozen.kinds))


def collect_inputs(
    model: Model, windows: Sequence[Sequence[Text]], folder: Path, *, rows: int,
    progress: Callable[[int], None] | None = None,
) -> list[Path]:  # fmt: skip
    """Files in `folder` of the normalised inputs float16[L, n, D] of every FFN of a dense original; those that are
    there are not made again. `windows` are texts that share one of `rows` rows, as `corpus.pack` puts them; `progress`
    is called with the windows done."""

    @jax.jit
    def inputs(embedding, frozen: FrozenLayers, ffn: FfnMatrices, texts: PackedTexts):
        x_nD = embed_rows(embedding, texts.tokens) * jnp.float32(model.config.embedding_scale)
        return forward(model.config, frozen, ffn, x_nD, texts, jax.nn.silu, lambda z, a: z.astype(jnp.float16))[1]

    paths = [folder / f"inputs_{i:04d}.safetensors" for i in range(-(-len(windows) // _PART))]
    arguments = None
    for i, path in enumerate(paths):
        part = windows[i * _PART : (i + 1) * _PART]
        if not path.exists():
            arguments = arguments or (model.params.embedding, frozen_layers(model, rows), ffns_of(model))
            packed = [pack_texts(texts, rows) for texts in part]
            found = [np.asarray(inputs(*arguments, p))[:, p.text >= 0] for p in packed]
            write_tensors(path, {"z": np.concatenate(found, axis=1)}, {"format": "specsparse.training.inputs"})
        if progress is not None:
            progress(i * _PART + len(part))
    return paths


def layer_inputs(paths: Sequence[Path], layer: int) -> np.ndarray:
    """float16[n, D]: the inputs of a layer, over all files; a UserError for a damaged one."""
    found = []
    for path in paths:
        try:
            with safe_open(path, framework="numpy") as file:
                found.append(file.get_slice("z")[layer])
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: cannot be read ({error}); remove it to have it made again") from error
    return np.concatenate(found)


class ReluState(NamedTuple):
    """All that a restart needs."""

    ffn: FfnMatrices  # of one layer, or of all before rounding
    optimiser: optax.OptState  # Adam's
    pressure: jax.Array  # f32[], the weight of the sparsity term
    step: jax.Array  # int32[], steps done


# Rebuilt, layer by layer.


@dataclass(frozen=True)
class LayerOptions:
    """How a layer is rebuilt."""

    share: Share = 0.3  # of active neurons aimed at
    # share of neurons that begin as linear ones, always active; they count as active
    linear: Annotated[float, Range(0)] = 0.125
    passes: Positive = 1.0  # over the tokens
    layer_batch: Count = 256  # tokens of a step
    layer_rate: Positive = 2e-4  # of Adam; it rises over a twentieth of the steps and falls to 0
    pressure: Positive = 0.5  # how fast the weight of the sparsity term follows the share
    seed: Annotated[int, Internal()] = 0  # of the order of tokens

    def __post_init__(self):
        if self.linear >= self.share:
            raise UserError(f"train.linear={self.linear} must be below train.share={self.share}")


class Judged(NamedTuple):
    """A rebuilt layer on tokens it has not seen: relative squared error of the output, share of active neurons."""

    error: float
    share: float


@jax.jit
def _outputs(ffn: FfnMatrices, z_nD: jax.Array) -> jax.Array:
    """down(silu(gate z) * up z), [n, D]."""
    return (jax.nn.silu(z_nD @ ffn.gate.T) * (z_nD @ ffn.up.T)) @ ffn.down.T


def _token_weights(y_nD: jax.Array) -> jax.Array:
    """[n], the weight of a token's squared error: one over its output's size, bounded for small outputs."""
    size = jnp.sum(y_nD * y_nD, axis=1)
    return 1.0 / (size + jnp.median(size))


def hoyer(a_nF: jax.Array) -> jax.Array:
    """[n], (sum a)^2 / (F sum a^2) for a >= 0: at most the share that is not 0, and equal to it if those are alike."""
    return jnp.square(a_nF.sum(axis=1)) / (a_nF.shape[1] * jnp.sum(a_nF * a_nF, axis=1) + 1e-12)


def nearly_counted(a_nF: jax.Array) -> jax.Array:
    """[n], mean of a / (a + t) for a >= 0, t a tenth of the active ones' root mean square: nearly their share.

    Its slope is steep near 0, where a model misses a neuron least, and flat at large activations.
    """
    active = jnp.sum((a_nF > 0).astype(jnp.float32), axis=1)
    t = 0.1 * jnp.sqrt(jnp.sum(a_nF * a_nF, axis=1) / jnp.maximum(active, 1.0))
    t = jax.lax.stop_gradient(t)[:, None] + 1e-9
    return jnp.mean(a_nF / (a_nF + t), axis=1)


def constant_direction(z_nD: jax.Array) -> jax.Array:
    """[D], the v with the least sum of (v . z - 1)^2: what a multiple of it adds to a row is nearly a bias."""
    gram = z_nD.T @ z_nD
    ridge = 1e-4 * jnp.trace(gram) / len(gram)
    return jnp.linalg.solve(gram + ridge * jnp.eye(len(gram)), z_nD.sum(axis=0))


@jax.jit
def _fitted(ffn: FfnMatrices, z_nD: jax.Array, y_nD: jax.Array) -> FfnMatrices:
    """The layer with `down` fitted anew to all tokens at once: the weighted ridge regression of y on the neurons, drawn
    to the present `down` instead of to 0."""
    h_nF = jax.nn.relu(z_nD @ ffn.gate.T) * (z_nD @ ffn.up.T)
    scaled = h_nF * _token_weights(y_nD)[:, None]
    gram = h_nF.T @ scaled
    ridge = 1e-3 * jnp.trace(gram) / len(gram)
    rest = scaled.T @ (y_nD - h_nF @ ffn.down.T)
    more = jax.scipy.linalg.solve(gram + ridge * jnp.eye(len(gram)), rest, assume_a="pos").T
    return ffn._replace(down=ffn.down + more)


@partial(jax.jit, static_argnums=3)
def _begin(ffn: FfnMatrices, z_nD: jax.Array, y_nD: jax.Array, options: LayerOptions) -> FfnMatrices:
    """The start of a training, without a step of the optimiser.

    SiLU's negative lobe, summed over all neurons, is nearly a linear map of the inputs. So the neurons that matter
    least become linear: their gate is a constant (`constant_direction`), `up` and `down` are the best map of that rank
    to what ReLU leaves over (reduced-rank regression). The gates of the others are shifted so that, all in all, a
    twentieth less than the share aimed at is active, since training raises it; `down` is fitted anew for all.
    """
    z_nD, y_nD, (width, inputs) = z_nD[:_SEARCHED], y_nD[:_SEARCHED], ffn.gate.shape
    count = min(round(options.linear * width), inputs)  # a linear map has no higher rank
    share = jnp.float32(min(max((0.95 * options.share * width - count) / (width - count), 0.01), 1.0))
    weight, constant = _token_weights(y_nD), constant_direction(z_nD)
    gate = ffn.gate - jnp.quantile(z_nD[:1024] @ ffn.gate.T, 1 - share) * constant[None]
    up, down = ffn.up, ffn.down
    if count:
        h_nF = jax.nn.relu(z_nD @ gate.T) * (z_nD @ up.T)
        value = (weight @ (h_nF * h_nF)) * jnp.sum(down * down, axis=0)
        least = jnp.argsort(value)[:count]
        # The map z -> rest of that rank with the least weighted squared error.
        scaled = z_nD * weight[:, None]
        gram = z_nD.T @ scaled
        ridge = 1e-3 * jnp.trace(gram) / len(gram)
        full = jnp.linalg.solve(gram + ridge * jnp.eye(len(gram)), scaled.T @ (y_nD - h_nF @ down.T))
        basis = jnp.linalg.eigh(full.T @ gram @ full)[1][:, ::-1][:, :count]
        gate = gate.at[least].set(constant[None])
        up, down = up.at[least].set((full @ basis).T), down.at[:, least].set(basis)
    return _fitted(FfnMatrices(gate, up, down), z_nD, y_nD)


def _error(found, y_nD, weight_n) -> jax.Array:
    size = jnp.sum(y_nD * y_nD, axis=1)
    wrong = jnp.sum(jnp.square(found - y_nD), axis=1)
    return jnp.sum(weight_n * wrong) / jnp.sum(weight_n * size)


@jax.jit
def _judge(ffn: FfnMatrices, original: FfnMatrices, z_nD: jax.Array) -> tuple[jax.Array, jax.Array]:
    y_nD, a_nF = _outputs(original, z_nD), jax.nn.relu(z_nD @ ffn.gate.T)
    found = (a_nF * (z_nD @ ffn.up.T)) @ ffn.down.T
    return _error(found, y_nD, _token_weights(y_nD)), jnp.mean((a_nF > 0).astype(jnp.float32))


def judge(ffn: FfnMatrices, original: FfnMatrices, z_nD: np.ndarray) -> Judged:
    return Judged(*map(float, _judge(ffn, original, jnp.asarray(z_nD, jnp.float32))))


class Rebuilder:
    """Rebuilds layers of one shape, from `tokens` inputs each, with one compiled step."""

    def __init__(self, options: LayerOptions, tokens: int):
        self.options, self.steps = options, max(1, round(options.passes * tokens / min(options.layer_batch, tokens)))
        up = max(1, self.steps // 20)
        rate = trapezoid(options.layer_rate, self.steps, up=up, down=max(self.steps - up, 1))
        self._optimiser = optax.adam(rate, b2=0.98)
        self._step = jax.jit(self._one_step, donate_argnums=(0,))

    def rebuild(self, original: FfnMatrices, z_nD: np.ndarray) -> FfnMatrices:
        """The layer that gives what `original` gives on inputs [n, D]."""
        z = jnp.asarray(z_nD, jnp.float32)
        y = _outputs(original, z)
        ffn = _begin(original, z, y, self.options)
        state = ReluState(ffn, self._optimiser.init(ffn), jnp.float32(1e-2), jnp.int32(0))
        rng, n, batch = np.random.default_rng(self.options.seed), len(z), min(self.options.layer_batch, len(z))
        order = np.concatenate([rng.permutation(n) for _ in range(-(-self.steps * batch // n))])
        batches = (jnp.asarray(order[s * batch : (s + 1) * batch]) for s in range(self.steps))
        state = train(state, batches, lambda state, rows: self._step(state, z, y, rows), steps=self.steps)
        return _fitted(state.ffn, z, y)

    def _one_step(self, state: ReluState, z_nD, y_nD, rows) -> tuple[ReluState, jax.Array]:
        z, y = z_nD[rows], y_nD[rows]
        weight = _token_weights(y)

        def loss(ffn: FfnMatrices):
            a = jax.nn.relu(z @ ffn.gate.T)
            error = _error((a * (z @ ffn.up.T)) @ ffn.down.T, y, weight)
            share = jnp.mean((a > 0).astype(jnp.float32))
            return error + state.pressure * jnp.mean(hoyer(a)), share

        grads, share = jax.grad(loss, has_aux=True)(state.ffn)
        ffn, optimiser = updated(self._optimiser, grads, state.optimiser, state.ffn)
        follow = jnp.exp(self.options.pressure * (share / self.options.share - 1))
        pressure = jnp.clip(state.pressure * follow, 1e-4, 3.0)
        return ReluState(ffn, optimiser, pressure, state.step + 1), share


# Distilled, as a whole.


MEASURES = {"hoyer": (hoyer, (1e-3, 0.1)), "count": (nearly_counted, (1e-3, 1.0))}
"""Measures of how many neurons are active, of activations [n, F] >= 0 to [n], and the least and most of their weight in
the loss. Beyond these, the weight holds the divergence up and the share stays where it is."""


@dataclass(frozen=True)
class DistillOptions:
    steps: Count = 400  # of the optimiser, one window each
    rows: Count = 512  # of a window
    # ids that a step's softmax runs over: those of its texts, and others drawn as often as they occur
    candidates: Count = 4096
    rate: Positive = 4e-4  # of Adam; rises over `warmup` steps and falls to 0 over the last `decay` of them
    warmup: Count = 10  # steps
    decay: Share = 0.8  # share of the steps
    clip: Positive = 1.0  # largest norm of a gradient
    feature: Annotated[float, Range(0)] = 0.2  # weight of the distance of last rows
    prompts: Annotated[float, Range(0)] = 1.0  # weight of a prompt's rows in the loss; an answer's have 1
    share: Share = 0.3  # of active neurons aimed at, over all layers
    follow: Positive = 0.5  # how fast the weight of the sparsity term follows the share
    # how much that weight is raised, for one step, by the step's own share. Without it the share swings around the one
    # aimed at, since the pressure that follows it comes too late
    react: Annotated[float, Range(0)] = 0.0
    measure: Literal["hoyer", "count"] = "hoyer"  # of that term, of `MEASURES`
    rounded: bool = True  # whether the matrices are rounded to Q4_0 in a step
    precision: Precision = "auto"  # of a step's products, of `training.layer.Precision`
    seed: Annotated[int, Internal()] = 0  # of the order of texts, and of the candidates


class DistillBatch(NamedTuple):
    """A step's texts, and the different ids int32[c] that its softmax runs over."""

    texts: PackedTexts
    ids: np.ndarray


class DistillLosses(NamedTuple):
    """A step's KL in nats, squared distance of the last rows, and share of active neurons."""

    divergence: jax.Array
    feature: jax.Array
    share: jax.Array


class Fidelity(NamedTuple):
    """The fidelity on texts that were not trained on, over the rows of their answers."""

    divergence: float  # mean KL(original, this model) in nats, over all ids
    # perplexity, original: of the texts' own next tokens, under this model and under the original
    perplexity: float
    original: float
    agreement: float  # share of rows whose argmax is the original's
    share: tuple[float, ...]  # active neurons, float[L]
    rows: int  # judged


def rounded_q4_0(w: jax.Array) -> jax.Array:
    """The values that Q4_0 keeps of a matrix [.., 32 n]: d (code - 8), d of the largest value of each 32 as float16."""
    blocks = w.reshape(*w.shape[:-1], -1, 32)
    high, low = blocks.max(axis=-1, keepdims=True), blocks.min(axis=-1, keepdims=True)
    d = jnp.where(high > -low, high, low) / -8
    inverse = jnp.where(d == 0, 0.0, 1.0 / jnp.where(d == 0, 1.0, d))
    code = jnp.clip(jnp.floor(blocks * inverse + 8.5), 0, 15)
    return (d.astype(jnp.float16).astype(jnp.float32) * (code - 8)).reshape(w.shape)


def straight_through(w: jax.Array) -> jax.Array:
    """The rounded matrix, with the gradient of the matrix itself."""
    return w + jax.lax.stop_gradient(rounded_q4_0(w) - w)


class Distiller:
    """Trains the FFNs of an original, step by step; a step depends on state and texts alone."""

    def __init__(self, model: Model, options: DistillOptions, *, act: Callable = jax.nn.relu):
        self.model, self.options, self.config, self._act = model, options, model.config, act
        self._frozen = frozen_layers(model, options.rows)
        self._head = dequantize(model.params.output)
        self._features = Features(model, (model.config.n_layers,))
        self._rate = rates(options.rate, options)
        self._optimiser = optax.chain(optax.clip_by_global_norm(options.clip), optax.adam(self._rate, b2=0.98))
        self._measure, self._weights = MEASURES[options.measure]
        self._step = jax.jit(self._one_step, donate_argnums=(0,))
        self._judge = jax.jit(self._fidelity)

    def start(self, ffn: FfnMatrices) -> ReluState:
        """The state before the first step; `ffn` has the leading axis L."""
        return ReluState(ffn, self._optimiser.init(ffn), jnp.float32(self._weights[1] / 10), jnp.int32(0))

    def rate(self, state: ReluState) -> dict[str, float]:
        return learning_rate(self._rate, state.step)

    def like(self) -> ReluState:
        """A state of the right shapes, to read a checkpoint by."""
        c = self.config
        shapes = ((c.n_layers, c.d_ff, c.d_model),) * 2 + ((c.n_layers, c.d_model, c.d_ff),)
        return jax.eval_shape(lambda: self.start(FfnMatrices(*(jnp.zeros(s, jnp.float32) for s in shapes))))

    def batches(self, texts: Sequence[Text], start: int) -> Iterator[DistillBatch]:
        """Windows and candidate ids from step `start` on without end; the texts come in another order each time."""
        rows = self.options.rows
        counts = np.bincount(np.concatenate([t.tokens for t in texts]), minlength=self.config.vocab_size) + 0.1
        plan = partial(fill_up, texts, rows=rows)
        for step, group in endless(plan, len(texts), seed=self.options.seed, start=start):
            packed = pack_texts(self._features.of([texts[i] for i in group]), rows)
            wanted, share = np.unique(packed.tokens), counts.copy()
            share[wanted] = 0
            rng = np.random.default_rng([self.options.seed, 1 << 20, step])
            more = max(min(self.options.candidates, len(counts)) - len(wanted), 0)
            # Gumbel's top k: a draw without replacement, in one pass over the vocabulary
            with np.errstate(divide="ignore"):
                score = np.log(share) + rng.gumbel(size=len(share))
            ids = np.concatenate([wanted, np.argpartition(-score, more)[:more]]).astype(np.int32)
            yield DistillBatch(packed, ids)

    def run(self, state: ReluState, texts: Sequence[Text], *, on_step: OnStep | None = None) -> ReluState:
        """The state after the last step; see `training_loop.train`."""
        batches = self.batches(texts, int(state.step))
        return train(state, batches, self.step, steps=self.options.steps, on_step=on_step)

    def step(self, state: ReluState, batch: DistillBatch) -> tuple[ReluState, DistillLosses]:
        """One step of the optimiser, and the losses before it."""
        return self._step(state, *jax.tree.map(jnp.asarray, batch))

    def judge(self, ffn: FfnMatrices, texts: Sequence[Text]) -> Fidelity:
        """Compares the model with the original on answers that it has not seen."""
        rows, total = self.options.rows, []
        for group in pack(texts, range(len(texts)), rows=rows, drafting=rows):
            chosen = [texts[i] for i in group]
            packed, counts = pack_texts(self._features.of(chosen), rows), np.zeros(rows, np.float32)
            at = 0
            for text in chosen:  # rows whose next token is the answer's, and is there
                counts[at + text.prompt - 1 : min(at + len(text.tokens), rows) - 1] = 1
                at += len(text.tokens)
            found = self._judge(ffn, jax.tree.map(jnp.asarray, packed), jnp.asarray(counts))
            total.append(jax.tree.map(np.asarray, found))
        kl, ours, theirs, same, active_L, count, seen = (sum(each[1:], each[0]) for each in zip(*total))
        return Fidelity(
            float(kl / count), float(np.exp(ours / count)), float(np.exp(theirs / count)), float(same / count),
            tuple(float(x) for x in active_L / seen), int(count),
        )  # fmt: skip

    def _rows(self, ffn: FfnMatrices, texts: PackedTexts, precision: Precision):
        """The model's last rows, normalised; mean sparsity measure; share of active neurons by layer."""
        valid = (texts.text >= 0).astype(jnp.float32)
        count = jnp.maximum(valid.sum(), 1.0)

        def watch(z, a):
            active = jnp.mean((a != 0).astype(jnp.float32), axis=1)
            return jnp.sum(valid * self._measure(a)) / count, jnp.sum(valid * active) / count

        if self.options.rounded:
            ffn = FfnMatrices(*map(straight_through, ffn))
        x_nD = embed_rows(self.model.params.embedding, texts.tokens) * jnp.float32(self.config.embedding_scale)
        how = {"act": self._act, "watch": watch, "precision": precision}
        y_nD, (dense_L, share_L) = forward(self.config, self._frozen, ffn, x_nD, texts, **how)
        return self._normed(y_nD), dense_L, share_L

    def _normed(self, y_nD: jax.Array) -> jax.Array:
        return rms_norm(y_nD, self.model.params.output_norm, self.config.norm_eps)

    def _one_step(self, state: ReluState, texts: PackedTexts, ids: jax.Array) -> tuple[ReluState, DistillLosses]:
        o = self.options
        valid = jnp.where(texts.text < 0, 0.0, jnp.where(texts.answer, 1.0, jnp.float32(o.prompts)))
        wanted = self._normed(texts.hidden)
        head = halved(self._head[ids], o.precision)
        log_p = jax.nn.log_softmax(times(wanted, head), axis=-1)
        count, size = jnp.maximum(valid.sum(), 1.0), jnp.sum(valid[:, None] * jnp.square(wanted))

        def loss(ffn: FfnMatrices):
            found, dense_L, share_L = self._rows(ffn, texts, o.precision)
            log_q = jax.nn.log_softmax(times(found, head), axis=-1)
            kl = jnp.sum(valid * jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)) / count
            feature = jnp.sum(valid[:, None] * jnp.square(found - wanted)) / size
            losses = DistillLosses(kl, feature, share_L.mean())
            now = state.pressure * jnp.exp(o.react * (jax.lax.stop_gradient(losses.share) / o.share - 1))
            now = jnp.clip(now, *self._weights)
            return kl + o.feature * feature + now * dense_L.mean(), losses

        grads, losses = jax.grad(loss, has_aux=True)(state.ffn)
        ffn, optimiser = updated(self._optimiser, grads, state.optimiser, state.ffn)
        pressure = jnp.clip(state.pressure * jnp.exp(o.follow * (losses.share / o.share - 1)), *self._weights)
        return ReluState(ffn, optimiser, pressure, state.step + 1), losses

    def _fidelity(self, ffn: FfnMatrices, texts: PackedTexts, counts_n: jax.Array):
        wanted = self._normed(texts.hidden)
        found, _, share_L = self._rows(ffn, texts, "float32")
        log_p, log_q = (jax.nn.log_softmax(x @ self._head.T, axis=-1) for x in (wanted, found))
        following = jnp.roll(texts.tokens, -1)[:, None]
        ours, theirs = (-jnp.take_along_axis(x, following, axis=1)[:, 0] for x in (log_q, log_p))
        kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
        same = (jnp.argmax(log_p, axis=-1) == jnp.argmax(log_q, axis=-1)).astype(jnp.float32)
        rows = jnp.sum((texts.text >= 0).astype(jnp.float32))
        return (*(jnp.sum(counts_n * x) for x in (kl, ours, theirs, same)), share_L * rows, counts_n.sum(), rows)


def write_relu(f: GGUFFile, ffn: FfnMatrices, path: str | os.PathLike[str], kind: GGML) -> Path:
    """Writes `f` with the FFNs of `ffn` (leading axis L) in `kind` and ReLU at the gate, as a plain GGUF that says its
    activation; all else keeps its bytes."""
    tensors = {t.name: NewTensor.from_file(t) for t in f.tensors.values()}
    for name, layers in ffn._asdict().items():
        for i, layer in enumerate(layers):
            full = f"blk.{i}.ffn_{name}.weight"
            tensors[full] = NewTensor.from_values(full, np.asarray(layer), kind)
    keys = {**f.metadata, ACTIVATION_KEY: "relu", "general.name": f"{f.get('general.name', 'str', f.path.stem)} ReLU"}
    return write_gguf(path, keys, list(tensors.values()))
