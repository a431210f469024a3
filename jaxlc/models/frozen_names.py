"""Which parameters are frozen: those that config.train.trainable and config.train.frozen select by name."""

import fnmatch
from collections.abc import Sequence
from typing import Any

from jaxlc.config import Config, to_dict
from jaxlc.config.trained_params import is_trained, projection_params
from jaxlc.config.values import invalid_value
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
        endings = tuple(f"/{path}" for path in projection_params(projection))
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
