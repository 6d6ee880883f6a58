"""Tables on terminals of any width: nothing is cut, nothing is lost."""

import io

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specsparse.support import tables

ROWS = [("one", "1.25", "[bold] is no markup", "#" * 30, "7"), ("another one", "200.5", "-", "@" * 30, "8")]
TITLES = ("name", "value", "remark", "of thirty letters", "count")


def shown(width):
    table = Table(*TITLES, caption="a footnote")
    for i, row in enumerate(ROWS):
        table.add_row(*map(Text, row), style="bold" if i else None)
    out = io.StringIO()
    tables.show(Console(file=out, width=width), table, names=1)
    return out.getvalue()


@pytest.mark.parametrize("width", [24, 36, 47, 60, 80, 200])
def test_every_heading_and_value_is_there_whole(width):
    text = shown(width)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    assert " ".join(text.split()).count("a footnote") == 1
    words = " ".join((*TITLES, *ROWS[0][:3], *ROWS[1][:3], "7", "8")).split()
    assert set(words) <= set(text.replace("│", " ").split())
    assert text.count("#") == text.count("@") == 30


def test_a_table_that_fits_is_as_it_is():
    assert shown(200).splitlines()[1].split("┃")[1:-1] == [
        " name        ", " value ", " remark              ", " of thirty letters              ", " count "
    ]  # fmt: skip


def test_the_names_stand_in_every_part():
    assert shown(64).count("another one") == 2
