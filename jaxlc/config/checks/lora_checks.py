"""Checks of LoRA and of frozen parameters. Imports no jax."""

from collections.abc import Iterator

from jaxlc.config.checks.layer_checks import projection_problems
from jaxlc.config.frozen import Config
from jaxlc.config.kinds import projection_paths
from jaxlc.config.schema import LoraConfig


def lora_problems(config: Config) -> Iterator[str]:
    """Problems of the section lora, and settings of frozen parameters where no parameter is frozen."""
    lora, train = config.lora, config.train
    names = [*projection_paths()]
    if lora.rank or lora.projections != LoraConfig().projections:
        yield from projection_problems(config, "lora.projections", lora.projections, names)
    if not lora.projections:
        yield f"config.lora.projections is empty: name one or more of {', '.join(names)}"
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
