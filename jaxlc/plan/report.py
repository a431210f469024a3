"""The values of a plan with their JSON, whose keys are stable; the plan as a page of plain text,
and as HTML.
"""

import dataclasses
import textwrap
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from types import UnionType
from typing import Any, Self

from jaxlc.config.models.presets import model_name
from jaxlc.core import UserError, count_text, gib, mesh_text, preformatted
from jaxlc.core.files import local_path, read_json_file
from jaxlc.core.plot_style import RED, TEAL
from jaxlc.core.text import details
from jaxlc.generation.generate_text import GenerationMemory
from jaxlc.hlo.memory_dump import Launches
from jaxlc.hlo.parser import label
from jaxlc.plan.packing_estimates import PackingEstimates
from jaxlc.plan.program import USABLE_SHARE, CollectiveStats, Memory, Ring
from jaxlc.runtime.memory import STAGING_BYTES
from jaxlc.simulate.roofline import Interval, estimate_text, range_text, seconds_text, two_digits
from jaxlc.simulate.timeline import LayerEvent, Prediction

DERIVED_MEMORY = ("symmetric_bytes", "device_peak_bytes", "pool_share", "fits")  # only in the JSON
ADVISE_CALL = "jaxlc.plan.plan(config, topology, advise=True)"  # for notebooks


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings with which the step was compiled again."""

    overrides: str  # command-line flags: "--config.memory.remat=full"
    cost: str  # in time, as text
    device_peak_bytes: int  # as in memory
    host_bytes_per_node: int  # as in memory
    fits: bool  # device and host memory


@dataclass(frozen=True, kw_only=True)
class ReferencePass:
    """The forward pass of the reference model of posttrain.reference=model, before each step."""

    seconds: float  # estimated; not in predicted.step_seconds
    peak_bytes: int  # on the device, with the training state
    host_bytes: int  # its weights in pinned host memory, in memory.host_bytes_per_device too


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanRecord:
    """A training step compiled ahead of time. Bytes are per GPU, counts per optimizer step."""

    topology: str  # NVLink domains x GPUs per domain: "h100:8x8"
    num_devices: int  # GPUs of the topology
    mesh: dict[str, int]  # size of each mesh axis
    sequence_tokens: int  # data.seq_len
    tokens_per_step: int  # over all GPUs, padding included
    compile_seconds: float  # on this machine, for the step
    predicted: Prediction
    memory: Memory
    collectives: tuple[CollectiveStats, ...]
    ring: Ring
    # executions by name: attention kernels by pass, matrix products, library calls
    kernels: dict[str, int]
    kernel_choice: str  # the attention kernel, and why it was selected
    # the transport of attention's collective permutes, and why it was selected
    transport_choice: str
    # the attention kernel; by kind of layers where they differ. "": in a plan of an earlier version
    kernel_names: str = ""
    launches: Launches | None = None  # how the step runs; None: in a plan of an earlier version
    hints: tuple[str, ...] = ()  # settings that may make the step faster
    context_warning: str = ""  # the sequence is longer than the context of the model; "": it is not
    advice: tuple[Change, ...] | None = None  # None: not requested
    # the sections that shape the step
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    layer_timeline: tuple[LayerEvent, ...] = ()  # simulated, of one layer
    # on the device, with the training state; None: not compiled
    evaluation_peak_bytes: int | None = None
    # beside the training state; None: config.rollouts.source is not "model"
    rollouts: GenerationMemory | None = None
    # beside the training state, with its weights; None: train.sample_every_steps is 0
    samples: GenerationMemory | None = None
    reference: ReferencePass | None = None  # None: the loss needs no weights of a reference model
    packing: PackingEstimates | None = None  # for packed sequences; None: not requested

    @property
    def model(self) -> str:
        """The name of the model; "" if the plan does not have it."""
        return model_name(self.config.get("model", {}))

    @property
    def title(self) -> str:
        """Model, sequence length, mesh and topology in one line."""
        axes = mesh_text({axis: size for axis, size in self.mesh.items() if size > 1})
        target = f"{self.topology}, {axes}" if axes else self.topology
        return (
            f"{self.model + ', ' if self.model else ''}{self.sequence_tokens:,} tokens on {target}"
        )

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON types."""
        values = dataclasses.asdict(self)
        values["memory"] |= {name: getattr(self.memory, name) for name in DERIVED_MEMORY}
        values["memory"]["largest"] = [tensor._asdict() for tensor in self.memory.largest]
        values["launches"] = self.launches and self.launches._asdict()
        values["collectives"] = [
            stats._asdict() | {"axes": list(stats.axes)} for stats in self.collectives
        ]
        values["layer_timeline"] = [event._asdict() for event in self.layer_timeline]
        return values

    @classmethod
    def from_json(cls, source: Mapping[str, Any] | str | Path) -> Self:
        """The plan that `to_json` returned or `jaxlc plan --json` wrote.

        Args:
          source: the values, or the path of a JSON file. Unknown keys are ignored.
        Raises:
          UserError: the file cannot be read, or is not a plan.
        """
        is_path = not isinstance(source, Mapping)
        try:
            values = read_json_file(local_path(source)) if is_path else source
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the plan {source}: {error}") from error
        try:
            if not isinstance(values, Mapping):
                raise TypeError("it is no JSON object")
            return _construct(cls, values)
        except (AttributeError, TypeError) as error:
            name = str(source) if is_path else "the values"
            raise UserError(
                f"invalid plan: {name} cannot be read ({error}); write it again with --json"
            ) from error


def _construct(hint: Any, value: Any) -> Any:
    """`value`, plain JSON types, as the type `hint`.

    Raises:
      TypeError: a dataclass or NamedTuple lacks a field.
      AttributeError, TypeError: a value has another type.
    """
    if value is not None and isinstance(hint, UnionType):  # T | None
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is tuple:
        return tuple(_construct(typing.get_args(hint)[0], item) for item in value)
    if isinstance(hint, type) and (hints := typing.get_type_hints(hint)):
        return hint(
            **{name: _construct(hints[name], item) for name, item in value.items() if name in hints}
        )
    if typing.get_origin(hint) is dict:
        return {name: _construct(typing.get_args(hint)[1], item) for name, item in value.items()}
    expected = {int: int, float: (int, float), str: str, bool: bool}.get(hint)
    if expected and (
        not isinstance(value, expected) or isinstance(value, bool) is not (hint is bool)
    ):
        raise TypeError(f"{value!r:.40} is no {hint.__name__}")
    return value


_WIDTH = 118
_SMALL_BYTES = 2**20  # collectives that send less per step share one line


def page(plan: PlanRecord, advise_command: str) -> str:
    """Plain text of at most 120 columns.

    Args:
      advise_command: the command that searches for settings that fit; printed if the step does not fit.
    """
    sections = (
        _head(plan),
        [*_memory(plan.memory), *_other_programs(plan)],
        _collectives(plan),
        _ring(plan),
        _kernels(plan),
        _time(plan.predicted),
        *([_packing(plan.packing, plan.predicted.interval)] if plan.packing else []),
    )
    lines = [line for section in sections for line in (*section, "")]
    return "\n".join([*lines, *verdict(plan, advise_command)])


def summary(plan: PlanRecord) -> str:
    """Estimated time and verdict in one line."""
    memory = plan.memory
    predicted = plan.predicted
    fits = "fits" if memory.fits else "does not fit"
    rate = two_digits(predicted.tokens_per_second_per_device / predicted.interval.median)
    return (
        f"estimated: {step_text(predicted)} per step, {rate} tokens/s per GPU;"
        f" {fits}, {gib(memory.device_peak_bytes)} of {gib(memory.usable_bytes)} GiB per GPU"
    )


def step_text(predicted: Prediction) -> str:
    """The estimated time of a step, "about 40 s (23 to 73)"."""
    return estimate_text(predicted.step_seconds, predicted.interval)


def _head(plan: PlanRecord) -> Iterator[str]:
    sizes = f"{count_text(plan.num_devices, 'GPU')}, {mesh_text(plan.mesh)}"
    yield f"{plan.topology}: {sizes}; compiled in {plan.compile_seconds:.0f} s"
    model = f"{plan.model}, " if plan.model else ""
    yield f"{model}sequence length {plan.sequence_tokens:,}, {plan.tokens_per_step:,} tokens per step"
    yield from _wrapped(f"attention kernel: {plan.kernel_choice}")
    use = "" if plan.ring.hops else "; unused, since attention has no collective permutes"
    yield from _wrapped(f"transport of attention: {plan.transport_choice}{use}")
    for hint in plan.hints:
        yield from _wrapped(f"hint: {hint}")


def _memory(memory: Memory) -> Iterator[str]:
    yield "MEMORY per GPU                   GiB"
    yield _row("arguments", memory.device_arguments_bytes)
    yield _row("  parameters", memory.parameters_bytes)
    yield _row("  optimizer state", memory.optimizer_bytes)
    yield _row("  batch", memory.batch_bytes)
    yield _row("temporaries", memory.device_temp_bytes)
    yield _row("kernel workspaces", memory.workspace_bytes, "upper bound")
    yield _row(
        "symmetric buffers",
        memory.symmetric_bytes,
        f"{gib(memory.symmetric_used_bytes)} of them used",
    )
    yield _row("NCCL buffers", memory.nccl_bytes, "upper bound")
    yield _row("peak", memory.device_peak_bytes)
    host = (
        f" + {gib(memory.unified_host_bytes)} of host memory" if memory.unified_host_bytes else ""
    )
    yield _row(
        "usable",
        memory.usable_bytes,
        f"{USABLE_SHARE:.0%} of {gib(memory.device_capacity_bytes)}{host}",
    )
    if memory.is_unified_over_pcie:
        yield "  runtime.unified_memory is ignored: over PCIe it would be too slow"
    if memory.host_bytes_per_device:
        pool = f"in a pool of {gib(memory.host_pool_bytes)} (runtime.pinned_host_gib)"
        yield _row("pinned host memory", memory.host_bytes_per_device, pool)
        yield _row("  parameters", memory.host_parameters_bytes)
        yield _row("  optimizer state", memory.host_optimizer_bytes)
    capacity = gib(memory.host_capacity_per_node_bytes)
    usable = f"usable for both: {gib(memory.usable_host_bytes)} of {capacity} (--host_memory_gib)"
    yield _row("node: pinned host memory", memory.host_bytes_per_node, usable)
    if memory.host_pools_per_node_bytes:
        pools = f"up to {gib(memory.host_pool_bytes)} per GPU, and {gib(STAGING_BYTES)} per process for staging"
        yield _row("node: pinned memory pools", memory.host_pools_per_node_bytes, pools)
    yield _row(
        "node: checkpoint staging", memory.staging_bytes_per_node, "while a checkpoint is written"
    )
    yield "largest arrays in device memory at the peak"
    for tensor in memory.largest:
        yield _row(f"  {tensor.shape}", tensor.bytes, label(tensor.made_by))


def _other_programs(plan: PlanRecord) -> Iterator[str]:
    """What is in memory with the training state between two steps."""
    if plan.evaluation_peak_bytes is not None:
        yield _row("peak of an evaluation", plan.evaluation_peak_bytes, "with the training state")
    if (reference := plan.reference) is not None:
        seconds = estimate_text(reference.seconds, plan.predicted.interval)
        note = f"with the training state; {seconds} before each step"
        yield _row("peak of the reference", reference.peak_bytes, note)
        yield _row("  weights", reference.host_bytes, "in pinned host memory")
    state_bytes = plan.memory.parameters_bytes + plan.memory.optimizer_bytes
    if (samples := plan.samples) is not None:
        texts = f"KV cache of {samples.num_sequences} texts of up to {samples.num_tokens:,} tokens"
        yield _row("samples with the state", state_bytes + samples.num_bytes, texts)
        if state_bytes + samples.num_bytes > plan.memory.usable_bytes:
            yield "  These do not fit: use fewer config.train.sample_prompts, or shorter texts."
    if (rollouts := plan.rollouts) is None:
        return
    sequences = f"{rollouts.num_sequences:,} sequences of up to {rollouts.num_tokens:,} tokens"
    yield _row("rollouts with the state", state_bytes + rollouts.num_bytes, "without temporaries")
    yield _row("  KV cache", rollouts.cache_bytes, sequences)
    yield _row("  weights", rollouts.weights_bytes, "a copy in the compute dtype")
    if state_bytes + rollouts.num_bytes > plan.memory.usable_bytes:
        yield "  These do not fit: use shorter prompts or answers, fewer of them, or config.rollouts.source=files."


def _collectives(plan: PlanRecord) -> Iterator[str]:
    yield "COLLECTIVES per step        count  GiB sent  link     mesh axes                transport"
    for stats in plan.collectives:
        if stats.bytes >= _SMALL_BYTES:
            link = "network" if stats.crosses_domains else "NVLink"
            transport = " ".join(filter(None, (stats.backend, stats.mode)))
            sent = gib(stats.bytes)
            axes = "+".join(stats.axes)
            yield f"  {stats.kind:<22} {stats.count:>9,} {sent:>9}  {link:<8} {axes:<24} {transport}"
    small = sum(stats.count for stats in plan.collectives if stats.bytes < _SMALL_BYTES)
    yield f"  {'others, under 1 MiB':<22} {small:>9,}"


def _ring(plan: PlanRecord) -> Iterator[str]:
    ring = plan.ring
    if not ring.hops:
        yield "RING: no collective permutes"
        return
    yield "RING: collective permutes    count per step"
    for name, count in ring.by_backend.items():
        yield _count_row(f"over {name}", count)
    for name, sizes in ring.token_bytes.items():
        yield _text_row(f"bytes a token, {name}", " + ".join(f"{size:,.0f}" for size in sizes))
    yield _count_row(
        "hidden by attention",
        ring.hidden,
        "estimated: overlapping attention kernels take at least as long",
    )
    yield _count_row(
        "not hidden by attention", ring.exposed, f"{ring.exposed_forward:,} in the forward pass"
    )
    if ring.exposed:
        yield "  Other kernels may hide the rest; the estimated time below counts only what no kernel hides."
    if ring.exposed and plan.memory.is_at_schedulers_limit:
        yield "  XLA gives up overlap when temporaries reach its scheduler's limit (docs/plan.md). To raise the limit,"
        yield "  raise config.runtime.memory_fraction, or set XLA_FLAGS=--xla_gpu_memory_limit_slop_factor=160."


def _kernels(plan: PlanRecord) -> Iterator[str]:
    yield "KERNELS per step            count"
    for name, count in plan.kernels.items():
        note = (
            "on a GPU, XLA also tries cuBLAS and uses the faster one"
            if name == "triton gemm"
            else ""
        )
        if name.startswith(("cudnn_packed", "fa3_packed")):
            kernel = name.partition("_")[0]
            note = f"kernel {kernel}, with the lengths and offsets of documents"
        elif " experts " in name:
            rate = (
                "an assumed rate" if name.startswith("pallas") else "the rate of one measured step"
            )
            note = f"compared with blocks before a run trains; estimated from {rate}"
        yield f"  {name:<34} {count:>7,}  {note}".rstrip()
    if plan.launches is not None:
        operations, launches, graphs, synchronizations = (f"{count:,}" for count in plan.launches)
        launches = f"host launches {launches} ({graphs} CUDA graphs)"
        yield f"  GPU operations {operations}, {launches}, host synchronizations {synchronizations}"


def _time(predicted: Prediction) -> Iterator[str]:
    yield "ESTIMATED TIME per step: median (80% interval, docs/calibration.md)"
    yield _text_row("step", f"{step_text(predicted)}, bound by {predicted.bound_by}")
    if predicted.are_rates_assumed:
        yield _text_row("rates", "assumed: no program was measured on such a GPU")
    elif predicted.communication_seconds:
        yield _text_row(
            "rates", "of single kernels and collectives: no step on several GPUs was measured"
        )
    inverse = predicted.interval.inverse
    yield _text_row(
        "tokens/s per GPU", range_text(predicted.tokens_per_second_per_device, "", inverse)
    )
    yield _text_row(
        "MFU",
        f"{range_text(100 * predicted.mfu_causal, '%', inverse)}, causal model FLOPs over the bf16 peak",
    )
    yield _text_row(
        "recomputed", f"{predicted.recomputed_share:.0%} additional FLOPs, relative to the model's"
    )
    exposed = predicted.exposed_communication_seconds
    total = predicted.communication_seconds
    note = f"exposed (kernels wait): {_median_text(predicted, exposed)}"
    yield _text_row("communication", f"{_median_text(predicted, total)}, {note}")
    if predicted.host_copies:
        exposed = predicted.exposed_host_copy_seconds
        total = predicted.host_copy_seconds
        note = f"exposed: {_median_text(predicted, exposed)}, {predicted.exposed_host_copies:,}"
        yield _text_row(
            "host copies",
            f"{_median_text(predicted, total)}, {note} of {predicted.host_copies:,} copies",
        )
    for name, seconds, what in (
        (
            "recurrence",
            predicted.recurrence_seconds,
            "kernels of recurrent layers between their projections",
        ),
        (
            "expansion",
            predicted.expansion_seconds,
            "kernels that expand latents to keys and values",
        ),
        (
            "experts",
            predicted.experts_overhead_seconds,
            "routing, sorting, copies of weights, padding; beyond the routed rows",
        ),
    ):
        if seconds:
            share = two_digits(100 * seconds / predicted.step_seconds)
            yield _text_row(name, f"{share}%, {what}")
    yield from _text_rows(
        "by kind", percent_text(predicted.seconds_by_kind, predicted.step_seconds)
    )
    yield from _text_rows(
        "by resource", percent_text(predicted.seconds_by_resource, predicted.step_seconds)
    )
    total = two_digits(100 * predicted.overhead_share)
    yield _text_row("overhead", f"{total}%, outside attention kernels and model matrix products:")
    yield from _text_rows("", percent_text(predicted.overhead_seconds, predicted.step_seconds))


def _median_text(predicted: Prediction, seconds: float) -> str:
    """An estimated part of the step."""
    return seconds_text(predicted.interval.median * seconds)


def percent_text(parts: Mapping[str, float], total_seconds: float) -> str:
    """Parts of at least 0.1% of the total: "attention 82%, waiting 0.71%"."""
    percent = {part: 100 * seconds / total_seconds for part, seconds in parts.items()}
    return ", ".join(
        f"{part} {two_digits(value)}%" for part, value in percent.items() if value >= 0.1
    )


def _packing(packing: PackingEstimates, interval: Interval) -> Iterator[str]:
    source = f"document lengths: {packing.source}, {count_text(packing.num_sequences, 'sequence')}"
    yield from _wrapped(f"ESTIMATED TIME of packed sequences, medians ({source}; {packing.order})")
    yield "             documents  longest  pairs  ring cost  replicas  attention     step  tokens/s    MFU"
    for row in packing.estimates:
        times = [
            seconds_text(interval.median * seconds)
            for seconds in (row.attention_seconds, row.step_seconds)
        ]
        rate = row.tokens_per_second_per_device / interval.median
        mfu = 100 * row.mfu_documents / interval.median
        costs = f"{row.pairs_share:>6.1%} {row.ring_cost:>10.2f} {row.replica_cost:>9.2f}"
        estimates = f"{times[0]:>10} {times[1]:>8} {two_digits(rate):>9} {two_digits(mfu):>5}%"
        yield f"  {row.name:<10} {row.num_documents:>9,.5g} {row.longest_document:>8,} {costs} {estimates}"
    yield "  pairs: of one document of the same length. ring cost, replicas: the slowest rank or replica over the mean."
    yield "  MFU: model FLOPs with the pairs of the documents, over the bf16 peak."


def warnings(plan: PlanRecord) -> Iterator[str]:
    """What would keep a step that fits from running, as sentences without a period."""
    memory = plan.memory
    if memory.pools_excess_bytes > 0:
        needed_bytes = memory.usable_host_bytes + memory.pools_excess_bytes
        yield (
            f"the pools of pinned host memory and a checkpoint may need {gib(needed_bytes)} GiB of a node, and"
            f" {gib(memory.usable_host_bytes)} GiB of it are usable: start fewer processes per node"
            " (--devices_per_process), or set a smaller --config.runtime.pinned_host_gib"
        )


def verdict(plan: PlanRecord, advise_command: str) -> Iterator[str]:
    """Whether the step fits, and what to do. Arguments as in `page`."""
    memory = plan.memory
    settings = memory.pool_settings
    for warning in warnings(plan):
        yield from _wrapped(f"WARNING: {warning}.")
    if heap_bytes := settings.get("runtime.nvshmem_heap_bytes"):
        yield f"The NVSHMEM heap is too small: set --config.runtime.nvshmem_heap_bytes={heap_bytes}."
    if plan.context_warning:
        yield from _wrapped(f"WARNING: {plan.context_warning}")
    if memory.fits:
        yield f"VERDICT: fits, {gib(memory.device_peak_bytes)} of {gib(memory.usable_bytes)} GiB per GPU."
        if memory.spilled_bytes:
            spilled = f"{gib(memory.spilled_bytes)} GiB of that are in host memory"
            yield f"With unified memory, {spilled}; the estimated time does not include these accesses."
        elif fraction := settings.get("runtime.memory_fraction"):
            reason = "buffers outside of JAX's pool need the rest"
            if fraction > memory.memory_fraction:
                reason = f"the step needs more than {memory.memory_fraction:g} of a GPU's memory in JAX's pool"
            yield f"Set --config.runtime.memory_fraction={fraction:g}: {reason}."
        return
    if not memory.device_fits:
        yield f"VERDICT: does not fit, {gib(memory.excess_bytes)} GiB too much on each GPU."
    missing_bytes = memory.host_bytes_per_device - memory.host_pool_bytes
    if missing_bytes > 0:
        enough_gib = -(-memory.host_bytes_per_device // 2**30) + 1
        yield f"VERDICT: does not fit, {gib(missing_bytes)} GiB too much in the pool of pinned host memory of each GPU:"
        yield f"set --config.runtime.pinned_host_gib={enough_gib}."
    if memory.host_excess_bytes > 0:
        yield f"VERDICT: does not fit, {gib(memory.host_excess_bytes)} GiB too much in the host memory of each node."
    if plan.advice is None:
        yield f"To search for settings that fit: {advise_command}"
        return
    if any(change.fits for change in plan.advice):
        yield "Changes, each compiled, in order of estimated cost:"
    else:
        yield "Changes, each compiled; none is enough (jaxlc recommend searches other meshes too):"
    for change in plan.advice:
        result = "fits" if change.fits else "does not fit"
        yield f"  {gib(change.device_peak_bytes):>7} GiB  {result:<12}  {change.overrides}"
        yield f"                             {change.cost}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ")


def _row(name: str, num_bytes: float, note: str = "") -> str:
    return f"  {name:<29} {gib(num_bytes):>7}  {note}".rstrip()


def _count_row(name: str, count: int, note: str = "") -> str:
    return f"  {name:<24} {count:>9,}  {note}".rstrip()


def _text_row(name: str, text: str) -> str:
    return f"  {name:<18} {text}"


def _text_rows(name: str, text: str) -> list[str]:
    """As `_text_row`, of any length."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=_text_row(name, ""), subsequent_indent=" " * 21
    )


def document(title: str, body: str) -> str:
    """A complete HTML page around a fragment, in the light or dark colors that the browser is set
    to.
    """
    style = "margin:24px auto;max-width:1000px;padding:0 16px;background:Canvas;color:CanvasText"
    return (
        '<!doctype html>\n<html lang="en" style="color-scheme:light dark"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title></head>\n<body style="{style}">{body}</body></html>\n'
    )


def fragment(
    plan: PlanRecord, figures: Mapping[str, str], text: str, totals: Mapping[str, str]
) -> str:
    """The body of the page, for a notebook: verdict, estimates, figures, and the plan as text. No
    scripts, no links.

    Args:
      figures: heading -> SVG element.
      text: the plan as plain text.
      totals: further values, name -> text, such as the cost of the run.
    """
    color, fits = (TEAL, "fits") if plan.memory.fits else (RED, "does not fit")
    badge = f"background:{color};color:white;border-radius:5px;padding:2px 9px"
    lines = [
        summary(plan),
        *(f"{name}: {value}" for name, value in totals.items()),
        *verdict(plan, ADVISE_CALL),
    ]
    parts = [
        '<div style="font:14px/1.45 system-ui,sans-serif;color:currentColor;max-width:1000px">',
        f'<div style="font-size:17px;font-weight:600">{escape(plan.title)} <span style="{badge}">{fits}</span></div>',
        preformatted("\n".join(lines)),
    ]
    for heading, figure in figures.items():
        parts += [f'<div style="font-weight:600;margin-top:20px">{escape(heading)}</div>', figure]
    return "\n".join(
        [*parts, details("all values as text", preformatted(text), is_open=not figures), "</div>"]
    )
