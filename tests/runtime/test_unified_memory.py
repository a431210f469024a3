"""Unified memory: the environment variables that are set before JAX starts, and contradictions that
are refused.
"""

import subprocess
from pathlib import Path

import pytest

from jaxlc.config import RuntimeConfig
from jaxlc.core import processes
from jaxlc.core.errors import UserError
from jaxlc.runtime import memory, start
from jaxlc.runtime.memory import (
    Machine,
    find_machine,
    fraction_for,
    host_memory_bytes,
    prepare_unified,
)

GIB = 2**30
GRACE = Machine(("NVIDIA GH200 480GB",), 100 * GIB, 400 * GIB)
PCIE = Machine(("NVIDIA H100 80GB HBM3",) * 8, 80 * GIB, 2000 * GIB)
ON = RuntimeConfig(num_processes=1, unified_memory=True)


def prepared(
    machine: Machine, monkeypatch, config=ON, **environment: str
) -> tuple[dict[str, str], str]:
    monkeypatch.setattr(memory, "find_machine", lambda: machine)
    return environment, prepare_unified(config, environment)


def test_prepare_pool_is_gpu_memory_and_host_share(monkeypatch):
    environment, message = prepared(GRACE, monkeypatch)
    assert environment == {"TF_FORCE_UNIFIED_MEMORY": "1", "XLA_CLIENT_MEM_FRACTION": "4.6"}
    assert message == "unified memory: JAX's pool may take 4.6 times a GPU's memory, 460 GiB"
    assert fraction_for(PCIE) == 3.81  # 225 GiB of the host for each of 8


def test_prepare_configured_fraction_is_used(monkeypatch):
    config = RuntimeConfig(unified_memory=True, unified_memory_fraction=2.5)
    assert prepared(GRACE, monkeypatch, config)[0]["XLA_CLIENT_MEM_FRACTION"] == "2.5"
    unknown = Machine((), 0, GIB)
    assert (
        prepared(unknown, monkeypatch, config)[1]
        == "unified memory: JAX's pool may take 2.5 times a GPU's memory"
    )
    with pytest.raises(
        UserError, match="nvidia-smi does not report; set --config.runtime.unified_memory_fraction"
    ):
        prepared(unknown, monkeypatch)


def test_prepare_over_pcie_warns(monkeypatch):
    assert (
        "warning: NVIDIA H100 80GB HBM3 reaches its host over PCIe"
        in prepared(PCIE, monkeypatch)[1]
    )


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_prepare_users_fraction_takes_precedence(name, monkeypatch):
    """jaxlib refuses both names together."""
    environment, message = prepared(GRACE, monkeypatch, **{name: "3.5"})
    assert environment == {name: "3.5", "TF_FORCE_UNIFIED_MEMORY": "1"} and "3.5 times" in message
    with pytest.raises(
        UserError, match=f"{name}=0.9 contradicts config.runtime.unified_memory=True"
    ):
        prepared(GRACE, monkeypatch, **{name: "0.9"})
    with pytest.raises(
        UserError, match=f"{name}=3.5 contradicts config.runtime.unified_memory_fraction=4"
    ):
        prepared(
            GRACE,
            monkeypatch,
            RuntimeConfig(unified_memory=True, unified_memory_fraction=4.0),
            **{name: "3.5"},
        )


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("TF_FORCE_UNIFIED_MEMORY", "0", "=0 contradicts config.runtime.unified_memory=True"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "most", "=most contradicts"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", "=platform does not support unified memory"),
        (
            "XLA_PYTHON_CLIENT_ALLOCATOR",
            "cuda_async",
            "=cuda_async does not support unified memory",
        ),
    ],
)
def test_prepare_contradicting_variable_is_refused(name, value, words, monkeypatch):
    with pytest.raises(UserError, match=name + words) as error:
        prepared(GRACE, monkeypatch, **{name: value})
    assert "unset" in str(error.value)
    prepared(GRACE, monkeypatch)


def test_prepare_variables_are_read_by_jaxlib(monkeypatch):
    """This depends on the version of JAX."""
    from jaxlib import xla_client

    for name, value in prepared(GRACE, monkeypatch)[0].items():
        monkeypatch.setenv(name, value)
    assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == 4.6


def test_find_machine_reads_nvidia_smi(monkeypatch):
    lines = "NVIDIA GH200 480GB, 97871\nNVIDIA GH200 480GB, 97870\n"
    monkeypatch.setattr(memory.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(
        memory.subprocess,
        "run",
        lambda command, **_: subprocess.CompletedProcess(command, 0, lines, ""),
    )
    machine = find_machine()
    assert (
        machine[:2] == (("NVIDIA GH200 480GB",) * 2, 97_870 * 2**20)
        and machine.host_memory_bytes > 0
    )
    lines = "NVIDIA GB10, [N/A]\n"
    assert find_machine()[:2] == (("NVIDIA GB10",), 0)
    monkeypatch.setattr(memory.shutil, "which", lambda name: None)
    assert find_machine()[:2] == ((), 0)
    monkeypatch.setattr(processes, "memory_limits", lambda: [(2**30, 0), (2**40, 0)])
    assert find_machine().host_memory_bytes == 2**30  # of a container


def test_host_memory_counts_nodes_with_processors(tmp_path: Path):
    for index, (cpus, kibibytes) in enumerate([("0-71", 480 * 2**20), ("", 96 * 2**20), ("", 0)]):
        node = tmp_path / f"node{index}"
        node.mkdir()
        (node / "cpulist").write_text(cpus + "\n")
        (node / "meminfo").write_text(
            f"Node {index} MemTotal:       {kibibytes} kB\nNode {index} MemFree: 1 kB\n"
        )
    (tmp_path / "possible").write_text("0-2\n")
    assert host_memory_bytes(tmp_path) == 480 * GIB
    assert host_memory_bytes(tmp_path / "none") > 0  # without such a directory, from the system


def test_start_after_jax_without_unified_memory_is_refused(monkeypatch):
    monkeypatch.delenv("TF_FORCE_UNIFIED_MEMORY", raising=False)
    with pytest.raises(UserError, match="JAX has already started without unified memory"):
        start._check_started(ON, "gpu", 1, 1)
    start._check_started(ON, "cpu", 1, 1)
    monkeypatch.setenv("TF_FORCE_UNIFIED_MEMORY", "1")
    start._check_started(ON, "gpu", 1, 1)
