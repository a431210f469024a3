"""XLA compiler options, and the transport that they select: the only module with their names, and
with the differences between XLA versions. Importing it does not import JAX.

Options are passed to `.compile(compiler_options=...)`. An unknown name is then a Python error, and
one process can compile a step with several sets of options; an unknown name in XLA_FLAGS aborts the
process in C++.

docs/xla_flags.md shows the effect of each preset on a schedule. The compilers of JAX 0.10.1, 0.11.2
and 0.12.0.1 know all options of this module, except for those that depend on the version.

The version of XLA that compiles for GPUs is the version of the installed plugin.

The transport of context parallelism is how K, V, dK and dV blocks are sent between GPUs:

    nccl       NCCL send and receive: supported everywhere
    nvshmem    one-sided put into the neighbor's symmetric heap: only in the XLA of JAX 0.10.1 and older
    symmetric  NCCL's one-sided put and signal into registered memory: its replacement in newer XLA
    peer       copy engines between the GPUs of one process

XLA may ignore the selection, so `jaxlc.step.verify_compiled` checks which transport a compiled
program uses.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import jax

from jaxlc.config import RuntimeConfig
from jaxlc.core import UserError
from jaxlc.runtime.launcher import num_gpus_on_machine

Version = tuple[int, ...]


def check_plugin() -> None:
    """Raises UserError if the versions of the GPU plugin and jaxlib differ, because XLA's features
    depend on both.
    """
    jaxlib = importlib.metadata.version("jaxlib")
    package, version = installed_plugin() or ("", jaxlib)
    if version != jaxlib:
        pjrt = package.replace("plugin", "pjrt")
        raise UserError(
            f"{package} has version {version} but jaxlib has version {jaxlib}:"
            f' pip install "{package}=={jaxlib}" "{pjrt}=={jaxlib}"'
        )


def xla_version() -> Version:
    """The version of the GPU plugin; without one, the version of jaxlib, which a plugin must equal."""
    _, version = installed_plugin() or ("", importlib.metadata.version("jaxlib"))
    return tuple(int(number) for number in re.match(r"\d+(?:\.\d+)*", version)[0].split("."))


def installed_plugin() -> tuple[str, str] | None:
    """The package and version of the installed GPU plugin, in the order in which JAX searches for
    it.
    """
    for package in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            return package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


Options = dict[str, bool | int | str]

# 0.10.2 accepts the option without effect; 0.11 and newer do not know it.
LAST_XLA_WITH_NVSHMEM = (0, 10, 1)
NVSHMEM_OPTION = "xla_gpu_experimental_enable_nvshmem"

_TRANSPORTS: Mapping[str, Options] = MappingProxyType(
    {
        "nccl": {},
        "nvshmem": {NVSHMEM_OPTION: True},
        "symmetric": {"xla_gpu_collective_permute_mode": "COLLECTIVES_SYMMETRIC_MEMORY"},
        "peer": {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"},
    }
)

SLOP_OPTION = "xla_gpu_memory_limit_slop_factor"
SCHEDULED_SHARE = 0.80  # fraction of device memory to which the scheduler's limit refers
# fraction of JAX's pool for arguments and temporaries; the rest is lost to fragmentation
_POOL_FILL = 0.98

_OVERLAP: Options = {
    # Schedules by estimated latencies: a collective starts early, and compute runs until it is done. Without it the
    # ring's sends do not overlap with attention.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # By default one collective is in flight at a time. The ring's backward has two (K/V and dK/dV) in addition to FSDP
    # all-gathers, and all should overlap with the same attention call.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    # The scheduler reduces overlap above its memory limit: this percentage of 80% of the GPU's memory minus the
    # arguments. With the default of 95, half of the ring's sends are exposed in steps that have ample memory.
    # `compile_options` reduces it to what JAX's pool holds.
    SLOP_OPTION: 130,
}
_PIPELINED: Options = {
    # The loop over layers gathers the weights of the next layer and reduces the gradients of the previous one during
    # the compute of the current one, instead of at the ends of an iteration.
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_pipeline_all_reduce": "COLLECTIVE_PIPELINING_MODE_ON",
}
_UNCOMBINED: Options = {
    # XLA combines small collectives into one, which starts when the operands of all are ready. Separate collectives
    # start earlier.
    "xla_gpu_all_gather_combine_threshold_bytes": 1,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    "xla_gpu_all_reduce_combine_threshold_bytes": 1,
}
_HOST_MEMORY: Options = {
    # XLA rematerializes if it estimates that a program does not fit, and its estimate counts host memory as GPU memory.
    # 8B at 1,048,576 tokens on one H100 with state and residuals on the host: estimated 2,720 s with this pass and
    # 2,607 s without it, for 0.6 GiB more. The config selects what is recomputed (memory.remat).
    "xla_disable_hlo_passes": "rematerialization",
    # Copies between host and device in flight at a time. The default is two, but a layer has nine weights: all but the
    # last two copies would be exposed.
    "xla_gpu_experimental_parallel_async_compute_limit": 16,
}
# Every run of one executable then gives the same bits: XLA compiles no scatters with atomic additions, and cuDNN's
# attention backward uses its deterministic algorithm. `xla_gpu_deterministic_ops` would also disable autotuning.
_DETERMINISTIC: Options = {"xla_gpu_exclude_nondeterministic_ops": True}
PRESETS: Mapping[str, Options] = MappingProxyType(
    {
        "default": {},  # XLA's defaults
        "overlap": _OVERLAP,
        "pipelined": _OVERLAP | _PIPELINED,
        # Unrolls the loop over layers by two, which avoids the copy from one iteration to the next.
        "double_buffered": _OVERLAP
        | _PIPELINED
        | {"xla_gpu_enable_while_loop_double_buffering": True},
        "uncombined": _OVERLAP | _UNCOMBINED,
        # NCCL communicators of the members of each ring, instead of one of all devices.
        "permute_cliques": _OVERLAP | {"xla_gpu_collective_permute_connected_components": True},
        # Launches kernels separately instead of as CUDA graphs: slower, but profiles and crashes
        # name them.
        "no_graphs": _OVERLAP | {"xla_gpu_enable_command_buffer": ""},
        # All matrix products use cuBLAS. Autotuning of Triton kernels, which can take minutes, is
        # not needed.
        "no_triton_gemm": _OVERLAP | {"xla_gpu_enable_triton_gemm": False},
    }
)


# In the XLA of JAX 0.10 some options have other names and are booleans.
_FIRST_XLA_WITH_NEW_NAMES = (0, 11)
_OLD_NAMES = MappingProxyType(
    {
        f"xla_gpu_pipeline_{kind}": f"xla_gpu_enable_pipelined_{kind}"
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
)


def compile_options(
    platform: str,
    *,
    preset: str,
    transport: str | None,
    uses_host_memory: bool = False,
    is_deterministic: bool = False,
    max_slop_percent: int | None = None,
    environment: Mapping[str, str],
) -> Options:
    """Options for `lowered.compile`, without those in the user's XLA_FLAGS, which they would
    override.

    Args:
      platform: `jax.Device.platform` of the devices.
      preset: a name in PRESETS.
      transport: the transport that `jaxlc.runtime.xla_flags` selects; None: XLA's default.
      uses_host_memory: whether the program has arrays in host memory.
      is_deterministic: config.runtime.deterministic.
      max_slop_percent: the result of `slop_percent`; None: unknown.
    """
    if platform != "gpu":
        return {}
    options = _for_version(PRESETS[preset], xla_version()) | _TRANSPORTS[transport or "nccl"]
    if uses_host_memory:
        options |= _HOST_MEMORY
    if is_deterministic:
        options |= _DETERMINISTIC
    if max_slop_percent is not None and SLOP_OPTION in options:
        options[SLOP_OPTION] = min(int(options[SLOP_OPTION]), max_slop_percent)
    return {
        name: value for name, value in options.items() if name not in users_options(environment)
    }


def slop_percent(pool_bytes: float, device_bytes: int, arguments_bytes: int) -> int | None:
    """The largest value of SLOP_OPTION with which XLA schedules no more than JAX's pool holds;
    None: any value.

    XLA's limit for temporaries is this percentage of (80% of the device's memory - arguments), for
    any size of the pool (xla/service/gpu/gpu_hlo_schedule.cc, GetSchedulerMemoryLimit).
    """
    scheduled_bytes = SCHEDULED_SHARE * device_bytes - arguments_bytes
    if scheduled_bytes <= 0:
        return None
    return max(1, int(100 * (_POOL_FILL * pool_bytes - arguments_bytes) / scheduled_bytes))


def _for_version(options: Options, version: Version) -> Options:
    if version >= _FIRST_XLA_WITH_NEW_NAMES:
        return options
    return {
        _OLD_NAMES.get(name, name): True if name in _OLD_NAMES else value
        for name, value in options.items()
    }


def check_users_flags(environment: Mapping[str, str]) -> None:
    """Raises UserError for a word in XLA_FLAGS that is no flag, such as the name of a file. XLA
    ignores such words.
    """
    for word in re.sub(r"'[^']*'|\"[^\"]*\"", "--", environment.get("XLA_FLAGS", "")).split():
        if not word.startswith("-"):
            raise UserError(f"XLA_FLAGS contains {word}, which is no flag: write --NAME=VALUE")


def users_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Names and values in XLA_FLAGS, "--name=value" or "--name"; the last value of a name takes
    precedence.
    """
    flags = (flag.partition("=") for flag in environment.get("XLA_FLAGS", "").split())
    return {name.lstrip("-"): value or "true" for name, _, value in flags}


# The order in which "auto" tries transports between processes. A single process uses NCCL: it never leaves the node.
# NVIDIA has published measurements of NVSHMEM in XLA ("Accelerating Long-Context Model Training in JAX and XLA"). There
# are none of `symmetric` and `peer`, whose XLA code is from April 2026, so "auto" never selects them.
_BY_SPEED = ("nvshmem", "nccl")
# XLA's error with an older version: "Put requires NCCL >= 2.29.0".
_FIRST_NCCL_WITH_PUT = (2, 29)
_NCCL = "libnccl.so.2"
_NVSHMEM = "libnvshmem_host.so.3"  # the name that XLA loads
_NVSHMEM_BOOTSTRAP = "nvshmem_bootstrap_uid.so.3"


class TransportEnvironment(NamedTuple):
    """The processes and libraries on which the selection of a transport depends."""

    num_processes: int
    devices_per_process: int
    xla_version: Version  # version of the GPU plugin
    nccl_version: Version | None  # None: NCCL is not installed
    has_nvshmem: bool  # whether the library is installed
    # whether JAX was started with NVSHMEM, when XLA selects the allocator of its buffers
    is_nvshmem_started: bool


class TransportSelection(NamedTuple):
    """A transport and the reason for its selection."""

    name: str
    reason: str
    is_auto: bool


def choose(config: RuntimeConfig, devices: Sequence) -> TransportSelection | None:
    """Selects the transport of a program for `devices` (`jax.Device`, attached or absent); None on
    CPU.

    Raises:
      UserError: the transport that the config names is unsupported.
    """
    if devices[0].platform == "gpu":
        check_plugin()
        return choose_for(config.transport, environment_of(devices))
    if config.transport != "auto" and not config.simulated_devices:
        raise UserError(
            f"config.runtime.transport={config.transport!r} is unsupported: it needs GPUs and the platform is"
            f" {devices[0].platform}; use --config.runtime.transport=auto"
        )
    return None


def choose_for(name: str, environment: TransportEnvironment) -> TransportSelection:
    """Selects the transport for the setting `name`.

    A named transport never falls back to another. With "auto" the reason contains why faster ones
    are unsupported.

    Raises:
      UserError: the named transport is unsupported.
    """
    if name != "auto":
        limit = unsupported(name, environment)
        if limit is not None:
            raise UserError(f"config.runtime.transport={name!r} is unsupported: {limit}")
        return TransportSelection(name, "named in the config", is_auto=False)
    if environment.num_processes == 1:
        return TransportSelection("nccl", "auto; one process", is_auto=True)
    limits = {candidate: unsupported(candidate, environment) for candidate in _BY_SPEED}
    # nccl is always supported
    chosen = next(candidate for candidate, limit in limits.items() if limit is None)
    declined = [
        f"not {candidate}: {limit}" for candidate, limit in limits.items() if limit is not None
    ]
    return TransportSelection(chosen, "; ".join(["auto", *declined]), is_auto=True)


def unsupported(name: str, environment: TransportEnvironment) -> str | None:
    """The reason why transport `name` is unsupported, and what to do about it; None if it is
    supported.
    """
    version = ".".join(map(str, environment.xla_version))
    if name == "nvshmem":
        if environment.xla_version > LAST_XLA_WITH_NVSHMEM:
            return f"the XLA of JAX {version} has no NVSHMEM; JAX 0.10.1 has: pip install -e '.[nvshmem]'"
        if environment.devices_per_process > 1:
            return f"NVSHMEM needs one process per GPU, and a process has {environment.devices_per_process} GPUs"
        if not environment.has_nvshmem:
            return f"{_NVSHMEM} is not installed: pip install nvidia-nvshmem-cu12"
        if not environment.is_nvshmem_started:
            return (
                "JAX has started without NVSHMEM; restart Python (in a notebook, the kernel) and call"
                " jaxlc.runtime.start.start(config.runtime) first, without NVSHMEM turned off in XLA_FLAGS"
            )
    elif name == "symmetric":
        if environment.nccl_version is None:
            return f"{_NCCL} is not installed: pip install nvidia-nccl-cu12"
        if environment.nccl_version < _FIRST_NCCL_WITH_PUT:
            installed = ".".join(map(str, environment.nccl_version))
            return (
                f"one-sided puts need NCCL 2.29, and {installed} is installed: pip install"
                " --upgrade nvidia-nccl-cu12"
            )
    elif name == "peer" and environment.num_processes > 1:
        return (
            "peer copies need all GPUs in one process, and the number of processes is"
            f" {environment.num_processes}; use --config.runtime.transport=symmetric or nccl"
        )
    return None


def environment_of(devices: Sequence) -> TransportEnvironment:
    """The environment of a program for `devices`. For absent devices, all libraries are assumed to
    be installed.
    """
    num_devices = Counter(device.process_index for device in devices)
    are_attached = devices[0] in jax.devices()
    return TransportEnvironment(
        num_processes=len(num_devices),
        devices_per_process=max(num_devices.values()),
        xla_version=xla_version(),
        nccl_version=nccl_version() if are_attached else _FIRST_NCCL_WITH_PUT,
        has_nvshmem=not are_attached or find_library("nvshmem", _NVSHMEM) is not None,
        is_nvshmem_started=not are_attached
        or users_options(os.environ).get(NVSHMEM_OPTION) in ("true", "1"),
    )


def prepare(config: RuntimeConfig, environment: dict[str, str]) -> None:
    """Sets the environment variables for NVSHMEM, if it is selected and supported. Call it before
    JAX starts.

    A compile option would not be enough: XLA selects the allocator of communication buffers when it
    opens the device, and reads XLA_FLAGS for it. The user's settings take precedence.
    """
    library = find_library("nvshmem", _NVSHMEM)
    transport_environment = TransportEnvironment(
        num_processes=config.num_processes,
        devices_per_process=_num_visible_gpus(environment),
        xla_version=xla_version(),
        nccl_version=None,
        has_nvshmem=library is not None,
        is_nvshmem_started=True,
    )
    is_selected = config.transport == "nvshmem" or (
        config.transport == "auto" and config.num_processes > 1
    )
    if not is_selected or unsupported("nvshmem", transport_environment) is not None:
        return  # `choose` later reports the reason, after the number of devices has been checked
    if NVSHMEM_OPTION not in users_options(environment):
        environment["XLA_FLAGS"] = (
            f"--{NVSHMEM_OPTION}=true {environment.get('XLA_FLAGS', '')}".strip()
        )
    bootstrap = Path(library).with_name(_NVSHMEM_BOOTSTRAP)
    if bootstrap.is_file():  # in a pip package, which no library search path contains
        environment.setdefault("NVSHMEM_BOOTSTRAP_UID_PLUGIN", str(bootstrap))
    if config.nvshmem_heap_bytes:
        environment.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(config.nvshmem_heap_bytes))


def nccl_version() -> Version | None:
    """The version of the NCCL library that XLA loads; None if it is not installed."""
    path = find_library("nccl", _NCCL)
    if path is None:
        return None
    code = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(code))
    return code.value // 10_000, code.value // 100 % 100, code.value % 100  # NCCL 2.9 and newer


def find_library(package: str, name: str) -> str | None:
    """The library in NVIDIA's pip package `nvidia.<package>`, else in the loader's search path;
    None if in neither.
    """
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec(f"nvidia.{package}")
    for directory in spec.submodule_search_locations if spec else ():
        path = Path(directory) / "lib" / name
        if path.is_file():
            return str(path)
    try:
        ctypes.CDLL(name)
    except OSError:
        return None
    return name


def _num_visible_gpus(environment: dict[str, str]) -> int:
    """The number of GPUs that are visible to this process, as far as it is known before JAX starts."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name])
    return num_gpus_on_machine()
