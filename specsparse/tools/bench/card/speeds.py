"""Stages of `bench device` on one device: its read and multiply rates, how fast models decode on it, whether rows of a
step depend on their place or their neighbours; and the roofline's figures before any is measured."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

from specsparse import kernels
from specsparse.data.devices import sheets
from specsparse.engine import cache as kv
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.measure import manifest
from specsparse.measure.costs.forecast import Paper
from specsparse.measure.costs.roofline import ModelOutline, kv_bytes
from specsparse.measure.trials import Ours, token_ids
from specsparse.runtime.method import Method, MethodSpec, resolve
from specsparse.runtime.session import Request, Session
from specsparse.speculative import expected
from specsparse.speculative.drafters.synthetic import Synthetic, SyntheticRates, synthetic_verifier
from specsparse.speculative.trees import get_tree
from specsparse.support.files import Json
from specsparse.support.interleaved import interleaved, seconds
from specsparse.support.registry import Choice
from specsparse.tools.bench.card.random_models import (
    WIDTHS,
    CardPlan,
    padded,
    random_matrix,
    random_model,
    shape_of,
    wide,
)

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


def decode_small(plan: CardPlan) -> Iterator[Json]:
    """Plain decoding of the smaller shape by type of the weights."""
    for kind in ("Q8_0",) if plan.tiny else ("BF16", "Q8_0", "Q4_0"):
        yield _decoded(plan, plan.small, kind, None)


def decode_large(plan: CardPlan, kind: str) -> Iterator[Json]:
    """The same of the larger shape in one type."""
    yield _decoded(plan, plan.large, kind, plan.layers)


def _decoded(plan: CardPlan, name: str, kind: str, layers: int | None) -> Json:
    """Seconds of a step of W rows and of one in a program for one row, in turn, and the share of the bandwidth."""
    model = padded(random_model(name, kind, layers=layers, backend=plan.backend))
    rate, sides = bandwidth(plan), {"wide": model, "one_row": wide(model, 0)}
    timed = {side: Ours(each, depth=PROMPT, room=plan.tokens + each.width) for side, each in sides.items()}
    found = interleaved({s: lambda o=o: o.decode(plan.tokens) for s, o in timed.items()}, repeats=plan.repeats)
    step = {side: median(times) / plan.tokens for side, times in found.items()}
    read = model.footprint.packed + kv_bytes(model.config, PROMPT + plan.tokens / 2, model.kv_dtype)
    return {
        "what": f"decode, {name} {kind}", "layers": model.config.n_layers, "width": model.width,
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
        n = tokens_Bn.shape[1]
        parents = np.broadcast_to(parents_n, tokens_Bn.shape)
        counts = np.full(_BATCH, n if valid is None else valid)
        return np.asarray(self._tree(self.params, *map(_ints, (tokens_Bn, parents, counts)), self.start))

    def one_by_one(self, tokens_Bn: np.ndarray) -> np.ndarray:
        """Logits f32[B, n, V] of the same tokens, a plain step each."""
        cache, out = self.start, []
        for i in range(tokens_Bn.shape[1]):
            step, cache = self._chain(self.params, _ints(tokens_Bn[:, i : i + 1]), cache)
            cache = kv.commit(cache, jnp.ones(_BATCH, jnp.int32))
            out.append(np.asarray(step.logits)[:, 0])
        return np.stack(out, axis=1)


def _ints(values: np.ndarray) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


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
KINDS = ("BF16", "Q8_0", "Q4_0")


def predictions(plan: CardPlan, devices: Sequence[str] = DEVICES) -> list[Json]:
    """A row for each device, shape and type: seconds of a step, tokens a second, v(8), v(16), and the gain of drafts.

    Devices are taken to reach `forecast.REACHED` of their peaks. Speculation is that of the bench: drafts that cost
    nothing, of which each of `GAMMA` tokens is accepted with chance `ALPHA`, in steps padded to `TILE_ROWS` rows.
    """
    rows = []
    tokens = expected.expected_tokens(ALPHA, GAMMA)
    for sheet, name, kind in itertools.product(devices, (plan.small, plan.large), KINDS):
        device = sheets()[sheet]
        outline = ModelOutline.from_shape(name, replace(shape_of(name), weights=kind))  # type: ignore[arg-type]
        load = outline.traffic().requantised(kind)  # every matrix in that type, the output too
        paper = Paper(device, load, outline.kernels(), PROMPT + plan.tokens / 2)
        fits = device.memory is None or load.weight_bytes < device.memory
        rows.append({
            "device": device.title, "model": name, "type": kind, "fits": fits, "step_s": paper.step_s,
            "tokens_per_second": 1 / paper.step_s, "v8": paper.v(8), "v16": paper.v(16),
            "speculation_over_one_row": tokens / paper.v(kernels.TILE_ROWS), "speculation_over_padded": tokens,
        })  # fmt: skip
    return rows
