"""Times of decoding: the stages of speculative rounds, the kernels of one forward pass, and both as a Chrome trace.

A dense forward is one native call. Here it is taken apart again into the calls it is made of, each timed in a loop on
the device over the weights of all layers, so that no layer is read from a cache.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from specsparse import api
from specsparse.engine import llama
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.kernels import QTensor
from specsparse.measure import machine
from specsparse.measure.trials import Ours, need_room, token_ids
from specsparse.runtime.loops import RoundView
from specsparse.runtime.metrics import STAGES
from specsparse.runtime.session import PromptLike
from specsparse.support import tables
from specsparse.support.files import Json
from specsparse.support.interleaved import seconds

_LONG_ENOUGH = 0.03  # seconds that a timing should take


def profile(
    model: Model, *, prompt: PromptLike, method: Mapping[str, object], rows: int, depth: int, sampling: SamplingParams,
) -> tuple[Json, list[dict[str, float]]]:  # fmt: skip
    """Measures a dense model: the stages of decoding the prompt by `method` ({} leaves them out), and the kernels of a
    forward pass of `rows` rows after `depth` tokens. UserError: the FFN is sparse, or the context does not hold the
    rows.

    Returns:
        The report, and the seconds of each stage in each round. "kernels" are the parts of the pass in order, timed one
        by one: the kernel and its matrices, calls, seconds and bytes of all of them. "forward_s" is the pass as it
        runs, "stages" the seconds of all rounds together, "read_bandwidth" what this machine reads in a second.
    """
    if model.ffn != "dense":
        raise UserError(f"{model.path}: runs with ffn={model.ffn}; only dense models can be taken apart")
    model.check_whole("a profile")
    need_room(model.config, depth + rows, "--depth or --gamma")
    rounds = _rounds(model, prompt, method, sampling) if method else []
    side = Ours(model, depth=depth, room=rows)
    side.verify(rows)
    forward_s = min(side.verify(rows) for _ in range(3))
    groups: dict[str, list[Call]] = {}
    for call in record(model, rows=rows, depth=depth):
        groups.setdefault(call.name, []).append(call)
    kernels = []
    for name, calls in groups.items():
        spent, nbytes = _seconds(calls), sum(_bytes(call, depth + rows) for call in calls)
        of_all = {"calls": len(calls), "seconds": spent, "nbytes": nbytes, "bytes_per_second": nbytes / spent}
        kernels.append({"name": name, **of_all})
    report = {
        "rows": rows, "depth": depth, "forward_s": forward_s, "kernels": kernels, "rounds": len(rounds),
        "read_bandwidth": machine.read_bandwidth(),
        "stages": {name: sum(one[name] for one in rounds) for name in STAGES} if rounds else {},
    }  # fmt: skip
    return report, rounds


def _rounds(
    model: Model, prompt: PromptLike, method: Mapping[str, Any], sampling: SamplingParams
) -> list[dict[str, float]]:
    """Seconds of each stage of each round; once unobserved first, which compiles."""
    before, found = dict.fromkeys(STAGES, 0.0), []

    def watch(view: RoundView) -> None:
        now = {name: getattr(view.session.times, name) for name in STAGES}
        found.append({name: now[name] - before[name] for name in STAGES})
        before.update(now)

    api.generate(model, prompt, sampling=sampling, seed=0, loop="host", **method)
    api.generate(model, prompt, sampling=sampling, seed=0, watch=watch, **method)
    return found


@dataclass(frozen=True)
class Call:
    """One call of a kernel as the forward pass makes it."""

    name: str
    function: Callable
    args: tuple
    options: dict[str, object]


def record(model: Model, *, rows: int, depth: int) -> list[Call]:
    """The kernel calls of one forward pass, in order, on `depth` zeros in the cache; the argmax of its rows last."""
    calls: list[Call] = []
    names = {id(model.params.output): "output"}  # of every matrix by its identity
    for layer in model.params.layers:
        names |= {id(w): name for name, w in layer._asdict().items() if isinstance(w, QTensor)}

    def recording(kind: str, function: Callable) -> Callable:
        def call(*args, **options):
            matrices = [names[id(w)] for w in args[1]] if kind == "linear" else []
            calls.append(Call(" ".join([kind, *matrices]), function, args, options))
            return function(*args, **options)

        return call

    kinds = ("linear", "embed", "attend")
    own: dict[str, Any] = {kind: recording(kind, getattr(model.kernels, kind)) for kind in kinds}
    forward = llama.make_forward(model.config, replace(model.kernels, layers=None, **own))
    capacity = model.capacity_for(depth + rows)
    cache = model.new_cache(1, capacity)._replace(length=jnp.asarray([depth], jnp.int32))
    tokens = jnp.asarray(token_ids(rows, model.config.vocab_size))[None]
    out, _ = forward(model.params_for(capacity), tokens, cache, n_valid_B=jnp.asarray([rows], jnp.int32))
    calls.append(Call("argmax", model.kernels.argmax, (out.logits[0],), {}))
    return calls


def _seconds(calls: Sequence[Call]) -> float:
    """Seconds of these calls, one after the other: the best of three loops on the device."""
    leaves, tree = jax.tree.flatten([(call.args, call.options) for call in calls])
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def once(values: list[jax.Array], caches: Pytree, link: jax.Array):
        """All calls; each waits for the one before, since its input is made to depend on that one's output."""
        whole = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            whole[i] = value
        new = []
        for call, (args, options), kept in zip(calls, jax.tree.unflatten(tree, whole), caches, strict=True):
            args = list(args)
            at = 1 if call.name == "embed" else 0
            args[at] = args[at] + link.astype(args[at].dtype)
            args[3:5] = kept or args[3:5]
            out = call.function(*args, **options)
            first = jax.tree.leaves(out)[0]
            link = (first.ravel()[0] * 0).astype(jnp.float32)
            new.append(tuple(out[1:]) if kept else ())
        return new, link

    @jax.jit
    def loop(values, caches, times):
        def body(_, state):
            return once(values, *state)

        return jax.lax.fori_loop(jnp.int32(0), times, body, (caches, jnp.float32(0)))[1]

    values = [leaves[i] for i in arrays]
    caches = [tuple(call.args[3:5]) if call.name == "attend" else () for call in calls]

    def timed(times: int) -> float:
        return seconds(lambda: loop(values, caches, jnp.int32(times)).block_until_ready())

    timed(1)
    times = max(2, int(np.ceil(_LONG_ENOUGH / max(timed(2) / 2, 1e-6))))
    return min(timed(times) for _ in range(3)) / times


def _bytes(call: Call, tokens: int) -> int:
    """Bytes of weights and cache that a call reads."""
    if call.name == "attend":  # a layer's keys [B, G, C/16, d, 16] and values [B, G, C, d] have C slots
        slots = call.args[4].shape[2]
        return sum(a.size // slots * tokens * a.dtype.itemsize for a in call.args[3:5])
    if call.name == "embed":
        return call.args[0].nbytes // call.args[0].shape[0] * call.args[1].size
    leaves = jax.tree.leaves(call.args, is_leaf=lambda x: isinstance(x, QTensor))
    return sum(w.nbytes for w in leaves if isinstance(w, QTensor))


def chrome_trace(report: Json, rounds: Sequence[Mapping[str, float]], *, model: str) -> Json:
    """The result of `profile` as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

    One track has the stages of every round as they were measured, laid one after the other; another the kernels of one
    forward pass, each call as long as its kernel's mean.
    """
    events: list[Json] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"specsparse: {model}"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "rounds"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": f"a forward of {report['rows']} rows"}},
    ]

    def add(tid: int, start: float, name: str, seconds: float, **args: object) -> float:
        event = {"ph": "X", "pid": 1, "tid": tid, "name": name, "ts": 1e6 * start, "dur": 1e6 * seconds, "args": args}
        events.append(event)
        return start + seconds

    at = 0.0
    for number, stages in enumerate(rounds):
        for name in STAGES:
            at = add(1, at, name, max(stages[name], 0.0), round=number)
    at, kernels = 0.0, report["kernels"]
    layers = max(kernel["calls"] for kernel in kernels)  # a kernel for each call, as the layers make them
    of_layers = [kernel for kernel in kernels if kernel["calls"] == layers]
    first = kernels.index(of_layers[0])
    after = [kernel for kernel in kernels[first:] if kernel not in of_layers]
    for kernel in (*kernels[:first], *of_layers * layers, *after):
        facts = {"GB/s": round(kernel["bytes_per_second"] / 1e9, 2), "calls": kernel["calls"]}
        at = add(2, at, kernel["name"], kernel["seconds"] / kernel["calls"], **facts)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def parts(report: Json) -> Iterator[Table | str]:
    """The stages and the kernels as tables, and their sum."""
    stages, count, kernels, forward_s = (report[name] for name in ("stages", "rounds", "kernels", "forward_s"))
    if count:
        whole = sum(stages.values())
        rows = ((name, str(count), f"{1e3 * s / count:.3f}", f"{s / whole:.1%}") for name, s in stages.items())
        yield tables.new("stage", "rounds", "ms a round", "share", rows=rows)
    total, nbytes = (sum(kernel[name] for kernel in kernels) for name in ("seconds", "nbytes"))
    yield tables.new("kernel", "calls", "ms", "GB/s", "share", rows=(
        (k["name"], str(k["calls"]), f"{1e3 * k['seconds']:.3f}", f"{k['bytes_per_second'] / 1e9:.1f}",
         f"{k['seconds'] / total:.1%}")
        for k in kernels
    ))  # fmt: skip
    yield (
        f"a forward of {report['rows']} rows after {report['depth']} tokens: {1e3 * forward_s:.3f} ms as it runs "
        f"({nbytes / forward_s / 1e9:.1f} of {report['read_bandwidth'] / 1e9:.1f} GB/s), "
        f"{1e3 * total:.3f} ms kernel by kernel"
    )
