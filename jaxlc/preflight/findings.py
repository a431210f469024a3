"""Compares the facts of all processes with each other, and with what the config needs. No process is asked here."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxlc.core.counts import gib
from jaxlc.preflight.facts import NOT_FOUND, Facts
from jaxlc.preflight.link_speed import ALL_PAIRS, RING
from jaxlc.preflight.needs import Figures, Needs
from jaxlc.runtime.unified_memory import HOST_SHARE
from jaxlc.train.stragglers import COPY, PRODUCT, UPLOAD, Times, least_device_seconds, slow_ones

# The table of phases of a hang compares the clocks of machines, and calls a process silent that is 15 s late.
CLOCK_SECONDS = 5.0
# InfiniBand registers the buffers of NCCL, a few GiB: a limit, if there is one, must be far above them.
_LOCKED_BYTES = 2**36
MEASURED = (PRODUCT, COPY, UPLOAD, RING, ALL_PAIRS)
NAMES = {
    PRODUCT: "a matrix product",
    COPY: "a copy to the host",
    UPLOAD: "a copy from the host",
    RING: "a hop around the ring of all devices",
    ALL_PAIRS: "an exchange between all pairs of devices",
}
_MAX_NAMES = 8


def findings(
    facts: Sequence[Facts], needs: Needs | None, figures: Figures | None, *, factor: float, least_share: float
) -> list[str]:
    """One sentence for each failure; empty if the run can start.

    Args:
      facts: of all processes, in order.
      needs: None: the config does not fit these devices, which is reported elsewhere.
      figures: None: rates are not compared with a plan, as on CPU.
      factor: a device is slow if its time is more than this multiple of the median.
      least_share: a device is slow if it reaches less than this share of the plan's rate.
    """
    sentences = [
        *_version_findings(facts),
        *_host_findings(facts),
        *_clock_findings(facts),
        *_limit_findings(facts),
        *(_memory_findings(facts, needs) if needs else ()),
        *_directory_findings(facts, needs),
        *_speed_findings(facts, figures, factor, least_share),
    ]
    return list(dict.fromkeys(sentences))  # one for all equal GPUs of a process


def clock_offsets(facts: Sequence[Facts]) -> list[float]:
    """How many seconds each clock is ahead of the median of all; the median over barriers, whose ends are not exactly
    at the same time."""
    rounds = list(zip(*(own.clock for own in facts)))
    medians = [statistics.median_low(times) for times in rounds]
    return [statistics.median([t - median for t, median in zip(own.clock, medians)] or [0.0]) for own in facts]


def seconds_of(own: Facts, name: str) -> float | None:
    """The time of the slowest device of a process, or of its links; None: not measured."""
    if name in (RING, ALL_PAIRS):
        return own.link_seconds.get(name)
    return max(own.device_seconds.get(name, []), default=None)


def _version_findings(facts: Sequence[Facts]) -> Iterator[str]:
    for name in facts[0].versions:
        groups = _grouped(facts, lambda own, name=name: own.versions.get(name, NOT_FOUND))
        if len(groups) > 1:
            found = "; ".join(f"{version} on {_names(group)}" for version, group in _rarest_first(groups))
            yield f"the version of {name} differs: {found}; install the same on all machines"


def _host_findings(facts: Sequence[Facts]) -> Iterator[str]:
    kinds = _grouped(facts, lambda own: own.device_kind)
    if len(kinds) > 1:
        found = "; ".join(f"{kind} on {_names(group)}" for kind, group in _rarest_first(kinds))
        yield f"the devices differ: {found}"
    hosts = _grouped(facts, lambda own: own.host)
    duplicates = {host: group for host, group in hosts.items() if len({own.boot_id for own in group}) > 1}
    for host, group in duplicates.items():
        yield f"several machines have the host name {host}: {_names(group)}; give each its own"
    hosts = {host: group for host, group in hosts.items() if not duplicates}  # otherwise counts mean nothing
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
        for uuid in own.gpu_uuids:
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
    low = [own for own in facts if own.locked_bytes is not None and own.locked_bytes < _LOCKED_BYTES]
    low = [own for own in low if own.has_infiniband and own.platform == "gpu" and is_network_used]
    if low:
        yield (
            f"`ulimit -l` is {low[0].locked_bytes // 1024:,} KiB on {_names(low)}, and InfiniBand needs `ulimit -l"
            " unlimited`, in Kubernetes the capability IPC_LOCK"
        )


def _memory_findings(facts: Sequence[Facts], needs: Needs) -> Iterator[str]:
    for own in facts:
        for total, free in zip(own.gpu_bytes, own.gpu_free_bytes):
            pool_bytes = needs.memory_fraction * total
            if needs.memory_fraction and needs.pool_bytes > pool_bytes:
                yield (
                    f"a GPU of {own.name} has {gib(total)} GiB, of which JAX's pool takes {needs.memory_fraction:g},"
                    f" and the step needs {gib(needs.pool_bytes)} GiB ({needs.source})"
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


def _speed_findings(
    facts: Sequence[Facts], figures: Figures | None, factor: float, least_share: float
) -> Iterator[str]:
    rows = [
        Times(
            own.process_id,
            own.host,
            0,
            0.0,
            own.device_seconds | {name: [seconds] for name, seconds in own.link_seconds.items()},
            {},
        )
        for own in facts
    ]
    reported: set[str] = set()
    for slow in slow_ones(rows, factor, least_device_seconds(facts[0].platform), MEASURED):
        reported.add(slow.cause)
        device = "" if slow.cause in (RING, ALL_PAIRS) else f"device {slow.device} of "
        yield (
            f"{device}process {slow.times.process_id} on {slow.times.host} is slow: {NAMES[slow.cause]} takes"
            f" {1e3 * slow.seconds:.2f} ms, and {1e3 * slow.median_seconds:.2f} ms in the median"
        )
    for name, expected in figures.seconds.items() if figures else ():
        measured = [(seconds, own) for own in facts if (seconds := seconds_of(own, name)) is not None]
        low = [own for seconds, own in measured if expected < least_share * seconds]
        if low and name not in reported:
            worst = max(seconds for seconds, _ in measured)
            yield (
                f"{NAMES[name]} takes {1e3 * worst:.2f} ms, and the plan assumes {1e3 * expected:.2f} ms:"
                f" {_names(low)} reach less than {least_share:.0%} of its rate"
            )


def _grouped(facts: Iterable[Facts], key: Callable[[Facts], str]) -> dict[str, list[Facts]]:
    groups: dict[str, list[Facts]] = defaultdict(list)
    for own in facts:
        groups[key(own)].append(own)
    return groups


def _rarest_first(groups: dict[str, list[Facts]]) -> list[tuple[str, list[Facts]]]:
    return sorted(groups.items(), key=lambda item: len(item[1]))


def _names(group: Sequence[Facts]) -> str:
    """The processes of a group, "processes 1, 3 on node1, node2"; a long list is cut."""
    processes, hosts = [str(own.process_id) for own in group], list(dict.fromkeys(own.host for own in group))
    noun = "process" if len(group) == 1 else "processes"
    return f"{noun} {_cut(processes)} on {_cut(hosts)}"


def _cut(words: Sequence[str]) -> str:
    more = len(words) - _MAX_NAMES
    return ", ".join(words[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
