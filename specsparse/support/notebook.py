"""HTML of our objects for notebooks. Texts are escaped; styles stand inline, since a notebook has no style sheet."""

from collections.abc import Iterable, Sequence
from html import escape

_CELL = "text-align:left;padding:2px 10px 2px 0"
_HEAD = f"{_CELL};font-weight:600"


def table(rows: Iterable[Sequence[str]], *, columns: Sequence[str] = (), title: str = "") -> str:
    """A small table; the first cell of a row is its heading."""
    caption = f'<caption style="text-align:left;font-weight:600">{escape(title)}</caption>' if title else ""
    head = "".join(f'<th style="{_HEAD}">{escape(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th style="{_HEAD}">{escape(first)}</th>'
        + "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return f'<table style="border-collapse:collapse">{caption}{f"<tr>{head}</tr>" if head else ""}{body}</table>'


def block(*spans: str) -> str:
    """A paragraph of spans that keeps their spaces and lines."""
    return f'<div style="white-space:pre-wrap">{"".join(spans)}</div>'


def span(text: str, *, background: str = "", title: str = "") -> str:
    """A piece of text, on a colour if one is given; `title` is shown beside the mouse."""
    if not background:
        return escape(text)
    hint = f' title="{escape(title, quote=True)}"' if title else ""
    return f'<span style="background:{background};color:#111"{hint}>{escape(text)}</span>'
