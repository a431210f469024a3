"""Loads a finished or interrupted run from its workdir."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import jax
from ml_collections import ConfigDict

from jaxlc import runtime
from jaxlc._jax_internals import backends_are_initialized
from jaxlc.checkpoints.base_model import restore_all_params
from jaxlc.checkpoints.checkpoint_files import CHECKPOINTS_DIRECTORY, existing_step, read_meta
from jaxlc.checkpoints.pretrained_params import load_pretrained
from jaxlc.config import Config, from_dict, with_settings
from jaxlc.config import load as load_config
from jaxlc.config.checks.mesh_checks import working_mesh
from jaxlc.config.models.pretrained import CONFIG_FILE, COPY_DIRECTORY, TOKENIZER_FILE, find_directory
from jaxlc.core.arguments import checked
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR, mesh_text
from jaxlc.core.errors import UserError
from jaxlc.core.paths import displayed, local_path
from jaxlc.data import open_corpus
from jaxlc.data.tokens.tokenizers import tokenizer_of
from jaxlc.data.traces.open_traces import open_traces
from jaxlc.sharding.mesh import all_sizes, make_mesh
from jaxlc.step.custom_model import Model
from jaxlc.step.losses.loss import TokenLoss
from jaxlc.step.step import TrainStep, build_step
from jaxlc.train.evaluation.held_out import Evaluation, Evaluator
from jaxlc.train.reports.metrics import METRICS_FILE, read_rows
from jaxlc.train.result.run_result import Result
from jaxlc.train.run_data import CALLER_BATCHES, load_matching_tokenizer


@checked
def load(
    workdir: str | Path,
    *,
    step: int | None = None,
    mesh: Mapping[str, int] | None = None,
    model: Model | None = None,
    loss: TokenLoss | None = None,
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
    Raises:
      jaxlc.core.errors.UserError: there is no such checkpoint, it cannot be read, or there are too few devices.
    """
    workdir = find_directory(str(workdir), "the source", with_weights=True).absolute()
    if (workdir / CONFIG_FILE).is_file():
        for name, value in dict(step=step, model=model).items():
            if value is not None:
                raise UserError(f"{name} has no effect: {displayed(workdir)} is a Hugging Face directory, not a run")
        return _load_huggingface(workdir, mesh, loss)
    directory = workdir / CHECKPOINTS_DIRECTORY
    step = existing_step(directory, step)
    meta = read_meta(directory, step)
    config = _on_mesh(_with_existing_tokenizer(from_dict(meta["config"]), workdir), mesh)
    devices = _start(config)
    train_step = build_step(config, make_mesh(config.mesh, devices), model=model, loss=loss)
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


def _load_huggingface(directory: Path, mesh: Mapping[str, int] | None, loss: TokenLoss | None) -> Result:
    """The model in a Hugging Face directory, as a run of no steps."""
    config = _on_mesh(load_config(ConfigDict({"model": {"init_from": str(directory)}})), mesh, is_run=False)
    tokenizer = load_matching_tokenizer(config)
    train_step = build_step(config, make_mesh(config.mesh, _start(config)), loss=loss)
    params, _ = load_pretrained(train_step)
    return Result(
        step=0,
        params=params,
        tokenizer=tokenizer,
        workdir=directory,
        train_step=train_step,
        evaluate=lambda: _evaluate(train_step, params),
    )


def _with_existing_tokenizer(config: Config, workdir: Path) -> Config:
    """`config`, with the tokenizer copied to `workdir` if its original Hugging Face directory is gone."""
    path, copy = Path(config.data.tokenizer), workdir / COPY_DIRECTORY / TOKENIZER_FILE
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
    num_replicas = math.prod(sizes[axis] for axis in BATCH_AXES)
    settings = {f"mesh.{axis}": size for axis, size in sizes.items()} | {
        "attention.strategy": "ring",
        "attention.ulysses_degree": 1,
        "memory.tile_tokens": 0,
        "train.gradient_accumulation_steps": 1,
        "train.global_batch_size": num_replicas,
        "train.eval_sequences": -(-config.train.eval_sequences // num_replicas) * num_replicas,
    }
    if not is_run:
        piece = 2 * sizes[CONTEXT] * sizes[TENSOR]
        settings["data.seq_len"] = max(1, config.data.seq_len // piece) * piece
    if config.runtime.simulated_devices:
        settings["runtime.simulated_devices"] = math.prod(sizes.values())
    try:
        return with_settings(config, settings)
    except UserError as error:  # its advice is about settings of a new run, such as data.seq_len
        one_device = settings | {f"mesh.{axis}": 1 for axis in sizes} | {"train.global_batch_size": 1}
        if not is_run:  # every mesh divides it
            one_device["data.seq_len"] = 2 * math.lcm(*range(1, math.prod(sizes.values()) + 1))
        fallback = with_settings(config, one_device | {"runtime.simulated_devices": 0})
        meshes = (working_mesh(fallback, number) for number in range(math.prod(sizes.values()), 0, -1))
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
        runtime.start(config.runtime)
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
        raise UserError("the run had its own batches, which are not stored: use model.token_losses on held-out tokens")
    config = train_step.config
    if config.rollouts.source:
        raise UserError("the run made rollouts and held out none: use model.token_losses on held-out tokens")
    if config.data.traces:
        heldout = open_traces(config, load_matching_tokenizer(config)).heldout
    else:
        heldout = open_corpus(config.data, vocab_size=config.model.vocab_size).heldout
    if heldout is None:
        raise UserError(f"no group is held out: config.data.eval_fraction={config.data.eval_fraction:g}")
    evaluator = Evaluator(train_step, heldout, config.train.eval_sequences)
    return evaluator.with_context_gain(params, evaluator(params))
