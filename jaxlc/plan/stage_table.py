"""The plan of a run with stages: memory, speed, hours, GPU-hours and cost of every stage in one table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlc.core.text import aligned, count_text, gib
from jaxlc.plan.report import verdict
from jaxlc.plan.result import Plan
from jaxlc.simulate.interval import range_text, seconds_text, two_digits

_HEADS = ("stage", "steps", "length", "tokens", "GiB/GPU", "host GiB", "tokens/s/GPU", "step", "hours", "GPU-hours")


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

    def totals(self) -> dict[str, str]:
        """GPU-hours, and with a price the cost, of all stages, for the HTML page."""
        gpu_hours, interval = sum(stage.gpu_hours for stage in self.stages), self.stages[0].plan.predicted.interval
        values = {"GPU-hours": gpu_hours, "cost": self.cost(gpu_hours)}
        steps = f"of {sum(stage.num_steps for stage in self.stages):,} steps, estimated"
        return {f"{name} {steps}": range_text(x, "", interval) for name, x in values.items() if x is not None}

    def __str__(self) -> str:
        return self.table("jaxlc plan")

    def __repr__(self) -> str:
        return str(self)

    def table(self, command_line: str) -> str:
        """The stages as rows, with totals and the verdict of each; of a single stage, the page has the verdict.

        Args:
          command_line: the command that printed it, for advice.
        """
        first = self.stages[0].plan
        (low, high), median = first.predicted.interval, first.predicted.interval.median
        lines = [
            f"{first.topology}: {count_text(first.num_devices, 'GPU')}; memory is AOT-compiled, time is estimated",
            *aligned(self._rows()),
            "",
            "Hours of training steps, without evaluations, checkpoints and compilation. Times and costs are medians;",
            f"80% of published runs take {two_digits(low / median)} to {two_digits(high / median)} times as long"
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
            memory, predicted = stage.plan.memory, stage.plan.predicted
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
                *self._totals(stage.hours, stage.gpu_hours),
            )
        if len(self.stages) > 1:
            num_steps, num_tokens = (sum(getattr(x, name) for x in self.stages) for name in ("num_steps", "num_tokens"))
            hours, gpu_hours = (sum(getattr(x, name) for x in self.stages) for name in ("hours", "gpu_hours"))
            blank = [""] * (len(_HEADS) - 6)
            yield "total", f"{num_steps:,}", "", _billions(num_tokens), *blank, *self._totals(hours, gpu_hours)

    def _totals(self, hours: float, gpu_hours: float) -> list[str]:
        """The medians, of the same interval in all stages."""
        median, cost = self.stages[0].plan.predicted.interval.median, self.cost(gpu_hours)
        return [two_digits(median * x) for x in (hours, gpu_hours, *([] if cost is None else [cost]))]

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
