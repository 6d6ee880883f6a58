"""What the roofline says of one file, beside what was measured, as plain values."""

from collections.abc import Sequence

from specsparse.data.devices import sheets
from specsparse.engine.config import ModelConfig
from specsparse.measure.costs import devices, traffic
from specsparse.measure.costs.devices import Device
from specsparse.measure.costs.roofline import Roofline
from specsparse.measure.costs.traffic import Traffic
from specsparse.runtime.times.kept import CostTable
from specsparse.speculative import expected
from specsparse.support.files import Json

WEIGHT_TYPES = ("F32", "F16", "Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "IQ4_XS", "Q3_K", "Q2_K")
KV_LENGTHS = (256, 1024, 4096, 16384, 32768)
ALPHAS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def this_machine(table: CostTable) -> Device:
    """The machine a table was measured on."""
    title = str(table.identity.get("cpu", devices.THIS))
    return Device(devices.THIS, title, table.bandwidth, table.f32, None, table.int8, overlap=0.0, measured=True)


def build(
    load: Traffic, config: ModelConfig, device: Device, *, table: CostTable | None = None, kv_length: int | None = None
) -> Json:
    """The whole report.

    Args:
        load: of the file.
        config: of the model, for cache sizes.
        device: to predict for.
        table: what was measured on it, or None.
        kv_length: tokens in the cache; the table's by default.
    """
    if kv_length is None:
        kv_length = table.kv_base if table else 128
    roofline = Roofline(device, load)
    others = [device, *(d for d in sheets().values() if d.name != device.name)]
    return {
        "device": _device(device),
        "kv_length": kv_length,
        "weights": {"bytes_read": load.weight_bytes, "bytes_by_type": load.by_type()},
        "forwards": forwards(roofline, table, kv_length),
        "decode": decode(roofline, table, config.context_length),
        "weight_types": [_weight_type(load, name, device, kv_length) for name in WEIGHT_TYPES],
        "kv_cache": _kv_cache(config, load),
        "devices": [_other(Roofline(d, load), kv_length) for d in others],
        "speculation": speculation(roofline, table, kv_length),
        "measured": None if table is None else table.to_dict(),
    }


def forwards(roofline: Roofline, table: CostTable | None, kv_length: int) -> list[Json]:
    """v(n) predicted and measured, with the deviation between repeats."""
    out = []
    for n in table.ns if table else _ROWS:
        row: Json = {
            "n": n,
            "predicted_s": roofline.forward_s(n, kv_length),
            "predicted_v": roofline.v(n, kv_length),
            "bound": "memory" if roofline.memory_s(n, kv_length) >= roofline.compute_s(n, kv_length) else "compute",
        }
        if table:
            row |= {
                "measured_s": table.forward(n, kv_length),
                "measured_v": table.forward(n, kv_length) / table.forward(1, kv_length),
                "spread": table.residuals.get("spread", {}).get(f"near {n}"),
            }
        out.append(row)
    return out


def decode(roofline: Roofline, table: CostTable | None, context: int) -> list[Json]:
    """Tokens per second of plain decoding by tokens in the cache; the measured ones beyond the fit are predictions."""
    out = []
    for kv in (length for length in (128, 512, *KV_LENGTHS[1:]) if length <= context):
        row = {"kv_length": kv, "predicted": roofline.tokens_per_second(kv)}
        if table:
            row |= {"measured": 1 / table.step(kv), "share": 1 / table.step(kv) / row["predicted"]}
        out.append(row)
    return out


def speculation(roofline: Roofline, table: CostTable | None, kv_length: int) -> list[dict[str, float]]:
    """The best draft length and its speed-up for a draft that costs nothing, by acceptance."""
    out = []
    for alpha in ALPHAS:
        gamma, gain = expected.best_gamma(alpha, lambda n: roofline.v(n, kv_length))
        row: dict[str, float] = {"alpha": alpha, "predicted_gamma": gamma, "predicted_speedup": gain}
        if table:
            row["measured_gamma"], row["measured_speedup"] = table.best_gamma(alpha, kv_length=kv_length)
        out.append(row)
    return out


def _device(device: Device) -> Json:
    return {
        "name": device.name,
        "title": device.title,
        "measured": device.measured,
        "bytes_per_second": device.bandwidth,
        "macs_per_second": {kind: device.peak(kind) for kind in ("int8", "f16", "f32")},
    }


def _weight_type(load: Traffic, name: str, device: Device, kv_length: int) -> Json:
    as_type = load.requantised(name)
    return {
        "type": name,
        "bits_per_weight": traffic.bits_per_weight(name),
        "bytes_read": as_type.weight_bytes,
        "tokens_per_second": Roofline(device, as_type).tokens_per_second(kv_length),
        "in_file": any(m.macs_per_row and m.type_name == name for m in load.matrices),
    }


def _kv_cache(config: ModelConfig, load: Traffic) -> list[Json]:
    """Bytes that a cache takes and, where layers have windows, those that a step reads in the model's own type."""
    rows: list[Json] = []
    for n in KV_LENGTHS:
        read = {"read": load.read_bytes(1, n - 1) - load.weight_bytes} if load.windows else {}
        rows.append({"kv_length": n, **{kind: traffic.kv_bytes(config, n, kind) for kind in ("f32", "f16")}, **read})
    return rows


def _other(roofline: Roofline, kv_length: int) -> Json:
    return {
        **_device(roofline.device),
        "tokens_per_second": roofline.tokens_per_second(kv_length),
        "v8": roofline.v(8, kv_length),
        "rows_until_compute": roofline.balance(),
    }


def worst_fit(residuals: Json) -> float | None:
    """Largest relative error of the fit over the cache's length; None where there is none."""
    errors: Sequence[float] = list((residuals.get("kv") or {}).values())
    return max(map(abs, errors)) if errors else None
