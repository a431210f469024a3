"""What each process finds on its machine before a run: versions, limits, free memory; read before JAX starts. Compares
the facts of all processes with each other, and with what the config needs: findings, and a table.
"""

import ctypes
import dataclasses
import importlib.metadata
import itertools
import json
import operator
import platform
import re
import resource
import socket
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax

from jaxlc.checkpoints.files import CHECKPOINTS_DIRECTORY, committed_steps
from jaxlc.checkpoints.pretrained import checkpoint_part
from jaxlc.config import Config
from jaxlc.core import aligned, first_of, gib
from jaxlc.core.processes import UNKNOWN_MEMORY, free_host_bytes, system_text
from jaxlc.runtime import memory
from jaxlc.runtime.memory import HOST_SHARE, query_gpus
from jaxlc.runtime.xla_flags import find_library, installed_plugin, nccl_version
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.memory import pinned_bytes
from jaxlc.step.state import DEVICE, bytes_per_device
from jaxlc.step.step import TrainStep, build_step
from jaxlc.train import stragglers
from jaxlc.train.stragglers import COPY, PRODUCT, Times, least_device_seconds, slow_ones

NOT_FOUND = "not found"
_CAP_IPC_LOCK = 14  # linux/capability.h: a process that has it locks memory without limit
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
    # that this process uses: UUID, bytes, and bytes that were free before JAX started
    gpus: list[list[Any]] = field(default_factory=list)
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
        boot_id=system_text(Path("/proc/sys/kernel/random/boot_id")),
        versions=versions(rows[0][4] if rows else ""),
        locked_bytes=None if limit == resource.RLIM_INFINITY or may_lock_memory() else limit,
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        host_bytes=free_host_bytes(),
        gpus=[[row[1], _mebibytes(row[2]), _mebibytes(row[3])] for row in rows],
    )


def with_visible_gpus(facts: Facts, environment: Mapping[str, str]) -> Facts:
    """The facts with the GPUs of CUDA_VISIBLE_DEVICES only, which `runtime.start` sets: indices or
    UUIDs.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not facts.gpus:
        return facts
    names = [name.strip() for name in visible.split(",") if name.strip()]
    is_visible = [
        str(index) in names
        or any(name.startswith("GPU-") and uuid.startswith(name) for name in names)
        for index, (uuid, *_) in enumerate(facts.gpus)
    ]
    return dataclasses.replace(facts, gpus=list(itertools.compress(facts.gpus, is_visible)))


def versions(driver: str = "") -> dict[str, str]:
    """The versions that must be equal on all machines. No GPU is needed.

    Args:
      driver: from nvidia-smi.
    """
    plugin = installed_plugin()
    nccl = nccl_version()
    # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  ..."
    loaded = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", system_text(Path("/proc/driver/nvidia/version")))
    return {
        "Python": platform.python_version(),
        **{name: _package(name) for name in ("jaxlc", "jax", "jaxlib")},
        "GPU plugin": " ".join(plugin) if plugin else NOT_FOUND,
        "driver": driver or (loaded[0] if loaded else NOT_FOUND),
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
        r"^CapEff:\s*([0-9a-f]+)", status or system_text(Path("/proc/self/status")), re.MULTILINE
    )
    return match is not None and bool(int(match[1], 16) >> _CAP_IPC_LOCK & 1)


def _package(*names: str) -> str:
    """The version of the first of these packages that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return NOT_FOUND


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


# Logs, metrics and the ages of files on a shared file system have the times of several machines.
CLOCK_SECONDS = 5.0
# InfiniBand registers the buffers of NCCL, a few GiB: a limit, if there is one, must be far above
# them.
_LOCKED_BYTES = 2**36
_NAMES = {PRODUCT: "a matrix product", COPY: "a copy to the host"}
MARK = "*"  # the worst value of a column
_MAX_ROWS = 64  # of more processes, only the first ones and those with a worst value


class Needs(NamedTuple):
    """Bytes that the largest stage needs, which are known without the compiler: not those of
    activations.
    """

    state_bytes: int  # on each GPU
    memory_fraction: float  # of each GPU's memory, which JAX's pool takes at the start
    host_bytes_per_device: int  # on a machine, for each of its devices
    host_bytes_per_process: int
    disk_bytes: int  # checkpoints that the run adds to the workdir

    def host_bytes(self, num_devices: int, num_processes: int) -> int:
        """On a machine with this number of devices and processes of the run."""
        return (
            num_devices * self.host_bytes_per_device + num_processes * self.host_bytes_per_process
        )

    def text(self, num_devices: int) -> str:
        """One line, for a process with this number of devices."""
        return (
            f"the config needs {gib(self.state_bytes)} GiB of each device for its training state, and activations;"
            f" {gib(self.host_bytes(num_devices, 1))} GiB of host memory per process; {gib(self.disk_bytes)} GiB of"
            " disk for checkpoints"
        )


def needs_of(configs: Sequence[Config], workdir: Path, platform: str) -> Needs:
    """What the stages of a run need.

    Raises:
      UserError: the mesh has another number of devices.
    """
    parts = [
        _needs_of_step(build_step(config, make_mesh(config.mesh)), platform) for config in configs
    ]
    largest = Needs(*map(max, *parts, parts[0]))
    num_saved = len(committed_steps(workdir / CHECKPOINTS_DIRECTORY))
    # The oldest checkpoint is deleted after the newest is complete.
    num_more = max(1, configs[0].train.keep_checkpoints + 1 - num_saved)
    return largest._replace(disk_bytes=num_more * largest.disk_bytes)


def _needs_of_step(step: TrainStep, platform: str) -> Needs:
    config = step.config
    state = step.abstract_state
    saved = checkpoint_part(step, state)
    host_bytes = bytes_per_device(saved)  # while a checkpoint is written
    pool_bytes = memory.host_pool_bytes(config.runtime, pinned_bytes(config).pooled)
    if platform == "cpu":  # no pools, and the memory of the devices is that of the host
        pool_bytes = 0
        host_bytes += bytes_per_device(state)
    return Needs(
        state_bytes=bytes_per_device(state, step.memory_spaces, DEVICE),
        memory_fraction=0.0 if config.runtime.unified_memory else config.runtime.memory_fraction,
        host_bytes_per_device=pool_bytes + host_bytes,
        host_bytes_per_process=memory.pools_per_node_bytes(pool_bytes, 0, 1),
        disk_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(saved)),
    )


def findings(facts: Sequence[Facts], needs: Needs | None, *, factor: float) -> list[str]:
    """One sentence for each failure; empty if the run can start.

    Args:
      facts: of all processes, in order.
      needs: None: the config does not fit these devices, which is reported elsewhere.
      factor: a device is slow if its time is more than this multiple of the median.
    """
    sentences = [
        *_version_findings(facts),
        *_host_findings(facts),
        *_clock_findings(facts),
        *_limit_findings(facts),
        *(_memory_findings(facts, needs) if needs else ()),
        *_directory_findings(facts, needs),
        *_speed_findings(facts, factor),
    ]
    return list(dict.fromkeys(sentences))  # one for all equal GPUs of a process


def clock_offsets(facts: Sequence[Facts]) -> list[float]:
    """How many seconds each clock is ahead of the median of all; the median over barriers, whose
    ends are not exactly at the same time."""
    medians = [statistics.median_low(times) for times in zip(*(own.clock for own in facts))]
    return [
        statistics.median([t - median for t, median in zip(own.clock, medians)] or [0.0])
        for own in facts
    ]


def table_lines(facts: Sequence[Facts]) -> list[str]:
    """A row per process, with the worst value of each column marked."""
    columns: dict[str, list[str]] = {
        "process": [str(own.process_id) for own in facts],
        "host": [own.host for own in facts],
    }
    worst = set()
    for head, (values, text, badness) in _columns(facts).items():
        cells = [
            text(value) if value is not None and abs(value) < UNKNOWN_MEMORY else "-"
            for value in values
        ]
        known = [index for index, cell in enumerate(cells) if cell != "-"]
        if not known:
            continue
        columns[head] = [f"{cell} " for cell in cells]
        if len({cells[index] for index in known}) > 1:
            index = max(known, key=lambda index: badness(values[index]))
            columns[head][index] = cells[index] + MARK
            worst.add(index)
    rows = list(zip(*columns.values()))
    shown = [row for index, row in enumerate(rows) if index < _MAX_ROWS or index in worst]
    lines = aligned([tuple(columns), *shown], "rl" + "r" * (len(columns) - 2))
    if len(shown) < len(rows):
        lines.append(f"{len(rows) - len(shown)} more processes without a worst value")
    return [*lines, f"{MARK} the worst of the column"]


class _Column(NamedTuple):
    values: list[Any]  # of each process; None: not known
    text: Callable[[Any], str]
    # the value with the largest one is the worst
    badness: Callable[[Any], float] = operator.neg


def _columns(facts: Sequence[Facts]) -> dict[str, _Column]:
    """By their heads."""
    size, dtype = stragglers.operand(facts[0].platform)

    def rates(name: str, amount: float) -> list[float | None]:
        seconds = [max(own.device_seconds.get(name, []), default=None) for own in facts]
        return [x and amount / x for x in seconds]

    products = rates(stragglers.PRODUCT, stragglers.NUM_PRODUCTS * 2e-12 * size**3)
    copies = rates(stragglers.COPY, 1e-9 * size * size * dtype.itemsize)
    return {
        "free GPU GiB": _Column(
            [min((x for *_, x in own.gpus), default=None) for own in facts], gib
        ),
        "free host GiB": _Column([own.host_bytes for own in facts], gib),
        "ulimit -l GiB": _Column([own.locked_bytes for own in facts], gib),
        "clock s": _Column(clock_offsets(facts), "{:+.2f}".format, abs),
        "TFLOP/s": _Column(products, "{:.3g}".format),
        "to host GB/s": _Column(copies, "{:.3g}".format),
    }


def _version_findings(facts: Sequence[Facts]) -> Iterator[str]:
    for name in facts[0].versions:
        groups = _grouped(facts, lambda own, name=name: own.versions.get(name, NOT_FOUND))
        if len(groups) > 1:
            found = _rarest_first(groups)
            yield f"the version of {name} differs: {found}; install the same on all machines"


def _host_findings(facts: Sequence[Facts]) -> Iterator[str]:
    kinds = _grouped(facts, lambda own: own.device_kind)
    if len(kinds) > 1:
        yield f"the devices differ: {_rarest_first(kinds)}"
    hosts = _grouped(facts, lambda own: own.host)
    duplicates = {
        host: group for host, group in hosts.items() if len({own.boot_id for own in group}) > 1
    }
    for host, group in duplicates.items():
        yield f"several machines have the host name {host}: {_names(group)}; give each its own"
    # otherwise counts mean nothing
    hosts = {host: group for host, group in hosts.items() if not duplicates}
    for what, counts in (
        ("processes", {host: len(group) for host, group in hosts.items()}),
        ("devices", {host: sum(own.num_devices for own in group) for host, group in hosts.items()}),
    ):
        usual = max(Counter(counts.values()).items(), key=lambda item: item[1], default=(0, 0))[0]
        for host, count in counts.items():
            if count != usual:
                yield f"{host} has {count} {what} of the run, and most machines have {usual}"
    users: dict[tuple[str, str], list[Facts]] = defaultdict(list)
    for own in facts:
        for uuid, *_ in own.gpus:
            users[own.boot_id, uuid].append(own)
    for (_, uuid), group in users.items():
        if len(group) > 1:
            yield f"{_names(group)} use the same GPU {uuid}; give each its own with CUDA_VISIBLE_DEVICES"


def _clock_findings(facts: Sequence[Facts]) -> Iterator[str]:
    for own, seconds in zip(facts, clock_offsets(facts)):
        if abs(seconds) > CLOCK_SECONDS:
            direction = "ahead of" if seconds > 0 else "behind"
            yield f"the clock of {own.name} is {abs(seconds):.1f} s {direction} that of most processes; start NTP there"


def _limit_findings(facts: Sequence[Facts]) -> Iterator[str]:
    is_network_used = len({own.host for own in facts}) > 1
    low = [
        own for own in facts if own.locked_bytes is not None and own.locked_bytes < _LOCKED_BYTES
    ]
    low = [own for own in low if own.has_infiniband and own.platform == "gpu" and is_network_used]
    if low:
        yield (
            f"`ulimit -l` is {low[0].locked_bytes // 1024:,} KiB on {_names(low)}, and InfiniBand needs `ulimit -l"
            " unlimited`, in Kubernetes the capability IPC_LOCK"
        )


def _memory_findings(facts: Sequence[Facts], needs: Needs) -> Iterator[str]:
    for own in facts:
        for _, total, free in own.gpus:
            pool_bytes = needs.memory_fraction * total
            if needs.memory_fraction and needs.state_bytes > pool_bytes:
                yield (
                    f"a GPU of {own.name} has {gib(total)} GiB, of which JAX's pool takes {needs.memory_fraction:g},"
                    f" and the training state needs {gib(needs.state_bytes)} GiB"
                )
            elif free < pool_bytes:
                yield (
                    f"a GPU of {own.name} has {gib(free)} of {gib(total)} GiB free, and JAX's pool takes"
                    f" {gib(pool_bytes)} GiB; end the program that uses the rest"
                )
    for host, group in _grouped(facts, lambda own: own.host).items():
        needed = needs.host_bytes(sum(own.num_devices for own in group), len(group))
        free = min(own.host_bytes for own in group)
        if needed > HOST_SHARE * free:
            yield (
                f"{host} has {gib(free)} GiB of free host memory, of which a run may use {HOST_SHARE:.0%}, and the"
                f" config needs up to {gib(needed)} GiB: pools of pinned memory, and a checkpoint while it is written"
            )


def _directory_findings(facts: Sequence[Facts], needs: Needs | None) -> Iterator[str]:
    names = dict(
        write="cannot be written",
        read="is not shared",
        rename="does not show a renamed file",
        lock="has no working locks",
    )
    for name, what in names.items():
        groups = _grouped(
            (own for own in facts if name in own.directory_problems),
            lambda own, name=name: own.directory_problems[name],
        )
        for reason, group in groups.items():
            yield f"the workdir {what}: {reason} ({_names(group)})"
    free = min(own.directory_free_bytes for own in facts)
    if needs and free < needs.disk_bytes:
        yield f"the workdir has {gib(free)} GiB free, and the checkpoints of the run need {gib(needs.disk_bytes)} GiB"


def _speed_findings(facts: Sequence[Facts], factor: float) -> Iterator[str]:
    rows = [Times(own.process_id, own.host, 0, 0.0, own.device_seconds, {}) for own in facts]
    for slow in slow_ones(rows, factor, least_device_seconds(facts[0].platform)):
        yield (
            f"device {slow.device} of process {slow.times.process_id} on {slow.times.host} is slow:"
            f" {_NAMES[slow.cause]} takes {1e3 * slow.seconds:.2f} ms, and {1e3 * slow.median_seconds:.2f} ms in the"
            " median"
        )


def _grouped(facts: Iterable[Facts], key: Callable[[Facts], str]) -> dict[str, list[Facts]]:
    groups: dict[str, list[Facts]] = defaultdict(list)
    for own in facts:
        groups[key(own)].append(own)
    return groups


def _rarest_first(groups: dict[str, list[Facts]]) -> str:
    ordered = sorted(groups.items(), key=lambda item: len(item[1]))
    return "; ".join(f"{value} on {_names(group)}" for value, group in ordered)


def _names(group: Sequence[Facts]) -> str:
    """The processes of a group, "processes 1, 3 on node1, node2"; a long list is cut."""
    processes = [str(own.process_id) for own in group]
    hosts = list(dict.fromkeys(own.host for own in group))
    noun = "process" if len(group) == 1 else "processes"
    return f"{noun} {first_of(processes)} on {first_of(hosts)}"
