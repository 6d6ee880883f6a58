"""A figure is rows and a way to draw them; the same rows are its CSV."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure as Canvas

from specsparse.report import rows as rows_of
from specsparse.report.rows import Row
from specsparse.support.files import atomically, write_atomically

# Okabe and Ito's colours, told apart by colour-blind readers too; yellow is left out, it vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#4D4D4D", "#8C510A")
INK, FAINT = "#222222", "#8a8a8a"
MOST = len(COLOURS)
"""Series in one figure; more cannot be told apart."""

_STYLE = {
    "figure.facecolor": "white",
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 10,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}


@dataclass(frozen=True)
class Figure:
    """A figure that the records have numbers for.

    Attributes:
        name: stem of its files.
        title: what it shows.
        caption: how to read it, with the definition of what is plotted.
        rows: its numbers, all with the same columns.
        draw: puts rows on a canvas.
        size: inches.
    """

    name: str
    title: str
    caption: str
    rows: tuple[Row, ...]
    draw: Callable[[Canvas, Sequence[Row]], None]
    size: tuple[float, float] = (8.0, 4.0)

    def columns(self) -> list[str]:
        """Of the CSV."""
        return rows_of.columns(self.rows)

    def csv(self) -> str:
        """The rows, with a heading; what is missing is empty."""
        return rows_of.csv_text(self.rows)

    @property
    def files(self) -> tuple[str, ...]:
        """Its files."""
        return f"{self.name}.csv", f"{self.name}.png"

    def canvas(self) -> Canvas:
        """The drawing, not yet in a format."""
        with matplotlib.rc_context(_STYLE):
            canvas = Canvas(figsize=self.size, layout="constrained")
            self.draw(canvas, self.rows)
        return canvas

    def _image(self, kind: str) -> bytes:
        out = io.BytesIO()
        # The salt makes the file the same for the same numbers; text as outlines looks the same in every browser.
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": self.name, "svg.fonttype": "path"}):
            metadata = {"Date": None} if kind == "svg" else None
            self.canvas().savefig(out, format=kind, dpi=150, metadata=metadata)
        return out.getvalue()

    def png(self) -> bytes:
        """The drawing for a paper's draft or a slide."""
        return self._image("png")

    def data_uri(self) -> str:
        """The drawing for a page that needs nothing beside it."""
        return "data:image/svg+xml;base64," + base64.b64encode(self._image("svg")).decode()

    def csv_uri(self) -> str:
        """The numbers, the same way."""
        return "data:text/csv;base64," + base64.b64encode(self.csv().encode()).decode()

    def write(self, directory: Path) -> None:
        """NAME.png and NAME.csv; UserError where they cannot be written."""
        with atomically(directory / f"{self.name}.png") as file:
            file.write(self.png())
        write_atomically(directory / f"{self.name}.csv", self.csv())


@dataclass(frozen=True)
class Missing:
    """A figure that is left out, and why."""

    name: str
    title: str
    why: str
