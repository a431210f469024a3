"""The first layers and the repeating group of a list of layer kinds. Imports no jax."""

from collections.abc import Sequence

from jaxlc.core.errors import Unsupported

# The first layers are compiled one by one, as are those of a group: together they may be more than this only if most
# layers repeat.
_MAX_LAYERS_WITHOUT_REPETITION = 8


def first_and_group(kinds: Sequence[str], where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The kinds of the first layers and the group of kinds that repeats after them to give `kinds`, with the fewest
    layers in both and then the fewest first layers; the last repetition may be incomplete.

    Args:
      kinds: of all layers.
      where: what has these layers, for the error.
    Raises:
      Unsupported: they are not a repeating group; the message names the layer that differs.
    """
    longest = max(len(kinds) // 2, min(len(kinds), _MAX_LAYERS_WITHOUT_REPETITION))
    for num_layers in range(1, longest + 1):
        for num_first in range(num_layers):
            first, group = kinds[:num_first], kinds[num_first:num_layers]
            if _first_different(kinds[num_first:], len(group)) is None:
                return tuple(first), tuple(group)
    first_different = {length: _first_different(kinds, length) for length in range(1, longest + 1)}
    length, layer = max(first_different.items(), key=lambda item: item[1] or 0)
    raise Unsupported(
        f"unsupported: the layers of {where} are not a repeating group: layer {layer} (from 0) is {kinds[layer or 0]},"
        f" and after a group of {length} layers it would be {kinds[(layer or 0) % length]}"
    )


def _first_different(kinds: Sequence[str], length: int) -> int | None:
    """The first layer that differs from a repetition of the first `length` layers."""
    return next((i for i, kind in enumerate(kinds) if kind != kinds[i % length]), None)
