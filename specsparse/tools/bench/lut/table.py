"""The report of `tools.bench.lut` for the terminal."""

from rich.table import Table

from specsparse.support import tables
from specsparse.support.files import Json

_COLUMNS = ("type", "matrix", "tokens", "weights", "kernel", "ms", "GB/s", "x product", "±", "error")


def table(report: Json) -> Table:
    """One row for each case; medians.

    "x product" is time over that of the product kernel, so above 1 is slower; "error" is relative to the product of the
    same weights with activations that nobody rounded.
    """
    made = tables.new(*_COLUMNS, left=(0, 1, 3, 4), close=True)
    for row in report["rows"]:
        ratio = row["over_product"]
        made.add_row(
            row["type"],
            f"{row['rows']}x{row['cols']}",
            str(row["n"]),
            row["state"],
            row["kernel"] if row["kernel"] == "product" else f"tables, {row['kernel']}",
            f"{row['ms']['median']:.3f}",
            f"{row['bytes_per_second'] / 1e9:.1f}",
            f"{ratio['median']:.2f}",
            f"{ratio['sd']:.2f}",
            f"{row['relative_error']:.2%}",
        )
    return made


def summary_line(report: Json) -> str:
    """What the table was measured on."""
    found, read = report["manifest"], report["read_bytes_per_second"]
    kernels, cpu = found["kernels"], found["cpu"]
    return (
        f"{kernels['isa']} kernels, {kernels['threads']} threads, {cpu['model']}; "
        f"reads {read['median'] / 1e9:.1f} GB/s ({read['min'] / 1e9:.1f} to {read['max'] / 1e9:.1f})"
    )
