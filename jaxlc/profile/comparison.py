"""The measured time of a traced step next to its estimate, by class and by ring step.

The estimate is that of the compiled step that was traced, or of a stored plan. No time of a device
counts twice.
"""

import dataclasses
import gzip
import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxlc.config import from_dict
from jaxlc.config.flops import document_pairs
from jaxlc.core import UserError, aligned, hardware
from jaxlc.core.files import read_json_file
from jaxlc.hlo import AnalyzedProgram, analyze
from jaxlc.plan.report import PlanRecord
from jaxlc.profile.trace_events import (
    ATTENTION,
    CLASSES,
    COMMUNICATION,
    HOST_COPY,
    HOST_COPY_KERNEL,
    MATMUL,
    OTHER,
    EventClasses,
    Trace,
)
from jaxlc.simulate import timeline
from jaxlc.simulate.packed_work import one_document
from jaxlc.simulate.roofline import Interval, estimate_text, from_file, two_digits
from jaxlc.simulate.time_model import TimeModel
from jaxlc.simulate.timeline import Prediction
from jaxlc.simulate.topology import Topology, topology
from jaxlc.train.step_profiler import PAIRS, PROGRAM_FILE, RUN_FILE

_MAX_PROGRAM_BYTES = 1 << 30  # uncompressed
_PARENTS = 4  # the trace is in plugins/profile/DATE/ of the directory with the program
_GPUS_PER_DOMAIN = {"gb200": 64}  # assumed, as are 8 of all others


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """What `StepProfiler` wrote next to the trace; None where it did not, as for traces of other
    programs.
    """

    program: AnalyzedProgram | None = None
    about: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    prediction: Prediction
    model: TimeModel | None  # for single ring steps; None for a stored plan
    pairs_share: float = 1.0  # see `Comparison.estimated_pairs_share`


def read_run(trace: Path) -> TracedRun:
    """The program and the config of the traced run, from a parent directory of the trace file.

    Raises:
      UserError: a file is damaged.
    """
    for directory in list(trace.absolute().parents)[:_PARENTS]:
        program = directory / PROGRAM_FILE
        about = directory / RUN_FILE
        if program.exists() and about.exists():
            try:
                with gzip.open(program) as file:
                    text = file.read(_MAX_PROGRAM_BYTES + 1)
                if len(text) > _MAX_PROGRAM_BYTES:
                    raise ValueError(f"the program has more than {_MAX_PROGRAM_BYTES:,} bytes")
                run = read_json_file(about)
                types = dict(config=dict, num_devices=int, device_kind=str)
                is_valid = isinstance(run, dict) and run.get(PAIRS, 0) is not None
                if not is_valid or not all(isinstance(run.get(x), y) for x, y in types.items()):
                    raise ValueError(f"expected a JSON object with {', '.join(types)}")
                return TracedRun(program=analyze(text.decode()), about=run)
            except (OSError, EOFError, ValueError, zlib.error) as error:
                raise UserError(
                    f"cannot read {program} and {about.name}: {error}; trace the steps again"
                ) from error
    return TracedRun()


def predict(run: TracedRun, *, plan: str, topology_name: str, constants: str) -> Estimate | None:
    """The estimate of a plan, or of the traced program; None if there is neither, or if the GPUs
    are unknown.

    Raises:
      UserError: an invalid plan, topology or constants file.
    """
    if plan:
        return Estimate(prediction=PlanRecord.from_json(plan).predicted, model=None)
    roofline = from_file(constants)
    if run.program is None or run.about is None:
        return None
    config = from_dict(run.about["config"])
    gpus = _gpus(run.about, topology_name, config.runtime.topology)
    if gpus is None:
        return None
    whole = config.train.global_batch_size * document_pairs(config.model, [config.data.seq_len])
    share = run.about.get(PAIRS, whole) / whole if whole else 1.0
    model = TimeModel(gpus, config, roofline, one_document(config, share))
    return Estimate(prediction=timeline.predict(run.program, model), model=model, pairs_share=share)


def _gpus(about: dict[str, Any], requested: str, configured: str) -> Topology | None:
    """The GPUs of the run; None if they are not listed in core/hardware.py, as CPUs.

    Args:
      requested: a topology, or "".
      configured: config.runtime.topology, which counts if it is of the run's GPUs.
    Raises:
      UserError: an invalid `requested`, or one of another size.
    """
    num_devices = about["num_devices"]
    if requested:
        gpus = topology(requested)
        if gpus.num_gpus != num_devices:
            raise UserError(
                f"--topology={gpus} has {gpus.num_gpus} GPUs, but the traced run had {num_devices}"
            )
        return gpus
    device = hardware.find(about["device_kind"])
    if device is None:
        return None
    if (
        configured
        and topology(configured).device == device
        and topology(configured).num_gpus == num_devices
    ):
        return topology(configured)
    per_domain = _GPUS_PER_DOMAIN.get(device.name, 8)
    if num_devices <= per_domain or num_devices % per_domain:
        return topology(f"{device.name}:1x{num_devices}")
    return topology(f"{device.name}:{num_devices // per_domain}x{per_domain}")


GAP = "gaps"  # nothing is in flight


class Activity(NamedTuple):
    kind: str  # one of CLASSES
    label: str  # the instruction of a collective; else ""
    start_seconds: float
    end_seconds: float


class TimeUse(NamedTuple):
    """Seconds of one device."""

    by_class: Counter[str]  # CLASSES and GAP; they add up to the span
    # by label: time in which it is in flight and no kernel runs
    exposed_by_collective: Counter[str]
    # time in which at least one event of the class is in flight, hidden or not
    busy_by_class: Counter[str]


def measure(intervals: Sequence[Activity], start_seconds: float, end_seconds: float) -> TimeUse:
    """The use of the span from `start_seconds` to `end_seconds`; intervals are cut to it.

    Where several intervals overlap, the time counts for the one whose class is first in CLASSES. So
    communication and host copies get the exposed time, during which no kernel runs.
    """
    changes = []
    for number, interval in enumerate(intervals):
        start = max(interval.start_seconds, start_seconds)
        end = min(interval.end_seconds, end_seconds)
        if start < end:
            changes += [(start, number, True), (end, number, False)]
    changes.sort()
    use = TimeUse(Counter(), Counter(), Counter())
    active: dict[str, set[int]] = {kind: set() for kind in CLASSES}
    now = start_seconds
    for time, number, is_start in changes:
        _count(use, active, intervals, time - now)
        now = time
        (set.add if is_start else set.remove)(active[intervals[number].kind], number)
    _count(use, active, intervals, end_seconds - now)
    return use


def _count(
    use: TimeUse, active: dict[str, set[int]], intervals: Sequence[Activity], seconds: float
) -> None:
    if not seconds:
        return
    kinds = [kind for kind in CLASSES if active[kind]]
    use.busy_by_class.update(dict.fromkeys(kinds, seconds))
    first = kinds[0] if kinds else GAP
    use.by_class[first] += seconds
    if first == COMMUNICATION:
        for label in {intervals[number].label for number in active[COMMUNICATION]}:
            use.exposed_by_collective[label] += seconds


_NAMES = {
    COMMUNICATION: "exposed communication",
    HOST_COPY: "exposed host copies",
    GAP: "gaps between kernels",
}


@dataclass(frozen=True, kw_only=True)
class ClassTime:
    """Time of a step; the measured times of all classes add up to the step."""

    name: str
    measured_seconds: float
    estimated_seconds: float | None  # None: there is no estimate


@dataclass(frozen=True, kw_only=True)
class RingStepTime:
    """One collective instruction of attention."""

    instruction: str
    pass_name: str
    runs_per_step: float
    measured_seconds: float  # mean time in flight of one run
    exposed_seconds: float  # per step: in flight while no kernel runs
    estimated_seconds: float | None  # one run
    is_estimated_hidden: bool | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Means over the devices and steps of a trace. `print` shows the tables."""

    num_devices: int
    num_steps: int
    step_seconds: float
    estimated_step_seconds: float | None
    estimated_interval: Interval | None  # factors on all estimates
    classes: tuple[ClassTime, ...]
    ring_steps: tuple[RingStepTime, ...]  # empty without the compiled step
    communication_seconds: float  # per step, exposed or not; concurrent transfers count once
    host_copy_seconds: float  # as above
    median_gap_seconds: float | None  # between two kernels of a device; None with one kernel
    # Kernels without an instruction of the program, such as those of CUDA graphs; their class
    # follows from their names.
    unknown_seconds: float
    # Pairs of a query and a key of the traced steps, which the estimate counts, relative to sequences that are one
    # document each; 1 where they are unknown. None: there is no estimate.
    estimated_pairs_share: float | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        title = f"One step: mean of {self.num_steps} steps and {self.num_devices} devices"
        lines = [title, "", *aligned(_class_table(self)), ""]
        if self.ring_steps:
            lines += ["Collectives of attention", "", *aligned(_ring_table(self), "llrrrrl"), ""]
        return "\n".join([*lines, *_notes(self)])


def compare(
    trace: Trace, run: TracedRun, estimate: Estimate | None, *, num_steps: int = 0
) -> Comparison:
    """Compares a trace with `estimate`; see `jaxlc.profile.compare`.

    Raises:
      UserError: the number of steps is unknown, or negative.
    """
    if num_steps < 0:
        raise UserError(
            f"invalid number of traced steps {num_steps}: expected at least 1, or 0 for those of the trace"
        )
    num_steps = num_steps or len(trace.steps)
    if not num_steps:
        raise UserError(
            "the trace has no ranges of training steps: set --steps to the number of traced steps"
        )
    classes = EventClasses(run.program)
    module = _step_module(trace)
    uses = []
    durations = defaultdict(list)
    gaps = []
    spans = []
    unknown = Counter()
    for device, events in trace.devices.items():
        step_events = [event for event in events if event.module == module] or events
        start = step_events[0].start_seconds
        end = max(event.end_seconds for event in step_events)
        intervals = []
        for event in events:
            kind = classes.class_of(event)
            if kind is None or event.end_seconds <= start or event.start_seconds >= end:
                continue
            label = classes.instruction_of(event) or event.instruction
            intervals.append(Activity(kind, label, event.start_seconds, event.end_seconds))
            if kind == COMMUNICATION:
                durations[label].append(event.end_seconds - event.start_seconds)
            if (
                run.program is not None
                and kind != HOST_COPY
                and classes.instruction_of(event) is None
            ):
                unknown[device] += event.end_seconds - event.start_seconds
        uses.append(measure(intervals, start, end))
        gaps += _gaps(intervals)
        spans.append(end - start)
    num_runs = num_steps * len(uses)
    return Comparison(
        num_devices=len(uses),
        num_steps=num_steps,
        step_seconds=sum(spans) / num_runs,
        estimated_step_seconds=estimate and estimate.prediction.step_seconds,
        estimated_interval=estimate and estimate.prediction.interval,
        classes=_class_times(uses, num_runs, estimate),
        ring_steps=_ring_steps(uses, durations, num_runs, run, estimate),
        communication_seconds=sum(use.busy_by_class[COMMUNICATION] for use in uses) / num_runs,
        host_copy_seconds=sum(use.busy_by_class[HOST_COPY] for use in uses) / num_runs,
        median_gap_seconds=statistics.median(gaps) if gaps else None,
        unknown_seconds=unknown.total() / num_runs,
        estimated_pairs_share=estimate and estimate.pairs_share,
    )


def _step_module(trace: Trace) -> str:
    """The HLO module with the most time; "" if the profiler names no modules."""
    seconds: Counter[str] = Counter()
    for events in trace.devices.values():
        for event in events:
            if event.module:
                seconds[event.module] += event.end_seconds - event.start_seconds
    return max(seconds, key=seconds.get, default="")


def _gaps(intervals: Iterable[Activity]) -> list[float]:
    """Time from the end of each kernel to the start of the next, where they do not overlap."""
    kernels = sorted(
        (interval.start_seconds, interval.end_seconds)
        for interval in intervals
        if interval.kind in (ATTENTION, MATMUL, OTHER)
    )
    return [start - end for (_, end), (start, _) in zip(kernels, kernels[1:]) if start > end]


def _class_times(
    uses: Sequence[TimeUse], num_runs: int, estimate: Estimate | None
) -> tuple[ClassTime, ...]:
    estimated: dict[str, float] = {}
    if estimate is not None:
        prediction = estimate.prediction
        estimated = {
            kind: prediction.seconds_by_kind.get(kind, 0.0) for kind in (ATTENTION, MATMUL, OTHER)
        }
        estimated[COMMUNICATION] = prediction.exposed_communication_seconds
        estimated[HOST_COPY] = prediction.exposed_host_copy_seconds
    return tuple(
        ClassTime(
            name=_NAMES.get(kind, kind),
            measured_seconds=sum(use.by_class[kind] for use in uses) / num_runs,
            estimated_seconds=estimated.get(kind),
        )
        for kind in (ATTENTION, MATMUL, OTHER, HOST_COPY_KERNEL, COMMUNICATION, HOST_COPY, GAP)
    )


def _ring_steps(
    uses: Sequence[TimeUse],
    durations: dict[str, list[float]],
    num_runs: int,
    run: TracedRun,
    estimate: Estimate | None,
) -> tuple[RingStepTime, ...]:
    model = estimate.model if estimate else None
    rows = []
    for exchange in run.program.attention_collectives if run.program else ():
        name = exchange.collective.transfer.start.name
        seconds = durations.get(name) or durations.get(exchange.collective.transfer.done.name)
        if not seconds:
            continue
        rows.append(
            RingStepTime(
                instruction=name,
                pass_name=exchange.pass_name,
                runs_per_step=len(seconds) / num_runs,
                measured_seconds=statistics.fmean(seconds),
                exposed_seconds=sum(use.exposed_by_collective[name] for use in uses) / num_runs,
                estimated_seconds=model and model.exchange_seconds(exchange),
                is_estimated_hidden=model and model.is_hidden_by_attention(exchange),
            )
        )
    return tuple(rows)


def _class_table(result: Comparison) -> Iterator[Sequence[str]]:
    yield "class", "measured ms", "of the step", "estimated ms", "measured / estimated"
    total = ClassTime(
        name="step",
        measured_seconds=result.step_seconds,
        estimated_seconds=result.estimated_step_seconds,
    )
    for row in (*result.classes, total):
        estimated = _median(result, row.estimated_seconds)
        yield (
            row.name,
            f"{1e3 * row.measured_seconds:,.2f}",
            f"{row.measured_seconds / result.step_seconds:.1%}",
            "" if estimated is None else two_digits(1e3 * estimated),
            two_digits(row.measured_seconds / estimated) if estimated else "",
        )


def _median(result: Comparison, seconds: float | None) -> float | None:
    """The middle of the interval of an estimate; None if there is none."""
    if seconds is None or result.estimated_interval is None:
        return None
    return result.estimated_interval.median * seconds


def _ring_table(result: Comparison) -> Iterator[Sequence[str]]:
    yield (
        "instruction",
        "pass",
        "runs a step",
        "measured ms",
        "estimated ms",
        "exposed ms a step",
        "plan",
    )
    for row in result.ring_steps:
        estimated = _median(result, row.estimated_seconds)
        yield (
            row.instruction,
            row.pass_name,
            f"{row.runs_per_step:g}",
            f"{1e3 * row.measured_seconds:,.3f}",
            "" if estimated is None else two_digits(1e3 * estimated),
            f"{1e3 * row.exposed_seconds:,.3f}",
            {None: "", True: "hidden", False: "exposed"}[row.is_estimated_hidden],
        )


def _notes(result: Comparison) -> Iterator[str]:
    yield (
        f"communication, hidden or exposed: {1e3 * result.communication_seconds:,.2f} ms;"
        f" host copies: {1e3 * result.host_copy_seconds:,.2f} ms"
    )
    if result.median_gap_seconds is not None:
        yield f"median gap between kernels: {1e6 * result.median_gap_seconds:,.1f} us (in the plan, a part of kernels)"
    if result.unknown_seconds:
        yield (
            f"{1e3 * result.unknown_seconds:,.2f} ms are of kernels that the profiler names without an instruction of"
            " the step, such as those of CUDA graphs: their class follows from the name of the kernel; a run with"
            " --config.runtime.xla_preset=no_graphs has all instructions"
        )
    if result.estimated_step_seconds is not None and result.estimated_interval is not None:
        step = estimate_text(result.estimated_step_seconds, result.estimated_interval)
        yield f"estimated step: {step}, median (80% interval); others are medians too"
        if result.estimated_pairs_share is not None:
            yield f"estimated attention: {result.estimated_pairs_share:.1%} of the pairs of one document per sequence"
    else:
        yield "no estimate: pass --plan=FILE, or trace with --config.profile.steps on a GPU that the plan knows"
