"""Metrics for Weights & Biases. Needs the package wandb: pip install -e '.[wandb]'.

All calls to it are made in a thread, so that neither a slow server nor an error of the package delays or ends a run.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_MAX_ROWS = 10_000  # that wait for the thread; later ones are dropped
_CLOSE_SECONDS = 30.0  # how long the end of a run waits for the thread


class WandbWriter:
    """Sends rows to a run of Weights & Biases; `WANDB_MODE=offline` keeps them in the workdir."""

    def __init__(
        self, project: str, run_id: str, workdir: Path, settings: Mapping[str, Any], log: Callable[[str], None]
    ):
        """
        Args:
          run_id: a later start with the same identifier continues the run.
          settings: of the run, by their paths.
          log: prints a line.
        """
        self._arguments = dict(
            project=project,
            id=run_id,
            resume="allow",
            name=workdir.name,
            dir=str(workdir),
            config=dict(settings),
        )
        self._log, self._num_dropped, self._has_failed = log, 0, False
        self._rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_MAX_ROWS)
        self._thread = threading.Thread(target=self._send, name="jaxlc-wandb", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Passes a row to the thread; does not wait."""
        try:
            self._rows.put_nowait((step, dict(values)))
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Waits for the rows to be sent, for a limited time."""
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            self._num_dropped += 1
        else:
            self._thread.join(_CLOSE_SECONDS)
        if self._has_failed:
            return
        if self._thread.is_alive():
            self._log(f"warning: Weights & Biases has not taken all metrics in {_CLOSE_SECONDS:.0f} s; they are in the"
                      " workdir, for `wandb sync`, and in metrics.jsonl")  # fmt: skip
        elif self._num_dropped:
            self._log(f"warning: {self._num_dropped} rows were not sent to Weights & Biases; metrics.jsonl has them")

    def _send(self) -> None:
        try:
            import wandb

            run = wandb.init(**self._arguments)
            while (item := self._rows.get()) is not None:
                step, row = item
                # After a resume, W&B ignores rows of steps that it already has.
                run.log(row, step=step)
            run.finish()
        except Exception as error:
            self._has_failed = True
            reason = (str(error).splitlines() or [""])[0]
            self._log(f"warning: no metrics for Weights & Biases from here on ({type(error).__name__}: {reason})")
