"""The result of `jaxlc.plan.plan`, as text, as an HTML page and as figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from jaxlc.config import to_dict
from jaxlc.core import errors
from jaxlc.core.errors import UserError
from jaxlc.plan import report, summary
from jaxlc.plan.figures import html_page
from jaxlc.plan.record import PlanRecord
from jaxlc.plan.step_program import StepProgram
from jaxlc.simulate.layer_timeline import layer_timeline
from jaxlc.simulate.topology import topology

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The sections of the config that shape the step; the JSON has no paths of files.
_RECORDED_SECTIONS = ("model", "lora", "mesh", "attention", "memory", "precision", "train")
_ADVISE_CALL = "jaxlc.plan.plan(config, topology, advise=True)"  # for notebooks


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(PlanRecord):
    """A training step compiled ahead of time.

    `of` makes one from a compiled step, `from_json` reads a stored one. `print(plan)` prints it as text, and a notebook
    shows it as one page with figures, which `save` writes to a file. The methods named `*_figure` return the figures of
    that page; they raise UserError if matplotlib is not installed.
    """

    @classmethod
    def of(cls, program: StepProgram) -> Self:
        """The plan of a compiled step. Evaluation, packed sequences, hints and advice are added by `compile.plan_step`
        and `jaxlc.plan.plan`."""
        step, gpus, shape = program.step, program.model.gpus, dict(program.step.mesh.shape)
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
            collectives=summary.collective_stats(program.program.collectives, shape, gpus.gpus_per_domain),
            ring=program.ring,
            kernels=summary.kernels(program.program),
            launches=program.launches,
            kernel_choice=step.kernel_choice,
            transport_choice="; ".join([choice, *program.warnings]),
            config={name: values for name, values in to_dict(step.config).items() if name in _RECORDED_SECTIONS},
            layer_timeline=layer_timeline(program.program, program.model),
        )

    def __str__(self) -> str:
        return report.page(self, _ADVISE_CALL)

    def __repr__(self) -> str:
        return f"<Plan: {self.title};\n {report.summary(self)}>"

    def _repr_html_(self) -> str:
        return self._html({})

    def _html(self, totals: Mapping[str, str]) -> str:
        if not errors.is_installed("matplotlib"):
            hint = f"{errors.install_hint('matplotlib')} adds figures to this page."
            return html_page.fragment(self, {}, f"{hint}\n\n{self}", totals)
        return html_page.fragment(self, self._figures(), str(self), totals)

    def save(self, path: str | Path, totals: Mapping[str, str] | None = None) -> None:
        """Writes the page that notebooks show as an HTML file, without scripts and external resources.

        Args:
          totals: further values of the page, name -> text, such as `StagesPlan.totals`.
        Raises:
          UserError: matplotlib is not installed, or the file cannot be written.
        """
        errors.require("matplotlib", "the plan as an HTML page")
        try:
            Path(path).write_text(html_page.document(self.title, self._html(totals or {})), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write the plan to {path}: {error.strerror}") from error

    def memory_figure(self) -> "Figure":
        """Device memory by kind against the usable memory, and host memory if the step uses it."""
        errors.require("matplotlib", "a figure of memory")
        from jaxlc.plan.figures import plan_figures as figures

        return figures.memory_figure(self.memory, self.title)

    def timeline_figure(self) -> "Figure":
        """Estimated time of the kernels and transfers of one layer, or one group of layers, forward and backward.

        Raises:
          UserError: there is no timeline, because the program has no loop over layers.
        """
        errors.require("matplotlib", "a figure of the timeline")
        from jaxlc.simulate import timeline_plot

        if not self.layer_timeline:
            raise UserError("unsupported: a timeline of this plan, whose program has no loop over layers")
        is_recomputed = self.config.get("memory", {}).get("remat", "none") != "none"
        title = f"{self._layers_of_timeline.capitalize()}, estimated: {self.title}"
        median = self.predicted.interval.median
        events = [
            event._replace(start_seconds=median * event.start_seconds, end_seconds=median * event.end_seconds)
            for event in self.layer_timeline
        ]
        return timeline_plot.timeline_figure(events, title, is_recomputed=is_recomputed)

    def links_figure(self) -> "Figure":
        """Bytes by collective, mesh axes and link, and the hidden and exposed time of each link."""
        errors.require("matplotlib", "a figure of communication")
        from jaxlc.plan.figures import plan_figures as figures

        return figures.links_figure(self.collectives, self.predicted, self.title)

    def mesh_figure(self) -> "Figure":
        """The mesh on nodes and NVLink domains, and which GPUs communicate with each other."""
        errors.require("matplotlib", "a figure of the mesh")
        from jaxlc.plan.figures import mesh_plot

        return mesh_plot.mesh_figure(self.mesh, topology(self.topology), self.collectives)

    @property
    def _layers_of_timeline(self) -> str:
        """What an iteration of the loop over layers runs."""
        period = len(self.config.get("model", {}).get("layer_kinds", ["full"]))
        num_layers = max(period, self.config.get("memory", {}).get("layers_per_remat_group", 1))
        return "one layer" if num_layers == 1 else f"one group of {num_layers} layers"

    def _figures(self) -> "dict[str, Figure]":
        """Heading -> figure of the page."""
        timeline = {f"Timeline of {self._layers_of_timeline}": self.timeline_figure()} if self.layer_timeline else {}
        return {
            "Memory": self.memory_figure(),
            **timeline,
            "Communication": self.links_figure(),
            "Mesh": self.mesh_figure(),
        }
