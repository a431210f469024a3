"""Checks of the kinds of layers of a model. Imports no jax."""

from collections.abc import Iterator

from jaxlc.config.frozen import Config
from jaxlc.config.schema import LAYER_KINDS
from jaxlc.config.values import invalid_value


def layer_problems(config: Config) -> Iterator[str]:
    """Values of model.layer_kinds and of settings that depend on it which contradict each other."""
    model = config.model
    unknown = [kind for kind in model.layer_kinds if kind not in LAYER_KINDS]
    if unknown or not model.layer_kinds:
        expected = f"names of {', '.join(LAYER_KINDS)}, separated by commas"
        yield invalid_value("model.layer_kinds", unknown[0] if unknown else "", expected, LAYER_KINDS)
    has_sliding = "sliding" in model.layer_kinds
    if has_sliding and not model.window:
        yield "config.model.layer_kinds has sliding layers, which need a window: set config.model.window, in tokens"
    if model.window and not has_sliding:
        yield (
            f"config.model.window={model.window} has no effect, since config.model.layer_kinds names no sliding layers;"
            " use --config.model.layer_kinds=sliding, or sliding,full for alternating layers"
        )
    if len(model.layer_kinds) > model.num_layers:
        yield (
            f"config.model.layer_kinds names {len(model.layer_kinds)} layers and config.model.num_layers is"
            f" {model.num_layers}; use --config.model.num_layers={len(model.layer_kinds)} or more, or fewer kinds"
        )
    if len(set(model.layer_kinds)) > 1:
        kinds = ",".join(model.layer_kinds)
        yield f"unsupported: config.model.layer_kinds={kinds} with several kinds; use one kind for all layers"
