"""Predicted speed-up against the length of the drafts, from `advise`."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from specsparse.report import plots
from specsparse.report.plots import COLOURS, FAINT, MOST, Figure, Row
from specsparse.support.files import Json


def advised(report: Json) -> Figure:
    """A panel for each batch size and context, a line a method and acceptance; the shade is the interval.

    Args:
        report: `tools.advise.advise.Advice.to_dict`.
    """
    rows = []
    for case in report["cases"]:
        chosen = sorted(case["methods"], key=lambda m: -max(p["speedup"] for p in m["lengths"]))[:MOST]
        for method in chosen:
            label = f"{method['method']}, acceptance {method['alpha']:.2f}"
            where = f"batch {case['batch']}, {case['context']} tokens"
            rows += [
                {"where": where, "method": label, "gamma": p["gamma"], "value": p["speedup"],
                 "low": p["low"], "high": p["high"], "tokens_a_round": p["tokens"]}
                for p in method["lengths"]
            ]  # fmt: skip
    caption = (
        "Predicted speed-up over plain decoding by the length of the drafts: expected tokens of a round over its time "
        f"in plain steps. Shaded: over texts and over what the times may be. The {MOST} methods that pay most."
    )
    width = 4.6 * max(1, len(report["cases"]))
    title = f"{report['target']['name']} on {report['device']['title']}: what drafting would bring"
    return Figure("advised", title, caption, tuple(rows), _panels, size=(width, 4.4))


def _panels(canvas: Canvas, rows: Sequence[Row]) -> None:
    places = plots.distinct(rows, "where")
    panels = canvas.subplots(1, len(places), squeeze=False, sharey=True)[0]
    for axes, where in zip(panels, places, strict=True):
        here = [r for r in rows if r["where"] == where]
        for i, method in enumerate(plots.distinct(here, "method")):
            own = sorted((r for r in here if r["method"] == method), key=lambda r: r["gamma"])
            at, colour = [r["gamma"] for r in own], COLOURS[i % len(COLOURS)]
            axes.plot(at, [r["value"] for r in own], color=colour, marker="o", markersize=3, label=method)
            axes.fill_between(at, [r["low"] for r in own], [r["high"] for r in own], color=colour, alpha=0.1, lw=0)
        axes.axhline(1, color=FAINT, linewidth=0.8)
        axes.set(title=where, xlabel="tokens drafted in a round", ylabel="speed-up")
        axes.set_ylim(0, 1.15 * max(r["value"] for r in here) + 0.2)
        plots.legend_below(axes)
