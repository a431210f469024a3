"""The reports at the start and the end of a run.

Before training, lines with the model, optimizer, devices, memory, batch, data, and how the run resumes. At the end,
figures, a summary that is printed, and the loads of all experts over the run, which are in WORKDIR/expert_loads.jsonl.
"""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlc.attention.kernels import cudnn
from jaxlc.checkpoints.files import CHECKPOINTS_DIRECTORY
from jaxlc.config import Config, ModelConfig, TrainConfig
from jaxlc.config.models.presets import model_name
from jaxlc.config.models.pretrained import context_tokens
from jaxlc.core import count_text, errors, mesh_text
from jaxlc.core.files import displayed, read_json_lines, write_json_lines
from jaxlc.core.text import duration_text
from jaxlc.data import Corpus
from jaxlc.data.sequences.loader import DataSource
from jaxlc.data.sequences.packing import PackedText, balanced_order, replica_cost, step_pairs
from jaxlc.data.sequences.user_batches import OwnBatches
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.models import lora
from jaxlc.sharding.rules import num_entries
from jaxlc.step.state import memory_lines
from jaxlc.step.step import TrainStep
from jaxlc.step.update import learning_rate_schedule
from jaxlc.train.evaluation import Evaluation
from jaxlc.train.reports.manifest import CONFIG_COPY
from jaxlc.train.reports.metrics import METRICS_FILE, TENSORBOARD_DIRECTORY, History, Row, read_rows
from jaxlc.train.reports.progress import LOG_FILE, flops_text

_MANY_LAYERS = 24  # in the compiled program
_OPTIMIZERS = dict(adamw="AdamW", muon="Muon and AdamW")


def step_lines(step: TrainStep) -> list[str]:
    """The model, the optimizer, the mesh, the attention kernel, the transport, host memory and the
    global batch.

    Raises:
      UserError: no attention kernel supports the config on these devices.
    """
    config = step.config
    device = step.mesh.devices.flat[0]
    batch = f"global batch size {config.train.global_batch_size:,} x {config.data.seq_len:,} tokens"
    if config.train.gradient_accumulation_steps > 1:
        batch += f" in {config.train.gradient_accumulation_steps} gradient accumulation steps"
    devices = f"{step.mesh.size} x {device.device_kind}, {count_text(jax.process_count(), 'process', 'es')}"
    model = [*_model_lines(step), _optimizer_line(step), _precision_line(step)]
    mesh = [f"mesh       {mesh_text(step.mesh.shape)}: {devices}"]
    if device.platform == "gpu":
        version = cudnn.version_text(cudnn.version_for(device) or ())
        mesh.append(f"cudnn      {version or 'not found'}")
    if step.model is not None:
        return [*model, *mesh, f"step       {batch}", _checkpoints_line(config.train)]
    return [
        *model,
        *mesh,
        f"attention  {config.attention.strategy}, {step.sequence_order.description}; kernel {step.kernel_choice}",
        *_transport_lines(step),
        *memory_lines(config.memory, step.mesh),
        f"step       {batch}, {config.flops_per_step / 1e12:.3g} TFLOP (model FLOPs, causal attention, all devices)",
        _checkpoints_line(config.train),
    ]


def _model_lines(step: TrainStep) -> list[str]:
    """The name of the model, its parameters and its RoPE."""
    config = step.config
    params = step.abstract_state.params
    num_trained, num_params = (
        num_entries(tree) for tree in (lora.split(params, step.frozen)[0], params)
    )
    counts = f"{count_text(num_params, 'parameter')}, all trained"
    if step.frozen:
        adapters = f", adapters of rank {config.lora.rank} included" if config.lora.rank else ""
        counts = f"{num_trained:,} of {num_params:,} parameters trained{adapters}"
    if step.model is not None:
        return [f"model      {type(step.model).__name__} (custom), {counts}"]
    weights = "" if config.model.init_from else " with random weights"
    lines = [
        f"model      {model_name(vars(config.model))}{weights}, {counts}",
        f"rope       {_rope_text(config.model)}",
    ]
    if (num_compiled := config.model.num_compiled_layers) > _MANY_LAYERS:
        lines.append(
            f"layers     {num_compiled} of {config.model.num_layers} are compiled one by one, since the order of their"
            " kinds (config.model.layer_kinds) repeats little: compilation takes long"
        )
    return lines


def _rope_text(model: ModelConfig) -> str:
    if model.rope.scaling == "none":
        scaling = "not scaled"
    else:
        original = model.rope.original_tokens
        scaling = f"{model.rope.scaling}, factor {model.rope.factor:g}"
        scaling += f" from {original:,} tokens" if original else ""
    sliding = (
        f", {model.rope.sliding_theta:,.0f} in sliding layers"
        if "sliding" in model.attentions
        else ""
    )
    context = context_tokens(model)
    base = f"; context of the model: {context:,} tokens" if context else ""
    return f"{scaling}; theta {model.rope.theta:,.0f}{sliding}{base}"


def _optimizer_line(step: TrainStep) -> str:
    if step.custom_optimizer is not None:
        return "optimizer  custom"
    optimizer = step.config.optimizer
    num_steps = step.config.train.steps
    schedule = (
        f"{optimizer.schedule} over {count_text(optimizer.schedule_steps or num_steps, 'step')}"
    )
    if optimizer.schedule == "wsd":
        schedule += f", the last {optimizer.decay_steps:,} of decay"
    warmup = f", {optimizer.warmup_steps:,} of warm-up" if optimizer.warmup_steps else ""
    if optimizer.warmup_steps >= (steps := optimizer.schedule_steps or num_steps):
        rate = float(learning_rate_schedule(optimizer, steps)(optimizer.schedule_start + steps - 1))
        warmup += f" (warning: the schedule ends in it, at a learning rate of {rate:g})"
    clipping = (
        f", gradient norm at most {optimizer.max_grad_norm:g}" if optimizer.max_grad_norm else ""
    )
    return (
        f"optimizer  {_OPTIMIZERS[optimizer.name]}, learning rate {optimizer.learning_rate:g}, {schedule}{warmup};"
        f" weight decay {optimizer.weight_decay:g}{clipping}"
    )


def _precision_line(step: TrainStep) -> str:
    config = step.config
    precision = config.precision
    products = "fp8 matrix products, otherwise " if precision.compute == "fp8" else ""
    frozen = ""
    if config.lora.rank or config.train.trainable or config.train.frozen:
        frozen = f"; frozen matrices {precision.frozen}"
    return (
        f"precision  {products}{step.compute_dtype} computation; trained parameters and"
        f" optimizer state float32{frozen}"
    )


def _checkpoints_line(train: TrainConfig) -> str:
    period = (
        f"every {count_text(train.checkpoint_every_steps, 'step')} and "
        if train.checkpoint_every_steps
        else ""
    )
    every = (
        f", every {train.keep_every_steps} steps (train.keep_every_steps)"
        if train.keep_every_steps
        else ""
    )
    number = train.keep_best_checkpoints
    best = f", the best {number} (train.keep_best_checkpoints)" if number else ""
    latest = f"the latest {train.keep_checkpoints} (train.keep_checkpoints)"
    local = ""
    if train.local_checkpoints:
        local = f"; every {count_text(train.local_checkpoint_every_steps, 'step')} in {train.local_checkpoints}"
    return f"saves      {period}at the end; keeps {latest}{every}{best}{local}"


def _transport_lines(step: TrainStep) -> list[str]:
    if step.transport is not None:
        return [f"transport  {step.transport.name} ({step.transport.reason})"]
    if (name := step.config.runtime.transport) != "auto":
        return [f"transport  {name} has no effect on simulated devices"]
    return []


def data_lines(config: Config, source: DataSource, num_steps: int) -> list[str]:
    """The data source, the start token, and the shares of a mixture in `num_steps` steps."""
    if isinstance(source, OwnBatches):
        return [f"data       {source.description}"]
    start = start_token_lines(source.tokenizer)
    if not isinstance(source, Corpus):
        return [f"data       {source.description}", *start]
    num_sequences = num_steps * config.train.global_batch_size
    shares = source.shares(num_sequences) if config.data.mixture else ()
    return [
        *corpus_lines(config, source, num_steps),
        *start,
        *(f"source     {share}" for share in shares),
    ]


def corpus_lines(config: Config, corpus: Corpus, num_steps: int) -> list[str]:
    """The size of the corpus, of an epoch, and the number of epochs in `num_steps` steps."""
    train = corpus.train
    heldout = corpus.heldout
    batch_size = config.train.global_batch_size
    steps_per_epoch = train.num_sequences / batch_size
    epoch = count_text(train.num_sequences, "sequence")
    if train.epoch_tokens != train.num_tokens:
        tokens = count_text(train.epoch_tokens, "token")
        epoch = f"of the mixture, until a source would repeat: {epoch}, {tokens}"
    sizes = [
        f"{count_text(text.num_documents, 'document')}, {count_text(text.num_tokens, 'token')}"
        if text
        else "nothing (train.eval_sequences=0)"
        for text in (train, heldout)
    ]
    return [
        f"data       {sizes[0]}; held out: {sizes[1]}",
        f"epoch      {epoch}, {_decimal(steps_per_epoch, 'step')}; this run:"
        f" {count_text(num_steps, 'step')}, {_decimal(num_steps / steps_per_epoch, 'epoch')}",
        *_replicas_lines(config, train),
    ]


def start_token_lines(tokenizer: Tokenizer) -> list[str]:
    """The token that documents and prompts start with; no line if neither the run nor the tokenizer
    has one.
    """
    used, own = (
        tokenizer.decode(ids, special_tokens=True)
        for ids in (tokenizer.start_ids, tokenizer.own_start_ids)
    )
    if used:
        return [f"start      {used} before each document and each prompt of plain text"]
    if own:
        return [f"start      no token (config.data.start_token), and {own} in transformers"]
    return []


def _replicas_lines(config: Config, train: PackedText) -> list[str]:
    """How long replicas wait for each other in attention over packed documents, in the first step."""
    if config.mesh.num_replicas == 1 or not config.attention.document_mask:
        return []
    pairs = np.array(step_pairs(train, config, 0))
    cost = replica_cost(config, pairs[balanced_order(config, pairs)])
    return [
        f"replicas   attention work of the slowest, relative to the mean: {cost:.2f} in the first global batch"
    ]


def resume_lines(
    config: Config, workdir: Path, fingerprint: str, step: int, meta: dict, stage: str = ""
) -> list[str]:
    """What a run that resumes from the checkpoint of `step` prints; `meta` is stored in that
    checkpoint.

    Args:
      fingerprint: of the data of this run.
      stage: the name of the stage of this step, "" in a run without stages.
    """
    steps = config.train.steps
    if step >= steps:
        more = (
            f"a larger --config.stages.{stage}.steps"
            if stage
            else f"--config.train.steps={2 * step}"
        )
        line = (
            f"{workdir} is already trained to step {step}: continue with {more},"
            " or use a different --workdir to start over"
        )
    else:
        line = (
            f"resuming from step {step} (latest valid checkpoint) of {workdir}; use a"
            " different --workdir to start over"
        )
    lines = [line]
    setting = "train.steps"
    schedule_steps = config.optimizer.schedule_steps
    old_steps = meta["config"]["train"]["steps"]
    ends = f"ends at step {steps}"
    if schedule_steps:
        setting = "optimizer.schedule_steps"
        steps = schedule_steps
        ends = f"has {schedule_steps} steps"
        old_steps = meta["config"]["optimizer"]["schedule_steps"] or old_steps
    if step < config.train.steps and steps != old_steps and config.optimizer.schedule != "constant":
        lines.append(
            f"{setting} changed from {old_steps} to {steps}: the {config.optimizer.schedule} learning-rate schedule"
            f" now {ends}, so the learning rate differs from that of the earlier run"
        )
    if meta["corpus"] != fingerprint:
        lines.append(
            "the corpus, or the prompts and the files of their reward and agent, the tokenizer, data.seq_len,"
            " data.eval_fraction or data.seed changed since that checkpoint: training continues with different"
            " sequences, from the same sequence index"
        )
    if config.profile.steps and config.profile.traced_steps[-1] <= step:
        lines.append(
            f"config.profile.steps={config.profile.steps}: these steps are done, so this run traces none"
        )
    return lines


def _decimal(number: float, noun: str) -> str:
    if number < 0.01:
        return f"less than 0.01 {noun}s"
    text = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    return f"{text} {noun}{'' if text == '1' else 's'}"


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


def loads_row(step: int, load_LE: np.ndarray) -> dict[str, Any]:
    """The loads of a step, as multiples of the mean load of the experts of a layer."""
    loads = [[float(f"{load:.4g}") for load in load_E] for load_E in load_LE]
    return dict(step=step, loads=loads)


def write_loads(workdir: Path, row: dict[str, Any]) -> None:
    """Adds a row of `loads_row` after the rows of earlier steps. The rows of later steps, of a run
    that was killed after its last checkpoint, are dropped.
    """
    path = workdir / LOADS_FILE
    rows = [earlier for earlier in read_json_lines(path) if earlier["step"] < row["step"]]
    write_json_lines(path, [*rows, row])


LOSS_PLOT = "loss.png"
LOSS_BY_POSITION_PLOT = "loss_by_position.png"
OPTIMIZER_PLOT = "optimizer.png"
REWARD_PLOT = "reward.png"


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
    losses = history.column("loss")[1]
    eval_losses = earlier.column("eval_loss")[1]
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
