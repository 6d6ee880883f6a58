"""Whether an engine's logits are the model's at all: its perplexity beside ours on the same tokens.

Rounding moves a law by about 0.001 nats, a defect of a kernel by whole nats. Nothing is said of the forks of an engine,
or of a width, whose logits are wrong.
"""

import math
from dataclasses import dataclass

import numpy as np

from specsparse.support.files import Json

MOST_KL = 0.1
"""Mean KL(ours, theirs) in nats from which logits are wrong; eight-bit activations move it by 0.001 to 0.01."""
MOST_NLL = 0.1
"""The same for the difference of the mean negative log-likelihoods: a perplexity 10 % apart."""


@dataclass(frozen=True)
class Check:
    """Sums over scored rows.

    Attributes:
        tokens: whose likelihood was scored.
        nll, ours_nll: negative log-likelihood in nats, theirs and ours.
        rows: whose law was compared.
        kl: KL(ours, theirs) in nats.
    """

    tokens: int
    nll: float
    ours_nll: float
    rows: int
    kl: float

    def plus(self, other: "Check") -> "Check":
        """Both together."""
        return Check(self.tokens + other.tokens, self.nll + other.nll, self.ours_nll + other.ours_nll,
                     self.rows + other.rows, self.kl + other.kl)  # fmt: skip

    @property
    def perplexity(self) -> float:
        """Theirs."""
        return _exp(self.nll / self.tokens)

    @property
    def ours(self) -> float:
        """Our perplexity."""
        return _exp(self.ours_nll / self.tokens)

    @property
    def mean_kl(self) -> float:
        """In nats."""
        return self.kl / self.rows

    @property
    def wrong(self) -> bool:
        """Whether they are too far from ours to be the same model's; NaN is wrong."""
        apart = abs(self.nll - self.ours_nll) / self.tokens
        return not (self.mean_kl <= MOST_KL and apart <= MOST_NLL)

    def cells(self) -> Json:
        """For the report."""
        return {"tokens": self.tokens, "perplexity": self.perplexity, "ours": self.ours, "kl": self.mean_kl,
                "wrong": self.wrong}  # fmt: skip


class Judge:
    """Our laws at the rows of one text; what was judged once is not computed again."""

    def __init__(self, ours_TV: np.ndarray, text_T: np.ndarray):
        """Takes our logits float32[T, V] and the tokens int[T] that the rows read, at least two."""
        self._law_TV, self._next = _log_softmax(ours_TV), np.asarray(text_T[1:], np.int64)
        self._known: dict[bytes, Check] = {}

    def check(self, digest: bytes, rows_TV: np.ndarray) -> Check:
        """Their logits on the same rows; `digest` is of their bits."""
        if digest not in self._known:
            self._known[digest] = self._compare(rows_TV)
        return self._known[digest]

    def _compare(self, rows_TV: np.ndarray) -> Check:
        n = len(self._next)
        with np.errstate(invalid="ignore", over="ignore"):
            law_TV = _log_softmax(rows_TV)
            kl_T = (np.exp(self._law_TV) * (self._law_TV - law_TV)).sum(axis=1, dtype=np.float64)
        nll, ours = (-float(a[np.arange(n), self._next].sum(dtype=np.float64)) for a in (law_TV, self._law_TV))
        return Check(n, nll, ours, len(rows_TV), float(kl_T.sum()))


def _log_softmax(logits_TV: np.ndarray) -> np.ndarray:
    shifted = logits_TV - logits_TV.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
