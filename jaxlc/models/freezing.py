"""The parameter tree in two parts, trainable and frozen. Both are nested dictionaries with the same names."""

from collections.abc import Iterator, Sequence, Set
from typing import Any

from jaxlc.core.axes import LAYER_STACKS, LAYERS


def split(tree: Any, frozen: Set[str]) -> tuple[Any, dict]:
    """(trainable part, frozen part) of a tree of parameters, or of a value per parameter.

    Args:
      frozen: names as `names_of` yields them. Empty: the first part is `tree` itself, of any type.
    """
    if not frozen:
        return tree, {}
    return _select(tree, frozen, False), _select(tree, frozen, True)


def join(a: dict, b: dict) -> dict:
    """The tree of which `a` and `b` are the parts."""
    both = {name: join(a[name], b[name]) for name in a.keys() & b.keys()}
    return {**a, **b, **both}


def names_of(tree: Any) -> list[str]:
    """The names of all parameters, such as layers/attention/wq, sorted. They select parameters: those of the last
    layers, which are a stack of their own, have the names of the other layers."""
    return sorted({_name(path) for path, _ in _leaves(tree)})


def paths_in_layer(tree: dict) -> frozenset[tuple[str, ...]]:
    """The paths within a layer, such as ("attention", "wq"), of the parameters of layers in `tree`."""
    return frozenset(path[1:] for path, _ in _leaves(tree) if path[0] in LAYER_STACKS)


def _select(tree: Any, frozen: Set[str], is_frozen: bool) -> dict:
    selected: dict = {}
    for path, leaf in _leaves(tree):
        if (_name(path) in frozen) == is_frozen:
            insert(selected, path, leaf)
    return selected


def insert(tree: dict, path: Sequence[str], leaf: Any) -> None:
    """Sets the leaf at `path` of nested dictionaries."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(tree, dict):
        yield path, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, (*path, key))


def _name(path: tuple[str, ...]) -> str:
    first = LAYERS if path[0] in LAYER_STACKS else path[0]
    return "/".join((first, *path[1:]))
