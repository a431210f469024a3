"""The file of the loads of experts."""

import json

import numpy as np
import pytest

from jaxlc.train.reports.run_report import LOADS_FILE, is_recorded, loads_row, write_loads


@pytest.mark.parametrize(
    ("every", "end_step", "num_rows"), [(1, 8, 8), (1, 1000, 33), (10, 1005, 33), (100, 300, 3)]
)
def test_is_recorded_limits_the_rows_of_a_run(every, end_step, num_rows):
    logged = [step for step in range(1, end_step + 1) if step % every == 0 or step == end_step]
    recorded = [step for step in logged if is_recorded(step, every, end_step)]
    assert len(recorded) == num_rows and recorded[0] == logged[0] and recorded[-1] == end_step


def test_write_loads_has_a_row_per_step_also_after_a_resume(tmp_path):
    for step, load in ((1, 0.123456), (3, 1.0), (4, 1.0), (3, 2.0)):
        write_loads(tmp_path, loads_row(step, np.full((2, 4), load)))
    rows = [json.loads(line) for line in (tmp_path / LOADS_FILE).read_text().splitlines()]
    assert rows == [
        dict(step=1, loads=[[0.1235] * 4] * 2),
        dict(step=3, loads=[[2.0] * 4] * 2),
    ]
