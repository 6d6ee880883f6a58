"""The one error that users see."""


class UserError(Exception):
    """A mistake in the input: the message is one line that names the thing and the next step.

    The command line prints it without a traceback and exits with code 2.
    """
