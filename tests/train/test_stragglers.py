"""Slow processes and devices are named, with the cause."""

import json
from pathlib import Path

import pytest

from jaxlc.train import stragglers
from jaxlc.train.reports.metrics import read_rows
from jaxlc.train.stragglers import Times, slow_ones
from tests.train import runs

# The data of process 1 is slow, and process 0 copies its checkpoints slowly.
_SLOW_PROCESSES = """
import time
import orbax.checkpoint as ocp
from jaxlc.train import loop, stragglers

stragglers._MAX_SHARE = 1e9
IS_FIRST = "--config.runtime.process_id=0" in __import__("sys").argv
phases = loop.watchdog.phases
serialize = ocp.type_handlers.ArrayHandler.serialize

def slow_phases(name, stream, **options):
    def slow():
        for item in stream:
            if not IS_FIRST:
                time.sleep(1.0)
            yield item
    return phases(name, slow(), **options)

async def slow_serialize(self, *args, **options):
    if IS_FIRST:
        time.sleep(2.0)
    return await serialize(self, *args, **options)

loop.watchdog.phases = slow_phases
ocp.type_handlers.ArrayHandler.serialize = slow_serialize
"""


def row(process_id: int, product: float = 0.001, data: float = 0.0, seconds: float = 10.0) -> Times:
    causes = ("devices", "callback", "export", "checkpoint copy", "checkpoint write")
    devices = {"product": [0.001, product], "copy": [0.0005, 0.0005]}
    return Times(
        process_id,
        f"node{process_id}",
        40,
        seconds,
        devices,
        dict.fromkeys(causes, 0.0) | {"data": data},
    )


def test_slow_ones_names_device_and_phase():
    rows = [row(0), row(1, product=0.002), row(2, data=3.0), row(3, data=0.1)]
    data, product = slow_ones(rows, 1.5, 2e-4)
    assert (data.times.process_id, data.cause, data.device) == (2, "data", None)
    assert (product.times.process_id, product.cause, product.device, product.ratio) == (
        1,
        "product",
        1,
        2.0,
    )
    assert stragglers._line(product) == (
        "step 40: device 1 of process 1 on node1 is slow: a fixed matrix product takes 2.00 ms, and 1.00 ms in the"
        " median of all devices"
    )


@pytest.mark.parametrize(
    "rows",
    [
        [row(0)],
        [row(0), row(1, product=0.0011)],  # not slower by the factor
        [row(0), row(1, data=0.1)],  # 1% of the time
        [row(0, data=3.0), row(1, data=3.0)],  # all wait equally
    ],
)
def test_slow_ones_without_stragglers_is_empty(rows):
    assert slow_ones(rows, 1.5, 2e-4) == []


@pytest.mark.heavy
def test_run_of_two_processes_names_the_slow_ones(tmp_path):
    path = runs.write_config(tmp_path)
    slow: Path = path.with_name("slow.py")
    slow.write_text(_SLOW_PROCESSES + path.read_text())
    settings = dict(
        runtime__straggler_every_steps=4, train__eval_every_steps=0, model__num_layers=1
    )
    output, _ = [runs.finish(run) for run in runs.start_pair(slow, tmp_path / "run", **settings)]
    assert "step 4: process 1 on " in output and " is slow: data took " in output, output
    assert "process 0 on " in output and " is slow: checkpoint copy took " in output, output
    assert "checkpoint write" not in output  # the processes wait for each other in it
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert {row["slowest/process"] for row in rows if "slowest/process" in row} <= {0, 1}
    assert any(row.get("slowest/ratio", 0) > 1.5 for row in rows)
    assert all(row["checkpoint/seconds"] > 0 for row in rows if row["step"] in (5, 9))
    lines = (tmp_path / "run" / stragglers.TIMES_FILE).read_text().splitlines()
    times = [[Times(**row) for row in json.loads(line)] for line in lines]
    assert [rows[0].step for rows in times][:2] == [4, 8] and len(times[0]) == 2
    assert all(
        len(process.devices["product"]) == 4 and process.phases["devices"] > 0
        for process in times[0]
    )
