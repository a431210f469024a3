import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from jaxlc.core.errors import UserError
from jaxlc.train.reports.metrics import (
    METRICS_FILE,
    MetricsLog,
    _RowFile,
    open_metrics,
    read_rows,
)

REPOSITORY = Path(__file__).parents[2]
EVALUATION_STEPS = (4, 8, 10)


def train(workdir: Path, first_step: int, last_step: int = 10) -> None:
    """Writes the rows of steps first_step .. last_step in the order of the loop."""
    log = open_metrics(workdir, resume_step=first_step - 1 or None, is_primary=True)
    for step in range(first_step, last_step + 1):
        log.write(step=step, loss=10.0 / step, learning_rate=0.1)
        if step in EVALUATION_STEPS:
            log.write(step=step, eval_loss=11.0 / step)
    log.close()


def scalars(workdir: Path) -> dict[tuple[str, int], float]:
    """(tag, step) -> value as TensorBoard shows them: a START session log hides earlier values from
    its step on.
    """
    shown = {}
    for path in sorted((workdir / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            # TFRecord: length, its crc, content, its crc
            length = int.from_bytes(content[:8], "little")
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            if event.HasField("session_log"):
                shown = {
                    (tag, step): value for (tag, step), value in shown.items() if step < event.step
                }
            for value in event.summary.value:
                assert (value.tag, event.step) not in shown
                shown[value.tag, event.step] = value.simple_value
    return shown


def test_metrics_log_writes_jsonl_and_tensorboard(tmp_path):
    train(tmp_path, 1, 4)
    assert read_rows(tmp_path / "metrics.jsonl") == [
        dict(step=1, loss=10.0, learning_rate=0.1),
        dict(step=2, loss=5.0, learning_rate=0.1),
        dict(step=3, loss=10 / 3, learning_rate=0.1),
        dict(step=4, loss=2.5, learning_rate=0.1),
        dict(step=4, eval_loss=2.75),
    ]
    assert scalars(tmp_path)["eval_loss", 4] == 2.75
    assert scalars(tmp_path)["loss", 2] == 5.0


@pytest.mark.parametrize(
    ("checkpoint_step", "killed_after_step"),
    [(c, k) for c in (0, 3, 4, 8, 10) for k in (3, 4, 7, 10) if c <= k],
)
def test_metrics_log_after_resume_equals_uninterrupted(
    tmp_path, checkpoint_step, killed_after_step
):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for workdir in (whole, resumed):
        workdir.mkdir()
    train(whole, 1)
    train(resumed, 1, killed_after_step)
    train(resumed, checkpoint_step + 1)
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert scalars(resumed) == scalars(whole)
    assert list(resumed.glob("*.new")) == []


def test_read_rows_with_truncated_last_line_skips_it(tmp_path):
    train(tmp_path, 1, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 3, "eval_l')
    assert len(read_rows(path)) == 3
    train(tmp_path, 4, 4)
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4, 4]


def test_open_metrics_for_new_run_drops_all_rows(tmp_path):
    train(tmp_path, 1, 3)
    log = open_metrics(tmp_path, resume_step=3, is_primary=True)
    log.write(step=0, eval_loss=1.0)  # an evaluation before the first step
    log.close()
    log = open_metrics(tmp_path, resume_step=None, is_primary=True)
    log.close()
    assert read_rows(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("happens", ["deleted", "replaced"])
def test_write_after_the_file_is_deleted_keeps_all_rows(tmp_path, happens):
    warnings: list[str] = []
    log, path = (
        open_metrics(tmp_path, resume_step=None, is_primary=True, warn=warnings.append),
        tmp_path / METRICS_FILE,
    )
    log.write(step=1, loss=1.0)
    path.unlink()
    if happens == "replaced":
        path.write_text("")
    log.for_stage("b").write(step=2, loss=2.0)
    log.write(step=3, loss=3.0)
    log.close()
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]
    assert len(warnings) == 1 and str(path) in warnings[0]


def test_open_metrics_adds_rows_of_the_checkpoint_and_drops_repeated_evaluations(tmp_path):
    train(tmp_path, 1, 4)
    rows = [dict(step=step, loss=10.0 / step, learning_rate=None) for step in (4, 5)]
    rows.append({"step": 5, "rollouts/reward": 0.5})
    log = open_metrics(
        tmp_path, resume_step=5, is_primary=True, rows=rows, stage="b", repeated=["eval_loss"]
    )
    log.close()
    assert read_rows(tmp_path / METRICS_FILE)[4:] == [
        dict(step=4, eval_loss=2.75), dict(step=5, stage="b", loss=2.0, learning_rate=None),
        {"step": 5, "stage": "b", "rollouts/reward": 0.5},
    ]  # fmt: skip
    open_metrics(
        tmp_path, resume_step=4, is_primary=True, rows=rows[:1], repeated=["eval_loss"]
    ).close()
    assert [row["step"] for row in read_rows(tmp_path / METRICS_FILE)] == [1, 2, 3, 4]


def test_write_flushes_each_row(tmp_path):
    log = open_metrics(tmp_path, resume_step=None, is_primary=True)
    log.write(step=1, loss=2.0)
    assert read_rows(tmp_path / "metrics.jsonl") == [dict(step=1, loss=2.0)]
    assert scalars(tmp_path) == {("loss", 1): 2.0}
    log.close()


def test_write_that_fails_names_the_file(tmp_path):
    log = MetricsLog(_RowFile(Path("/dev/full"), pytest.fail))
    with pytest.raises(OSError, match="/dev/full"):
        log.write(step=1, loss=1.0)


def test_write_with_nan_or_inf_writes_null(tmp_path):
    log = open_metrics(tmp_path, resume_step=None, is_primary=True)
    log.write(step=1, loss=math.nan, grad_norm=math.inf)
    log.close()
    assert (
        tmp_path / "metrics.jsonl"
    ).read_text() == '{"step": 1, "loss": null, "grad_norm": null}\n'


def test_write_on_other_processes_writes_nothing(tmp_path):
    log = open_metrics(tmp_path, resume_step=None, is_primary=False)
    log.write(step=1, loss=1.0)
    log.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", ["not json", '{"loss": 1.0}', "[1]", "\0\0"])
def test_read_rows_with_invalid_line_raises_with_line_number(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{bad}\n{{"step": 2}}\n')
    with pytest.raises(UserError, match=f"line 2 of {path} .* remove that line"):
        read_rows(path)


WRITE_FOREVER = """
import itertools, sys
from jaxlc.train.reports.metrics import open_metrics
log = open_metrics(sys.argv[1], resume_step=None, is_primary=True)
for step in itertools.count(1):
    log.write(step=step, loss=1.0 / step, long_value=0.123456789 * step)
    print(step, flush=True)
"""


def test_metrics_log_killed_while_writing_is_readable(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE_FOREVER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    while int(process.stdout.readline()) < 50:
        pass
    process.send_signal(signal.SIGKILL)
    printed_steps = [50, *map(int, process.stdout.read().split())]
    process.communicate()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert max(printed_steps) <= len(rows) <= max(printed_steps) + 1
    assert (
        max(printed_steps) <= max(step for _, step in scalars(tmp_path)) <= max(printed_steps) + 1
    )

    log = open_metrics(tmp_path, resume_step=40, is_primary=True)
    log.write(step=41, loss=1.0)
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 42))
