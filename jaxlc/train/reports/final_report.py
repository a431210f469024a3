"""The report at the end of a run: plots, and a summary that is printed."""

from pathlib import Path

from jaxlc.checkpoints.checkpoint_files import CHECKPOINTS_DIRECTORY
from jaxlc.core import extras
from jaxlc.core.counts import count_text, duration_text
from jaxlc.core.paths import displayed
from jaxlc.train.evaluation.held_out import Evaluation
from jaxlc.train.reports.config_copy import CONFIG_COPY
from jaxlc.train.reports.expert_loads import read_loads
from jaxlc.train.reports.history import History
from jaxlc.train.reports.metrics import METRICS_FILE, TENSORBOARD_DIRECTORY, Row, read_rows
from jaxlc.train.reports.progress import LOG_FILE, flops_text
from jaxlc.train.stragglers import read_times

LOSS_PLOT, LOSS_BY_POSITION_PLOT, OPTIMIZER_PLOT = "loss.png", "loss_by_position.png", "optimizer.png"
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
    earlier = History([row for row in rows if row["step"] < step and row.get("stage") == stage])  # not `evaluation`
    losses, eval_losses = history.column("loss")[1], earlier.column("eval_loss")[1]
    tokens_per_second = history.median("tokens_per_second")
    speed = "" if tokens_per_second is None else f", {tokens_per_second:,.0f} tokens/s (median)"
    rate, utilization = history.median("flops_per_second_documents"), history.median("mfu_documents")
    first_step, flops = [], []
    if seconds_to_first_step is not None:
        first_step.append(f"first step      ended {duration_text(seconds_to_first_step)} after the start")
    if rate is not None:
        peak = "" if utilization is None else f", {utilization:.1%} of the bf16 peak"
        flops.append(f"model FLOP/s    {flops_text(rate)} (documents{peak}; median)")
    tensorboard = f", {displayed(workdir / TENSORBOARD_DIRECTORY)}"
    if not extras.is_installed("tensorboardX"):
        tensorboard = f"; TensorBoard event files skipped: {extras.install_hint('tensorboardX')}"
    heldout = []
    if evaluation is not None:
        losses_text = _arrow([*eval_losses[:1], evaluation.loss])
        heldout.append(f"held-out loss   {losses_text}, over {count_text(evaluation.num_sequences, 'sequence')}")
        heldout += _gain_lines(evaluation)
    return "\n".join(
        [
            "",
            f"trained         {step} steps, {num_tokens:,} tokens{speed}",
            *first_step,
            *flops,
            *([] if waiting_share is None else [f"waiting         {waiting_share:.2%} of the time, for data"]),
            f"training loss   {_arrow([*losses[:1], *losses[1:][-1:]])} {history.loss_unit}".rstrip(),
            *heldout,
            *write_plots(workdir, rows, evaluation),
            f"metrics         {displayed(workdir / METRICS_FILE)}{tensorboard}",
            f"checkpoints     {displayed(workdir / CHECKPOINTS_DIRECTORY)}",
            f"settings, log   {displayed(workdir / CONFIG_COPY)}, {displayed(workdir / LOG_FILE)}",
        ]
    )


def write_plots(workdir: Path, rows: list[Row], evaluation: Evaluation | None) -> list[str]:
    """Writes loss.png, optimizer.png and what else there is data for; returns lines with their paths.

    If plots are skipped, the only line has the reason.
    """
    if not extras.is_installed("matplotlib"):
        return [f"plots           skipped, matplotlib is not installed: {extras.install_hint('matplotlib')}"]
    from jaxlc.train.reports import expert_plot, loss_plots, times_plot  # imported here: matplotlib is slow

    figures = {LOSS_PLOT: loss_plots.loss_figure(rows), OPTIMIZER_PLOT: loss_plots.optimizer_figure(rows)}
    if any("rollouts/reward" in row for row in rows):
        figures[REWARD_PLOT] = loss_plots.reward_figure(rows)
    if evaluation is not None:
        figures[LOSS_BY_POSITION_PLOT] = loss_plots.loss_by_position_figure(evaluation)
    if (measurements := read_times(workdir)) and (figure := times_plot.times_figure(measurements)) is not None:
        figures[TIMES_PLOT] = figure
    if loads := read_loads(workdir):
        figures[EXPERTS_PLOT] = expert_plot.experts_figure(loads)
    for name, figure in figures.items():
        figure.savefig(workdir / name, bbox_inches="tight")
    return [f"{'' if index else 'plots':<15} {displayed(workdir / name)}" for index, name in enumerate(figures)]


def _gain_lines(evaluation: Evaluation) -> list[str]:
    """One line with the gain of full context, none if it was not evaluated."""
    if evaluation.context_gain is None:
        return []
    return [
        f"context gain    {evaluation.context_gain}: full context against the last 256 to 511 tokens, beyond token 512"
    ]


def _arrow(losses: list[float]) -> str:
    """ "5.118 -> 2.491", "2.491" if there is one loss, "unknown" if there is none, as after a lost metrics file."""
    return " -> ".join(f"{loss:.3f}" for loss in losses) or "unknown"
