"""The reader of our output may leave before its end: `specsparse status | head -1`."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def until_the_reader_leaves() -> Iterator[None]:
    """Ends the block in silence where nobody reads the standard output any more; what is left to write goes nowhere.

    An exit out of the block keeps its code.
    """
    try:
        with contextlib.suppress(BrokenPipeError):
            yield
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
