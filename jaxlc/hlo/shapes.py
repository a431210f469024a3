"""Shapes as a compiled program writes them: `bf16[1,32768,32,128]{3,2,1,0:S(5)}`, and tuples of these."""

import math
import re
from typing import NamedTuple

HOST_MEMORY = 5  # XLA's number of pinned host memory; 0 is the device's own

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\](?:\{([^{}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")


class Array(NamedTuple):
    """One array; the elements of a tuple, nested or not, are so many arrays."""

    dtype: str  # XLA's name: "bf16", "f32", "pred"
    dims: tuple[int, ...]
    memory_space: int

    @property
    def bytes(self) -> int:
        return math.ceil(math.prod(self.dims) * _bits(self.dtype) / 8)


def parse_shape(text: str) -> tuple[Array, ...]:
    """All arrays in `text`, in their order."""
    return tuple(_array(*match.groups()) for match in _ARRAY.finditer(text))


def _array(dtype: str, dims: str, layout: str | None) -> Array:
    sizes = tuple(int(size.strip(" <=")) for size in dims.split(",") if size)  # <= before an upper bound
    space = _SPACE.search(layout or "")
    return Array(dtype, sizes, int(space[1]) if space else 0)


def _bits(dtype: str) -> int:
    """pred is stored as a byte; a token is nothing; all other names hold their width: s32, bf16, f8e4m3fn, c64."""
    if dtype in ("token", "opaque"):
        return 0
    return 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
