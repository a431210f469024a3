"""Writes the parameters of a checkpoint as a directory that `transformers` opens."""

import contextlib
import json
import operator
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxlc.checkpoints.checkpoint_files import (
    BASE,
    CHECKPOINTS_DIRECTORY,
    committed_steps,
    existing_step,
    read_meta,
)
from jaxlc.checkpoints.exported_text import write_text_files
from jaxlc.checkpoints.stored_params import StoredParams
from jaxlc.config import Config, from_dict
from jaxlc.config.models.config_json import config_json_of, family_of
from jaxlc.config.models.families import Family
from jaxlc.config.models.pretrained import CONFIG_FILE, locate, original_of
from jaxlc.core.errors import UserError
from jaxlc.core.paths import local_path
from jaxlc.core.progress_lines import print_to_stderr
from jaxlc.core.write_errors import write_errors_explained
from jaxlc.hf.adapters import read_adapter, write_adapters
from jaxlc.hf.load import layouts_of, paths_of
from jaxlc.hf.safetensors_files import TensorFiles
from jaxlc.hf.tensor_slices import Layout
from jaxlc.hf.write import TensorWriter
from jaxlc.models import decoder
from jaxlc.step.state import groups_of

DTYPES = {"bf16": ("BF16", "bfloat16"), "fp32": ("F32", "float32")}  # name -> names in safetensors and in config.json


def export(
    workdir: str | Path,
    out: str | Path,
    *,
    step: int | None,
    dtype: str,
    max_shard_gb: float,
    adapters: bool,
    load_params: Callable[[int], Any],
) -> Path:
    """Writes a checkpoint; see `jaxlc.export`.

    `load_params` returns all parameters of a step, for checkpoints without the frozen ones.
    """
    workdir, target = local_path(workdir).absolute(), local_path(out).absolute()
    directory = workdir / CHECKPOINTS_DIRECTORY
    step = existing_step(directory, step)
    if dtype not in DTYPES:
        raise UserError(f"invalid dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    if not max_shard_gb > 0:
        raise UserError(f"invalid max_shard_gb={max_shard_gb}: expected a number greater than 0")
    meta = read_meta(directory, step)
    config = from_dict(meta["config"])
    source = original_of(config.model.init_from, workdir)
    base = None if source is None else source.config_json()
    longest = _longest_sequence(directory, step)
    content = config_json_of(config.model, base, seq_len=longest, dtype=DTYPES[dtype][1])
    load_all = (lambda: load_params(step)) if BASE in meta else None
    params = StoredParams(workdir, step, config, load_all=load_all)
    family = family_of(base, config.model)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already: remove it, or export to a different directory")
    partial = target.with_name(target.name + ".partial")  # renamed when it is complete
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with write_errors_explained(target, "export to a different directory"):
            partial.mkdir(parents=True)
            if adapters:
                write_adapters(config, family, params, partial, base=_base_of_adapters(config))
            else:
                content |= write_text_files(config, source, partial, longest=longest)
                (partial / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")
                _write_weights(config, family, params, partial, DTYPES[dtype][0], int(max_shard_gb * 1e9))
            if target.is_dir():
                target.rmdir()
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after an error
    return target


def _is_run(init_from: str) -> bool:
    return bool(init_from) and local_path(init_from).exists() and locate(init_from).is_run


def _base_of_adapters(config: Config) -> str:
    """What peft opens as the base of the adapters of a run, or "". Prints how to get the weights of training."""
    base, frozen = config.model.init_from, config.precision.frozen
    if _is_run(base):
        print_to_stderr(
            f"note: the adapters are for the weights of the run {base}, so base_model_name_or_path is null: export it"
            f" with `jaxlc export {base} BASE --dtype={frozen}`, and load them on that directory"
        )
        return ""
    if base and frozen == "bf16" and not {"F32", "F16"}.isdisjoint(_stored_dtypes(base)):
        print_to_stderr(
            f"note: training rounded the frozen weights of {base} to bf16 (config.precision.frozen): load the adapters"
            " on the base in bfloat16, or expect other results than those of the merged export"
        )
    return base


def _stored_dtypes(model: str) -> set[str]:
    """The dtypes of the tensors of a Hugging Face model; none if its files are gone."""
    with contextlib.suppress(UserError):
        return {tensor.dtype for tensor in TensorFiles(locate(model).directory).tensors.values()}
    return set()


def _longest_sequence(directory: Path, step: int) -> int:
    """The longest sequences, in tokens, that the model of a checkpoint was trained on.

    A run keeps the checkpoint at the end of each stage. The run that it started from counts too, if it still exists.
    """
    longest, init_from = 0, ""
    for number in committed_steps(directory):
        if number <= step:
            with contextlib.suppress(UserError):  # another checkpoint, which cannot be read
                stored = read_meta(directory, number)["config"]
                longest, init_from = max(longest, stored["data"]["seq_len"]), stored["model"]["init_from"]
    if _is_run(init_from):
        source = locate(init_from)
        longest = max(longest, _longest_sequence(source.directory.parent, int(source.directory.name)))
    return longest


def _write_weights(
    config: Config, family: Family, params: StoredParams, target: Path, dtype: str, max_shard_bytes: int
) -> None:
    """Reads one stacked parameter, or a few small ones, at a time to host memory, and writes their tensors."""
    model = config.model
    abstract = dict(paths_of(decoder.abstract_params(model, model.vocab_size)))
    layouts = layouts_of(family, abstract, dict(paths_of(decoder.dims_of(model))), model)
    float32_names = {name for layout in layouts.values() if layout.tensor.is_float32 for name in layout.names}
    with TensorWriter(
        target, _shapes(layouts), dtype=dtype, max_shard_bytes=max_shard_bytes, float32_names=float32_names
    ) as files:
        paths = list(abstract)
        for group in groups_of(x.size * x.dtype.itemsize for x in abstract.values()):
            for path, array in params.read([paths[index] for index in group]).items():
                layout, adapter = layouts[path], read_adapter(config, params, path)
                for place, weight in zip(layout.places, layout.arrays(array), strict=True):
                    merged = weight if adapter is None else adapter.merged(weight, place)
                    files.write(layout.name_at(place), layout.to_stored(merged), layout.region_at(place))


def _shapes(layouts: dict[str, Layout]) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of all tensors: embedding, layer by layer, final norm, head."""
    single = {path: layout for path, layout in layouts.items() if layout.layers is None}
    stacked = [
        (x.layers[place[0]], x.name_at(place), x.stored_shape)
        for x in layouts.values()
        if x.layers is not None
        for place in np.ndindex(x.stack_shape)
    ]
    by_layer = sorted(stacked, key=operator.itemgetter(0))
    first = single.pop("embedding")
    return list(
        {
            first.tensor.name: first.stored_shape,
            **{name: shape for _, name, shape in by_layer},
            **{x.tensor.name: x.stored_shape for x in single.values()},
        }.items()
    )
