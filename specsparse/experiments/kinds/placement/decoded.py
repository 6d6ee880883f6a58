"""A placement carried out: decoding on one device and on two, what ran when, and what hot=dense changes."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from specsparse import api
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.experiments.kind import Engine, Lab
from specsparse.experiments.kinds.placement.settings import PlacementSettings
from specsparse.powerinfer.hot_cold import Span, TwoDevices, host_kernels, waiting
from specsparse.powerinfer.placement import Placement
from specsparse.predictors.evaluate import ModelQuality, model_sums
from specsparse.support import files, tables, terminal
from specsparse.support.interleaved import interleaved

TRACE_FILE = "trace.json"
_PARTS = ("attention", "cold", "hot")


@dataclass(frozen=True)
class Timing:
    """Seconds of a decoding step, the median.

    Attributes:
        one: on one device; on the host alone where the two are named.
        in_turn, overlapped: on two, one after the other and at the same time.
        busy: by part of the model, each waited for.
        layers: whole layers offloaded within the same budget, on the two devices.
        waits: of each device for the other's part of an FFN, over all layers.
        crossed: bytes that go to each device for a token.
    """

    one: float
    in_turn: float | None = None
    overlapped: float | None = None
    busy: dict[str, float] | None = None
    layers: float | None = None
    waits: dict[str, float] | None = None
    crossed: dict[str, float] | None = None

    @property
    def over_halves(self) -> float | None:
        """Overlapped time over the sum of both devices' own work."""
        return None if self.busy is None else self.overlapped / sum(self.busy.values())

    @property
    def over_layers(self) -> float | None:
        """How many times as fast as whole layers offloaded."""
        return None if self.layers is None or self.overlapped is None else self.layers / self.overlapped


def measured(
    cfg: PlacementSettings, placement: Placement, ids: np.ndarray, lab: Lab, *, layers: Placement | None = None
) -> dict[str, Any]:
    """Times of `placement.decode` tokens after `ids`, a trace where there are two devices, and the KL of hot=dense.

    Args:
        cfg: the run.
        placement: the chosen one.
        ids: int32[n], a text.
        lab: where it runs.
        layers: whole layers within the same budget, the baseline; None is not measured.
    """
    load, named = _loader(cfg, placement, lab.engine), cfg.placement.devices
    with terminal.busy(lab.console, f"decoding {cfg.placement.decode} tokens"):
        model = load(1 if named is None else (named[1], named[1]))
        one = _step_seconds(model, ids, cfg.placement.decode)
        tokens = _greedy(model, ids, cfg.placement.decode)
        found: dict[str, Any] = {"ffn": model.ffn, "tokens": tokens}
        if cfg.placement.hot == "dense":
            found["quality"] = asdict(_quality(load(1, hot="masked"), model, ids))
        timing = Timing(one)
        if named is not None or len(jax.devices("cpu")) > 1 or jax.devices()[0].platform != "cpu":
            both = 2 if named is None else tuple(named)
            whole = None
            if layers is not None:
                whole = _step_seconds(load(both, placement=layers), ids, cfg.placement.decode)
            model = load(both)
            timing = _two(model, model.devices, ids, cfg.placement.decode, one, lab.directory)
            timing = replace(timing, layers=whole)
            found["same_tokens"] = _greedy(model, ids, cfg.placement.decode) == tokens
    lab.console.print(_table(timing, found))
    return {**found, **asdict(timing), "over_halves": timing.over_halves, "over_layers": timing.over_layers}


def _loader(cfg: PlacementSettings, placement: Placement, engine: Engine) -> Callable[..., Model]:
    def load(
        devices: int | tuple[str, str], *, hot: str = cfg.placement.hot, placement: Placement = placement
    ) -> Model:
        options = {"placement": placement, "hot": hot, "devices": devices, "threshold": cfg.ffn.threshold}
        given = cfg.model.overrides()
        if not isinstance(devices, int) and {name.partition(":")[0] for name in devices} == {"cpu"}:
            given = {"backend": host_kernels().name, **given}
        return engine.load(cfg.model.path, **options, **given)

    return load


def _two(model: Model, two: TwoDevices, ids: np.ndarray, count: int, one: float, directory: Path) -> Timing:
    two.overlap = False
    in_turn = _step_seconds(model, ids, count)
    spans = list[Span]()
    two.watch = lambda *span: spans.append(span)
    _step_seconds(model, ids, count, watched=spans.clear)
    busy = {part: sum(end - begin for name, _, begin, end in spans if name == part) / count for part in _PARTS}
    two.overlap = True
    _step_seconds(model, ids, count, watched=spans.clear)
    waits = {side: seconds / count for side, seconds in waiting(spans).items()}
    files.write_atomically(directory / TRACE_FILE, files.to_json(chrome_trace(spans)))
    two.watch, before = None, dict[str, int]()
    overlapped = _step_seconds(model, ids, count, watched=lambda: before.update(two.crossed.counts()))
    crossed = {side: (nbytes - before[side]) / count for side, nbytes in two.crossed.counts().items()}
    return Timing(one, in_turn, overlapped, busy, waits=waits, crossed=crossed)


def chrome_trace(spans: list[Span]) -> dict[str, object]:
    """Spans (part, layer, begin, end) in the format that chrome://tracing and Perfetto open; a row a device."""
    start = min((begin for _, _, begin, _ in spans), default=0.0)
    events = [
        {"name": f"{part} {layer}", "ph": "X", "pid": 0, "tid": int(part == "cold"),
         "ts": 1e6 * (begin - start), "dur": 1e6 * (end - begin)}
        for part, layer, begin, end in sorted(spans, key=lambda span: span[2])
    ]  # fmt: skip
    names = [{"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": n}}
             for i, n in enumerate(("device 0: attention, hot neurons", "device 1: cold neurons"))]  # fmt: skip
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def _step_seconds(model: Model, ids: np.ndarray, count: int, *, watched: Callable[[], None] = lambda: None) -> float:
    """Median seconds of a forward pass of one token with logits, `ids` in the cache; `watched` is called once warm."""
    capacity = model.capacity_for(len(ids) + 1)
    params, cache = model.params_for(capacity), model.new_cache(1, capacity)
    forward = _compiled(model)
    _, cache = forward(params, jnp.asarray(ids[None, :-1]), cache, want=Want("none"))
    cache = cache._replace(length=cache.length + len(ids) - 1)

    def step() -> float:
        nonlocal cache
        begin = time.perf_counter()
        out, cache = forward(params, jnp.asarray(ids[None, -1:]), cache, want=Want())
        out.logits.block_until_ready()
        return time.perf_counter() - begin

    for _ in range(2):
        step()
    watched()
    return median(interleaved({"step": step}, repeats=count, warm_up=0)["step"])


def _compiled(model: Model) -> Callable:
    def forward(params, tokens_Bn, cache, *, want):
        return model.forward(params, tokens_Bn, cache, want=want)

    return model.devices.jit(forward, donate_argnums=2, static_argnames="want")


def _greedy(model: Model, ids: np.ndarray, count: int) -> list[int]:
    made = api.generate(model, ids, max_tokens=count, ignore_eos=True)
    return list(made.token_ids)


def _quality(wanted: Model, found: Model, ids: np.ndarray) -> ModelQuality:
    """Laws of the next token, with the predicted hot neurons against all hot neurons."""
    sums = model_sums(jnp.asarray(wanted.logits(ids[:-1])), jnp.asarray(found.logits(ids[:-1])), jnp.asarray(ids[1:]))
    return ModelQuality.from_sums(sums)


def _table(timing: Timing, found: dict[str, Any]) -> Table:
    out = tables.new("measured", "ms a token")
    rows = {"one device": timing.one, "two devices, one after the other": timing.in_turn}
    rows |= {"two devices, overlapped": timing.overlapped, "whole layers offloaded": timing.layers}
    rows |= {f"  {part}, waited for": seconds for part, seconds in (timing.busy or {}).items()}
    for name, seconds in rows.items():
        out.add_row(name, "-" if seconds is None else f"{1e3 * seconds:.3f}")
    if timing.busy is not None:
        out.add_row("overlapped / sum of the halves", f"{timing.over_halves:.2f}")
        for side, seconds in (timing.waits or {}).items():
            out.add_row(f"  {side} device waits for the other", f"{1e3 * seconds:.3f}")
        for side, nbytes in (timing.crossed or {}).items():
            out.add_row(f"  KB that go to the {side} device", f"{nbytes / 1e3:.1f}")
        out.add_row("same tokens on one device and two", "yes" if found["same_tokens"] else "NO")
    if "quality" in found:
        out.add_row("hot=dense (lossy): KL to hot=masked, nats", f"{found['quality']['kl']:.4g}")
    return out
