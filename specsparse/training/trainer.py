"""Training a drafter against the target's distribution on every stream of a draft, and judging it."""

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
from specsparse.kernels.reference.dense import rms_norm
from specsparse.support.options import Count, Internal, Positive, Range, Size
from specsparse.training.corpus import Text, Window, fill, pack, spans
from specsparse.training.form import Aim, Form, Frozen, Loss, id_counts
from specsparse.training.layer import Precision, halved, times
from specsparse.training.training_loop import OnStep, adamw, endless, learning_rate, rates, train, updated


@dataclass(frozen=True)
class TrainOptions:
    draft_vocab: Size = 8192  # N, ids it scores: the most frequent ones of the answers; 0 for all
    steps: Count = 1000  # of the optimiser
    windows: Count = 4  # of a step
    # rows, drafting: of a window, see `training.corpus.Window`
    rows: Count = 512
    drafting: Count = 224
    streams: Count = 2  # tokens of a draft that are trained
    loss: Loss | None = None  # at each row, of `Aim.loss`; None: dspark kl_tv, the others kl
    stream_weight: Positive = 0.8  # of each stream in the loss against the one before it
    # ids of the draft vocabulary that a step's softmax runs over, others in every step: those that follow its rows and
    # further ones, drawn as often as they occur; 0 for all of them, which costs more
    candidates: Size = 2048
    # learning_rate, weight_decay: of AdamW; the decay is of the matrices
    learning_rate: Positive = 6e-4
    weight_decay: Annotated[float, Range(0)] = 0.01
    clip: Positive = 1.0  # largest norm of a gradient
    warmup: Count = 20  # steps in which the rates rise from 0
    decay: Annotated[float, Range(0, 1)] = 0.5  # share of the steps, the last ones, in which they fall to 0, linearly
    # share of the steps, the last ones, that learn from rounds of decoding alone: target and drafter write a text again
    # together, and what the drafter proposed counts, up to its first wrong token (`rounds`), as Draft-OPD replays
    # refused positions (arXiv:2605.29343). Their softmax runs over the draft vocabulary
    replay: Annotated[float, Range(0, 1)] = 0.0
    # type of the matrices in the drafter's file. A step's loss is of the values that the file would hold, and its
    # gradient moves the float32 weights behind them (straight-through estimator, Bengio et al. 2013, arXiv:1308.3432)
    quantise: str = "Q8_0"
    precision: Precision = "auto"  # of a step's products, of `training.layer.Precision`
    seed: Annotated[int, Internal()] = 0  # of the order of texts


class TrainState(NamedTuple):
    """All that a restart needs; `ids` int32[N], ascending, is the draft vocabulary, `step` int32[] the steps done."""

    weights: Pytree
    optimiser: optax.OptState
    ids: jax.Array
    step: jax.Array


class HeadBatch(NamedTuple):
    """Windows [W, ...]; the columns int32[c], ascending, of the draft vocabulary that the softmax runs over; and
    whether only what is proposed in rounds counts."""

    windows: Window
    columns: np.ndarray
    replay: bool


class HeadLosses(NamedTuple):
    """What `Form.losses` gives and the share whose argmax is the target's, by stream, of the rows that count."""

    loss: jax.Array
    agreement: jax.Array


class Trainer:
    """Trains a drafter of one target; a step depends on state and data alone, so a restart changes nothing."""

    def __init__(self, model: Model, options: TrainOptions, form: Form):
        model.check_packed("training")
        self.model, self.options, self.form, self.config = model, options, form, model.config
        self._rate = rates(options.learning_rate, options)
        self._optimiser = adamw(self._rate, decay=options.weight_decay, clip=options.clip)
        self._step = jax.jit(self._one_step, donate_argnums=2, static_argnames="replay")

    def start(self, texts: Sequence[Text] | None) -> TrainState:
        """The state before the first step; without texts only its shapes are right, to read a checkpoint by."""
        if texts is None:
            weights, ids = self.form.zeros(), np.zeros(self.form.size(self.options.draft_vocab), np.int32)
        else:
            weights, ids = self.form.first(texts), self.form.ids(texts, self.options.draft_vocab)
        return TrainState(weights, self._optimiser.init(weights), jnp.asarray(ids), jnp.int32(0))

    def frozen(self, ids: np.ndarray) -> Frozen:
        params = self.model.params
        rows = dequantize(take_rows(params.output, np.asarray(ids)))
        tables = rope_tables(self.config.rope, self.options.rows, self.model.rope_factors)
        return Frozen(params.output_norm, rows, jnp.asarray(ids), *map(jnp.asarray, tables))

    def written(self, state: TrainState) -> Pytree:
        """The state's weights as the drafter's file would hold them, which a step and a judgement see."""
        return self.form.written(state.weights, self.options.quantise)

    def rate(self, state: TrainState) -> dict[str, float]:
        return learning_rate(self._rate, state.step)

    def batches(self, texts: Sequence[Text], ids: np.ndarray, start: int) -> Iterator[HeadBatch]:
        """The batches from step `start` on without end; the texts come in another order each time."""
        o = self.options
        if not any(spans(text)[1] > 0 for text in texts):
            raise UserError("no text to train on has an answer: raise train.tokens")
        share = id_counts(texts, self.config.vocab_size)[ids] + 1.0  # one more than the count, so that each may come
        share /= share.sum()
        replayed = o.steps - round(o.replay * o.steps)

        def plan(order: np.ndarray) -> list[list[list[int]]]:
            windows = pack(texts, order, rows=o.rows, drafting=o.drafting)
            whole = -(-len(windows) // o.windows) * o.windows
            windows = (windows * o.windows)[:whole]  # the last batch is filled up
            return [windows[at : at + o.windows] for at in range(0, whole, o.windows)]

        size = {"rows": o.rows, "drafting": o.drafting, "width": self.config.d_model}
        for step, groups in endless(plan, len(texts), seed=o.seed, start=start):
            read = iter(self.form.features.of([texts[i] for group in groups for i in group]))
            filled = [fill(list(itertools.islice(read, len(group))), **size) for group in groups]
            windows = jax.tree.map(lambda *each: np.stack(each), *filled)
            columns, replay = np.arange(len(ids), dtype=np.int32), step >= replayed
            count = len(ids) if replay else min(o.candidates or len(ids), len(ids))
            if count < len(ids):
                column = np.minimum(np.searchsorted(ids, windows.tokens), len(ids) - 1)
                wanted = np.unique(column[ids[column] == windows.tokens])[:count]
                rest = np.where(np.isin(columns, wanted), 0.0, share)
                rng = np.random.default_rng([o.seed, 1 << 20, step])
                more = rng.choice(len(ids), count - len(wanted), replace=False, p=rest / rest.sum())
                columns = np.sort(np.concatenate([wanted, more])).astype(np.int32)
            yield HeadBatch(windows, columns, replay)

    def run(self, state: TrainState, texts: Sequence[Text], *, on_step: OnStep | None = None) -> TrainState:
        """The state after the last step; see `training_loop.train`."""
        ids = np.asarray(state.ids)
        batches, step = self.batches(texts, ids, int(state.step)), partial(self.step, self.frozen(ids))
        return train(state, batches, step, steps=self.options.steps, on_step=on_step)

    def step(self, frozen: Frozen, state: TrainState, batch: HeadBatch) -> tuple[TrainState, HeadLosses]:
        """One step of the optimiser, and the losses before it."""
        read = jax.tree.map(jnp.asarray, (batch.windows, batch.columns))
        own = (state.weights, self.written(state), state.optimiser)
        weights, opt, losses = self._step(*own, frozen, self.model.params.embedding, *read, replay=batch.replay)
        return TrainState(weights, opt, state.ids, state.step + 1), losses

    def _one_step(
        self, weights, written, opt, frozen: Frozen, embedding: QTensor, windows: Window, columns, *, replay: bool
    ):
        """The gradients of the windows, one after the other, which keeps what is held of each in the cache."""
        o = self.options
        head_cD = halved(frozen.head[columns], o.precision)
        frozen = frozen._replace(head=head_cD, ids=frozen.ids[columns])
        stream_s = jnp.arange(o.streams)
        count_s = jnp.sum((windows.depth[:, None] >= stream_s[None, :, None]).astype(jnp.float32), axis=(0, 2))
        weight_s = jnp.asarray(o.stream_weight ** np.arange(o.streams), jnp.float32)
        weight_s = weight_s / weight_s.sum()

        def loss(weights, window: Window):
            counted_s, sums = self._losses(weights, frozen, embedding, window, replay=replay)
            # By all rows of a stream: how many count in a replay is known only after the last window.
            return jnp.sum(weight_s / jnp.maximum(count_s, 1.0) * sums.loss), (counted_s, sums)

        def add(so_far, window: Window):
            (_, found), grads = jax.value_and_grad(loss, has_aux=True)(written, window)
            return jax.tree.map(jnp.add, so_far, (grads, found)), None

        none = jnp.zeros_like(count_s)
        zero = jax.tree.map(jnp.zeros_like, weights), (none, HeadLosses(none, none))
        (grads, (counted_s, sums)), _ = jax.lax.scan(add, zero, windows)
        losses = HeadLosses(*(x / jnp.maximum(counted_s, 1.0) for x in sums))
        return *updated(self._optimiser, grads, opt, weights), losses

    def _losses(
        self, weights, frozen: Frozen, embedding: QTensor, window: Window, *, replay: bool
    ) -> tuple[jax.Array, HeadLosses]:
        """Rows that count, and sums over them, by stream."""
        o = self.options
        z_mN = times(rms_norm(window.after, frozen.output_norm, self.config.norm_eps), frozen.head)  # the target's own
        log_sum, best = jax.nn.logsumexp(z_mN, axis=-1), jnp.argmax(z_mN, axis=-1)
        p_mN = jnp.exp(z_mN - log_sum[:, None])
        aim = Aim(p_mN, log_sum - jnp.sum(p_mN * z_mN, axis=-1), o.loss or self.form.loss)
        drafts = self.form.losses(halved(weights, o.precision), frozen, embedding, window, o.streams, aim)
        counts_sm = jnp.stack([window.depth >= s for s in range(len(drafts))])
        if replay:
            counts_sm = rounds(right_tokens([y_mN for y_mN, _ in drafts], frozen, window), window.depth)[1]
        found = []
        for (y_mN, loss_m), counts in zip(drafts, counts_sm.astype(jnp.float32), strict=True):
            same = (jnp.take_along_axis(y_mN, best[:, None], axis=1)[:, 0] >= y_mN.max(axis=-1)).astype(jnp.float32)
            found.append(HeadLosses(jnp.sum(counts * loss_m), jnp.sum(counts * same)))
        return counts_sm.sum(axis=1).astype(jnp.float32), jax.tree.map(lambda *each: jnp.stack(each), *found)


def right_tokens(drafts: Sequence[jax.Array], frozen: Frozen, window: Window) -> jax.Array:
    """bool[s, m]: whether the argmax of each stream's logits [m, N] is the token of the text."""
    following = jnp.roll(window.tokens, -1)[window.rows]
    return jnp.stack([frozen.ids[jnp.argmax(logits, axis=-1)] == following for logits in drafts])


def rounds(right_sm: jax.Array, depth_m: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The places where decoding begins its drafts, and its proposals there, if target and drafter wrote the texts of a
    window.

    Speculation does not change a text, so its rounds follow from which tokens are right. One begins at the first
    drafting row of a text, the next one behind what verification has accepted and the token that it adds.

    Returns:
        bool[m], rows at which a draft begins; and bool[s, m], which rows it is in, in which stream, up to its first
        wrong token: what comes after that hangs on a text that is never written.
    """
    places = range(len(right_sm))
    along = [jnp.roll(right_sm[s], -s) & (jnp.roll(depth_m, -s) == depth_m + s) & (depth_m >= 0) for s in places]
    accepted_m = jnp.cumprod(jnp.stack(along).astype(jnp.int32), axis=0).sum(axis=0)

    def walk(behind, row):
        at, depth, accepted = row
        begins = (depth == 0) | ((depth > 0) & (at == behind))
        return jnp.where(begins, at + accepted + 1, behind), begins

    at_m = jnp.arange(len(depth_m), dtype=jnp.int32)
    _, begins_m = jax.lax.scan(walk, jnp.int32(-1), (at_m, depth_m, accepted_m))
    return begins_m, jnp.stack([jnp.roll(begins_m & (accepted_m >= s), s) & (depth_m >= s) for s in places])


@dataclass(frozen=True)
class DraftQuality:
    """Drafts of gamma argmax tokens begun at positions of some greedy answers, without decoding."""

    tokens: int  # positions a draft was begun at
    # for each place in the draft, how often its token is the answer's if those before it were
    agreement: tuple[float, ...]
    acceptance: float  # mean acceptance length, bonus token included

    @classmethod
    def from_reached(cls, reach: np.ndarray) -> "DraftQuality":
        """The quality that the numbers of `reached` stand for."""
        agreement = tuple(float(b / a) if a else 0.0 for a, b in itertools.pairwise(reach))
        return cls(int(reach[0]), agreement, float(1 + reach[1:].sum() / max(reach[0], 1)))


class Qualities(NamedTuple):
    """Drafts begun at every position equally often; and where decoding begins them, when the round before has ended."""

    every: DraftQuality
    live: DraftQuality


def evaluator(
    model: Model, form: Form, texts: Sequence[Text], *, gamma: int, shape: tuple[int, int]
) -> Callable[[Pytree, Frozen], Qualities]:
    """Judges drafts of `gamma` tokens on greedy answers, as often as it is called, with the weights and the target's
    part; `shape` is (rows, drafting rows) of a window. UserError: no answer is longer than gamma."""
    rows, drafting = shape

    @jax.jit
    def drafted(weights: Pytree, frozen: Frozen, embedding: QTensor, window: Window) -> tuple[jax.Array, jax.Array]:
        right_sm = right_tokens(form.logits(weights, frozen, embedding, window, gamma), frozen, window)
        return right_sm, rounds(right_sm, window.depth)[0]

    texts, size = form.features.of(texts), {"rows": rows, "drafting": drafting}
    groups = pack(texts, range(len(texts)), **size)
    windows = [fill([texts[i] for i in group], **size, width=model.config.d_model) for group in groups]

    def judge(weights: Pytree, frozen: Frozen) -> Qualities:
        every, live = np.zeros(gamma + 1), np.zeros(gamma + 1)
        for window in windows:
            found = drafted(weights, frozen, model.params.embedding, jax.tree.map(jnp.asarray, window))
            right_sm, begins_m, depth_m = map(np.asarray, (*found, window.depth))
            every += reached(right_sm, depth_m, depth_m >= 0)
            live += reached(right_sm, depth_m, begins_m)
        return Qualities(DraftQuality.from_reached(every), DraftQuality.from_reached(live))

    depths = [np.asarray(window.depth) for window in windows]
    if not any(reached(np.ones((gamma, drafting)), depth_m, depth_m >= 0)[0] for depth_m in depths):
        raise UserError(f"no held-out answer is longer than gamma={gamma} tokens: raise train.answer")
    return judge


def reached(right_sm: np.ndarray, depth_m: np.ndarray, begins_m: np.ndarray) -> np.ndarray:
    """float[gamma + 1]: drafts begun, and those of them whose first s tokens are right.

    `right` is bool[gamma, m], `depth` int[m], and `begins` bool[m], the rows at which drafts may begin. The draft that
    begins at row r has its token s in stream s at row r + s - 1. Drafts that the text's end cuts off do
    not count, nor does the last row of a text, whose next token is not kept.
    """
    gamma, m = right_sm.shape
    begun = [r for r in range(m - gamma) if begins_m[r] and depth_m[r + gamma] == depth_m[r] + gamma]
    right = [np.cumprod(right_sm[np.arange(gamma), r + np.arange(gamma)]) for r in begun]
    return np.concatenate([[float(len(begun))], np.sum(right, axis=0) if begun else np.zeros(gamma)])
