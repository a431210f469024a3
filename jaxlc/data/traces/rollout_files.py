"""Sequences of rollouts: one file of traces for each step, which may appear while training waits for it."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxlc.config import Config
from jaxlc.core.errors import UserError
from jaxlc.core.paths import displayed
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.data.traces.open_traces import TraceData, open_traces

_POLL_SECONDS = 0.1
_LINE_SECONDS = 60
_MAX_KEPT = 4  # steps: the one that is trained, and those that are prefetched


class RolloutSequences:
    """The sequences of a run on rollouts, as `loader.Sequences`; it is thread-safe.

    Step s, from 1, has the sequences of the file s.jsonl, and is filled up with sequences of padding. So a sequence is
    a pure function of the files, and a run that resumes reads the same ones.
    """

    def __init__(self, directory: Path, config: Config, tokenizer: Tokenizer, log: Callable[[str], None]):
        self.directory = directory
        self._config, self._tokenizer, self._log = config, tokenizer, log
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._kept: dict[int, TraceData] = {}  # by step

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns sequence i in natural order; waits for its file.

        Raises:
          UserError: the file does not appear in rollouts.wait_seconds, or its traces cannot be used.
        """
        number, index = divmod(i, self._config.train.global_batch_size)
        packed = self.of_step(number + 1).train
        arrays = packed[index if index < packed.num_sequences else 0]
        return arrays if index < packed.num_sequences else {name: np.zeros_like(x) for name, x in arrays.items()}

    def of_step(self, step: int) -> TraceData:
        """The traces of a step; waits for its file."""
        self._wait(step)  # without the lock: other threads may need an earlier step
        with self._lock:
            if step not in self._kept:
                self._kept[step] = self._opened(step)
            if len(self._kept) > _MAX_KEPT:
                del self._kept[min(self._kept)]
            return self._kept[step]

    def path(self, step: int) -> Path:
        return self.directory / f"{step}.jsonl"

    def close(self) -> None:
        """Ends the waiting of all threads."""
        self._closed.set()

    def _opened(self, step: int) -> TraceData:
        path, batch_size = self.path(step), self._config.train.global_batch_size
        traces = open_traces(self._config, self._tokenizer, (str(path),), holds_out=False)
        if traces.train.num_sequences > batch_size:
            raise UserError(
                f"the rollouts in {displayed(path)} fill {traces.train.num_sequences} sequences, more than"
                f" config.train.global_batch_size={batch_size}; increase it, or config.data.seq_len"
            )
        return traces

    def _wait(self, step: int) -> None:
        path = self.path(step)
        start = next_line = time.monotonic()
        limit = self._config.rollouts.wait_seconds
        while not path.is_file():
            waited = time.monotonic() - start
            if self._closed.is_set():
                raise UserError("the run has ended")
            if limit and waited > limit:
                raise UserError(
                    f"no rollouts of step {step} after {waited:.0f} s: {displayed(path)} does not exist, and"
                    f" config.rollouts.wait_seconds={limit:g}"
                )
            if time.monotonic() - next_line > _LINE_SECONDS:
                next_line = time.monotonic()
                self._log(f"waiting for the rollouts of step {step} for {waited:.0f} s: {displayed(path)}")
            time.sleep(_POLL_SECONDS)
