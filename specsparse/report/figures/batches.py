"""Tokens a second and the speed-up of speculation against the number of sequences, from `bench batch`."""

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure as Canvas

from specsparse.report import plots
from specsparse.report.figure import Figure, Row
from specsparse.support.files import Json

_RATE, _SPEEDUP = "tokens a second, all sequences", "speed-up over plain decoding"


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
    return Figure("batches", "Sequences decoded at once", caption, tuple(rows), _panels, size=(9.2, 4.2))


def _rows(measured: Json) -> Iterator[Row]:
    size, fast = measured["batch"], measured["speculative"]
    rates = {"plain": measured["plain_tokens_per_second"]}
    rates |= {name: found["tokens_per_second"] for name, found in fast.items()}
    rates |= {name: found["tokens_per_second"] for name, found in measured["peers"].items()}
    for name, rate in rates.items():
        yield {"what": _RATE, "side": name, "batch": size, "value": rate["median"], "low": rate["min"],
               "high": rate["max"]}  # fmt: skip
    for name, found in fast.items():
        yield {
            "what": _SPEEDUP,
            "side": name,
            "batch": size,
            **{k: found["speedup"][k] for k in ("value", "low", "high")},
        }


def _panels(canvas: Canvas, rows: Sequence[Row]) -> None:
    for axes, what in zip(canvas.subplots(1, 2), (_RATE, _SPEEDUP), strict=True):
        axes.set_xscale("log", base=2)
        own = [row for row in rows if row["what"] == what]
        plots.lines(axes, own, x="batch", series="side", names=plots.distinct(rows, "side"))
        axes.set(xlabel="sequences", ylabel=what)
        axes.set_ylim(bottom=0)
    plots.par(axes)
    plots.legend_below(canvas.axes[0])
