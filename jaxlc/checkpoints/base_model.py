"""The frozen parameters of a run whose checkpoints do not contain them (config.train.checkpoint_frozen).

They come from config.model.init_from, or are the initial values of config.train.seed. A checkpoint stores their
fingerprint, so that a run does not resume, and is not loaded, with another base model.
"""

import hashlib
import json
from pathlib import Path

from jaxlc.checkpoints.checkpoint_files import BASE
from jaxlc.checkpoints.checksums import checksums_of
from jaxlc.checkpoints.pretrained_params import load_pretrained
from jaxlc.checkpoints.reading import restore_params
from jaxlc.core.errors import UserError
from jaxlc.models import freezing
from jaxlc.step.state import TrainState
from jaxlc.step.step import TrainStep


def without_frozen(step: TrainStep, state: TrainState) -> TrainState:
    """The part of the state that a checkpoint without frozen parameters contains; of arrays or their shapes."""
    return state._replace(params=freezing.split(state.params, step.frozen)[0])


def checkpoint_part(step: TrainStep, state: TrainState) -> TrainState:
    """The part of the state that the checkpoints of this config contain; of arrays or their shapes."""
    return state if step.config.train.checkpoint_frozen else without_frozen(step, state)


def base_meta(step: TrainStep, params) -> dict[str, dict[str, str]]:
    """Entries of a checkpoint's meta that identify the frozen parameters; empty if the checkpoint contains them."""
    if step.config.train.checkpoint_frozen:
        return {}
    return {BASE: dict(init_from=step.config.model.init_from, fingerprint=_fingerprint(step, params))}


def with_base(step: TrainStep, trainable, base: dict[str, str], checkpoint: Path) -> dict:
    """All parameters, from the trainable ones of a checkpoint.

    Args:
      base: meta of the checkpoint, as `base_meta` returns it.
      checkpoint: its directory, for errors.
    Raises:
      UserError: the frozen parameters differ from the ones that the checkpoint was trained on.
    """
    params = load_pretrained(step)[0] if step.config.model.init_from else step.init_params(step.frozen)
    if _fingerprint(step, params) != base["fingerprint"]:
        raise UserError(
            f"the frozen parameters of {checkpoint} are not those of {_source(step)}: it was trained on"
            f" {base['init_from'] or 'random weights'}; use that model and the same config.precision.frozen"
        )
    return freezing.join(trainable, freezing.split(params, step.frozen)[1])


def restore_all_params(step: TrainStep, directory: Path, step_number: int, meta: dict) -> dict:
    """All parameters of a checkpoint of the run of `step`, with its shardings.

    Raises:
      UserError: as `restore_params` and `with_base`.
    """
    vocab_size, abstract = step.config.model.vocab_size, step.abstract_state.params
    if BASE not in meta:
        is_finite = step.model is None
        return restore_params(directory, step_number, abstract, vocab_size=vocab_size, finite_params=is_finite)
    abstract_trainable, _ = freezing.split(abstract, step.frozen)
    trainable = restore_params(directory, step_number, abstract_trainable, vocab_size=vocab_size)
    return with_base(step, trainable, meta[BASE], directory / str(step_number))


def _fingerprint(step: TrainStep, params) -> str:
    """Of the frozen part of `params`; independent of the mesh."""
    _, frozen = freezing.split(params, step.frozen)
    return hashlib.sha256(json.dumps(sorted(checksums_of(frozen).items())).encode()).hexdigest()


def _source(step: TrainStep) -> str:
    init_from = step.config.model.init_from
    return f"config.model.init_from={init_from}" if init_from else f"config.train.seed={step.config.train.seed}"
