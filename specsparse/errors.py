"""The error that users see: one line, and exit code 2."""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
CHECKOUT = _ROOT if (_ROOT / "pyproject.toml").is_file() else None
"""The folder of the checkout that this package runs from, or None if it was installed from a wheel."""
_DISTRIBUTIONS = {"hydra": "hydra-core", "omegaconf": "hydra-core", "yaml": "pyyaml"}
"""Distributions of modules that have another name."""


class UserError(Exception):
    """A mistake in the input: the message is one line that names the thing and the next step.

    A caller's mistake raises it or a subclass; `specsparse.UserError` is its public name. The command line prints it
    without a traceback and exits with code 2.
    """


class ContextTooLong(UserError):
    """A prompt, or the text after it, does not fit the model's context; a server has a code for it."""


class GenerationFailed(UserError):
    """A text that ended with an error; `text` is the text before it."""

    def __init__(self, message: str, text: str = ""):
        super().__init__(message)
        self.text = text


def refuse(wrong: Mapping[str, object], where: object = "") -> None:
    """Raises a UserError of the first message whose condition holds; `where` stands before it."""
    for message, holds in wrong.items():
        if holds:
            raise UserError(f"{where}: {message}" if where else message)


def fail(message: str) -> int:
    """Prints the one line of a mistake; returns its exit code."""
    print(f"specsparse: {' '.join(message.split())}", file=sys.stderr)
    return 2


def own_line(error: BaseException) -> str:
    """ "FILE:LINE" of the deepest frame that is not this package's, and no library's if there is any other; "" if there
    is no such frame, as in a function written in C."""
    import sysconfig  # here, since errors are imported first and raised last
    import traceback

    ours = os.path.join(os.path.dirname(__file__), "")
    libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((ours, "<frozen"))]
    own = [f for f in frames if not f.filename.startswith(libraries)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def not_installed(error: ModuleNotFoundError) -> str:
    """The line for a Python that lacks a package we need. ModuleNotFoundError: the module that is missing is one of
    ours: a defect, not a mistake of the user's."""
    package = (error.name or "specsparse").partition(".")[0]
    if package == "specsparse":
        raise error
    how = pip_install(_DISTRIBUTIONS.get(package, package))
    if CHECKOUT:
        how = f"call .venv/bin/python, which `make demo` makes, or {pip_install('-e', str(CHECKOUT))}"
    return f"{package} is not installed for {sys.executable}: {how}"


def pip_install(*what: str, python: str = "") -> str:
    """The command that installs distributions for a Python (ours by default), in the versions that pyproject.toml asks
    for.

    No extra of ours is named: specsparse is on no index, and a checkout that is installed anew compiles its kernels.
    """
    import importlib.metadata  # here, since these are slow to import
    import tomllib

    if CHECKOUT:
        project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
        lines = sum(project["optional-dependencies"].values(), project["dependencies"])
    else:
        lines = importlib.metadata.requires("specsparse") or []
    found = (re.match(r"([\w.-]+)([^;]*)", line) for line in lines)
    versions = {match[1]: match[2].strip() for match in found if match}
    words = (shlex.quote(word + versions.get(word.partition("[")[0], "")) for word in what)
    return f"{shlex.quote(python or sys.executable)} -m pip install {' '.join(words)}"
