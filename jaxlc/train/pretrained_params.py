"""The parameters of `model.init_from`, sharded as the training state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxlc.config.config_json import family_of
from jaxlc.config.pretrained import Pretrained, locate, with_overrides
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.hf.load import load_params
from jaxlc.models import freezing
from jaxlc.models.lora import is_adapter
from jaxlc.train.checkpoint import restore_params, stored_dtypes
from jaxlc.train.state import DEVICE, to_memory_kind
from jaxlc.train.step import TrainStep


def load_pretrained(step: TrainStep, progress: Callable[[int, int], None] | None = None) -> tuple[dict, str]:
    """The parameters of config.model.init_from, with the shardings of `step`, and a line that describes them.

    Adapters of LoRA have their initial values.

    Args:
      progress: called with the bytes of parameters done and in total.
    Raises:
      UserError: the model cannot be read, or is not that of the config.
    """
    config = step.config
    if step.model is not None:
        raise Unsupported("unsupported: config.model.init_from with a model of the caller, which has its own init()")
    pretrained = locate(config.model.init_from, with_weights=True)
    with_overrides(pretrained, vars(config.model))  # a config that was loaded before may differ
    adapter_names = frozenset(filter(is_adapter, freezing.names_of(step.dims))) if config.lora.rank else frozenset()
    abstract, _ = freezing.split(step.abstract_state.params, adapter_names)
    dims, _ = freezing.split(step.dims, adapter_names)
    if pretrained.is_run:
        params, line = _of_run(pretrained, abstract, config.model.vocab_size)
    else:
        params, num_bytes = load_params(
            pretrained.directory,
            family_of(pretrained.config_json(), config.model),
            abstract,
            dims,
            vocab_size=config.model.vocab_size,
            progress=progress,
        )
        line = f"weights    {pretrained.directory}, {num_bytes:,} bytes read by this process"
    if adapter_names:
        params = freezing.join(params, step.init_params(adapter_names))
    return params, line


def _of_run(pretrained: Pretrained, abstract, vocab_size: int) -> tuple[dict, str]:
    """The parameters in a checkpoint, converted one by one if they are stored in another dtype.

    Raises:
      UserError: the checkpoint does not contain the parameters of the whole model.
    """
    path, stored = pretrained.directory.absolute(), pretrained.run_config()
    if stored.get("lora", {}).get("rank") or not stored["train"].get("checkpoint_frozen", True):
        raise UserError(
            f"{path} has adapters or lacks the frozen parameters: export the run with `jaxlc export`, which gives a"
            " whole model, and use the result as config.model.init_from"
        )
    directory, step, dtypes = path.parent, int(path.name), stored_dtypes(path)
    leaves = jax.tree.leaves_with_path(abstract)
    if all(dtypes[_name_of(leaf_path)] == like.dtype for leaf_path, like in leaves):
        params = restore_params(directory, step, abstract, vocab_size=vocab_size)
    else:
        restored = [
            _restore_as(directory, step, leaf_path, like, dtypes[_name_of(leaf_path)], vocab_size)
            for leaf_path, like in leaves
        ]
        params = jax.tree.unflatten(jax.tree.structure(abstract), restored)
    return params, f"weights    of the checkpoint {path}"


def _name_of(path: tuple[Any, ...]) -> str:
    return "/".join(("params", *(key.key for key in path)))


def _restore_as(
    directory: Path, step: int, path: tuple[Any, ...], like: jax.ShapeDtypeStruct, stored_dtype: Any, vocab_size: int
) -> jax.Array:
    """One parameter, restored in the dtype in which it is stored, and converted to that of `like`."""
    tree: Any = jax.ShapeDtypeStruct(like.shape, stored_dtype, sharding=like.sharding)
    for key in reversed(path):
        tree = {key.key: tree}
    (param,) = jax.tree.leaves(restore_params(directory, step, tree, vocab_size=vocab_size, only_these=True))
    convert = jax.jit(lambda x: to_memory_kind(x, DEVICE).astype(like.dtype), out_shardings=like.sharding)
    return jax.block_until_ready(convert(param))
