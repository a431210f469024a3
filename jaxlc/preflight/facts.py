"""What each process finds on its machine before a run: versions, limits, free memory. Read before
JAX starts.
"""

import ctypes
import dataclasses
import importlib.metadata
import itertools
import json
import platform
import re
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from jaxlc.runtime.memory import query_gpus
from jaxlc.runtime.xla_flags import find_library, installed_plugin, nccl_version

NOT_FOUND = "not found"
_CAP_IPC_LOCK = 14  # linux/capability.h: a process that has it locks memory without limit
UNKNOWN_MEMORY = 2**62  # more than any machine has
_GPU_FIELDS = ("index", "uuid", "memory.total", "memory.free", "driver_version")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a process has found. Times are in seconds, of the slowest of its devices where a device
    is measured.
    """

    process_id: int
    host: str
    # of the running kernel: equal names with different ones are two machines; "": unknown
    boot_id: str
    versions: dict[str, str]  # NOT_FOUND: not installed
    locked_bytes: int | None = None  # `ulimit -l`; None: unlimited
    has_infiniband: bool = False
    host_bytes: int = UNKNOWN_MEMORY  # free, within the limit of the container
    gpu_uuids: list[str] = field(default_factory=list)  # that this process uses
    gpu_bytes: list[int] = field(default_factory=list)
    gpu_free_bytes: list[int] = field(default_factory=list)  # before JAX has started
    # Measured together with the other processes:
    platform: str = "cpu"
    device_kind: str = "cpu"
    num_devices: int = 1  # of this process
    # time.time() right after each of some barriers
    clock: list[float] = field(default_factory=list)
    # what failed in the workdir -> why
    directory_problems: dict[str, str] = field(default_factory=dict)
    directory_free_bytes: int = UNKNOWN_MEMORY
    # as `stragglers.device_times`
    device_seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"process {self.process_id} on {self.host}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


def read_facts() -> Facts:
    """The facts of this machine that are known before JAX starts: GPU memory is free of the run's
    own pools.
    """
    rows = [row for row in query_gpus(*_GPU_FIELDS) if len(row) == len(_GPU_FIELDS)]
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Facts(
        process_id=0,  # not known yet
        host=socket.gethostname(),
        boot_id=_text(Path("/proc/sys/kernel/random/boot_id")),
        versions=versions(rows[0][4] if rows else ""),
        locked_bytes=None if limit == resource.RLIM_INFINITY or may_lock_memory() else limit,
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        host_bytes=free_host_bytes(),
        gpu_uuids=[row[1] for row in rows],
        gpu_bytes=[_mebibytes(row[2]) for row in rows],
        gpu_free_bytes=[_mebibytes(row[3]) for row in rows],
    )


def with_visible_gpus(facts: Facts, environment: Mapping[str, str]) -> Facts:
    """The facts with the GPUs of CUDA_VISIBLE_DEVICES only, which `runtime.start` sets: indices or
    UUIDs.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not facts.gpu_uuids:
        return facts
    names = [name.strip() for name in visible.split(",") if name.strip()]
    is_visible = [
        str(index) in names
        or any(name.startswith("GPU-") and uuid.startswith(name) for name in names)
        for index, uuid in enumerate(facts.gpu_uuids)
    ]
    return dataclasses.replace(
        facts,
        gpu_uuids=list(itertools.compress(facts.gpu_uuids, is_visible)),
        gpu_bytes=list(itertools.compress(facts.gpu_bytes, is_visible)),
        gpu_free_bytes=list(itertools.compress(facts.gpu_free_bytes, is_visible)),
    )


def versions(driver: str = "") -> dict[str, str]:
    """The versions that must be equal on all machines. No GPU is needed.

    Args:
      driver: from nvidia-smi.
    """
    plugin = installed_plugin()
    nccl = nccl_version()
    return {
        "Python": platform.python_version(),
        **{name: _package(name) for name in ("jaxlc", "jax", "jaxlib")},
        "GPU plugin": " ".join(plugin) if plugin else NOT_FOUND,
        "driver": driver or _driver(_text(Path("/proc/driver/nvidia/version"))),
        "CUDA": _package(
            "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime"
        ),
        "NCCL": ".".join(map(str, nccl)) if nccl else NOT_FOUND,
        "cuDNN": _cudnn(),
    }


def may_lock_memory(status: str | None = None) -> bool:
    """Whether this process has the capability IPC_LOCK, as containers get it, and `ulimit -l` does
    not count.

    Args:
      status: text of /proc/self/status.
    """
    match = re.search(
        r"^CapEff:\s*([0-9a-f]+)", status or _text(Path("/proc/self/status")), re.MULTILINE
    )
    return match is not None and bool(int(match[1], 16) >> _CAP_IPC_LOCK & 1)


def free_host_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Free memory of the machine, or of the container if its limit leaves less."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _text(meminfo), re.MULTILINE)
    free = [1024 * int(match[1])] if match else []
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        texts = _text(cgroup / limit), _text(cgroup / used)
        if all(text.isdigit() for text in texts):
            # Pages of files count as used, but are dropped when memory is needed.
            cached = re.search(
                r"^(?:total_)?inactive_file (\d+)",
                _text((cgroup / limit).with_name("memory.stat")),
                re.M,
            )
            free.append(int(texts[0]) - int(texts[1]) + (int(cached[1]) if cached else 0))
    return min(free, default=UNKNOWN_MEMORY)


def _package(*names: str) -> str:
    """The version of the first of these packages that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return NOT_FOUND


def _driver(text: str) -> str:
    """The version in /proc/driver/nvidia/version: "NVRM version: NVIDIA UNIX x86_64 Kernel Module
    570.86.15  ...".
    """
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else NOT_FOUND


def _cudnn() -> str:
    path = find_library("cudnn", "libcudnn.so.9")
    if path is None:
        return NOT_FOUND
    try:
        get_version: Any = ctypes.CDLL(path).cudnnGetVersion
    except (OSError, AttributeError):  # a library that it needs is missing
        return f"{path} cannot be loaded"
    get_version.restype = ctypes.c_size_t
    code = get_version()
    return f"{code // 10_000}.{code // 100 % 100}.{code % 100}"


def _mebibytes(text: str) -> int:
    """Bytes; of GPUs that do not report their memory, such as "[N/A]", more than any has."""
    return int(text) * 2**20 if text.isdigit() else UNKNOWN_MEMORY


def _text(path: Path) -> str:
    """The text of a file of the system; "" if there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
