"""The figures of `bench device`: models of a catalogue shape with random weights, their speeds and their equal bits.

Each stage of `device_stages` is a generator here: a row of JSON for each figure, as soon as it is measured. Weights are
made on the device.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType as GGML

from specsparse import kernels
from specsparse.data.devices import sheets
from specsparse.engine import cache as kv
from specsparse.engine import rope
from specsparse.engine.config import ModelConfig
from specsparse.engine.devices import OneDevice
from specsparse.engine.fixed_width import fixed_width
from specsparse.engine.llama import ForwardOut, Want
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.engine.weights import Footprint, Layer, Params
from specsparse.kernels import Fragments, Matrix, QTensor, pack_neurons
from specsparse.kernels.gpu import fragments
from specsparse.kernels.gpu.weights import Kept, plain
from specsparse.kernels.packing.dequant import dequantize, pack_float
from specsparse.kernels.packing.pack import layout_of
from specsparse.kernels.packing.random_blocks import random_quantised
from specsparse.kernels.qtensor import BLOCK, ROWS, Layout
from specsparse.measure import manifest
from specsparse.measure.costs.forecast import Clock
from specsparse.measure.costs.roofline import ModelOutline, config_from_shape, kv_bytes
from specsparse.measure.trials import Ours, token_ids
from specsparse.models import catalogue
from specsparse.models.catalogue import Mixed, Shape
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
from specsparse.runtime.method import Method, MethodSpec, resolve
from specsparse.runtime.session import Request, Session
from specsparse.speculative import expected
from specsparse.speculative.drafters.synthetic import Synthetic, SyntheticRates, synthetic_verifier
from specsparse.speculative.trees import get_tree
from specsparse.support.files import Json
from specsparse.support.interleaved import interleaved, seconds
from specsparse.support.registry import Choice

TINY = Shape("llama", layers=2, width=64, heads=4, kv_heads=2, ff=96, vocab=256, context=256, weights="Q8_0")
"""For the tests of the bench itself."""
WIDTHS = (kernels.TILE_ROWS, 2 * kernels.TILE_ROWS)
"""Rows of the padded steps that are compared; tiny plans take the first."""
_CODES_STD = {"nibble": math.sqrt((16**2 - 1) / 12), "int8": math.sqrt((256**2 - 1) / 12)}


@dataclass(frozen=True)
class CardPlan:
    device: str = "gpu"  # "gpu", "tpu" or "cpu"
    tiny: bool = False  # shapes for the tests of the bench itself
    layers: int | None = None  # of the large shape; None is all
    tokens: int = 64  # to decode
    repeats: int = 3  # timings of each figure
    backend: str | None = None  # of the kernels; None is the default of the device

    @property
    def small(self) -> str:
        return "tiny" if self.tiny else "smollm2-135m"

    @property
    def large(self) -> str:
        return "tiny" if self.tiny else "llama-2-7b"


class _NoText:
    """In place of a tokenizer: these models write ids."""

    stop_ids = frozenset[int]()
    encode = None


def shape_of(name: str) -> Shape:
    """The shape of a catalogue model that has one, or "tiny"."""
    if name == "tiny":
        return TINY
    entry = catalogue.find(name)
    assert entry is not None and entry.shape is not None, f"{name}: the catalogue has no shape of it"
    return entry.shape


def random_model(
    name: str, kind: str, *, layers: int | None = None, backend: str | None = None, width: int | None = None
) -> Model:
    """A model of a shape of the catalogue, or "tiny", with random weights on the default device.

    All matrices are of one GGUF type: a float, or one with a scale a block and nothing else, as Q4_0 and Q8_0. `width`
    is the rows of every step; None is the automatic one, `kernels.TILE_ROWS` if kernels need one; 0 is none.
    """
    shape = shape_of(name)
    config = config_from_shape(replace(shape, layers=layers or shape.layers))
    chosen = kernels.get(backend)
    params, nbytes = random_params(config, kind, chosen.kept)
    forward = OneDevice().make_forward(config, chosen, None)
    model = Model(
        config=config,
        tokenizer=cast(Tokenizer, _NoText()),
        params=params,
        forward=forward,
        kernels=chosen,
        kv_dtype="bf16" if kind == "BF16" else "f16",
        path=Path(f"{name}.{kind}"),
        footprint=Footprint(nbytes, nbytes),
    )
    width = kernels.automatic_width(chosen.name) if width is None else width
    return wide(model, width) if width else model


def wide(model: Model, width: int) -> Model:
    """The model with steps of `width` rows, on the same weights; 0 is none."""
    narrow = model.narrow or model.forward
    forward = fixed_width(narrow, width) if width else narrow
    return replace(model, forward=forward, narrow=narrow if width else None, width=width)


def padded(model: Model) -> Model:
    """The model if its steps have a width, else with steps of `kernels.TILE_ROWS` rows."""
    return model if model.width else wide(model, kernels.TILE_ROWS)


def random_params(config: ModelConfig, kind: str, kept: Kept | None = None) -> tuple[Params, int]:
    """Weights of a Llama without biases, and the bytes of them that a step reads; `kept` as in `random_matrix`."""
    made: dict[str, Any] = {}
    for i, (name, shape) in enumerate(config.tensor_shapes()):
        std = 1.0 if "embd" in name else None
        if len(shape) == 1:
            made[name] = jnp.ones(shape, jnp.float32)
        else:
            made[name] = random_matrix(i, kind, (shape[0], shape[1]), std=std, kept=kept)
    layers = []
    for i in range(config.n_layers):
        prefix = f"blk.{i}."
        own = {n.split(".")[2]: t for n, t in made.items() if n.startswith(prefix)}
        layers.append(Layer(**own, biases={}))
    embedding = made["token_embd.weight"]
    output = embedding if config.tied_output else made["output.weight"]
    params = Params(embedding, tuple(layers), made["output_norm.weight"], output)
    read = [t.nbytes for name, t in made.items() if name != "token_embd.weight"]
    return params, sum(read) + (output.nbytes if config.tied_output else 0)


def random_matrix(
    seed: int, kind: str, shape: tuple[int, int], *, std: float | None = None, kept: Kept | None = None
) -> Matrix:
    """A random matrix of a GGUF type, packed where it is made, on the default device.

    The type is a float or has one f16 scale a block of 32. `std` of the weights is 1 / sqrt(columns) by default; `kept`
    is how the kernels keep matrices, `Kernels.kept`.
    """
    layout = layout_of(GGML[kind])
    std = shape[1] ** -0.5 if std is None else std
    if kept is not None and (layout.is_float or kept == "bf16"):
        return plain(_normal(seed, std, shape=shape), layout)
    if layout.is_float:
        return pack_float(_normal(seed, std, shape=shape), layout.codes)
    assert layout.scales == "d" and layout.codes in _CODES_STD and not layout.lut, f"{kind}: has no single scale"
    if kept is not None:
        return _fragments(seed, std / _CODES_STD[layout.codes], layout=layout, shape=shape)
    scale = np.float16(std / _CODES_STD[layout.codes]).tobytes()
    return QTensor(_blocks(seed, scale=scale, layout=layout, shape=shape), layout, shape)


@partial(jax.jit, static_argnames="shape")
def _normal(seed: int, std: float, *, shape: tuple[int, int]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32) * std


@partial(jax.jit, static_argnames=("layout", "shape"))
def _fragments(seed: int, scale: float, *, layout: Layout, shape: tuple[int, int]) -> Fragments:
    """One scale for all blocks, random codes."""
    like = fragments.abstract(layout, shape)
    codes = jax.random.bits(jax.random.key(seed), like.codes.shape, jnp.uint32)
    scales = jnp.broadcast_to(jnp.asarray(scale).astype(like.scales.dtype), like.scales.shape)
    return Fragments(jax.lax.bitcast_convert_type(codes, jnp.int32), scales, None, layout, shape)


@partial(jax.jit, static_argnames=("scale", "layout", "shape"))
def _blocks(seed: int, *, scale: bytes, layout: Layout, shape: tuple[int, int]) -> jax.Array:
    """`QTensor.data` of a matrix with one f16 scale, of these bytes, for all blocks and random codes.

    The packed layouts have a block's scales before its codes: uint8[groups, blocks * (2 * ROWS + bytes of codes)].
    """
    groups, blocks = -(-shape[0] // ROWS), shape[1] // BLOCK
    size = layout.group_bytes(shape[1]) // blocks - 2 * ROWS
    codes = jax.random.bits(jax.random.key(seed), (groups, blocks, size), jnp.uint8)
    scales = jnp.broadcast_to(jnp.asarray(np.frombuffer(scale * ROWS, np.uint8)), (groups, blocks, 2 * ROWS))
    return jnp.concatenate([scales, codes], axis=2).reshape(groups, -1)


PROMPT = 64
ALPHA, GAMMA = 0.8, 4
"""Of the synthetic drafts: chance of each token, and tokens."""


def status(plan: CardPlan) -> Iterator[Json]:
    """The device, its kernels, and its read and multiply rates at best by XLA's own loops."""
    device = jax.devices()[0]
    memory = device.memory_stats() or {}
    yield {
        "what": "device", "kind": device.device_kind, "platform": device.platform, "count": jax.device_count(),
        "memory_bytes": memory.get("bytes_limit"), "packages": manifest.package_versions(),
    }  # fmt: skip
    yield {"what": "kernels", **kernels.status(), "chosen": kernels.get(plan.backend).name}
    yield {"what": "read bandwidth", "bytes_per_second": bandwidth(plan)}
    size = 256 if plan.tiny else 8192
    a, product = jnp.ones((size, size), jnp.bfloat16), jax.jit(lambda a: a @ a)
    s = _best(lambda: product(a), plan.repeats)
    yield {"what": "bf16 product", "size": size, "operations_per_second": 2 * size**3 / s}


def bandwidth(plan: CardPlan) -> float:
    """Bytes per second that a sum over an array larger than any cache reads."""
    values = jnp.ones(((1 << 22) if plan.tiny else (1 << 29),), jnp.float32)
    total = jax.jit(lambda x: jnp.sum(x))
    return values.nbytes / _best(lambda: total(values), plan.repeats + 2)


def _best(call: Callable[[], object], repeats: int) -> float:
    return min(interleaved({"": lambda: seconds(lambda: jax.block_until_ready(call()))}, repeats=repeats)[""])


def decode(plan: CardPlan, kind: str | None = None) -> Iterator[Json]:
    """Plain decoding of the larger shape in one type of weights; None for the smaller shape in several.

    A step of W rows stands beside one in a program for one row, interleaved, and beside the bandwidth.
    """
    name, layers = (plan.large, plan.layers) if kind else (plan.small, None)
    for each in (kind,) if kind else ("Q8_0",) if plan.tiny else ("BF16", "Q8_0", "Q4_0"):
        model = padded(random_model(name, each, layers=layers, backend=plan.backend))
        rate, sides = bandwidth(plan), {"wide": model, "one_row": wide(model, 0)}
        timed = {side: Ours(m, depth=PROMPT, room=plan.tokens + m.width) for side, m in sides.items()}
        found = interleaved({s: partial(o.decode, plan.tokens) for s, o in timed.items()}, repeats=plan.repeats)
        step = {side: median(times) / plan.tokens for side, times in found.items()}
        read = model.footprint.packed + kv_bytes(model.config, PROMPT + plan.tokens / 2, model.kv_dtype)
        yield {
            "what": f"decode, {name} {each}", "layers": model.config.n_layers, "width": model.width,
            "tokens_per_second": 1 / step["wide"], "one_row_tokens_per_second": 1 / step["one_row"],
            "wide_over_one_row": step["wide"] / step["one_row"], "bytes_per_step": read, "bandwidth": rate,
            "share_of_bandwidth": read / step["wide"] / rate, "one_row_share": read / step["one_row"] / rate,
            "compile_s": sum(entry.seconds for o in timed.values() for entry in o.compiled),
        }  # fmt: skip


def widths(plan: CardPlan) -> Iterator[Json]:
    """v(1..16) of programs of n rows in a few layers of the larger shape, and steps of 8 and 16 rows beside them."""
    kinds, ns = (("BF16",), (1, 2)) if plan.tiny else (("BF16", "Q4_0"), range(1, 17))
    for kind in kinds:
        model = random_model(plan.large, kind, layers=2, backend=plan.backend, width=0)
        side = Ours(model, depth=PROMPT, room=32, forwards=16)
        times = {n: median(side.verify(n) for _ in range(plan.repeats + 1)) for n in ns}
        wide_s = {}
        for width in WIDTHS[:1] if plan.tiny else WIDTHS:
            side = Ours(wide(model, width), depth=PROMPT, room=32, forwards=16)
            wide_s[width] = median(side.verify(1) for _ in range(plan.repeats + 1))
        yield {
            "what": f"v(n), {plan.large} {kind} in 2 layers", "step_s": times[1],
            "v": {n: s / times[1] for n, s in times.items()}, "padded": {w: s / times[1] for w, s in wide_s.items()},
        }  # fmt: skip


def _written(model: Model, method: Method, plan: CardPlan, temperature: float = 0.0) -> Session:
    params = SamplingParams(temperature=temperature, max_tokens=plan.tokens, ignore_eos=True)
    session = Session(model, [Request(token_ids(PROMPT, model.config.vocab_size), params, seed=0)], method)
    session.advance()
    return session


def speculation(plan: CardPlan) -> Iterator[Json]:
    """Drafts whose acceptance is made up against plain decoding, padded and in a program for one row."""
    model = padded(random_model(plan.large, "BF16", layers=plan.layers, backend=plan.backend))
    rates = SyntheticRates(rate=ALPHA)
    method = Method(Synthetic(GAMMA, rates), synthetic_verifier(rates))
    sides = {"plain": (model, Method()), "one_row": (wide(model, 0), Method()), "speculative": (model, method)}
    found = interleaved({name: lambda s=s: _written(*s, plan) for name, s in sides.items()}, repeats=plan.repeats)
    s = {name: median(one.times.total for one in each) for name, each in found.items()}
    counted = found["speculative"][-1].counters()[0]
    yield {
        "what": f"speculation, {plan.large} BF16, alpha {ALPHA}, gamma {GAMMA}", "layers": model.config.n_layers,
        "tokens_per_round": counted.num_emitted_tokens / counted.num_rounds,
        "expected_tokens_per_round": rates.mean_acceptance_length(GAMMA),
        "over_one_row": s["one_row"] / s["speculative"], "over_padded": s["plain"] / s["speculative"],
        "tokens_per_second": plan.tokens / s["speculative"],
    }  # fmt: skip


def trees(plan: CardPlan) -> Iterator[Json]:
    """Chains and a tree drafted by part of the layers: the text is plain decoding's, greedy and sampled."""
    model = padded(random_model(plan.small, "Q8_0", backend=plan.backend))
    half = list(range(model.config.n_layers // 2))
    shapes = {"chain of 7": {"gamma": 7}, "tree of 2 x 2": {"tree": get_tree("static", widths=(2, 2))}}
    for temperature in (0.0,) if plan.tiny else (0.0, 0.9):
        plain = _written(model, Method(), plan, temperature=temperature)
        for name, shape in shapes.items():
            drafter = Choice("layer_skip", {"layers": half, **shape})
            verifier = "tree_match" if "tree" in shape else "match"
            params = SamplingParams(temperature=temperature, max_tokens=plan.tokens)
            method = resolve(MethodSpec(drafter, verifier, sampling=params), model)
            fast = _written(model, method, plan, temperature=temperature)
            counted = fast.counters()[0]
            yield {
                "what": f"{name} at temperature {temperature}, {plan.small} Q8_0", "width": model.width,
                "same_tokens": bool(np.array_equal(fast.tokens()[0], plain.tokens()[0])),
                "accepted": counted.num_accepted_tokens, "rounds": counted.num_rounds,
            }  # fmt: skip


def int4(plan: CardPlan) -> Iterator[Json]:
    """One matrix in 4 bits: our packed product beside jax's own int4 type and two-byte weights, copies in turn."""
    shape, copies = ((96, 64), 2) if plan.tiny else ((11008, 4096), 24)  # together larger than any cache
    product, kept = kernels.get(plan.backend).linear, kernels.get(plan.backend).kept
    packed = [random_matrix(i, "Q4_0", shape, kept=kept) for i in range(copies)]
    ours_bytes, keys = packed[0].nbytes, jax.random.split(jax.random.key(0), copies)
    codes = [jax.random.randint(key, shape[::-1], -8, 8).astype(jnp.int4) for key in keys]
    dense = [jnp.full(shape[::-1], i, jnp.bfloat16) for i in range(copies)]
    for rows in (1,) if plan.tiny else (1, 8, 16):
        x = jnp.ones((rows, shape[1]), jnp.float32)
        count = jnp.asarray([rows], jnp.int32)

        def ours(w, x=x, count=count):
            return product(x, (w,), n_valid=count)[0]

        def theirs(w, x=x):
            return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)

        each = {"ours_q4_0": (ours, packed), "jax_int4": (theirs, codes), "bf16": (theirs, dense)}
        times = {}
        for name, (function, weights) in each.items():
            # All copies in one program, and no loop over them, which would copy each for a kernel.
            run = jax.jit(lambda weights, function=function: sum(jnp.sum(function(w)) for w in weights))
            times[name] = _best(lambda run=run, weights=weights: run(weights), plan.repeats) / copies
        sizes = {"ours_q4_0": ours_bytes, "jax_int4": shape[0] * shape[1] / 2, "bf16": 2 * shape[0] * shape[1]}
        yield {
            "what": f"product {shape[0]} x {shape[1]}, {rows} rows", "seconds": times,
            "bytes_per_second": {name: sizes[name] / s for name, s in times.items()},
        }  # fmt: skip


_BATCH = 2
_BEFORE = 62  # tokens in the cache: paths of a tree then cross a block of 16 positions


def equality(plan: CardPlan) -> Iterator[Json]:
    """Rows permuted, neighbours changed, fewer of them valid, and a tree against its paths fed one by one.

    A row of the answer for each model and width: values that differ from those they should equal, by the change, the
    largest difference, and among rows that differ those whose most likely token is another and the narrowest margin.
    """
    cases = [(plan.small, "Q8_0"), (plan.small, "Q4_0"), (plan.large, "BF16")]
    for name, kind in cases[:1] if plan.tiny else cases:
        model = random_model(name, kind, layers=2, backend=plan.backend, width=WIDTHS[0])
        for width in WIDTHS[:1] if plan.tiny else WIDTHS:
            yield {"what": f"equal bits, {name} {kind} in 2 layers", "width": width, **_checked(wide(model, width))}


class _Steps:
    """Steps of one width after the same text."""

    def __init__(self, model: Model):
        self.model, rng = model, np.random.default_rng(0)
        capacity = model.capacity_for(_BEFORE + 4 * model.width)
        self.params = model.params_for(capacity)
        text = jnp.asarray(rng.integers(0, model.config.vocab_size, (_BATCH, _BEFORE)), jnp.int32)
        feed = jax.jit(lambda p, t, c: model.forward(p, t, c, want=Want("none"))[1])
        filled = feed(self.params, text, model.new_cache(_BATCH, capacity))
        self.start = kv.commit(filled, jnp.full(_BATCH, _BEFORE, jnp.int32))
        self._tree = jax.jit(
            lambda p, t, parents, n, c: model.forward(p, t, c, n_valid_B=n, parents_Bn=parents)[0].logits
        )
        self._chain = jax.jit(lambda p, t, c: model.forward(p, t, c))

    def tree(self, tokens_Bn: np.ndarray, parents_n: np.ndarray, valid: int | None = None) -> np.ndarray:
        """Logits f32[B, n, V] of a verification of these rows."""
        n, parents = tokens_Bn.shape[1], np.broadcast_to(parents_n, tokens_Bn.shape)
        given = (tokens_Bn, parents, np.full(_BATCH, n if valid is None else valid))
        return np.asarray(self._tree(self.params, *(jnp.asarray(a, jnp.int32) for a in given), self.start))

    def one_by_one(self, tokens_Bn: np.ndarray) -> np.ndarray:
        """Logits f32[B, n, V] of the same tokens, a plain step each."""
        cache, out = self.start, []
        for i in range(tokens_Bn.shape[1]):
            step, cache = self._chain(self.params, jnp.asarray(tokens_Bn[:, i : i + 1], jnp.int32), cache)
            cache = kv.commit(cache, jnp.ones(_BATCH, jnp.int32))
            out.append(np.asarray(step.logits)[:, 0])
        return np.stack(out, axis=1)


def _checked(model: Model) -> Json:
    steps, width, rng = _Steps(model), model.width, np.random.default_rng(1)
    tokens = rng.integers(0, model.config.vocab_size, (_BATCH, width))
    roots, order = np.full(width, -1), rng.permutation(width)
    whole, others = steps.tree(tokens, roots), rng.integers(0, model.config.vocab_size, tokens.shape)
    others[:, 3] = tokens[:, 3]
    pairs = {
        "permuted": (steps.tree(tokens[:, order], roots), whole[:, order]),
        "neighbours": (steps.tree(others, roots)[:, 3], whole[:, 3]),
        **{f"{n} valid": (steps.tree(tokens, roots, n)[:, :n], whole[:, :n]) for n in range(1, width)},
    }
    parents = np.array([-1, 0, 0, 1, 2, 4, 1, 6, *range(7, width - 1)])
    tree = steps.tree(tokens, parents)
    for leaf in (5, width - 1):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        pairs[f"path of {len(path)}"] = (steps.one_by_one(tokens[:, path]), tree[:, path])
    differing = {name: int((a != b).sum()) for name, (a, b) in pairs.items() if (a != b).any()}
    apart = [(a[rows], b[rows]) for a, b in pairs.values() if (rows := (a != b).any(axis=-1)).any()]
    found: Json = {"equal": not differing, "values": sum(a.size for a, _ in pairs.values()), "differing": differing}
    if apart:
        a, b = (np.concatenate(side) for side in zip(*apart))
        best = np.sort(b, axis=-1)
        found |= {
            "largest_difference": float(np.abs(a - b).max()),
            "rows": len(a),
            "other_argmax": int((a.argmax(-1) != b.argmax(-1)).sum()),
            "narrowest_margin": float((best[:, -1] - best[:, -2]).min()),
        }
    return found


DEVICES = ("h200", "h100", "mi300x", "5090", "epyc12")
KINDS: tuple[Mixed, ...] = ("BF16", "Q8_0", "Q4_0")


def predictions(plan: CardPlan) -> list[Json]:
    """A row for each device, shape and type: seconds of a step, tokens a second, v(8), v(16), and the gain of drafts.

    Devices are taken to reach `forecast.REACHED` of their peaks. Speculation is that of the bench: drafts that cost
    nothing, of which each of `GAMMA` tokens is accepted with chance `ALPHA`, in steps padded to `TILE_ROWS` rows.
    """
    rows = []
    tokens = expected.expected_tokens(ALPHA, GAMMA)
    for sheet, name, kind in itertools.product(DEVICES, (plan.small, plan.large), KINDS):
        device = sheets()[sheet]
        outline = ModelOutline.from_shape(name, replace(shape_of(name), weights=kind))
        load = outline.traffic().requantised(kind)  # every matrix in that type, the output too
        paper = Clock.on_paper(device, load, outline.kernels(), PROMPT + plan.tokens / 2)
        fits = device.memory is None or load.weight_bytes < device.memory
        rows.append({
            "device": device.title, "model": name, "type": kind, "fits": fits, "step_s": paper.step_s,
            "tokens_per_second": 1 / paper.step_s, "v8": paper.v(8), "v16": paper.v(16),
            "speculation_over_one_row": tokens / paper.v(kernels.TILE_ROWS), "speculation_over_padded": tokens,
        })  # fmt: skip
    return rows


LAYERS = 8
"""Of the larger shape: its host half is packed here, which all 32 layers would take too long for."""
RANK = 1024
_HOT = 0.25  # share of the neurons on the card
_DEVIATIONS, _COLDER, _ALIKE = 0.84, 0.4, 0.55
"""A token keeps the neurons whose score is so many deviations of a hot one's: a fifth of these. The scores of cold ones
are so much smaller, and a fiftieth of them is kept; if a layer lies on one side, as many of all its neurons."""
_CAPACITY = 256


def hybrid(plan: CardPlan) -> Iterator[Json]:
    """Seconds of a step: hot and cold at once, whole layers of the same bytes on the card, and the host alone."""
    shape = replace(shape_of(plan.large), weights="Q4_0")
    shape = shape if plan.tiny else replace(shape, layers=plan.layers or LAYERS)
    config = replace(config_from_shape(shape), activation="relu")
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
        cos, sin = map(jnp.asarray, rope.model_tables(config.ropes, _CAPACITY, None))
        self.two, self.params = two, params._replace(cos=cos, sin=sin)
        self._cache = two.new_cache(
            layers=config.n_layers,
            batch=1,
            capacity=_CAPACITY,
            kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
        )
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
        before, spans = dict(self.two.crossed), list[Span]()
        stats = self.run(Want()).stats
        crossed = {side: nbytes - before[side] for side, nbytes in self.two.crossed.items()}
        self.two.watch = lambda *span: spans.append(span)
        self.run(Want())
        self.two.watch = None
        kept = float(np.mean(np.asarray(stats.kept))) / self.two.config.d_ff
        return {"kept": kept, "crossed_bytes": crossed, "waits_s": waiting(spans)}


def _placed(config: ModelConfig, ffn_rows: list[np.ndarray], hots: list[int], two: TwoDevices) -> Params:
    """Random weights with so many hot neurons a layer, as `two` places them.

    `ffn_rows` are gate, up and down_t of every layer as a file has them; the first neurons are the hot ones.
    """

    def q4(seed: int, shape: tuple[int, int], std: float | None = None) -> QTensor:
        made = random_matrix(seed, "Q4_0", shape, std=std)
        assert isinstance(made, QTensor)
        return made

    params, _ = random_params(config, "Q4_0")
    fc1 = q4(0, (min(RANK, config.d_model), config.d_model))
    rank, layers = fc1.shape[0], []

    def part(first: int, last: int) -> Part | None:
        shape = (last - first, config.d_model)
        packed = (pack_neurons(raw[first:last], GGML.Q4_0, shape) for raw in ffn_rows)
        return Part(*packed) if first < last else None

    for i, (layer, hot) in enumerate(zip(params.layers, hots, strict=True)):
        cold = config.d_ff - hot
        scales = (1.0, _COLDER) if hot and cold else (_ALIKE, _ALIKE)
        fc2_hot, fc2_cold = (
            q4(2 * i + at, (size, rank), scales[at] * rank**-0.5) if size else None
            for at, size in enumerate((hot, cold))
        )
        predictor = Predictors(fc1, fc2_hot, fc2_cold, jnp.float32(0))
        sparse = HotCold(predictor, part(0, hot), part(hot, config.d_ff))
        layers.append(layer._replace(ffn_gate=None, ffn_up=None, ffn_down=None, sparse=sparse))
    return two.place(params._replace(layers=tuple(layers)))
