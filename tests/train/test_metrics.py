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
from jaxlc.train.metrics import MetricsLog, read_rows

REPOSITORY = Path(__file__).parents[2]
EVALUATION_STEPS = (4, 8, 10)


def train(workdir: Path, first_step: int, last_step: int = 10) -> None:
    """Writes what steps first_step .. last_step write, as the loop does: all rows of a step before its checkpoint."""
    log = MetricsLog(workdir, is_primary=True)
    log.rewind(first_step - 1)
    for step in range(first_step, last_step + 1):
        log.write(step=step, loss=10.0 / step, learning_rate=0.1)
        if step in EVALUATION_STEPS:
            log.write(step=step, eval_loss=11.0 / step)
    log.close()


def scalars(workdir: Path) -> dict[tuple[str, int], float]:
    """(tag, step) -> value as TensorBoard shows them: a file's START session log hides what is there from its step."""
    shown = {}
    for path in sorted((workdir / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            length = int.from_bytes(content[:8], "little")  # TFRecord: length, its crc, content, its crc
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            if event.HasField("session_log"):
                shown = {(tag, step): value for (tag, step), value in shown.items() if step < event.step}
            for value in event.summary.value:
                assert (value.tag, event.step) not in shown
                shown[value.tag, event.step] = value.simple_value
    return shown


def test_rows_and_scalars(tmp_path):
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
    ("checkpoint_step", "killed_after_step"), [(c, k) for c in (0, 3, 4, 8, 10) for k in (3, 4, 7, 10) if c <= k]
)
def test_a_resumed_log_equals_an_uninterrupted_one(tmp_path, checkpoint_step, killed_after_step):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for workdir in (whole, resumed):
        workdir.mkdir()
    train(whole, 1)
    train(resumed, 1, killed_after_step)
    train(resumed, checkpoint_step + 1)
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert scalars(resumed) == scalars(whole)
    assert list(resumed.glob("*.new")) == []


def test_a_torn_last_line_is_dropped(tmp_path):
    train(tmp_path, 1, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 3, "eval_l')
    assert len(read_rows(path)) == 3
    train(tmp_path, 4, 4)
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4, 4]


def test_a_new_run_starts_empty(tmp_path):
    train(tmp_path, 1, 3)
    log = MetricsLog(tmp_path, is_primary=True)
    log.rewind(0)
    log.close()
    assert read_rows(tmp_path / "metrics.jsonl") == []


def test_a_row_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    log = MetricsLog(tmp_path, is_primary=True)
    log.rewind(0)
    log.write(step=1, loss=2.0)
    assert read_rows(tmp_path / "metrics.jsonl") == [dict(step=1, loss=2.0)]
    assert scalars(tmp_path) == {("loss", 1): 2.0}
    log.close()


def test_nan_is_null(tmp_path):
    log = MetricsLog(tmp_path, is_primary=True)
    log.rewind(0)
    log.write(step=1, loss=math.nan, grad_norm=math.inf)
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": null, "grad_norm": null}\n'


def test_only_the_primary_writes(tmp_path):
    log = MetricsLog(tmp_path, is_primary=False)
    log.rewind(0)
    log.write(step=1, loss=1.0)
    log.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", ["not json", '{"loss": 1.0}', "[1]", "\0\0"])
def test_a_bad_line_is_named(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{bad}\n{{"step": 2}}\n')
    with pytest.raises(UserError, match=f"line 2 of {path} .* remove that line"):
        read_rows(path)


WRITE_FOREVER = """
import itertools, sys
from jaxlc.train.metrics import MetricsLog
log = MetricsLog(sys.argv[1], is_primary=True)
log.rewind(0)
for step in itertools.count(1):
    log.write(step=step, loss=1.0 / step, text_to_tear=0.123456789 * step)
    print(step, flush=True)
"""


def test_killed_while_writing(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE_FOREVER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    while int(process.stdout.readline()) < 50:
        pass
    process.send_signal(signal.SIGKILL)
    told = [50, *map(int, process.stdout.read().split())]
    process.communicate()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert max(told) <= len(rows) <= max(told) + 1
    assert max(told) <= max(step for _, step in scalars(tmp_path)) <= max(told) + 1

    log = MetricsLog(tmp_path, is_primary=True)
    log.rewind(40)
    log.write(step=41, loss=1.0)
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 42))
