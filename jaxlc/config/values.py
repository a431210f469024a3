"""Values of settings: conversion to their declared types, and the errors for invalid ones. Imports no jax."""

import ast
import math
import numbers
import os
import re
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from jaxlc.core.errors import UserError
from jaxlc.core.suggestions import suggestion

_LENGTH_UNITS = {"": 1, "K": 2**10, "M": 2**20}
_BOOLEANS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


class SettingError(UserError, AttributeError):
    """An unknown setting, or an invalid value of a setting. It is also an AttributeError, so that `hasattr` works."""


def invalid_value(path: str, value: Any, expected: str, names: Iterable[str] = ()) -> str:
    """The error for a value: "invalid value VALUE for SETTING: expected ... (did you mean X?)".

    Args:
      names: the valid values, if they are strings; the nearest one is suggested.
    """
    question = suggestion(value, names) if isinstance(value, str) else ""
    return f"invalid value {value!r} for config.{path}: expected {expected}{question}"


def typed(path: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint`. Strings are accepted as on the command line: "1e3", "true", "a,b".

    Args:
      path: the setting, such as "train.steps", for the error.
    Raises:
      SettingError: the value cannot be converted, or is not one of the choices of a `Literal`.
    """
    choices: tuple[str, ...] = ()
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value in choices:
            return value
    elif typing.get_origin(hint) is tuple:
        item_hint, _ = typing.get_args(hint)
        items = [_CONVERSIONS[item_hint](item) for item in _as_sequence(value)]
        if None not in items:
            return tuple(items)
    else:
        converted = _CONVERSIONS[hint](value)
        if converted is not None:
            return converted
    raise SettingError(invalid_value(path, value, describe_type(hint), choices))


def _as_integer(value: Any) -> int | None:
    """A whole number, or a string such as "-1" or "1e3", as an int; None for other values."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        try:
            return int(value)  # exact, also above 2^53
        except ValueError:
            pass
    number = _as_float(value)
    return int(number) if number is not None and number.is_integer() else None


def _as_float(value: Any) -> float | None:
    """A finite number, or a string such as "3e-4", as a float; None for other values."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _as_boolean(value: Any) -> bool | None:
    """A bool, or one of the strings that absl accepts for it, as a bool; None for other values."""
    return _BOOLEANS.get(value.lower()) if isinstance(value, str) else value if isinstance(value, bool) else None


def _as_string(value: Any) -> str | None:
    """A string or a path as a string; None for other values."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    return path if isinstance(path, str) else None


def _as_sequence(value: Any) -> Sequence[Any]:
    """The items of a list, a tuple, one path, or a string such as "a,b", "(0, 2)" or ""; [None] for any other value."""
    if isinstance(value, str) and value[:1] in ("(", "["):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return [None]
    if isinstance(value, str):
        return value.split(",") if value else []
    if isinstance(value, os.PathLike):
        return [value]
    return value if isinstance(value, (list, tuple)) else [None]


_CONVERSIONS = {int: _as_integer, float: _as_float, bool: _as_boolean, str: _as_string}


def parse_integer(text: str) -> int:
    """An integer of a command line: "1000", "-1" or "1e3".

    Raises:
      ValueError: `text` is not an integer.
    """
    number = _as_integer(text)
    if number is None:
        raise ValueError(f"{text!r} is not an integer")
    return number


def parse_length(text: str, flag: str) -> int:
    """Tokens of "1M" or "32K", multiples of 2^20 and 2^10, or of "131072".

    Args:
      flag: whose value `text` is.
    Raises:
      UserError: neither.
    """
    match = re.fullmatch(r"([1-9][\d_]*)([KM]?)", text, re.IGNORECASE)
    if match is None:
        raise UserError(f"invalid --{flag}={text}: expected tokens, such as 131072, 32K or 1M (1M = 1,048,576)")
    return int(match[1]) * _LENGTH_UNITS[match[2].upper()]


def describe_type(hint: Any) -> str:
    """A declared type in words: "an integer"."""
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(hint)))}"
    if typing.get_origin(hint) is tuple:
        return {int: "a list of integers", float: "a list of numbers", str: "a list of strings"}[
            typing.get_args(hint)[0]
        ]
    return {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}[hint]
