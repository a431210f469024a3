"""The phases of all processes of a run, which each process publishes in the key-value store of JAX's coordinator.

A call to the coordinator may not return: with process 0 stopped by SIGSTOP, a read had not returned after 37 s. So all
calls are made in helper threads.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxlc.core.text_table import aligned
from jaxlc.core.time_limit import call_within

DEVICES = "devices"  # the phase of a process that waits for its devices

_PREFIX = "jaxlc/phases/"
_PUBLISH_SECONDS = 10.0
_READ_SECONDS = 5.0
_STALE_SECONDS = 1.5 * _PUBLISH_SECONDS  # a process that has published nothing for this time does not answer


class Row(NamedTuple):
    """What a process publishes."""

    process_id: int
    host: str
    phase: str
    step: int  # the last step that was dispatched
    seconds: float  # in this phase
    place: str  # where its Python code is, such as "user_data.py:12 read"
    published: float  # time.time() of its machine

    @property
    def age(self) -> float:
        """Seconds since it was published, by the clocks of two machines."""
        return time.time() - self.published

    @property
    def is_stale(self) -> bool:
        return self.age > _STALE_SECONDS


class PhaseBoard:
    """Publishes the row of this process every 10 s; process 0 also reads the rows of all processes."""

    def __init__(self, client: Any, process_id: int, num_processes: int, row: Callable[[], Row]):
        """
        Args:
          client: of JAX's coordination service.
          row: returns what to publish; called in a thread.
        """
        self._client, self._process_id, self._num_processes, self._row = client, process_id, num_processes, row
        self._published: dict[int, tuple[Row, float]] = {}  # process -> its row, and when it was new here
        self._last_answer = time.monotonic()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="jaxlc-phases", daemon=True)
        self._thread.start()

    def silent(self, limit_seconds: float) -> str | None:
        """Names a process that has not answered for `limit_seconds`, at least 30 s; None: all have.

        Process 0 looks at all processes, and the others look at process 0.
        """
        now, limit_seconds = time.monotonic(), max(limit_seconds, 3 * _PUBLISH_SECONDS)
        if (seconds := now - self._last_answer) > limit_seconds:
            return f"process 0 of {self._num_processes} has not answered for {seconds:.0f} s"
        for row, since in list(self._published.values()):
            if (seconds := now - since) > limit_seconds:
                return self.describe(row, seconds)
        return None

    def rows(self) -> list[Row] | None:
        """The rows of all processes that have published one; None: the coordinator does not answer."""
        return call_within(_READ_SECONDS, self._read)

    def describe(self, row: Row, silent_seconds: float = 0.0) -> str:
        """Where a process is, or was before it was silent."""
        name = f"process {row.process_id} of {self._num_processes} on {row.host}"
        if silent_seconds:
            return f"{name} has not answered for {silent_seconds:.0f} s, since phase {row.phase} of step {row.step}"
        return f"{name} is in phase {row.phase} of step {row.step}, at {row.place}"

    def close(self) -> None:
        """Removes the row of this process, which ends."""
        self._is_closed.set()
        self._thread.join(_READ_SECONDS)

    def _publish(self) -> None:
        key = f"{_PREFIX}{self._process_id}"
        with contextlib.suppress(Exception):  # process 0 has ended, which `peers` notices
            while True:
                self._client.key_value_set(key, json.dumps(self._row()), allow_overwrite=True)
                if self._process_id == 0:
                    self._note(self._read())
                self._last_answer = time.monotonic()
                if self._is_closed.wait(_PUBLISH_SECONDS):
                    break
            self._client.key_value_delete(key)

    def _read(self) -> list[Row]:
        return sorted(Row(*json.loads(value)) for _, value in self._client.key_value_dir_get(_PREFIX))

    def _note(self, rows: list[Row]) -> None:
        """Remembers which rows are new, by this machine's clock."""
        now, known = time.monotonic(), self._published
        unchanged = {row.process_id for row in rows if known.get(row.process_id, (None, 0.0))[0] == row}
        self._published = {
            row.process_id: (row, known[row.process_id][1] if row.process_id in unchanged else now) for row in rows
        }


def table_lines(rows: list[Row]) -> list[str]:
    """The rows as a table."""
    head = ("process", "host", "phase", "step", "seconds", "last row", "Python code")
    cells = [
        (row.process_id, row.host, row.phase, row.step, f"{row.seconds:.0f}", f"{row.age:.0f} s ago", row.place)
        for row in rows
    ]
    return aligned([head, *(tuple(map(str, cell)) for cell in cells)], "rllrrrl")


def suspects(rows: list[Row]) -> list[Row]:
    """The processes for which the others seem to wait; empty if the rows do not show any.

    They are silent, or at an earlier step than others, or do not wait for their devices while others do.
    """
    for is_suspect in (
        lambda row: row.is_stale,
        lambda row: row.step < max(row.step for row in rows),
        lambda row: row.phase != DEVICES and any(other.phase == DEVICES for other in rows),
    ):
        if found := [row for row in rows if is_suspect(row)]:
            return found
    return []
