"""What devices can do at best: this machine measured, others by their makers' sheets."""

from dataclasses import dataclass

from specsparse.errors import UserError
from specsparse.kernels import peaks, processor

THIS = "this"
GIGA = 1e9
_TERA_OPS = 0.5e12
"""Makers count a multiply-add as two operations; multiply-adds per second of 1 TFLOPS."""


@dataclass(frozen=True)
class Device:
    """Peaks of a device. All above 0.

    Attributes:
        name: as in configs.
        title: what it is.
        bandwidth: bytes read from memory per second.
        int8, f16, f32: multiply-adds per second, dense; None where the device gains nothing over the next wider type.
        measured: whether these are this machine's own figures, not a sheet's.
    """

    name: str
    title: str
    bandwidth: float
    f32: float
    f16: float | None = None
    int8: float | None = None
    measured: bool = False

    def peak(self, kind: str) -> float:
        """Multiply-adds per second of `kind`, "int8", "f16" or "f32", or the next wider the device has."""
        wider = {"int8": (self.int8, self.f16, self.f32), "f16": (self.f16, self.f32), "f32": (self.f32,)}
        return next(rate for rate in wider[kind] if rate is not None)


DEVICES = {
    device.name: device
    for device in (
        # NVIDIA A100 80GB PCIe datasheet: 1,935 GB/s; 624 TOPS int8, 312 TFLOPS f16 (tensor cores, dense), 19.5 f32.
        Device("a100", "NVIDIA A100 80GB PCIe", 1935 * GIGA, 19.5 * _TERA_OPS, 312 * _TERA_OPS, 624 * _TERA_OPS),
        # NVIDIA H100 datasheet, SXM: 3.35 TB/s; 1,979 TOPS, 989 TFLOPS (the sheet's sparse figures halved), 67 f32.
        Device("h100", "NVIDIA H100 SXM", 3350 * GIGA, 67 * _TERA_OPS, 989 * _TERA_OPS, 1979 * _TERA_OPS),
        # NVIDIA H200 datasheet, SXM: 4.8 TB/s, arithmetic as the H100.
        Device("h200", "NVIDIA H200 SXM", 4800 * GIGA, 67 * _TERA_OPS, 989 * _TERA_OPS, 1979 * _TERA_OPS),
        # NVIDIA Ada architecture whitepaper, appendix A: 1,008 GB/s; 660.6 TOPS, 165.2 TFLOPS f16 with f32 sums, 82.6.
        Device("4090", "NVIDIA GeForce RTX 4090", 1008 * GIGA, 82.6 * _TERA_OPS, 165.2 * _TERA_OPS, 660.6 * _TERA_OPS),
        # Apple M1: LPDDR4X-4266 on 128 bits is 68.3 GB/s; GPU of 8 cores 2.6 TFLOPS (Apple, November 2020). Apple gives
        # no rate of its own for f16 or int8 on the GPU.
        Device("m1", "Apple M1, 8-core GPU", 68.3 * GIGA, 2.6 * _TERA_OPS),
        # Apple M2 Max: 400 GB/s (Apple, January 2023); 13.6 TFLOPS with 38 GPU cores.
        Device("m2max", "Apple M2 Max, 38-core GPU", 400 * GIGA, 13.6 * _TERA_OPS),
        # Raspberry Pi 4: 5.5 GB/s by STREAM copy (www.sci-pi.org.uk/bench/stream.html), under half of what its
        # LPDDR4-3200 on 32 bits could; four Cortex-A72 at 1.5 GHz do 4 f32 or 8 int8 multiply-adds a cycle each.
        Device("rpi4", "Raspberry Pi 4, 4 cores", 5.5 * GIGA, 24e9, None, 48e9),
    )
}
"""Named devices."""


def get(name: str) -> Device:
    """The device of that name; "this" is measured here, in a fraction of a second.

    Raises:
        UserError: an unknown name.
    """
    if name == THIS:
        return measure()
    if name not in DEVICES:
        raise UserError(f"device {name} is unknown; there are {THIS}, {', '.join(DEVICES)}")
    return DEVICES[name]


def measure(rounds: int = 3) -> Device:
    """This machine: the best of `rounds` measurements of each figure, on the kernels' own threads."""
    buffer = peaks.ReadBuffer()
    read = max(buffer.rate() for _ in range(rounds))
    int8 = [rate for rate in (peaks.int8_rate() for _ in range(rounds)) if rate is not None]
    f32 = max(peaks.f32_rate() for _ in range(rounds))
    title = processor.cpu_info()["model"]
    return Device(THIS, title, read, f32, None, max(int8) if int8 else None, measured=True)
