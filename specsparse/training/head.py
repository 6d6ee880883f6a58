"""The head as a function to differentiate: all drafted positions of a window at once, in float32.

A head reads the target's row h_i and the token after it and says what the target's row i + 1 will be (EAGLE, Li et
al., arXiv:2401.15077). When it drafts on, it reads its own output in place of h. Stream s is that: all rows as the
s-th token of a draft. A row of stream s sees the rows of stream 1 up to where its draft began and one row of each
stream since, as when decoding (HASS, Zhang et al., arXiv:2408.15766; EAGLE-3, arXiv:2503.01840).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.rope import rope_tables
from specsparse.kernels.reference import rotate

_NOT = -1e30


class HeadWeights(NamedTuple):
    """float32; matrices are [outputs, inputs].

    Attributes:
        hidden_norm, token_norm: [D], RMS norms of the two inputs.
        fc: [D, 2 D], of the two normalised inputs side by side, hidden first.
        attn_norm, attn_q, attn_k, attn_v, attn_output, ffn_norm, ffn_gate, ffn_up, ffn_down: one layer of the target's
            shape.
        output_norm: [D], before the output matrix, which is the target's.
    """

    hidden_norm: jax.Array
    token_norm: jax.Array
    fc: jax.Array
    attn_norm: jax.Array
    attn_q: jax.Array
    attn_k: jax.Array
    attn_v: jax.Array
    attn_output: jax.Array
    ffn_norm: jax.Array
    ffn_gate: jax.Array
    ffn_up: jax.Array
    ffn_down: jax.Array
    output_norm: jax.Array


class Window(NamedTuple):
    """Texts side by side in n rows, of which m are drafted from. Row i stands for h_i and the token after it.

    Attributes:
        hidden: [n, D], h_i.
        after: [m, D], h_{i+1} of the drafting rows: what they should find.
        tokens: int32[n], the token after each row.
        position: int32[n], of h_i in its text.
        text: int32[n], which text a row belongs to; -1 for none.
        rows: int32[m], the drafting rows, ascending, those of a text one after the other.
        depth: int32[m], drafting rows of the same text before this one; -1 where there is no row.
    """

    hidden: jax.Array
    after: jax.Array
    tokens: jax.Array
    position: jax.Array
    text: jax.Array
    rows: jax.Array
    depth: jax.Array


class Frozen(NamedTuple):
    """What is the target's and stays as it is.

    Attributes:
        output_norm: float32[D].
        head: float32[N, D], the output rows of the draft vocabulary.
        cos, sin: float32[positions, d / 2].
    """

    output_norm: jax.Array
    head: jax.Array
    cos: jax.Array
    sin: jax.Array


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(eps)) * _wide(weight, x)


def _wide(weight: jax.Array, x: jax.Array) -> jax.Array:
    return weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def rotary(config: ModelConfig, positions: int, factors: np.ndarray | None = None) -> tuple[jax.Array, jax.Array]:
    """cos and sin float32[positions, d / 2]."""
    cos, sin = rope_tables(config.rope, positions, factors)
    return jnp.asarray(cos), jnp.asarray(sin)


class _Key(NamedTuple):
    """Keys and values of some rows: [G, r, d] each."""

    k: jax.Array
    v: jax.Array


def streams(
    config: ModelConfig, weights: HeadWeights, frozen: Frozen, embedded_nD: jax.Array, window: Window, count: int
) -> list[jax.Array]:
    """[m, D] for each of `count` streams: the head's rows before the output norm, the first stream first.

    A row of stream s counts where its depth is at least s - 1.
    """
    rows = window.rows
    cos, sin = frozen.cos[window.position], frozen.sin[window.position]
    x_nD = _enter(config, weights, window.hidden, embedded_nD)
    base = _keys(config, weights, x_nD, cos, sin)
    gone = jnp.where(window.depth >= 0, window.text[rows], -2)
    place = jnp.arange(len(window.text))
    own: list[_Key] = []
    found = []
    x_mD, token_mD = x_nD[rows], embedded_nD[rows]
    for s in range(count):
        if s:
            x_mD = _enter(config, weights, _down(found[-1], 1), token_mD)
            own.append(_keys(config, weights, x_mD, cos[rows], sin[rows]))
        seen_mn = (window.text[None] == gone[:, None]) & (place[None] <= rows[:, None] - s)
        drafted = [_Key(*(_down(a, s - 1 - j, axis=1) for a in key)) for j, key in enumerate(own)]
        x_mD = _attend(config, weights, x_mD, cos[rows], sin[rows], base, seen_mn, drafted)
        found.append(_feed_forward(config, weights, x_mD))
    return found


def logits(config: ModelConfig, weights: HeadWeights, frozen: Frozen, y_mD: jax.Array) -> jax.Array:
    """float32[m, N] over the draft vocabulary."""
    return rms_norm(y_mD, weights.output_norm, config.norm_eps) @ frozen.head.T


def target_logits(config: ModelConfig, frozen: Frozen, after_mD: jax.Array) -> jax.Array:
    """float32[m, N]: the target's own, from its rows."""
    return rms_norm(after_mD, frozen.output_norm, config.norm_eps) @ frozen.head.T


def _down(x: jax.Array, by: int, axis: int = 0) -> jax.Array:
    """Row r holds what row r - `by` held: a row's predecessor in its draft."""
    return jnp.roll(x, by, axis=axis) if by else x


def _enter(config: ModelConfig, w: HeadWeights, hidden_RD: jax.Array, embedded_RD: jax.Array) -> jax.Array:
    both = (rms_norm(hidden_RD, w.hidden_norm, config.norm_eps), rms_norm(embedded_RD, w.token_norm, config.norm_eps))
    return jnp.concatenate(both, axis=-1) @ w.fc.T


def _heads(config: ModelConfig, x_RO: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    x = x_RO.reshape(x_RO.shape[0], -1, config.head_dim)
    return rotate(x, cos[:, None], sin[:, None], config.rope.pairing)


def _keys(config: ModelConfig, w: HeadWeights, x_RD: jax.Array, cos: jax.Array, sin: jax.Array) -> _Key:
    z = rms_norm(x_RD, w.attn_norm, config.norm_eps)
    k = _heads(config, z @ w.attn_k.T, cos, sin)
    v = (z @ w.attn_v.T).reshape(len(z), -1, config.head_dim)
    return _Key(k.swapaxes(0, 1), v.swapaxes(0, 1))


def _attend(config, w: HeadWeights, x_mD, cos, sin, base: _Key, seen_mn, drafted: list[_Key]) -> jax.Array:
    """Each row over the rows of the first stream it sees, and over one row of each later stream."""
    z = rms_norm(x_mD, w.attn_norm, config.norm_eps)
    q = _heads(config, z @ w.attn_q.T, cos, sin) * (1.0 / float(np.sqrt(config.head_dim)))
    q = q.reshape(len(q), config.n_kv_heads, -1, config.head_dim)
    scores = [jnp.where(seen_mn[None, None], jnp.einsum("mghd,gnd->ghmn", q, base.k), _NOT)]
    scores += [jnp.einsum("mghd,gmd->ghm", q, key.k)[..., None] for key in drafted]
    p = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    n = seen_mn.shape[1]
    out = jnp.einsum("ghmn,gnd->mghd", p[..., :n], base.v)
    for j, key in enumerate(drafted):
        out = out + jnp.einsum("ghm,gmd->mghd", p[..., n + j], key.v)
    return x_mD + out.reshape(len(x_mD), -1) @ w.attn_output.T


def _feed_forward(config: ModelConfig, w: HeadWeights, x_mD: jax.Array) -> jax.Array:
    z = rms_norm(x_mD, w.ffn_norm, config.norm_eps)
    return x_mD + (jax.nn.silu(z @ w.ffn_gate.T) * (z @ w.ffn_up.T)) @ w.ffn_down.T
