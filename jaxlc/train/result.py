"""The result of a run: the trained model, its metrics and figures; also of a run that is loaded
from its workdir.
"""

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import jax
from ml_collections import ConfigDict

from jaxlc._jax_internals import backends_are_initialized
from jaxlc.checkpoints.files import CHECKPOINTS_DIRECTORY, existing_step, read_meta
from jaxlc.checkpoints.pretrained import load_pretrained, restore_all_params
from jaxlc.config import Config, from_dict, with_settings
from jaxlc.config import load as load_config
from jaxlc.config.checks.mesh_checks import working_mesh
from jaxlc.config.models.pretrained import (
    CONFIG_FILE,
    COPY_DIRECTORY,
    TOKENIZER_FILE,
    find_directory,
)
from jaxlc.core import CONTEXT, TENSOR, UserError, checked, errors, mesh_text, num_replicas, text
from jaxlc.core.files import displayed, local_path
from jaxlc.data import data_sources
from jaxlc.data.sequences.user_batches import CALLER_BATCHES
from jaxlc.data.tokens.tokenizers import tokenizer_of
from jaxlc.hf.adapters import adapter_settings, base_note
from jaxlc.runtime.start import start
from jaxlc.sharding.mesh import all_sizes, make_mesh
from jaxlc.step.custom_model import Model
from jaxlc.step.language_model import TrainedModel
from jaxlc.step.loss import TokenLoss
from jaxlc.step.step import TrainStep, build_step
from jaxlc.train.evaluation import Evaluation, Evaluator
from jaxlc.train.reports.metrics import METRICS_FILE, TENSORBOARD_DIRECTORY, History, Row, read_rows
from jaxlc.train.reports.run_report import (
    LOSS_BY_POSITION_PLOT,
    LOSS_PLOT,
    OPTIMIZER_PLOT,
    REWARD_PLOT,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Result(TrainedModel):
    """A run, as returned by `jaxlc.train.run` and `jaxlc.load`."""

    # 0, or 128 + the number of the signal that stopped the run: SIGTERM 143, SIGHUP 129, SIGINT
    # (Ctrl-C) 130
    exit_status: int = 0
    rows: list[Row] = field(default_factory=list, repr=False)  # the content of metrics.jsonl
    # evaluates `params` on the held-out sequences of the run
    evaluate: Callable[[], Evaluation] = field(repr=False)
    # Held-out loss after the last step; None if a signal stopped the run before it, if the run was loaded, or if the
    # run has no held-out sequences.
    evaluation: Evaluation | None = None

    @cached_property
    def history(self) -> History:
        """The metrics of the run as columns, for `pandas.DataFrame`."""
        return History(self.rows)

    @property
    def paths(self) -> dict[str, Path]:
        """The files of the run that exist, by name."""
        names = dict(
            metrics=METRICS_FILE,
            checkpoints=CHECKPOINTS_DIRECTORY,
            loss_figure=LOSS_PLOT,
            loss_by_position_figure=LOSS_BY_POSITION_PLOT,
            optimizer_figure=OPTIMIZER_PLOT,
            reward_figure=REWARD_PLOT,
            tensorboard=TENSORBOARD_DIRECTORY,
        )
        return {
            name: self.workdir / file
            for name, file in names.items()
            if (self.workdir / file).exists()
        }

    def loss_figure(self) -> "Figure":
        """Training and held-out loss over steps. Raises UserError if matplotlib is not installed."""
        return _plots().loss_figure(self.rows)

    def loss_by_position_figure(self) -> "Figure":
        """Held-out loss by position in the document. Evaluates if `evaluation` is None.

        Raises:
          UserError: matplotlib is not installed.
        """
        return _plots().loss_by_position_figure(self.evaluation or self.evaluate())

    def reward_figure(self) -> "Figure":
        """Mean reward of the rollouts, tokens of their answers, ratio and age of the policy over
        steps.

        Raises:
          UserError: matplotlib is not installed, or the run has no rollouts.
        """
        if not any("rollouts/reward" in row for row in self.rows):
            raise UserError("the run has no rollouts: config.rollouts.source is not set")
        return _plots().reward_figure(self.rows)

    def __repr__(self) -> str:
        loss = "" if self.evaluation is None else f", held-out loss {self.evaluation.loss:.3f}"
        return f"Result(step {self.step} of {self.config.train.steps}{loss}, {displayed(self.workdir)})"

    def _repr_html_(self) -> str:
        losses = self.history.column("loss")[1]
        speed = self.history.median("tokens_per_second")
        rows = [("steps", f"{self.step:,} of {self.config.train.steps:,}")]
        if len(losses):
            rows.append(
                ("training loss", f"{losses[0]:.3f} → {losses[-1]:.3f} {self.history.loss_unit}")
            )
        if self.evaluation is not None:
            rows.append(("held-out loss", f"{self.evaluation.loss:.3f} nats per token"))
        if speed is not None:
            rows.append(("tokens/s (median)", f"{speed:,.0f}"))
        rows += [("mesh", mesh_text(self.mesh.shape)), ("workdir", displayed(self.workdir))]
        rows.append(
            (
                "explore",
                "model, params, tokenizer, history, config, paths, loss_figure(), loss_by_position_figure()",
            )
        )
        return text.table((), rows, align="ll")


def _plots() -> ModuleType:
    """The module of figures, which takes long to import. Raises UserError without matplotlib."""
    errors.require("matplotlib", "a figure of a run")
    from jaxlc.train.reports import plots

    return plots


@checked
def load(
    workdir: str | Path,
    *,
    step: int | None = None,
    mesh: Mapping[str, int] | None = None,
    model: Model | None = None,
    loss: TokenLoss | None = None,
    adapter: str | Path = "",
) -> Result:
    """Loads a run from its workdir, on the mesh of the run or another one: the same object that `train.run` returns.

    Only the parameters are read from the checkpoint, not the optimizer state. A Hugging Face directory is loaded too,
    as a run of no steps with the default settings, on one device unless `mesh` is given.

    Args:
      workdir: the directory that the run was given, a Hugging Face directory with tokenizer.json, or the hub id
        ORGANIZATION/NAME of a model, which is downloaded.
      step: the checkpoint to load. None: the latest one.
      mesh: sizes of the mesh axes data, fsdp, context and tensor, e.g. `dict(context=2)`; axes that are not named have
        size 1. None: the mesh of the run.
      model, loss: the custom model and loss of the run, if it had them.
      adapter: a directory of `peft` with adapters of LoRA of a Hugging Face model, `workdir`.
    Raises:
      jaxlc.core.errors.UserError: there is no such checkpoint, it cannot be read, or there are too few devices.
    """
    workdir = find_directory(str(workdir), "the source", with_weights=True).absolute()
    if (workdir / CONFIG_FILE).is_file():
        for name, value in dict(step=step, model=model).items():
            if value is not None:
                raise UserError(
                    f"{name} has no effect: {displayed(workdir)} is a Hugging Face directory, not a run"
                )
        return _load_huggingface(workdir, mesh, loss, str(adapter))
    if adapter:
        raise UserError(f"adapter has no effect: {displayed(workdir)} is no Hugging Face directory")
    directory = workdir / CHECKPOINTS_DIRECTORY
    step = existing_step(directory, step)
    meta = read_meta(directory, step)
    # not the processes and paths of the machines that trained it
    meta["config"]["runtime"] |= dict(
        num_processes=0, process_id=-1, coordinator_address="", compilation_cache_dir="auto"
    )
    config = _on_mesh(_with_existing_tokenizer(from_dict(meta["config"]), workdir), mesh)
    devices = _start(config)
    train_step = build_step(config, make_mesh(config.mesh, devices), model=model, loss=loss)
    with _reading(directory / str(step)):
        params = restore_all_params(train_step, directory, step, meta)
    return Result(
        step=step,
        params=params,
        tokenizer=tokenizer_of(config.data),
        workdir=workdir,
        rows=[row for row in read_rows(workdir / METRICS_FILE) if row["step"] <= step],
        train_step=train_step,
        evaluate=lambda: _evaluate(train_step, params, meta["corpus"]),
    )


def _reading(path: Path) -> AbstractContextManager[text.Update]:
    return text.progress_lines(f"reading {displayed(path)}", is_shown=jax.process_index() == 0)


def _load_huggingface(
    directory: Path, mesh: Mapping[str, int] | None, loss: TokenLoss | None, adapter: str
) -> Result:
    """The model in a Hugging Face directory, as a run of no steps."""
    config = load_config(ConfigDict({"model": {"init_from": str(directory)}}))
    if adapter:
        config = with_settings(config, {"lora.init_from": adapter})
        settings = {f"lora.{name}": value for name, value in adapter_settings(config).items()}
        config = with_settings(config, settings | {"precision.frozen": "fp32"})
        if note := base_note(config):
            print(f"note: the adapters {adapter}{note}", file=sys.stderr)
    config = _on_mesh(config, mesh, is_run=False)
    tokenizer = data_sources.load_matching_tokenizer(config)
    train_step = build_step(config, make_mesh(config.mesh, _start(config)), loss=loss)
    with _reading(directory) as update:
        params, _ = load_pretrained(train_step, update)
    return Result(
        step=0,
        params=params,
        tokenizer=tokenizer,
        workdir=directory,
        train_step=train_step,
        evaluate=lambda: _evaluate(train_step, params),
    )


def _with_existing_tokenizer(config: Config, workdir: Path) -> Config:
    """`config`, with the tokenizer copied to `workdir` if its original Hugging Face directory is
    gone.
    """
    path = Path(config.data.tokenizer)
    copy = workdir / COPY_DIRECTORY / TOKENIZER_FILE
    is_of_model = path == local_path(config.model.init_from) / TOKENIZER_FILE
    if not is_of_model or path.exists() or not copy.is_file():
        return config
    return with_settings(config, {"data.tokenizer": str(copy)})


def _on_mesh(config: Config, mesh: Mapping[str, int] | None, *, is_run: bool = True) -> Config:
    """`config` on a mesh of these sizes; axes that `mesh` does not name have size 1.

    The settings that depend on the mesh change with it. None of them changes the result.

    Args:
      is_run: False: data.seq_len has no meaning, and is changed to a length that the mesh divides.
    Raises:
      UserError: the mesh does not divide the model or the sequences of the run.
    """
    if mesh is None:
        return config
    sizes = all_sizes(mesh)
    replicas = num_replicas(sizes)
    settings = {f"mesh.{axis}": size for axis, size in sizes.items()} | {
        "attention.strategy": "ring",
        "attention.ulysses_degree": 1,
        "memory.tile_tokens": 0,
        "memory.node_copy_devices": 0,
        "train.gradient_accumulation_steps": 1,
        "train.global_batch_size": replicas,
        "train.eval_sequences": -(-config.train.eval_sequences // replicas) * replicas,
    }
    if not is_run:
        piece = 2 * sizes[CONTEXT] * sizes[TENSOR]
        settings["data.seq_len"] = max(1, config.data.seq_len // piece) * piece
    if config.runtime.simulated_devices:
        settings["runtime.simulated_devices"] = math.prod(sizes.values())
    try:
        return with_settings(config, settings)
    except UserError as error:  # its advice is about settings of a new run, such as data.seq_len
        one_device = (
            settings | {f"mesh.{axis}": 1 for axis in sizes} | {"train.global_batch_size": 1}
        )
        if not is_run:  # every mesh divides it
            one_device["data.seq_len"] = 2 * math.lcm(*range(1, math.prod(sizes.values()) + 1))
        fallback = with_settings(config, one_device | {"runtime.simulated_devices": 0})
        meshes = (
            working_mesh(fallback, number) for number in range(math.prod(sizes.values()), 0, -1)
        )
        nearest = next(asdict(mesh) for mesh in meshes if mesh is not None)
        raise UserError(
            f"the {'run' if is_run else 'model'} does not split over the mesh {mesh_text(sizes)}"
            f" ({str(error).partition(';')[0]}): use another mesh, such as {_as_arguments(nearest)}"
        ) from None


def _as_arguments(mesh: Mapping[str, int]) -> str:
    """The argument `mesh` in both of its forms."""
    sizes = [f"{axis}={size}" for axis, size in mesh.items() if size > 1] or ["context=1"]
    return f"--mesh={','.join(sizes)} (in Python mesh=dict({', '.join(sizes)}))"


def _start(config: Config) -> list[jax.Device]:
    """Starts JAX if it has not started; returns the devices of the mesh.

    Raises:
      UserError: there are fewer devices than the mesh has.
    """
    if not backends_are_initialized():
        start(config.runtime)
    devices = jax.devices()
    if len(devices) < config.mesh.num_devices:
        raise UserError(
            f"the mesh has {config.mesh.num_devices} devices, and the number of available devices is {len(devices)}:"
            f" use a smaller mesh, such as {_as_arguments({})}, or simulate devices on CPU with"
            f" --simulated_devices={config.mesh.num_devices} (in Python, at the start,"
            f" jaxlc.start(simulated_devices={config.mesh.num_devices}))"
        )
    return devices[: config.mesh.num_devices]


def _evaluate(train_step: TrainStep, params, fingerprint: str = "") -> Evaluation:
    """Reads the corpus or the traces of the config and evaluates on its held-out sequences.

    Raises:
      UserError: the run had its own batches, which are not stored, or rollouts, or there are no held-out sequences.
    """
    if fingerprint == CALLER_BATCHES:
        raise UserError(
            "the run had its own batches, which are not stored: use model.token_losses on held-out tokens"
        )
    config = train_step.config
    if config.rollouts.source:
        raise UserError(
            "the run made rollouts and held out none: use model.token_losses on held-out tokens"
        )
    if not config.train.eval_sequences:
        raise UserError("config.train.eval_sequences=0: the run has no evaluation")
    heldout = data_sources.open(config).heldout
    if heldout is None:
        raise UserError(
            f"no group is held out: config.data.eval_fraction={config.data.eval_fraction:g}"
        )
    evaluator = Evaluator(train_step, heldout, config.train.eval_sequences)
    return evaluator.with_context_gain(params, evaluator(params))
