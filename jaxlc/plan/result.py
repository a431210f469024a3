"""Plans a training step: checks the config for the GPUs, compiles the step, and adds what a caller
asks for.

`Plan` is the result of `jaxlc.plan.plan`, and `StagesPlan` the table of all stages of a run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

from ml_collections import ConfigDict

from jaxlc.config import Config, load, to_dict, unchecked, with_settings
from jaxlc.config.checks.mesh_checks import mesh_overrides, working_mesh
from jaxlc.config.models.model_schema import longest, segments_of
from jaxlc.config.models.pretrained import context_warning
from jaxlc.core import UserError, aligned, count_text, errors, gib, mesh_text
from jaxlc.core.files import local_path
from jaxlc.generation.generate_text import rollout_memory, sample_memory
from jaxlc.plan import report
from jaxlc.plan.packing_estimates import estimate_packing, read_documents
from jaxlc.plan.program import StepProgram, collective_stats, compile_log_probs, kernels
from jaxlc.plan.report import PlanRecord, ReferencePass, verdict
from jaxlc.posttrain.traces import with_reference
from jaxlc.simulate.roofline import Interval, Roofline, range_text, seconds_text, two_digits
from jaxlc.simulate.time_model import DEFAULT_ROOFLINE, TimeModel
from jaxlc.simulate.timeline import layer_timeline, predict
from jaxlc.simulate.topology import Topology, make_mesh
from jaxlc.step.state import bytes_per_device
from jaxlc.step.step import TrainStep, build_step, layer_kernels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# The sections of the config that shape the step; the JSON has no paths of files.
_RECORDED_SECTIONS = ("model", "lora", "mesh", "attention", "memory", "precision", "train")


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(PlanRecord):
    """A training step compiled ahead of time.

    `of` makes one from a compiled step, `from_json` reads a stored one. `print(plan)` prints it as
    text, and a notebook shows it as one page with figures, which `save` writes to a file. The
    methods named `*_figure` return the figures of that page; they raise UserError if matplotlib is
    not installed.
    """

    @classmethod
    def of(cls, program: StepProgram, **others: Any) -> Self:
        """The plan of a compiled step.

        Args:
          others: the fields that do not follow from the program alone.
        """
        step = program.step
        gpus = program.model.gpus
        shape = dict(program.step.mesh.shape)
        choice = f"{step.transport.name} ({step.transport.reason})"
        return cls(
            topology=str(gpus),
            num_devices=gpus.num_gpus,
            mesh=shape,
            sequence_tokens=step.config.data.seq_len,
            tokens_per_step=step.config.tokens_per_step,
            compile_seconds=program.compile_seconds,
            predicted=program.prediction,
            memory=program.memory,
            collectives=collective_stats(program.program.collectives, shape, gpus.gpus_per_domain),
            ring=program.ring,
            kernels=kernels(program.program),
            launches=program.launches,
            kernel_choice=step.kernel_choice,
            kernel_names=step.kernel_names,
            transport_choice="; ".join([choice, *program.warnings]),
            config={
                name: values
                for name, values in to_dict(step.config).items()
                if name in _RECORDED_SECTIONS
            },
            layer_timeline=layer_timeline(program.program, program.model),
            **others,
        )

    def __str__(self) -> str:
        return report.page(self, report.ADVISE_CALL)

    def __repr__(self) -> str:
        return f"<Plan: {self.title};\n {report.summary(self)}>"

    def _repr_html_(self) -> str:
        return self._html({})

    def _html(self, totals: Mapping[str, str]) -> str:
        if not errors.is_installed("matplotlib"):
            hint = f"{errors.install_hint('matplotlib')} adds figures to this page."
            return report.fragment(self, {}, f"{hint}\n\n{self}", totals)
        headings = {"Memory": self.memory_figure}
        if self.layer_timeline:
            headings[f"Timeline of {self._layers_of_timeline}"] = self.timeline_figure
        headings["Communication"] = self.links_figure
        svgs = {heading: _figures("a figure").svg(figure()) for heading, figure in headings.items()}
        return report.fragment(self, svgs, str(self), totals)

    def save(self, path: str | Path, totals: Mapping[str, str] | None = None) -> None:
        """Writes the page that notebooks show as an HTML file, without scripts and external
        resources.

        Args:
          totals: further values of the page, name -> text, such as `StagesPlan.totals`.
        Raises:
          UserError: matplotlib is not installed, or the file cannot be written.
        """
        errors.require("matplotlib", "the plan as an HTML page")
        try:
            local_path(path).write_text(
                report.document(self.title, self._html(totals or {})), encoding="utf-8"
            )
        except OSError as error:
            raise UserError(f"cannot write the plan to {path}: {error.strerror}") from error

    def memory_figure(self) -> "Figure":
        """Device memory by kind against the usable memory, and host memory if the step uses it."""
        return _figures("a figure of memory").memory_figure(self.memory, self.title)

    def timeline_figure(self) -> "Figure":
        """Estimated time of the kernels and transfers of one layer, or one group of layers, forward
        and backward.

        Raises:
          UserError: there is no timeline, because the program has no loop over layers.
        """
        figures = _figures("a figure of the timeline")
        if not self.layer_timeline:
            raise UserError(
                "unsupported: a timeline of this plan, whose program has no loop over layers"
            )
        is_recomputed = self.config.get("memory", {}).get("remat", "none") != "none"
        title = f"{self._layers_of_timeline.capitalize()}, estimated: {self.title}"
        median = self.predicted.interval.median
        events = [
            event._replace(
                start_seconds=median * event.start_seconds, end_seconds=median * event.end_seconds
            )
            for event in self.layer_timeline
        ]
        return figures.timeline_figure(events, title, is_recomputed=is_recomputed)

    def links_figure(self) -> "Figure":
        """Bytes by collective, mesh axes and link, and the hidden and exposed time of each link."""
        return _figures("a figure of communication").links_figure(
            self.collectives, self.predicted, self.title
        )

    @property
    def _layers_of_timeline(self) -> str:
        """What an iteration of the loop over layers runs."""
        model, memory = (self.config.get(section, {}) for section in ("model", "memory"))
        kinds = (
            tuple(model.get(*x)) for x in (("first_layer_kinds", ()), ("layer_kinds", ("full",)))
        )
        segment = longest(segments_of(*kinds, model.get("num_layers", 1)))
        num_layers = segment.remat_group(memory.get("layers_per_remat_group", 1))
        return "one layer" if num_layers == 1 else f"one group of {num_layers} layers"


def _figures(feature: str) -> ModuleType:
    """The module of figures, which imports matplotlib. Raises UserError if it is not installed."""
    errors.require("matplotlib", feature)
    from jaxlc.plan import figures

    return figures


def plan_step(
    config: ConfigDict | Config,
    gpus: Topology,
    starting: Callable[[], None],
    roofline: Roofline = DEFAULT_ROOFLINE,
    evaluation: bool = False,
    document_lengths: str = "",
) -> Plan:
    """Compiles the training step of `config` ahead of time for `gpus`, and makes a plan of it with hints.

    Settings of config.runtime that concern this machine (simulated devices, processes) are ignored.

    Args:
      starting: called after all checks, when the compiler starts.
      evaluation: also compile the evaluation of held-out sequences, for its peak memory.
      roofline: for all estimated times: the step, and which ring steps attention hides.
      document_lengths: also estimate the step for packed sequences; see `packing_estimates.read_documents`.
    Raises:
      UserError: invalid user input: a mesh of another size, an unsupported kernel or transport, a transport that the
        compiler did not use, arrays too large for the compiler.
    """
    config = with_reference(on_gpus(config, gpus))
    step = build_step(config, make_mesh(gpus, config.mesh))
    documents = read_documents(config, document_lengths) if document_lengths else None
    # unsupported ones are reported before the compiler starts
    _ = step.kernel_choice, step.transport
    starting()
    program = StepProgram.compile(step, TimeModel(gpus, config, roofline))
    return Plan.of(
        program,
        hints=hints(step),
        context_warning=context_warning(config.model, config.data.seq_len) or "",
        evaluation_peak_bytes=program.evaluation_peak_bytes if evaluation else None,
        samples=sample_memory(step),
        rollouts=rollout_memory(step, documents.longest_trace if documents else 0),
        reference=None if step.reference is None else _reference_pass(program),
        packing=estimate_packing(documents, program) if documents else None,
    )


def _reference_pass(program: StepProgram) -> ReferencePass:
    """Compiles the reference model of the step. Raises UserError as `plan_step`."""
    reference = program.step.reference
    compiled = compile_log_probs(reference)
    return ReferencePass(
        peak_bytes=program.peak_bytes_with(compiled),
        seconds=predict(compiled.program, program.model).step_seconds,
        host_bytes=bytes_per_device(reference.abstract_state.params),
    )


ANY_MACHINE = {"runtime.simulated_devices": 0, "runtime.num_processes": 1, "runtime.process_id": 0}


def on_gpus(config: ConfigDict | Config, gpus: Topology) -> Config:
    """The config as it is checked for `gpus`, without simulated devices and process numbers.

    Raises:
      UserError: the mesh has a different number of devices; the message names overrides that fit.
    """
    config = with_settings(load(config, on_devices=False), ANY_MACHINE)
    if config.mesh.num_devices == gpus.num_gpus:
        return config
    problem = (
        f"the mesh {mesh_text(vars(config.mesh))} needs {config.mesh.num_devices} GPUs"
        f" and {gpus} has {gpus.num_gpus}"
    )
    mesh = working_mesh(config, gpus.num_gpus)
    advice = (
        f"use {mesh_overrides(config.mesh, mesh)}, or"
        if mesh
        else "no mesh of its size splits this model; use"
    )
    raise UserError(f"{problem}; {advice} another --topology, of {config.mesh.num_devices} GPUs")


def hints(step: TrainStep) -> tuple[str, ...]:
    """Settings that may make the step faster, as sentences."""
    attention = step.config.attention
    if not attention.document_mask or any(name in step.kernel_names for name in ("cudnn", "fa3")):
        return ()
    unmasked = unchecked(step.config, {"attention.document_mask": False})
    if all(kernel.name != "cudnn" for kernel in layer_kernels(unmasked, step.mesh).values()):
        return ()
    return (
        "--config.attention.document_mask=False allows the cuDNN attention kernel, which is faster than"
        f" {step.kernel_names}; tokens then attend to earlier documents of their sequence",
    )


_HEADS = (
    "stage",
    "steps",
    "length",
    "tokens",
    "GiB/GPU",
    "host GiB",
    "tokens/s/GPU",
    "step",
    "hours",
    "GPU-hours",
)


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The compiled step of a stage, and its number of steps."""

    name: str  # "": a config without stages
    num_steps: int  # optimizer steps
    plan: Plan  # the stage's step, with the fields of `Plan`

    @property
    def num_tokens(self) -> int:
        """Tokens of the stage over all GPUs, padding included."""
        return self.num_steps * self.plan.tokens_per_step

    @property
    def hours(self) -> float:
        """Estimated time of the steps, without evaluations, checkpoints and compilation."""
        return self.num_steps * self.plan.predicted.step_seconds / 3600

    @property
    def gpu_hours(self) -> float:
        """Hours times GPUs."""
        return self.hours * self.plan.num_devices


@dataclass(frozen=True, kw_only=True, repr=False)
class StagesPlan:
    """The plans of all stages of a run; print it."""

    stages: tuple[StagePlan, ...]  # in order
    price_per_gpu_hour: float | None = None  # None: no cost is printed

    def cost(self, gpu_hours: float) -> float | None:
        """In the currency of the price."""
        return None if self.price_per_gpu_hour is None else gpu_hours * self.price_per_gpu_hour

    @property
    def interval(self) -> Interval:
        """Of the hours of all stages, as factors on their estimate."""
        hours = sum(stage.hours for stage in self.stages)
        low, high = (
            sum(stage.hours * stage.plan.predicted.interval[end] for stage in self.stages)
            for end in (0, 1)
        )
        return Interval(low / hours, high / hours)

    def totals(self) -> dict[str, str]:
        """GPU-hours, and with a price the cost, of all stages, for the HTML page."""
        gpu_hours = sum(stage.gpu_hours for stage in self.stages)
        interval = self.interval
        values = {"GPU-hours": gpu_hours, "cost": self.cost(gpu_hours)}
        steps = f"of {sum(stage.num_steps for stage in self.stages):,} steps, estimated"
        return {
            f"{name} {steps}": range_text(x, "", interval)
            for name, x in values.items()
            if x is not None
        }

    def __str__(self) -> str:
        return self.table("jaxlc plan")

    def __repr__(self) -> str:
        return str(self)

    def table(self, command_line: str) -> str:
        """The stages as rows, with totals and the verdict of each; of a single stage, the page has
        the verdict.

        Args:
          command_line: the command that printed it, for advice.
        """
        first = self.stages[0].plan
        low, high = self.interval
        median = self.interval.median
        lines = [
            f"{first.topology}: {count_text(first.num_devices, 'GPU')}; memory is AOT-compiled, time is estimated",
            *aligned(self._rows()),
            "",
            "Hours of training steps, without evaluations, checkpoints and compilation. Times and costs are medians;",
            f"the 80% interval of all stages is {two_digits(low / median)} to {two_digits(high / median)} times that"
            " (docs/calibration.md).",
        ]
        if len(self.stages) == 1:
            return "\n".join(lines)
        lines.append("")
        for stage in self.stages:
            command = f"{command_line} --stage={stage.name} --advise"
            lines += [f"{stage.name}: {line}" for line in verdict(stage.plan, command)]
        return "\n".join(lines)

    def _rows(self) -> Iterator[Sequence[str]]:
        yield (*_HEADS, *(() if self.price_per_gpu_hour is None else ("cost",)))
        for stage in self.stages:
            memory = stage.plan.memory
            predicted = stage.plan.predicted
            median = predicted.interval.median
            yield (
                stage.name or "all",
                f"{stage.num_steps:,}",
                f"{stage.plan.sequence_tokens:,}",
                _billions(stage.num_tokens),
                gib(memory.device_peak_bytes),
                gib(memory.host_bytes_per_node),
                two_digits(predicted.tokens_per_second_per_device / median),
                seconds_text(median * predicted.step_seconds),
                *self._totals(median, stage.hours, stage.gpu_hours),
            )
        if len(self.stages) > 1:
            num_steps, num_tokens = (
                sum(getattr(x, name) for x in self.stages) for name in ("num_steps", "num_tokens")
            )
            hours, gpu_hours = (
                sum(getattr(x, name) for x in self.stages) for name in ("hours", "gpu_hours")
            )
            blank = [""] * (len(_HEADS) - 6)
            yield (
                "total",
                f"{num_steps:,}",
                "",
                _billions(num_tokens),
                *blank,
                *self._totals(self.interval.median, hours, gpu_hours),
            )

    def _totals(self, median: float, hours: float, gpu_hours: float) -> list[str]:
        """The medians."""
        cost = self.cost(gpu_hours)
        return [
            two_digits(median * x) for x in (hours, gpu_hours, *([] if cost is None else [cost]))
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types: a list "stages" with the plan of each stage, as `Plan.to_json`."""
        return {
            "price_per_gpu_hour": self.price_per_gpu_hour,
            "stages": [
                dict(
                    name=stage.name,
                    num_steps=stage.num_steps,
                    num_tokens=stage.num_tokens,
                    hours=stage.hours,
                    gpu_hours=stage.gpu_hours,
                    cost=self.cost(stage.gpu_hours),
                    plan=stage.plan.to_json(),
                )
                for stage in self.stages
            ],
        }


def _billions(num_tokens: int) -> str:
    return f"{num_tokens / 1e9:,.3g}B" if num_tokens >= 1e8 else f"{num_tokens / 1e6:,.3g}M"
