"""The FFNs of a whole model, trained until it says what the original says: they alone change.

The loss is KL(original, this model) over candidate ids, plus the squared distance of the two normalised last rows, plus
a measure of how many neurons are active whose weight follows their share (ProSparse, Song et al., arXiv:2402.13516; see
`MEASURES`). The original's last rows are stored with the texts: no pass of it is needed.
The matrices are rounded to Q4_0 in every step, and the gradient passes straight through (Bengio et al.,
arXiv:1308.3432): what is trained is what the file holds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specsparse.engine.model import Model
from specsparse.kernels.packing.dequant import dequantize, embed_rows
from specsparse.support.options import Count, Internal, Positive, Range, Share
from specsparse.training import ffn_model
from specsparse.training.data import Text
from specsparse.training.features import Features
from specsparse.training.ffn_model import FfnMatrices, PackedTexts
from specsparse.training.layer import rms_norm
from specsparse.training.loop import OnStep, train, trapezoid, updated
from specsparse.training.products import Precision, halved, times
from specsparse.training.reconstruct import hoyer, nearly_counted
from specsparse.training.windows import fill_up, pack


class ActiveMeasure(NamedTuple):
    """Of how many neurons are active.

    Attributes:
        of: activations [n, F] >= 0 to [n].
        weights: least and most of its weight in the loss: beyond, it holds the divergence up and the share stays where
            it is. The first step's is a tenth of the most.
    """

    of: Callable
    weights: tuple[float, float]


MEASURES = {"hoyer": ActiveMeasure(hoyer, (1e-3, 0.1)), "count": ActiveMeasure(nearly_counted, (1e-3, 1.0))}


@dataclass(frozen=True)
class DistillOptions:
    """How a model is distilled.

    Attributes:
        steps: of the optimiser, one window each.
        rows: of a window.
        candidates: ids that a step's softmax runs over: those of its texts, and others drawn as often as they occur.
        rate: of Adam; rises over `warmup` steps and falls to 0 over the last `decay` of them.
        warmup: steps.
        decay: share of the steps.
        clip: largest norm of a gradient.
        feature: weight of the distance of last rows.
        prompts: weight of a prompt's rows in the loss; an answer's have 1.
        share: of active neurons aimed at, over all layers.
        follow: how fast the weight of the sparsity term follows the share.
        react: how much that weight is raised, for one step, by the step's own share. Without it the share swings
            around the one aimed at, since what follows comes too late.
        measure: of that term, of `MEASURES`.
        rounded: whether the matrices are rounded to Q4_0 in a step.
        precision: of a step's products, of `training.products.Precision`.
        seed: of the order of texts, and of the candidates.
    """

    steps: Count = 400
    rows: Count = 512
    candidates: Count = 4096
    rate: Positive = 4e-4
    warmup: Count = 10
    decay: Share = 0.8
    clip: Positive = 1.0
    feature: Annotated[float, Range(0)] = 0.2
    prompts: Annotated[float, Range(0)] = 1.0
    share: Share = 0.3
    follow: Positive = 0.5
    react: Annotated[float, Range(0)] = 0.0
    measure: Literal["hoyer", "count"] = "hoyer"
    rounded: bool = True
    precision: Precision = "auto"
    seed: Annotated[int, Internal()] = 0


class State(NamedTuple):
    """What a restart needs.

    Attributes:
        ffn: of all layers, before rounding.
        optimiser: Adam's.
        pressure: f32[], the weight of the sparsity term.
        step: int32[], steps done.
    """

    ffn: FfnMatrices
    optimiser: optax.OptState
    pressure: jax.Array
    step: jax.Array


class DistillBatch(NamedTuple):
    """What a step reads: texts, and int32[c], different ids that the softmax runs over."""

    texts: PackedTexts
    ids: np.ndarray


class DistillLosses(NamedTuple):
    """Of a step: KL in nats, squared distance of the last rows, share of active neurons."""

    divergence: jax.Array
    feature: jax.Array
    share: jax.Array


class Fidelity(NamedTuple):
    """On texts that were not trained on, over the rows of their answers.

    Attributes:
        divergence: mean KL(original, this model) in nats, over all ids.
        perplexity, original: of the texts' own next tokens, under this model and under the original.
        agreement: share of rows whose argmax is the original's.
        share: active neurons, float[L].
        rows: judged.
    """

    divergence: float
    perplexity: float
    original: float
    agreement: float
    share: tuple[float, ...]
    rows: int


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
    """Trains the FFNs of one model, step by step; a step depends on state and texts alone.

    Args:
        model: the original.
        options: how.
        act: of the gate.
    """

    def __init__(self, model: Model, options: DistillOptions, *, act: Callable = jax.nn.relu):
        self.model, self.options, self.config, self._act = model, options, model.config, act
        self._frozen = ffn_model.frozen_layers(model, options.rows)
        self._head = dequantize(model.params.output)
        self._features = Features(model, (model.config.n_layers,))
        self._optimiser, self._measure = _optimiser(options), MEASURES[options.measure]
        self._step = jax.jit(self._one_step, donate_argnums=(0,))
        self._judge = jax.jit(self._fidelity)

    def start(self, ffn: FfnMatrices) -> State:
        """The state before the first step; `ffn` has the leading axis L."""
        pressure = jnp.float32(self._measure.weights[1] / 10)
        return State(ffn, self._optimiser.init(ffn), pressure, jnp.zeros((), jnp.int32))

    def like(self) -> State:
        """A state of the right shapes, to read a checkpoint by."""
        c = self.config
        shapes = ((c.n_layers, c.d_ff, c.d_model),) * 2 + ((c.n_layers, c.d_model, c.d_ff),)
        return jax.eval_shape(self.start, FfnMatrices(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)))

    def batches(self, texts: Sequence[Text], start: int) -> Iterator[DistillBatch]:
        """Windows and candidate ids from step `start` on without end; the texts come in another order each time."""
        rows, epoch, done = self.options.rows, 0, 0
        counts = sum(np.bincount(t.tokens, minlength=self.config.vocab_size) for t in texts) + 0.1
        while True:
            order = np.random.default_rng([self.options.seed, epoch]).permutation(len(texts))
            for group in fill_up(texts, order, rows=rows):
                if done >= start:
                    packed = ffn_model.pack_texts(self._features.of([texts[i] for i in group]), rows)
                    yield DistillBatch(packed, self._candidates(packed.tokens, counts, done))
                done += 1
            epoch += 1

    def _candidates(self, tokens: np.ndarray, counts: np.ndarray, step: int) -> np.ndarray:
        wanted = np.unique(tokens)
        share = counts.copy()
        share[wanted] = 0
        rng = np.random.default_rng([self.options.seed, 1 << 20, step])
        more = max(min(self.options.candidates, len(counts)) - len(wanted), 0)
        # Gumbel's top k: a draw without replacement, in one pass over the vocabulary
        with np.errstate(divide="ignore"):
            score = np.log(share) + rng.gumbel(size=len(share))
        return np.concatenate([wanted, np.argpartition(-score, more)[:more]]).astype(np.int32)

    def run(self, state: State, texts: Sequence[Text], *, on_step: OnStep | None = None) -> State:
        """The state after the last step; see `training.loop.train`."""
        batches = self.batches(texts, int(state.step))
        return train(state, batches, self.step, steps=self.options.steps, on_step=on_step)

    def step(self, state: State, batch: DistillBatch) -> tuple[State, DistillLosses]:
        """One step of the optimiser, and the losses before it."""
        return self._step(state, *jax.tree.map(jnp.asarray, batch))

    def judge(self, ffn: FfnMatrices, texts: Sequence[Text]) -> Fidelity:
        """How near the model is to the original on answers that it has not seen."""
        rows = self.options.rows
        groups = pack(texts, range(len(texts)), rows=rows, drafting=rows)
        total = None
        for group in groups:
            chosen = [texts[i] for i in group]
            packed, counts = ffn_model.pack_texts(self._features.of(chosen), rows), np.zeros(rows, np.float32)
            at = 0
            for text in chosen:  # rows whose next token is the answer's, and is there
                counts[at + text.prompt - 1 : min(at + len(text.tokens), rows) - 1] = 1
                at += len(text.tokens)
            found = self._judge(ffn, jax.tree.map(jnp.asarray, packed), jnp.asarray(counts))
            found = jax.tree.map(np.asarray, found)
            total = found if total is None else jax.tree.map(np.add, total, found)
        kl, ours, theirs, same, active_L, count, seen = total
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
            return jnp.sum(valid * self._measure.of(a)) / count, jnp.sum(valid * active) / count

        if self.options.rounded:
            ffn = FfnMatrices(*map(straight_through, ffn))
        x_nD = embed_rows(self.model.params.embedding, texts.tokens)
        y_nD, (dense_L, share_L) = ffn_model.forward(
            self.config, self._frozen, ffn, x_nD, texts, self._act, watch, precision=precision
        )
        return self._normed(y_nD), dense_L, share_L

    def _normed(self, y_nD: jax.Array) -> jax.Array:
        return rms_norm(y_nD, self.model.params.output_norm, self.config.norm_eps)

    def _one_step(self, state: State, texts: PackedTexts, ids: jax.Array) -> tuple[State, DistillLosses]:
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
            now = jnp.clip(now, *self._measure.weights)
            return kl + o.feature * feature + now * dense_L.mean(), losses

        grads, losses = jax.grad(loss, has_aux=True)(state.ffn)
        ffn, optimiser = updated(self._optimiser, grads, state.optimiser, state.ffn)
        pressure = jnp.clip(state.pressure * jnp.exp(o.follow * (losses.share / o.share - 1)), *self._measure.weights)
        return State(ffn, optimiser, pressure, state.step + 1), losses

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


def _optimiser(options: DistillOptions) -> optax.GradientTransformation:
    """Adam under a trapezoid of rates."""
    down = max(1, round(options.decay * options.steps))
    rate = trapezoid(options.rate, options.steps, up=options.warmup, down=down)
    return optax.chain(optax.clip_by_global_norm(options.clip), optax.adam(rate, b2=0.98))
