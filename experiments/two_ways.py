"""Claim: two programs with transfers between them overlap hot and cold neurons as well as one program that runs
its cold part on the host, by `compute_on("device_host")` or by a host callback.

One sparse FFN, its neurons in two halves, each on a device of its own: two CPU devices where there is no accelerator
(they share cores and memory, so no way can beat one device there; what differs is what each way costs).

Expected: equal bits in every way; times within the noise on two CPU devices, see docs/LOG.md.
Run time: under a minute.
Command: python experiments/two_ways.py --shape 4096x11008 --active 0.1
"""

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import jax

jax.config.update("jax_num_cpu_devices", 2)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from gguf import GGMLQuantizationType as GGML  # noqa: E402
from gguf import quants  # noqa: E402
from jax.experimental.compute_on import compute_on  # noqa: E402

from specsparse import kernels as kernel_api  # noqa: E402
from specsparse.kernels import Kernels, pack_neurons  # noqa: E402
from specsparse.powerinfer.hot_cold import Part, combine, kernels_beside, two_devices  # noqa: E402
from specsparse.support.interleaved import interleaved, seconds  # noqa: E402

ACT = "relu"


@dataclass(frozen=True)
class Halves:
    """What is computed: rows of hot and cold neurons on their devices, which of them a token keeps, and its row."""

    hot: Part
    cold: Part
    keep_hot: jax.Array
    keep_cold: jax.Array
    x_RD: jax.Array


def halves(width: int, neurons: int, kind: str, active: float, hot: jax.Device, cold: jax.Device) -> Halves:
    """Random weights and masks."""
    rng, count = np.random.default_rng(0), neurons // 2

    def part(device: jax.Device) -> Part:
        matrices = [rng.standard_normal((count, width), np.float32) / width**0.5 for _ in range(3)]
        packed = [pack_neurons(quants.quantize(m, GGML[kind]), GGML[kind], m.shape) for m in matrices]
        return jax.device_put(Part(*packed), device)

    def keep(device: jax.Device) -> jax.Array:
        return jax.device_put((rng.random((1, count)) < active).astype(np.uint8), device)

    x_RD = jax.device_put(rng.standard_normal((1, width), np.float32), hot)
    return Halves(part(hot), part(cold), keep(hot), keep(cold), x_RD)


def part_sum(kernels: Kernels, rows: Part, keep, x_RD):
    """f32[1, D], what the kept neurons of a part add."""
    one = jnp.ones((1,), jnp.int32)
    return kernels.sparse_ffn(x_RD, keep, rows.gate, rows.up, rows.down_t, act=ACT, up_act=None, n_valid=one)[0]


def ways(h: Halves, kernels: Kernels, beside: Kernels, cold: jax.Device) -> dict[str, Callable[[], jax.Array]]:
    """Each way as a call that gives f32[1, D] on the first device, ready."""
    hot_part, cold_part = jax.jit(partial(part_sum, kernels)), jax.jit(partial(part_sum, beside))
    joined, worker = jax.jit(combine), ThreadPoolExecutor(1)
    hot = h.x_RD.device

    def on_cold(x_RD) -> np.ndarray:
        return np.asarray(cold_part(h.cold, h.keep_cold, jax.device_put(np.asarray(x_RD), cold)))

    def programs(*, overlap: bool) -> jax.Array:
        pending = worker.submit(on_cold, h.x_RD) if overlap else None
        first = jax.block_until_ready(hot_part(h.hot, h.keep_hot, h.x_RD))
        second = pending.result() if pending else on_cold(h.x_RD)
        return jax.block_until_ready(joined(h.x_RD, jax.device_put(second, hot), first))

    @jax.jit
    def callback(rows, keep, x_RD):
        second = jax.pure_callback(on_cold, jax.ShapeDtypeStruct(x_RD.shape, x_RD.dtype), x_RD)
        return combine(x_RD, second, part_sum(kernels, rows, keep, x_RD))

    @jax.jit
    def in_one_program(rows, keep, rows_cold, keep_cold, x_RD):
        second = compute_on("device_host")(jax.jit(partial(part_sum, beside)))(rows_cold, keep_cold, x_RD)
        return combine(x_RD, second, part_sum(kernels, rows, keep, x_RD))

    moved = jax.device_put((h.cold, h.keep_cold), hot)
    return {
        "two programs, in turn": partial(programs, overlap=False),
        "two programs, overlapped": partial(programs, overlap=True),
        "host callback": lambda: jax.block_until_ready(callback(h.hot, h.keep_hot, h.x_RD)),
        "compute_on": lambda: jax.block_until_ready(in_one_program(h.hot, h.keep_hot, *moved, h.x_RD)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="ways to run cold neurons beside hot ones")
    parser.add_argument("--shape", default="4096x11008", help="width x neurons")
    parser.add_argument("--type", choices=("F16", "Q8_0", "Q4_0"), default="F16")
    parser.add_argument("--active", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    width, neurons = (int(n) for n in args.shape.split("x"))
    devices = two_devices()
    kernels = kernel_api.get("native" if devices.hot.platform == "cpu" else "xla")
    found = ways(
        halves(width, neurons, args.type, args.active, devices.hot, devices.cold),
        kernels, kernels_beside(devices.hot, kernels), devices.cold,
    )  # fmt: skip
    outputs = {name: np.asarray(way()) for name, way in found.items()}
    wanted = outputs["two programs, in turn"]
    same = {name: bool(np.array_equal(out, wanted)) for name, out in outputs.items()}
    calls = {name: partial(seconds, way) for name, way in found.items()}
    print(f"{args.shape} {args.type}, {args.active:.0%} active, half on {devices.hot}, half on {devices.cold}")
    for name, taken in interleaved(calls, repeats=args.repeats, warm_up=0).items():
        low, mid, high = (1e3 * float(np.quantile(taken, q)) for q in (0.25, 0.5, 0.75))
        print(f"{name:26s} {mid:7.3f} ms ({low:.3f} to {high:.3f}), bits {'equal' if same[name] else 'DIFFER'}")
    return 0 if all(same.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
