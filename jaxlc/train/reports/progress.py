"""Progress output of a run. Only the primary process prints.

A terminal has a live line, a notebook one display that is updated, and other outputs have plain
lines. A log file gets plain lines in all cases.
"""

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as LiveBars

from jaxlc.core import Update, paragraph, preformatted, progress_lines, reason_of
from jaxlc.core.files import displayed
from jaxlc.core.text import duration_text
from jaxlc.runtime import compilation_cache, watchdog

_MIN_SECONDS_BETWEEN_UPDATES = 0.25
_MAX_LINES = 1000  # of a notebook, which gets all of them with each update; the log has more
_BAR = "display:inline-block;width:12em;height:0.7em;border:1px solid currentColor;vertical-align:middle"


class NotebookDisplay:
    """Permanent lines, and below them the current step and activity, each with a progress bar."""

    def __init__(self):
        self._lines: list[str] = []
        # The text and the fraction of the current step, and of each activity, innermost last.
        self._step: list = []
        self._activities: list[list] = []
        self._handle = None  # created by the first update
        self._last_update_seconds = float("-inf")

    def log(self, *texts: str) -> None:
        """Adds permanent lines, below the line of the current step."""
        self._lines = [*self._lines, *self._step[:1], *texts][-_MAX_LINES:]
        self._step = []
        self._update()

    def step(self, text: str, fraction: float) -> None:
        """Replaces the line of the current step."""
        self._step = [text, fraction]
        self._update(_MIN_SECONDS_BETWEEN_UPDATES)

    @contextmanager
    def activity(self, what: str) -> Iterator[Update]:
        """Shows `what`; yields a function (done, total) that sets its progress bar."""
        bar: list = [what, None]
        self._activities.append(bar)
        self._update()

        def set_progress(done: int, total: int) -> None:
            bar[1] = done / total if total else None
            self._update(_MIN_SECONDS_BETWEEN_UPDATES)

        try:
            yield set_progress
        finally:
            self._activities.remove(bar)
            self._update()

    def close(self) -> None:
        """Shows the final state: the lines and the last step, without progress bars."""
        if self._handle is not None:
            self.log()

    def _update(self, min_seconds: float = 0.0) -> None:
        """Shows the current content, unless the last update was less than `min_seconds` ago."""
        from IPython.display import display

        now_seconds = time.perf_counter()
        if now_seconds - self._last_update_seconds < min_seconds:
            return
        self._last_update_seconds = now_seconds
        parts = [preformatted("\n".join(self._lines))] if self._lines else []
        parts += [_with_bar(*bar) for bar in (self._step, *self._activities) if bar]
        content = {"text/html": "\n".join(parts), "text/plain": "\n".join(self._lines)}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def _with_bar(text: str, fraction: float | None) -> str:
    if fraction is None:
        return paragraph(f"{text} ...")
    filled = f"<span style='display:block;height:100%;width:{fraction:.1%};background:currentColor;opacity:0.6'></span>"
    return paragraph(text, before=f"<span style='{_BAR}'>{filled}</span> ")


LOG_FILE = "log.txt"  # in the workdir


class Progress:
    """The progress of one run; a context manager that shows the live line while it is entered.

    Attributes:
      peak_flops_per_second: bf16 peak, over all devices; None if unknown, as for CPUs.
      seconds_to_first_step: from the start of the run to the end of its first step; None before.
    """

    def __init__(
        self,
        *,
        peak_flops_per_second: float | None,
        is_primary: bool,
        console: Console | None = None,
    ):
        self._is_primary = is_primary
        self._log_file: Path | None = None
        self._is_logged = is_primary  # False after an error, too
        self._unwritten = ""  # text for the file
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._console.quiet = not is_primary
        self._is_live = is_primary and self._console.is_terminal
        self._notebook = NotebookDisplay() if is_primary and self._console.is_jupyter else None
        self.peak_flops_per_second = peak_flops_per_second
        columns = (
            SpinnerColumn(),
            BarColumn(bar_width=12),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
        )
        self._bars = LiveBars(*columns, console=self._console, transient=True)
        self._steps_bar = None  # created at the first step
        self._start_seconds = time.perf_counter()
        self.seconds_to_first_step: float | None = None  # None before its end

    def start_stage(self, name: str, total_steps: int, flops_per_step: float | None) -> None:
        """Shows the steps of a stage from now on.

        Args:
          name: "" in a run without stages.
          total_steps: the step at which the stage ends.
          flops_per_step: model FLOPs with causal attention, over all devices; None if unknown.
        """
        self._stage = f"{name}: " if name else ""
        self._total_steps = total_steps
        self._flops_per_step = flops_per_step
        if self._steps_bar is not None:
            self._bars.update(self._steps_bar, total=total_steps)

    def first_step_ended(self, end_seconds: float) -> None:
        """Prints how long the run took until the end of its first step, a time of
        `time.perf_counter`; once.
        """
        if self.seconds_to_first_step is None:
            self.seconds_to_first_step = end_seconds - self._start_seconds
            self._waited_seconds = watchdog.phase_seconds()[watchdog.DATA]
            self.log(
                f"time to the end of the first step: {duration_text(self.seconds_to_first_step)}"
            )

    @property
    def waiting_share(self) -> float | None:
        """The share of the time since the first step, 0 to 1, in which the loop waited for data;
        None before. With asynchronous dispatch the devices still compute while it waits, so this is
        an upper bound of the time in which they are idle for lack of data.
        """
        if self.seconds_to_first_step is None:
            return None
        seconds = time.perf_counter() - self._start_seconds - self.seconds_to_first_step
        return (watchdog.phase_seconds()[watchdog.DATA] - self._waited_seconds) / seconds

    def __enter__(self) -> "Progress":
        self._append(f"START {shlex.join(sys.argv)} (JAX {jax.__version__})")
        if self._is_live:
            self._bars.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if error_type is not None:
            self._append(f"{error_type.__name__}: {error}")
        if self._is_live:
            self._bars.stop()
        if self._notebook is not None:
            self._notebook.close()

    def log(self, text: str) -> None:
        """Prints above the live line."""
        self._append(text)
        if self._notebook is not None:
            self._notebook.log(text)
        else:
            self._console.print(text, markup=False)

    def log_to(self, path: Path) -> None:
        """Appends to a file what was printed before this call, and what is printed from now on."""
        self._log_file = path if self._is_logged else None
        self._write()

    def _append(self, text: str) -> None:
        """Adds to the log; one line has the time before it."""
        if not self._is_logged:
            return
        stamp = "" if "\n" in text else time.strftime("%Y-%m-%d %H:%M:%S ")
        self._unwritten += f"{stamp}{text}\n"
        self._write()

    def _write(self) -> None:
        if (path := self._log_file) is None:
            return
        try:
            # names of files may be bytes that are not UTF-8
            with path.open("a", encoding="utf-8", errors="backslashreplace") as out:
                out.write(self._unwritten)
            self._unwritten = ""
        except OSError as error:  # the run goes on until its disk has no space for a checkpoint
            self._is_logged = False
            self._unwritten = ""
            self.log(
                f"warning: cannot write to {displayed(path)} ({reason_of(error)}); the log ends here"
            )

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Progress, and permanent lines before and after: compilation may take minutes, also
        without a terminal.
        """
        has_bar = self._is_live or self._notebook
        show = self._append if has_bar else self.log
        show(f"compiling {what} ...")
        start_seconds = time.perf_counter()
        with self.progress_bar(f"compiling {what}"), compilation_cache.watch() as came_from_cache:
            yield
            source = " (from the cache)" if came_from_cache() else ""
        self.log(f"compiled {what} in {time.perf_counter() - start_seconds:.1f} s{source}")

    def progress_bar(self, what: str) -> AbstractContextManager[Update]:
        """Shows a progress bar, or lines in a file; yields a function (done, total) that updates
        it.
        """
        if self._notebook is not None:
            return self._notebook.activity(what)
        if self._is_live:
            return self._live_bar(what)
        return progress_lines(what, is_shown=not self._console.quiet, log=self.log)

    @contextmanager
    def _live_bar(self, what: str) -> Iterator[Update]:
        bar = self._bars.add_task(what, total=None)
        try:
            yield lambda done, total: self._bars.update(bar, completed=done, total=total)
        finally:
            self._bars.remove_task(bar)

    def update(
        self,
        *,
        step: int,
        loss: float,
        tokens_per_second: float,
        step_seconds: float,
        flops_per_second_documents: float | None = None,
        **_,
    ) -> None:
        """Shows the progress after a step of the stage. Accepts a whole metrics row and ignores its
        other values.
        """
        utilization = ""
        if self._flops_per_step is not None:
            pairs = "documents"
            rate = flops_per_second_documents
            if rate is None:
                pairs = "causal"
                rate = self._flops_per_step / step_seconds
            peak = self.peak_flops_per_second
            share = f", {rate / peak:.1%} of the bf16 peak" if peak else ""
            utilization = f"  {flops_text(rate)} (model, {pairs}{share})"
        text = (
            f"{self._stage}step {step}/{self._total_steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
            f"{utilization}"
            f"  {duration_text((self._total_steps - step) * step_seconds)} left"
        )
        self._append(text)
        if self._is_live:
            if self._steps_bar is None:
                self._steps_bar = self._bars.add_task("", total=self._total_steps)
            self._bars.update(self._steps_bar, completed=step, description=text)
        elif self._notebook is not None:
            self._notebook.step(text, step / self._total_steps)
        else:
            self._console.print(text, markup=False)


def flops_text(flops_per_second: float) -> str:
    """Three significant digits and a unit: 5.43 GFLOP/s, 3.2 PFLOP/s."""
    units = (("P", 1e15), ("T", 1e12), ("G", 1e9))
    unit, size = next((pair for pair in units if flops_per_second >= pair[1]), units[-1])
    return f"{flops_per_second / size:.3g} {unit}FLOP/s"
