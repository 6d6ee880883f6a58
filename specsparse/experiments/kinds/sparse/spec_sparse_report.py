"""Cells and unions of `kind: spec_sparse`: what they are, as tables and as figures."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from matplotlib.figure import Figure as Canvas
from rich.table import Table
from rich.text import Text

from specsparse.measure import conditions
from specsparse.measure.conditions import UNKNOWN, Conditions
from specsparse.measure.speedups import Repeats, Speedup
from specsparse.powerinfer.union import UnionPoint
from specsparse.predictors.evaluate import ModelQuality
from specsparse.report.plots import FAINT, Figure, Row
from specsparse.runtime import metrics
from specsparse.runtime.metrics import Counters
from specsparse.support import tables

PLAIN_DENSE, PLAIN_SPARSE = "plain dense", "plain sparse"
SPEC_DENSE, SPEC_SPARSE, SPEC_CAPPED = "spec dense", "spec sparse", "spec sparse, capped"
TEXT, PASSES = "text", "passes"


@dataclass(frozen=True)
class SparseCell:
    """One way to decode, all prompts together.

    Attributes:
        name: of the cell.
        counters: sums over the timed passes.
        seconds_per_token: decoding only.
        speedup: over plain dense decoding.
        by_bytes: the speed-up that bytes would give.
        read: share of the FFNs' neurons that a pass reads.
        differing: tokens that are not those of plain decoding with the same FFN, or of plain dense decoding where the
            sparse model has the dense one's bits.
        draws_z: as in `metrics.DEFINITIONS`.
    """

    name: str
    counters: Counters
    seconds_per_token: float
    speedup: Speedup
    by_bytes: float
    read: float
    differing: int
    draws_z: float | None = None

    @property
    def tokens_per_pass(self) -> float:
        """Of the target."""
        return self.counters.num_emitted_tokens / self.counters.num_rounds


@dataclass(frozen=True)
class Joined:
    """What was found.

    Attributes:
        cells: the four cells, and the capped one if `ffn.union_cap` asks for it.
        text: unions of consecutive tokens of a text, by size of the pass, and of drafts in a batch.
        seen: unions of the passes that the sparse cell made, by size.
        quality: of the sparse model against the dense one, by cell.
        promised: whether the verifier promises plain decoding's tokens.
        exact: whether the sparse model has the dense one's bits; then its cells are compared with plain dense decoding.
        labels: the promise in words of each cell in `quality`.
        conditions: what the cells were taken at, in turn.
        repeats: how often.
    """

    cells: dict[str, SparseCell]
    text: tuple[UnionPoint, ...]
    seen: tuple[UnionPoint, ...]
    quality: dict[str, ModelQuality]
    promised: bool
    exact: bool
    labels: dict[str, str]
    conditions: Conditions = UNKNOWN
    repeats: Repeats | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes texts and times doubtful; tokens per pass bound what speculation adds to decoding one model."""
        alone = {SPEC_DENSE: PLAIN_DENSE, SPEC_SPARSE: PLAIN_SPARSE}
        of_texts = metrics.draws_doubts((name, cell.draws_z) for name, cell in self.cells.items())
        return of_texts + conditions.doubts(self.conditions, {
            name: conditions.impossible(
                self.cells[name].speedup.ratio_of_totals / self.cells[plain].speedup.ratio_of_totals,
                self.cells[name].tokens_per_pass,
            )
            for name, plain in alone.items()
        })  # fmt: skip

    @property
    def product(self) -> float:
        """What both would give if neither knew of the other."""
        return self.cells[PLAIN_SPARSE].speedup.ratio_of_totals * self.cells[SPEC_DENSE].speedup.ratio_of_totals

    @property
    def over_better(self) -> float:
        """Both together over the better of the two alone."""
        both = self.cells[SPEC_SPARSE].speedup.ratio_of_totals
        return both / max(self.cells[c].speedup.ratio_of_totals for c in (PLAIN_SPARSE, SPEC_DENSE))

    @property
    def as_promised(self) -> bool:
        """Speculation wrote plain decoding's tokens on both models, and an exact sparse model the dense one's; where
        the union is capped nothing is promised."""
        same = (*((SPEC_DENSE, SPEC_SPARSE) if self.promised else ()), *((PLAIN_SPARSE,) if self.exact else ()))
        return not any(self.cells[c].differing for c in same)


def parts(found: Joined) -> Iterator[Table | Text]:
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


def _cells(found: Joined) -> Table:
    """acc.: mean acceptance length; read: share of the neurons that a pass reads."""
    note = metrics.lengths_note(per_pass="tok/pass", length="acc.")
    titles = ("", "tok/s", "speed-up", "95 % interval", "by bytes", "tok/pass", "acc.", "read", "differing")
    out = tables.new(*titles, close=True, note=note)
    for c in found.cells.values():
        n, faster = c.counters, c.speedup
        length = f"{1 + n.num_accepted_tokens / n.num_drafts:.2f}" if n.num_drafts else "-"
        out.add_row(
            c.name, f"{1 / c.seconds_per_token:.1f}", f"{faster.ratio_of_totals:.2f}",
            faster.interval.ends(), f"{c.by_bytes:.2f}",
            f"{c.tokens_per_pass:.2f}", length, f"{c.read:.1%}", str(c.differing),
        )  # fmt: skip
    return out


def _unions(found: Joined) -> Table:
    """Text: consecutive tokens, as if every draft were right; passes: those that the sparse cell made."""
    titles = ("sequences", "rows of a pass", "a row keeps", "union in text", "guess", "passes", "union", "guess")
    out = tables.new(*titles, left=(), close=True)
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


def unions(found: Joined, title: str) -> Figure:
    """Neurons read against the rows of a pass: a row a size of pass, of "text" or of "passes"."""
    both = ((TEXT, found.text), (PASSES, found.seen))
    rows = tuple({"of": kind, **asdict(p)} for kind, points in both for p in points)
    caption = "Share of the neurons that some row of a pass keeps; 1 - (1 - s)^n is what independent rows would need."
    return Figure("union", title, caption, rows, partial(_draw_unions, title=title), (6.0, 4.0))


def _draw_unions(canvas: Canvas, rows: Sequence[Row], *, title: str) -> None:
    axes = canvas.subplots()
    chain = [row for row in rows if row["of"] == TEXT and row["batch"] == 1]
    for batch in dict.fromkeys(row["batch"] for row in rows if row["of"] == TEXT):
        own = [row for row in rows if row["of"] == TEXT and row["batch"] == batch]
        label = "consecutive tokens of a text" + (f", {batch} sequences" if batch > 1 else "")
        axes.plot([row["rows"] for row in own], [row["union"] for row in own], marker="o", label=label)
    axes.plot([row["rows"] for row in chain], [row["guess"] for row in chain], "--", color=FAINT, label="1 - (1 - s)^n")
    seen = [row for row in rows if row["of"] == PASSES]
    axes.plot([row["rows"] for row in seen], [row["union"] for row in seen], "s", label="passes of this run")
    axes.set(title=title, xlabel="rows of a pass", ylabel="neurons read", ylim=(0, 1.02))
    axes.legend()


def speedups(found: Joined, title: str) -> Figure:
    """The speed-up of every cell, by bytes and measured."""
    rows = tuple(
        {"cell": c.name, "by_bytes": c.by_bytes, "measured": c.speedup.ratio_of_totals} for c in found.cells.values()
    )
    return Figure("cells", title, "Over plain dense decoding.", rows, partial(_draw_speedups, title=title), (6.0, 4.0))


def _draw_speedups(canvas: Canvas, rows: Sequence[Row], *, title: str) -> None:
    axes, place = canvas.subplots(), range(len(rows))
    axes.bar([p - 0.2 for p in place], [row["by_bytes"] for row in rows], 0.4, label="by bytes")
    axes.bar([p + 0.2 for p in place], [row["measured"] for row in rows], 0.4, label="measured")
    axes.axhline(1.0, color=FAINT, linewidth=0.8)
    axes.set_xticks(place, [row["cell"].replace(", ", "\n") for row in rows])
    axes.set(title=title, ylabel="speed-up over plain dense decoding")
    axes.legend()
