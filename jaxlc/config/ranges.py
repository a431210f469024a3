"""The range of a number in settings and flags, declared with its type: `steps: From1[int]`. Imports
no jax.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, TypeVar

from jaxlc.config.values import Levels, invalid_value


class Range(NamedTuple):
    text: str
    holds: Callable[[float], bool]


Number = TypeVar("Number", int, float)
_FROM_0 = Range("at least 0", lambda x: x >= 0)  # the range of a number that declares none
From1 = Annotated[Number, Range("at least 1", lambda x: x >= 1)]
FromMinus1 = Annotated[Number, Range("at least 0, or -1", lambda x: x >= -1)]
Above0 = Annotated[Number, Range("greater than 0", lambda x: x > 0)]
Above1 = Annotated[Number, Range("greater than 1", lambda x: x > 1)]
Above0UpTo1 = Annotated[Number, Range("greater than 0 and at most 1", lambda x: 0 < x <= 1)]
From0Below1 = Annotated[Number, Range("at least 0 and less than 1", lambda x: 0 <= x < 1)]
Between0And1 = Annotated[Number, Range("greater than 0 and less than 1", lambda x: 0 < x < 1)]
From0UpTo1 = Annotated[Number, Range("between 0 and 1", lambda x: 0 <= x <= 1)]
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
    yield from (
        invalid_value(f"{section}.{name}", *problem) for name, *problem in out_of_range(values)
    )
    for name, value in vars(values).items():
        if dataclasses.is_dataclass(value):
            yield from range_problems(f"{section}.{name}", value)
