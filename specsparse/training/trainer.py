"""Training a drafter by the divergence from the target's distribution on every stream of a draft, and judging it."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.engine.rope import rope_tables
from specsparse.errors import UserError
from specsparse.kernels import QTensor
from specsparse.kernels.packing.dequant import dequantize
from specsparse.kernels.qtensor import take_rows
from specsparse.support.options import Count, Internal, Positive, Range, Size
from specsparse.training.corpus import Features, Text, Window, fill, pack, spans
from specsparse.training.form import Form, Frozen, id_counts
from specsparse.training.layer import Precision, halved, rms_norm, times
from specsparse.training.training_loop import OnStep, endless, train, trapezoid, updated


@dataclass(frozen=True)
class TrainOptions:
    """How a drafter is trained.

    Attributes:
        draft_vocab: N, ids it scores: the most frequent ones of the answers; 0 for all.
        steps: of the optimiser.
        windows: of a step.
        rows, drafting: of a window, see `training.corpus.Window`.
        streams: tokens of a draft that are trained.
        stream_weight: of each stream in the loss against the one before it.
        candidates: ids of the draft vocabulary that a step's softmax runs over, others in every step: those that
            follow its rows and further ones, drawn as often as they occur; 0 for all of them, which costs more.
        learning_rate, weight_decay: of AdamW; the decay is of the matrices.
        clip: largest norm of a gradient.
        warmup: steps in which the rates rise from 0.
        decay: share of the steps, the last ones, in which they fall to 0, linearly.
        precision: of a step's products, of `training.layer.Precision`.
        seed: of the order of texts.
    """

    draft_vocab: Size = 8192
    steps: Count = 1000
    windows: Count = 4
    rows: Count = 512
    drafting: Count = 224
    streams: Count = 2
    stream_weight: Positive = 0.8
    candidates: Size = 2048
    learning_rate: Positive = 6e-4
    weight_decay: Annotated[float, Range(0)] = 0.01
    clip: Positive = 1.0
    warmup: Count = 20
    decay: Annotated[float, Range(0, 1)] = 0.5
    precision: Precision = "auto"
    seed: Annotated[int, Internal()] = 0


class TrainState(NamedTuple):
    """All that a restart needs; `ids` int32[N], ascending, is the draft vocabulary, `step` int32[] the steps done."""

    weights: Pytree
    optimiser: optax.OptState
    ids: jax.Array
    step: jax.Array


class HeadBatch(NamedTuple):
    """Windows [W, ...], and the columns int32[c], ascending, of the draft vocabulary that the softmax runs over."""

    windows: Window
    columns: np.ndarray


class HeadLosses(NamedTuple):
    """KL(target, head) in nats and the share of rows whose argmax is the target's, by stream."""

    loss: jax.Array
    agreement: jax.Array


class Trainer:
    """Trains a drafter of one target; a step depends on state and data alone, so a restart changes nothing."""

    def __init__(self, model: Model, options: TrainOptions, form: Form):
        model.check_packed("training")
        self.model, self.options, self.form, self.config = model, options, form, model.config
        # AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) under a trapezoid of rates.
        down = max(1, round(options.decay * options.steps))
        self._rate = trapezoid(options.learning_rate, options.steps, up=options.warmup, down=down)
        matrices = partial(jax.tree.map, lambda x: x.ndim > 1)
        adamw = optax.adamw(self._rate, b2=0.98, weight_decay=options.weight_decay, mask=matrices)
        self._optimiser = optax.chain(optax.clip_by_global_norm(options.clip), adamw)
        self._step = jax.jit(self._one_step, donate_argnums=(0, 1))
        self._features = Features(model, form.layers)

    def start(self, texts: Sequence[Text] | None) -> TrainState:
        """The state before the first step; without texts only its shapes are right, to read a checkpoint by."""
        if texts is None:
            weights, ids = self.form.zeros(), np.zeros(self.form.size(self.options.draft_vocab), np.int32)
        else:
            weights, ids = self.form.first(texts), self.form.ids(texts, self.options.draft_vocab)
        return TrainState(weights, self._optimiser.init(weights), jnp.asarray(ids), jnp.int32(0))

    def frozen(self, ids: np.ndarray) -> Frozen:
        """The target's part for that draft vocabulary."""
        params = self.model.params
        rows = dequantize(take_rows(params.output, np.asarray(ids)))
        tables = rope_tables(self.config.rope, self.options.rows, self.model.rope_factors)
        return Frozen(params.output_norm, rows, jnp.asarray(ids), *map(jnp.asarray, tables))

    def rate(self, state: TrainState) -> dict[str, float]:
        """The learning rate of the state's last step, for a curve."""
        return {"learning_rate": float(np.asarray(self._rate(max(int(state.step) - 1, 0))))}

    def batches(self, texts: Sequence[Text], ids: np.ndarray, start: int) -> Iterator[HeadBatch]:
        """The batches from step `start` on without end; the texts come in another order each time."""
        o = self.options
        if not any(spans(text)[1] > 0 for text in texts):
            raise UserError("no text to train on has an answer: raise train.tokens")
        share = id_counts(texts, self.config.vocab_size)[ids] + 1.0  # one more than the count, so that each may come
        share /= share.sum()
        count = min(o.candidates or len(ids), len(ids))

        def plan(order: np.ndarray) -> list[list[list[int]]]:
            windows = pack(texts, order, rows=o.rows, drafting=o.drafting)
            whole = -(-len(windows) // o.windows) * o.windows
            windows = (windows * o.windows)[:whole]  # the last batch is filled up
            return [windows[at : at + o.windows] for at in range(0, whole, o.windows)]

        for step, groups in endless(plan, len(texts), seed=o.seed, start=start):
            read = iter(self._features.of([texts[i] for group in groups for i in group]))
            size = {"rows": o.rows, "drafting": o.drafting, "width": self.config.d_model}
            filled = [fill([next(read) for _ in group], **size) for group in groups]
            windows = jax.tree.map(lambda *each: np.stack(each), *filled)
            columns = np.arange(len(ids), dtype=np.int32)
            if count < len(ids):
                column = np.minimum(np.searchsorted(ids, windows.tokens), len(ids) - 1)
                wanted = np.unique(column[ids[column] == windows.tokens])[:count]
                rest = np.where(np.isin(columns, wanted), 0.0, share)
                rng = np.random.default_rng([o.seed, 1 << 20, step])
                more = rng.choice(len(ids), count - len(wanted), replace=False, p=rest / rest.sum())
                columns = np.sort(np.concatenate([wanted, more])).astype(np.int32)
            yield HeadBatch(windows, columns)

    def run(self, state: TrainState, texts: Sequence[Text], *, on_step: OnStep | None = None) -> TrainState:
        """The state after the last step; see `training_loop.train`."""
        ids = np.asarray(state.ids)
        batches, step = self.batches(texts, ids, int(state.step)), partial(self.step, self.frozen(ids))
        return train(state, batches, step, steps=self.options.steps, on_step=on_step)

    def step(self, frozen: Frozen, state: TrainState, batch: HeadBatch) -> tuple[TrainState, HeadLosses]:
        """One step of the optimiser, and the losses before it."""
        weights, opt, losses = self._step(
            state.weights, state.optimiser, frozen, self.model.params.embedding, jax.tree.map(jnp.asarray, batch)
        )
        return TrainState(weights, opt, state.ids, state.step + 1), losses

    def _one_step(self, weights, opt, frozen: Frozen, embedding: QTensor, batch: HeadBatch):
        """The gradients of the windows, one after the other, which keeps what is held of each in the cache."""
        o, windows = self.options, batch.windows
        head_cD = halved(frozen.head[batch.columns], o.precision)
        frozen = frozen._replace(head=head_cD, ids=frozen.ids[batch.columns])
        stream_s = jnp.arange(o.streams)
        count_s = jnp.sum((windows.depth[:, None] >= stream_s[None, :, None]).astype(jnp.float32), axis=(0, 2))
        count_s = jnp.maximum(count_s, 1.0)
        weight_s = jnp.asarray(o.stream_weight ** np.arange(o.streams), jnp.float32)
        weight_s = weight_s / weight_s.sum()

        def loss(weights, window: Window):
            losses = self._losses(weights, frozen, embedding, window)
            losses = HeadLosses(*(x / count_s for x in losses))
            return jnp.sum(weight_s * losses.loss), losses

        def add(so_far, window: Window):
            (_, losses), grads = jax.value_and_grad(loss, has_aux=True)(weights, window)
            return jax.tree.map(jnp.add, so_far, (grads, losses)), None

        zero = jax.tree.map(jnp.zeros_like, weights), HeadLosses(jnp.zeros_like(count_s), jnp.zeros_like(count_s))
        (grads, losses), _ = jax.lax.scan(add, zero, windows)
        return *updated(self._optimiser, grads, opt, weights), losses

    def _losses(self, weights, frozen: Frozen, embedding: QTensor, window: Window) -> HeadLosses:
        o = self.options
        drafts = self.form.logits(halved(weights, o.precision), frozen, embedding, window, o.streams)
        z_mN = times(rms_norm(window.after, frozen.output_norm, self.config.norm_eps), frozen.head)  # the target's own
        log_sum, best = jax.nn.logsumexp(z_mN, axis=-1), jnp.argmax(z_mN, axis=-1)
        p_mN = jnp.exp(z_mN - log_sum[:, None])
        entropy = log_sum - jnp.sum(p_mN * z_mN, axis=-1)
        found = []
        for s, y_mN in enumerate(drafts):
            counts = (window.depth >= s).astype(jnp.float32)
            same = (jnp.take_along_axis(y_mN, best[:, None], axis=1)[:, 0] >= y_mN.max(axis=-1)).astype(jnp.float32)
            divergence = jax.nn.logsumexp(y_mN, axis=-1) - jnp.sum(p_mN * y_mN, axis=-1) - entropy
            found.append(HeadLosses(jnp.sum(counts * divergence), jnp.sum(counts * same)))
        return jax.tree.map(lambda *each: jnp.stack(each), *found)


@dataclass(frozen=True)
class DraftQuality:
    """Drafts of gamma argmax tokens begun at every position of some greedy answers, without decoding.

    Attributes:
        tokens: positions a draft was begun at.
        agreement: for each place in the draft, how often its token is the answer's if those before it were.
        acceptance: mean acceptance length, bonus token included, if rounds began at every position equally often.
    """

    tokens: int
    agreement: tuple[float, ...]
    acceptance: float


def evaluator(
    model: Model, form: Form, texts: Sequence[Text], *, gamma: int, shape: tuple[int, int]
) -> Callable[[Pytree, Frozen], DraftQuality]:
    """Judges drafts of `gamma` tokens on greedy answers, as often as it is called, with the weights and the target's
    part; `shape` is (rows, drafting rows) of a window.

    Raises:
        UserError: no answer is longer than gamma.
    """
    rows, drafting = shape

    @jax.jit
    def right(weights: Pytree, frozen: Frozen, embedding: QTensor, window: Window) -> jax.Array:
        """bool[gamma, m]: whether each stream's argmax at a drafting row is the token of the text."""
        following = jnp.roll(window.tokens, -1)[window.rows]
        found = form.logits(weights, frozen, embedding, window, gamma)
        return jnp.stack([frozen.ids[jnp.argmax(logits, axis=-1)] == following for logits in found])

    texts, size = Features(model, form.layers).of(texts), {"rows": rows, "drafting": drafting}
    groups = pack(texts, range(len(texts)), **size)
    windows = [fill([texts[i] for i in group], **size, width=model.config.d_model) for group in groups]

    def judge(weights: Pytree, frozen: Frozen) -> DraftQuality:
        reach = np.zeros(gamma + 1)
        for window in windows:
            right_sm = right(weights, frozen, model.params.embedding, jax.tree.map(jnp.asarray, window))
            reach += reached(np.asarray(right_sm), np.asarray(window.depth))
        agreement = tuple(float(b / a) if a else 0.0 for a, b in itertools.pairwise(reach))
        return DraftQuality(int(reach[0]), agreement, float(1 + reach[1:].sum() / reach[0]))

    if not sum(reached(np.ones((gamma, drafting)), np.asarray(window.depth))[0] for window in windows):
        raise UserError(f"no held-out answer is longer than gamma={gamma} tokens: raise train.answer")
    return judge


def reached(right_sm: np.ndarray, depth_m: np.ndarray) -> np.ndarray:
    """float[gamma + 1]: drafts begun, and those of them whose first s tokens are right.

    The draft that begins at row r has its token s in stream s at row r + s - 1. Drafts that the text's end cuts off do
    not count, nor does the last row of a text, whose next token is not kept.
    """
    gamma, m = right_sm.shape
    begun = [r for r in range(m - gamma) if depth_m[r] >= 0 and depth_m[r + gamma] == depth_m[r] + gamma]
    right = [np.cumprod(right_sm[np.arange(gamma), r + np.arange(gamma)]) for r in begun]
    return np.concatenate([[float(len(begun))], np.sum(right, axis=0) if begun else np.zeros(gamma)])
