"""What a process finds on its own machine, and the checks of the shared directory with faults in
its file system.
"""

import errno
import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from jaxlc.config import defaults, load
from jaxlc.preflight import check as shared_directory
from jaxlc.preflight import findings
from jaxlc.preflight.findings import (
    Facts,
    may_lock_memory,
    needs_of,
    read_facts,
    with_visible_gpus,
)
from jaxlc.runtime import memory as memory_pools
from jaxlc.step.memory import pinned_bytes

GIB = 2**30


def check(*directories: Path) -> list[dict[str, str]]:
    """The problems of each process; one thread per process."""
    barrier, num_processes = threading.Barrier(len(directories)), len(directories)

    def run(process_id: int) -> dict[str, str]:
        return shared_directory.check_directory(
            directories[process_id],
            "token",
            process_id,
            num_processes,
            lambda name: barrier.wait(60) and None,
        )[0]

    with ThreadPoolExecutor(num_processes) as pool:
        return list(pool.map(run, range(num_processes)))


def test_shared_directory_has_no_problems_and_no_files_left(tmp_path):
    assert check(tmp_path / "run", tmp_path / "run", tmp_path / "run") == [{}] * 3
    assert list((tmp_path / "run").iterdir()) == []
    assert check(tmp_path / "one") == [{}]


def test_directories_of_two_machines_are_not_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_directory, "_VISIBLE_SECONDS", 0.0)
    first, second = check(tmp_path / "a", tmp_path / "b")
    assert first == {"read": "the file of process 1 is not there after 0 s"}
    assert second == {"read": "the file of process 0 is not there after 0 s"}
    assert [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()] == []


def test_directory_that_is_not_writable_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_directory, "_VISIBLE_SECONDS", 0.0)
    (tmp_path / "file").write_text("")
    first, second = check(tmp_path, tmp_path / "file" / "run")
    assert second == {"write": "Not a directory"} and first["read"].startswith(
        "the file of process 1 is not there"
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errno.ENOLCK, "the file system has no locks"),
        (errno.EIO, "Input/output error"),
        (0, "it gets a lock that"),
    ],
)
def test_broken_locks_are_named(tmp_path, monkeypatch, error, reason):
    """Error 0: locks have no effect between the processes."""

    def flock(file: object, operation: int) -> None:
        if error:
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", flock)
    problems = check(tmp_path, tmp_path)
    assert any(reason in problem.get("lock", "") for problem in problems), problems


def test_facts_are_read_without_gpu_and_survive_json(monkeypatch):
    """The GPUs of CUDA_VISIBLE_DEVICES count only."""
    own = read_facts()
    assert (
        own.versions["jax"] == jax.__version__
        and own.versions["driver"] == "not found"
        and own.host_bytes > 0
    )
    rows = [[str(index), f"GPU-{index}a", "81559", "81000", "570.86.15"] for index in range(4)]
    monkeypatch.setattr(findings, "query_gpus", lambda *fields: rows)
    own = read_facts()
    assert own.versions["driver"] == "570.86.15"
    assert own.gpus == [[f"GPU-{index}a", 81559 * 2**20, 81000 * 2**20] for index in range(4)]
    for visible, indices in (("1,3", (1, 3)), ("GPU-2", (2,))):
        kept = with_visible_gpus(own, {"CUDA_VISIBLE_DEVICES": visible}).gpus
        assert kept == [own.gpus[index] for index in indices]
    assert with_visible_gpus(own, {}) == own == Facts.from_json(own.to_json())


def test_capability_ipc_lock_is_read():
    assert may_lock_memory("Name: x\nCapEff:\t0000000000004000\n")
    assert not may_lock_memory("Name: x\nCapEff:\t00000000a80425fb\n")


def small_config(**memory: object):
    config = defaults()
    config.mesh.update(context=8)
    config.model.update(
        num_layers=2, model_dim=64, ffn_dim=128, num_heads=8, num_kv_heads=8, head_dim=8
    )
    config.memory.update(memory)
    return load(config)


def test_needs_are_those_of_the_run(tmp_path):
    """Host memory has the pools that a run makes and a copy of the state, and on CPU the state
    itself.
    """
    config = small_config(optimizer="host")
    on_cpu, on_gpu = (needs_of([config], tmp_path, platform) for platform in ("cpu", "gpu"))
    state = needs_of([small_config()], tmp_path, "cpu").state_bytes
    assert (on_cpu.host_bytes_per_device, on_cpu.host_bytes_per_process) == (2 * state, 0)
    pool = memory_pools.host_pool_bytes(config.runtime, pinned_bytes(config).pooled)
    assert on_gpu.host_bytes(8, 2) == 8 * (pool + state) + 2 * memory_pools.STAGING_BYTES
    # two are kept while a third is written
    assert on_cpu.disk_bytes == on_gpu.disk_bytes >= 3 * 8 * 0.9 * state
    for step in (1, 2):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "checkpoints" / str(step) / "_CHECKPOINT_METADATA").write_text("{}")
    assert 3 * needs_of([config], tmp_path, "cpu").disk_bytes == on_cpu.disk_bytes
