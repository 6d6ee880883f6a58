"""The report of `tools.bench.ffn` for the terminal."""

from rich.table import Table

from specsparse.support import tables
from specsparse.support.files import Json
from specsparse.tools.bench.ffn import VARIANTS

_COLUMNS = ("type", "tokens", "active", "rows read", "ms", "GB/s", "of bandwidth", "x dense", "+mlp", "+signbit")


def table(report: Json) -> Table:
    """One row for each type, number of tokens and active share; medians.

    "of bandwidth" is the share of the measured read bandwidth that the sparse FFN alone reaches; the last three columns
    are times over the dense FFN of as many tokens: without a predictor, with the MLP, with sign bits.
    """
    made = tables.new(*_COLUMNS, close=True)
    rows = {(r["type"], r["n"], r["active"], r["what"]): r for r in report["rows"]}
    plan = report["plan"]
    for kind in plan["types"]:
        for n in plan["ns"]:
            dense = rows[kind, n, 1.0, "dense"]
            made.add_row(kind, str(n), "dense", *_cells(dense), "1.00", "", "")
            for share in plan["active"]:
                alone, *_ = found = [rows[kind, n, share, what] for what in VARIANTS]
                ratios = (f"{r['over_dense']['median']:.2f}" for r in found)
                made.add_row(kind, str(n), f"{share:.0%}", *_cells(alone), *ratios)
    return made


def _cells(row: Json) -> tuple[str, ...]:
    return (
        f"{row['neurons_read']:.0f}",
        f"{row['ms']['median']:.3f}",
        f"{row['bytes_per_second'] / 1e9:.1f}",
        f"{1 / row['over_bandwidth']:.0%}",
    )


def summary_line(report: Json) -> str:
    """What the table was measured on."""
    plan, found, read = report["plan"], report["manifest"], report["read_bytes_per_second"]
    kernels, cpu = found["kernels"], found["cpu"]
    return (
        f"{plan['width']}x{plan['neurons']}, predictor rank {plan['rank']}; "
        f"{report['backend']} {kernels['isa']} kernels, "
        f"{kernels['threads']} threads, {cpu['model']}; reads {read['median'] / 1e9:.1f} GB/s "
        f"({read['min'] / 1e9:.1f} to {read['max'] / 1e9:.1f})"
    )
