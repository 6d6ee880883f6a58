"""Verifiers by their public reports: real mistakes, each with the size of its error, and methods wrongly called lossy.

Each is a batched callable in numpy (`external`), written from what the report says. A report is
`owner/repository#number` on GitHub. The first functions are the parts that they are made of: p is float64[N, K+1, V],
q float64[N, K, V], drafts int64[N, K]. Uniforms of a round: K coins, K for the target's own samples, and the last one
for the token after the accepted drafts.
"""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

from specsparse.speculative.base import PAD, DraftKind
from specsparse.speculative.proof.cases import keep_top, tempered
from specsparse.speculative.proof.external import ExternalVerifier, Transform
from specsparse.speculative.proof.measured import GAMMA, VOCAB, measure_external
from specsparse.speculative.proof.results import Result
from specsparse.speculative.verifiers import residuals


def at(probs_NKV: np.ndarray, drafts_NK: np.ndarray) -> np.ndarray:
    """float64[N, K]: probability of each draft in the first K rows."""
    return np.take_along_axis(probs_NKV[:, : drafts_NK.shape[1]], drafts_NK[:, :, None], axis=2)[:, :, 0]


def ratio(p: np.ndarray, q: np.ndarray, drafts_NK: np.ndarray) -> np.ndarray:
    return at(p, drafts_NK) / np.maximum(at(q, drafts_NK), np.finfo(np.float64).tiny)


def own_samples(p: np.ndarray, u: np.ndarray) -> np.ndarray:
    """int64[N, n]: a token of each of n rows by its own uniform."""
    return residuals.inverse_cdf(p[:, : u.shape[1]].reshape(-1, p.shape[2]), u.reshape(-1)).reshape(u.shape)


def one_hot(drafts_NK: np.ndarray, V: int) -> np.ndarray:
    return (drafts_NK[:, :, None] == np.arange(V)).astype(np.float64)


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """float64[N, K, V]: weights after a rejection, p where nothing is left of it (Leviathan et al. 2211.17192)."""
    p = p[:, : q.shape[1]]
    gap = np.maximum(p - q, 0)
    return np.where(gap.sum(axis=2, keepdims=True) > 0, gap, p)


def walk(drafts_NK: np.ndarray, accept_NK: np.ndarray, token_Nn: np.ndarray) -> np.ndarray:
    """int64[N, K+1]: the drafts up to the first that is not accepted, the token of that row, then `PAD`."""
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


def rejection(p, q, drafts, uniforms, *, chance=None, rest=None) -> np.ndarray:
    """Leviathan's rule; `chance` float64[N, K] and `rest` float64[N, K, V] stand in for its two parts."""
    K = drafts.shape[1]
    passed = ratio(p, q, drafts) if chance is None else chance
    weights = np.concatenate([residual(p, q) if rest is None else rest, p[:, K:]], axis=1)
    return walk(drafts, uniforms[:, :K] < passed, draw(weights, uniforms[:, -1]))


def match(p, q, drafts, uniforms) -> np.ndarray:
    """Samples the target at every row, and goes on as long as the draft is the sample."""
    K = drafts.shape[1]
    u = np.concatenate([uniforms[:, K : 2 * K], uniforms[:, -1:]], axis=1)
    own = own_samples(p, u)
    return walk(drafts, own[:, :K] == drafts, own)


def greedy(p, q, drafts, uniforms) -> np.ndarray:
    own = p.argmax(axis=2)
    return walk(drafts, own[:, : drafts.shape[1]] == drafts, own)


# -- the bugs --


@dataclasses.dataclass(frozen=True)
class KnownBug:
    """A mistake, or a lossless method that was called lossy."""

    about: str  # one line
    reports: tuple[str, ...]  # the threads that reported it, or called it lossy
    # the callable; its `lossless` is the expected outcome, True for a method that was called lossy and is not
    how: ExternalVerifier

    def measure(self, *, gamma: int = GAMMA, seed: int = 0) -> list[Result]:
        return measure_external(self.how, vocab=VOCAB, gamma=gamma, seed=seed)


CUT, HOT = keep_top(2), tempered(1.5)


def _bfloat16(probs_V: np.ndarray) -> np.ndarray:
    """The softmax of logits that were rounded to bfloat16."""
    with np.errstate(divide="ignore"):
        logits = np.log(probs_V).astype(ml_dtypes.bfloat16).astype(np.float64)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _transformed(*, p: Transform | None = None, q: Transform | None = None) -> Callable:
    """Leviathan's rule behind a transform of its p or of its q."""

    def changed(change, probs):
        return np.apply_along_axis(change, -1, probs) if change and probs.size else probs

    return lambda p_NnV, q_NKV, drafts, uniforms: rejection(changed(p, p_NnV), changed(q, q_NKV), drafts, uniforms)


def _rejection_with(*, chance: Callable | None = None, rest: Callable | None = None) -> Callable:
    """Leviathan's rule with another chance or residual, each a function of (p, q, drafts)."""

    def call(p, q, drafts, uniforms):
        other = {"chance": chance, "rest": rest}
        return rejection(p, q, drafts, uniforms, **{key: f and f(p, q, drafts) for key, f in other.items()})

    return call


def _p_without_draft(p, q, drafts):
    return p[:, :-1] * (1 - one_hot(drafts, p.shape[2]))


def _two_chances(p, q, drafts, uniforms):
    own = own_samples(p, uniforms[:, drafts.shape[1] : 2 * drafts.shape[1]])
    return rejection(p, q, drafts, uniforms, chance=np.where(own == drafts, 1.0, ratio(p, q, drafts)))


def _greedy_then_residual(p, q, drafts, uniforms):
    best = p.argmax(axis=2)
    accept = (best[:, :-1] == drafts).astype(np.float64)
    greedy_p = np.concatenate([p[:, :-1], one_hot(best[:, -1:], p.shape[2])], axis=1)
    return rejection(greedy_p, q, drafts, uniforms, chance=accept, rest=residual(p, q))


def _noise_of(q, drafts, generator) -> np.ndarray:
    """float64[N, K, V]: exponential noise E given that argmax q / E is the draft.

    The largest of q / E is 1 / M with M exponential. E = q M at the largest, and elsewhere E is over q M by a new
    exponential.
    """
    first = generator.exponential(size=drafts.shape)[:, :, None] * q
    return first + np.where(one_hot(drafts, q.shape[2]) > 0, 0, generator.exponential(size=q.shape))


def _draft_noise_again(p, q, drafts, generator):
    N, K = drafts.shape
    noise = _noise_of(q, drafts, generator)
    token = (residual(p, q) / noise).argmax(axis=2)
    bonus = race(p[:, K:], generator.exponential(size=(N, p.shape[2])))
    accept = generator.random((N, K)) * at(q, drafts) < at(p, drafts)
    return walk(drafts, accept, np.concatenate([token, bonus], axis=1))


def _divided_in_place(p, q, drafts, generator):
    N, K = drafts.shape
    wrong = q / _noise_of(q, drafts, generator)
    token = race(residual(p, wrong), generator.exponential(size=(N, p.shape[2])))
    bonus = race(p[:, K:], generator.exponential(size=(N, p.shape[2])))
    accept = generator.random((N, K)) * at(wrong, drafts) < at(p, drafts)
    return walk(drafts, accept, np.concatenate([token, bonus], axis=1))


def _match_draft_noise(p, q, drafts, generator):
    N, K = drafts.shape
    noise = np.concatenate([_noise_of(q, drafts, generator), generator.exponential(size=(N, 1, p.shape[2]))], axis=1)
    own = (p / noise).argmax(axis=2)
    return walk(drafts, own[:, :K] == drafts, own)


def _bug(name: str, about: str, reports: str, call: Callable, *, lossless: bool = False, **how) -> KnownBug:
    made = ExternalVerifier(call, name=name, batched=True, lossless=lossless, **how)
    made = dataclasses.replace(made, samples=20_000) if made.exact else made
    return KnownBug(about, tuple(reports.split()), made)


ARGMAX = DraftKind.ONE_HOT

KNOWN_BUGS: dict[str, KnownBug] = {
    bug.how.name: bug
    for bug in (
        _bug("argmax_as_sampled", "drafts are the argmax, and p/q takes them for draws from q",
              "huggingface/transformers#32867 jaymody/speculative-sampling#3", rejection, draft_transform=keep_top(1)),
        _bug("q_before_truncation", "drafts are drawn through top-k; q is recorded before it",
              "huggingface/transformers#47932", _transformed(p=CUT), target_transform=CUT, draft_transform=CUT),
        _bug("p_before_truncation", "drafts are drawn through top-p; the target's distribution is taken before it",
              "vllm-project/vllm#10198", _transformed(q=CUT), target_transform=CUT, draft_transform=CUT),
        _bug("bfloat16_draw", "drafts are drawn in bfloat16; ratio and residual are in float32",
              "deepseek-ai/DeepSpec#31", rejection, draft_transform=_bfloat16),
        _bug("coin_is_0", "the coin is the constant 0, so that every draft is accepted",
              "vllm-project/vllm-ascend#13730", _rejection_with(chance=lambda p, q, x: np.ones(x.shape))),
        _bug("softmax_residual", "the residual goes through a softmax, where it must be divided by its sum",
              "huggingface/transformers#28508",
             _rejection_with(rest=lambda p, q, x: np.exp(np.maximum(p[:, :-1] - q, 0)))),
        _bug("token_alone_subtracted", "after a rejection p without the rejected token, where p - q is due",
              "xLLM-AI/xllm#2175 SafeAILab/EAGLE#20", _rejection_with(rest=_p_without_draft)),
        _bug("zeroed_before_the_test", "one-hot drafts: p of the draft is zeroed in place before the draft is tested",
              "vllm-project/vllm-ascend#2881",
             lambda p, q, x, u: rejection(np.append(_p_without_draft(p, q, x), p[:, -1:], axis=1), q, x, u),
             drafts=ARGMAX),
        _bug("two_chances", "a draft passes by the ratio, or because the target's own sample is the same token",
              "alibaba/rtp-llm#1295", _two_chances),
        _bug("greedy_then_residual", "top-k = 1: drafts are compared with the argmax, but a mismatch draws from p - q",
              "alibaba/rtp-llm#521", _greedy_then_residual, target_transform=keep_top(1)),
        _bug("next_row", "after a rejection the next row is sampled, whose context has the rejected draft",
              "openvinotoolkit/openvino.genai#4190", _rejection_with(rest=lambda p, q, x: p[:, 1:])),
        _bug("draft_ids_kept", "the draft's ids differ from the target's; drafts are translated, their q is not",
              "alibaba/rtp-llm#1311", rejection, draft_transform=lambda probs: np.roll(probs, 1)),
        _bug("argmax_committed", "the argmax of the target is emitted at a temperature above 0",
              "Luce-Org/lucebox#374", greedy),
        _bug("ratio_without_q", "q is left out of the ratio and kept in the residual", "",
             _rejection_with(chance=lambda p, q, x: at(p, x))),
        _bug("draft_noise_again", "the token after a rejection is drawn with the noise that drew the rejected draft",
              "vllm-project/vllm#47386 vllm-project/vllm#54282", _draft_noise_again),
        _bug("divided_in_place", "the draw divides q by its noise in place, and the verifier reads it",
              "vllm-project/vllm#16952", _divided_in_place),
        _bug("sample_and_match", "the target is sampled at every row, and drafts that agree are kept",
              "lablup/mlxcel#902 ml-explore/mlx-swift-lm#459", match, lossless=True),
        _bug("match_argmax_drafts", "the same, where the drafts ignore the temperature",
              "z-lab/dflash#74", match, lossless=True, drafts=ARGMAX),
        _bug("argmax_drafts_q_1", "argmax drafts are accepted with p(x), q being 1 there",
              "SafeAILab/EAGLE#110 SafeAILab/EAGLE#183", rejection, lossless=True, drafts=ARGMAX),
        _bug("drawn_drafts_q_1", "drafts are drawn from q, which is thrown away: 1 at the draft in ratio and residual",
              "vllm-project/vllm#40149 vllm-project/vllm#41044",
             lambda p, q, x, u: rejection(p, one_hot(x, p.shape[2]), x, u), lossless=True),
        _bug("draft_hotter", "the draft has another temperature than the target, and q is its true distribution",
              "huggingface/transformers#40976", _transformed(q=HOT), lossless=True, draft_transform=HOT),
        _bug("greedy_at_0", "at temperature 0 drafts are compared with the argmax",
              "ml-explore/mlx-lm#1423 vllm-project/vllm#41758", greedy, lossless=True, greedy=True),
        _bug("match_draft_noise", "the target is sampled with the noise that drew the draft, and agreement is kept",
              "vllm-project/vllm#47386", _match_draft_noise, lossless=True),
    )
}  # fmt: skip
"""All by name: the mistakes first, then the lossless ones that were called lossy, or another loss."""
