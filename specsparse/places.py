"""Folders of the user's."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where specsparse keeps what can be made again: `SPECSPARSE_CACHE`, or a folder of the user's cache."""
    given = os.environ.get("SPECSPARSE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(given or f"{base}/specsparse").expanduser()
