"""Texts packed side by side into windows of one shape, so that one program serves them all."""

from collections.abc import Iterator, Sequence

import numpy as np

from specsparse.training.data import Text
from specsparse.training.unroll import Window

_OPEN = 8
"""Windows that wait for a text that still fits."""


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
    if m > drafting:
        keep = len(text.tokens) - (m - drafting)
        text = Text(text.tokens[:keep], text.prompt, _part(text.hidden, slice(keep)))
        n -= m - drafting
    drop = max(n - rows, 0)
    if drop:
        text = Text(text.tokens[drop:], text.prompt - drop, _part(text.hidden, slice(drop, None)))
    return text


def _part(hidden: np.ndarray | None, rows: slice) -> np.ndarray | None:
    return None if hidden is None else hidden[rows]


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
