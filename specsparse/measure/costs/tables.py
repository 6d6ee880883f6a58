"""The roofline's report in the terminal."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from specsparse.measure.costs.predicted import worst_fit
from specsparse.support.files import Json
from specsparse.support.tables import new

MIB = 2**20


def tables(report: Json) -> Iterator[Table | Text]:
    """All tables with a heading each."""
    device, measured = report["device"], report["measured"]
    yield Text(_device_line(device))
    if measured:
        yield Text(_fit_line(measured))
    yield Text(f"\nforward of n rows, {report['kv_length']} tokens in the cache", style="bold")
    yield _forwards(report["forwards"])
    yield Text("plain decoding, tok/s", style="bold")
    yield _decode(report["decode"])
    yield Text(f"weights by quantisation, tok/s on {device['name']}", style="bold")
    yield _weights(report["weight_types"])
    yield Text("KV cache of one sequence, MiB", style="bold")
    yield _kv(report["kv_cache"])
    yield Text("other devices: what this file could do at best", style="bold")
    yield _devices(report["devices"])
    yield Text("speculation with a draft that costs nothing: best gamma and speed-up", style="bold")
    yield _speculation(report["speculation"])
    if report.get("drafting"):
        yield Text("drafting, measured on the built-in prompts: cost, acceptance, predicted speed-up", style="bold")
        yield _drafting(report["drafting"])


def _device_line(device: Json) -> str:
    macs = device["macs_per_second"]
    source = "measured" if device["measured"] else "by its data sheet"
    rates = ", ".join(f"{kind} {_significant(macs[kind] / 1e9)}" for kind in ("int8", "f16", "f32"))
    return f"{device['title']}: reads {device['bytes_per_second'] / 1e9:.1f} GB/s, GMAC/s: {rates} ({source})"


def _fit_line(measured: Json) -> str:
    residuals, error = measured["residuals"], worst_fit(measured["residuals"])
    fit = f"fit over the cache's length off by at most {error:.1%}, " if error is not None else ""
    spread = residuals.get("spread") or {"": 0.0}
    step = 1e3 * measured["plain_s"]
    call = f"a call of the loop {1e3 * measured['host_s']:.2f} ms"
    return f"plain step {step:.2f} ms, {call}; {fit}deviation of timings at most {max(spread.values()):.1%}"


def _forwards(rows: list[Json]) -> Table:
    measured = "measured_s" in rows[0]
    extra = ("measured, ms", "v(n)", "±", "of roofline") if measured else ()
    table = new("n", "predicted, ms", "v(n)", "bound", *extra, left=())
    for row in rows:
        cells = [str(row["n"]), f"{1e3 * row['predicted_s']:.3f}", f"{row['predicted_v']:.2f}", row["bound"]]
        if measured:
            spread = "-" if row["spread"] is None else f"{row['spread']:.0%}"
            cells += [f"{1e3 * row['measured_s']:.3f}", f"{row['measured_v']:.2f}", spread]
            cells += [f"{row['predicted_s'] / row['measured_s']:.0%}"]
        table.add_row(*cells)
    return table


def _decode(rows: list[Json]) -> Table:
    measured = bool(rows) and "measured" in rows[0]
    extra = ("measured", "of roofline") if measured else ()
    table = new("tokens in cache", "predicted", *extra, left=())
    for row in rows:
        more = (_significant(row["measured"]), f"{row['share']:.0%}") if measured else ()
        table.add_row(str(row["kv_length"]), _significant(row["predicted"]), *more)
    return table


def _weights(rows: list[Json]) -> Table:
    table = new("type", "bits/weight", "MiB read", "tok/s", "in the file", left=())
    for row in rows:
        size, rate = f"{row['bytes_read'] / MIB:.1f}", _significant(row["tokens_per_second"])
        table.add_row(row["type"], f"{row['bits_per_weight']:.2f}", size, rate, "yes" if row["in_file"] else "")
    return table


def _kv(rows: list[Json]) -> Table:
    extra = {"read": "a step reads"} if "read" in rows[0] else {}
    columns = {"f32": "f32", "f16": "f16, bf16", **extra}
    table = new("tokens", *columns.values(), left=())
    for row in rows:
        table.add_row(str(row["kv_length"]), *(f"{row[key] / MIB:.1f}" for key in columns))
    return table


def _devices(rows: list[Json]) -> Table:
    table = new("device", "GB/s", "tok/s", "v(8)", "rows until compute-bound", left=())
    for row in rows:
        rate = _significant(row["tokens_per_second"])
        gigabytes = f"{row['bytes_per_second'] / 1e9:.1f}"
        table.add_row(row["name"], gigabytes, rate, f"{row['v8']:.2f}", str(row["rows_until_compute"]))
    return table


def _speculation(rows: list[Json]) -> Table:
    measured = "measured_gamma" in rows[0]
    extra = ("gamma, measured v(n)", "speed-up") if measured else ()
    table = new("alpha", "gamma, roofline", "speed-up", *extra, left=())
    for row in rows:
        more = (str(row["measured_gamma"]), f"{row['measured_speedup']:.2f}") if measured else ()
        table.add_row(f"{row['alpha']:.1f}", str(row["predicted_gamma"]), f"{row['predicted_speedup']:.2f}", *more)
    return table


def _drafting(rows: list[Json]) -> Table:
    """Chains at the length that suits them; of a tree `gamma` is its nodes a round, and all its cost is the round's."""
    price = ("a round, ms", "a token, ms", "in plain steps")
    table = new("method", *price, "alpha", "gamma", "tok/round", "speed-up", wrap=(0,))
    for row in rows:
        steps = (row["round_s"] + row["token_s"] * row["gamma"]) / row["step_s"]
        alpha = "-" if row["alpha"] is None else f"{row['alpha']:.2f}"
        gamma, tokens = f"{row['gamma']:.3g}", f"{row['tokens']:.2f}"
        costs = (f"{1e3 * row['round_s']:.3f}", f"{1e3 * row['token_s']:.3f}", f"{steps:.2f}")
        table.add_row(row["method"], *costs, alpha, gamma, tokens, f"{row['predicted_speedup']:.2f}")
    return table


def _significant(value: float) -> str:
    """Three digits or more, no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
