"""The parameters of `model.init_from`, sharded as the training state, and frozen parameters that no
checkpoint contains.

With config.train.checkpoint_frozen=False, frozen parameters come from config.model.init_from, or
are the initial values of config.train.seed. A checkpoint stores their fingerprint, so that a run
does not resume, and is not loaded, with another base model.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.nnx.traversals import unflatten_mapping
from jax.sharding import NamedSharding, PartitionSpec

from jaxlc.checkpoints.files import BASE, checksums_of, named_leaves, stored_dtypes
from jaxlc.checkpoints.restore import restore_params
from jaxlc.config import ModelConfig, to_dict
from jaxlc.config.models.config_json import family_of
from jaxlc.config.models.model_schema import KindConfig
from jaxlc.config.models.pretrained import (
    COPY_DIRECTORY,
    UNTRAINED_FILE,
    Pretrained,
    copy_description,
    locate,
    with_overrides,
)
from jaxlc.config.values import defaults_of
from jaxlc.core import Unsupported, Update, UserError, count_text
from jaxlc.core.files import displayed, fingerprint_of, groups_within, sha256_of, write_json
from jaxlc.hf.adapters import base_note, read_adapters
from jaxlc.hf.files import StoredTensor, TensorFiles
from jaxlc.hf.load import ROUNDED, load_params, open_files, paths_of
from jaxlc.models import lora
from jaxlc.models.lora import is_adapter
from jaxlc.step.state import DEVICE, TrainState, bytes_per_device, to_memory_kind
from jaxlc.step.step import TrainStep


def check_pretrained(step: TrainStep) -> None:
    """Checks config.model.init_from as `load_pretrained` does, but reads only the headers of its
    files.

    Raises:
      UserError: the model cannot be read, or differs from the config.
    """
    pretrained, model, *_ = _source_of(step)
    if pretrained.is_run:
        _check_is_whole(pretrained, step.config.precision.frozen)
    else:
        family = family_of(pretrained.config_json(), model)
        open_files(pretrained.directory, family, model)
    if step.config.lora.init_from:
        _adapters_of(step)


def load_pretrained(
    step: TrainStep,
    progress: Update | None = None,
    *,
    initial_adapters: bool = False,
) -> tuple[dict, str]:
    """The parameters of config.model.init_from, with the shardings of `step`, and a line that
    describes them.

    LoRA adapters are read from config.lora.init_from, or have their initial values. If
    config.model.vocab_size is larger than the vocabulary of the model, the rows of new tokens are
    added: see `_with_new_rows`.

    Args:
      progress: called with the bytes of parameters done and in total.
      initial_adapters: do not read config.lora.init_from.
    Raises:
      UserError: the model cannot be read, differs from the config, or has NaN or infinite values.
    """
    pretrained, model, adapter_names, abstract = _source_of(step)
    if pretrained.is_run:
        _check_is_whole(pretrained, step.config.precision.frozen)
        params = _restored_as(pretrained.directory.absolute(), abstract, model.vocab_size)
        line = f"weights    of the checkpoint {displayed(pretrained.directory.absolute())}"
        if any(x.dtype.itemsize == 2 for x in jax.tree.leaves(abstract)):
            line += ROUNDED
    else:
        family = family_of(pretrained.config_json(), model)
        params, read = load_params(pretrained.directory, family, abstract, model, progress)
        line = f"weights    {displayed(pretrained.directory)}, {read}"
    if model.vocab_size < step.config.model.vocab_size:
        params, names = _with_new_rows(step, params, model.vocab_size)
        line += f"; new rows of {' and '.join(names)} for tokens from {model.vocab_size:,} on"
        if not step.frozen.isdisjoint(names):
            line += f", which are frozen: config.train.trainable={','.join(names)} trains them"
    if adapter_names:
        if step.config.lora.init_from and not initial_adapters:
            adapters = _adapters_of(step)
            line += f"; adapters {step.config.lora.init_from}{base_note(step.config)}"
        else:
            adapters = step.init_params(adapter_names)
        params = lora.join(params, adapters)
    return params, line


def _adapters_of(step: TrainStep) -> dict:
    """The adapters in config.lora.init_from, sharded as the training state."""
    adapters = {}
    abstract = {x: y for x, y in paths_of(step.abstract_state.params) if is_adapter(x)}
    for path, array in read_adapters(step.config, abstract).items():
        target = abstract[path]
        adapters[path] = jax.make_array_from_callback(
            target.shape, target.sharding, array.__getitem__
        )
    return unflatten_mapping(adapters, sep="/")


def keep_description(model: ModelConfig, workdir: Path) -> str:
    """Copies what exports need of the original model to `workdir`, with names, dtypes, shapes and SHA-256 of the
    tensors that are not trained, such as those of images.

    Returns:
      A line that describes these tensors, or "".
    """
    record_file = workdir / COPY_DIRECTORY / UNTRAINED_FILE
    record_file.unlink(missing_ok=True)  # of a run that ended before its first checkpoint
    copy_description(model.init_from, workdir)
    source = locate(model.init_from)
    family = None if source.is_run else family_of(source.config_json(), model)
    if family is None or not family.other_prefixes:
        return ""
    stored = TensorFiles(source.directory).tensors
    prefixes = family.prefixes_left_out(model)
    tensors = {name: tensor for name, tensor in stored.items() if name.startswith(prefixes)}
    counts = {prefix: sum(name.startswith(prefix) for name in tensors) for prefix in prefixes}
    text = ", ".join(
        f"{count_text(count, 'tensor')} {prefix}*" for prefix, count in counts.items() if count
    )
    record: dict[str, Any] = dict(
        source=model.init_from,
        prefix=family.prefix_of(stored),
        tensors={name: _described(tensor) for name, tensor in tensors.items()},
    )
    write_json(record_file, record)
    digest = fingerprint_of(json.dumps(record["tensors"], sort_keys=True))
    return (
        text and f"untrained  {text}, SHA-256 {digest}; exports copy them from {record['source']}"
    )


def _described(tensor: StoredTensor) -> dict[str, Any]:
    return dict(dtype=tensor.dtype, shape=list(tensor.shape), sha256=sha256_of(tensor.bytes.data))


def untrained_tensors(record: Mapping[str, Any]) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a record that `keep_description` wrote, by name.

    Raises:
      UserError: the model that has them is missing, or one of them has changed.
    """
    if not record.get("tensors"):
        return
    source = record["source"]
    cure = "restore it, or export with --text_only"
    try:
        tensors = TensorFiles(locate(source, with_weights=True).directory).tensors
    except UserError as error:
        raise UserError(
            f"cannot read {source}, which has the tensors that were not trained ({error}): {cure}"
        ) from error
    for name, described in record["tensors"].items():
        if name not in tensors or _described(tensors[name]) != described:
            raise UserError(
                f"{name} in {source} is missing, or differs from the one that the run started with: {cure}"
            )
        yield name, tensors[name]


_VOCAB = "vocab"  # name of the dimension
_ROWS = 8192  # of the vocabulary in host memory at a time
_COVARIANCE_FACTOR = 1e-9


def _with_new_rows(step: TrainStep, params: dict, num_tokens: int) -> tuple[dict, list[str]]:
    """`params` with values for the tokens from `num_tokens` on, and the names of the parameters
    that have them.

    The new rows of a parameter are drawn from the normal distribution with the mean of the other
    rows and 1e-9 times their covariance; they are the mean if that matrix is not positive definite
    in float32. So does `resize_token_embeddings` of transformers (Hewitt 2021,
    https://nlp.stanford.edu/~johnhew/vocab-expansion.html). The values depend on config.train.seed
    and not on the mesh: each process adds up all rows in the same order, in float64.
    """
    names = sorted(name for name in params if _VOCAB in step.dims[name])
    extended = dict(params)
    model = step.config.model
    for number, name in enumerate(names):
        param = params[name]
        axis = step.dims[name].index(_VOCAB)
        # RandomState, not default_rng: its stream is frozen, so every NumPy version gives the same
        random = np.random.RandomState([step.config.train.seed % 2**32, number])
        mean, factor = _distribution_of_rows(param, axis, num_tokens)
        normal = random.standard_normal((model.vocab_size - num_tokens, len(mean)))
        rows = np.moveaxis(mean + normal @ factor.T, 0, axis).astype(param.dtype)

        def replace(x: jax.Array, rows: jax.Array, axis: int = axis) -> jax.Array:
            x = to_memory_kind(x, DEVICE)
            return jax.lax.dynamic_update_slice_in_dim(x, rows, num_tokens, axis)

        extended[name] = jax.jit(replace, out_shardings=param.sharding)(param, rows)
    return extended, names


def _distribution_of_rows(
    param: jax.Array, axis: int, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """The mean [D] of the first rows of a parameter, along `axis`, and a factor [D, D] of 1e-9
    times their covariance, 0 if that is not positive definite; float64.
    """
    everywhere = NamedSharding(param.sharding.mesh, PartitionSpec())

    @jax.jit(static_argnums=(1, 2), out_shardings=everywhere)
    def part(x: jax.Array, start: int, stop: int) -> jax.Array:
        return jax.lax.slice_in_dim(to_memory_kind(x, DEVICE), start, stop, axis=axis)

    width = param.size // param.shape[axis]
    total = np.zeros(width)
    products = np.zeros((width, width))
    for start in range(0, num_rows, _ROWS):
        rows = np.asarray(part(param, start, min(num_rows, start + _ROWS)), np.float64)
        rows = np.moveaxis(rows, axis, 0)
        total += rows.sum(0)
        products += rows.T @ rows
    mean = total / num_rows
    covariance = products / num_rows - np.outer(mean, mean)
    scaled = (_COVARIANCE_FACTOR * covariance).astype(np.float32)
    try:
        np.linalg.cholesky(scaled)  # transformers decides in float32
        return mean, np.linalg.cholesky(scaled.astype(np.float64))
    except np.linalg.LinAlgError:
        return mean, np.zeros_like(products)


def _source_of(step: TrainStep) -> tuple[Pretrained, ModelConfig, frozenset[str], Any]:
    """The model of config.model.init_from and its settings: those of the run, with the size of its
    own vocabulary; the names of the parameters that it does not have, which are adapters; and the
    shapes of the others.

    Raises:
      UserError: the model cannot be found, or its description differs from the config.
    """
    config = step.config
    if step.model is not None:
        raise Unsupported(
            "unsupported: config.model.init_from with a custom model, which has its own init()"
        )
    pretrained = locate(config.model.init_from, with_weights=True)
    settings = pretrained.model_settings()
    kinds = dict.fromkeys(settings.get("kinds", {}), defaults_of(KindConfig))
    kinds |= to_dict(config)["model"]["kinds"]
    # a config that was loaded before may differ
    with_overrides(pretrained, config.model.by_path | {"kinds": kinds})
    adapter_names = (
        frozenset(filter(is_adapter, lora.names_of(step.dims))) if config.lora.rank else frozenset()
    )
    abstract, _ = lora.split(step.abstract_state.params, adapter_names)
    model = dataclasses.replace(config.model, vocab_size=settings["vocab_size"])
    return pretrained, model, adapter_names, abstract


def _check_is_whole(run: Pretrained, frozen: str) -> None:
    """Checks that the checkpoint of a run contains the parameters of the whole model, which
    quantized weights (precision.frozen) are not read from.

    Raises:
      UserError: it does not.
    """
    stored = run.run_config()
    if (
        frozen in ("nf4", "mxfp4")
        or stored.get("lora", {}).get("rank")
        or not stored.get("train", {}).get("checkpoint_frozen", True)
    ):
        raise UserError(
            f"{run.directory.absolute()} has adapters, lacks the frozen parameters, or is to be quantized to 4 bits:"
            " export the run with `jaxlc export`, which gives a whole model, and use the result as"
            " config.model.init_from"
        )


def _restored_as(checkpoint: Path, abstract, vocab_size: int) -> dict:
    """The parameters of a checkpoint. They are restored in the dtypes in which they are stored,
    whose checksums the checkpoint has, and converted to the dtypes of `abstract`, some at a time.
    """
    dtypes = stored_dtypes(checkpoint)
    names, targets = zip(*named_leaves(abstract))
    stored = [
        target.update(dtype=dtypes.get(f"params/{name}", target.dtype))
        for name, target in zip(names, targets)
    ]
    if stored == list(targets):
        return restore_params(
            checkpoint.parent, int(checkpoint.name), abstract, vocab_size=vocab_size
        )
    converted: list[jax.Array] = []
    for group in groups_within(map(bytes_per_device, stored)):
        tree = unflatten_mapping({names[index]: stored[index] for index in group}, sep="/")
        params = restore_params(
            checkpoint.parent, int(checkpoint.name), tree, vocab_size=vocab_size, only_these=True
        )
        converted += _converted(jax.tree.leaves(params), [targets[index] for index in group])
    return jax.tree.unflatten(jax.tree.structure(abstract), converted)


def _converted(arrays: list[jax.Array], targets: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    def convert(arrays):
        return [
            to_memory_kind(x, DEVICE).astype(target.dtype) for x, target in zip(arrays, targets)
        ]

    shardings = [target.sharding for target in targets]
    return jax.block_until_ready(jax.jit(convert, out_shardings=shardings)(arrays))


def without_frozen(step: TrainStep, state: TrainState) -> TrainState:
    """The part of the state that a checkpoint without frozen parameters contains; of arrays or
    their shapes.
    """
    return state._replace(params=lora.split(state.params, step.frozen)[0])


def checkpoint_part(step: TrainStep, state: TrainState) -> TrainState:
    """The part of the state that the checkpoints of this config contain; of arrays or their shapes."""
    return state if step.config.train.checkpoint_frozen else without_frozen(step, state)


def base_meta(step: TrainStep, params) -> dict[str, dict[str, str]]:
    """Entries of a checkpoint's meta that identify the frozen parameters; empty if the checkpoint
    contains them.
    """
    if step.config.train.checkpoint_frozen:
        return {}
    return {
        BASE: dict(init_from=step.config.model.init_from, fingerprint=_fingerprint(step, params))
    }


def with_base(step: TrainStep, trainable, base: dict[str, str], checkpoint: Path) -> dict:
    """All parameters, from the trainable ones of a checkpoint.

    Args:
      base: meta of the checkpoint, as `base_meta` returns it.
      checkpoint: its directory, for errors.
    Raises:
      UserError: the frozen parameters cannot be read, or differ from the ones that the checkpoint was trained on.
    """
    try:
        params = (
            load_pretrained(step, initial_adapters=True)[0]
            if step.config.model.init_from
            else step.init_params(step.frozen)
        )
    except UserError as error:  # generation and export take no other model
        raise UserError(
            f"{checkpoint} lacks the frozen parameters: put back the model that it was trained on ({error})"
        ) from error
    if _fingerprint(step, params) != base["fingerprint"]:
        raise UserError(
            f"the frozen parameters of {checkpoint} are not those of {_source(step)}: it was trained on"
            f" {base['init_from'] or 'random weights'}; use that model and the same config.precision.frozen and"
            " config.train.seed"
        )
    return lora.join(trainable, lora.split(params, step.frozen)[1])


def restore_all_params(step: TrainStep, directory: Path, step_number: int, meta: dict) -> dict:
    """All parameters of a checkpoint of the run of `step`, with its shardings.

    Raises:
      UserError: as `restore_params` and `with_base`.
    """
    vocab_size = step.config.model.vocab_size
    abstract = step.abstract_state.params
    if BASE not in meta:
        is_finite = step.model is None
        return restore_params(
            directory, step_number, abstract, vocab_size=vocab_size, finite_params=is_finite
        )
    abstract_trainable, _ = lora.split(abstract, step.frozen)
    trainable = restore_params(directory, step_number, abstract_trainable, vocab_size=vocab_size)
    return with_base(step, trainable, meta[BASE], directory / str(step_number))


def _fingerprint(step: TrainStep, params) -> str:
    """Of the frozen part of `params`; independent of the mesh."""
    _, frozen = lora.split(params, step.frozen)
    return sha256_of(json.dumps(sorted(checksums_of(frozen).items())))


def _source(step: TrainStep) -> str:
    init_from = step.config.model.init_from
    if init_from:
        return f"config.model.init_from={init_from}"
    return f"config.train.seed={step.config.train.seed}"
