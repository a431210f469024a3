"""Trains one config in several variants on the same data, and compares the losses.

    python -m benchmarks.loss_curves --config=configs/quickstart.py --config.train.steps=300 --out=runs/precision
    python -m benchmarks.loss_curves --config=configs/quickstart.py --experts --out=runs/experts

Precisions start from the same weights. With --experts, the dense model of the config is compared with 8 experts of half
the width, of which each token uses 2: as many active parameters, with and without a balance loss. Prints a table;
writes curves.jsonl, curves.png and one workdir per variant. The same command resumes an interrupted comparison.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.environment import environment_info
from jaxlc.config import Config, with_settings
from jaxlc.config.command_line import ConfigFlags, ParsedCommand, run_main
from jaxlc.core.errors import UserError
from jaxlc.runtime.start import start
from jaxlc.train.reports.metrics import METRICS_FILE, read_rows

# Name -> settings of config.precision. Each run is compared with the first one.
PRECISIONS: Mapping[str, dict[str, str]] = MappingProxyType(
    {
        "bf16": dict(compute="bf16"),
        "fp8": dict(compute="fp8"),
        "fp8-delayed": dict(compute="fp8", fp8_scaling="delayed"),
        "fp16": dict(compute="fp16"),
        "fp32": dict(compute="fp32"),
    }
)
_EXPERTS, _EXPERTS_PER_TOKEN = 8, 2
_BALANCE_LOSS = 1e-2  # its coefficient; Fedus et al. 2021 (arXiv:2101.03961), section 2.2
_WINDOW_STEPS = 20  # of the running means, and of the mean loss at the end


@dataclass(frozen=True, kw_only=True)
class Flags(ConfigFlags):
    __doc__ = __doc__  # the text of --help

    precisions: tuple[str, ...] = tuple(PRECISIONS)  # precisions to compare
    experts: bool = False  # compare a dense model with experts instead
    out: str = "runs/curves"  # output directory


def main(command: ParsedCommand[Flags]) -> int:
    """Returns the exit status: 0, or that of a training run that was interrupted."""
    start(command.config.runtime)
    from jaxlc import train

    out, flags = Path(command.flags.out), command.flags
    variants = (
        expert_settings(command.config) if flags.experts else precision_settings(flags.precisions)
    )
    for name, settings in variants.items():
        print(f"\n{name}", flush=True)
        result = train.run(
            with_settings(command.config, {"train.log_every_steps": 1} | settings), out / name
        )
        if result.exit_status:
            return result.exit_status
    print(compare(out, list(variants)))
    print(f"{out / 'curves.jsonl'}, {out / 'curves.png'}")
    return 0


def precision_settings(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The settings of each precision by key, for `config.with_settings`.

    Raises:
      UserError: an unknown precision.
    """
    for name in names:
        if name not in PRECISIONS:
            raise UserError(f"invalid {name!r} for --precisions: expected {', '.join(PRECISIONS)}")
    return {
        name: {f"precision.{setting}": x for setting, x in PRECISIONS[name].items()}
        for name in names
    }


def expert_settings(config: Config) -> dict[str, dict[str, Any]]:
    """The settings of the dense model and of experts with as many active parameters, besides the
    router.
    """
    experts = {
        "model.experts.num_experts": _EXPERTS,
        "model.experts.experts_per_token": _EXPERTS_PER_TOKEN,
        "model.experts.ffn_dim": config.model.ffn_dim // _EXPERTS_PER_TOKEN,
        "model.experts.renormalize": True,
    }
    return {
        "dense": {},
        "experts": experts | {"train.balance_loss": _BALANCE_LOSS},
        "experts-unbalanced": experts,
    }


def compare(out: Path, names: Sequence[str]) -> str:
    """Reads the metrics of each run in `out`; writes curves.jsonl and curves.png; returns a
    Markdown table.
    """
    curves = {name: _losses(out / name / METRICS_FILE) for name in names}
    num_steps = min(len(losses) for losses in curves.values())
    reference, *_ = curves.values()
    rows = [
        _row(name, losses[:num_steps], reference[:num_steps]) for name, losses in curves.items()
    ]
    with (out / "curves.jsonl").open("w") as file:
        file.writelines(json.dumps(row | environment_info()) + "\n" for row in rows)
    _plot({name: losses[:num_steps] for name, losses in curves.items()}, out / "curves.png")
    base = rows[0]["variant"]
    return "\n".join(
        [
            f"| {num_steps} steps | loss, mean of the last {_WINDOW_STEPS} | over {base} | largest difference of a"
            f" running mean of {_WINDOW_STEPS} | of one step |",
            "| --- | ---: | ---: | ---: | ---: |",
            *(
                f"| {row['variant']} | {row['last_loss']:.4f} | {row['over_reference']:+.2%}"
                f" | {row['largest_difference_of_means']:.2%} | {row['largest_difference']:.2%} |"
                for row in rows
            ),
        ]
    )


def _losses(path: Path) -> np.ndarray:
    """The loss of every step."""
    return np.array([row["loss"] for row in read_rows(path) if "loss" in row])


def _row(name: str, losses: np.ndarray, reference: np.ndarray) -> dict:
    last, reference_last = losses[-_WINDOW_STEPS:].mean(), reference[-_WINDOW_STEPS:].mean()
    return dict(
        variant=name,
        steps=len(losses),
        last_loss=last,
        over_reference=last / reference_last - 1,
        largest_difference_of_means=np.abs(
            _running_means(losses) / _running_means(reference) - 1
        ).max(),
        largest_difference=np.abs(losses / reference - 1).max(),
    )


def _running_means(losses: np.ndarray) -> np.ndarray:
    """The mean over _WINDOW_STEPS steps, or over all steps if there are fewer."""
    num_steps = min(_WINDOW_STEPS, len(losses))
    return np.convolve(losses, np.ones(num_steps) / num_steps, mode="valid")


def _plot(curves: dict[str, np.ndarray], path: Path) -> None:
    """Above: running means of the losses. Below: their difference from the first run in percent."""
    from matplotlib.figure import Figure  # imported here because matplotlib is slow to import

    figure = Figure(figsize=(7.5, 5.4), dpi=150, layout="constrained")
    losses_axes, difference_axes = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    means = {name: _running_means(losses) for name, losses in curves.items()}
    reference_name, *_ = means
    for name, mean in means.items():
        last_step = len(curves[name])
        steps = np.arange(last_step - len(mean), last_step) + 1
        losses_axes.plot(steps, mean, label=name, linewidth=1.1)
        difference_axes.plot(steps, 100 * (mean / means[reference_name] - 1), linewidth=1.1)
    difference_axes.axhspan(-2, 2, color="#dde1e6", alpha=0.5, zorder=0)
    losses_axes.set_title(
        f"Training loss, running mean of {min(_WINDOW_STEPS, *map(len, curves.values()))} steps",
        loc="left",
    )
    losses_axes.set(ylabel="nats per token")
    difference_axes.set(xlabel="step", ylabel=f"over {reference_name}, %")
    losses_axes.legend(frameon=False)
    for axes in (losses_axes, difference_axes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv, flags=Flags))
