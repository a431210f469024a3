"""The transports of ring hops between GPUs, and their requirements. Imports jax inside functions only.

    nccl       send and receive; supported everywhere
    nvshmem    a put into the neighbour's symmetric heap; only in the XLA of JAX 0.10.1 and older
    symmetric  NCCL's put and signal into registered memory; the replacement in newer XLA
    peer       copy engines, between the GPUs of one process

XLA may ignore the requested transport, so `jaxlc.train.verify_compiled` reads it from the compiled program.
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
from jaxlc.runtime.plugin import Version, check_plugin, xla_version
from jaxlc.runtime.xla_flags import LAST_XLA_WITH_NVSHMEM, NVSHMEM_OPTION, users_options

# The order of preference of "auto" with several processes. With one process, hops stay within the node: NCCL.
_BY_SPEED = ("nvshmem", "symmetric", "nccl")
# With an older NCCL, XLA reports "Put requires NCCL >= 2.29.0".
_FIRST_NCCL_WITH_PUT = (2, 29)
_NCCL = "libnccl.so.2"
_NVSHMEM = "libnvshmem_host.so.3"  # the name that XLA loads
_NVSHMEM_BOOTSTRAP = "nvshmem_bootstrap_uid.so.3"


class Place(NamedTuple):
    """Everything that the selection of a transport depends on."""

    num_processes: int
    devices_per_process: int
    xla_version: Version  # of the GPU plugin
    nccl_version: Version | None  # None: not installed
    has_nvshmem: bool  # the library is installed
    is_nvshmem_started: bool  # JAX was started with it, which determines XLA's allocator for its buffers


class TransportSelection(NamedTuple):
    """The selected transport and the reason for the selection."""

    name: str
    reason: str
    is_auto: bool


def choose(config: RuntimeConfig, devices: Sequence) -> TransportSelection | None:
    """Selects the transport of a program for `devices` (`jax.Device`, possibly absent); None on CPU.

    Raises:
      UserError: the transport that the config names is unsupported, with the reason.
    """
    if devices[0].platform == "gpu":
        check_plugin()
        return choose_for(config.transport, place_of(devices))
    if config.transport != "auto" and not config.simulated_devices:
        raise UserError(
            f"config.runtime.transport={config.transport!r} needs GPUs, but the devices are"
            f" {devices[0].platform}: use --config.runtime.transport=auto"
        )
    return None


def choose_for(name: str, place: Place) -> TransportSelection:
    """Resolves `name` at `place`: a named transport never falls back; "auto" reports why it skipped faster ones.

    Raises:
      UserError: the named transport is unsupported at `place`.
    """
    if name != "auto":
        limit = unavailable(name, place)
        if limit is not None:
            raise UserError(f"config.runtime.transport={name!r} is unsupported: {limit}")
        return TransportSelection(name, "named in the config", is_auto=False)
    if place.num_processes == 1:
        return TransportSelection("nccl", "auto; one process", is_auto=True)
    limits = {candidate: unavailable(candidate, place) for candidate in _BY_SPEED}
    chosen = next(candidate for candidate, limit in limits.items() if limit is None)  # nccl has none
    declined = [f"not {candidate}: {limit}" for candidate, limit in limits.items() if limit is not None]
    return TransportSelection(chosen, "; ".join(["auto", *declined]), is_auto=True)


def unavailable(name: str, place: Place) -> str | None:
    """The reason why transport `name` is unsupported at `place`, with a remedy; None if it is supported."""
    version = ".".join(map(str, place.xla_version))
    if name == "nvshmem":
        if place.xla_version > LAST_XLA_WITH_NVSHMEM:
            return f'the XLA of JAX {version} no longer has NVSHMEM; JAX 0.10.1 does: pip install "jaxlc[nvshmem]"'
        if place.devices_per_process > 1:
            return f"NVSHMEM needs one process per GPU, but one process has {place.devices_per_process} GPUs"
        if not place.has_nvshmem:
            return f"{_NVSHMEM} not found: pip install nvidia-nvshmem-cu12"
        if not place.is_nvshmem_started:
            return (
                "JAX has already started without NVSHMEM: restart Python (in a notebook, the kernel), call"
                " jaxlc.runtime.start(config.runtime) first, and do not disable NVSHMEM in XLA_FLAGS"
            )
    elif name == "symmetric":
        if place.nccl_version is None:
            return f"{_NCCL} not found: pip install nvidia-nccl-cu12"
        if place.nccl_version < _FIRST_NCCL_WITH_PUT:
            installed = ".".join(map(str, place.nccl_version))
            return f"its puts need NCCL 2.29 or newer, found {installed}: pip install --upgrade nvidia-nccl-cu12"
    elif name == "peer" and place.num_processes > 1:
        return f"peer copies need a single process, but there are {place.num_processes}: use 'symmetric' or 'nccl'"
    return None


def place_of(devices: Sequence) -> Place:
    """Where a program for `devices` will run. For absent GPUs, all libraries are assumed to be installed."""
    import jax

    num_devices = Counter(device.process_index for device in devices)
    are_attached = devices[0] in jax.devices()
    return Place(
        num_processes=len(num_devices),
        devices_per_process=max(num_devices.values()),
        xla_version=xla_version(),
        nccl_version=nccl_version() if are_attached else _FIRST_NCCL_WITH_PUT,
        has_nvshmem=not are_attached or _find_library("nvshmem", _NVSHMEM) is not None,
        is_nvshmem_started=not are_attached or users_options(os.environ).get(NVSHMEM_OPTION) in ("true", "1"),
    )


def prepare(config: RuntimeConfig, environment: dict[str, str]) -> None:
    """Sets the environment of NVSHMEM and XLA if NVSHMEM is requested and supported. Call it before JAX starts.

    The compile option alone would produce programs whose buffers are in NCCL's memory, because XLA chooses the
    allocator from XLA_FLAGS when it opens the device. Variables that the user has set take precedence.
    """
    library = _find_library("nvshmem", _NVSHMEM)
    place = Place(
        num_processes=config.num_processes,
        devices_per_process=_num_visible_gpus(environment),
        xla_version=xla_version(),
        nccl_version=None,
        has_nvshmem=library is not None,
        is_nvshmem_started=True,
    )
    is_requested = config.transport == "nvshmem" or (config.transport == "auto" and config.num_processes > 1)
    if not is_requested or unavailable("nvshmem", place) is not None:
        return  # `choose` reports the reason later, after the number of devices has been checked
    if NVSHMEM_OPTION not in users_options(environment):
        environment["XLA_FLAGS"] = f"--{NVSHMEM_OPTION}=true {environment.get('XLA_FLAGS', '')}".strip()
    bootstrap = Path(library).with_name(_NVSHMEM_BOOTSTRAP)
    if bootstrap.is_file():  # in the directory of a pip-installed library, which may not be in a search path
        environment.setdefault("NVSHMEM_BOOTSTRAP_UID_PLUGIN", str(bootstrap))
    if config.nvshmem_heap_bytes:
        environment.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(config.nvshmem_heap_bytes))


def nccl_version() -> Version | None:
    """The version of the NCCL that XLA loads; None if it is not installed."""
    path = _find_library("nccl", _NCCL)
    if path is None:
        return None
    code = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(code))
    return code.value // 10_000, code.value // 100 % 100, code.value % 100  # since 2.9


def _find_library(package: str, name: str) -> str | None:
    """The library in NVIDIA's pip package `nvidia.<package>`, else in the loader's path; None if in neither."""
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
    """The number of GPUs visible to this process, as far as known before JAX starts."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
