"""Steps of one width: plain decoding and every verification run the same rows through the same program.

Kernels whose bits depend on the number of rows (`backend=xla`, so every accelerator) then write plain decoding's text
in speculative decoding too, as far as a row's bits depend neither on its place nor on the other rows. Tests say where.
"""

import jax
import jax.numpy as jnp

from specsparse.engine.cache import KVCache
from specsparse.engine.llama import ForwardFn, ForwardOut, Want
from specsparse.engine.weights import Params
from specsparse.errors import UserError
from specsparse.kernels import TILE_ROWS

WIDEST = 64
AUTO = "auto"
"""In place of a width: `TILE_ROWS`, or the width that a longer draft needs (`engine.model.Model.holding`)."""
_ALL = Want()


def check_width(width: int) -> None:
    """Raises UserError unless `width` is a multiple of 8 from 8 to 64."""
    if isinstance(width, bool) or not isinstance(width, int) or width not in range(TILE_ROWS, WIDEST + 1, TILE_ROWS):
        raise UserError(f"width={width!r} must be a multiple of {TILE_ROWS} up to {WIDEST}, {AUTO}, or 0 for none")


def least_width(rows: int) -> int:
    """The least width that holds steps of `rows` rows; raises UserError if none does."""
    check_rows(rows, WIDEST)
    return -(-rows // TILE_ROWS) * TILE_ROWS


def check_rows(rows: int, width: int) -> None:
    """Raises UserError, with the width that does, if drafts do not fit a model's width.

    Args:
        rows: that a verification may have: drafted nodes and one.
        width: of the model; 0 for none.
    """
    if width and rows > width:
        hint = f"load it with width={least_width(rows)}" if rows <= WIDEST else f"draft {WIDEST - 1} tokens at most"
        raise UserError(f"drafts of {rows - 1} tokens verify {rows} rows, and the model's width is {width}: {hint}")


def fixed_width(forward: ForwardFn, width: int) -> ForwardFn:
    """`forward`, with passes of up to `width` rows all run as `width` rows, of a tree, with all logits.

    Rows that were not asked for do not count and are cut off. Barriers keep the operations around the pass out of its
    program, so that XLA compiles it alike wherever it stands. Longer passes, of prompts, stay as they are.
    """

    def padded(rows_Bn: jax.Array, value: int) -> jax.Array:
        return jnp.pad(rows_Bn, ((0, 0), (0, width - rows_Bn.shape[1])), constant_values=value)

    def of_width(
        params: Params, tokens_Bn: jax.Array, cache: KVCache, *, n_valid_B=None, parents_Bn=None, want: Want = _ALL
    ) -> tuple[ForwardOut, KVCache]:
        batch, n = tokens_Bn.shape
        if n_valid_B is None:
            n_valid_B = jnp.full((batch,), n, jnp.int32)
        if n > width:
            return forward(params, tokens_Bn, cache, n_valid_B=n_valid_B, parents_Bn=parents_Bn, want=want)
        chain_Bn = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None] - 1, (batch, width))
        parents_BW = chain_Bn if parents_Bn is None else padded(parents_Bn, -1)
        given = (params, padded(tokens_Bn, 0), cache, n_valid_B, parents_BW)
        params, tokens_BW, cache, n_valid_B, parents_BW = jax.lax.optimization_barrier(given)
        wide = Want("none" if want.logits == "none" else "all", want.hidden, want.layers, want.mass, zeros=False)
        out, cache = forward(params, tokens_BW, cache, n_valid_B=n_valid_B, parents_Bn=parents_BW, want=wide)
        out, cache = jax.lax.optimization_barrier((out, cache))
        logits, hidden = (None if rows is None else rows[:, :n] for rows in (out.logits, out.hidden))
        if logits is not None and want.zeros:  # outside of the pass, which must not depend on `zeros`
            logits = jnp.where((jnp.arange(n)[None] < n_valid_B[:, None])[..., None], logits, jnp.float32(0))
        if logits is not None and want.logits == "last":
            logits = jnp.take_along_axis(logits, jnp.maximum(n_valid_B - 1, 0)[:, None, None], axis=1)
        return out._replace(logits=logits, hidden=hidden), cache

    return of_width
