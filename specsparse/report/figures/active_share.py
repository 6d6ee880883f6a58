"""Time of a sparse FFN against the share of active neurons, from `bench ffn`."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from specsparse.report import plots
from specsparse.report.figure import COLOURS, FAINT, Figure, Row
from specsparse.support.files import Json


def active_share(report: Json) -> Figure:
    """A panel a type, a line for each number of tokens, over the dense FFN of as many; dashed: the neurons read."""
    plan = report["plan"]
    rows = tuple(
        {
            "type": r["type"], "tokens": r["n"], "active": r["active"], "read": r["neurons_read"] / plan["neurons"],
            "ms": r["ms"]["median"], "value": r["over_dense"]["median"],
            "low": r["over_dense"]["min"], "high": r["over_dense"]["max"],
        }
        for r in report["rows"] if r["what"] == "ffn"
    )  # fmt: skip
    caption = (
        "Time of the sparse FFN, predictor excluded, over that of the dense one with as many tokens (medians, whiskers "
        "from the fastest to the slowest); dashed: share of the neurons that some token of the pass keeps, which is "
        "what the time would be if bytes were all."
    )
    title = f"FFN of {plan['width']} x {plan['neurons']}: time against active share"
    return Figure("active_share", title, caption, rows, _panels, size=(4.6 * len(plan["types"]), 4.2))


def _panels(canvas: Canvas, rows: Sequence[Row]) -> None:
    kinds = plots.distinct(rows, "type")
    panels = canvas.subplots(1, len(kinds), squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        for i, n in enumerate(plots.distinct(rows, "tokens")):
            own = sorted((r for r in rows if r["type"] == kind and r["tokens"] == n), key=lambda r: r["active"])
            at, colour = [r["active"] for r in own], COLOURS[i % len(COLOURS)]
            spread = list(zip(*map(plots.whiskers, own)))
            axes.errorbar(at, [r["value"] for r in own], spread, color=colour, marker="o", markersize=4, capsize=2,
                          label=f"{n} token{'s' * (n > 1)}")  # fmt: skip
            axes.plot(at, [r["read"] for r in own], color=colour, linestyle="--", linewidth=1)
        axes.axhline(1, color=FAINT, linewidth=0.8)
        axes.set(title=kind, xlabel="active share of the neurons of a token", ylabel="time / dense")
        axes.set_ylim(0)
        plots.legend_below(axes)
