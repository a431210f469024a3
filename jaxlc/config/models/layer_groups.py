"""The repeating group of a list of layer kinds. Imports no jax."""

from collections.abc import Sequence

from jaxlc.core.errors import Unsupported

# All layers of a group are in one compiled loop body, so a longer group must repeat.
_MAX_LAYERS_WITHOUT_REPETITION = 8


def repeating_group(kinds: Sequence[str], where: str) -> tuple[str, ...]:
    """The shortest group of kinds that repeats to give `kinds`; the last repetition may be incomplete.

    Args:
      kinds: of all layers.
      where: what has these layers, for the error.
    Raises:
      Unsupported: they are not a repeating group; the message names the layer that differs.
    """
    longest = max(len(kinds) // 2, min(len(kinds), _MAX_LAYERS_WITHOUT_REPETITION))
    first_different = {length: _first_different(kinds, length) for length in range(1, longest + 1)}
    for length, layer in first_different.items():
        if layer is None:
            return tuple(kinds[:length])
    length, layer = max(first_different.items(), key=lambda item: item[1] or 0)
    raise Unsupported(
        f"unsupported: the layers of {where} are not a repeating group: layer {layer} (from 0) is {kinds[layer or 0]},"
        f" and after a group of {length} layers it would be {kinds[(layer or 0) % length]}"
    )


def _first_different(kinds: Sequence[str], length: int) -> int | None:
    """The first layer that differs from a repetition of the first `length` layers."""
    return next((i for i, kind in enumerate(kinds) if kind != kinds[i % length]), None)
