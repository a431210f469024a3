"""The comparison of the facts of all processes: each fault gives one sentence, and equal machines
give none.
"""

import dataclasses
from collections.abc import Sequence

import pytest

from jaxlc.core.hardware import find
from jaxlc.preflight.findings import Facts, Needs, findings, table_lines

GIB = 2**30
GPU_BYTES = find("h100").memory_bytes
NEEDS = Needs(
    state_bytes=60 * GIB,
    memory_fraction=0.9,
    host_bytes_per_device=20 * GIB,
    host_bytes_per_process=16 * GIB,
    disk_bytes=300 * GIB,
)
VERSIONS = {"jax": "0.10.1", "driver": "570.86.15", "NCCL": "2.29.3"}


def machine(process_id: int, **changes: object) -> Facts:
    """A process with the 8 GPUs of its machine."""
    seconds = {"product": [5e-4] * 8, "copy": [4e-4] * 8}
    fine = Facts(
        process_id=process_id,
        host=f"node{process_id}",
        boot_id=f"boot{process_id}",
        versions=VERSIONS,
        has_infiniband=True,
        host_bytes=500 * GIB,
        gpus=[[f"GPU-{process_id}-{index}", GPU_BYTES, GPU_BYTES - GIB // 2] for index in range(8)],
        platform="gpu",
        device_kind="NVIDIA H100 80GB HBM3",
        num_devices=8,
        clock=[100.0, 101.0, 102.0 + 0.3 * process_id],
        directory_free_bytes=1000 * GIB,
        device_seconds=seconds,
    )
    return dataclasses.replace(fine, **changes)


def found(facts: Sequence[Facts], needs: Needs | None = NEEDS) -> list[str]:
    return findings(facts, needs, factor=1.5)


def with_fault(process_id: int, **changes: object) -> list[Facts]:
    return [machine(index, **(changes if index == process_id else {})) for index in range(4)]


def test_findings_of_equal_machines_are_empty():
    assert found([machine(index) for index in range(4)]) == []
    assert found([machine(0)]) == []


SLOW_PRODUCT = {"product": [*[5e-4] * 7, 9e-4], "copy": [4e-4] * 8}
SLOW_COPY = {"product": [5e-4] * 8, "copy": [*[4e-4] * 7, 2e-3]}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            dict(versions=VERSIONS | {"driver": "550.54.14"}),
            "the version of driver differs: 550.54.14 on process 2 on node2; 570.86.15 on processes 0, 1, 3 on node0,"
            " node1, node3; install the same on all machines",
        ),
        (
            dict(versions={**VERSIONS, "NCCL": "not found"}),
            "NCCL differs: not found on process 2 on node2",
        ),
        (dict(device_kind="NVIDIA H200"), "the devices differ: NVIDIA H200 on process 2 on node2"),
        (
            dict(clock=[192.0, 193.0, 194.6]),
            "the clock of process 2 on node2 is 92.0 s ahead of that of most processes; start NTP there",
        ),
        (dict(clock=[90.0, 91.0, 92.0]), "the clock of process 2 on node2 is 10.0 s behind"),
        (
            dict(host="node1", gpus=[]),
            "several machines have the host name node1: processes 1, 2 on node1",
        ),
        (dict(num_devices=7), "node2 has 7 devices of the run, and most machines have 8"),
        (
            dict(boot_id="boot1", gpus=[["GPU-1-3", GPU_BYTES, GPU_BYTES]]),
            "processes 1, 2 on node1, node2 use the same GPU GPU-1-3",
        ),
        (
            dict(locked_bytes=65536 * 1024),
            "`ulimit -l` is 65,536 KiB on process 2 on node2, and InfiniBand needs",
        ),
        (
            dict(gpus=[["GPU-2-0", GPU_BYTES, 40 * GIB]]),
            "a GPU of process 2 on node2 has 40.00 of 79.11 GiB free, and JAX's pool takes 71.20 GiB",
        ),
        (
            dict(gpus=[["GPU-2-0", 48 * GIB, 48 * GIB]]),
            "a GPU of process 2 on node2 has 48.00 GiB, of which JAX's pool takes 0.9, and the training state needs",
        ),
        (
            dict(host_bytes=180 * GIB),
            "180.00 GiB of free host memory, of which a run may use 90%, and the config needs up to 176.00 GiB",
        ),
        (
            dict(directory_problems={"write": "Read-only file system"}),
            "the workdir cannot be written: Read-only file system (process 2 on node2)",
        ),
        (
            dict(directory_problems={"read": "the file of process 3 is not there after 10 s"}),
            "the workdir is not shared: the file of process 3 is not there after 10 s (process 2 on node2)",
        ),
        (
            dict(directory_problems={"lock": "it gets a lock that process 0 holds"}),
            "the workdir has no working locks: it gets a lock that process 0 holds (process 2 on node2)",
        ),
        (
            dict(directory_free_bytes=GIB),
            "the workdir has 1.00 GiB free, and the checkpoints of the run need 300.00",
        ),
        (
            dict(device_seconds=SLOW_PRODUCT),
            "device 7 of process 2 on node2 is slow: a matrix product takes 0.90 ms, and 0.50 ms in the median",
        ),
        (
            dict(device_seconds=SLOW_COPY),
            "device 7 of process 2 on node2 is slow: a copy to the host takes 2.00",
        ),
    ],
)
def test_findings_name_process_and_fault(changes, sentence):
    (only,) = found(with_fault(2, **changes))
    assert sentence in only


def test_limits_that_do_not_matter_are_not_judged():
    """Without InfiniBand or on one machine nothing needs locked memory; pools of unified memory
    exceed the GPU.
    """
    low = dict(locked_bytes=2**16)
    assert found([machine(index, has_infiniband=False, **low) for index in range(4)]) == []
    assert found([machine(0, **low)]) == []
    facts = with_fault(2, gpus=[["GPU-2-0", GPU_BYTES, GIB]])
    assert len(found(facts)) == 1 and found(facts, needs=NEEDS._replace(memory_fraction=0.0)) == []


def test_table_marks_worst_values():
    facts = with_fault(
        2, device_seconds=SLOW_PRODUCT, host_bytes=90 * GIB, clock=[99.0, 100.0, 101.0]
    )
    head, *rows, legend = table_lines(facts)
    assert [word for line in rows for word in line.split() if word.endswith("*")] == [
        "90.00*", "-1.00*", "305*",
    ]  # fmt: skip
    assert "free host GiB" in head and "TFLOP/s" in head
    assert [line.split()[:2] for line in rows] == [
        [str(index), f"node{index}"] for index in range(4)
    ]
    assert legend == "* the worst of the column"


def test_table_of_many_processes_shows_the_worst():
    facts = [
        machine(index, host_bytes=(90 if index == 900 else 100) * GIB) for index in range(1024)
    ]
    lines = table_lines(facts)
    assert len(lines) < 80 and any(line.split()[:2] == ["900", "node900"] for line in lines)
    assert any("more processes without a worst value" in line for line in lines)
