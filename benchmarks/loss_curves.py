"""Loss curves of one config in several precisions, side by side: rows, a table and a picture from their metrics."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from jaxlc.core.errors import UserError
from jaxlc.sweep.timing import environment_info
from jaxlc.train.metrics import METRICS_FILE, read_rows

# Settings of config.precision, by the name of the run. All others are compared with the first that has run.
PRECISIONS: Mapping[str, dict] = MappingProxyType(
    {
        "bf16": dict(compute="bf16"),
        "fp8": dict(compute="fp8"),
        "fp8-delayed": dict(compute="fp8", fp8_scaling="delayed"),
        "fp16": dict(compute="fp16"),
        "fp32": dict(compute="fp32"),
    }
)
_LAST_STEPS = 20  # whose mean loss is a run's loss at its end; running means are of as many


def settings_of(name: str) -> dict[str, str]:
    """Of a run, by their paths, as `config.with_settings` takes them.

    Raises:
      UserError: there is no such name.
    """
    if name not in PRECISIONS:
        raise UserError(f"there is no precision {name!r} to compare; there are {', '.join(PRECISIONS)}")
    return {f"precision.{setting}": value for setting, value in PRECISIONS[name].items()}


def compare(out: Path) -> str:
    """Reads OUT/NAME/metrics.jsonl of each run; writes out/precision.jsonl and out/precision.png, returns a table."""
    curves = {name: _losses(out / name / METRICS_FILE) for name in PRECISIONS if (out / name / METRICS_FILE).exists()}
    num_steps = min(len(losses) for losses in curves.values())
    reference, *_ = curves.values()
    rows = [_row(name, losses[:num_steps], reference[:num_steps]) for name, losses in curves.items()]
    with (out / "precision.jsonl").open("w") as file:
        file.writelines(json.dumps(row | environment_info()) + "\n" for row in rows)
    _plot({name: losses[:num_steps] for name, losses in curves.items()}, out / "precision.png")
    base = rows[0]["precision"]
    return "\n".join(
        [
            f"| {num_steps} steps | loss, mean of the last {_LAST_STEPS} | over {base} | largest difference of a"
            f" mean of {_LAST_STEPS} | of a step |",
            "| --- | ---: | ---: | ---: | ---: |",
            *(
                f"| {row['precision']} | {row['last_loss']:.4f} | {row['over_reference']:+.2%}"
                f" | {row['largest_difference_of_means']:.2%} | {row['largest_difference']:.2%} |"
                for row in rows
            ),
        ]
    )


def _losses(path: Path) -> np.ndarray:
    """Of every step."""
    return np.array([row["loss"] for row in read_rows(path) if "loss" in row])


def _row(name: str, losses: np.ndarray, reference: np.ndarray) -> dict:
    last, reference_last = losses[-_LAST_STEPS:].mean(), reference[-_LAST_STEPS:].mean()
    return dict(
        precision=name,
        steps=len(losses),
        last_loss=last,
        over_reference=last / reference_last - 1,
        largest_difference_of_means=np.abs(_running_means(losses) / _running_means(reference) - 1).max(),
        largest_difference=np.abs(losses / reference - 1).max(),
    )


def _running_means(losses: np.ndarray) -> np.ndarray:
    """Of each step with those before it; of all steps, where they are few."""
    num_steps = min(_LAST_STEPS, len(losses))
    return np.convolve(losses, np.ones(num_steps) / num_steps, mode="valid")


def _plot(curves: dict[str, np.ndarray], path: Path) -> None:
    """Running means of the losses, and below their distance from the first one's in percent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5.4), dpi=150, layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    means = {name: _running_means(losses) for name, losses in curves.items()}
    reference_name, *_ = means
    for name, mean in means.items():
        last_step = len(curves[name])
        steps = np.arange(last_step - len(mean), last_step) + 1
        above.plot(steps, mean, label=name, linewidth=1.1)
        below.plot(steps, 100 * (mean / means[reference_name] - 1), linewidth=1.1)
    below.axhspan(-2, 2, color="#dde1e6", alpha=0.5, zorder=0)
    above.set_title(f"Training loss, mean of {min(_LAST_STEPS, *map(len, curves.values()))} steps", loc="left")
    above.set(ylabel="nats per token")
    below.set(xlabel="step", ylabel=f"over {reference_name}, %")
    above.legend(frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
