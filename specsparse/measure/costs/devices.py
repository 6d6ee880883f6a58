"""What devices can do at best: this machine measured, others by their makers' sheets."""

from specsparse.data.devices import THIS, Device, known, sheets
from specsparse.kernels import peaks, processor


def get(name: str) -> Device:
    """The device of that name; "this" is measured here, in a fraction of a second.

    Raises:
        UserError: an unknown name.
    """
    return measure() if known(name) == THIS else sheets()[name]


def measure(rounds: int = 3) -> Device:
    """This machine: the best of `rounds` measurements of each figure, on the kernels' own threads."""
    buffer = peaks.ReadBuffer()
    read = max(buffer.rate() for _ in range(rounds))
    int8 = [rate for rate in (peaks.int8_rate() for _ in range(rounds)) if rate is not None]
    f32 = max(peaks.f32_rate() for _ in range(rounds))
    title = processor.cpu_info()["model"]
    return Device(THIS, title, read, f32, None, max(int8) if int8 else None, overlap=0.0, measured=True)
