"""The two memory pools of JAX on a GPU, in the GPU's memory and of pinned host memory; and CUDA
unified memory.

The GPU's pool takes 75% of the memory by JAX's default, and the host's pool at most 64 GiB per GPU
by XLA's default. A step that needs more ends with RESOURCE_EXHAUSTED. `prepare` sets both sizes
before JAX starts, and `explained` turns that error into one that names the pool and the setting.

With CUDA unified memory as the pool, arrays that do not fit into GPU memory are in host memory. It
is meant for GPUs with a coherent link to their CPU (Grace Hopper, Grace Blackwell). The pool is
larger than the memory of the GPU, and the driver migrates pages. XLA reads TF_FORCE_UNIFIED_MEMORY
when it creates its allocator, and allocates more than the GPU's memory only if it is set
(xla/pjrt/gpu/gpu_helpers.cc, CreateBFCAllocator). The plugins of JAX 0.10.1 and 0.12.0 both read
this name.
"""

import contextlib
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

import jax

from jaxlc.config import RuntimeConfig
from jaxlc.core import UserError, gib, processes
from jaxlc.core.hardware import is_coherent_with_host

# The share of host memory that the pools of all its GPUs may use; plan/program.py uses it too.
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
    # without the GPUs' memory; the limit of a container or job, if it is less
    host_memory_bytes: int


def prepare_unified(config: RuntimeConfig, environment: MutableMapping[str, str]) -> str:
    """Sets the environment variables for `config.unified_memory` on GPUs; returns a line that reports the pool's size.

    Raises:
      UserError: the user's environment variables contradict the config, or the GPUs' memory is unknown.
    """
    machine = find_machine()
    if _FORCE in environment and not is_on(environment):
        raise UserError(
            f"{_FORCE}={environment[_FORCE]} contradicts config.runtime.unified_memory=True; unset one of them"
        )
    allocator = environment.get(ALLOCATOR, "")
    if allocator.lower() not in POOLED:
        raise UserError(
            f"{ALLOCATOR}={allocator} does not support unified memory; unset it for config.runtime.unified_memory"
        )
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
        message += (
            f"; warning: {over_pcie[0]} reaches its host over PCIe; spilled pages will be very slow"
        )
    return message


def is_on(environment: MutableMapping[str, str]) -> bool:
    return environment.get(_FORCE, "").lower() in ("1", "true")


def fraction_for(machine: Machine) -> float:
    """The pool's size as a fraction of a GPU's memory, so that all pools together use HOST_SHARE of
    host memory.

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
    limits = [limit for limit, _ in processes.memory_limits()]
    host_bytes = min([host_memory_bytes(Path("/sys/devices/system/node")), *limits])
    return Machine(tuple(kinds), smallest, host_bytes)


def query_gpus(*fields: str) -> list[list[str]]:
    """The fields of nvidia-smi of each GPU, memory in MiB; empty if it is not installed, fails or
    hangs.
    """
    query = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    if shutil.which(query[0]):
        # it hangs if a GPU has failed
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            result = subprocess.run(query, capture_output=True, text=True, timeout=60)
            if result.returncode == 0:
                return [line.split(", ") for line in result.stdout.splitlines()]
    return []


def host_memory_bytes(nodes: Path) -> int:
    """Memory of the NUMA nodes that have processors.

    On Grace machines the GPUs' memory forms NUMA nodes without processors, which the system
    includes in its total.
    """
    total = 0
    for node in nodes.glob("node[0-9]*"):
        if (node / "cpulist").read_text().strip():
            line = next(
                line for line in (node / "meminfo").read_text().splitlines() if "MemTotal:" in line
            )
            total += int(line.split()[-2]) * 1024
    return total or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _users_fraction(config: RuntimeConfig, environment: MutableMapping[str, str]) -> float | None:
    """The fraction in the user's environment variables, if it agrees with the config; None if it is
    not set.
    """
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


# XLA reads it when it opens the GPUs (xla/pjrt/gpu/gpu_helpers.cc, GetGpuHostAllocator). GB is 2^30 bytes. The pool
# grows by regions, each twice as large as the one before, up to the limit, and never shrinks (bfc_allocator.cc,
# Extend). It is not preallocated: XLA makes another pool with the same limit in each process, for staging buffers of
# copies to its GPUs (xla/pjrt/gpu/se_gpu_pjrt_client.cc), and would allocate both in full.
_HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
DEFAULT_HOST_GIB = 64
STAGING_BYTES = 16 * 2**30  # staging pool of a process: the largest arrays are a few GiB; assumed
_MARGIN = 1.05  # factor of the estimated need, for alignment
_LARGEST_FRACTION = 0.95  # NCCL, cuBLAS, cuDNN and CUDA graphs need the rest; assumed
_BATCHES_GIB = 1  # for staging buffers of batches and metrics
_UNITS = {"": 1, "B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_NEED = re.compile(r"allocat\w* ([\d.]+) ?(bytes|[KMGT]iB|B)?")
# Errors of libraries that allocate GPU memory without JAX's pool.
_OUTSIDE = ("NCCL", "CUDA_ERROR_OUT_OF_MEMORY", "command buffer", "cuBLAS", "cuDNN")


def prepare(
    config: RuntimeConfig,
    environment: MutableMapping[str, str],
    pinned_host_bytes: int,
    num_local: int = 1,
) -> list[str]:
    """Sets the sizes of both pools that the environment does not set; returns lines that report
    them.

    Args:
      config: with all values resolved.
      pinned_host_bytes: what the training step needs per GPU, from `step.memory.pinned_bytes`.
      num_local: number of processes on this machine.
    Raises:
      UserError: the environment contradicts config.unified_memory.
    """
    if config.unified_memory:
        lines = [prepare_unified(config, environment)]
    elif environment.get(ALLOCATOR, "").lower() in POOLED:
        lines = [_prepare_gpu_pool(config, environment)]
    else:
        lines = []
    pool_bytes = host_pool_bytes(config, pinned_host_bytes)
    if environment.get(_HOST_LIMIT):
        lines.append(
            f"pinned host memory pool: {environment[_HOST_LIMIT]} GiB per GPU ({_HOST_LIMIT})"
        )
    elif pool_bytes:
        environment[_HOST_LIMIT] = str(pool_bytes // 2**30)
        lines.append(_host_pool_line(pool_bytes, num_local))
    return lines


def host_pool_bytes(config: RuntimeConfig, pinned_host_bytes: int) -> int:
    """The size of the pool of pinned host memory per GPU, whole GiB; 0: XLA's default, because
    nothing needs it.
    """
    if config.pinned_host_gib:
        return math.ceil(config.pinned_host_gib) * 2**30
    if not pinned_host_bytes:
        return 0
    return math.ceil(_MARGIN * pinned_host_bytes / 2**30 + _BATCHES_GIB) * 2**30


def pools_per_node_bytes(pool_bytes: int, num_gpus: int, num_processes: int) -> int:
    """What the pools of `host_pool_bytes` grow to on a node, with those for staging buffers; 0
    without pools.
    """
    return num_gpus * pool_bytes + num_processes * STAGING_BYTES if pool_bytes else 0


def region_bytes(num_bytes: int) -> int:
    """What arrays of the training state take in the pool of pinned host memory.

    They are allocated first, one by one, so they take regions up to a power of 2. The temporary
    buffers of a step are one allocation, which takes a region of what is left.
    """
    return 2 ** math.ceil(math.log2(_MARGIN * num_bytes)) if num_bytes else 0


def _prepare_gpu_pool(config: RuntimeConfig, environment: MutableMapping[str, str]) -> str:
    for name in FRACTIONS:
        if environment.get(name):
            return f"GPU memory pool: {environment[name]} of each GPU's memory ({name})"
    environment[FRACTIONS[0]] = f"{config.memory_fraction:g}"
    return f"GPU memory pool: {config.memory_fraction:g} of each GPU's memory (config.runtime.memory_fraction)"


def _host_pool_line(pool_bytes: int, num_local: int) -> str:
    line = (
        f"pinned host memory pool: up to {pool_bytes // 2**30} GiB per GPU (config.runtime.pinned_host_gib), allocated"
        " at the first use, which can take minutes"
    )
    machine = find_machine()
    needed_bytes = pools_per_node_bytes(pool_bytes, len(machine.gpu_kinds), num_local)
    if machine.gpu_kinds and needed_bytes > HOST_SHARE * machine.host_memory_bytes:
        line += (
            f"; warning: the pools of {len(machine.gpu_kinds)} GPUs and {num_local} processes (staging buffers) of this"
            f" machine need {needed_bytes / 2**30:.0f} GiB in total, and it has"
            f" {machine.host_memory_bytes / 2**30:.0f} GiB"
        )
    return line


@contextlib.contextmanager
def explained(config: RuntimeConfig) -> Iterator[None]:
    """Turns RESOURCE_EXHAUSTED of either pool into a UserError with the pool, its size, the need
    and the setting.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        device = jax.local_devices()[0]
        stats = device.memory_stats() or {} if device.platform == "gpu" else None
        problem = out_of_memory(str(error), config, stats, os.environ)
        if problem is None:
            raise
        raise UserError(problem) from error


def out_of_memory(
    message: str,
    config: RuntimeConfig,
    stats: Mapping[str, int] | None,
    environment: Mapping[str, str],
) -> str | None:
    """An explanation of JAX's error `message`, with advice; None if it is not about memory.

    Args:
      stats: `jax.Device.memory_stats()` of a local GPU, or empty; None on a CPU, which has no pools.
    """
    is_outside = any(name in message for name in _OUTSIDE) and "out of memory" in message.lower()
    if "RESOURCE_EXHAUSTED" not in message and not is_outside:
        return None
    match = _NEED.search(message)
    need_bytes = float(match[1]) * _UNITS[match[2] or ""] if match else 0
    problem = (
        f"{gib(need_bytes)} GiB more do not fit into"
        if need_bytes
        else "an array does not fit into"
    )
    if stats is None:
        return f"out of memory: {problem} this machine's memory; use a smaller model or shorter sequences"
    if _HOST_LIMIT in message or "host memory" in message.lower():
        pool_gib = int(environment.get(_HOST_LIMIT) or DEFAULT_HOST_GIB)
        enough_gib = math.ceil(pool_gib + need_bytes / 2**30)
        return (
            f"out of pinned host memory: {problem} the pool of {pool_gib} GiB per GPU; use"
            f" --config.runtime.pinned_host_gib={enough_gib} (`jaxlc plan` prints the need of a step), or offload less"
        )
    own = f"{config.memory_fraction:g}"
    variable = next((name for name in FRACTIONS if environment.get(name)), "")
    fraction = environment.get(variable, "")
    # the user's variable wins
    setting = "--config.runtime.memory_fraction" if fraction in ("", own) else variable
    if is_outside:
        return (
            f"out of GPU memory outside of JAX's pool, which takes {fraction or 'a part'} of each GPU's memory; lower"
            f" {setting}, now {fraction or own}, for NCCL, cuBLAS, cuDNN, CUDA graphs"
        )
    size = f" of {gib(stats['bytes_limit'])} GiB" if "bytes_limit" in stats else ""
    in_use = (
        f", of which {gib(stats['bytes_in_use'])} GiB are in use" if "bytes_in_use" in stats else ""
    )
    share = f" ({fraction} of each GPU's memory)" if fraction else ""
    is_largest = float(fraction or own) >= _LARGEST_FRACTION
    larger = "" if is_largest else f"raise {setting}, to {_LARGEST_FRACTION} at most, or "
    return (
        f"out of GPU memory: {problem} JAX's pool{size}{share}{in_use}; {larger}use less memory: `jaxlc plan --advise`"
        " searches for settings that fit"
    )
