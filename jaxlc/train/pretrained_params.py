"""The parameters of `model.init_from`, sharded as the training state."""

from collections.abc import Callable
from pathlib import Path

from jaxlc.config.config_json import family_of
from jaxlc.config.pretrained import Pretrained, locate, with_overrides
from jaxlc.core.errors import Unsupported
from jaxlc.hf.load import load_params
from jaxlc.train.checkpoint import restore_params
from jaxlc.train.step import TrainStep


def load_pretrained(step: TrainStep, progress: Callable[[int, int], None] | None = None) -> tuple[dict, str]:
    """The parameters of config.model.init_from, with the shardings of `step`, and a line that describes them.

    Args:
      progress: called with the bytes of parameters done and in total.
    Raises:
      UserError: the model cannot be read, or is not that of the config.
    """
    config = step.config
    if step.model is not None:
        raise Unsupported("unsupported: config.model.init_from with a model of the caller, which has its own init()")
    pretrained = locate(config.model.init_from, with_weights=True)
    with_overrides(pretrained, vars(config.model))  # a config that was loaded before may differ
    abstract = step.abstract_state.params
    if pretrained.is_run:
        return _of_run(pretrained, abstract, config.model.vocab_size)
    params, num_bytes = load_params(
        pretrained.directory,
        family_of(pretrained.config_json(), config.model),
        abstract,
        step.dims,
        vocab_size=config.model.vocab_size,
        progress=progress,
    )
    return params, f"weights    {pretrained.directory}, {num_bytes:,} bytes read by this process"


def _of_run(pretrained: Pretrained, abstract, vocab_size: int) -> tuple[dict, str]:
    directory: Path = pretrained.directory.absolute()
    params = restore_params(directory.parent, int(directory.name), abstract, vocab_size=vocab_size)
    return params, f"weights    of the checkpoint {directory}"
