"""How many neurons several tokens need together: what a verification pass reads, beside a guess from one token.

n rows that keep a share s each keep 1 - (1 - s)^n together if they choose independently; neighbours in a text do not
(Mirzadeh et al. 2023, arXiv:2310.04564, "aggregated sparsity").
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from specsparse.engine.llama import dense_ffn
from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.powerinfer import zero_skip
from specsparse.powerinfer.sparse_ffn import make_ffn
from specsparse.predictors.base import Predictor
from specsparse.predictors.collect import watched


@dataclass(frozen=True)
class UnionPoint:
    """Passes of one size.

    Attributes:
        rows: of a pass, all sequences together.
        batch: sequences among them.
        passes: that were looked at.
        kept: share of the neurons that one row keeps, mean over rows and layers.
        union: share that some row of the pass keeps, mean over passes and layers.
        guess: 1 - (1 - kept)^rows, layer by layer.
    """

    rows: int
    batch: int
    passes: int
    kept: float
    union: float
    guess: float

    @staticmethod
    def from_layers(rows: int, batch: int, passes: int, kept_L: np.ndarray, union_L: np.ndarray) -> "UnionPoint":
        """From the shares of each layer, means over the passes."""
        guess = float(np.mean(1 - (1 - kept_L) ** rows))
        return UnionPoint(rows, batch, passes, float(kept_L.mean()), float(union_L.mean()), guess)


def masks(
    model: Model, predictor: Predictor, windows_Wn: np.ndarray, *, progress: Callable[[int], None] | None = None
) -> np.ndarray:
    """bool[W, L, n, F]: the neurons that every token of every window keeps, each window on its own.

    `model` has `predictor`'s weights in its layers, as `gated` makes it; the others as in `predictors.collect.watched`.
    """
    skips = zero_skip.skips(model.params)  # then the dense FFN has the same bits
    ffn = (dense_ffn if skips else partial(make_ffn, predictor=predictor))(model.config, model.kernels)

    def keep(layer, x_RD, n_valid_B):
        return predictor.keep(None if skips else layer.sparse.predictor, layer, x_RD, n_valid_B)

    return np.stack([mask.astype(bool) for mask in watched(model, windows_Wn, keep, ffn=ffn, progress=progress)])


def of_text(masks_WLnF: np.ndarray, *, tokens: int, batch: int = 1) -> UnionPoint:
    """Passes of `tokens` consecutive tokens of each of `batch` windows: what drafts that are all right would need.

    Raises:
        ValueError: fewer windows than `batch`, or shorter ones than `tokens`.
    """
    windows, layers, length, width = masks_WLnF.shape
    if windows < batch or length < tokens:
        raise ValueError(f"{windows} windows of {length} tokens hold no {batch} sequences of {tokens}")
    cut = masks_WLnF[: windows // batch * batch, :, : length // tokens * tokens]
    together = cut.reshape(windows // batch, batch, layers, length // tokens, tokens, width).any(axis=(1, 4))
    passes = together.shape[0] * together.shape[2]
    kept_L, union_L = masks_WLnF.mean(axis=(0, 2, 3)), together.mean(axis=(0, 2, 3))
    return UnionPoint.from_layers(tokens * batch, batch, passes, kept_L, union_L)


@dataclass
class UnionWatch:
    """Adds up the kept neurons of a decoding's passes; call it with the rows and the `SparseStats` of each pass.

    Attributes:
        width: F.
        sums: by rows: passes, and sums over them of the kept shares and unions of each layer, f64[L].
    """

    width: int
    sums: dict[int, tuple[int, np.ndarray, np.ndarray]] = field(default_factory=dict)

    def __call__(self, rows: int, stats: Pytree) -> None:
        """One pass of `rows` rows that count, one sequence."""
        kept_L = np.asarray(stats.kept, np.float64).sum(axis=1) / rows / self.width
        union_L = np.asarray(stats.union, np.float64) / self.width
        passes, kept, union = self.sums.get(rows, (0, np.zeros_like(kept_L), np.zeros_like(union_L)))
        self.sums[rows] = passes + 1, kept + kept_L, union + union_L

    def points(self) -> list[UnionPoint]:
        """One for each size of pass, ascending."""
        sums = sorted(self.sums.items())
        return [UnionPoint.from_layers(rows, 1, n, kept / n, union / n) for rows, (n, kept, union) in sums]
