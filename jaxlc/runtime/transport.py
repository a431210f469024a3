"""How attention's hops travel between GPUs, and what each way needs. Imports no jax but inside functions.

    nccl       send and receive: works everywhere
    nvshmem    a put into the neighbour's symmetric heap; only in the XLA of jax 0.10.1 and older
    symmetric  NCCL's own put and signal into registered memory; what newer XLA has instead
    peer       copy engines, between the GPUs of one process

What a compiled program uses is read from it afterwards (`jaxlc.train.verify_compiled`): XLA takes these as wishes.
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

# What "auto" tries between processes. The one of a single process stays with NCCL: its hops never leave the node.
_BY_SPEED = ("nvshmem", "symmetric", "nccl")
# XLA's own words where an older one is loaded: "Put requires NCCL >= 2.29.0".
_FIRST_NCCL_WITH_PUT = (2, 29)
_NCCL = "libnccl.so.2"
_NVSHMEM = "libnvshmem_host.so.3"  # the name that XLA loads
_NVSHMEM_BOOTSTRAP = "nvshmem_bootstrap_uid.so.3"


class Place(NamedTuple):
    """All that a choice of transport may depend on."""

    num_processes: int
    devices_per_process: int
    xla_version: Version  # of the GPU plugin, which is jax's own
    nccl_version: Version | None  # None: there is none
    has_nvshmem: bool  # the library
    is_nvshmem_started: bool  # JAX was started for it: XLA chooses the allocator of its buffers then


class TransportSelection(NamedTuple):
    """A transport, and a sentence that says why this one."""

    name: str
    reason: str
    is_auto: bool


def choose(config: RuntimeConfig, devices: Sequence) -> TransportSelection | None:
    """The transport of a program for `devices`, of `jax.Device`, which need not be here; None on CPU.

    Raises:
      UserError: the one that the config names cannot be used; says why.
    """
    if devices[0].platform == "gpu":
        check_plugin()
        return choose_for(config.transport, place_of(devices))
    if config.transport != "auto" and not config.simulated_devices:
        raise UserError(
            f"config.runtime.transport={config.transport!r} is for GPUs, and the devices here are of"
            f" {devices[0].platform}; use --config.runtime.transport=auto"
        )
    return None


def choose_for(name: str, place: Place) -> TransportSelection:
    """What `name` means at `place`: a named transport never falls back; "auto" says why faster ones declined.

    Raises:
      UserError: the named transport cannot be used at `place`.
    """
    if name != "auto":
        limit = unavailable(name, place)
        if limit is not None:
            raise UserError(f"config.runtime.transport={name!r} cannot be used: {limit}")
        return TransportSelection(name, "named in the config", is_auto=False)
    if place.num_processes == 1:
        return TransportSelection("nccl", "auto; one process", is_auto=True)
    limits = {candidate: unavailable(candidate, place) for candidate in _BY_SPEED}
    chosen = next(candidate for candidate, limit in limits.items() if limit is None)  # nccl has none
    declined = [f"not {candidate}: {limit}" for candidate, limit in limits.items() if limit is not None]
    return TransportSelection(chosen, "; ".join(["auto", *declined]), is_auto=True)


def unavailable(name: str, place: Place) -> str | None:
    """Why transport `name` cannot be used at `place`, and what to do about it; None if it can."""
    version = ".".join(map(str, place.xla_version))
    if name == "nvshmem":
        if place.xla_version > LAST_XLA_WITH_NVSHMEM:
            return f'the XLA of jax {version} does not have NVSHMEM any more, 0.10.1 does: pip install "jaxlc[nvshmem]"'
        if place.devices_per_process > 1:
            return f"NVSHMEM needs a process for each GPU, and here are {place.devices_per_process} GPUs in one"
        if not place.has_nvshmem:
            return f"there is no {_NVSHMEM} here: pip install nvidia-nvshmem-cu12"
        if not place.is_nvshmem_started:
            return (
                "JAX has started without it; restart Python (in a notebook, the kernel) and call"
                " jaxlc.runtime.start(config.runtime) first, without NVSHMEM turned off in XLA_FLAGS"
            )
    elif name == "symmetric":
        if place.nccl_version is None:
            return f"there is no {_NCCL} here: pip install nvidia-nccl-cu12"
        if place.nccl_version < _FIRST_NCCL_WITH_PUT:
            found = ".".join(map(str, place.nccl_version))
            return f"its puts need NCCL 2.29, and here is {found}: pip install --upgrade nvidia-nccl-cu12"
    elif name == "peer" and place.num_processes > 1:
        return f"peer copies work within one process, and there are {place.num_processes}; use 'symmetric' or 'nccl'"
    return None


def place_of(devices: Sequence) -> Place:
    """Where a program for `devices` is to run. Of GPUs that are not here, all libraries are taken to be there."""
    import jax

    num_devices = Counter(device.process_index for device in devices)
    are_here = devices[0] in jax.devices()
    return Place(
        num_processes=len(num_devices),
        devices_per_process=max(num_devices.values()),
        xla_version=xla_version(),
        nccl_version=nccl_version() if are_here else _FIRST_NCCL_WITH_PUT,
        has_nvshmem=not are_here or _find_library("nvshmem", _NVSHMEM) is not None,
        is_nvshmem_started=not are_here or users_options(os.environ).get(NVSHMEM_OPTION) in ("true", "1"),
    )


def prepare(config: RuntimeConfig, environment: dict[str, str]) -> None:
    """Writes what NVSHMEM and XLA read at their start, where NVSHMEM is wanted and can be used; before JAX starts.

    As a compile option alone it would lead to programs whose buffers lie in NCCL's memory: XLA chooses the allocator
    when it opens the device, and looks into XLA_FLAGS for that. What the user has set stays, and wins.
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
    is_wanted = config.transport == "nvshmem" or (config.transport == "auto" and config.num_processes > 1)
    if not is_wanted or unavailable("nvshmem", place) is not None:
        return  # of a named transport `choose` tells the reason, after the number of devices has been looked at
    if NVSHMEM_OPTION not in users_options(environment):
        environment["XLA_FLAGS"] = f"--{NVSHMEM_OPTION}=true {environment.get('XLA_FLAGS', '')}".strip()
    bootstrap = Path(library).with_name(_NVSHMEM_BOOTSTRAP)
    if bootstrap.is_file():  # beside a library of a pip package, where no search path need lead
        environment.setdefault("NVSHMEM_BOOTSTRAP_UID_PLUGIN", str(bootstrap))
    if config.nvshmem_heap_bytes:
        environment.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(config.nvshmem_heap_bytes))


def nccl_version() -> Version | None:
    """The version of the NCCL that XLA loads; None if there is none."""
    path = _find_library("nccl", _NCCL)
    if path is None:
        return None
    code = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(code))
    return code.value // 10_000, code.value // 100 % 100, code.value % 100  # since 2.9


def _find_library(package: str, name: str) -> str | None:
    """The library in NVIDIA's pip package `nvidia.<package>`, else where the loader looks; None: in neither."""
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
    """GPUs that this process will see, as far as that can be told before JAX starts."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
