"""CUDA's unified memory as JAX's pool: arrays that do not fit into a GPU's memory lie in the host's.

Meant for GPUs with a coherent link to their CPU (Grace Hopper, Grace Blackwell). The pool is made larger than the GPU's
memory, and the driver moves pages. XLA reads TF_FORCE_UNIFIED_MEMORY when it makes its allocator, and only then takes
more than there is on the GPU (xla/pjrt/gpu/gpu_helpers.cc, CreateBFCAllocator); the plugins of JAX 0.10.1 and 0.12.0
both have the name.
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

# Of the host's memory, what the pools of its GPUs may take together; the plan counts as much (plan/memory.py).
HOST_SHARE = 0.9

_FORCE = "TF_FORCE_UNIFIED_MEMORY"
# The pool's size as a share of the GPU's memory. jaxlib of 0.10.1 to 0.12.0.1 reads both (xla_client.py), calls the
# second deprecated, and refuses the two together.
_FRACTION, _OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
_POOLED = ("", "default", "bfc")  # the others do not look at _FORCE


class Machine(NamedTuple):
    gpu_kinds: tuple[str, ...]  # names as the driver has them: "NVIDIA GH200 480GB"; () if unknown
    gpu_memory_bytes: int  # of the smallest; 0 if unknown
    host_memory_bytes: int  # without that of GPUs


def prepare(config: RuntimeConfig, environment: MutableMapping[str, str]) -> str:
    """Writes what XLA reads at its start, for `config.unified_memory` on GPUs; returns what was done, in a line.

    Raises:
      UserError: the user's environment says otherwise, or the machine does not tell how large the pool may be.
    """
    machine = find_machine()
    _check_environment(environment)
    fraction = _users_fraction(config, environment)
    if fraction is None:
        fraction = config.unified_memory_fraction or fraction_for(machine)
        environment[_FRACTION] = f"{fraction:g}"
    environment[_FORCE] = "1"
    done = f"unified memory: JAX's pool may take {fraction:g} times a GPU's memory"
    if machine.gpu_memory_bytes:
        done += f", {fraction * machine.gpu_memory_bytes / 2**30:.0f} GiB"
    over_pcie = sorted({kind for kind in machine.gpu_kinds if not is_coherent_with_host(kind)})
    if over_pcie:
        done += f"; warning: {over_pcie[0]} reaches its host over PCIe, and what spills there will crawl"
    return done


def is_on(environment: MutableMapping[str, str]) -> bool:
    return environment.get(_FORCE, "").lower() in ("1", "true")


def fraction_for(machine: Machine) -> float:
    """The pool's share of a GPU's memory with which all pools together take HOST_SHARE of the host's.

    Raises:
      UserError: the GPUs' memory is unknown.
    """
    if not machine.gpu_memory_bytes:
        raise UserError(
            "config.runtime.unified_memory needs to know the GPUs' memory, and nvidia-smi does not tell; set"
            " --config.runtime.unified_memory_fraction, such as 4 for 3 times as much beside the GPU's own"
        )
    beside = HOST_SHARE * machine.host_memory_bytes / len(machine.gpu_kinds)
    return math.floor(100 + 100 * beside / machine.gpu_memory_bytes) / 100


def find_machine() -> Machine:
    """This machine, by nvidia-smi and /sys; starts nothing."""
    query = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    lines = ()
    if shutil.which(query[0]):
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
        lines = done.stdout.splitlines() if done.returncode == 0 else ()
    kinds, mebibytes = zip(*(line.rsplit(", ", 1) for line in lines)) if lines else ((), ())
    is_known = bool(mebibytes) and all(each.isdigit() for each in mebibytes)
    smallest = min(map(int, mebibytes)) * 2**20 if is_known else 0
    return Machine(tuple(kinds), smallest, host_memory_bytes(Path("/sys/devices/system/node")))


def host_memory_bytes(nodes: Path) -> int:
    """Memory of the NUMA nodes that have processors: on Grace machines the GPUs' memory makes nodes of its own, which
    the system counts as its memory."""
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
    allocator = environment.get(_ALLOCATOR, "")
    if allocator.lower() not in _POOLED:
        raise UserError(f"{_ALLOCATOR}={allocator} knows no unified memory; unset it for config.runtime.unified_memory")


def _users_fraction(config: RuntimeConfig, environment: MutableMapping[str, str]) -> float | None:
    """What the user has set, if it is what the config wants; None: nothing."""
    name = next((name for name in (_FRACTION, _OLD_FRACTION) if environment.get(name)), None)
    if name is None:
        return None
    wanted = config.unified_memory_fraction
    try:
        given = float(environment[name])
    except ValueError:
        given = 0.0  # not a number is not what is wanted either
    if given != wanted if wanted else not given > 1:
        raise UserError(
            f"{name}={environment[name]} contradicts config.runtime.unified_memory"
            + (f"_fraction={wanted:g}" if wanted else "=True, which needs more than 1")
            + "; unset it"
        )
    return given
