"""The batches of a run: from the sequences of its data source, with the log-probabilities of a
reference model.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jaxlc.checkpoints.pretrained import check_pretrained, load_pretrained
from jaxlc.core.text import gib
from jaxlc.data import Corpus
from jaxlc.data.sequences.loader import batches
from jaxlc.data.sequences.packing import BalancedSequences
from jaxlc.data.sequences.source import DataSource
from jaxlc.data.sequences.user_batches import EndOfBatches, OwnBatches
from jaxlc.data.stream import Stream
from jaxlc.posttrain.rollouts import Rollouts, RolloutSequences, raise_together
from jaxlc.runtime import watchdog
from jaxlc.runtime.watchdog import wait_for_processes
from jaxlc.step.batch import BATCH_SPEC, Batch
from jaxlc.step.state import bytes_per_device, lacks_host_memory
from jaxlc.step.step import TrainStep
from jaxlc.train.reports.progress import Progress

T = TypeVar("T")
_POLL_SECONDS = 0.5
ROLLOUTS = "rollouts"  # key of the meta of a checkpoint: the digests of files of rollouts, by step


def training_batches(
    source: DataSource,
    step: TrainStep,
    next_sequence: int,
    num_steps: int,
    stop: Callable[[], object] = lambda: None,
) -> Iterator[tuple[dict[str, jax.Array], bool]]:
    """Yields the arrays of `num_steps` optimizer steps from `next_sequence` on, and whether it is the last one.

    Args:
      stop: several processes that wait for rollouts call it together; the iterator ends when it is not None.
    """
    train, sequences = step.config.train, source.train
    if isinstance(source, (Corpus, Stream)) and step.config.attention.document_mask:
        sequences = BalancedSequences(source.train, step.config, next_sequence)
    stream = batches(
        sequences,
        first_sequence=next_sequence,
        global_batch_size=train.global_batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        seq_len=step.config.data.seq_len,
        arranged=step.sequence_order.arranged,
        sharding=NamedSharding(step.mesh, BATCH_SPEC),
        prefetch_steps=step.config.data.prefetch_steps,
    )
    with contextlib.closing(stream), contextlib.ExitStack() as stack:
        # before the stream is closed, whose threads may wait for a file
        stack.callback(source.stop_waiting)
        stack.callback(source.close)
        items: Iterator = _until_end(stream)
        if isinstance(source, OwnBatches):
            yield from _marking_last(itertools.islice(items, num_steps))
            return
        # endless, unless `stop_waiting` was called
        if isinstance(source, Rollouts) and jax.process_count() > 1:
            first_step = next_sequence // train.global_batch_size + 1
            items = together(items, source.train, first_step, stop)
        yield from ((arrays, count == num_steps) for count, arrays in enumerate(items, start=1))


def _until_end(stream: Iterator) -> Iterator:
    with contextlib.suppress(EndOfBatches):
        yield from stream


def _marking_last(stream: Iterator) -> Iterator:
    """Yields (item, whether it is the last one); reads one item ahead."""
    current = next(stream, None)
    while current is not None:
        following = next(stream, None)
        yield current, following is None
        current = following


def together(
    items: Iterator[T], sequences: RolloutSequences, first_step: int, stop: Callable[[], object]
) -> Iterator[T]:
    """Yields the items, one per step; before each, all processes wait until all of them find the
    file of the step.

    They wait in the main thread, since the devices compare notes twice a second, and call `stop`
    together: a signal to one process, of which only JAX's preemption service knows, ends the
    waiting of all at the same time.
    """
    for step in itertools.count(first_step):
        while True:
            # A process that is late raises the error when it reads the file, as a single process
            # does.
            raise_together(sequences.failure)
            is_over = sequences.path(step).is_file() or sequences.is_late(step)
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
    """Adds the log-probabilities of config.posttrain.reference='model' to batches; without it, they
    stay as they are.

    The weights are in pinned host memory, and each layer is copied to the device while the layer
    before it computes (`models.offloaded_layers`). A batch gets its log-probabilities before its
    step, which then reads them as recorded.
    """

    def __init__(self, step: TrainStep, progress: Progress):
        self._params = self._log_probs = None
        if (reference := step.reference) is None:
            return
        with watchdog.phase("compilation", repeats=False), progress.compiling("the reference"):
            self._log_probs = reference.compile_lowered(reference.lower_log_probs())
        with progress.progress_bar(f"reading {reference.config.model.init_from}") as update:
            self._params, line = load_pretrained(reference, update)
        progress.log(f"reference: {line.split(maxsplit=1)[1]}")
        wait_for_processes("reference read")

    def __call__(self, batch: Batch) -> Batch:
        if self._log_probs is None:
            return batch
        return batch._replace(reference_log_probs=self._log_probs(self._params, batch))
