"""Rollouts during training (config.rollouts).

`jaxlc.posttrain` makes those of the policy. It is in a higher layer than this package, so it is imported by its name,
and only by runs with config.rollouts.source='model'.
"""

import importlib
import itertools
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from jax.experimental import multihost_utils

from jaxlc.config import Config
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.data.traces.rollout_files import RolloutSequences, write_rollouts
from jaxlc.step.step import TrainStep

T = TypeVar("T")
_POLL_SECONDS = 0.5
_MODULE = "jaxlc.posttrain.embedded_rollouts"
DIRECTORY = "rollouts"  # in the workdir
DECODED = "decoded_rollouts"
EXPORTED = "exported"
ROLLOUTS = "rollouts"  # key of the meta of a checkpoint: the digests of files of rollouts, by step


class RolloutMaker(Protocol):
    """Makes the rollouts of a step with the parameters before it."""

    lines: list[str]  # description, printed at the start of the run

    def __call__(self, params: dict, step: int, path: Path, workdir: Path) -> None:
        """Writes the rollouts of `step` to `path`, unless it exists. Every process of a run makes the same call."""


def make_rollout_maker(step: TrainStep, tokenizer: Tokenizer) -> RolloutMaker | None:
    """None: another program writes the files, or there are no rollouts.

    Raises:
      UserError: the prompts or the reward cannot be loaded.
      Unsupported: a custom model.
    """
    if step.config.rollouts.source != "model":
        return None
    if step.model is not None:
        raise Unsupported("config.rollouts.source='model' is unsupported with a custom model: it has no KV cache")
    return importlib.import_module(_MODULE).EmbeddedRollouts(step, tokenizer)


def write_decoded(workdir: Path, step: int, sequences: RolloutSequences) -> None:
    """Writes some rollouts of another program with their reward and texts; those of the policy have both.

    Raises:
      UserError: the file cannot be written.
    """
    write_rollouts(sequences.decoded(step), workdir / DECODED / f"{step}.jsonl")


def export_for_rollouts(workdir: Path, step: int, config: Config) -> None:
    """Exports the checkpoint of `step` in another process, on CPU, and calls rollouts.export_command.

    A directory that exists, as after a resume, is not written again.

    Raises:
      UserError: the export or the command fails.
    """
    target = workdir / EXPORTED / str(step)
    if not target.is_dir():
        adapters = ["--adapters"] if config.lora.rank else []
        _call([sys.executable, "-m", "jaxlc.exporting", str(workdir), str(target), f"--step={step}", *adapters])
    if config.rollouts.export_command:
        _call([*shlex.split(config.rollouts.export_command), str(target)])


def together(
    items: Iterator[T], sequences: RolloutSequences, first_step: int, stop: Callable[[], object]
) -> Iterator[T]:
    """Yields the items, one per step; before each, all processes wait until all of them find the file of the step.

    They wait in the main thread, since the devices compare notes twice a second, and call `stop` together: a signal to
    one process, of which only JAX's preemption service knows, ends the waiting of all at the same time.
    """
    for step in itertools.count(first_step):
        while True:
            # A process that is late raises the error when it reads the file, as a single process does.
            is_over = sequences.is_available(step) or sequences.is_late(step)
            if multihost_utils.process_allgather(np.array(is_over)).all():
                break
            if stop() is not None:
                sequences.close()  # the threads of `items` wait for the file, too
                return
            time.sleep(_POLL_SECONDS)
        try:
            item = next(items)
        except StopIteration:
            return
        yield item


def _call(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise UserError(
            f"the export of rollouts failed: {shlex.join(command)}: {lines[-1] if lines else error}"
        ) from error
