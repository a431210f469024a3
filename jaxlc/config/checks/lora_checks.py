"""Checks of LoRA and of frozen parameters. Imports no jax."""

from collections.abc import Iterator

from jaxlc.config.frozen import Config
from jaxlc.config.schema import DELTA_PROJECTIONS, EXPERT_PROJECTIONS, MATMUL_NAMES, LoraConfig
from jaxlc.config.values import invalid_value

_NAMES = (*MATMUL_NAMES, *DELTA_PROJECTIONS, *EXPERT_PROJECTIONS)


def lora_problems(config: Config) -> Iterator[str]:
    """Problems of the section lora, and settings of frozen parameters where no parameter is frozen."""
    lora, train = config.lora, config.train
    for name in lora.projections:
        if name not in _NAMES:
            expected = f"one or more of {', '.join(_NAMES)}, separated by commas"
            yield invalid_value("lora.projections", name, expected, _NAMES)
        elif name in DELTA_PROJECTIONS and "gated_delta_net" not in config.model.attentions:
            yield (
                f"config.lora.projections names {name!r}, which only gated_delta_net layers have, and"
                " config.model.layer_kinds has none; remove it"
            )
        elif name in EXPERT_PROJECTIONS and not config.model.num_experts:
            yield (
                f"config.lora.projections names {name!r}, which only layers of experts have, and"
                " config.model.num_experts is 0; remove it"
            )
    if not lora.projections:
        yield f"config.lora.projections is empty: name one or more of {', '.join(_NAMES)}"
    if not lora.rank:
        for name, default in vars(LoraConfig()).items():
            if getattr(lora, name) != default:
                yield f"config.lora.{name}={getattr(lora, name)} has no effect without --config.lora.rank=RANK"
    if not (lora.rank or train.trainable or train.frozen):
        if not train.checkpoint_frozen:
            yield (
                "config.train.checkpoint_frozen=False has no effect, since no parameter is frozen: set"
                " config.lora.rank, config.train.trainable or config.train.frozen, or remove it"
            )
        if config.precision.frozen != "bf16":
            yield (
                f"config.precision.frozen={config.precision.frozen!r} has no effect, since no parameter is frozen: set"
                " config.lora.rank, config.train.trainable or config.train.frozen, or remove it"
            )
