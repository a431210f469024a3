"""CUDA unified memory as JAX's memory pool: arrays that do not fit into GPU memory spill to host memory.

Intended for GPUs with a coherent link to their CPU (Grace Hopper, Grace Blackwell). The pool is larger than the GPU's
memory, and the driver migrates pages. XLA reads TF_FORCE_UNIFIED_MEMORY when it creates its allocator, and exceeds the
GPU's memory only if it is set (xla/pjrt/gpu/gpu_helpers.cc, CreateBFCAllocator). The plugins of JAX 0.10.1 and 0.12.0
both read this variable.
"""

import math
import os
import shutil
import subprocess
from collections.abc import MutableMapping
from pathlib import Path
from typing import NamedTuple

from jaxlc.config import RuntimeConfig
from jaxlc.core.errors import UserError
from jaxlc.core.hardware import is_coherent_with_host

# Share of host memory that the pools of all GPUs may take together; the plan uses it too (plan/memory.py).
HOST_SHARE = 0.9

_FORCE = "TF_FORCE_UNIFIED_MEMORY"
# The pool's size relative to the GPU's memory. jaxlib 0.10.1 to 0.12.0.1 reads both variables (xla_client.py), reports
# the second one as deprecated, and rejects the combination.
_FRACTION, _OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
_POOLED = ("", "default", "bfc")  # the other allocators ignore _FORCE


class Machine(NamedTuple):
    gpu_kinds: tuple[str, ...]  # the driver's names, such as "NVIDIA GH200 480GB"; () if unknown
    gpu_memory_bytes: int  # of the smallest GPU; 0 if unknown
    host_memory_bytes: int  # without GPU memory


def prepare(config: RuntimeConfig, environment: MutableMapping[str, str]) -> str:
    """Sets XLA's environment for unified memory on GPUs, before JAX starts; returns a line that describes it.

    Raises:
      UserError: the user's environment contradicts the config, or the GPUs' memory is unknown.
    """
    machine = find_machine()
    _check_environment(environment)
    fraction = _users_fraction(config, environment)
    if fraction is None:
        fraction = config.unified_memory_fraction or fraction_for(machine)
        environment[_FRACTION] = f"{fraction:g}"
    environment[_FORCE] = "1"
    line = f"unified memory: JAX's pool may take {fraction:g} times a GPU's memory"
    if machine.gpu_memory_bytes:
        line += f", {fraction * machine.gpu_memory_bytes / 2**30:.0f} GiB"
    over_pcie = sorted({kind for kind in machine.gpu_kinds if not is_coherent_with_host(kind)})
    if over_pcie:
        line += f"; warning: {over_pcie[0]} is attached over PCIe, so pages that spill to the host are very slow"
    return line


def is_on(environment: MutableMapping[str, str]) -> bool:
    return environment.get(_FORCE, "").lower() in ("1", "true")


def fraction_for(machine: Machine) -> float:
    """The pool size relative to GPU memory with which all pools together use HOST_SHARE of host memory.

    Raises:
      UserError: the GPUs' memory is unknown.
    """
    if not machine.gpu_memory_bytes:
        raise UserError(
            "config.runtime.unified_memory needs the size of GPU memory, which nvidia-smi does not report: set"
            " --config.runtime.unified_memory_fraction, for example 4 for a pool of 4 times the GPU's memory"
        )
    host_bytes = HOST_SHARE * machine.host_memory_bytes / len(machine.gpu_kinds)
    return math.floor(100 + 100 * host_bytes / machine.gpu_memory_bytes) / 100


def find_machine() -> Machine:
    """Describes this machine from nvidia-smi and /sys, without starting JAX."""
    query = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    lines = ()
    if shutil.which(query[0]):
        process = subprocess.run(query, capture_output=True, text=True, timeout=60)
        lines = process.stdout.splitlines() if process.returncode == 0 else ()
    kinds, mebibytes = zip(*(line.rsplit(", ", 1) for line in lines)) if lines else ((), ())
    is_known = bool(mebibytes) and all(text.isdigit() for text in mebibytes)
    smallest = min(map(int, mebibytes)) * 2**20 if is_known else 0
    return Machine(tuple(kinds), smallest, host_memory_bytes(Path("/sys/devices/system/node")))


def host_memory_bytes(nodes: Path) -> int:
    """Memory of the NUMA nodes with processors. On Grace machines GPU memory appears as NUMA nodes too, and is part of
    the system's total."""
    total = 0
    for node in nodes.glob("node[0-9]*"):
        if (node / "cpulist").read_text().strip():
            line = next(line for line in (node / "meminfo").read_text().splitlines() if "MemTotal:" in line)
            total += int(line.split()[-2]) * 1024
    return total or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_environment(environment: MutableMapping[str, str]) -> None:
    if _FORCE in environment and not is_on(environment):
        raise UserError(
            f"{_FORCE}={environment[_FORCE]} contradicts config.runtime.unified_memory=True: unset one of them"
        )
    allocator = environment.get(_ALLOCATOR, "")
    if allocator.lower() not in _POOLED:
        raise UserError(f"{_ALLOCATOR}={allocator} does not support config.runtime.unified_memory: unset it")


def _users_fraction(config: RuntimeConfig, environment: MutableMapping[str, str]) -> float | None:
    """The fraction in the environment, if it agrees with the config; None if it is unset."""
    name = next((name for name in (_FRACTION, _OLD_FRACTION) if environment.get(name)), None)
    if name is None:
        return None
    configured = config.unified_memory_fraction
    try:
        given = float(environment[name])
    except ValueError:
        given = 0.0  # not a number, which contradicts any config
    if given != configured if configured else not given > 1:
        raise UserError(
            f"{name}={environment[name]} contradicts config.runtime.unified_memory"
            + (f"_fraction={configured:g}" if configured else "=True, which needs more than 1")
            + ": unset it"
        )
    return given
