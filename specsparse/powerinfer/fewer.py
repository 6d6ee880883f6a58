"""Models that compute fewer neurons of a dense model's weights, gated by a predictor or to draft for the model, and how
many neurons the rows of a pass read together.

A draft shares the model's own cache, and the model itself verifies it, so that nothing is lost but time. It is one of
three:

    hot    one set of neurons for all tokens, as `predictors.rules.Hot` finds it, packed as a smaller dense FFN
    gate   for each token the neurons whose |act(gate)| is largest (CATS, arXiv:2404.08763); a dense model's
    own    the model's own predictors with a higher threshold; a sparse model's
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType

from specsparse.engine.llama import dense_ffn, make_forward
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Params
from specsparse.errors import UserError, refuse
from specsparse.kernels import QTensor, SkipWeights
from specsparse.kernels.packing.dequant import dequantize, pack_float
from specsparse.kernels.packing.pack import pack_qtensor
from specsparse.kernels.qtensor import BLOCK, take_rows
from specsparse.powerinfer import zero_skip
from specsparse.powerinfer.modes import PREDICTED
from specsparse.powerinfer.sparse_ffn import SparseWeights, by_gate, make_ffn, maskable, sparse_params
from specsparse.predictors.base import FFN, Predictor, gate_matrix
from specsparse.predictors.collect import collect, self_generated, watched, windows
from specsparse.predictors.evaluate import fit_layers, matrices
from specsparse.predictors.rules import GateThreshold, Hot, Oracle, UnionCap
from specsparse.predictors.rules import Sequence as OfPrompt
from specsparse.support.options import options_of

SetRule = TypeVar("SetRule", bound=Hot | OfPrompt)
"""A rule that keeps one set of neurons for all tokens."""
_WINDOW = 128  # tokens of a window of the text that neurons are chosen by


def gated(
    model: Model, predictor: Predictor, weights: Sequence[Pytree], *, down_type: str | None = None,
    masked: bool | None = None,
) -> Model:  # fmt: skip
    """The model that computes the neurons which `predictor` keeps.

    It shares all matrices with `model` and has the FFN's once more, as rows of neurons; the oracle of a ReLU model
    whose matrices allow it skips the zeros of a dense pass instead (`powerinfer.zero_skip`). UserError: a model on a
    mesh, or whose matrices are kept in another form; `masked` of a model or a predictor that it does not serve.

    Args:
        model: with dense matrices.
        predictor: of the model's FFN.
        weights: of each layer, from `predictor.fit` or from a file.
        down_type: of the transposed down projection, see `sparse_ffn.sparse_params`. By default floats stay as
            they are and codes become Q8_0: their blocks do not survive the transposition, eight bits lose next to
            nothing, and floats are twice as long.
        masked: whether the FFN is the dense one with 0 for the neurons that a row does not keep, nothing rounded again:
            each pass reads the neurons one by one or all of them, whichever is faster, with equal bits. None: wherever
            it can be, unless `down_type` is given.
    """
    model.check_whole(f"predictor={predictor.name}")
    model.check_packed(f"predictor={predictor.name}")
    config, kernels, ffn = model.config, model.kernels, None
    can_mask = maskable(model.params, config, kernels, predictor)
    masked = can_mask and down_type is None if masked is None else masked
    refuse({
        "down_type is of rows of neurons: leave it or masked out": masked and down_type is not None,
        f"ffn.masked=true with predictor={predictor.name}: masks are those of mlp, svd or signbit on gated Q4_0 "
        "models and native kernels; leave it out":
            masked and not can_mask,
    })  # fmt: skip
    if down_type is None and isinstance(predictor, Oracle) and zero_skip.in_params(model.params, config, kernels):
        params = zero_skip.skipping(model.params)
    else:
        params = by_neuron(model.params, weights, down_type=down_type, masked=masked)
        ffn = make_ffn(config, kernels, predictor)
    own = {name: getattr(predictor, name) for name in options_of(type(predictor))}
    rule = f"{predictor.name}({', '.join(f'{key}={value}' for key, value in own.items() if value is not None)})"
    rule += " on dense matrices" * masked
    return dataclasses.replace(
        model, params=params, forward=make_forward(config, kernels, ffn), ffn=PREDICTED, rule=rule
    )


def by_neuron(params: Params, weights: Sequence[Pytree], *, down_type: str | None = None, masked: bool) -> Params:
    """The parameters of `gated`, of a dense model's and the predictor's weights of each layer."""
    if down_type is None and not params.layers[0].dense.down.layout.is_float:
        down_type = "Q8_0"
    return sparse_params(params, weights, down_type=down_type, keep_dense=True, masked=masked)


def bytes_read(model: Model, predictor: Predictor) -> tuple[int, int]:
    """Bytes that the FFNs of a gated model read in a pass, all layers: (fixed, in proportion to the neurons kept).

    A predictor that decides by the gate reads all of it; one that caps such a predictor reads the dense gate first. A
    model of one set reads all of its matrices. One that skips zeros or lays a mask reads
    more, if a layer's dense matrices are faster.
    """
    capped = isinstance(predictor, UnionCap) and by_gate(predictor.inner)
    own = rest = 0
    for layer in model.params.layers:
        if isinstance(layer.sparse, SkipWeights):
            own += gate_matrix(layer).nbytes
            rest += layer.sparse.up.nbytes + layer.sparse.down.nbytes
            continue
        if layer.sparse is None:
            own += sum(m.nbytes for m in matrices(layer))
            continue
        w: SparseWeights = layer.sparse
        decides = w.up if w.gate is None else w.gate
        whole = sum(m.nbytes for m in (w.gate, w.up, w.down_t, w.blocks) if m is not None)
        fixed = decides.nbytes if by_gate(predictor) else 0
        own += sum(leaf.nbytes for leaf in jax.tree.leaves(w.predictor)) + fixed
        own += gate_matrix(layer).nbytes if capped else 0
        rest += whole - fixed
    return own, rest


def with_fewer_neurons(
    model: Model, *, rule: str = "hot", share: float = 0.5, threshold: float | None = None,
    text: Sequence[int] | None = None,
) -> Model:  # fmt: skip
    """A draft that shares `model`'s attention and embeddings and computes fewer neurons. UserError: a rule that the
    model has no matrices or predictors for, or a text without ids or with ids that are none of its vocabulary.

    Args:
        model: with dense matrices for `hot` and `gate`, with predictors for `own`.
        rule: "hot", "gate" or "own".
        share: of the neurons to compute, for `hot` (in steps of 32 neurons) and, on average over the text, `gate`.
        threshold: for `own`.
        text: token ids that `hot` and `gate` choose by; None: a text that the model itself writes.
    """
    config, last = model.config, model.config.vocab_size - 1
    if rule == "own":
        layers = []
        for layer in model.params.layers:
            try:
                own = layer.sparse.predictor._replace(threshold=jnp.float32(threshold))
            except (AttributeError, TypeError, ValueError):
                why = f"the target (ffn={model.ffn}) has no predictors with a threshold: give rule=hot"
                raise UserError(why) from None
            layers.append(layer._replace(sparse=layer.sparse._replace(predictor=own)))
        params = model.params._replace(layers=tuple(layers))
        return dataclasses.replace(model, params=params, rule=f"threshold={threshold:g}")
    if model.ffn != "dense":
        raise UserError(f"a draft by rule={rule} needs a dense target and this one runs ffn={model.ffn}: give rule=own")
    model.check_packed("a draft with fewer neurons")
    if text is None:
        read = self_generated(model)
    elif len(text) and min(text) >= 0 and max(text) <= last:
        read = windows([list(text)], min(_WINDOW, len(text), config.context_length))
    else:
        raise UserError(f"drafter.text must hold ids in 0..{last}, at least one")
    rows_LND, ffn = collect(model, read), FFN.from_config(config, model.kernels)
    if rule == "gate":
        predictor = GateThreshold(ffn, share)
        return gated(model, predictor, fit_layers(predictor, model.params.layers, rows_LND))
    return of_one_set(model, Hot(ffn, share), rows_LND)


def in_steps(predictor: SetRule, d_ff: int) -> SetRule:
    """The same with a share that is a whole number of blocks of neurons, one at least."""
    count = min(max(BLOCK, round(predictor.share * d_ff / BLOCK) * BLOCK), d_ff)
    return dataclasses.replace(predictor, share=count / d_ff)


def of_one_set(model: Model, predictor: Hot | OfPrompt, rows_LND: np.ndarray) -> Model:
    """A dense model of fewer neurons: those that the predictor keeps after residuals f32[L, N, D], in steps of 32.

    Gate and up keep their codes, down is packed again.
    """
    predictor, config = in_steps(predictor, model.config.d_ff), model.config
    count = round(predictor.share * config.d_ff)
    sets = fit_layers(predictor, model.params.layers, rows_LND)
    layers = []
    for layer, keep in zip(model.params.layers, sets, strict=True):
        ids = np.flatnonzero(keep)
        gate, up, down = layer.dense
        gate = None if gate is None else take_rows(gate, ids)
        fewer = {"ffn_gate": gate, "ffn_up": take_rows(up, ids), "ffn_down": _columns(down, ids)}
        layers.append(layer._replace(**fewer, sparse=None))  # factors of a PowerInfer file fit all neurons
    config, params = dataclasses.replace(config, d_ff=count), model.params._replace(layers=tuple(layers))
    forward = make_forward(config, model.kernels)
    return dataclasses.replace(model, config=config, params=params, forward=forward, ffn="hot", rule=f"neurons={count}")


def _columns(w: QTensor, ids: np.ndarray) -> QTensor:
    """Columns of a matrix: floats as they are, others as Q8_0, since their blocks lie along the columns."""
    values = np.asarray(dequantize(w))[:, ids]
    if w.layout.is_float:
        return pack_float(jnp.asarray(values), w.layout.codes)
    kind = GGMLQuantizationType.Q8_0
    rows, cols = values.shape
    return pack_qtensor(quants.quantize(np.ascontiguousarray(values), kind), kind, (rows, cols))


@dataclasses.dataclass(frozen=True)
class UnionPoint:
    """The share of neurons that passes of one size read, beside a guess from one token.

    n rows that keep a share s each keep 1 - (1 - s)^n together if they choose independently; neighbours in a text do
    not (Mirzadeh et al. 2023, arXiv:2310.04564, "aggregated sparsity").
    """

    rows: int  # of a pass, all sequences together
    batch: int  # sequences among them
    passes: int  # that were looked at
    kept: float  # share of the neurons that one row keeps, mean over rows and layers
    union: float  # share that some row of the pass keeps, mean over passes and layers
    guess: float  # 1 - (1 - kept)^rows, layer by layer

    @staticmethod
    def from_layers(rows: int, batch: int, passes: int, kept_L: np.ndarray, union_L: np.ndarray) -> "UnionPoint":
        """The point of the shares of each layer, means over the passes."""
        guess = float(np.mean(1 - (1 - kept_L) ** rows))
        return UnionPoint(rows, batch, passes, float(kept_L.mean()), float(union_L.mean()), guess)


def kept_masks(model: Model, predictor: Predictor, windows_Wn: np.ndarray) -> np.ndarray:
    """bool[W, L, n, F]: the neurons that every token of every window int32[W, n] keeps, each window on its own.

    `model` has `predictor`'s weights in its layers, as `gated` makes it.
    """
    skips = zero_skip.skips(model.params)  # then the dense FFN has the same bits
    ffn = (dense_ffn if skips else partial(make_ffn, predictor=predictor))(model.config, model.kernels)

    def keep(layer, x_RD, n_valid_B):
        return predictor.keep(None if skips else layer.sparse.predictor, layer, x_RD, n_valid_B)

    return np.stack([mask.astype(bool) for mask in watched(model, windows_Wn, keep, ffn=ffn)])


def union_of_text(masks_WLnF: np.ndarray, *, tokens: int, batch: int = 1) -> UnionPoint:
    """Passes of `tokens` consecutive tokens of each of `batch` windows: the reads of drafts that are all right."""
    windows, layers, length, width = masks_WLnF.shape
    assert windows >= batch and length >= tokens
    cut = masks_WLnF[: windows // batch * batch, :, : length // tokens * tokens]
    together = cut.reshape(windows // batch, batch, layers, length // tokens, tokens, width).any(axis=(1, 4))
    passes = together.shape[0] * together.shape[2]
    kept_L, union_L = masks_WLnF.mean(axis=(0, 2, 3)), together.mean(axis=(0, 2, 3))
    return UnionPoint.from_layers(tokens * batch, batch, passes, kept_L, union_L)


@dataclasses.dataclass
class UnionWatch:
    """Adds up the kept neurons of a decoding's passes; call it with the rows and the `SparseStats` of each pass."""

    width: int  # F
    # by rows: passes, and sums over them of the kept shares and unions of each layer, f64[L]
    sums: dict[int, tuple[int, np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)

    def __call__(self, rows: int, stats: Pytree) -> None:
        """One pass of `rows` rows that count, one sequence."""
        kept_L = np.asarray(stats.kept, np.float64).sum(axis=1) / rows / self.width
        union_L = np.asarray(stats.union, np.float64) / self.width
        passes, kept, union = self.sums.get(rows, (0, np.zeros_like(kept_L), np.zeros_like(union_L)))
        self.sums[rows] = passes + 1, kept + kept_L, union + union_L

    def points(self) -> list[UnionPoint]:
        """One for each size of pass, ascending."""
        sums = sorted(self.sums.items())
        return [UnionPoint.from_layers(rows, 1, n, kept / n, union / n) for rows, (n, kept, union) in sums]
