"""Laws: from the logits of a model to p, from p to tokens.

Steps, in vLLM's order: logit bias and allowed ids, bad words, minimum length, logits processors, penalties, then
temperature, min-p, top-k, top-p. Every step of a row looks at that row alone, with its draft prefix as context, so that
a row has the same bits however many rows are computed with it (contract C1).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.sampling.history import (
    History,
    RowPaths,
    chain_rows,
    init_history,
    observe,
    observe_many,
    path_counts,
    path_length,
    plain_rows,
    recent_tokens,
    tree_rows,
)
from specsparse.engine.sampling.row_probs import REFERENCE, ProbRows, SamplingKernels, mass, one_hot
from specsparse.engine.sampling.sampling_arrays import SamplingArrays, SamplingConfig, compile_params
from specsparse.errors import UserError
from specsparse.kernels import Kernels
from specsparse.kernels.native import cpu

__all__ = [
    "REFERENCE",
    "History",
    "Logprobs",
    "RowPaths",
    "Sampled",
    "SamplingArrays",
    "SamplingConfig",
    "SamplingKernels",
    "chain_rows",
    "compile_params",
    "draw",
    "init_history",
    "kernels_of",
    "logprobs",
    "observe",
    "observe_many",
    "plain_rows",
    "rows_to_judge",
    "sample",
    "sample_at",
    "target_logits",
    "target_probs",
    "tree_rows",
]

_BANNED = np.float32(-np.inf)


def kernels_of(kernels: Kernels) -> SamplingKernels:
    """Argmax, distributions and draws that belong to these kernels."""
    if kernels.name == "native":
        return SamplingKernels(cpu.argmax, cpu.probs, cpu.draw, cpu.check, cpu.sample, cpu.propose, cpu.judge)
    return REFERENCE


class Sampled(NamedTuple):
    """Drawn tokens int32[R], ok bool[R] (see `target_logits`), and p of the tokens asked for, float32[R]."""

    token: jax.Array
    ok: jax.Array
    share: jax.Array


class Logprobs(NamedTuple):
    """Log probabilities of the model itself, before any step of sampling, as vLLM reports them.

    Attributes:
        chosen: float32[R], of the chosen token.
        rank: int32[R], 1 + how many tokens are more likely than it.
        top: float32[R, k], of the most likely tokens, in descending order.
        top_ids: int32[R, k], their ids; equal ones in order of id.
    """

    chosen: jax.Array
    rank: jax.Array
    top: jax.Array
    top_ids: jax.Array


def _sane(logits_RV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logits with NaN and +inf as -inf, and which rows had none of those."""
    sane_RV = logits_RV < np.float32(np.inf)
    return jnp.where(sane_RV, logits_RV, _BANNED), jnp.all(sane_RV, axis=1)


def target_logits(
    cfg: SamplingConfig,
    params: SamplingArrays,
    logits_RV: jax.Array,
    history: History | None = None,
    rows: RowPaths | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Logits after bias, allowed and bad words, minimum length, processors and penalties.

    Args:
        logits_RV: any float dtype; row r belongs to `rows.sequence[r]`.
        history: needed where `cfg.raw` is False.
        rows: None is one row a sequence, without draft.

    Returns:
        float32[R, V] without NaN or +inf, and ok bool[R]: False for a row that had one of those (read as -inf) or in
        which no token is left.
    """
    if rows is None and logits_RV.shape[0] != params.temperature.shape[0]:
        raise ValueError("more than one row a sequence needs `rows`")
    x_RV, ok_R = _sane(logits_RV.astype(jnp.float32))
    if not cfg.raw:
        rows = plain_rows(params.temperature.shape[0]) if rows is None else rows
        if history is None:
            raise ValueError("penalties, bias, bad words, min_tokens and logits processors need a history")
        if cfg.use_bias:
            x_RV = x_RV + jnp.asarray(params.bias)[rows.sequence]
        if cfg.bad_prefix:
            x_RV = _ban_words(params, x_RV, recent_tokens(history, rows)[:, -cfg.bad_prefix :], rows)
        if cfg.use_min_tokens:
            x_RV = _ban_stops(params, x_RV, history, rows)
        if cfg.processors:
            x_RV, processed_R = _process(cfg, x_RV, recent_tokens(history, rows))
            ok_R &= processed_R
        if cfg.use_penalties:
            x_RV = _penalise(params, x_RV, history, rows)
    return x_RV, ok_R & jnp.any(x_RV > _BANNED, axis=1)


def _ban(x_RV: jax.Array, token_Rs: jax.Array) -> jax.Array:
    """Sets the logits of the named tokens to -inf; V names none."""
    row_R1 = jnp.arange(x_RV.shape[0], dtype=jnp.int32)[:, None]
    return x_RV.at[row_R1, token_Rs].set(_BANNED, mode="drop")


def _ban_words(params: SamplingArrays, x_RV: jax.Array, recent_Rm: jax.Array, rows: RowPaths) -> jax.Array:
    """Bans the last token of each bad word whose other tokens are the newest ones of the output."""
    prefix_RWm = jnp.asarray(params.bad_prefix)[rows.sequence]
    match_RW = jnp.all((prefix_RWm < 0) | (prefix_RWm == recent_Rm[:, None, :]), axis=2)
    last_RW = jnp.asarray(params.bad_last)[rows.sequence]
    return _ban(x_RV, jnp.where(match_RW, last_RW, x_RV.shape[1]))


def _ban_stops(params: SamplingArrays, x_RV: jax.Array, history: History, rows: RowPaths) -> jax.Array:
    """Bans stop tokens where fewer than `min_tokens` are generated."""
    length_R = history.generated[rows.sequence] + path_length(rows.path)
    early_R = length_R < jnp.asarray(params.min_tokens)[rows.sequence]
    stops_Rs = jnp.asarray(params.stop_ids)[rows.sequence]
    return _ban(x_RV, jnp.where(early_R[:, None], stops_Rs, x_RV.shape[1]))


def _process(cfg: SamplingConfig, x_RV: jax.Array, recent_Rc: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The user's processors, row by row: a function we do not know may add up in another order for another R."""

    def one(row):
        recent_c, x_V = row
        for processor in cfg.processors:
            out = processor(recent_c, x_V)
            if jnp.shape(out) != x_V.shape:
                raise UserError(f"a logits processor returned shape {jnp.shape(out)}, {x_V.shape} is needed")
            x_V = out.astype(jnp.float32)
        return x_V

    return _sane(jax.lax.map(one, (recent_Rc, x_RV)))


def _penalise(params: SamplingArrays, x_RV: jax.Array, history: History, rows: RowPaths) -> jax.Array:
    """Repetition (Keskar et al., CTRL, arXiv:1909.05858; prompt and output), then frequency and presence (output).

    The selects around the two products are there so that no compiler fuses them with the subtraction in one program and
    not in another.
    """
    assert history.in_prompt is not None
    count_RV = path_counts(history, rows)
    out_RV = count_RV > 0
    repetition_R1, frequency_R1, presence_R1 = (
        jnp.asarray(a)[rows.sequence][:, None] for a in (params.repetition, params.frequency, params.presence)
    )
    factored_RV = jnp.where(x_RV > 0.0, x_RV / repetition_R1, x_RV * repetition_R1)
    x_RV = jnp.where(out_RV | history.in_prompt[rows.sequence], factored_RV, x_RV)
    zero = jnp.float32(0.0)
    x_RV = x_RV - jnp.where(out_RV, frequency_R1 * count_RV.astype(jnp.float32), zero)
    return x_RV - jnp.where(out_RV, presence_R1, zero)


def _processed(
    cfg: SamplingConfig,
    params: SamplingArrays,
    logits_RV: jax.Array,
    history: History | None,
    rows: RowPaths | None,
    kernels: SamplingKernels,
) -> tuple[jax.Array, jax.Array]:
    """`target_logits`, or one pass of `kernels.check` where the logits are used as they are."""
    if cfg.raw and kernels.check is not None:
        x_RV = logits_RV.astype(jnp.float32)
        return x_RV, kernels.check(x_RV)
    return target_logits(cfg, params, logits_RV, history, rows)


def _prob_rows(params: SamplingArrays, rows: RowPaths | None, needed_R: jax.Array | None) -> ProbRows:
    numbers = (params.temperature, params.log_min_p, params.top_k, params.top_p)
    found = ProbRows(*(jnp.asarray(a) if rows is None else jnp.asarray(a)[rows.sequence] for a in numbers))
    if needed_R is None:
        return found
    return found._replace(
        temperature=jnp.where(needed_R, found.temperature, jnp.float32(0))
    )  # the cheapest distribution


def _probs_of(
    cfg: SamplingConfig,
    params: SamplingArrays,
    x_RV: jax.Array,
    rows: RowPaths | None,
    kernels: SamplingKernels,
    needed_R: jax.Array | None,
) -> jax.Array:
    """Distribution float32[R, V] of processed logits."""
    if cfg.greedy:
        return one_hot(kernels.argmax(x_RV), cfg.vocab_size)
    steps = {"min_p": cfg.use_min_p, "top_k": cfg.use_top_k, "top_p": cfg.use_top_p}
    return kernels.probs(x_RV, _prob_rows(params, rows, needed_R), greedy=cfg.mixed, **steps)


def target_probs(
    cfg: SamplingConfig,
    params: SamplingArrays,
    logits_RV: jax.Array,
    history: History | None = None,
    rows: RowPaths | None = None,
    *,
    kernels: SamplingKernels = REFERENCE,
    needed_R: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The distribution p of the next token of each row: float32[R, V], and ok bool[R] (see `target_logits`).

    Greedy rows are one-hot at the lowest index of the largest logit. A row without any token left is one-hot at 0, so
    that nothing later reads outside the vocabulary; its `ok` is False. Rows outside `needed_R` (bool[R]) get some
    distribution.
    """
    x_RV, ok_R = _processed(cfg, params, logits_RV, history, rows, kernels)
    return _probs_of(cfg, params, x_RV, rows, kernels, needed_R), ok_R


def draw(p_RV: jax.Array, u_RU: jax.Array, *, kernels: SamplingKernels = REFERENCE) -> jax.Array:
    """Token int32[R] drawn from each row by inverse CDF in vocabulary order; consumes the row's `noise.token_uniforms`.

    A token of probability 0 is never drawn; the row need not be normalised. See `row_probs.reference_draw`.
    """
    return kernels.draw(p_RV, u_RU)


def sample(
    cfg: SamplingConfig,
    params: SamplingArrays,
    logits_RV: jax.Array,
    history: History | None = None,
    rows: RowPaths | None = None,
    *,
    u_RU: jax.Array | None,
    kernels: SamplingKernels = REFERENCE,
    n_valid_B: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Tokens int32[R] drawn from `probs`, and ok bool[R].

    Args:
        u_RU: float32[R, 4], the rows' `noise.token_uniforms`; not used (and may be None) where `cfg.greedy`.
        n_valid_B: int32[B], rows of each sequence that count, the first ones; of the others nothing is promised. None
            is all. The rows of all sequences stand one after the other, equally many of each.
    """
    if not cfg.greedy and u_RU is None:
        raise ValueError("a distribution that is not greedy needs `u_RU`")
    if kernels.sample is not None:
        return _sample(cfg, params, logits_RV, history, rows, u_RU, None, kernels, n_valid_B)[:2]
    x_RV, ok_R = _processed(cfg, params, logits_RV, history, rows, kernels)
    if cfg.greedy:
        return kernels.argmax(x_RV), ok_R
    return kernels.draw(_probs_of(cfg, params, x_RV, rows, kernels, _needed(n_valid_B, logits_RV)), u_RU), ok_R


def sample_at(
    cfg: SamplingConfig,
    params: SamplingArrays,
    logits_RV: jax.Array,
    history: History | None = None,
    rows: RowPaths | None = None,
    *,
    u_RU: jax.Array,
    tokens_R: jax.Array,
    kernels: SamplingKernels = REFERENCE,
    n_valid_B: jax.Array | None = None,
) -> Sampled:
    """`sample`, and the distribution of each row at `tokens_R` (int32[R], inside the vocabulary)."""
    if kernels.sample is not None:
        return _sample(cfg, params, logits_RV, history, rows, u_RU, tokens_R, kernels, n_valid_B)
    needed_R = _needed(n_valid_B, logits_RV)
    p_RV, ok_R = target_probs(cfg, params, logits_RV, history, rows, kernels=kernels, needed_R=needed_R)
    share_R = jnp.take_along_axis(p_RV, tokens_R[:, None], axis=1)[:, 0]
    return Sampled(kernels.draw(p_RV, u_RU), ok_R, share_R)


def rows_to_judge(
    cfg: SamplingConfig, params: SamplingArrays, logits_RV: jax.Array, history: History | None, rows: RowPaths | None
) -> tuple[jax.Array, ProbRows]:
    """What `SamplingKernels.judge` makes distributions of: float32[R, V] and the numbers of each sequence's
    distribution.

    A row that `probs` says is none has nothing above -inf.
    """
    x_RV = logits_RV.astype(jnp.float32)
    if not cfg.raw:
        x_RV, ok_R = target_logits(cfg, params, x_RV, history, rows)
        x_RV = jnp.where(ok_R[:, None], x_RV, _BANNED)
    return x_RV, _prob_rows(params, None, None)


def _needed(n_valid_B: jax.Array | None, logits_RV: jax.Array) -> jax.Array | None:
    """bool[R]: rows that count, or None for all."""
    if n_valid_B is None:
        return None
    n = logits_RV.shape[0] // n_valid_B.shape[0]
    return (jnp.arange(n, dtype=jnp.int32)[None] < n_valid_B[:, None]).reshape(-1)


def _sample(cfg, params, logits_RV, history, rows, u_RU, tokens_R, kernels, n_valid_B) -> Sampled:
    """`sample_at` by kernels that write no distributions down."""
    x_RV, sane_R = logits_RV.astype(jnp.float32), None
    if not cfg.raw:
        x_RV, sane_R = target_logits(cfg, params, x_RV, history, rows)
    probs = _prob_rows(params, None, None)
    if n_valid_B is None:
        B = probs.temperature.shape[0]
        n_valid_B = jnp.full((B,), x_RV.shape[0] // B, jnp.int32)
    token_R, ok_R, share_R = kernels.sample(x_RV, probs, n_valid_B, u_RU, tokens_R)
    return Sampled(token_R, ok_R if sane_R is None else ok_R & sane_R, share_R)


def logprobs(logits_RV: jax.Array, token_R: jax.Array, k: int) -> Logprobs:
    """Log probabilities of `token_R` and of the `k` most likely tokens under the raw logits.

    NaN and +inf count as -inf. Costs a partial selection of k: only called where log probabilities are asked for.
    """
    x_RV, _ = _sane(logits_RV.astype(jnp.float32))
    highest_R = jnp.max(x_RV, axis=1)
    top_R = jnp.where(highest_R > _BANNED, highest_R, jnp.float32(0.0))
    e_RV = jnp.where(x_RV > _BANNED, jnp.exp(x_RV - top_R[:, None]), jnp.float32(0.0))
    log_mass_R1 = jnp.log(mass(e_RV))[:, None]
    chosen_R1 = jnp.take_along_axis(x_RV, token_R[:, None], axis=1)
    rank_R = 1 + jnp.sum((x_RV > chosen_R1).astype(jnp.int32), axis=1)
    top_Rk, ids_Rk = jax.lax.top_k(x_RV, k)

    def normalise(x_Rm):
        return jnp.where(x_Rm > _BANNED, x_Rm - top_R[:, None] - log_mass_R1, _BANNED)

    return Logprobs(normalise(chosen_R1)[:, 0], rank_R, normalise(top_Rk), ids_Rk.astype(jnp.int32))
