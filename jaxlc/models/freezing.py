"""The parameter tree in two parts, trainable and frozen. Both are nested dictionaries with the same names.

config.train.trainable and config.train.frozen select parameters by name.
"""

import fnmatch
from collections.abc import Iterator, Sequence, Set
from typing import Any

from jaxlc.config import Config, to_dict
from jaxlc.config.kinds import projection_paths
from jaxlc.config.trained_params import is_trained
from jaxlc.config.values import invalid_value
from jaxlc.core.axes import LAYER_STACKS, LAYERS
from jaxlc.core.errors import UserError
from jaxlc.models.lora import is_adapter


def frozen_names(config: Config, names: Sequence[str]) -> frozenset[str]:
    """The names of the frozen parameters.

    Args:
      names: those of all parameters, as `models.freezing.names_of` returns them.
    Raises:
      UserError: a pattern matches no parameter, nothing is trained, or a projection with an adapter is trained itself.
    """
    lora, train = config.lora, config.train
    own_names = [name for name in names if not is_adapter(name)]
    for setting, patterns in (("trainable", train.trainable), ("frozen", train.frozen)):
        for pattern in patterns:
            if not fnmatch.filter(own_names, pattern):
                expected = f"patterns of the names of parameters, which are {', '.join(own_names)}"
                raise UserError(invalid_value(f"train.{setting}", pattern, expected, own_names))
    trainable = {name for name in own_names if is_trained(name, lora, train)}
    if not (trainable or lora.rank):
        raise UserError("config.train.frozen selects all parameters: at least one must be trained")
    for projection in lora.projections if lora.rank else ():
        endings = tuple(f"/{path}" for path in projection_paths()[projection])
        name = next((name for name in sorted(trainable) if name.endswith(endings)), None)
        if name is not None:
            raise UserError(
                f"config.train.trainable selects {name}, which has an adapter: remove {projection!r} from"
                " config.lora.projections, or add the parameter to config.train.frozen"
            )
    return frozenset(own_names) - trainable


def trained_settings(config: Config) -> dict[str, Any]:
    """The settings, by their paths, that must be equal when a run resumes: those of adapters and frozen parameters."""
    values = to_dict(config)
    paths = [f"lora.{name}" for name in values["lora"]] + ["train.trainable", "train.frozen", "precision.frozen"]
    return {path: values[path.partition(".")[0]][path.partition(".")[2]] for path in paths}


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
