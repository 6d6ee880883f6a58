"""The roofline of a model on a device: a forward takes as long as the slower of its reading and its arithmetic."""

from dataclasses import dataclass

from specsparse.measure.costs.devices import Device
from specsparse.measure.costs.traffic import Traffic


@dataclass(frozen=True)
class Roofline:
    """Predicts times of `traffic` on `device`; no time a real run takes is shorter."""

    device: Device
    traffic: Traffic

    def memory_s(self, n: int, kv_length: float = 0, batch: int = 1) -> float:
        """Seconds to read the weights once and the caches of `batch` sequences."""
        return self.traffic.read_bytes(n, kv_length, batch) / self.device.bandwidth

    def compute_s(self, n: int, kv_length: float = 0, batch: int = 1) -> float:
        """Seconds of the multiply-adds of n rows a sequence."""
        return sum(m / self.device.peak(kind) for kind, m in self.traffic.macs(n, kv_length, batch).items())

    def forward_s(self, n: int = 1, kv_length: float = 0, batch: int = 1) -> float:
        """Seconds of a forward of n rows a sequence after `kv_length` tokens: max(compute, memory)."""
        return max(self.memory_s(n, kv_length, batch), self.compute_s(n, kv_length, batch))

    def v(self, n: int, kv_length: float = 0) -> float:
        """v(n): time of an n-row forward over that of one row."""
        return self.forward_s(n, kv_length) / self.forward_s(1, kv_length)

    def tokens_per_second(self, kv_length: float = 0, batch: int = 1) -> float:
        """Plain decoding, all sequences together."""
        return batch / self.forward_s(1, kv_length, batch)

    def prompt_tokens_per_second(self, n: int) -> float:
        """Processing a prompt of n tokens in one forward."""
        return n / self.forward_s(n)

    def balance(self, limit: int = 512) -> int:
        """Rows up to which v(n) is 1 because reading takes longer, at most `limit`; 0 where one row is too many."""
        return next((n - 1 for n in range(1, limit + 1) if self.compute_s(n) > self.memory_s(n)), limit)
