"""Hot neurons on the card and cold ones on the host at once, against whole layers there and against the host alone."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as GGML

from specsparse import kernels
from specsparse.engine import rope
from specsparse.engine.config import ModelConfig
from specsparse.engine.llama import ForwardOut, Want
from specsparse.engine.weights import Params
from specsparse.kernels import QTensor, pack_neurons
from specsparse.kernels.packing.dequant import dequantize
from specsparse.kernels.packing.random_blocks import random_quantised
from specsparse.measure.costs.roofline import config_from_shape
from specsparse.powerinfer.hot_cold import (
    DevicePair,
    HotCold,
    Part,
    Predictors,
    Span,
    TwoDevices,
    host_kernels,
    waiting,
)
from specsparse.support.files import Json
from specsparse.support.interleaved import interleaved, seconds
from specsparse.tools.bench.card.random_models import CardPlan, random_matrix, random_params, shape_of

LAYERS = 8
"""Of the larger shape: its host half is packed here, which all 32 layers would take too long for."""
RANK = 1024
_HOT = 0.25
"""Share of the neurons on the card."""
_DEVIATIONS, _COLDER, _ALIKE = 0.84, 0.4, 0.55
"""A token keeps the neurons whose score is so many deviations of a hot one's: a fifth of these. The scores of cold ones
are so much smaller, and a fiftieth of them is kept; if a layer lies on one side, as many of all its neurons."""
_CAPACITY = 256


def hybrid(plan: CardPlan) -> Iterator[Json]:
    """Seconds of a step: hot and cold at once, whole layers of the same bytes on the card, and the host alone."""
    shape = replace(shape_of(plan.large), weights="Q4_0")
    shape = shape if plan.tiny else replace(shape, layers=plan.layers or LAYERS)
    config = replace(config_from_shape(plan.large, shape), activation="relu")
    card, host = jax.devices()[0], jax.devices("cpu")[-1]
    own, beside, count = kernels.get(plan.backend), host_kernels(), config.n_layers
    hot, size, std = round(_HOT * config.d_ff), (config.d_ff, config.d_model), config.d_model**-0.5
    ffn_rows = [random_quantised("Q4_0", *size, seed, std=std, edges=False) for seed in range(3)]
    shapes = dict(config.tensor_shapes())
    attention = (shapes[f"blk.0.{name}.weight"] for name in ("attn_q", "attn_k", "attn_v", "attn_output"))
    ffn, dense = sum(raw.nbytes for raw in ffn_rows), sum(prod(shape) for shape in attention) * 18 // 32
    whole = count * round(dense + _HOT * ffn) // (dense + ffn)  # layers of as many bytes
    splits = {
        "hybrid": (DevicePair(card, host), [hot] * count, frozenset[int]()),
        "layers": (
            DevicePair(card, host), [config.d_ff * (i >= count - whole) for i in range(count)],
            frozenset(range(count - whole)),
        ),
        "host": (DevicePair(host, host), [0] * count, frozenset[int]()),
    }  # fmt: skip
    steps = {}
    for name, (pair, hots, host_layers) in splits.items():
        two = TwoDevices(config, beside if name == "host" else own, pair, host_layers=host_layers)
        steps[name] = _Tokens(two, _placed(config, ffn_rows, hots, two))
    found = interleaved({name: step.seconds for name, step in steps.items()}, repeats=8 * plan.repeats, warm_up=2)
    s = {name: median(times) for name, times in found.items()}
    yield {
        "what": f"hybrid, {plan.large} Q4_0 with ReLU in {count} layers", "card": card.device_kind,
        "host": host.device_kind, "hot_neurons": hot, "of": config.d_ff, "card_layers": whole, "seconds": s,
        "over_layers": s["layers"] / s["hybrid"], "over_host": s["host"] / s["hybrid"], **steps["hybrid"].sides(),
    }  # fmt: skip


class _Tokens:
    """Forward passes of one token, each after the same text."""

    def __init__(self, two: TwoDevices, params: Params):
        config = two.config
        cos, sin = rope.model_tables(config.ropes, _CAPACITY, None)
        self.two, self.params = two, params._replace(cos=cos, sin=sin)
        self._cache = two.new_cache(
            layers=config.n_layers, batch=1, capacity=_CAPACITY, kv_heads=config.n_kv_heads, head_dim=config.head_dim,
        )  # fmt: skip
        for _ in range(2):  # the kept neurons change the rows that they were chosen by
            self._keep()

    def _keep(self) -> None:
        """Sets each layer's threshold by what enters it."""
        config = self.two.config
        rows = np.asarray(self.run(Want("none", hidden=tuple(range(config.n_layers)))).hidden)[0, 0]
        layers = []
        for layer, x_D in zip(self.params.layers, rows.reshape(config.n_layers, -1), strict=True):
            predictor = layer.sparse.predictor
            h_K = np.maximum(np.asarray(dequantize(predictor.fc1)) @ x_D, 0)
            limit = np.float32(_DEVIATIONS * np.linalg.norm(h_K) * len(h_K) ** -0.5)
            limit = jax.device_put(limit, predictor.fc1.data.device)
            sparse = layer.sparse._replace(predictor=predictor._replace(threshold=limit))
            layers.append(layer._replace(sparse=sparse))
        self.params = self.params._replace(layers=tuple(layers))

    def run(self, want: Want) -> ForwardOut:
        out, self._cache = self.two.forward(self.params, np.array([[3]], np.int32), self._cache, want=want)
        return out

    def seconds(self) -> float:
        return seconds(lambda: jax.block_until_ready(self.run(Want()).logits))

    def sides(self) -> Json:
        """Share of the neurons that is computed, bytes that cross and seconds that each side waits, for a step."""
        before, spans = self.two.crossed.counts(), list[Span]()
        stats = self.run(Want()).stats
        crossed = {side: nbytes - before[side] for side, nbytes in self.two.crossed.counts().items()}
        self.two.watch = lambda *span: spans.append(span)
        self.run(Want())
        self.two.watch = None
        kept = float(np.mean(np.asarray(stats.kept))) / self.two.config.d_ff
        return {"kept": kept, "crossed_bytes": crossed, "waits_s": waiting(spans)}


def _placed(config: ModelConfig, ffn_rows: list[np.ndarray], hots: list[int], two: TwoDevices) -> Params:
    """Random weights with so many hot neurons a layer, as `two` places them.

    `ffn_rows` are gate, up and down_t of every layer as a file has them; the first neurons are the hot ones.
    """
    params, _ = random_params(config, "Q4_0")
    fc1 = random_matrix(0, "Q4_0", (min(RANK, config.d_model), config.d_model))
    rank, layers = fc1.shape[0], []

    def part(first: int, last: int) -> Part | None:
        shape = (last - first, config.d_model)
        packed = (pack_neurons(raw[first:last], GGML.Q4_0, shape) for raw in ffn_rows)
        return Part(*packed) if first < last else None

    def fc2(seed: int, size: int, scale: float) -> QTensor | None:
        return random_matrix(seed, "Q4_0", (size, rank), std=scale * rank**-0.5) if size else None

    for i, (layer, hot) in enumerate(zip(params.layers, hots, strict=True)):
        cold = config.d_ff - hot
        scales = (1.0, _COLDER) if hot and cold else (_ALIKE, _ALIKE)
        both = (fc2(2 * i + at, size, scales[at]) for at, size in enumerate((hot, cold)))
        predictor = Predictors(fc1, *both, jnp.float32(0))
        sparse = HotCold(predictor, part(0, hot), part(hot, config.d_ff))
        layers.append(layer._replace(ffn_gate=None, ffn_up=None, ffn_down=None, sparse=sparse))
    return two.place(params._replace(layers=tuple(layers)))
