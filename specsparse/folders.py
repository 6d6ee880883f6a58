"""Where the files lie that travel with the package."""

from pathlib import Path

from specsparse.errors import UserError


def conf_dir() -> Path:
    """The config folder: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    for place in (package / "conf", package.parent / "conf"):
        if (place / "config.yaml").is_file():
            return place
    raise UserError("the conf folder is missing from this installation: install specsparse again")
