"""CUDA unified memory as JAX's memory pool: arrays that do not fit into GPU memory are in host memory.

It is meant for GPUs with a coherent link to their CPU (Grace Hopper, Grace Blackwell). The pool is larger than the
memory of the GPU, and the driver migrates pages. XLA reads TF_FORCE_UNIFIED_MEMORY when it creates its allocator, and
allocates more than the GPU's memory only if it is set (xla/pjrt/gpu/gpu_helpers.cc, CreateBFCAllocator). The plugins of
JAX 0.10.1 and 0.12.0 both read this name.
"""

import contextlib
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

# The share of host memory that the pools of all its GPUs may use; plan/memory.py uses it too.
HOST_SHARE = 0.9

_FORCE = "TF_FORCE_UNIFIED_MEMORY"
# The pool's size as a fraction of the GPU's memory. jaxlib 0.10.1 to 0.12.0.1 reads both names (xla_client.py), reports
# the second as deprecated, and refuses both together.
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
POOLED = ("", "default", "bfc")  # other allocators ignore the fraction and _FORCE


class Machine(NamedTuple):
    gpu_kinds: tuple[str, ...]  # names from the driver, e.g. "NVIDIA GH200 480GB"; () if unknown
    gpu_memory_bytes: int  # memory of the GPU with the least; 0 if unknown
    host_memory_bytes: int  # without the GPUs' memory


def prepare(config: RuntimeConfig, environment: MutableMapping[str, str]) -> str:
    """Sets the environment variables for `config.unified_memory` on GPUs; returns a line that reports the pool's size.

    Raises:
      UserError: the user's environment variables contradict the config, or the GPUs' memory is unknown.
    """
    machine = find_machine()
    _check_environment(environment)
    fraction = _users_fraction(config, environment)
    if fraction is None:
        fraction = config.unified_memory_fraction or fraction_for(machine)
        environment[FRACTIONS[0]] = f"{fraction:g}"
    environment[_FORCE] = "1"
    message = f"unified memory: JAX's pool may take {fraction:g} times a GPU's memory"
    if machine.gpu_memory_bytes:
        message += f", {fraction * machine.gpu_memory_bytes / 2**30:.0f} GiB"
    over_pcie = sorted({kind for kind in machine.gpu_kinds if not is_coherent_with_host(kind)})
    if over_pcie:
        message += f"; warning: {over_pcie[0]} reaches its host over PCIe; spilled pages will be very slow"
    return message


def is_on(environment: MutableMapping[str, str]) -> bool:
    return environment.get(_FORCE, "").lower() in ("1", "true")


def fraction_for(machine: Machine) -> float:
    """The pool's size as a fraction of a GPU's memory, so that all pools together use HOST_SHARE of host memory.

    Raises:
      UserError: the GPUs' memory is unknown.
    """
    if not machine.gpu_memory_bytes:
        raise UserError(
            "config.runtime.unified_memory needs the GPUs' memory size, which nvidia-smi does not report; set"
            " --config.runtime.unified_memory_fraction, e.g. 4 for a pool of 4 times the GPU's memory"
        )
    host_bytes_per_gpu = HOST_SHARE * machine.host_memory_bytes / len(machine.gpu_kinds)
    return math.floor(100 + 100 * host_bytes_per_gpu / machine.gpu_memory_bytes) / 100


def find_machine() -> Machine:
    """Describes this machine from nvidia-smi and /sys. Does not start JAX."""
    rows = query_gpus("name", "memory.total")
    kinds, mebibytes = zip(*rows) if rows else ((), ())
    is_known = bool(mebibytes) and all(size.isdigit() for size in mebibytes)
    smallest = min(map(int, mebibytes)) * 2**20 if is_known else 0
    return Machine(tuple(kinds), smallest, host_memory_bytes(Path("/sys/devices/system/node")))


def query_gpus(*fields: str) -> list[list[str]]:
    """The fields of nvidia-smi of each GPU, memory in MiB; empty if it is not installed, fails or hangs."""
    query = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    if shutil.which(query[0]):
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):  # it hangs if a GPU has failed
            result = subprocess.run(query, capture_output=True, text=True, timeout=60)
            if result.returncode == 0:
                return [line.split(", ") for line in result.stdout.splitlines()]
    return []


def host_memory_bytes(nodes: Path) -> int:
    """Memory of the NUMA nodes that have processors.

    On Grace machines the GPUs' memory forms NUMA nodes without processors, which the system includes in its total.
    """
    total = 0
    for node in nodes.glob("node[0-9]*"):
        if (node / "cpulist").read_text().strip():
            line = next(line for line in (node / "meminfo").read_text().splitlines() if "MemTotal:" in line)
            total += int(line.split()[-2]) * 1024
    return total or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_environment(environment: MutableMapping[str, str]) -> None:
    if _FORCE in environment and not is_on(environment):
        raise UserError(
            f"{_FORCE}={environment[_FORCE]} contradicts config.runtime.unified_memory=True; unset one of them"
        )
    allocator = environment.get(ALLOCATOR, "")
    if allocator.lower() not in POOLED:
        raise UserError(
            f"{ALLOCATOR}={allocator} does not support unified memory; unset it for config.runtime.unified_memory"
        )


def _users_fraction(config: RuntimeConfig, environment: MutableMapping[str, str]) -> float | None:
    """The fraction in the user's environment variables, if it agrees with the config; None if it is not set."""
    name = next((name for name in FRACTIONS if environment.get(name)), None)
    if name is None:
        return None
    configured = config.unified_memory_fraction
    try:
        given = float(environment[name])
    except ValueError:
        given = 0.0  # not a number: it contradicts the config, too
    if given != configured if configured else not given > 1:
        raise UserError(
            f"{name}={environment[name]} contradicts config.runtime.unified_memory"
            + (f"_fraction={configured:g}" if configured else "=True, which requires more than 1")
            + "; unset it"
        )
    return given
