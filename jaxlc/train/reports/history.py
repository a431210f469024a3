"""The metrics of a run as columns."""

import statistics
from collections.abc import Sequence

import numpy as np

from jaxlc.core import html
from jaxlc.train.reports.metrics import Row

_SHOWN_ROWS = 5  # at the start and at the end of a table


class History(dict[str, np.ndarray]):
    """The rows of metrics.jsonl as columns: a dictionary of float64 arrays of equal length, "step" int64, "stage" str.

    Missing and non-finite values are NaN. `pandas.DataFrame(history)` gives a data frame.
    """

    def __init__(self, rows: Sequence[Row]):
        names = dict.fromkeys(["step", *(name for row in rows for name in row)])  # in the order of their first use
        super().__init__({name: _column([row.get(name) for row in rows], name) for name in names})

    @property
    def num_rows(self) -> int:
        """The length of each column."""
        return len(self["step"])

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of the rows that have a finite value of `name`; both empty if there are none."""
        if name not in self:
            return np.zeros(0, np.int64), np.zeros(0)
        is_finite = np.isfinite(self[name])
        return self["step"][is_finite], self[name][is_finite]

    @property
    def loss_unit(self) -> str:
        """The unit of the training loss; losses of post-training have none."""
        return "" if "ratio" in self or "margin" in self else "nats per token"

    def median(self, name: str) -> float | None:
        """The median of the finite values of `name`, the upper one of an even number; None if there are none."""
        values = self.column(name)[1].tolist()
        return statistics.median_high(values) if values else None

    def __repr__(self) -> str:
        losses = self.column("loss")[1]
        loss = f", loss {losses[0]:.3f} -> {losses[-1]:.3f}" if len(losses) else ""
        return f"History({self.num_rows} rows: {', '.join(self)}{loss})"

    def _repr_html_(self) -> str:
        indices = list(range(self.num_rows))
        if self.num_rows > 2 * _SHOWN_ROWS:
            indices = [*indices[:_SHOWN_ROWS], None, *indices[-_SHOWN_ROWS:]]
        rows = [["…" if i is None else _cell(column[i]) for column in self.values()] for i in indices]
        return html.table(list(self), rows, caption=f"{self.num_rows} rows of metrics.jsonl")


def _column(values: list, name: str) -> np.ndarray:
    if name == "step":
        return np.array(values, np.int64)
    if name == "stage":
        return np.array(values, np.str_)
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _cell(value) -> str:
    if isinstance(value, str):
        return value
    if np.isnan(value):
        return ""
    return f"{value:,}" if isinstance(value, np.integer) else f"{value:,.4g}"
