"""Cells and unions of `kind: spec_sparse` as tables, as CSV and as a figure."""

import csv
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from specsparse.errors import UserError
from specsparse.runtime import metrics

if TYPE_CHECKING:
    from specsparse.experiments.kinds.spec_sparse import Joined

CSV_FILE, FIGURE_FILE = "union.csv", "union.png"


def parts(found: "Joined") -> Iterator[Table | Text]:
    """What is printed."""
    yield _cells(found)
    yield Text(f"both together: {found.over_better:.2f} times as fast as the better of the two alone")
    yield Text(f"product of the two speed-ups alone: {found.product:.2f}")
    for name, q in found.quality.items():
        same = f"most likely token the same {q.same_top:.1%} of the time"
        yield Text(
            f"{name}: KL {q.kl:.4f} nats, perplexity {q.perplexity:.2f} for {q.perplexity_dense:.2f}, {same}; "
            f"{found.labels[name]}"
        )
    yield _unions(found)


def _cells(found: "Joined") -> Table:
    """acc.: mean acceptance length; read: share of the neurons that a pass reads."""
    note = metrics.lengths_note(per_pass="tok/pass", length="acc.")
    out = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=note, caption_justify="left")
    titles = ("", "tok/s", "speed-up", "95 % interval", "by bytes", "tok/pass", "acc.", "read", "differing")
    for i, title in enumerate(titles):
        out.add_column(title, justify="right" if i else "left", no_wrap=True)
    for c in found.cells.values():
        n, faster = c.counters, c.speedup
        length = f"{1 + n.num_accepted_tokens / n.num_drafts:.2f}" if n.num_drafts else "-"
        out.add_row(
            c.name, f"{1 / c.seconds_per_token:.1f}", f"{faster.ratio_of_totals:.2f}",
            faster.interval.ends(), f"{c.by_bytes:.2f}",
            f"{c.tokens_per_pass:.2f}", length, f"{c.read:.1%}", str(c.differing),
        )  # fmt: skip
    return out


def _unions(found: "Joined") -> Table:
    """Text: consecutive tokens, as if every draft were right; passes: those that the sparse cell made."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for title in ("sequences", "rows of a pass", "a row keeps", "union in text", "guess", "passes", "union", "guess"):
        out.add_column(title, justify="right", no_wrap=True)
    text = {(p.batch, p.rows): p for p in found.text}
    seen = {(1, p.rows): p for p in found.seen}
    for key in sorted({*text, *seen}):
        kept = (text.get(key) or seen[key]).kept
        cells = [*map(str, key), f"{kept:.1%}"]
        cells += [f"{text[key].union:.1%}", f"{text[key].guess:.1%}"] if key in text else ["", ""]
        one = seen.get(key)
        cells += [str(one.passes), f"{one.union:.1%}", f"{one.guess:.1%}"] if one else ["", "", ""]
        out.add_row(*cells)
    return out


def write_csv(path: Path, found: "Joined") -> None:
    """A line a size of pass, "text" or "passes"; columns as in `UnionPoint`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["of", *asdict(found.text[0])])
        for kind, points in (("text", found.text), ("passes", found.seen)):
            writer.writerows([kind, *asdict(p).values()] for p in points)


def write_figure(path: Path, found: "Joined", *, title: str) -> None:
    """Neurons read against the rows of a pass, and the speed-up of every cell, as PNG.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("a figure needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(11, 4), layout="constrained")
    union, speed = figure.subplots(1, 2)
    union.plot(
        [p.rows for p in found.text], [p.union for p in found.text], marker="o", label="consecutive tokens of a text"
    )
    chain = [p for p in found.text if p.batch == 1]
    rows = [p.rows for p in chain]
    union.plot(rows, [p.union for p in chain], marker="o", label="consecutive tokens of a text")
    union.plot(rows, [p.guess for p in chain], linestyle="--", label="1 - (1 - s)^n")
    union.plot([p.rows for p in found.seen], [p.union for p in found.seen], "s", label="passes of this run")
    union.set(xlabel="rows of a pass", ylabel="neurons read", ylim=(0, 1.02))
    union.grid(alpha=0.3)
    union.legend()
    cells, place = list(found.cells.values()), range(len(found.cells))
    speed.bar([p - 0.2 for p in place], [c.by_bytes for c in cells], 0.4, label="by bytes")
    speed.bar([p + 0.2 for p in place], [c.speedup.ratio_of_totals for c in cells], 0.4, label="measured")
    speed.axhline(1.0, color="grey", linewidth=0.8)
    speed.set(ylabel="speed-up over plain dense decoding", xticks=list(place))
    speed.set_xticklabels([c.name.replace(", ", "\n") for c in cells])
    speed.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
