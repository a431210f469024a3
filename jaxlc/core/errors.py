"""Errors that users can fix."""


class UserError(ValueError):
    """Invalid user input: a config, a path or an environment.

    The message names the invalid value and how to fix it. Commands print it in one line, without a traceback, and
    exit with status 2. In Python it is an ordinary ValueError.
    """


def reason_of(error: BaseException) -> str:
    """The message of an exception in one line, without the error number and path of an OSError."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())


class Unsupported(UserError, NotImplementedError):
    """A selected strategy or kernel does not support the case. The message names the limit and the value."""
