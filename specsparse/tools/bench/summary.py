"""Results -> one JSON-able report: rates, bytes, shares, v(n), ratios."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod

from specsparse.engine.config import PROJECTIONS
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.model import Model
from specsparse.engine.windows import LayerWindows
from specsparse.measure.costs.roofline import KV_BYTES
from specsparse.measure.trials import OURS, Ours, Samples, TrialPlan, TrialResults, paired_ratio, summary
from specsparse.support.files import Json

FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class PassWork:
    """What one test moves and computes.

    Attributes:
        file_bytes: weights as in the file, read once a forward, and the cache: what must be read.
        moved_bytes: the same with the weights as packed.
        macs: multiply-adds of all matrices and of attention.
    """

    file_bytes: float
    moved_bytes: float
    macs: float


def main_type(f: GGUFFile) -> str:
    """The type of most bytes among the layers' matrices."""
    size: Counter[str] = Counter()
    for name, t in f.tensors.items():
        if name.startswith("blk.") and len(t.shape) > 1:
            size[t.type.name] += t.nbytes
    return size.most_common(1)[0][0]


def type_name(f: GGUFFile) -> str:
    """The main type, and that of the output matrix where it is another."""
    main = main_type(f)
    out = f.tensors.get("output.weight") or f.tensors["token_embd.weight"]
    return main if out.type.name == main else f"{main} + {out.type.name}"


def kv_bytes(model: Model, tokens: float) -> float:
    """Bytes of keys and values of `tokens` tokens."""
    c = model.config
    return 2.0 * c.n_layers * c.n_kv_heads * c.head_dim * tokens * KV_BYTES[model.kv_dtype]


def work_of(model: Model, method: str, n: int, depth: int, forwards: int = 1) -> PassWork:
    """The work of a test over n tokens after `depth`, in `forwards` passes of n / forwards rows."""
    c = model.config
    layers = sum(out * cols for out, cols in (c.projection_shape(p) for p in PROJECTIONS)) * c.n_layers
    windows = LayerWindows.of(c)
    seen = windows.attended(n, depth)  # by all rows together
    logits = 1 if method == "prompt" else n
    attention = 2 * c.n_layers * c.n_heads * c.head_dim * seen
    cache = kv_bytes(model, seen if method == "decode" else windows.read(n, depth))
    return PassWork(
        file_bytes=model.footprint.file * forwards + cache,
        moved_bytes=model.footprint.packed * forwards + cache,
        macs=layers * n + c.vocab_size * c.d_model * logits + attention,
    )


def build(
    *,
    model: Model,
    f: GGUFFile,
    plan: TrialPlan,
    results: TrialResults,
    ours: Ours,
    peers: Sequence[Json],
    threads: int,
    peak_memory: Mapping[str, int],
    manifest: Json,
) -> Json:
    """The whole report.

    Args:
        model, f: what ran, and its file.
        plan, results: what was asked and measured.
        ours: the side of specsparse, for what it compiled.
        peers: of each other side `Peer.facts`.
        threads: of both sides.
        peak_memory: most resident bytes before, while loading, and until the warm-up's end.
        manifest: code, packages and machine.
    """
    machine = results.machine
    read = summary(machine.read)
    peak_name = "f32" if main_type(f) in FLOATS else "int8"
    peak: list[float] = getattr(machine, peak_name)
    rows = []
    for test in plan.tests():
        forwards = test.n if test.method == "decode" else 1
        work = work_of(model, test.method, test.n, ours.depth, forwards)
        for side, samples in results.samples[test.name].items():
            row = {"test": test.name, "engine": side, "n": test.n, "depth": ours.depth, **samples.to_dict()}
            row |= _rates(work, samples, read=machine.read, peak=peak)
            rows.append(row)
    return {
        "bench": "specsparse",
        "model": {
            **(manifest.get("model") or {}),
            "name": f.metadata.get("general.name"),
            "type": type_name(f),
            "main_type": main_type(f),
            "parameters": sum(prod(t.shape) for t in f.tensors.values()),
            "bytes_read_per_token": model.footprint.file,
            "bytes_packed_per_token": model.footprint.packed,
        },
        "threads": threads,
        "kv_dtype": model.kv_dtype,
        "plan": {**asdict(plan), "depth": ours.depth, "verify_rows": ours.rows, "verify_forwards": ours.forwards},
        "load_s": model.load_s,
        "compiled": [asdict(c) for c in ours.log.entries],
        "peak_memory_bytes": dict(peak_memory),
        "machine": {
            "read_bytes_per_second": read,
            "int8_macs_per_second": summary(machine.int8) if machine.int8 else None,
            "f32_macs_per_second": summary(machine.f32),
            "compute_peak": peak_name,
        },
        "results": rows,
        "v": _verify(plan, results),
        "peers": list(peers),
        "ratios": {peer["name"]: _ratios(results, peer["name"]) for peer in peers},
        "manifest": {k: v for k, v in manifest.items() if k != "model"},
    }


def _rates(work: PassWork, samples: Samples, *, read: list[float], peak: list[float]) -> Json:
    """Bytes and multiply-adds a second, as shares of what the machine could do in the same repeat (medians)."""
    s, each = statistics.median(samples.seconds), samples.seconds
    return {
        "bytes_per_second": work.file_bytes / s,
        "moved_bytes_per_second": work.moved_bytes / s,
        "share_of_read_bandwidth": paired_ratio([work.file_bytes / x for x in each], read)["median"],
        "macs_per_second": work.macs / s,
        "share_of_compute_peak": paired_ratio([work.macs / x for x in each], peak)["median"] if peak else None,
    }


def _verify(plan: TrialPlan, results: TrialResults) -> dict[str, dict[str, dict[str, float]]]:
    """v(n) = seconds of an n-token pass / seconds of a one-token pass, by side and n."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    for n in plan.ns:
        for side, samples in results.samples[f"v{n}"].items():
            one = results.samples["v1"][side]
            out.setdefault(side, {})[str(n)] = paired_ratio(samples.seconds, one.seconds)
    return out


def _ratios(results: TrialResults, peer: str) -> dict[str, dict[str, float]]:
    """Speed of specsparse / speed of the peer, by test."""
    return {
        name: paired_ratio(sides[peer].seconds, sides[OURS].seconds)
        for name, sides in results.samples.items()
        if peer in sides
    }
