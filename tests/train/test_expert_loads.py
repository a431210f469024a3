"""The file and the picture of the loads of experts."""

import numpy as np
import pytest

from jaxlc.core.errors import UserError
from jaxlc.train.reports.plots import experts_figure
from jaxlc.train.reports.run_report import LOADS_FILE, is_recorded, read_loads, write_loads


@pytest.mark.parametrize(
    ("every", "end_step", "num_rows"), [(1, 8, 8), (1, 1000, 33), (10, 1005, 33), (100, 300, 3)]
)
def test_is_recorded_limits_the_rows_of_a_run(every, end_step, num_rows):
    logged = [step for step in range(1, end_step + 1) if step % every == 0 or step == end_step]
    recorded = [step for step in logged if is_recorded(step, every, end_step)]
    assert len(recorded) == num_rows and recorded[0] == logged[0] and recorded[-1] == end_step


def test_read_loads_of_a_resumed_run_keeps_the_later_rows(tmp_path):
    assert read_loads(tmp_path) == {}
    for step, load in ((1, 1.0), (3, 2.0), (5, 3.0), (3, 4.0)):
        write_loads(tmp_path, step, np.full((2, 4), load))
    assert {step: x[1, 3] for step, x in read_loads(tmp_path).items()} == {1: 1.0, 3: 4.0}


def test_read_loads_of_another_file_raises(tmp_path):
    (tmp_path / LOADS_FILE).write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=f"line 1 of .*{LOADS_FILE} has no loads"):
        read_loads(tmp_path)


def test_experts_figure_shows_first_and_last_step():
    loads = {step: np.random.default_rng(step).random((3, 8)) for step in range(1, 20)}
    titles = [axes.get_title(loc="left") for axes in experts_figure(loads).axes]
    # with the color scale
    assert titles[0] == "step 1" and titles[5] == "step 19" and len(titles) == 7
