"""The reference model of config.posttrain.reference='model' while a run trains.

Its weights are in pinned host memory, and each layer is copied to the device while the layer before it computes
(`models.offloaded_layers`). A batch gets its log-probabilities before its step, which then reads them as those of
records.
"""

from jaxlc.checkpoints.pretrained import check_pretrained, load_pretrained
from jaxlc.core.text import gib
from jaxlc.runtime import watchdog
from jaxlc.runtime.watchdog import wait_for_processes
from jaxlc.step.batch import Batch
from jaxlc.step.state import bytes_per_device, lacks_host_memory
from jaxlc.step.step import TrainStep
from jaxlc.train.reports.progress import Progress


def reference_lines(step: TrainStep) -> list[str]:
    """The weights of the reference model and their memory, for the start report; they are checked.

    Raises:
      UserError: they cannot be read, or differ from the config.
    """
    if step.reference is None:
        return []
    check_pretrained(step.reference)
    size = gib(bytes_per_device(step.reference.abstract_state.params))
    problem = lacks_host_memory(step.mesh)
    where = "in pinned host memory" if problem is None else f"on the device: {problem}"
    return [f"reference  {step.reference.config.model.init_from}, {size} GiB per device {where}"]


class Reference:
    """Adds the reference's log-probabilities to batches; without a reference model, batches stay as they are."""

    def __init__(self, step: TrainStep, progress: Progress):
        self._params = self._log_probs = None
        if (reference := step.reference) is None:
            return
        with watchdog.phase("compilation", repeats=False), progress.compiling("the reference"):
            self._log_probs = reference.compile_log_probs()
        with progress.progress_bar(f"reading {reference.config.model.init_from}") as update:
            self._params, line = load_pretrained(reference, update)
        progress.log(f"reference: {line.split(maxsplit=1)[1]}")
        wait_for_processes("reference read")

    def __call__(self, batch: Batch) -> Batch:
        if self._log_probs is None:
            return batch
        return batch._replace(reference_log_probs=self._log_probs(self._params, batch))
