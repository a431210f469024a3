"""Errors that users can fix."""

from collections.abc import Iterable, Iterator


class UserError(ValueError):
    """Invalid user input: a config, a path or an environment.

    The message names the invalid value and how to fix it. Commands print it in one line, without a traceback, and
    exit with `exit_status`. In Python it is an ordinary ValueError.
    """

    exit_status = 2


class WriteError(UserError):
    """A file can no longer be written. The input is valid, so commands exit with 1, as after a fault."""

    exit_status = 1


class DiskFullError(WriteError):
    """A disk is full, or a quota exceeded."""


def reason_of(error: BaseException) -> str:
    """The message of an exception in one line, without the error number and path of an OSError."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())


def raise_all(problems: Iterable[str]) -> None:
    """Raises all `problems` as one UserError, in one line; returns if there are none."""
    if texts := list(dict.fromkeys(problems)):
        raise UserError("; also: ".join(texts))


def raise_first(problems: Iterator[str]) -> None:
    """Raises the first of `problems` as a UserError; returns if there are none."""
    problem = next(problems, None)
    if problem is not None:
        raise UserError(problem)


class Unsupported(UserError, NotImplementedError):
    """A model, a combination of settings or a device is unsupported. The message names the limit and the value."""
