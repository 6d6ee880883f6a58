"""What tells a file from the one that was there before: a short digest of its size and its time."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specsparse import models
from specsparse.speculative.drafters.head_file import SHIPPED, find


def stamp(paths: Iterable[Path]) -> str:
    """Eight hex digits of names, sizes in bytes and modification times in ns."""
    stats = [(path.name, path.stat()) for path in sorted(paths)]
    known = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(repr(known).encode()).hexdigest()[:8]


def shipped_heads() -> str:
    """Of the heads that come with the package, of which a target finds its own."""
    return stamp(SHIPPED.glob("*.gguf"))


def file_of(option: str, value: Any) -> Path | None:
    """The file that a drafter's option names; None where it names none.

    Raises:
        UserError: a draft model or a head that is not there.
    """
    if not isinstance(value, str | Path):
        return None
    if option == "model":
        return models.resolve(value)
    if option == "head":
        return find(value, None)
    return Path(value).expanduser() if os.path.isfile(os.path.expanduser(value)) else None
