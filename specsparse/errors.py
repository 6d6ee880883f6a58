"""The error that users see, and the kind of it that a server answers in its own way."""

import sys


class UserError(Exception):
    """A mistake in the input: the message is one line that names the thing and the next step.

    A caller's mistake raises it or a subclass; `specsparse.UserError` is its public name. The command line prints it
    without a traceback and exits with code 2.
    """


class ContextTooLong(UserError):
    """A prompt, or what is to be written after it, does not fit the model's context."""


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
