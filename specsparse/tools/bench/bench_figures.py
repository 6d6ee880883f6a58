"""Figures of `bench`: a sparse FFN's time against the share of active neurons, and speeds against the batch."""

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure as Canvas

from specsparse.report import plots
from specsparse.report.plots import COLOURS, FAINT, Figure, Row
from specsparse.support.files import Json

_RATE, _SPEEDUP = "tokens a second, all sequences", "speed-up over plain decoding"


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
    return Figure("active_share", title, caption, rows, _draw_shares, size=(4.6 * len(plan["types"]), 4.2))


def _draw_shares(canvas: Canvas, rows: Sequence[Row]) -> None:
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


def batches(report: Json) -> Figure:
    """Left all sides' tokens a second, right what speculation makes of ours.

    Args:
        report: of `tools.bench.speculation.BatchBench`.
    """
    rows = [row for measured in report["rows"] for row in _rows(measured)]
    caption = (
        f"{report['plan']['tg']} tokens of each sequence, greedy, prompts not counted. Left: medians, whiskers from "
        "the slowest to the fastest. Right: plain decoding's time over that of speculation, mean of repeats with its "
        "95 % interval over repeats; under the dashed line it does not pay."
    )
    return Figure("batches", "Sequences decoded at once", caption, tuple(rows), _draw_batches, size=(9.2, 4.2))


def _rows(measured: Json) -> Iterator[Row]:
    size, fast = measured["batch"], measured["speculative"]
    rates = {"plain": measured["plain_tokens_per_second"]}
    rates |= {name: found["tokens_per_second"] for name, found in {**fast, **measured["peers"]}.items()}
    for name, rate in rates.items():
        yield {"what": _RATE, "side": name, "batch": size, "value": rate["median"], "low": rate["min"],
               "high": rate["max"]}  # fmt: skip
    for name, found in fast.items():
        ends = {key: found["speedup"][key] for key in ("value", "low", "high")}
        yield {"what": _SPEEDUP, "side": name, "batch": size, **ends}


def _draw_batches(canvas: Canvas, rows: Sequence[Row]) -> None:
    for axes, what in zip(canvas.subplots(1, 2), (_RATE, _SPEEDUP), strict=True):
        axes.set_xscale("log", base=2)
        own = [row for row in rows if row["what"] == what]
        plots.lines(axes, own, x="batch", series="side", names=plots.distinct(rows, "side"))
        axes.set(xlabel="sequences", ylabel=what)
        axes.set_ylim(bottom=0)
    plots.par(axes)
    plots.legend_below(canvas.axes[0])
