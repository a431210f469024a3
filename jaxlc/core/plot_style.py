"""Colors and style of all figures. Importing this module does not import matplotlib, which is slow
to import.
"""

import functools
import io
import itertools
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE = "#1f5fa8"
RED = "#d1495b"
TEAL = "#2a9d8f"
AMBER = "#e9a23b"
SKY = "#8fb4dc"
VIOLET = "#7a5ea8"
# secondary text and lines, background kernels, grid lines
GRAY, SILVER, FAINT = "#6b7280", "#9aa5b1", "#dde1e6"
CYCLE = (BLUE, RED, TEAL, AMBER, VIOLET, SKY, GRAY)  # colors of the lines or bars of one figure
_LINES = ("-", "--", ":", "-.")
HATCHES = ("", "///", "...", "xx")  # of bars, after each cycle of colors


def line_styles() -> "Iterator[dict[str, str]]":
    """Colors and line styles of the lines of a figure; the first 28 differ."""
    for linestyle in itertools.cycle(_LINES):
        for color in CYCLE:
            yield dict(color=color, linestyle=linestyle)


def new_figure(width: float, height: float, **options: Any) -> "Figure":
    """A matplotlib Figure that a notebook shows as a picture when it is the last value of a cell.

    It does not use pyplot, which would keep a reference to the figure and change the backend of the
    notebook.

    Args:
      width, height: in inches.
      options: further arguments of `matplotlib.figure.Figure`.
    """
    arguments: dict[str, Any] = {
        "figsize": (width, height),
        "dpi": 110,
        "layout": "constrained",
    } | options
    return _figure_class()(**arguments)


def set_title(figure: "Figure", text: str) -> None:
    """Sets the title of a whole figure, aligned to the left."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=10)


def style_axes(axes: "Axes", grid: Literal["x", "y", "both"]) -> None:
    """Removes the frame at the top and right, and draws faint grid lines behind the data.

    Args:
      grid: "x", "y" or "both": the axes whose ticks get a grid line.
    """
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=FAINT, linewidth=0.6)


_NOTEBOOK_DPI = 100


@functools.cache
def _figure_class() -> "type[Figure]":
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        """A Figure that IPython shows without pyplot, which would register a display function."""

        def _repr_png_(self) -> bytes:
            from PIL import Image  # matplotlib needs it too

            # A lower resolution than in files, and a palette: stored notebooks stay small.
            full, small = io.BytesIO(), io.BytesIO()
            self.savefig(full, format="png", bbox_inches="tight", dpi=_NOTEBOOK_DPI)
            palette = Image.open(full).convert("RGB").quantize(128, dither=Image.Dither.NONE)
            palette.save(small, format="png", optimize=True)
            return small.getvalue()

    return NotebookFigure
