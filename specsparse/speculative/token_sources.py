"""Sources of the tokens of a speculative text: written on the device beside the tokens, read with them."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.speculative.base import Draft, Verdict
from specsparse.support import notebook

Kind = Literal["accepted", "recovered", "bonus", "plain"]
KINDS: dict[Kind, str] = {
    "accepted": "proposed by the draft and kept",
    "recovered": "written by the target in place of a refused draft",
    "bonus": "written by the target after a draft that was kept whole",
    "plain": "written by the target without a draft",
}
"""The kinds of sources."""
DTYPE = jnp.int16
"""Holds every position of a draft."""
_RECOVERED, _BONUS = -1, -2


class TokenSource(NamedTuple):
    """The source of a token: a key of `KINDS`, and for an accepted one its position in the draft, 1 first."""

    kind: Kind
    position: int = 0


PLAIN = TokenSource("plain")


def codes(draft: Draft, verdict: Verdict) -> jax.Array:
    """int16[B, K+1] for the tokens of a round: the position of an accepted one, else how the target came to write it.

    A draft was kept whole where every tested position was accepted.
    """
    place_m = jnp.arange(verdict.tokens.shape[1], dtype=jnp.int32)[None]
    own_B = jnp.where(verdict.tested == verdict.accepted, _BONUS, _RECOVERED)
    own_B = jnp.where(draft.count > 0, own_B, 0)
    return jnp.where(place_m < verdict.accepted[:, None], place_m + 1, own_B[:, None]).astype(DTYPE)


def read(codes_n: np.ndarray) -> tuple[TokenSource, ...]:
    """The token sources that codes stand for, int16[n]."""
    own = {0: PLAIN, _RECOVERED: TokenSource("recovered"), _BONUS: TokenSource("bonus")}
    known = {code: own.get(code) or TokenSource("accepted", code) for code in np.unique(codes_n).tolist()}
    return tuple(known[code] for code in codes_n.tolist())


def to_html(pieces: Iterable[tuple[str, TokenSource]]) -> str:
    """A text whose tokens stand on the colours of their sources, with a legend; later positions are darker."""
    shown = [(text, origin) for text, origin in pieces if text]
    place = ", position {} of its draft".format
    titles = [o.kind + (place(o.position) if o.position else "") for _, o in shown]
    spans = [notebook.span(text, background=_colour(o), title=title) for (text, o), title in zip(shown, titles)]
    kinds = {o.kind for _, o in shown}
    first = [TokenSource(kind, 1 if kind == "accepted" else 0) for kind in KINDS if kind in kinds]
    legend = [notebook.span(o.kind, background=_colour(o)) + f": {KINDS[o.kind]}\n" for o in first]
    return notebook.block(*spans) + notebook.block("\n", *legend)


def _colour(origin: TokenSource) -> str:
    """The colour of the background, told apart by colour-blind readers too: blue for accepted, orange and violet for
    others."""
    lightness = max(60, 92 - 5 * (origin.position - 1))
    colours = {"accepted": f"hsl(205,75%,{lightness}%)", "recovered": "hsl(38,95%,78%)", "bonus": "hsl(315,55%,86%)"}
    return colours.get(origin.kind, "")
