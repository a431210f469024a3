"""The progress of a run in a notebook: one output that is updated in place."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxlc.core import html

_MIN_SECONDS_BETWEEN_UPDATES = 0.25
_BAR = "display:inline-block;width:12em;height:0.7em;border:1px solid currentColor;vertical-align:middle"


class NotebookDisplay:
    """Permanent lines, and below them the current step and activity, each with a progress bar."""

    def __init__(self):
        self._lines: list[str] = []
        self._step: tuple[str, float] | None = None  # text, and fraction of the bar
        self._activities: list[tuple[str, float | None]] = []
        self._handle = None  # created by the first update
        self._last_update_seconds = float("-inf")

    def log(self, text: str) -> None:
        """Adds a permanent line, below the line of the current step."""
        self._end_step()
        self._lines.append(text)
        self._update()

    def step(self, text: str, fraction: float) -> None:
        """Replaces the line of the current step."""
        self._step = text, fraction
        self._update(_MIN_SECONDS_BETWEEN_UPDATES)

    @contextmanager
    def activity(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Shows `what`; yields a function (done, total) that sets its progress bar."""
        index = len(self._activities)
        self._activities.append((what, None))
        self._update()

        def set_progress(done: int, total: int) -> None:
            self._activities[index] = what, done / total if total else None
            self._update(_MIN_SECONDS_BETWEEN_UPDATES)

        try:
            yield set_progress
        finally:
            del self._activities[index:]
            self._update()

    def close(self) -> None:
        """Shows the final state: the lines and the last step, without progress bars."""
        self._end_step()
        if self._handle is not None:
            self._update()

    def _end_step(self) -> None:
        if self._step is not None:
            self._lines.append(self._step[0])
            self._step = None

    def _update(self, min_seconds: float = 0.0) -> None:
        """Shows the current content, unless the last update was less than `min_seconds` ago."""
        from IPython.display import display

        now_seconds = time.perf_counter()
        if now_seconds - self._last_update_seconds < min_seconds:
            return
        self._last_update_seconds = now_seconds
        content = {"text/html": self._html(), "text/plain": "\n".join(self._lines)}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def _html(self) -> str:
        running = [self._step] if self._step is not None else []
        parts = [html.preformatted("\n".join(self._lines))] if self._lines else []
        parts += [_with_bar(text, fraction) for text, fraction in (*running, *self._activities)]
        return "\n".join(parts)


def _with_bar(text: str, fraction: float | None) -> str:
    if fraction is None:
        return html.paragraph(f"{text} ...")
    filled = f"<span style='display:block;height:100%;width:{fraction:.1%};background:currentColor;opacity:0.6'></span>"
    return html.paragraph(text, before=f"<span style='{_BAR}'>{filled}</span> ")
