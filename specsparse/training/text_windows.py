"""Texts with the target's rows, packed side by side into windows of one shape, so that one program serves them all."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.cache import KVCache
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.training.corpus import Text

_BATCH, _STEP = 8, 128
"""Texts of a forward pass, and what its length is a multiple of: few shapes, so that few programs are compiled."""
_OPEN = 8
"""Windows that wait for a text that still fits."""


class Features:
    """Reads texts with a target, anew each time: kept, its rows would be a thousand times larger than the texts.

    Args:
        model: the target.
        layers: ids of layers; the rows are those of the residual stream that enter them, not normalised. The number of
            layers stands for the rows before the output norm.
    """

    def __init__(self, model: Model, layers: Sequence[int]):
        self.model, self.layers = model, tuple(layers)
        want = Want(logits="none", hidden=self.layers)

        def rows(params, tokens_Bn, count_B, cache: KVCache):
            return model.forward(params, tokens_Bn, cache, n_valid_B=count_B, want=want)[0].hidden

        self._rows = model.devices.jit(rows)

    def of(self, texts: Sequence[Text]) -> list[Text]:
        """The texts with float32[n, len(layers) D], the rows of one layer after those of another."""
        out: list[Text] = list(texts)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
        for start in range(0, len(order), _BATCH):
            group = order[start : start + _BATCH]
            length = -(-len(texts[group[-1]].tokens) // _STEP) * _STEP
            tokens, count = np.zeros((_BATCH, length), np.int32), np.zeros(_BATCH, np.int32)
            for b, i in enumerate(group):
                count[b] = len(texts[i].tokens)
                tokens[b, : count[b]] = texts[i].tokens
            capacity = self.model.capacity_for(length)
            cache = self.model.new_cache(_BATCH, capacity)
            args = self.model.everywhere((tokens, count, cache))
            found = np.asarray(jax.block_until_ready(self._rows(self.model.params_for(capacity), *args)))
            for b, i in enumerate(group):
                out[i] = replace(texts[i], hidden=found[b, : count[b]])
        return out


class Window(NamedTuple):
    """Texts side by side in n rows, of which m are drafted from. Row i stands for h_i and the token after it.

    Attributes:
        hidden: [n, W], what the target has at the token before each row: D numbers for each of `Form.layers`.
        after: [m, D], h_{i+1} of the drafting rows: what they should find.
        tokens: int32[n], the token after each row.
        position: int32[n], of h_i in its text.
        text: int32[n], which text a row belongs to; -1 for none.
        rows: int32[m], the drafting rows, ascending, those of a text one after the other.
        depth: int32[m], drafting rows of the same text before this one; -1 if there is no row.
    """

    hidden: jax.Array
    after: jax.Array
    tokens: jax.Array
    position: jax.Array
    text: jax.Array
    rows: jax.Array
    depth: jax.Array

    def same_text(self) -> jax.Array:
        """bool[m, n]: whether a row is of the drafting row's text; none for a drafting row that there is not."""
        mine = jnp.where(self.depth >= 0, self.text[self.rows], -2)
        return self.text[None] == mine[:, None]


def spans(text: Text) -> tuple[int, int]:
    """(rows, drafting rows) of a text: a row for each token with a row after it, drafting from the answer's on."""
    rows = len(text.tokens) - 1
    return rows, rows - max(text.prompt - 2, 0)


def pack(texts: Sequence[Text], order: Sequence[int], *, rows: int, drafting: int) -> list[list[int]]:
    """Which texts go together into windows of `rows` rows and `drafting` drafting rows, taken in that order.

    A text goes into the fullest of the open windows that has room; one without an answer is left out.
    """
    waiting: list[list] = []  # [rows, drafting rows, texts]
    full = []
    for index in order:
        n, m = spans(cut(texts[index], rows=rows, drafting=drafting))
        if m < 1 or n < 1:
            continue
        fits = [w for w in waiting if w[0] + n <= rows and w[1] + m <= drafting]
        if fits:
            chosen = max(fits, key=lambda w: w[0])
        else:
            chosen = [0, 0, []]
            waiting.append(chosen)
        chosen[0], chosen[1] = chosen[0] + n, chosen[1] + m
        chosen[2].append(int(index))
        if len(waiting) > _OPEN:
            waiting.sort(key=lambda w: w[0])
            full.append(waiting.pop()[2])
    return full + [w[2] for w in waiting]


def fill_up(texts: Sequence[Text], order: Sequence[int], *, rows: int, least: int = 32) -> Iterator[list[int]]:
    """Which texts go together into full windows of `rows` rows, in that order: the last text of one loses its end.

    A text of whose answer less than `least` tokens would be left begins the next window instead; one without an answer
    is left out.
    """
    group, used = [], 0
    for index in order:
        if len(texts[index].tokens) <= texts[index].prompt:
            continue
        if group and used + texts[index].prompt + least > rows:
            yield group
            group, used = [], 0
        group.append(int(index))
        used += len(texts[index].tokens)
    if group:
        yield group


def cut(text: Text, *, rows: int, drafting: int) -> Text:
    """The text's end in at most that many rows, and drafting rows."""
    n, m = spans(text)
    end = len(text.tokens) - max(m - drafting, 0)
    drop = max(n - max(m - drafting, 0) - rows, 0)
    hidden = None if text.hidden is None else text.hidden[drop:end]
    return Text(text.tokens[drop:end], text.prompt - drop, hidden)


def fill(texts: Sequence[Text], *, rows: int, drafting: int, width: int) -> Window:
    """The window of texts that `pack` put together, as numpy arrays; they have their rows, the last D = `width` numbers
    of which are those before the target's output norm."""
    texts = [cut(text, rows=rows, drafting=drafting) for text in texts]
    n, m = rows, drafting
    out = Window(
        hidden=np.zeros((n, texts[0].hidden.shape[1]), np.float32),
        after=np.zeros((m, width), np.float32),
        tokens=np.zeros(n, np.int32),
        position=np.zeros(n, np.int32),
        text=np.full(n, -1, np.int32),
        rows=np.zeros(m, np.int32),
        depth=np.full(m, -1, np.int32),
    )
    row = at = 0
    for index, text in enumerate(texts):
        count, drafting = spans(text)
        here = slice(row, row + count)
        out.hidden[here], out.tokens[here] = text.hidden[:-1], text.tokens[1:]
        out.position[here], out.text[here] = np.arange(count), index
        those = slice(at, at + drafting)
        out.rows[those] = row + count - drafting + np.arange(drafting)
        out.after[those] = text.hidden[count - drafting + 1 :, -width:]
        out.depth[those] = np.arange(drafting)
        row, at = row + count, at + drafting
    return out
