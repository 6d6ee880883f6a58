"""The roofline of one file beside measured times, as plain values and as tables for the terminal."""

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from specsparse.data.devices import Device, sheets
from specsparse.engine.config import ModelConfig
from specsparse.measure.costs.roofline import Roofline, Traffic, bits_per_weight, kv_bytes
from specsparse.runtime.timing_cache import CostTable
from specsparse.speculative import expected
from specsparse.support.files import Json
from specsparse.support.tables import cell, new

WEIGHT_TYPES = ("F32", "F16", "Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "IQ4_XS", "Q3_K", "Q2_K")
KV_LENGTHS = (256, 1024, 4096, 16384, 32768)
ALPHAS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
MIB = 2**20
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def roofline_report(
    load: Traffic, config: ModelConfig, device: Device, *, table: CostTable | None = None, kv_length: int | None = None
) -> Json:
    """The whole report of a model with that traffic, predicted for a device; `table` has what was measured on it.
    `kv_length` are tokens in the cache, by default the table's."""
    if kv_length is None:
        kv_length = table.kv_base if table else 128
    roofline = Roofline(device, load)
    others = [Roofline(d, load) for d in (device, *(d for d in sheets().values() if d.name != device.name))]
    rates = [
        {
            "name": d.name, "title": d.title, "measured": d.measured, "bytes_per_second": d.bandwidth,
            "macs_per_second": {kind: d.peak(kind) for kind in ("int8", "f16", "f32")},
        }
        for d in (other.device for other in others)
    ]  # fmt: skip
    weight_types = []
    for name in WEIGHT_TYPES:
        as_type = load.requantised(name)
        weight_types.append({
            "type": name,
            "bits_per_weight": bits_per_weight(name),
            "bytes_read": as_type.weight_bytes,
            "tokens_per_second": Roofline(device, as_type).tokens_per_second(kv_length),
            "in_file": any(m.macs_per_row and m.type_name == name for m in load.matrices),
        })  # fmt: skip
    caches: list[Json] = []
    for n in KV_LENGTHS:  # where layers have windows, what a step reads in the model's own type too
        read = {"read": load.read_bytes(1, n - 1) - load.weight_bytes} if load.windows else {}
        caches.append({"kv_length": n, **{kind: kv_bytes(config, n, kind) for kind in ("f32", "f16")}, **read})
    forwards, decode, speculation = [], [], []
    for n in table.ns if table else ROWS:
        predicted, memory_bound = roofline.forward_s(n, kv_length), roofline.memory_s(n, kv_length)
        memory_bound = memory_bound >= roofline.compute_s(n, kv_length)
        row: Json = {"n": n, "predicted_s": predicted, "predicted_v": roofline.v(n, kv_length),
                     "bound": "memory" if memory_bound else "compute"}  # fmt: skip
        if table:
            row["measured_s"] = table.forward(n, kv_length)
            row["measured_v"] = row["measured_s"] / table.forward(1, kv_length)
            row["spread"] = table.residuals.get("spread", {}).get(f"near {n}")
        forwards.append(row)
    for kv in (n for n in (128, 512, *KV_LENGTHS[1:]) if n <= config.context_length):
        row = {"kv_length": kv, "predicted": roofline.tokens_per_second(kv)}
        if table:  # beyond the lengths of the fit this is a prediction too
            row |= {"measured": 1 / table.step(kv), "share": 1 / table.step(kv) / row["predicted"]}
        decode.append(row)
    for alpha in ALPHAS:
        gamma, gain = expected.best_gamma(alpha, lambda n: roofline.v(n, kv_length))
        row = {"alpha": alpha, "predicted_gamma": gamma, "predicted_speedup": gain}
        if table:
            row["measured_gamma"], row["measured_speedup"] = table.best_gamma(alpha, kv_length=kv_length)
        speculation.append(row)
    return {
        "device": rates[0],
        "kv_length": kv_length,
        "weights": {"bytes_read": load.weight_bytes, "bytes_by_type": load.by_type()},
        "forwards": forwards,
        "decode": decode,
        "weight_types": weight_types,
        "kv_cache": caches,
        "devices": [
            {
                **rate,
                "tokens_per_second": other.tokens_per_second(kv_length),
                "v8": other.v(8, kv_length),
                "rows_until_compute": other.balance(),
            }
            for rate, other in zip(rates, others, strict=True)
        ],
        "speculation": speculation,
        "measured": None if table is None else table.to_dict(),
    }


def tables(report: Json) -> Iterator[Table | Text]:
    """All tables with a heading each. A report with `measured` times has more columns."""
    device, fit = report["device"], report["measured"]
    measured, macs = fit is not None, device["macs_per_second"]
    rates = ", ".join(f"{kind} {_digits(macs[kind] / 1e9)}" for kind in ("int8", "f16", "f32"))
    source = "measured" if device["measured"] else "by its data sheet"
    yield Text(f"{device['title']}: reads {device['bytes_per_second'] / 1e9:.1f} GB/s, GMAC/s: {rates} ({source})")
    if measured:
        errors: Sequence[float] = list((fit["residuals"].get("kv") or {}).values())
        off = f"fit over the cache's length off by at most {max(map(abs, errors)):.1%}, " if errors else ""
        spread = max((fit["residuals"].get("spread") or {"": 0.0}).values())
        step, call = 1e3 * fit["plain_s"], f"a call of the loop {1e3 * fit['host_s']:.2f} ms"
        yield Text(f"plain step {step:.2f} ms, {call}; {off}deviation of timings at most {spread:.1%}")
    forwards = []
    for row in report["forwards"]:
        cells = [str(row["n"]), f"{1e3 * row['predicted_s']:.3f}", f"{row['predicted_v']:.2f}", row["bound"]]
        if measured:
            spread = "-" if row["spread"] is None else f"{row['spread']:.0%}"
            cells += [f"{1e3 * row['measured_s']:.3f}", f"{row['measured_v']:.2f}", spread]
            cells += [f"{row['predicted_s'] / row['measured_s']:.0%}"]
        forwards.append(cells)
    columns = ("n", "predicted, ms", "v(n)", "bound", *(("measured, ms", "v(n)", "±", "of roofline") * measured))
    yield from _part(f"\nforward of n rows, {report['kv_length']} tokens in the cache", columns, forwards)
    decode = [
        (str(row["kv_length"]), _digits(row["predicted"]),
         *((_digits(row["measured"]), f"{row['share']:.0%}") if measured else ()))
        for row in report["decode"]
    ]  # fmt: skip
    columns = ("tokens in cache", "predicted", *(("measured", "of roofline") * measured))
    yield from _part("plain decoding, tok/s", columns, decode)
    types = [
        (row["type"], f"{row['bits_per_weight']:.2f}", f"{row['bytes_read'] / MIB:.1f}",
         _digits(row["tokens_per_second"]), "yes" if row["in_file"] else "")
        for row in report["weight_types"]
    ]  # fmt: skip
    heading = f"weights by quantisation, tok/s on {report['device']['name']}"
    yield from _part(heading, ("type", "bits/weight", "MiB read", "tok/s", "in the file"), types)
    extra = {"read": "a step reads"} if "read" in report["kv_cache"][0] else {}
    kinds = {"f32": "f32", "f16": "f16, bf16", **extra}
    caches = [(str(row["kv_length"]), *(f"{row[key] / MIB:.1f}" for key in kinds)) for row in report["kv_cache"]]
    yield from _part("KV cache of one sequence, MiB", ("tokens", *kinds.values()), caches)
    others = [
        (row["name"], f"{row['bytes_per_second'] / 1e9:.1f}", _digits(row["tokens_per_second"]), f"{row['v8']:.2f}",
         str(row["rows_until_compute"]))
        for row in report["devices"]
    ]  # fmt: skip
    columns = ("device", "GB/s", "tok/s", "v(8)", "rows until compute-bound")
    yield from _part("other devices: what this file could do at best", columns, others)
    free = [
        (f"{row['alpha']:.1f}", str(row["predicted_gamma"]), f"{row['predicted_speedup']:.2f}",
         *((str(row["measured_gamma"]), f"{row['measured_speedup']:.2f}") if measured else ()))
        for row in report["speculation"]
    ]  # fmt: skip
    columns = ("alpha", "gamma, roofline", "speed-up", *(("gamma, measured v(n)", "speed-up") * measured))
    yield from _part("speculation with a draft that costs nothing: best gamma and speed-up", columns, free)
    if report.get("drafting"):
        yield Text("drafting, measured on the built-in prompts: cost, acceptance, predicted speed-up", style="bold")
        # Chains at the length that suits them; `gamma` of a tree is its nodes a round, and all its cost is the round's.
        price = ("a round, ms", "a token, ms", "in plain steps")
        table = new("method", *price, "alpha", "gamma", "tok/round", "speed-up", wrap=(0,))
        for row in report["drafting"]:
            steps = (row["round_s"] + row["token_s"] * row["gamma"]) / row["step_s"]
            costs = (f"{1e3 * row['round_s']:.3f}", f"{1e3 * row['token_s']:.3f}", f"{steps:.2f}")
            gamma, tokens = f"{row['gamma']:.3g}", f"{row['tokens']:.2f}"
            gain = f"{row['predicted_speedup']:.2f}"
            table.add_row(row["method"], *costs, cell(row["alpha"], ".2f"), gamma, tokens, gain)
        yield table


def _part(heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Table | Text]:
    yield Text(heading, style="bold")
    yield new(*columns, rows=rows, left=())


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
