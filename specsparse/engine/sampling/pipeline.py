"""Sampling: from the logits of a model to p, from p to tokens.

Steps, in vLLM's order: logit bias and allowed ids, bad words, minimum length, logits processors, penalties, then
temperature, min-p, top-k, top-p. Every step of a row looks at that row alone, with its draft prefix as context, so that
a row has the same bits however many rows are computed with it (contract C1).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from specsparse.engine.pytree import AnyArray
from specsparse.engine.sampling.params import SamplingArrays, SamplingConfig, Truncation
from specsparse.engine.sampling.probs import REFERENCE, SamplingKernels, mass, one_hot
from specsparse.errors import UserError
from specsparse.kernels import Kernels
from specsparse.kernels.native import cpu

_BANNED = np.float32(-np.inf)


def kernels_of(kernels: Kernels) -> SamplingKernels:
    """Argmax, distributions and draws that belong to these kernels."""
    if kernels.name == "native":
        return SamplingKernels(cpu.argmax, cpu.probs, cpu.draw, cpu.check, cpu.sample, cpu.propose, cpu.judge)
    return REFERENCE


class History(NamedTuple):
    """Generated tokens as far as the distributions need them; a field is None if no step needs it."""

    generated: jax.Array  # int32[B], tokens generated so far
    counts: jax.Array | None = None  # int32[B, V], how often each token was generated (penalties)
    in_prompt: jax.Array | None = None  # bool[B, V], whether it is in the prompt (repetition penalty)
    # int32[B, context], the last generated tokens, newest last, -1 before the first one
    recent: jax.Array | None = None


class RowPaths(NamedTuple):
    """The place of each of R rows of logits."""

    sequence: jax.Array  # int32[R], index of the row's sequence in the batch
    path: jax.Array  # int32[R, m], draft tokens between the history and the row, oldest first, -1 after the last


class Sampled(NamedTuple):
    """Drawn tokens int32[R], ok bool[R] (see `target_logits`), and p of the tokens asked for, float32[R] or None."""

    token: jax.Array
    ok: jax.Array
    share: AnyArray


class Logprobs(NamedTuple):
    """Log probabilities of the model itself, before any step of sampling, as vLLM reports them."""

    chosen: jax.Array  # float32[R], of the chosen token
    rank: jax.Array  # int32[R], 1 + how many tokens are more likely than it
    top: jax.Array  # float32[R, k], of the most likely tokens, in descending order
    top_ids: jax.Array  # int32[R, k], their ids; equal ones in order of id


def init_history(cfg: SamplingConfig, prompts: Sequence[ArrayLike]) -> History:
    """History of B sequences of which nothing is generated yet; only ids in [0, V) of the prompts are looked at."""
    B = len(prompts)
    counts = in_prompt = recent = None  # numpy, then one transfer: `jnp.zeros` compiles a program for each shape
    if cfg.use_penalties:
        seen = np.zeros((B, cfg.vocab_size), bool)
        for row, prompt in zip(seen, prompts, strict=True):
            row[np.asarray(prompt, np.int64)] = True
        counts, in_prompt = np.zeros((B, cfg.vocab_size), np.int32), seen
    if cfg.context:
        recent = np.full((B, cfg.context), -1, np.int32)
    return History(*jax.device_put((np.zeros((B,), np.int32), counts, in_prompt, recent)))


def observe_many(history: History, token_Bm: jax.Array, count_B: jax.Array) -> History:
    """Adds the first `count_B` tokens of each row of `token_Bm` (0 to m of them)."""
    B, m = token_Bm.shape
    valid_Bm = jnp.arange(m, dtype=jnp.int32)[None] < count_B[:, None]
    counts, recent = history.counts, history.recent
    if counts is not None:
        column_Bm = jnp.where(valid_Bm, token_Bm, counts.shape[1])  # out of bounds: dropped
        row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
        counts = counts.at[row_B1, column_Bm].add(1, mode="drop")
    if recent is not None:
        recent = _last_tokens(recent, token_Bm, count_B)
    return History(history.generated + count_B, counts, history.in_prompt, recent)


def _last_tokens(recent_Rc: jax.Array, token_Rm: jax.Array, count_R: jax.Array) -> jax.Array:
    """The last c tokens of each row after its first `count` tokens are appended."""
    c = recent_Rc.shape[1]
    joined = jnp.concatenate([recent_Rc, token_Rm], axis=1)
    return jnp.take_along_axis(joined, count_R[:, None] + jnp.arange(c, dtype=jnp.int32)[None], axis=1)


def plain_rows(batch: int) -> RowPaths:
    """One row a sequence, directly after its history (plain decoding)."""
    return RowPaths(jnp.arange(batch, dtype=jnp.int32), jnp.zeros((batch, 0), jnp.int32))


def chain_rows(token_Bn: jax.Array) -> RowPaths:
    """Rows b * n + i of a verification pass over a chain; row i follows the draft tokens 1 to i.

    Token 0 is the last one emitted, which the history has already observed.
    """
    B, n = token_Bn.shape
    step = jnp.arange(n, dtype=jnp.int32)
    path_Bnm = jnp.where(step[None, None, : n - 1] < step[None, :, None], token_Bn[:, None, 1:], -1)
    return RowPaths(jnp.repeat(jnp.arange(B, dtype=jnp.int32), n), path_Bnm.reshape(B * n, n - 1))


def tree_rows(token_Bn: jax.Array, parent_Bn: jax.Array, *, depth: int) -> RowPaths:
    """Rows b * n + i of a verification pass over a tree; row i follows its ancestors and itself, the root left out.

    Args:
        token_Bn: int32, node 0 is the root, the last token emitted.
        parent_Bn: int32, index of each node's parent, -1 for the root.
        depth: static, edges on the longest path from the root.
    """
    B, n = token_Bn.shape
    sequence_R = jnp.repeat(jnp.arange(B, dtype=jnp.int32), n)
    if not depth:
        return RowPaths(sequence_R, jnp.zeros((B * n, 0), jnp.int32))
    node_Bn = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None], (B, n))
    upward = []
    for _ in range(depth):
        inside_Bn = node_Bn > 0
        safe_Bn = jnp.maximum(node_Bn, 0)
        upward.append(jnp.where(inside_Bn, jnp.take_along_axis(token_Bn, safe_Bn, axis=1), -1))
        node_Bn = jnp.where(inside_Bn, jnp.take_along_axis(parent_Bn, safe_Bn, axis=1), node_Bn)
    up_Rm = jnp.stack(upward[::-1], axis=-1).reshape(B * n, depth)
    # Oldest first and right-aligned; moved to the left, so that padding comes last.
    column_Rm = jnp.arange(depth, dtype=jnp.int32)[None] + (depth - path_length(up_Rm))[:, None]
    path_Rm = jnp.take_along_axis(up_Rm, jnp.minimum(column_Rm, depth - 1), axis=1)
    return RowPaths(sequence_R, jnp.where(column_Rm < depth, path_Rm, -1))


def path_length(path_Rm: jax.Array) -> jax.Array:
    return jnp.sum((path_Rm >= 0).astype(jnp.int32), axis=1)


def path_counts(history: History, rows: RowPaths) -> jax.Array:
    """int32[R, V], how often each token occurs in the output that ends at the row: history and draft path."""
    assert history.counts is not None
    counts_RV = history.counts[rows.sequence]
    R, V = counts_RV.shape
    column_Rm = jnp.where(rows.path >= 0, rows.path, V)
    return counts_RV.at[jnp.arange(R, dtype=jnp.int32)[:, None], column_Rm].add(1, mode="drop")


def recent_tokens(history: History, rows: RowPaths) -> jax.Array:
    """int32[R, context], the last output tokens before the row, newest last, -1 before the first one."""
    assert history.recent is not None
    return _last_tokens(history.recent[rows.sequence], rows.path, path_length(rows.path))


def _sane(logits_RV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logits with NaN and +inf as -inf, and bool[R]: whether a row was without them."""
    sane_RV = logits_RV < np.float32(np.inf)
    return jnp.where(sane_RV, logits_RV, _BANNED), jnp.all(sane_RV, axis=1)


def target_logits(
    cfg: SamplingConfig, params: SamplingArrays, logits_RV, history: History | None = None, rows: RowPaths | None = None
) -> tuple[jax.Array, jax.Array]:
    """Logits after bias, allowed and bad words, minimum length, processors and penalties.

    Args:
        logits_RV: any float dtype; row r belongs to `rows.sequence[r]`.
        history: needed unless `cfg.raw`.
        rows: None is one row a sequence, without draft.

    Returns:
        float32[R, V] without NaN or +inf, and ok bool[R]: False for a row that had one of those (read as -inf) or in
        which no token is left.
    """
    batch = params.truncation.temperature.shape[0]
    assert rows is not None or logits_RV.shape[0] == batch, "more than one row a sequence needs `rows`"
    x_RV, ok_R = _sane(logits_RV.astype(jnp.float32))

    def banned(x_RV: jax.Array, token_Rs: jax.Array) -> jax.Array:
        """The logits with -inf for the named tokens; V names none."""
        row_R1 = jnp.arange(x_RV.shape[0], dtype=jnp.int32)[:, None]
        return x_RV.at[row_R1, token_Rs].set(_BANNED, mode="drop")

    if not cfg.raw:
        assert history is not None, "penalties, bias, bad words, min_tokens and logits processors need a history"
        rows = plain_rows(batch) if rows is None else rows
        if cfg.use_bias:
            x_RV = x_RV + jnp.asarray(params.bias)[rows.sequence]
        if cfg.bad_prefix:  # the last token of each bad word whose other tokens are the newest ones of the output
            recent_Rm = recent_tokens(history, rows)[:, -cfg.bad_prefix :]
            prefix_RWm = jnp.asarray(params.bad_prefix)[rows.sequence]
            match_RW = jnp.all((prefix_RWm < 0) | (prefix_RWm == recent_Rm[:, None, :]), axis=2)
            last_RW = jnp.asarray(params.bad_last)[rows.sequence]
            x_RV = banned(x_RV, jnp.where(match_RW, last_RW, x_RV.shape[1]))
        if cfg.use_min_tokens:
            length_R = history.generated[rows.sequence] + path_length(rows.path)
            early_R = length_R < jnp.asarray(params.min_tokens)[rows.sequence]
            stops_Rs = jnp.asarray(params.stop_ids)[rows.sequence]
            x_RV = banned(x_RV, jnp.where(early_R[:, None], stops_Rs, x_RV.shape[1]))
        if cfg.processors:
            x_RV, processed_R = _sane(_process(cfg, x_RV, recent_tokens(history, rows)))
            ok_R &= processed_R
        if cfg.use_penalties:
            x_RV = _penalise(params, x_RV, history, rows)
    return x_RV, ok_R & jnp.any(x_RV > _BANNED, axis=1)


def _process(cfg: SamplingConfig, x_RV: jax.Array, recent_Rc: jax.Array) -> jax.Array:
    """The user's processors, row by row: an unknown function may add up in another order for another R."""

    def one(row):
        recent_c, x_V = row
        for processor in cfg.processors:
            out = processor(recent_c, x_V)
            if jnp.shape(out) != x_V.shape:
                raise UserError(f"a logits processor returned shape {jnp.shape(out)}, {x_V.shape} is needed")
            x_V = out.astype(jnp.float32)
        return x_V

    return jax.lax.map(one, (recent_Rc, x_RV))


def _penalise(params: SamplingArrays, x_RV: jax.Array, history: History, rows: RowPaths) -> jax.Array:
    """Repetition (Keskar et al., CTRL, arXiv:1909.05858; prompt and output), then frequency and presence (output).

    The selects around the two products keep a compiler from fusing them with the subtraction in one program and not in
    another.
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


def target_probs(
    cfg: SamplingConfig,
    params: SamplingArrays,
    logits_RV,
    history: History | None = None,
    rows: RowPaths | None = None,
    *,
    kernels: SamplingKernels = REFERENCE,
    needed_R=None,
) -> tuple[jax.Array, jax.Array]:
    """The distribution p of the next token of each row: float32[R, V], and ok bool[R] (see `target_logits`).

    Greedy rows are one-hot at the lowest index of the largest logit. A row without any token left is one-hot at 0, so
    that nothing later reads outside the vocabulary; its `ok` is False. Rows outside `needed_R` (bool[R]) get some
    distribution.
    """
    x_RV, ok_R = _checked_logits(cfg, params, logits_RV, history, rows, kernels)
    if cfg.greedy:
        return one_hot(kernels.argmax(x_RV), cfg.vocab_size), ok_R
    truncation = jax.tree.map(
        jnp.asarray if rows is None else lambda a: jnp.asarray(a)[rows.sequence], params.truncation
    )
    if needed_R is not None:  # a greedy row costs least
        truncation = truncation._replace(temperature=jnp.where(needed_R, truncation.temperature, jnp.float32(0)))
    steps = {"min_p": cfg.use_min_p, "top_k": cfg.use_top_k, "top_p": cfg.use_top_p}
    return kernels.probs(x_RV, truncation, greedy=cfg.mixed, **steps), ok_R


def _checked_logits(cfg: SamplingConfig, params, logits_RV, history, rows, kernels: SamplingKernels):
    """`target_logits`, or one pass of `kernels.check` if the logits are used as they are."""
    if cfg.raw and kernels.check is not None:
        x_RV = logits_RV.astype(jnp.float32)
        return x_RV, kernels.check(x_RV)
    return target_logits(cfg, params, logits_RV, history, rows)


def sample(
    cfg: SamplingConfig,
    params: SamplingArrays,
    logits_RV,
    history: History | None = None,
    rows: RowPaths | None = None,
    *,
    u_RU,
    tokens_R=None,
    kernels: SamplingKernels = REFERENCE,
    n_valid_B=None,
) -> Sampled:
    """Tokens drawn from the distributions, and the probability of each of `tokens_R`.

    Args:
        u_RU: float32[R, 4], the rows' `noise.token_uniforms`; not used (and may be None) if `cfg.greedy`.
        tokens_R: int32[R], inside the vocabulary; None asks for no probabilities.
        n_valid_B: int32[B], rows of each sequence that count, the first ones; nothing is promised of the others. None
            is all. The rows of all sequences stand one after the other, equally many of each.
    """
    if kernels.sample is not None:
        x_RV, sane_R = logits_RV.astype(jnp.float32), None
        if not cfg.raw:
            x_RV, sane_R = target_logits(cfg, params, x_RV, history, rows)
        truncation = jax.tree.map(jnp.asarray, params.truncation)
        if n_valid_B is None:
            B = truncation.temperature.shape[0]
            n_valid_B = jnp.full((B,), x_RV.shape[0] // B, jnp.int32)
        token_R, ok_R, share_R = kernels.sample(x_RV, truncation, n_valid_B, u_RU, tokens_R)
        return Sampled(token_R, ok_R if sane_R is None else ok_R & sane_R, share_R)
    if cfg.greedy and tokens_R is None:
        x_RV, ok_R = _checked_logits(cfg, params, logits_RV, history, rows, kernels)
        return Sampled(kernels.argmax(x_RV), ok_R, None)
    needed_R = None
    if n_valid_B is not None:
        n = logits_RV.shape[0] // n_valid_B.shape[0]
        needed_R = (jnp.arange(n, dtype=jnp.int32)[None] < n_valid_B[:, None]).reshape(-1)
    p_RV, ok_R = target_probs(cfg, params, logits_RV, history, rows, kernels=kernels, needed_R=needed_R)
    share_R = None if tokens_R is None else jnp.take_along_axis(p_RV, tokens_R[:, None], axis=1)[:, 0]
    return Sampled(kernels.draw(p_RV, u_RU), ok_R, share_R)


def rows_to_judge(
    cfg: SamplingConfig, params: SamplingArrays, logits_RV, history: History | None, rows: RowPaths | None
) -> tuple[jax.Array, Truncation]:
    """The logits float32[R, V] that `SamplingKernels.judge` reads, and the truncation of each sequence.

    A row without a distribution has nothing above -inf.
    """
    x_RV = logits_RV.astype(jnp.float32)
    if not cfg.raw:
        x_RV, ok_R = target_logits(cfg, params, x_RV, history, rows)
        x_RV = jnp.where(ok_R[:, None], x_RV, _BANNED)
    return x_RV, jax.tree.map(jnp.asarray, params.truncation)


def logprobs(logits_RV: jax.Array, token_R: jax.Array, k: int) -> Logprobs:
    """Log probabilities of `token_R` and of the `k` most likely tokens under the raw logits.

    NaN and +inf count as -inf. Costs a partial selection of k: only called if log probabilities are asked for.
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
