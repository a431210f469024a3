"""Values of settings: conversion to their declared types, and the errors for invalid ones. Imports no jax."""

import ast
import math
import numbers
import os
import re
import typing
from collections.abc import Iterable, Sequence
from types import UnionType
from typing import Any, Literal, NewType

from jaxlc.core.errors import UserError
from jaxlc.core.suggestions import suggestion

# Types of flags, in addition to those of settings.
Count = NewType("Count", int)  # at least 1
Positive = NewType("Positive", float)
Tokens = NewType("Tokens", int)  # "1M" or "32K", multiples of 2^20 and 2^10, or "131072"

_LENGTH_UNITS = {"": 1, "K": 2**10, "M": 2**20}
_BOOLEANS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


class SettingError(UserError, AttributeError):
    """An unknown setting, or an invalid value of a setting. It is also an AttributeError, so that `hasattr` works."""


def invalid_value(path: str, value: Any, expected: str, names: Iterable[str] = ()) -> str:
    """The error for a value: "invalid value VALUE for config.PATH: expected ... (did you mean X?)".

    Args:
      path: of a setting; or a flag, such as "--step".
      names: the valid values, if they are strings; the nearest one is suggested.
    """
    question = suggestion(value, names) if isinstance(value, str) else ""
    problem = f"invalid {path}={value}" if path.startswith("--") else f"invalid value {value!r} for config.{path}"
    return f"{problem}: expected {expected}{question}"


def typed(path: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint`. Strings are accepted as on the command line: "1e3", "true", "a,b".

    Args:
      path: the setting or flag for the error, as for `invalid_value`.
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


def without_none(hint: Any) -> Any:
    """int for int | None."""
    is_optional = isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union
    return next(kind for kind in typing.get_args(hint) if kind is not type(None)) if is_optional else hint


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
    """A bool, or one of the strings true, t, 1, false, f, 0, as a bool; None for other values."""
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


def _as_count(value: Any) -> int | None:
    """An integer of at least 1; None for other values."""
    number = _as_integer(value)
    return number if number is not None and number >= 1 else None


def _as_positive(value: Any) -> float | None:
    """A positive number; None for other values."""
    number = _as_float(value)
    return number if number is not None and number > 0 else None


def _as_tokens(value: Any) -> int | None:
    """Tokens of "1M", "32K" or "131072"; None for other values."""
    match = re.fullmatch(r"([1-9][\d_]*)([KM]?)", str(value).strip(), re.IGNORECASE)
    return int(match[1]) * _LENGTH_UNITS[match[2].upper()] if match else None


_CONVERSIONS = {
    int: _as_integer,
    float: _as_float,
    bool: _as_boolean,
    str: _as_string,
    Count: _as_count,
    Positive: _as_positive,
    Tokens: _as_tokens,
}


def parse_length(text: str, flag: str) -> int:
    """Tokens of "1M" or "32K", multiples of 2^20 and 2^10, or of "131072".

    Args:
      flag: whose value `text` is.
    Raises:
      UserError: neither.
    """
    return typed(f"--{flag}", text, Tokens)


def describe_type(hint: Any) -> str:
    """A declared type in words: "an integer"."""
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(hint)))}"
    if typing.get_origin(hint) is tuple:
        words = {int: "integers", float: "numbers", str: "strings", Tokens: "tokens, such as 4096,32K,1M"}
        return f"a list of {words[typing.get_args(hint)[0]]}"
    return {
        int: "an integer",
        float: "a finite number",
        bool: "true or false",
        str: "a string",
        Count: "a whole number, at least 1",
        Positive: "a positive number",
        Tokens: "tokens, such as 131072, 32K or 1M (1M = 1,048,576)",
    }[hint]
