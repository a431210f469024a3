"""Checks of config.precision against other settings. Imports no jax."""

from collections.abc import Iterator

from jaxlc.config.checks.layer_checks import projection_problems
from jaxlc.config.frozen import Config
from jaxlc.config.kinds.experts import EXPERT_PROJECTIONS
from jaxlc.config.schema import MATMUL_NAMES, PrecisionConfig

_COMPUTE_OF = {  # setting -> the only value of compute for which it has an effect
    **dict.fromkeys(("fp8_matmuls", "bf16_layers", "fp8_scaling", "fp8_amax_history_len"), "fp8"),
    **dict.fromkeys(("loss_scale", "loss_scale_growth_factor", "loss_scale_growth_interval"), "fp16"),
    **dict.fromkeys(("loss_scale_backoff_factor", "loss_scale_min", "loss_scale_max"), "fp16"),
}

_NAMES = (*MATMUL_NAMES, *EXPERT_PROJECTIONS)


def precision_problems(config: Config) -> Iterator[str]:
    """Reasons why the precision of `config` is invalid."""
    precision, defaults = config.precision, PrecisionConfig()
    if precision.compute == "fp8" or precision.fp8_matmuls != defaults.fp8_matmuls:
        yield from projection_problems(config, "precision.fp8_matmuls", precision.fp8_matmuls, _NAMES)
    yield from _layer_problems(precision.bf16_layers, config.model.num_layers)
    for name, compute in _COMPUTE_OF.items():
        value = getattr(precision, name)
        if value != getattr(defaults, name) and precision.compute != compute:
            yield (
                f"config.precision.{name}={value!r} is for compute={compute!r}, and config.precision.compute is"
                f" {precision.compute!r}; use --config.precision.compute={compute}, or remove it"
            )
    if precision.fp8_amax_history_len != defaults.fp8_amax_history_len and precision.fp8_scaling != "delayed":
        yield (
            f"config.precision.fp8_amax_history_len={precision.fp8_amax_history_len} is for delayed scaling, and"
            f" config.precision.fp8_scaling is {precision.fp8_scaling!r}; use --config.precision.fp8_scaling=delayed,"
            " or remove it"
        )
    if precision.compute == "fp8" and precision.reduce == "fp32":
        yield (
            "unsupported: config.precision.reduce='fp32' with compute='fp8', whose products return gradients in bf16;"
            " use --config.precision.reduce=compute"
        )
    if precision.compute == "fp8" and not precision.fp8_matmuls:
        yield (
            "config.precision.compute='fp8' with no fp8_matmuls is bf16; name at least one, or use"
            " --config.precision.compute=bf16"
        )
    if not precision.loss_scale_min <= precision.loss_scale <= precision.loss_scale_max:
        yield (
            f"config.precision.loss_scale={precision.loss_scale} is not between loss_scale_min="
            f"{precision.loss_scale_min} and loss_scale_max={precision.loss_scale_max}"
        )
    if precision.compute == "fp8" and precision.fp8_scaling == "delayed" and config.memory.tile_tokens:
        yield (
            "unsupported: config.precision.fp8_scaling='delayed' needs each product of a layer once per microbatch, and"
            f" config.memory.tile_tokens={config.memory.tile_tokens} computes it tile by tile;"
            " use --config.precision.fp8_scaling=current"
        )


def _layer_problems(bf16_layers: tuple[int, ...], num_layers: int) -> Iterator[str]:
    setting = f"config.precision.bf16_layers={bf16_layers}"
    named = [layer + num_layers if layer < 0 else layer for layer in bf16_layers]
    if not all(0 <= layer < num_layers for layer in named):
        yield f"{setting}: the model has {num_layers} layers; they are 0 to {num_layers - 1}, or -{num_layers} to -1"
    elif len(named) != len({*named}):
        yield f"{setting} names a layer twice, of {num_layers}: they are {named}, counted from 0; remove one"
    elif len(named) == num_layers:
        yield (
            f"{setting} are all layers, so compute='fp8' equals bf16; remove one, or use"
            " --config.precision.compute=bf16 --config.precision.bf16_layers="
        )
