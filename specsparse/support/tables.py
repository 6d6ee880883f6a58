"""Tables on a terminal of any width: columns that do not fit stand below the others, and nothing is cut."""

from collections.abc import Collection, Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

_ANY_WIDTH = 10_000
_READABLE = 20  # characters that a column of long texts has at least, or its longest word


def new(
    *columns: str | Text, rows: Iterable[Sequence[str | Text]] = (), left: Collection[int] = (0,),
    wrap: Collection[int] = (), close: bool = False, note: str | None = None,
) -> Table:  # fmt: skip
    """A table in the style of the package: numbers to the right, only long texts on several lines.

    Args:
        columns: headings.
        rows: cells, more may be added.
        left: indices of the columns of text, which begin at the left.
        wrap: indices of the columns of long texts, which may take several lines.
        close: less room between the columns.
        note: a footnote.
    """
    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=close, caption=note, caption_justify="left")
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i in left else "right", no_wrap=i not in wrap, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def cell(value: float | None, spec: str, scale: float = 1, unit: str = "") -> str:
    """A number for a table; a dash for None."""
    return "-" if value is None else f"{value * scale:{spec}}{unit}"


def markdown(table: Table) -> str:
    columns = [
        [str(column.header), "---" if column.justify == "left" else "---:", *map(str, column.cells)]
        for column in table.columns
    ]
    lines = zip(*columns, strict=True)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def show(out: Console, table: Table, *, names: int = 1) -> None:
    """Prints a table whole; its first `names` columns name the rows, and stand in every part."""
    for part in parts(out, table, names=names):
        out.print(part)


def parts(out: Console, table: Table, *, names: int = 1) -> list[Table]:
    """The table itself if it fits the console; else its columns in several tables, each with the names.

    If that would be a table for almost every column, each row becomes a block of lines, one per column. The last part
    has the footnote.
    """
    if _fits(out, table):
        return [_fitted(out, table)]
    head, rest = table.columns[:names], table.columns[names:]
    groups: list[list[Column]] = [[]]
    for column in rest:
        if groups[-1] and not _fits(out, _of(table, [*head, *groups[-1], column])):
            groups.append([])
        groups[-1].append(column)
    made = [_of(table, [*head, *group]) for group in groups]
    whole = all(_fits(out, part) for part in made)
    made = [_fitted(out, part) for part in made] if whole and 2 * len(made) <= len(rest) else [_blocks(table)]
    made[-1].caption, made[-1].caption_justify = table.caption, table.caption_justify
    return made


def _fits(out: Console, table: Table) -> bool:
    room, widths = _widths(out, table)
    return sum(least for least, _ in widths) <= room


def _widths(out: Console, table: Table) -> tuple[int, list[tuple[int, int]]]:
    """Characters for all columns, and the fewest and the most that each of them takes."""
    options, widths = out.options.update(width=_ANY_WIDTH), []
    for column in table.columns:
        cells = [Measurement.get(out, options, cell) for cell in (column.header, *column.cells)]
        most = max(cell.maximum for cell in cells)
        words = max(cell.minimum for cell in cells)
        widths.append((most if column.no_wrap else max(words, min(most, _READABLE)), most))
    borders = Measurement.get(out, options, table).maximum - sum(most for _, most in widths)
    return out.width - borders, widths


def _fitted(out: Console, table: Table) -> Table:
    """The table with its long texts wrapped if it is too wide; no word is broken."""
    room, widths = _widths(out, table)
    if sum(most for _, most in widths) > room:
        given = [least for least, _ in widths]
        while sum(given) < room:  # to the narrowest that would take more
            given[min((width, i) for i, width in enumerate(given) if width < widths[i][1])[1]] += 1
        for column, width in zip(table.columns, given, strict=True):
            column.width = width
    return table


def _of(table: Table, columns: Sequence[Column]) -> Table:
    made = Table(box=table.box, pad_edge=table.pad_edge, collapse_padding=table.collapse_padding)
    for c in columns:
        made.add_column(c.header, justify=c.justify, no_wrap=c.no_wrap, overflow=c.overflow, style=c.style)
    cells = [list(column.cells) for column in columns]
    for i, row in enumerate(table.rows):
        made.add_row(*(of_column[i] for of_column in cells), style=row.style, end_section=row.end_section)
    return made


def _blocks(table: Table) -> Table:
    """A table with each row as lines of heading and value."""
    made = Table(box=SIMPLE_HEAD, pad_edge=table.pad_edge, show_header=False)
    made.add_column(overflow="fold")
    made.add_column(overflow="fold")
    cells = [list(column.cells) for column in table.columns]
    for i, row in enumerate(table.rows):
        for column, of_column in zip(table.columns, cells, strict=True):
            last = column is table.columns[-1]
            made.add_row(column.header, of_column[i], style=row.style, end_section=last)
    return made
