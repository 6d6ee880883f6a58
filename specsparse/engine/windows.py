"""How much of a cache the layers of a model read: all of it, or what lies in a sliding window."""

import math
from collections import Counter
from dataclasses import dataclass

from specsparse.engine.config import ModelConfig


@dataclass(frozen=True)
class LayerWindows:
    """The windows of a model's layers. All counts are means over the layers, in tokens of one sequence.

    Attributes:
        shares: (window, share of the layers that have it); a window of 0 has no end. The shares add up to 1.
    """

    shares: tuple[tuple[int, float], ...] = ((0, 1.0),)

    @staticmethod
    def of(config: ModelConfig) -> "LayerWindows":
        """The windows of a model's layers."""
        counts = Counter(config.kind(i).window for i in range(config.n_layers))
        return LayerWindows(tuple((window, count / config.n_layers) for window, count in sorted(counts.items())))

    def __bool__(self) -> bool:
        """Whether any layer has a window."""
        return any(window for window, _ in self.shares)

    def read(self, rows: int, before: float) -> float:
        """Positions that `rows` rows in sequence read together, `before` tokens before the first: each once."""
        return sum(
            share * min(before + rows, window + rows - 1 if window else math.inf) for window, share in self.shares
        )

    def attended(self, rows: int, before: float) -> float:
        """The same where each row counts on its own: row i sees `before` + i + 1 positions, or its window."""
        total = 0.0
        for window, share in self.shares:
            short = min(max(math.floor(window - before), 0), rows) if window else rows  # rows that see all before them
            total += share * (short * (before + (short + 1) / 2) + (rows - short) * window)
        return total


WHOLE = LayerWindows()
"""No layer has a window."""
