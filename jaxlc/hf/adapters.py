"""Adapters of LoRA: merged into the weights, or written as and read from a directory of `peft`.

adapter_config.json        rank, alpha, the projections ("target_modules"), those of experts ("target_parameters"), and
                           the modules that are trained themselves ("modules_to_save"), such as embeddings and norms
adapter_model.safetensors  lora_A [rank, in] and lora_B [out, rank] of each projection, and the trained modules, float32
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import jax
import numpy as np
from safetensors.numpy import save

from jaxlc.config import Config, ModelConfig
from jaxlc.config.kinds import projection_paths
from jaxlc.config.kinds.experts import EXPERT_PROJECTIONS
from jaxlc.config.models.config_json import family_of, typed_fields
from jaxlc.config.models.families import Family
from jaxlc.config.models.families.family import ReadFields
from jaxlc.config.models.pretrained import locate, read_json
from jaxlc.config.values import as_argument
from jaxlc.core import Unsupported, UserError, raise_all
from jaxlc.core.files import ADAPTER_FILE, Arrays, local_path, write_json
from jaxlc.hf.files import TensorFiles
from jaxlc.hf.load import Layout, Layouts, language_model_tensors, layouts_of, paths_of
from jaxlc.models import decoder, lora
from jaxlc.models.lora import LORA, frozen_names

# The module of experts in transformers 5, and the last of its parameters for which peft wraps it.
_EXPERTS, _LAST_PARAM = "mlp.experts", "down_proj"
# Families -> modules that cannot have adapters of peft, and why.
_OUT_PROJ = "out_proj", "peft 0.21 refuses"  # kernels read the weights of the module
_REFUSED_MODULES = dict(
    falcon_h1=_OUT_PROJ,
    nemotron_h=_OUT_PROJ,
    afmoe=("gate_proj", "are gates of attention and of feed-forward blocks"),
)
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Fields of adapter_config.json with which adapters compute something else, or have other tensors.
_UNSUPPORTED = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "modules_to_save"),
    *("trainable_token_indices", "layer_replication", "alora_invocation_tokens", "arrow_config"),
    *("kasa_config", "velora_config", "monteclora_config"),
)
# Of init_lora_weights. Others, such as pissa, change the weights of the base.
_SUPPORTED_INIT = (True, False, None, "gaussian", "orthogonal", "eva")
_MAX_NAMES = 3  # of tensors in an error


class Params(Protocol):
    """Parameters, adapters included, without vocabulary padding:
    `jaxlc.checkpoints.restore.StoredParams`.
    """

    abstract: Mapping[str, jax.ShapeDtypeStruct]  # by path

    def read(self, paths: Iterable[str]) -> Arrays: ...


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
        a = self.a[place]
        b = self.b[place]
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
    has_images: bool = False,
) -> None:
    """Writes the two files.

    Args:
      base: the directory or hub id of the base model, or "".
      has_images: whether the base is the language model in a model with images.
    Raises:
      UserError: the run has no adapters.
      Unsupported: `peft` has no equivalent of the trained parameters.
    """
    if not config.lora.rank:
        raise UserError(
            "the run has no adapters (config.lora.rank is 0): export it without --adapters"
        )
    model = config.model
    prefix = [*family.multimodal_prefixes][-1] if has_images else ""
    layouts = _layouts(model, family, prefix)
    trained = _trained_layouts(config, layouts)
    if model.tie_embeddings and "embedding" in trained:
        raise Unsupported(
            "unsupported: adapters for peft with a trained embedding that is also the output head"
            " (model.tie_embeddings); export without --adapters"
        )
    modules = _modules(config.lora.projections, layouts)
    refused, reason = _REFUSED_MODULES.get(family.model_type, ("", ""))
    paths = [path for module in modules if module.end == refused for path in module.columns]
    if names := [x for x in config.lora.projections for y in paths if y.endswith(_endings([x]))]:
        raise Unsupported(
            f"unsupported: adapters for peft of {', '.join(dict.fromkeys(names))} in models of type"
            f" {family.model_type}, whose modules {refused} {reason}; export without --adapters"
        )
    targets = set[str]()
    parameters = set[str]()
    for module in modules:
        if module.is_expert:
            parameters.add(module.end)
        elif model.experts.num_experts and "/mlp/" in next(iter(module.columns)):
            # peft 0.21 replaces the target modules gate_proj, up_proj and down_proj by the
            # parameters of experts.
            parameters.add(f"{module.end}.weight")
        else:
            targets.add(module.end)
    tensors = {
        name: np.ascontiguousarray(array, np.float32)
        for name, array in _tensors(config, params, modules, trained)
    }
    # not save_file, whose error for a full disk is no OSError
    (target / WEIGHTS_FILE).write_bytes(save(tensors))
    # the other parts of a model with images may have modules of these names
    ends = sorted(targets)
    regex = rf"{re.escape(prefix)}.*\.({'|'.join(ends)})" if targets and prefix else ""
    content = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base or None,
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        use_rslora=config.lora.rslora,
        target_modules=regex or ends,
        target_parameters=sorted(parameters) or None,
        **_patterns(config, modules),
        modules_to_save=sorted({_module(layout) for layout in trained.values()}) or None,
        bias="none",
        fan_in_fan_out=False,
        inference_mode=True,
        lora_dropout=0.0,
    )
    write_json(target / ADAPTER_FILE, content)


def read_adapters(config: Config, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
    """The adapters in config.lora.init_from by path, float32: the inverse of `write_adapters`.

    `peft` gives a module of several projections one adapter of the usual rank: lora_A is that of
    each projection, and lora_B has the rows of all of them.

    Args:
      abstract: shapes of the adapters of the config by path.
    Raises:
      UserError: as `adapter_settings`; or the settings, names or shapes differ from the config.
      Unsupported: as `adapter_settings`; or modules have ranks of their own.
    """
    own = config.lora
    content, files, layouts = _opened(config)
    settings = adapter_settings(config)
    if _tensors_of(own.projections, layouts) == _tensors_of(settings["projections"], layouts):
        settings["projections"] = own.projections
    raise_all(
        f"config.lora.{name}={as_argument(vars(own)[name])} contradicts {own.init_from}: use"
        f" --config.lora.{name}={as_argument(value)}"
        for name, value in settings.items()
        if vars(own)[name] != value
    )
    modules = _modules(own.projections, layouts)
    for name, pattern in _patterns(config, modules).items():
        if content.get(name, {}) not in ({}, pattern):
            raise _unsupported(config, f"{name}={content[name]}")
    # The entries of parameters are places in `values` from 1 on: the tensors to write have the
    # place of each entry of a file, and 0 for those that are always 0.
    ends = np.cumsum([1, *(x.size for x in abstract.values())])
    places = {
        path: end + np.arange(x.size).reshape(x.shape)
        for (path, x), end in zip(abstract.items(), ends)
    }
    params = SimpleNamespace(
        abstract=abstract, read=lambda paths: {path: places[path] for path in paths}
    )
    values = np.zeros(ends[-1], np.float32)
    tensors = _tensors(config, params, modules, {})
    table = {name.removeprefix(_PREFIX): where for name, where in tensors}
    problems = [f"{name} has no projection" for name in files.tensors.keys() - table.keys()]
    for name, where in table.items():
        is_a = "lora_A" in name
        stored = files.read(name) if name in files.tensors else np.empty((0, 0))
        stored, where = (stored, where) if is_a else (stored.T, where.T)
        num_experts = config.model.experts.num_experts if f".{_EXPERTS}." in name else 1
        blocks = num_experts if is_a else 1
        is_rank = len(stored) in (own.rank * num_experts, len(where))
        if not is_rank or stored.shape[1] != where.shape[1]:
            problems.append(f"{name} is missing or has another shape, {list(stored.shape)}")
            continue
        # [blocks, parts of the module, ranks, inputs or outputs]
        where = where.reshape(blocks, -1, len(stored) // blocks, where.shape[1])
        entries = stored.reshape(blocks, 1, *where.shape[2:])
        values[where] = entries
        if entries[~where.any(1, keepdims=True)].any():
            problems.append(f"{name} has rows of other projections")
    if problems:
        raise UserError(
            f"{own.init_from} is not of this model and config.lora ({'; '.join(problems[:_MAX_NAMES])}): use the base"
            f" of the adapters, config.model.init_from={content.get('base_model_name_or_path')}"
        )
    return {path: values[place] for path, place in places.items()}


def adapter_settings(config: Config) -> dict[str, Any]:
    """The settings of the section lora that the adapters in config.lora.init_from have.

    Raises:
      UserError: the directory has no adapters of `peft`, or they cannot be read.
      Unsupported: they compute something else than LoRA.
    """
    content, files, layouts = _opened(config)
    targets = tuple(f".{x}" for x in content.get("target_parameters") or ())
    stored = {name.replace("lora_A.", "") for name in files.tensors}
    stored |= {name for name in _tensors_of(EXPERT_PROJECTIONS, layouts) if name.endswith(targets)}
    found = (x for x in projection_paths() if set() < _tensors_of([x], layouts) <= stored)
    return dict(
        rank=content["r"],
        alpha=float(content["lora_alpha"]),
        rslora=bool(content.get("use_rslora")),
        projections=tuple(found),
    )


def base_note(config: Config) -> str:
    """Text if the adapters in config.lora.init_from name another base than config.model.init_from.

    Shapes cannot tell, for instance, a model from its chat version. Directories may have moved, so
    only the last parts of names are compared.
    """
    content = read_json(
        local_path(config.lora.init_from) / ADAPTER_FILE, "use a different lora.init_from"
    )
    base = content.get("base_model_name_or_path")
    model = config.model.init_from
    if not base or Path(base).name == Path(model).name:
        return ""
    return f", which were trained on {base}: check that its weights are those of {model}"


def _tensors_of(projections: Sequence[str], layouts: Layouts) -> set[str]:
    """The names of the tensors of these projections in the first layers that have them."""
    ends = _endings(projections)
    return {layout.names[0] for path, layout in layouts.items() if path.endswith(ends)}


def _opened(config: Config) -> tuple[dict[str, Any], TensorFiles, Layouts]:
    """The content of the two files in config.lora.init_from, whose tensors get the names of a
    language model without images, and the layouts of the parameters.
    """
    directory = local_path(config.lora.init_from)
    base = locate(config.model.init_from)
    path = directory / ADAPTER_FILE
    content = ReadFields(
        str(path), typed_fields(read_json(path, "use a different lora.init_from"), str(path))
    )
    supported = dict(peft_type=("LORA",), bias=("none",), init_lora_weights=_SUPPORTED_INIT)
    supported |= dict.fromkeys(_UNSUPPORTED, (None, False, [], {}))
    for name, values in supported.items():
        if content.get(name, values[0]) not in values:
            raise _unsupported(config, f"{name}={content[name]!r}")
    files = TensorFiles(directory, WEIGHTS_FILE)
    family = family_of(None if base.is_run else base.config_json(), config.model)
    tensors = {name.removeprefix(_PREFIX): x for name, x in files.tensors.items()}
    files.tensors = language_model_tensors(tensors, family, config.model)
    return content, files, _layouts(config.model, family)


def _unsupported(config: Config, what: str) -> Unsupported:
    return Unsupported(
        f"unsupported: config.lora.init_from={config.lora.init_from} has {what}; merge it with merge_and_unload of"
        " peft, and use the result as config.model.init_from"
    )


def _layouts(model: ModelConfig, family: Family, prefix: str = "") -> Layouts:
    """The layouts of all parameters but adapters, with the tensors of transformers 5."""

    def choose(own: Layout, alias: Layout) -> Layout:
        # Aliases are what transformers saves, but for files with a tensor for each expert.
        return own if "{expert}" in alias.tensor.name else alias

    named = {}
    for path, layout in layouts_of(family, model, choose).items():
        tensor = layout.tensor._replace(name=family.with_prefix(layout.tensor.name, prefix))
        named[path] = replace(layout, tensor=tensor)
    return named


def _trained_layouts(config: Config, layouts: Layouts) -> Layouts:
    """The layouts of the trained parameters that are not adapters."""
    dims = decoder.dims_of(config.model, config.lora)
    trainable, _ = lora.split(dims, frozen_names(config, lora.names_of(dims)))
    trained = {path: layouts[path] for path, _ in paths_of(trainable) if path in layouts}
    for path, layout in trained.items():
        if path.endswith(_endings(EXPERT_PROJECTIONS)) or layout.num_rows:
            part = (
                f", which is a part of the tensor {layout.tensor.name}" if layout.num_rows else ""
            )
            raise Unsupported(
                f"unsupported: adapters for peft with trained {path}{part}; export without --adapters"
            )
    return trained


@dataclass(frozen=True, kw_only=True)
class _Module:
    """What `peft` gives one adapter: a module, or a parameter of transformers with the weights of
    all experts.

    Queries, keys and values of linear attention may be one module with one adapter.
    """

    end: str  # of its name, which selects it in all layers
    names: list[str]  # of the module with the adapter, by layer
    # Path of each projection with adapters -> its columns among the outputs of the module.
    columns: Arrays
    num_outputs: int
    is_expert: bool = False


def _modules(projections: Sequence[str], layouts: Layouts) -> list[_Module]:
    """The modules with adapters of these projections.

    Raises:
      Unsupported: experts have another name, as in Granite 4 and Nemotron 3.
    """
    parts_of = dict[str, Layouts]()  # by the tensor in the first layer, and path
    for path, layout in layouts.items():
        if path.endswith(_endings(projections)):
            parts_of.setdefault(layout.names[0], {})[path] = layout
    modules = []
    for tensor, parts in parts_of.items():
        path, first = next(iter(parts.items()))
        is_expert = path.endswith(_endings(EXPERT_PROJECTIONS))
        names = [name.removesuffix(".weight") for name in dict.fromkeys(first.names)]
        if is_expert:
            _, found, param = first.tensor.name.partition(f"{_EXPERTS}.")
            if not found:
                raise Unsupported(
                    f"unsupported: adapters for peft of {first.tensor.name}; export without --adapters"
                )
            # peft wraps the module of one parameter in the module of the next one.
            is_inner = param != _LAST_PARAM and tensor.replace(param, _LAST_PARAM) in parts_of
            end = f"{_EXPERTS}.{param}"
            inner = ".base_layer" if is_inner else ""
            names = [name.removesuffix(f".{param}") + inner for name in names]
        else:
            end = _module(first)
        by_columns = first.tensor.num_inputs is None
        modules.append(
            _Module(
                end=end,
                names=names,
                columns={path: _outputs(part) for path, part in parts.items()},
                num_outputs=first.stored_shape[-1 if by_columns else -2],
                is_expert=is_expert,
            )
        )
    return modules


def _outputs(part: Layout) -> np.ndarray:
    """Where the outputs of a projection are in its module, int [outputs]."""
    if part.tensor.num_inputs is None:
        return np.r_[part.stored_columns(slice(0, part.shape[-1]))]
    return np.r_[*part.stored_rows(slice(0, part.part_shape[0]))]


def _patterns(config: Config, modules: Sequence[_Module]) -> dict[str, dict[str, float]]:
    """The rank and alpha of modules with the adapters of several projections, with the same scale
    as the others.
    """
    own = config.lora
    joined = {re.escape(x.end): len(x.columns) for x in modules if len(x.columns) > 1}
    return dict(
        rank_pattern={end: num * own.rank for end, num in joined.items()},
        alpha_pattern={
            end: own.alpha * (num**0.5 if own.rslora else num) for end, num in joined.items()
        },
    )


def _tensors(
    config: Config, params: Params, modules: Sequence[_Module], trained: Layouts
) -> Iterator[tuple[str, np.ndarray]]:
    """The name and content of each tensor.

    Of experts, lora_A [experts rank, in] has the ranks of one expert after the other, and lora_B
    [out, rank experts] the ranks of all experts in turn. Each projection has its own ranks and outputs.
    """
    rank = config.lora.rank
    for module in modules:
        found = (read_adapter(config, params, path) for path in module.columns)
        adapters = [adapter for adapter in found if adapter is not None]
        num_experts = config.model.experts.num_experts if module.is_expert else 1
        for layer, name in enumerate(module.names):
            a_EIr = np.concatenate(
                [x.a[layer].reshape(num_experts, -1, rank) for x in adapters], axis=2
            )
            b_ErO = np.zeros((num_experts, a_EIr.shape[2], module.num_outputs), a_EIr.dtype)
            for i, (x, columns) in enumerate(zip(adapters, module.columns.values(), strict=True)):
                ranks = slice(i * rank, (i + 1) * rank)
                b_ErO[:, ranks, columns] = x.b[layer].reshape(num_experts, rank, -1)
            lora_a = a_EIr.swapaxes(1, 2).reshape(-1, a_EIr.shape[1])
            yield f"{_PREFIX}{name}.lora_A.weight", lora_a
            lora_b = b_ErO.transpose(2, 1, 0).reshape(module.num_outputs, -1)
            yield f"{_PREFIX}{name}.lora_B.weight", lora_b
    for path, array in params.read(trained).items() if trained else ():
        arrays = [array] if trained[path].layers is None else array
        for name, layer_array in zip(trained[path].names, arrays, strict=True):
            yield _PREFIX + name, trained[path].to_stored(layer_array)


def _endings(projections: Iterable[str]) -> tuple[str, ...]:
    """The ends of the paths of the weights of these projections."""
    paths = projection_paths()
    return tuple(f"/{path}" for name in projections for path in paths[name])


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
