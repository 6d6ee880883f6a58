"""The error that users see: one line, and exit code 2."""

import os
import sys
from collections.abc import Mapping


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
    """The line for a Python that lacks a package we need.

    Raises:
        ModuleNotFoundError: the module that is missing is one of ours: a defect, not a mistake of the user's.
    """
    package = (error.name or "specsparse").partition(".")[0]
    if package == "specsparse":
        raise error
    return (
        f"{package} is not installed for {sys.executable}: call .venv/bin/python, which `make demo` makes, "
        f"or {sys.executable} -m pip install -e . in the project's folder"
    )
