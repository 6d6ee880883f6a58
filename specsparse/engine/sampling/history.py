"""What distributions remember of a sequence, and which draft tokens lie between it and a row of logits."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.sampling.sampling_arrays import SamplingConfig


class History(NamedTuple):
    """Generated tokens as far as the distributions need them; a field is None where no step needs it.

    Attributes:
        generated: int32[B], tokens generated so far.
        counts: int32[B, V], how often each token was generated (penalties).
        in_prompt: bool[B, V], whether it is in the prompt (repetition penalty).
        recent: int32[B, context], the last generated tokens, newest last, -1 before the first one.
    """

    generated: jax.Array
    counts: jax.Array | None = None
    in_prompt: jax.Array | None = None
    recent: jax.Array | None = None


class RowPaths(NamedTuple):
    """Where each of R rows of logits stands.

    Attributes:
        sequence: int32[R], index of the row's sequence in the batch.
        path: int32[R, m], draft tokens between what the history has seen and the row, oldest first, -1 after the last.
    """

    sequence: jax.Array
    path: jax.Array


def init_history(cfg: SamplingConfig, prompts: Sequence[Sequence[int]]) -> History:
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
    return jax.device_put(History(np.zeros((B,), np.int32), counts, in_prompt, recent))


def observe(history: History, token_B: jax.Array, valid_B: jax.Array) -> History:
    """Adds one generated token to each sequence for which `valid_B` is True."""
    return observe_many(history, token_B[:, None], valid_B.astype(jnp.int32))


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
        recent = _window(recent, token_Bm, count_B)
    return History(history.generated + count_B, counts, history.in_prompt, recent)


def _window(recent_Rc: jax.Array, token_Rm: jax.Array, count_R: jax.Array) -> jax.Array:
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
    node_Bn = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None], (B, n))
    upward = []
    for _ in range(depth):
        inside_Bn = node_Bn > 0
        safe_Bn = jnp.maximum(node_Bn, 0)
        upward.append(jnp.where(inside_Bn, jnp.take_along_axis(token_Bn, safe_Bn, axis=1), -1))
        node_Bn = jnp.where(inside_Bn, jnp.take_along_axis(parent_Bn, safe_Bn, axis=1), node_Bn)
    if not upward:
        return RowPaths(jnp.repeat(jnp.arange(B, dtype=jnp.int32), n), jnp.zeros((B * n, 0), jnp.int32))
    up_Rm = jnp.stack(upward[::-1], axis=-1).reshape(B * n, depth)
    length_R = path_length(up_Rm)
    # Oldest first and right-aligned; moved to the left, so that padding comes last.
    column_Rm = jnp.arange(depth, dtype=jnp.int32)[None] + (depth - length_R)[:, None]
    path_Rm = jnp.take_along_axis(up_Rm, jnp.minimum(column_Rm, depth - 1), axis=1)
    path_Rm = jnp.where(column_Rm < depth, path_Rm, -1)
    return RowPaths(jnp.repeat(jnp.arange(B, dtype=jnp.int32), n), path_Rm)


def path_length(path_Rm: jax.Array) -> jax.Array:
    """int32[R], draft tokens of each path."""
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
    return _window(history.recent[rows.sequence], rows.path, path_length(rows.path))
