"""What is checked at the start of a run, before it writes or compiles anything."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxlc.checkpoints.checkpoint_files import CHECKPOINTS_DIRECTORY, committed_steps
from jaxlc.checkpoints.pretrained_params import check_pretrained
from jaxlc.checkpoints.reading import check_latest
from jaxlc.config import Stage, to_dict
from jaxlc.config.values import flattened
from jaxlc.core.errors import UserError
from jaxlc.runtime.barrier import problem_of_any_process, text_of_process_0
from jaxlc.step.step import TrainStep
from jaxlc.train.prepared_stages import PreparedStage, check_position, restore_target
from jaxlc.train.reports.metrics import METRICS_FILE, read_rows

_MAX_NAMES = 4  # settings in an error
# They may differ between processes.
_OWN_SETTINGS = (
    "runtime.process_id", "runtime.coordinator_address", "runtime.compilation_cache_dir", "data.cache_dir",
    "train.local_checkpoints",
)  # fmt: skip


def check_equal_settings(stages: Sequence[Stage]) -> None:
    """Checks that all processes have the settings of process 0.

    Raises:
      UserError: one has not, on every process; it names the process and the settings.
    """
    own = {f"{stage.name or 'config'}.{path}": str(value) for stage in stages for path, value in _settings(stage)}
    first = json.loads(text_of_process_0("settings", json.dumps(own)))
    names = [name for name in own | first if own.get(name) != first.get(name)]
    differences = (f"{name}={own.get(name)}, where process 0 has {first.get(name)}" for name in names[:_MAX_NAMES])
    problem = f"process {jax.process_index()} has {'; '.join(differences)}" if names else ""
    if problem := problem_of_any_process("settings", problem):
        raise UserError(f"{problem}: start all processes with the same settings")


def _settings(stage: Stage) -> list[tuple[str, object]]:
    return [item for item in flattened(to_dict(stage.config)).items() if item[0] not in _OWN_SETTINGS]


def check_same_state(stages: Sequence[Stage], steps: Sequence[TrainStep]) -> None:
    """Checks that the training states of all stages have the same arrays.

    Raises:
      UserError: they do not.
    """
    expected = jax.tree.structure(steps[0].abstract_state)
    for stage, step in zip(stages, steps):
        if jax.tree.structure(step.abstract_state) != expected:
            raise UserError(
                f"stage {stage.name} has a different training state than stage {stages[0].name}: its optimizer settings"
                " decide which arrays the state has; use equal ones"
            )


def check_weights(step: TrainStep, workdir: Path) -> None:
    """Checks the files of config.model.init_from, before data is read, if a new run in `workdir` will read them.

    Args:
      step: of the first stage.
    Raises:
      UserError: as `check_pretrained`.
    """
    if step.config.model.init_from and not committed_steps(workdir / CHECKPOINTS_DIRECTORY):
        check_pretrained(step)


def check_stages(stages: Sequence[PreparedStage], workdir: Path) -> None:
    """Checks that the latest checkpoint and the metrics in `workdir` are those of these stages, and that their
    parameters can be evaluated.

    Raises:
      UserError: the checkpoint is another model's, metrics.jsonl is damaged, no held-out token has a loss, or an
        evaluation of config.evals has no examples.
    """
    meta = check_latest(workdir / CHECKPOINTS_DIRECTORY, functools.partial(restore_target, stages))
    if meta is not None:
        check_position(stages, meta["step"], meta)
    read_rows(workdir / METRICS_FILE)
    for stage in stages:
        if (evaluator := stage.evaluator) is not None and not evaluator.has_targets():
            raise UserError(
                f"no token of the {evaluator.num_sequences} held-out sequences has a loss: use other held-out data"
                " (data.eval_sources, data.eval_fraction), a longer data.seq_len, or more train.eval_sequences"
            )
        if stage.scorer is not None:
            stage.scorer.check()
