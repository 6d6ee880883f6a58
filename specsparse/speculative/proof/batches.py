"""Verification of a batch of rounds in numpy, the parts of `known_bugs` and `libraries`.

p is float64[N, K+1, V], q float64[N, K, V], drafts int64[N, K]. Uniforms of a round: K coins, K for the target's own
samples, and the last one for the token after the accepted drafts.
"""

import numpy as np

from specsparse.speculative.base import PAD
from specsparse.speculative.verifiers import residuals

Tokens = np.ndarray
"""int64[N, K+1], emitted tokens padded with `PAD`."""


def at(probs_NKV: np.ndarray, drafts_NK: np.ndarray) -> np.ndarray:
    """float64[N, K]: probability of each draft in the first K rows."""
    return np.take_along_axis(probs_NKV[:, : drafts_NK.shape[1]], drafts_NK[:, :, None], axis=2)[:, :, 0]


def ratio(p: np.ndarray, q: np.ndarray, drafts_NK: np.ndarray) -> np.ndarray:
    """float64[N, K]: p/q of each draft."""
    return at(p, drafts_NK) / np.maximum(at(q, drafts_NK), np.finfo(np.float64).tiny)


def own_samples(p: np.ndarray, u: np.ndarray) -> np.ndarray:
    """int64[N, n]: a token of each of n rows by its own uniform."""
    return residuals.inverse_cdf(p[:, : u.shape[1]].reshape(-1, p.shape[2]), u.reshape(-1)).reshape(u.shape)


def one_hot(drafts_NK: np.ndarray, V: int) -> np.ndarray:
    """float64[N, K, V]."""
    return (drafts_NK[:, :, None] == np.arange(V)).astype(np.float64)


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """float64[N, K, V]: weights after a rejection, p where nothing is left of it (Leviathan et al. 2211.17192)."""
    p = p[:, : q.shape[1]]
    gap = np.maximum(p - q, 0)
    return np.where(gap.sum(axis=2, keepdims=True) > 0, gap, p)


def walk(drafts_NK: np.ndarray, accept_NK: np.ndarray, token_Nn: np.ndarray) -> Tokens:
    """The drafts up to the first that is not accepted, then the token of that row."""
    accepted_N1 = np.logical_and.accumulate(accept_NK, axis=1).sum(axis=1)[:, None]
    place = np.arange(drafts_NK.shape[1] + 1)
    tokens = np.where(place < accepted_N1, np.pad(drafts_NK, ((0, 0), (0, 1))), PAD)
    return np.where(place == accepted_N1, token_Nn, tokens)


def draw(weights_NnV: np.ndarray, u_N: np.ndarray) -> np.ndarray:
    """int64[N, n]: a token of each row by inverse CDF, all rows of a sequence by one uniform, since one is used."""
    N, n, V = weights_NnV.shape
    return residuals.inverse_cdf(weights_NnV.reshape(-1, V), np.repeat(u_N, n)).astype(np.int64).reshape(N, n)


def race(weights_NnV: np.ndarray, noise_NV: np.ndarray) -> np.ndarray:
    """int64[N, n]: a token of each row as the largest of weight / noise, the noise exponential (Gumbel's trick)."""
    return (weights_NnV / noise_NV[:, None]).argmax(axis=2)


def rejection(p, q, drafts, uniforms, *, chance=None, rest=None) -> Tokens:
    """Leviathan's rule; `chance` float64[N, K] and `rest` float64[N, K, V] stand in for its two parts."""
    K = drafts.shape[1]
    passed = ratio(p, q, drafts) if chance is None else chance
    weights = np.concatenate([residual(p, q) if rest is None else rest, p[:, K:]], axis=1)
    return walk(drafts, uniforms[:, :K] < passed, draw(weights, uniforms[:, -1]))


def match(p, q, drafts, uniforms) -> Tokens:
    """Samples the target at every row, and goes on as long as the draft is what was sampled."""
    K = drafts.shape[1]
    u = np.concatenate([uniforms[:, K : 2 * K], uniforms[:, -1:]], axis=1)
    own = own_samples(p, u)
    return walk(drafts, own[:, :K] == drafts, own)


def greedy(p, q, drafts, uniforms) -> Tokens:
    """The argmax of the target at every row."""
    own = p.argmax(axis=2)
    return walk(drafts, own[:, : drafts.shape[1]] == drafts, own)
