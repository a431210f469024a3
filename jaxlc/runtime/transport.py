"""Selects the transport of context parallelism: how K, V, dK and dV blocks are sent between GPUs.

    nccl       NCCL send and receive: supported everywhere
    nvshmem    one-sided put into the neighbor's symmetric heap: only in the XLA of JAX 0.10.1 and older
    symmetric  NCCL's one-sided put and signal into registered memory: its replacement in newer XLA
    peer       copy engines between the GPUs of one process

XLA may ignore the selection, so `jaxlc.step.verify_compiled` checks which transport a compiled program uses.
Importing this module does not import JAX.
"""

import ctypes
import importlib.util
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxlc.config import RuntimeConfig
from jaxlc.core.errors import UserError
from jaxlc.runtime.launcher import num_gpus_on_machine
from jaxlc.runtime.plugin import Version, check_plugin, xla_version
from jaxlc.runtime.xla_flags import LAST_XLA_WITH_NVSHMEM, NVSHMEM_OPTION, users_options

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
    is_nvshmem_started: bool  # whether JAX was started with NVSHMEM, when XLA selects the allocator of its buffers


class TransportSelection(NamedTuple):
    """A transport and the reason for its selection."""

    name: str
    reason: str
    is_auto: bool


def choose(config: RuntimeConfig, devices: Sequence) -> TransportSelection | None:
    """Selects the transport of a program for `devices` (`jax.Device`, attached or absent); None on CPU.

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

    A named transport never falls back to another. With "auto" the reason contains why faster ones are unsupported.

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
    chosen = next(candidate for candidate, limit in limits.items() if limit is None)  # nccl is always supported
    declined = [f"not {candidate}: {limit}" for candidate, limit in limits.items() if limit is not None]
    return TransportSelection(chosen, "; ".join(["auto", *declined]), is_auto=True)


def unsupported(name: str, environment: TransportEnvironment) -> str | None:
    """The reason why transport `name` is unsupported, and what to do about it; None if it is supported."""
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
                " jaxlc.runtime.start(config.runtime) first, without NVSHMEM turned off in XLA_FLAGS"
            )
    elif name == "symmetric":
        if environment.nccl_version is None:
            return f"{_NCCL} is not installed: pip install nvidia-nccl-cu12"
        if environment.nccl_version < _FIRST_NCCL_WITH_PUT:
            installed = ".".join(map(str, environment.nccl_version))
            return (
                f"one-sided puts need NCCL 2.29, and {installed} is installed: pip install --upgrade nvidia-nccl-cu12"
            )
    elif name == "peer" and environment.num_processes > 1:
        return (
            "peer copies need all GPUs in one process, and the number of processes is"
            f" {environment.num_processes}; use --config.runtime.transport=symmetric or nccl"
        )
    return None


def environment_of(devices: Sequence) -> TransportEnvironment:
    """The environment of a program for `devices`. For absent devices, all libraries are assumed to be installed."""
    import jax

    num_devices = Counter(device.process_index for device in devices)
    are_attached = devices[0] in jax.devices()
    return TransportEnvironment(
        num_processes=len(num_devices),
        devices_per_process=max(num_devices.values()),
        xla_version=xla_version(),
        nccl_version=nccl_version() if are_attached else _FIRST_NCCL_WITH_PUT,
        has_nvshmem=not are_attached or find_library("nvshmem", _NVSHMEM) is not None,
        is_nvshmem_started=not are_attached or users_options(os.environ).get(NVSHMEM_OPTION) in ("true", "1"),
    )


def prepare(config: RuntimeConfig, environment: dict[str, str]) -> None:
    """Sets the environment variables for NVSHMEM, if it is selected and supported. Call it before JAX starts.

    A compile option would not be enough: XLA selects the allocator of communication buffers when it opens the device,
    and reads XLA_FLAGS for it. The user's settings take precedence.
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
    is_selected = config.transport == "nvshmem" or (config.transport == "auto" and config.num_processes > 1)
    if not is_selected or unsupported("nvshmem", transport_environment) is not None:
        return  # `choose` later reports the reason, after the number of devices has been checked
    if NVSHMEM_OPTION not in users_options(environment):
        environment["XLA_FLAGS"] = f"--{NVSHMEM_OPTION}=true {environment.get('XLA_FLAGS', '')}".strip()
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
    """The library in NVIDIA's pip package `nvidia.<package>`, else in the loader's search path; None if in neither."""
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
