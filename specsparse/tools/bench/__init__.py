"""`specsparse bench`: this engine beside the machine and beside other engines; a sub-command each.

speed      one_sequence.py      prompts, decoding and v(n), which vn_entries.py publishes
batch      batch.py             several sequences at once
draft      speculation.py       texts with drafts
products   kernel_benches.py    products, a sparse FFN and look-up tables, on random weights
ffn
lut        (its kernels: lut_product.py)
device     card/                an accelerator, in stages that fail alone
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from specsparse.support.files import Json


class Benchmark(Protocol):
    """What a sub-command measures, with its options: a frozen dataclass."""

    def check(self) -> None:
        """UserError if it cannot be run; before the machine is waited for and anything is loaded."""

    def run(self, out: "Console") -> "Json":
        """Measures, showing progress on `out`, and returns the report."""

    def shown(self, report: "Json") -> "Iterator[Table | Text | str]":
        """The report as tables and lines."""
