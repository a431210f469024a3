"""The functions of `jaxlc` that compose its packages: the start of JAX, meshes, generation,
evaluation and export.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlc.checkpoints import export as to_huggingface
from jaxlc.checkpoints.files import CHECKPOINTS_DIRECTORY, existing_step
from jaxlc.config import MeshConfig, RuntimeConfig
from jaxlc.config.checks.stage_checks import eval_settings
from jaxlc.config.models import hub
from jaxlc.config.values import range_problems
from jaxlc.core import UserError, checked, print_to_stderr, progress_lines, raise_first
from jaxlc.core.files import local_path
from jaxlc.data.tokens.encoder import Stops
from jaxlc.evals.evaluate_run import check_before_loading, evaluate_run, results_directory
from jaxlc.evals.predictions import ScoreRow
from jaxlc.generation.generate_text import encoder_of, generator_of, stops_for, warn_beyond_context
from jaxlc.generation.generator import Generation
from jaxlc.generation.sampling import Sampling
from jaxlc.runtime.start import start as start_runtime
from jaxlc.sharding.mesh import make_mesh as mesh_of_sizes
from jaxlc.train.result import Result, load


@checked
def start(
    *,
    simulated_devices: int = 0,
    num_processes: int = 0,
    process_id: int = -1,
    coordinator_address: str = "",
) -> None:
    """Starts JAX on GPUs, or on simulated CPU devices. Call it before anything uses a device.

    `jaxlc.train.run` starts JAX itself, with the settings of its config. Calling this again with equal arguments has no
    effect.

    Args:
      simulated_devices: 0, or the number of CPU devices to simulate, over all processes.
      num_processes: more than 1: joins the processes of a run with `jax.distributed`. 0: from the launcher (Slurm, Open
        MPI, Kubernetes), and 1 without one; so are the next two by default.
      process_id: the index of this process, from 0.
      coordinator_address: host:port of process 0.
    Raises:
      jaxlc.core.errors.UserError: JAX has already started with other settings, or a number is out of range.
    """
    config = RuntimeConfig(
        simulated_devices=simulated_devices,
        num_processes=num_processes,
        process_id=process_id,
        coordinator_address=coordinator_address,
    )
    raise_first(range_problems("runtime", config))
    start_runtime(config, is_for_model=False)


@checked
def make_mesh(
    *,
    data: int = 1,
    fsdp: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> jax.sharding.Mesh:
    """A device mesh with the axes data, fsdp, context and tensor, in this order, for
    `jaxlc.attend`.

    Args:
      data, fsdp, context, tensor: the size of each axis; their product is the number of devices.
      devices: default: `jax.devices()`.
    Raises:
      jaxlc.core.errors.UserError: the number of devices differs from the size of the mesh.
    """
    sizes = MeshConfig(data=data, fsdp=fsdp, context=context, tensor=tensor)
    raise_first(range_problems("mesh", sizes))
    return mesh_of_sizes(sizes, devices)


def _loaded(
    source: str | Path | Result,
    step: int | None,
    mesh: Mapping[str, int] | None,
    adapter: str | Path = "",
) -> Result:
    """`source`, or the `Result` of a path. Raises UserError for other arguments with a `Result`,
    which has them.
    """
    if isinstance(source, (str, os.PathLike)):
        return load(source, step=step, mesh=mesh, adapter=adapter)
    if step is not None or mesh is not None or adapter:
        raise UserError(
            "step, mesh and adapter have no effect with a Result: pass them to jaxlc.load"
        )
    return source


@checked
def generate(
    source: str | Path | Result,
    prompts: str | Sequence[str | Sequence[int]],
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    step: int | None = None,
    mesh: Mapping[str, int] | None = None,
    chunk_tokens: int = 0,
    stream: Callable[[int, str], None] | None = None,
    chat: bool = False,
    chat_template: str = "",
    adapter: str | Path = "",
) -> Generation | list[Generation]:
    """Continues prompts of any length with a model, whose KV cache is split over the context and tensor axes.

    All prompts are one batch; their lengths may differ. Every process of a run must make the same call. Later calls
    with the same `Result` use the same compiled programs.

    Args:
      source: the workdir of a run, a Hugging Face directory, a hub id, or the `Result` of `train.run` or `load`.
      prompts: one text, or a list of texts or of token ids [tokens]. Text is encoded as in training, with
        the start token of the run (data.start_token) or, for a Hugging Face directory, as `transformers` does.
      max_tokens: largest number of new tokens of each prompt.
      temperature: logits are divided by it. 0: the token with the largest logit.
      top_p: sample from the smallest set of tokens with at least this probability.
      top_k: sample from this many likeliest tokens. 0: from all.
      min_p: sample from tokens with at least this fraction of the largest probability.
      repetition_penalty: positive logits of tokens that occurred are divided by it, negative ones multiplied.
      stop: strings that end a continuation, besides the end-of-document token of the tokenizer and the tokens that
        the generation_config.json of a pretrained model names, or its config.json.
      seed: of random sampling. A prompt's tokens do not depend on the other prompts or on the mesh.
      step, mesh: as in `load`; only with a path.
      chunk_tokens: tokens of a prompt that are computed at once. 0: 2,048 per context rank.
      stream: called with the index of a prompt and its new text as soon as the text is known.
      chat: texts are messages of a user, in the chat template of the model; answers end at its end-of-turn token.
      chat_template: with `chat`, replaces the template of the model: "chatml", "llama3" or a Jinja file.
      adapter: as in `load`; only with a path.
    Returns:
      The `Generation` of the prompt (text, tokens, log_probs, finish_reason), or a list for a list of prompts.
    Raises:
      jaxlc.core.errors.UserError: the source cannot be read, a prompt is empty, or a value is out of range.
      jaxlc.core.errors.Unsupported: a custom model.
    """
    # raises before the model is loaded
    sampling = Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    all_prompts = [prompts] if isinstance(prompts, str) else prompts
    if isinstance(prompts, np.ndarray) or any(isinstance(prompt, int) for prompt in all_prompts):
        raise UserError(
            "invalid prompts: expected a string, or a list of strings or of arrays of token ids"
        )
    result = _loaded(source, step, mesh, adapter)
    encode = encoder_of(result, chat=chat, chat_template=chat_template)
    encoded = [encode(x) if isinstance(x, str) else np.asarray(x) for x in all_prompts]
    for warning in encode.warnings if jax.process_index() == 0 else ():
        print_to_stderr(f"warning: {warning}")
    generator = generator_of(result)
    stops = stops_for(result, encode.template)
    warn_beyond_context(result, max(map(len, encoded), default=0) + max_tokens)
    if result is not source:  # free the parameters that the generator has in another dtype
        pairs = zip(jax.tree.leaves(result.params), jax.tree.leaves(generator.params), strict=True)
        for stored, cast in pairs:
            if stored.dtype != cast.dtype:
                stored.delete()
    own_stops = [stop] if isinstance(stop, str) else stop
    generations = generator(
        encoded,
        max_tokens=max_tokens,
        sampling=sampling,
        stops=Stops(stops.ids, [*own_stops, *stops.texts]),
        chunk_tokens=chunk_tokens,
        stream=stream,
        shows_progress=True,
    )
    return generations[0] if isinstance(prompts, str) else generations


@checked
def evaluate(
    source: str | Path | Result,
    *,
    out: str | Path | None = None,
    step: int | None = None,
    mesh: Mapping[str, int] | None = None,
    report: Callable[[ScoreRow], None] | None = None,
    chat_template: str = "",
    **settings: Any,
) -> list[ScoreRow]:
    """Scores a model at chosen context lengths on its mesh; docs/evaluation.md.

    Predictions are stored as they are made, so that an interrupted evaluation resumes. Every process of a run must make
    the same call.

    Args:
      source: the workdir of a run, a Hugging Face directory, a hub id, or the `Result` of `train.run` or `load`.
      out: directory of predictions and scores. None: `evals` in the workdir, and runs/NAME/evals for a hub id.
      step, mesh: as in `load`; only with a path.
      report: called with each score.
      chat_template: with the setting `chat`, replaces the template of the model: "chatml", "llama3" or a Jinja file.
      settings: fields of `jaxlc.config.EvalsConfig`:
        lengths: in tokens of the tokenizer, prompt and new tokens together.
        tasks: "needle" (the default), "passkey", "loss", "ruler" (all its tasks), or names of RULER's tasks.
        num_examples: of each task and length; of each depth, too; with "loss", the largest number of documents.
        depths: of "needle" and "passkey", from 0 (start) to 1 (end of the text).
        num_needles: of "needle": numbers in a text, of which one is asked for.
        haystack: files with prose that fill the prompts. Empty: docstrings of Python's standard library.
        squad, hotpotqa: the data sets of RULER's qa_1 and qa_2, without which they are not evaluated.
        documents, text_field: of "loss": paths in the formats of data.sources, and the field of records with the text.
        context_limits: of "loss": numbers of tokens to which the context is limited, for the gain of full context.
        chat: prompts are messages of a user, in the chat template of the tokenizer or of data.chat_template.
        batch_size: examples that are computed together.
        seed: of the examples.
    Raises:
      jaxlc.core.errors.UserError: the source cannot be read, a value is out of range, a length is too small for a task,
        or `out` has predictions of other settings.
    """
    checked_settings = eval_settings(settings)
    target = local_path(out) if out else None

    if isinstance(source, (str, os.PathLike)):
        check_before_loading(source, checked_settings)
    result = _loaded(source, step, mesh)
    directory = target or results_directory(result.workdir if result is source else source)
    return evaluate_run(
        result,
        checked_settings,
        directory,
        report or (lambda row: None),
        chat_template=chat_template,
    )


@checked
def export(
    workdir: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: str = "bf16",
    max_shard_gb: float = 5.0,
    adapters: bool = False,
    text_only: bool = False,
    base: str = "",
    push_to_hub: str = "",
    public: bool = False,
) -> Path:
    """Writes the weights of a run as a directory that Hugging Face `transformers` opens, and returns its path.

    Models whose layers no supported family has are written with model_type "jaxlc", which jaxlc alone opens.
    The directory has safetensors files, config.json, generation_config.json, and the tokenizer files of the model that
    the run started from. Parameters are restored and written one at a time. Call it in one process only. Adapters of
    LoRA are merged into the weights, unless `adapters` is true.

    Args:
      workdir: the directory that the run was given.
      out: the directory to write, which must not exist or be empty.
      step: the checkpoint to export. None: the latest one.
      dtype: of the weights, "bf16" or "fp32".
      max_shard_gb: size limit of a safetensors file in GB.
      adapters: write the adapters of LoRA alone, in float32, and the other trained parameters, in the form of `peft`.
      text_only: write the language model alone, or adapters with its names. Otherwise, the tensors that were not
        trained, those of images and of multi-token prediction, are copied from the model that the run started from,
        with its config.json, processor and names, so that it opens as the same class of `transformers`.
      base: of a run with precision.frozen=nf4: a Hugging Face directory or hub id of the model before quantization. The
        adapters are merged into its weights. Empty: into the dequantized weights of training.
      push_to_hub: ORGANIZATION/NAME of a model of the Hugging Face hub. Whether you may write to it is checked before
        the export. The files of `out` and a model card replace its content in one commit. Empty: none.
      public: a new model of the hub is public, instead of private.
    Raises:
      jaxlc.core.errors.UserError: there is no such checkpoint, it cannot be read, `out` cannot be written or is a
        mount point, another process exports to it, or a tensor that was not trained is missing in the model that the
        run started from, or has changed.
      jaxlc.core.errors.Unsupported: transformers does not compute the RoPE of the model.
    """
    if public and not push_to_hub:
        raise UserError("public has no effect without push_to_hub: set it to ORGANIZATION/NAME")
    if push_to_hub:
        hub.prepare_push(push_to_hub, public=public)
    workdir = local_path(workdir).absolute()
    target = local_path(out).resolve()  # it is replaced, and a link would not be
    start_runtime(RuntimeConfig(num_processes=1))
    step = existing_step(workdir / CHECKPOINTS_DIRECTORY, step)
    with progress_lines("exporting") as progress:
        to_huggingface.export(
            workdir,
            target,
            step=step,
            dtype=dtype,
            max_shard_gb=max_shard_gb,
            adapters=adapters,
            text_only=text_only,
            base_model=base,
            load_params=lambda: load(workdir, step=step, mesh={}).params,
            progress=progress,
        )
    if push_to_hub:
        to_huggingface.write_model_card(target, workdir, step, push_to_hub)
        hub.push(target, push_to_hub, f"Upload step {step} of a run of jaxlc")
    return target
