"""Checks of the settings that say which checkpoints are saved and kept. Imports no jax."""

from collections.abc import Iterator

from jaxlc.config.frozen import Config


def checkpoint_problems(config: Config) -> Iterator[str]:
    """The settings that keep checkpoints which are not saved, or not evaluated."""
    train = config.train
    saves, evaluations = train.checkpoint_every_steps, train.eval_every_steps
    if bool(train.local_checkpoints) != bool(train.local_checkpoint_every_steps):
        yield (
            f"config.train.local_checkpoints={train.local_checkpoints!r} and"
            f" config.train.local_checkpoint_every_steps={train.local_checkpoint_every_steps} have an effect only"
            " together: set both or none"
        )
    if train.keep_every_steps and (not saves or train.keep_every_steps % saves):
        yield (
            f"config.train.keep_every_steps={train.keep_every_steps} is not a multiple of"
            f" config.train.checkpoint_every_steps={saves}, so these steps have no checkpoints; use"
            f" --config.train.checkpoint_every_steps={train.keep_every_steps}"
        )
    if train.keep_best_checkpoints and (not saves or not evaluations or saves % evaluations):
        yield (
            f"config.train.keep_best_checkpoints={train.keep_best_checkpoints} compares the held-out losses of"
            f" checkpoints, and config.train.checkpoint_every_steps={saves} is not a multiple of"
            f" config.train.eval_every_steps={evaluations}; use"
            f" --config.train.eval_every_steps={saves or 1}"
            f"{'' if saves else ' --config.train.checkpoint_every_steps=1'}"
        )
