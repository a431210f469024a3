"""Values of settings: conversion to their declared types, and the errors for invalid ones. The range of a number is
declared with its type: `steps: From1[int]`. Imports no jax.
"""

import ast
import dataclasses
import functools
import json
import math
import numbers
import os
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypeVar

from jaxlc.config import other_names
from jaxlc.core import SettingError, suggestion

Tokens = NewType("Tokens", int)  # "1M" or "32K", multiples of 2^20 and 2^10, or "131072"

Levels = NewType("Levels", int)  # a number of levels; true is one level, and false none

_LENGTH_UNITS = {"K": 2**10, "M": 2**20}
_BOOLEANS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def invalid_value(path: str, value: Any, expected: str, names: Iterable[str] = ()) -> str:
    """The error for a value: "invalid value VALUE for config.PATH: expected ... (did you mean X?)".

    Args:
      path: of a setting; or a flag, such as "--step", or an argument, such as "ACTION".
      names: the valid values, if they are strings; the nearest one is suggested.
    """
    question = ""
    names = tuple(names)
    if isinstance(value, str) and (meant := other_names.value_of(value, names)):
        question = f" (did you mean {meant}?)"
    elif isinstance(value, str) and not other_names.has_no_equivalent(value):
        question = suggestion(value, names, cutoff=0.7)
    problem = (
        f"invalid {path}={value}"
        if path.startswith("--") or path.isupper()
        else f"invalid value {value!r} for config.{path}"
    )
    return f"{problem}: expected {expected}{question}"


def typed(path: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint`. Strings are accepted as on the command line: "1e3", "true",
    "a,b".

    Args:
      path: the setting or flag for the error, as for `invalid_value`.
    Raises:
      SettingError: the value cannot be converted, or is not one of the choices of a `Literal`.
    """
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Literal:
        converted = value if value in arguments else None
    elif origin is tuple:
        items = [_KINDS[arguments[0]].convert(item) for item in _as_sequence(value)]
        converted = None if None in items else tuple(items)
    else:
        converted = _KINDS[hint].convert(value)
    if converted is None:
        choices = arguments if origin is Literal else ()
        raise SettingError(invalid_value(path, value, describe_type(hint), choices))
    return converted


def describe_type(hint: Any) -> str:
    """A declared type in words: "an integer"."""
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(hint)))}"
    if typing.get_origin(hint) is tuple:
        return f"a list of {_KINDS[typing.get_args(hint)[0]].plural}"
    return _KINDS[hint].words


def defaults_of(part: type) -> dict[str, Any]:
    """The default of each setting of a section, a source or a stage."""
    defaults = {field.name: field.default for field in dataclasses.fields(part)}
    return {
        name: plain(value) for name, value in defaults.items() if value is not dataclasses.MISSING
    }


def plain(value: Any) -> Any:
    """A section within a section as a dictionary; other values as they are."""
    return dict(vars(value)) if dataclasses.is_dataclass(value) else value


def with_floats(value: Any) -> Any:
    """A value of JSON, with the numbers that transformers 5 writes as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [with_floats(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {name: with_floats(item) for name, item in value.items()}


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their paths: {"mesh.context": 8} for {"mesh": {"context": 8}}."""
    paths: dict[str, Any] = {}
    for name, value in values.items():
        paths |= (
            flattened(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {prefix + name: value}
        )
    return paths


def as_argument(value: object) -> str:
    """A value as it is written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def as_python(value: Any) -> str:
    """A value, plain JSON types, as it is written in a config file; a list as a tuple, a dictionary
    in lines.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"({''.join(f'{as_python(item)}, ' for item in value).rstrip(' ' if len(value) == 1 else ', ')})"
    if isinstance(value, dict):
        return "".join(
            [
                "{\n",
                *(f"    {as_python(key)}: {as_python(item)},\n" for key, item in value.items()),
                "}",
            ]
        )
    return repr(value)


def _as_integer(value: Any) -> int | None:
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
    if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _as_boolean(value: Any) -> bool | None:
    if isinstance(value, str):
        return _BOOLEANS.get(value.lower())
    if isinstance(value, bool):
        return value
    return None


def _as_string(value: Any) -> str | None:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    return path if isinstance(path, str) else None


def _as_tokens(value: Any) -> int | None:
    match = re.fullmatch(r"([1-9][\d_]*)([KM])", str(value).strip(), re.IGNORECASE)
    number = int(match[1]) * _LENGTH_UNITS[match[2].upper()] if match else _as_integer(value)
    return number if number is not None and number > 0 else None


def _as_levels(value: Any) -> int | None:
    is_on = _as_boolean(value)
    return _as_integer(value) if is_on is None else int(is_on)


def _as_sequence(value: Any) -> Sequence[Any]:
    """The items of a list, a tuple, one path, or a string such as "a,b", "(0, 2)" or ""; [None] for
    any other value.
    """
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


class _Kind(NamedTuple):
    """A type of a setting or flag."""

    # a value, or a string as on the command line, as this type; None: it is not
    convert: Callable[[Any], Any]
    words: str
    plural: str = ""  # after "a list of"


_KINDS: dict[Any, _Kind] = {
    int: _Kind(_as_integer, "an integer", "integers"),
    float: _Kind(_as_float, "a finite number", "numbers"),
    bool: _Kind(_as_boolean, "true or false"),
    str: _Kind(_as_string, "a string", "strings"),
    Levels: _Kind(_as_levels, "a number of levels"),
    Tokens: _Kind(
        _as_tokens,
        "tokens, such as 131072, 32K or 1M (1M = 1,048,576)",
        "tokens, such as 4096,32K,1M",
    ),
}


class Range(NamedTuple):
    text: str
    holds: Callable[[float], bool]


Number = TypeVar("Number", int, float)
_FROM_0 = Range("at least 0", lambda x: x >= 0)  # the range of a number that declares none
From1 = Annotated[Number, Range("at least 1", lambda x: x >= 1)]
From1To10000 = Annotated[Number, Range("from 1 to 10000", lambda x: 1 <= x <= 10_000)]
From1To12 = Annotated[Number, Range("from 1 to 12", lambda x: 1 <= x <= 12)]
FromMinus1 = Annotated[Number, Range("at least 0, or -1", lambda x: x >= -1)]
Above0 = Annotated[Number, Range("greater than 0", lambda x: x > 0)]
Above1 = Annotated[Number, Range("greater than 1", lambda x: x > 1)]
Above0UpTo1 = Annotated[Number, Range("greater than 0 and at most 1", lambda x: 0 < x <= 1)]
From0Below1 = Annotated[Number, Range("at least 0 and less than 1", lambda x: 0 <= x < 1)]
Between0And1 = Annotated[Number, Range("greater than 0 and less than 1", lambda x: 0 < x < 1)]
From0UpTo1 = Annotated[Number, Range("between 0 and 1", lambda x: 0 <= x <= 1)]
Below2To32 = Annotated[Number, Range("from 0 to 2^32 - 1", lambda x: 0 <= x < 2**32)]
UpTo0 = Annotated[Number, Range("at most 0", lambda x: x <= 0)]
ZeroOrAbove1 = Annotated[Number, Range("0 or greater than 1", lambda x: x == 0 or x > 1)]
ZeroOrFrom2 = Annotated[Number, Range("0 or at least 2", lambda x: x == 0 or x > 1)]


@functools.cache
def ranges_of(section: type) -> dict[str, Range]:
    """The range of each number of a section, or of the flags of a verb, by its name."""
    hints = typing.get_type_hints(section, include_extras=True)
    parts = {name: (hint, *typing.get_args(hint)) for name, hint in hints.items()}
    declared = {
        name: x.__metadata__[0]
        for name, xs in parts.items()
        for x in xs
        if typing.get_origin(x) is Annotated
    }
    return {
        name: _FROM_0
        for name, hint in hints.items()
        if hint in (int, float, Levels, int | None, float | None)
    } | declared


def out_of_range(values: Any) -> Iterator[tuple[str, Any, str]]:
    """Yields (name, value, allowed range) of each number of a section, or of flags, that is out of
    range.
    """
    for name, allowed in ranges_of(type(values)).items():
        value = getattr(values, name)
        if value is not None and not allowed.holds(value):
            yield name, value, allowed.text


def range_problems(section: str, values: Any) -> Iterator[str]:
    """Yields the numbers of a section that are out of range, as messages.

    Args:
      values: the section, such as a `TrainConfig` for "train".
    """
    for name, *problem in out_of_range(values):
        yield invalid_value(f"{section}.{name}", *problem)
    for name, value in vars(values).items():
        if dataclasses.is_dataclass(value):
            yield from range_problems(f"{section}.{name}", value)
