"""The heat map of the times of processes and devices over the steps of a run. Needs matplotlib."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxlc.core.plot_style import new_figure, set_title
from jaxlc.runtime.phase_board import DEVICES
from jaxlc.train.stragglers import COPY, PRODUCT, Times, times_of

_MAX_PERCENT = 20.0  # of the time; the end of the color scale of phases
_MAX_RATIO = 2.0  # to the median; the same of devices


def times_figure(measurements: Sequence[Sequence[Times]]) -> Figure | None:
    """A panel for each kind of time: rows are processes or devices, columns are measurements.

    Phases are shown as a share of the time, products and copies as a multiple of the median of all devices.

    Args:
      measurements: as `read_times` returns them.
    Returns:
      None if nothing can be compared: there is one process with one device.
    """
    causes = [PRODUCT, COPY, *(measurements[0][0].phases if measurements else ())]
    panels = {}
    for cause in causes:
        values = _values(measurements, cause)
        if len(values) > 1 and np.nanmax(values, initial=0.0) > 0:
            panels[cause] = values
    if not panels:
        return None
    figure = new_figure(7.5, 0.6 + 1.7 * len(panels), dpi=150)
    steps = [rows[0].step for rows in measurements]
    for axes, (cause, values) in zip(np.atleast_1d(figure.subplots(len(panels), sharex=True)), panels.items()):
        is_device = cause in (PRODUCT, COPY)
        image = axes.imshow(
            values,
            aspect="auto",
            interpolation="nearest",
            cmap="YlOrRd",
            vmin=1.0 if is_device else 0.0,
            vmax=_MAX_RATIO if is_device else 100.0 if cause == DEVICES else _MAX_PERCENT,
            extent=(-0.5, len(steps) - 0.5, len(values) - 0.5, -0.5),
        )
        axes.set_ylabel("device" if is_device else "process")
        axes.set_title(f"{cause}: {'multiple of the median' if is_device else '% of the time'}", loc="left", fontsize=9)
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        figure.colorbar(image, ax=axes, extend="max", fraction=0.05, pad=0.02)
    ticks = np.unique(np.linspace(0, len(steps) - 1, 8).round().astype(int))
    axes.set(xlabel="step", xticks=ticks, xticklabels=[str(steps[tick]) for tick in ticks])
    set_title(figure, "Times of processes and devices")
    return figure


def _values(measurements: Sequence[Sequence[Times]], cause: str) -> np.ndarray:
    """[processes or devices, measurements]; NaN where nothing was measured."""
    columns = [[(row.seconds, seconds) for row, _, seconds in times_of(rows, cause)] for rows in measurements]
    values = np.full((max(map(len, columns), default=0), len(columns)), np.nan)
    for index, column in enumerate(columns):
        if cause in (PRODUCT, COPY):
            median = np.median([seconds for _, seconds in column]) if column else 1.0
            values[: len(column), index] = [seconds / max(median, 1e-9) for _, seconds in column]
        else:
            values[: len(column), index] = [100 * seconds / max(window, 1e-9) for window, seconds in column]
    return values
