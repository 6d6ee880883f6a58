"""`specsparse bench`: this engine beside the machine and beside other engines; a sub-command each.

    speed                 one_sequence.py     prompts, decoding and v(n), which vn_entries.py publishes
    draft, batch          speculation.py      texts with drafts, one by one and several sequences at once
    products, ffn, lut    kernel_benches.py   random weights; lut_product.py has the kernels of the last
    device                card/               an accelerator, in stages that fail alone

What a sub-command measures is a frozen dataclass, whose fields are its options; `command.py` makes it of the arguments.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from specsparse.support.files import Json


class Benchmark(Protocol):
    """One of them."""

    def check(self) -> None:
        """UserError if it cannot be run; before the machine is waited for and anything is loaded."""

    def run(self, out: "Console") -> "Json":
        """Measures, showing progress on `out`, and returns the report."""

    def shown(self, report: "Json") -> "Iterator[Table | Text | str]":
        """The report as tables and lines."""
