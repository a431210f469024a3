"""Errors that users can fix: their classes, missing optional packages, and arguments of public
functions. Imports no jax.
"""

import builtins
import functools
import importlib.util
import inspect
import numbers
import os
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from jaxlc.core.text import suggestion


class UserError(ValueError):
    """Invalid user input: a config, a path or an environment.

    The message names the invalid value and how to fix it. Commands print it in one line, without a
    traceback, and exit with `exit_status`. In Python it is an ordinary ValueError.
    """

    exit_status = 2


class SettingError(UserError, AttributeError):
    """An unknown setting, or an invalid value of a setting. It is also an AttributeError, so that
    `hasattr` works.
    """


class WriteError(UserError):
    """A file can no longer be written. The input is valid, so commands exit with 1, as after a
    fault.
    """

    exit_status = 1


class DiskFullError(WriteError):
    """A disk is full, or a quota exceeded."""


def reason_of(error: BaseException) -> str:
    """The message of an exception in one line, without the error number and path of an OSError; its
    name if it has none.
    """
    message = str(getattr(error, "strerror", None) or error)
    return " ".join(message.split()) or type(error).__name__


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
    """A model, a combination of settings or a device is unsupported. The message names the limit
    and the value.
    """


# Package -> the extra in pyproject.toml that installs it.
EXTRAS = {
    "datasets": "hub-data",
    "dew_flash_attn": "fa3-cuda12",
    "fsspec": "stream",
    "huggingface_hub": "hf",
    "jinja2": "hf",
    "lm_eval": "lm-eval",
    "matplotlib": "plot",
    "pyarrow": "data",
    "tensorboardX": "tensorboard",
    "tokamax": "mosaic",
    "tokenizers": "hf",
    "wandb": "wandb",
    "wonderwords": "evals",
}


def is_installed(package: str) -> bool:
    """Whether `package` can be imported. Does not import it."""
    return importlib.util.find_spec(package) is not None


def install_hint(package: str) -> str:
    """The command that installs an optional package."""
    return f"pip install -e '.[{EXTRAS[package]}]' in a checkout of jaxlc"


def require(package: str, feature: str) -> None:
    """Checks that an optional package is installed.

    Args:
      feature: what needs it, as the subject of the error: "data.tokenizer".
    Raises:
      UserError: it is not.
    """
    if not is_installed(package):
        raise UserError(
            f"{feature} needs the package {package}, which is not installed: {install_hint(package)}"
        )


Arguments = ParamSpec("Arguments")
ReturnT = TypeVar("ReturnT")
# What is accepted for some annotations. An array is no Sequence, but can be one of numbers.
_ACCEPTED: dict[Any, Any] = {
    int: numbers.Integral,
    float: numbers.Real,
    Path: os.PathLike,
    Sequence: Iterable,
}


class ArgumentError(UserError, TypeError):
    """An argument of a function has another type than its annotation, is unknown, or is missing."""


def checked(function: Callable[Arguments, ReturnT]) -> Callable[Arguments, ReturnT]:
    """Decorates a function: before it runs, its arguments are checked. An ArgumentError has name,
    value and type.
    """
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> ReturnT:
        try:
            arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        except TypeError as error:
            unknown = next((name for name in kwargs if name not in parameters), "")
            raise ArgumentError(
                f"{function.__name__}() {error}{suggestion(unknown, parameters)}"
            ) from None
        hints = typing.get_type_hints(function, localns=_Names(function.__globals__))
        for name, value in arguments.items():
            if not _fits(value, hints.get(name, Any)):
                expected = re.sub(
                    r"\w+\.|'", "", inspect.formatannotation(parameters[name].annotation)
                )
                given = f"{name}={' '.join(reprlib.repr(value).split())}"
                raise ArgumentError(
                    f"invalid argument {given} of {function.__name__}(): expected {expected}"
                )
        return function(*args, **kwargs)

    return call


class _Foreign(type):
    """The type of a name that is imported for type checkers only. Numbers, texts and containers are
    no instances.
    """

    def __getattr__(cls, name: str) -> "_Foreign":
        if name.startswith("_"):
            raise AttributeError(name)
        return cls

    def __instancecheck__(cls, value: Any) -> bool:
        return type(value) not in (int, float, str, bytes, list, tuple, dict)


class _Names(dict[str, Any]):
    """The names of a module, for annotations."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, None) or _Foreign(name, (), {})


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    if hint is Any or getattr(hint, "_is_protocol", False):
        return True
    if isinstance(value, bool):
        return origin is bool
    if origin is Sequence and isinstance(value, (str, Mapping)):
        return False
    if origin is Sequence and isinstance(value, (list, tuple, bytes)):
        return all(_fits(item, arguments[0]) for item in value)
    return isinstance(value, _ACCEPTED.get(origin, origin))
