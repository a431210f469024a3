"""The metrics of a run as columns."""

import numpy as np
import pytest

from jaxlc.train.reports.metrics import History

ROWS = [
    dict(step=0, eval_loss=9.0),
    dict(step=1, loss=4.0),
    dict(step=2, loss=None),
    dict(step=3, loss=2.0),
]


def test_column_has_the_finite_values_and_their_steps():
    history = History(ROWS)
    steps, losses = history.column("loss")
    assert (steps.tolist(), losses.tolist()) == ([1, 3], [4.0, 2.0])
    assert list(history) == ["step", "eval_loss", "loss"] and history.num_rows == 4
    assert np.isnan(history["loss"][[0, 2]]).all()
    assert [len(values) for values in history.column("unknown")] == [0, 0]


@pytest.mark.parametrize(
    ("values", "expected"), [([], None), ([3.0], 3.0), ([1.0, 5.0], 5.0), ([9.0, 1.0, 2.0], 2.0)]
)
def test_median_is_the_upper_middle_value(values, expected):
    rows = [dict(step=step, speed=value) for step, value in enumerate(values)]
    assert History([*rows, dict(step=9)]).median("speed") == expected
