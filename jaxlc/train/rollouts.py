"""Rollouts during training (config.rollouts).

`jaxlc.posttrain` makes those of the policy. It is in a higher layer than this package, so it is imported by its name,
and only by runs with config.rollouts.source='model'.
"""

import importlib
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from jaxlc.config import Config
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.step.step import TrainStep

_MODULE = "jaxlc.posttrain.embedded_rollouts"
DIRECTORY = "rollouts"  # in the workdir
EXPORTED = "exported"


class RolloutMaker(Protocol):
    """Makes the rollouts of a step with the parameters before it."""

    def __call__(self, params: dict, step: int, path: Path) -> None:
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


def _call(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise UserError(
            f"the export of rollouts failed: {shlex.join(command)}: {lines[-1] if lines else error}"
        ) from error
