"""Folders: the user's, and those that travel with the package."""

import os
from pathlib import Path

from specsparse.errors import UserError


def cache_dir() -> Path:
    """Where specsparse keeps what can be made again: `SPECSPARSE_CACHE`, or a folder of the user's cache."""
    given = os.environ.get("SPECSPARSE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(given or f"{base}/specsparse").expanduser()


def package_dir() -> Path:
    """Where the package that runs lies."""
    return Path(__file__).resolve().parents[1]


def package_line() -> str:
    """The same in words: an environment runs the checkout that it was installed from, wherever one stands."""
    package, here = package_dir(), Path("specsparse").absolute()
    other = (here / "__init__.py").is_file() and not here.samefile(package)
    return f"{package}{f', not {here}' if other else ''}"


def conf_dir() -> Path:
    """The config folder: inside an installed package, or beside the package in a checkout."""
    package = package_dir()
    for place in (package / "conf", package.parent / "conf"):
        if (place / "config.yaml").is_file():
            return place
    raise UserError("the conf folder is missing from this installation: install specsparse again")
