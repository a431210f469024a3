"""Adapters of LoRA: merged into the weights, or written as a directory that `peft` opens.

adapter_config.json        rank, alpha, the projections ("target_modules"), those of experts ("target_parameters"), and
                           the modules that are trained themselves ("modules_to_save"), such as embeddings and norms
adapter_model.safetensors  lora_A [rank, in] and lora_B [out, rank] of each projection, and the trained modules, float32
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import jax
import numpy as np

from jaxlc.config import Config
from jaxlc.config.kinds import projection_paths
from jaxlc.config.kinds.experts import EXPERT_PROJECTIONS
from jaxlc.config.models.families import Family
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.hf.files import TensorWriter
from jaxlc.hf.load import Layout, layouts_of, paths_of
from jaxlc.models import decoder, lora
from jaxlc.models.lora import LORA, frozen_names

# The parameters of the module of experts in transformers 5, in the order in which peft wraps the module, and the
# projections that are their columns.
_EXPERTS = "mlp.experts"
_EXPERT_PARAMS = {"gate_up_proj": ("expert_gate", "expert_up"), "down_proj": ("expert_down",)}
_WITHOUT_OUT_PROJ = ("falcon_h1", "nemotron_h")  # kernels read the weights of the module
_CONFIG_FILE, WEIGHTS_FILE, _PREFIX = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "base_model.model.",
)


class Params(Protocol):
    """Parameters, adapters included, without vocabulary padding:
    `jaxlc.checkpoints.restore.StoredParams`.
    """

    abstract: Mapping[str, jax.ShapeDtypeStruct]  # by path

    def read(self, paths: Iterable[str]) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True, kw_only=True)
class StackedAdapter:
    """The adapters of one projection in all layers of a stack, float32."""

    a: np.ndarray  # [layers, inputs, rank]; there may be several dimensions of inputs and outputs
    b: np.ndarray  # [layers, rank, outputs]
    scale: float
    # a [layers, experts, inputs, rank] and b [layers, experts, rank, outputs]
    per_expert: bool = False

    def merged(self, weight: np.ndarray, place: tuple[int, ...]) -> np.ndarray:
        """The weight at a place in `Layout.stack_shape`, of a layer or of one of its experts, plus
        its adapter, float32."""
        a, b = self.a[place], self.b[place]
        product = np.matmul(a, b) if self.per_expert else np.tensordot(a, b, axes=1)
        return weight.astype(np.float32) + self.scale * product


def read_adapter(config: Config, params: Params, path: str) -> StackedAdapter | None:
    """The adapters of the weight with this path; None if it has none."""
    projection = next(
        (name for name in projection_paths() if path.endswith(_endings([name]))), None
    )
    adapter = f"{path.rpartition('/')[0]}/{LORA}/{projection}"
    if f"{adapter}/a" not in params.abstract:
        return None
    arrays = params.read([f"{adapter}/a", f"{adapter}/b"])
    return StackedAdapter(
        a=arrays[f"{adapter}/a"],
        b=arrays[f"{adapter}/b"],
        scale=config.lora.scale,
        per_expert=projection in EXPERT_PROJECTIONS,
    )


def write_adapters(
    config: Config,
    family: Family,
    params: Params,
    target: Path,
    *,
    base: str = "",
    prefix: str = "",
) -> None:
    """Writes the two files.

    Args:
      base: the directory or hub id of the base model, or "".
      prefix: of the modules of a language model in a model with images; see `Family.with_prefix`.
    Raises:
      UserError: the run has no adapters.
      Unsupported: `peft` has no equivalent of the trained parameters.
    """
    if not config.lora.rank:
        raise UserError(
            "the run has no adapters (config.lora.rank is 0): export it without --adapters"
        )
    model = config.model
    abstract = dict(paths_of(decoder.abstract_params(model, model.vocab_size)))
    layouts = layouts_of(family, abstract, dict(paths_of(decoder.dims_of(model))), model)
    layouts = {path: _named_as_module(layout, family, prefix) for path, layout in layouts.items()}
    trained = _trained_layouts(config, layouts)
    if model.tie_embeddings and "embedding" in trained:
        raise Unsupported(
            "unsupported: adapters for peft with a trained embedding that is also the output head"
            " (model.tie_embeddings); export without --adapters"
        )
    modules, experts = _stored_modules(config, layouts), _stored_experts(config, layouts)
    names = {_module(parts[0]) for parts in modules.values()}
    if family.model_type in _WITHOUT_OUT_PROJ and "out_proj" in names:
        raise Unsupported(
            f"unsupported: adapters for peft of 'attention_projected' in models of type {family.model_type}, whose"
            " modules out_proj peft 0.21 refuses; export without --adapters"
        )
    # peft 0.21 replaces the target modules gate_proj, up_proj and down_proj by the parameters of
    # experts.
    dense = [paths for paths in modules if model.experts.num_experts and "/mlp/" in paths[0]]
    tensors = dict(_tensors(config, params, modules, trained)) | dict(
        _expert_tensors(config, params, experts)
    )
    shapes = [(name, array.shape) for name, array in tensors.items()]
    num_bytes = sum(array.nbytes for array in tensors.values())
    with TensorWriter(
        target, shapes, dtype="F32", max_shard_bytes=num_bytes, single_file=WEIGHTS_FILE
    ) as files:
        for name, array in tensors.items():
            files.write(name, array)
    targets = sorted({_module(parts[0]) for paths, parts in modules.items() if paths not in dense})
    # the other parts of a model with images may have modules of these names
    regex = rf"{re.escape(prefix)}.*\.({'|'.join(targets)})" if targets and prefix else ""
    content = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base or None,
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        use_rslora=config.lora.rslora,
        target_modules=regex or targets,
        target_parameters=sorted(
            {f"{_EXPERTS}.{name}" for _, name in experts}
            | {f"{_module(modules[paths][0])}.weight" for paths in dense}
        )
        or None,
        **_patterns(config, modules, experts),
        modules_to_save=sorted({_module(layout) for layout in trained.values()}) or None,
        bias="none",
        fan_in_fan_out=False,
        inference_mode=True,
        lora_dropout=0.0,
    )
    (target / _CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")


def _named_as_module(layout: Layout, family: Family, prefix: str) -> Layout:
    """`layout` with the name of the tensor in transformers 5: released files of MiniMax-M2 have
    another one for routers, and its alias is that of transformers.
    """
    tensor = layout.tensor
    name = (tensor.alias or tensor).name
    return replace(layout, tensor=replace(tensor, name=family.with_prefix(name, prefix)))


def _trained_layouts(config: Config, layouts: dict[str, Layout]) -> dict[str, Layout]:
    """The layouts of the trained parameters that are not adapters."""
    dims = decoder.dims_of(config.model, config.lora)
    trainable, _ = lora.split(dims, frozen_names(config, lora.names_of(dims)))
    trained = {path: layouts[path] for path, _ in paths_of(trainable) if path in layouts}
    experts = next((path for path in trained if path.endswith(_endings(EXPERT_PROJECTIONS))), None)
    if experts is not None:
        raise Unsupported(
            f"unsupported: adapters for peft with trained {experts}; export without --adapters"
        )
    part = next((path for path, layout in trained.items() if layout.num_rows), None)
    if part is not None:
        raise Unsupported(
            f"unsupported: adapters for peft with trained {part}, which is a part of the tensor"
            f" {layouts[part].tensor.name}; export without --adapters"
        )
    return trained


def _stored_modules(
    config: Config, layouts: dict[str, Layout]
) -> dict[tuple[str, ...], list[Layout]]:
    """The layouts of the projections with adapters by the paths of the parameters that are one
    module of the model.

    Queries, keys and values of linear attention may be one module, whose adapter is that of all
    three.
    """
    names = (name for name in config.lora.projections if name not in EXPERT_PROJECTIONS)
    with_adapters = _endings(names)
    paths_of_tensor: dict[str, list[str]] = {}
    for path, layout in layouts.items():
        if path.endswith(with_adapters):
            paths_of_tensor.setdefault(layout.names[0], []).append(path)
    return {tuple(paths): [layouts[path] for path in paths] for paths in paths_of_tensor.values()}


def _stored_experts(
    config: Config, layouts: dict[str, Layout]
) -> dict[tuple[str, str], dict[str, Layout]]:
    """The layouts of gate and up, and of down, in the stacks of layers in which one of them has
    adapters, by path.

    Keys are the stack and the name of the parameter of transformers, which has the weights of all
    experts.

    Raises:
      Unsupported: the experts have another name, as in Granite 4 and Nemotron 3.
    """
    found: dict[tuple[str, str], dict[str, Layout]] = {}
    for param, projections in _EXPERT_PARAMS.items():
        names = _endings(projections)
        for path, layout in layouts.items():
            if path.endswith(names) and set(projections) & set(config.lora.projections):
                if f"{_EXPERTS}." not in layout.tensor.name:
                    raise Unsupported(
                        f"unsupported: adapters for peft of {layout.tensor.name}; export without --adapters"
                    )
                found.setdefault((path.rpartition("/")[0], param), {})[path] = layout
    return found


def _patterns(
    config: Config,
    modules: dict[tuple[str, ...], list[Layout]],
    experts: dict[tuple[str, str], dict[str, Layout]],
) -> dict[str, dict[str, float]]:
    """The rank and alpha of modules with the adapters of several projections, with the same scale
    as the others.
    """
    joined = {_module(parts[0]): len(parts) for parts in modules.values() if len(parts) > 1}
    for param in {param for _, param in experts}:
        num_adapters = len(set(_EXPERT_PARAMS[param]) & set(config.lora.projections))
        joined |= (
            {rf"{_EXPERTS}.{param}".replace(".", r"\."): num_adapters} if num_adapters > 1 else {}
        )
    alpha = {
        name: config.lora.alpha * (num**0.5 if config.lora.rslora else num)
        for name, num in joined.items()
    }
    return dict(
        rank_pattern={name: num * config.lora.rank for name, num in joined.items()},
        alpha_pattern=alpha,
    )


def _tensors(
    config: Config,
    params: Params,
    modules: dict[tuple[str, ...], list[Layout]],
    trained: dict[str, Layout],
) -> Iterator[tuple[str, np.ndarray]]:
    """The name and content of each tensor."""
    rank = config.lora.rank
    for paths, parts in modules.items():
        adapters = [read_adapter(config, params, path) for path in paths]
        for layer, name in enumerate(parts[0].names):
            pairs = [
                (x.a[layer].reshape(-1, rank), x.b[layer].reshape(rank, -1))
                for x in adapters
                if x is not None
            ]
            lora_b = np.zeros(
                (parts[0].num_rows or pairs[0][1].shape[1], rank * len(pairs)), np.float32
            )
            # each its own rows and ranks
            for i, (part, (_, b)) in enumerate(zip(parts, pairs, strict=True)):
                rows = np.r_[*part.stored_rows(slice(0, b.shape[1]))]
                lora_b[rows, i * rank : (i + 1) * rank] = b.T
            module = _PREFIX + name.removesuffix(".weight")
            yield f"{module}.lora_A.weight", np.concatenate([a for a, _ in pairs], axis=1).T
            yield f"{module}.lora_B.weight", lora_b
    for path, array in params.read(trained).items() if trained else ():
        arrays = [array] if trained[path].layers is None else array
        for name, layer_array in zip(trained[path].names, arrays, strict=True):
            yield _PREFIX + name, trained[path].to_stored(layer_array)


def _expert_tensors(
    config: Config, params: Params, experts: dict[tuple[str, str], dict[str, Layout]]
) -> Iterator[tuple[str, np.ndarray]]:
    """The name and content of each tensor of adapters of experts.

    lora_A [experts rank, in] has the ranks of one expert after the other, and lora_B [out, rank
    experts] those of all experts in turn. The module of a parameter contains that of the one before
    it, as "base_layer".
    """
    for (stack, param), parts in experts.items():
        adapters = {path: read_adapter(config, params, path) for path in parts}
        pairs = {path: (x.a, x.b) for path, x in adapters.items() if x is not None}
        joined = len([other for other in experts if other[0] == stack])
        is_inner = joined > 1 and param != [*_EXPERT_PARAMS][-1]
        for number, layer in enumerate(_layers_of(parts)):
            a_EIr = np.concatenate([a[number] for a, _ in pairs.values()], axis=2)
            b_ErO = _joined_outputs({path: b[number] for path, (_, b) in pairs.items()}, parts)
            num_experts, num_inputs, rank = a_EIr.shape
            stem = next(iter(parts.values())).tensor.name.partition("{layer}")[0]
            module = f"{_PREFIX}{stem}{layer}.{_EXPERTS}{'.base_layer' if is_inner else ''}"
            yield (
                f"{module}.lora_A.weight",
                a_EIr.swapaxes(1, 2).reshape(num_experts * rank, num_inputs),
            )
            yield (
                f"{module}.lora_B.weight",
                b_ErO.transpose(2, 1, 0).reshape(-1, rank * num_experts),
            )


def _endings(projections: Iterable[str]) -> tuple[str, ...]:
    """The ends of the paths of the weights of these projections."""
    paths = projection_paths()
    return tuple(f"/{path}" for name in projections for path in paths[name])


def _layers_of(parts: dict[str, Layout]) -> Sequence[int]:
    layers = next(iter(parts.values())).layers
    assert layers is not None
    return layers


def _joined_outputs(b_of: dict[str, np.ndarray], parts: dict[str, Layout]) -> np.ndarray:
    """[experts, ranks, outputs] of one layer: each adapter has its own ranks, and its own outputs
    among those of all parts."""
    rank = next(iter(b_of.values())).shape[1]
    widths = [layout.shape[-1] for layout in parts.values()]
    starts = dict(zip(parts, np.cumsum([0, *widths])))
    joined = np.zeros((len(next(iter(b_of.values()))), rank * len(b_of), sum(widths)), np.float32)
    for i, (path, b_ErF) in enumerate(b_of.items()):
        first, layout = starts[path], parts[path]
        columns = slice(first, first + b_ErF.shape[2])
        if layout.tensor.interleaved is not None:
            columns = slice(layout.tensor.interleaved, None, 2)
        joined[:, i * rank : (i + 1) * rank, columns] = b_ErF
    return joined


def _module(layout: Layout) -> str:
    """The end of the name of a module that selects it in all layers: "q_proj", "input_layernorm" or
    "model.norm".
    """
    *parents, module, parameter = layout.tensor.name.split(".")
    if parameter != "weight":
        raise Unsupported(
            f"unsupported: adapters for peft with trained {parameter}; export without --adapters"
        )
    if layout.layers is None:
        return ".".join([*parents, module])
    # other modules end with "norm", too
    return f"{parents[-1]}.{module}" if module == "norm" else module
