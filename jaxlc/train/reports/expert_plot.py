"""The heat map of the loads of experts at several steps of a run. Needs matplotlib."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxlc.core.plot_style import new_figure, set_title

_MAX_PANELS = 6
_MAX_LOAD = 3.0  # multiple of the mean; the end of the color scale


def experts_figure(loads: Mapping[int, np.ndarray]) -> Figure:
    """Layers x experts at up to six steps, first and last included.

    Args:
      loads: as `read_loads` returns them, not empty.
    """
    steps = list(loads)
    shown = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, _MAX_PANELS).round().astype(int))]
    figure = new_figure(1.2 + 1.9 * len(shown), 2.8, dpi=150)
    panels = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    for axes, step in zip(panels, shown):
        image = axes.imshow(
            loads[step], aspect="auto", interpolation="nearest", cmap="cividis", vmin=0.0, vmax=_MAX_LOAD
        )
        axes.set_title(f"step {step:,}", loc="left", fontsize=9)
        axes.set_xlabel("expert")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    panels[0].set_ylabel("layer with experts")
    figure.colorbar(image, ax=panels, extend="max", fraction=0.05, pad=0.02, label="multiple of the mean")
    set_title(figure, "Loads of experts")
    return figure
