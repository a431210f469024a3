"""The report at the end of a run: figures, a summary that is printed, and the loads of all experts
over the run, which are in WORKDIR/expert_loads.jsonl.
"""

import json
import math
from pathlib import Path

import numpy as np

from jaxlc.checkpoints.files import CHECKPOINTS_DIRECTORY
from jaxlc.core import errors
from jaxlc.core.errors import UserError
from jaxlc.core.files import displayed, parse_json
from jaxlc.core.text import count_text, duration_text
from jaxlc.train.evaluation import Evaluation
from jaxlc.train.reports.manifest import CONFIG_COPY
from jaxlc.train.reports.metrics import METRICS_FILE, TENSORBOARD_DIRECTORY, History, Row, read_rows
from jaxlc.train.reports.progress import LOG_FILE, flops_text
from jaxlc.train.stragglers import read_times

LOADS_FILE = "expert_loads.jsonl"
_MAX_ROWS = 32  # of a run; a row has as many numbers as the model has experts, over all layers


def is_recorded(step: int, every: int, end_step: int) -> bool:
    """Whether the loads of a step are written: a function of the step, so a resumed run writes the
    same rows.

    Args:
      every: steps between two rows of metrics.
      end_step: the last step.
    """
    interval = max(every, math.ceil(end_step / _MAX_ROWS))
    return step == end_step or (step - 1) // interval != (step - 1 - every) // interval


def write_loads(workdir: Path, step: int, load_LE: np.ndarray) -> None:
    """Appends the loads of a step, as multiples of the mean load of the experts of a layer."""
    loads = [[float(f"{load:.4g}") for load in load_E] for load_E in load_LE]
    with (workdir / LOADS_FILE).open("a") as file:
        file.write(json.dumps(dict(step=step, loads=loads)) + "\n")


def read_loads(workdir: Path) -> dict[int, np.ndarray]:
    """Step -> load_LE, in the order of the steps; empty without a file. A run that was resumed
    writes steps again.

    Raises:
      UserError: a line, other than a truncated last one, is not such a row.
    """
    path = workdir / LOADS_FILE
    lines = path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []
    loads: dict[int, np.ndarray] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            step, load_LE = int(row["step"]), np.array(row["loads"], np.float32)
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"line {number} of {path} has no loads of experts: remove that line"
            ) from error
        loads = {earlier: x for earlier, x in loads.items() if earlier < step} | {step: load_LE}
    return loads


LOSS_PLOT, LOSS_BY_POSITION_PLOT, OPTIMIZER_PLOT = (
    "loss.png",
    "loss_by_position.png",
    "optimizer.png",
)
REWARD_PLOT, TIMES_PLOT, EXPERTS_PLOT = "reward.png", "process_times.png", "experts.png"


def write_report(
    workdir: Path,
    step: int,
    num_tokens: int,
    evaluation: Evaluation | None,
    waiting_share: float | None = None,
    seconds_to_first_step: float | None = None,
) -> str:
    """Writes the plots to `workdir` and returns the summary, plain text.

    Without matplotlib no plots are written, and without tensorboardX there are no event files; the summary then has the
    command that installs them.

    Args:
      num_tokens: of these steps, over all devices, padding included.
      evaluation: of the parameters after `step` optimizer steps; None if there are no held-out sequences.
      waiting_share: share of the time of the steps that was spent waiting on data; None if it is not known.
      seconds_to_first_step: from the start of the run to the end of its first step; None if it has trained no step.
    """
    rows = read_rows(workdir / METRICS_FILE)
    stage = rows[-1].get("stage") if rows else None  # stages have their own held-out sequences
    history = History(rows)
    # not `evaluation`
    earlier = History([row for row in rows if row["step"] < step and row.get("stage") == stage])
    losses, eval_losses = history.column("loss")[1], earlier.column("eval_loss")[1]
    tokens_per_second = history.median("tokens_per_second")
    speed = "" if tokens_per_second is None else f", {tokens_per_second:,.0f} tokens/s (median)"
    lines = ["", f"trained         {step} steps, {num_tokens:,} tokens{speed}"]
    if seconds_to_first_step is not None:
        after = duration_text(seconds_to_first_step)
        lines.append(f"first step      ended {after} after the start")
    if (rate := history.median("flops_per_second_documents")) is not None:
        utilization = history.median("mfu_documents")
        peak = "" if utilization is None else f", {utilization:.1%} of the bf16 peak"
        lines.append(f"model FLOP/s    {flops_text(rate)} (documents{peak}; median)")
    if waiting_share is not None:
        lines.append(f"waiting         {waiting_share:.2%} of the time, for data")
    lines.append(
        f"training loss   {_arrow([*losses[:1], *losses[1:][-1:]])} {history.loss_unit}".rstrip()
    )
    if evaluation is not None:
        losses_text = _arrow([*eval_losses[:1], evaluation.loss])
        num_sequences = count_text(evaluation.num_sequences, "sequence")
        lines.append(f"held-out loss   {losses_text}, over {num_sequences}")
        if (gain := evaluation.context_gain) is not None:
            limits = "full context against the last 256 to 511 tokens, beyond token 512"
            lines.append(f"context gain    {gain}: {limits}")
    tensorboard = f", {displayed(workdir / TENSORBOARD_DIRECTORY)}"
    if not errors.is_installed("tensorboardX"):
        tensorboard = f"; TensorBoard event files skipped: {errors.install_hint('tensorboardX')}"
    lines += [
        *write_plots(workdir, rows, evaluation),
        f"metrics         {displayed(workdir / METRICS_FILE)}{tensorboard}",
        f"checkpoints     {displayed(workdir / CHECKPOINTS_DIRECTORY)}",
        f"settings, log   {displayed(workdir / CONFIG_COPY)}, {displayed(workdir / LOG_FILE)}",
    ]
    return "\n".join(lines)


def write_plots(workdir: Path, rows: list[Row], evaluation: Evaluation | None) -> list[str]:
    """Writes loss.png, optimizer.png and what else there is data for; returns lines with their
    paths.

    If plots are skipped, the only line has the reason.
    """
    if not errors.is_installed("matplotlib"):
        return [
            f"plots           skipped, matplotlib is not installed: {errors.install_hint('matplotlib')}"
        ]
    from jaxlc.train.reports import plots  # imported here: matplotlib is slow

    figures = {LOSS_PLOT: plots.loss_figure(rows), OPTIMIZER_PLOT: plots.optimizer_figure(rows)}
    if any("rollouts/reward" in row for row in rows):
        figures[REWARD_PLOT] = plots.reward_figure(rows)
    if evaluation is not None:
        figures[LOSS_BY_POSITION_PLOT] = plots.loss_by_position_figure(evaluation)
    if (measurements := read_times(workdir)) and (
        figure := plots.times_figure(measurements)
    ) is not None:
        figures[TIMES_PLOT] = figure
    if loads := read_loads(workdir):
        figures[EXPERTS_PLOT] = plots.experts_figure(loads)
    for name, figure in figures.items():
        figure.savefig(workdir / name, bbox_inches="tight")
    return [
        f"{'' if index else 'plots':<15} {displayed(workdir / name)}"
        for index, name in enumerate(figures)
    ]


def _arrow(losses: list[float]) -> str:
    """ "5.118 -> 2.491", "2.491" if there is one loss, "unknown" if there is none, as after a lost
    metrics file.
    """
    return " -> ".join(f"{loss:.3f}" for loss in losses) or "unknown"
