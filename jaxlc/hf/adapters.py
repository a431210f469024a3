"""Adapters of LoRA: merged into the weights, or written as a directory that `peft` opens.

adapter_config.json        rank, alpha, the projections ("target_modules"), and the modules that are trained themselves
                           ("modules_to_save"), such as embeddings and norms
adapter_model.safetensors  lora_A [rank, in] and lora_B [out, rank] of each projection, and the trained modules, float32
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import jax
import numpy as np

from jaxlc.config import Config
from jaxlc.config.models.families import Family
from jaxlc.config.trained_params import PROJECTION_PARAMS
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.hf.load import layouts_of, paths_of
from jaxlc.hf.tensor_slices import Layout
from jaxlc.hf.write import TensorWriter
from jaxlc.models import decoder, freezing
from jaxlc.models.frozen_names import frozen_names
from jaxlc.models.lora import LORA

_CONFIG_FILE, _WEIGHTS_FILE, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."


class Params(Protocol):
    """Parameters, adapters included, without vocabulary padding: `jaxlc.checkpoints.stored_params.StoredParams`."""

    abstract: Mapping[str, jax.ShapeDtypeStruct]  # by path

    def read(self, paths: Iterable[str]) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True, kw_only=True)
class StackedAdapter:
    """The adapters of one projection in all layers of a stack, float32."""

    a: np.ndarray  # [layers, inputs, rank]; there may be several dimensions of inputs and outputs
    b: np.ndarray  # [layers, rank, outputs]
    scale: float

    def merged(self, weight: np.ndarray, layer: int) -> np.ndarray:
        """The weight of a layer plus its adapter, float32."""
        return weight.astype(np.float32) + self.scale * np.tensordot(self.a[layer], self.b[layer], axes=1)


def read_adapter(config: Config, params: Params, path: str) -> StackedAdapter | None:
    """The adapters of the weight with this path; None if it has none."""
    projection = next((name for name, param in PROJECTION_PARAMS.items() if path.endswith(f"/{param}")), None)
    adapter = f"{path.rpartition('/')[0]}/{LORA}/{projection}"
    if f"{adapter}/a" not in params.abstract:
        return None
    arrays = params.read([f"{adapter}/a", f"{adapter}/b"])
    return StackedAdapter(a=arrays[f"{adapter}/a"], b=arrays[f"{adapter}/b"], scale=config.lora.scale)


def write_adapters(config: Config, family: Family, params: Params, target: Path) -> None:
    """Writes the two files.

    Raises:
      UserError: the run has no adapters.
      Unsupported: `peft` has no equivalent of the trained parameters.
    """
    if not config.lora.rank:
        raise UserError("the run has no adapters (config.lora.rank is 0): export it without --adapters")
    model = config.model
    abstract = dict(paths_of(decoder.abstract_params(model, model.vocab_size)))
    layouts = layouts_of(family, abstract, dict(paths_of(decoder.dims_of(model))), model)
    trained = _trained_layouts(config, layouts)
    if model.tie_embeddings and "embedding" in trained:
        raise Unsupported(
            "unsupported: adapters for peft with a trained embedding that is also the output head"
            " (model.tie_embeddings); export without --adapters"
        )
    modules = _stored_modules(config, layouts)
    tensors = dict(_tensors(config, params, modules, trained))
    shapes = [(name, array.shape) for name, array in tensors.items()]
    num_bytes = sum(array.nbytes for array in tensors.values())
    with TensorWriter(target, shapes, dtype="F32", max_shard_bytes=num_bytes, single_file=_WEIGHTS_FILE) as files:
        for name, array in tensors.items():
            files.write(name, array)
    content = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.model.init_from or None,
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        use_rslora=config.lora.rslora,
        target_modules=sorted({_module(parts[0]) for parts in modules.values()}),
        **_patterns(config, modules),
        modules_to_save=sorted({_module(layout) for layout in trained.values()}) or None,
        bias="none",
        fan_in_fan_out=False,
        inference_mode=True,
        lora_dropout=0.0,
    )
    (target / _CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")


def _trained_layouts(config: Config, layouts: dict[str, Layout]) -> dict[str, Layout]:
    """The layouts of the trained parameters that are not adapters."""
    dims = decoder.dims_of(config.model, config.lora)
    trainable, _ = freezing.split(dims, frozen_names(config, freezing.names_of(dims)))
    trained = {path: layouts[path] for path, _ in paths_of(trainable) if path in layouts}
    part = next((path for path, layout in trained.items() if layout.num_rows), None)
    if part is not None:
        raise Unsupported(
            f"unsupported: adapters for peft with trained {part}, which is a part of the tensor"
            f" {layouts[part].tensor.name}; export without --adapters"
        )
    return trained


def _stored_modules(config: Config, layouts: dict[str, Layout]) -> dict[tuple[str, ...], list[Layout]]:
    """The layouts of the projections with adapters by the paths of the parameters that are one module of the model.

    Queries, keys and values of Gated DeltaNet may be one module, whose adapter is that of all three.
    """
    with_adapters = tuple(f"/{PROJECTION_PARAMS[name]}" for name in config.lora.projections)
    paths_of_tensor: dict[str, list[str]] = {}
    for path, layout in layouts.items():
        if path.endswith(with_adapters):
            paths_of_tensor.setdefault(layout.names[0], []).append(path)
    return {tuple(paths): [layouts[path] for path in paths] for paths in paths_of_tensor.values()}


def _patterns(config: Config, modules: dict[tuple[str, ...], list[Layout]]) -> dict[str, dict[str, float]]:
    """The rank and alpha of modules with the adapters of several projections, with the same scale as the others."""
    joined = {_module(parts[0]): len(parts) for parts in modules.values() if len(parts) > 1}
    alpha = {name: config.lora.alpha * (num**0.5 if config.lora.rslora else num) for name, num in joined.items()}
    return dict(rank_pattern={name: num * config.lora.rank for name, num in joined.items()}, alpha_pattern=alpha)


def _tensors(
    config: Config, params: Params, modules: dict[tuple[str, ...], list[Layout]], trained: dict[str, Layout]
) -> Iterator[tuple[str, np.ndarray]]:
    """The name and content of each tensor."""
    rank = config.lora.rank
    for paths, parts in modules.items():
        adapters = [read_adapter(config, params, path) for path in paths]
        for layer, name in enumerate(parts[0].names):
            pairs = [(x.a[layer].reshape(-1, rank), x.b[layer].reshape(rank, -1)) for x in adapters if x is not None]
            lora_b = np.zeros((parts[0].num_rows or pairs[0][1].shape[1], rank * len(pairs)), np.float32)
            for i, (part, (_, b)) in enumerate(zip(parts, pairs, strict=True)):  # each its own rows and ranks
                lora_b[part.first_row : part.first_row + b.shape[1], i * rank : (i + 1) * rank] = b.T
            module = _PREFIX + name.removesuffix(".weight")
            yield f"{module}.lora_A.weight", np.concatenate([a for a, _ in pairs], axis=1).T
            yield f"{module}.lora_B.weight", lora_b
    for path, array in params.read(trained).items() if trained else ():
        arrays = [array] if trained[path].layers is None else array
        for name, layer_array in zip(trained[path].names, arrays, strict=True):
            yield _PREFIX + name, trained[path].to_stored(layer_array)


def _module(layout: Layout) -> str:
    """The end of the name of a module that selects it in all layers: "q_proj", "input_layernorm" or "model.norm"."""
    *parents, module, parameter = layout.tensor.name.split(".")
    if parameter != "weight":
        raise Unsupported(f"unsupported: adapters for peft with trained {parameter}; export without --adapters")
    if layout.layers is None:
        return ".".join([*parents, module])
    return f"{parents[-1]}.{module}" if module == "norm" else module  # other modules end with "norm", too
