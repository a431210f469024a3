"""Checks of the kinds of layers of a model, of LoRA and frozen parameters, and of config.precision.
Imports no jax.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxlc.config.flops import quantized_matrices
from jaxlc.config.frozen import SECTIONS, Config, to_dict
from jaxlc.config.kinds import (
    FEED_FORWARDS,
    blocks,
    blocks_of,
    mixers_by_layer_kind,
    projection_paths,
)
from jaxlc.config.kinds.contract import HasLimits, HasOwnSettings
from jaxlc.config.kinds.experts import EXPERT_PROJECTIONS
from jaxlc.config.models.model_schema import KindConfig, LayerConfig, ModelConfig
from jaxlc.config.schema import MATMUL_NAMES, LoraConfig, PrecisionConfig
from jaxlc.config.values import as_argument, defaults_of, flattened, invalid_value, range_problems


def layer_problems(config: Config) -> Iterator[str]:
    """Problems of model.layer_kinds and model.kinds, and contradictions with the settings that
    depend on it.
    """
    model = config.model
    names = list(dict.fromkeys((*mixers_by_layer_kind(), *(kind.name for kind in model.kinds))))
    unknown = [kind for kind in model.used_kinds if kind not in names]
    if unknown or not model.layer_kinds:
        name = unknown[0] if unknown else ""
        setting = (
            "model.layer_kinds"
            if not unknown or name in model.layer_kinds
            else "model.first_layer_kinds"
        )
        expected = f"one or more of {', '.join(names)}, separated by commas"
        if name:
            expected += f", or a new kind with its settings, such as --config.model.kinds.{name}.attention=full"
        yield invalid_value(setting, name, expected, names)
    for kind in model.kinds:
        yield from _kind_problems(model, kind)
    has_sliding = "sliding" in model.attentions
    if has_sliding and not model.attention.window:
        yield (
            "config.model.layer_kinds has sliding layers, which need a window: set config.model.attention.window, in"
            " tokens"
        )
    if model.attention.window and not has_sliding:
        yield (
            f"config.model.attention.window={model.attention.window} has no effect, since no kind in"
            " config.model.layer_kinds is sliding; use --config.model.layer_kinds=sliding, or sliding,full for"
            " alternating layers"
        )
    num_named = len(model.first_layer_kinds) + len(model.layer_kinds)
    first = ""
    if num_named > model.num_layers:
        if model.first_layer_kinds:
            first = "first_layer_kinds and config.model."
        yield (
            f"config.model.{first}layer_kinds names {num_named} layers and config.model.num_layers is"
            f" {model.num_layers}; use --config.model.num_layers={num_named} or more, or fewer kinds"
        )
    # The remat groups of other segments than the longest that repeats are as large as they can be.
    segment = model.repeated
    group = config.memory.layers_per_remat_group
    period = len(segment.kinds)
    num_layers = segment.num_layers
    setting = f"config.memory.layers_per_remat_group={group}"
    if group > 1 and group % period:
        yield (
            f"{setting} is not a multiple of the {period} layers that repeat in config.model.layer_kinds; use 1 or"
            f" {period}"
        )
    if num_layers % group:
        layers = f"config.model.num_layers={num_layers}"
        if num_layers != model.num_layers:
            layers = f"the {num_layers} layers in whole groups of config.model.layer_kinds"
        yield f"{setting} does not divide {layers}; use a divisor"


def layers_by_path(model: ModelConfig) -> list[tuple[str, LayerConfig]]:
    """The layers of different sizes, with the path of their settings: model, or model.kinds.NAME."""
    own = {kind.name for kind in model.kinds}
    paths = {kind: f"model.kinds.{kind}" if kind in own else "model" for kind in model.used_kinds}
    return list(dict.fromkeys((path, model.layer_config(kind)) for kind, path in paths.items()))


def size_problems(config: Config) -> Iterator[str]:
    """Settings of kinds of blocks that are missing, or contradict each other."""
    for path, layer in layers_by_path(config.model):
        for block in blocks_of(layer):
            yield from block.size_problems(layer, path)


def unused_problems(config: Config) -> Iterator[str]:
    """Settings of kinds of blocks that no layer has."""
    model = config.model
    layers = [model.layer_config(kind) for kind in model.used_kinds]
    values = flattened(to_dict(config))
    defaults = flattened({section: defaults_of(part) for section, part in SECTIONS.items()})
    for block in blocks():
        if any(block in blocks_of(layer) for layer in layers):
            continue
        for setting in block.only_with if isinstance(block, HasOwnSettings) else ():
            value = values[setting]
            default = defaults[setting]
            if value != default:
                is_of_model = setting.startswith("model.")
                reason = f"has no effect, since the model has no {block.layers}"
                advice = (
                    "" if is_of_model else f", as with --config.{setting}={as_argument(default)}"
                )
                yield f"config.{setting}={value!r} {reason}; remove it{advice}"


def unsupported_problems(config: Config) -> Iterator[str]:
    """Settings of other sections that the layers do not support, and names of activations that they
    do not have.
    """
    layers = [layer for _, layer in layers_by_path(config.model)]
    for block in blocks():
        first = next((layer for layer in layers if block in blocks_of(layer)), None)
        if first is not None and isinstance(block, HasLimits):
            yield from block.unsupported(first, config)
    bytes_by_name = [
        block.saved_bytes(layer, config, 2) for layer in layers for block in blocks_of(layer)
    ]
    known = {name for kind in FEED_FORWARDS.values() for name in kind.saved}
    lacking = known.difference(*bytes_by_name)
    for setting in ("save", "offload"):
        names = vars(config.memory)[setting]
        if unknown := [name for name in names if name in lacking]:
            yield (
                f"config.memory.{setting} names {', '.join(unknown)}, which no layer has; use"
                f" --config.memory.{setting}={','.join(name for name in names if name not in unknown)}"
            )


def projection_problems(
    config: Config, setting: str, names: Sequence[str], known: Sequence[str]
) -> Iterator[str]:
    """Names of projections that do not exist, or that no layer has.

    Args:
      known: the names that the setting may have.
    """
    found = [
        name
        for _, layer in layers_by_path(config.model)
        for block in blocks_of(layer)
        for name, path in block.projections.items()
        if path in block.matrices(layer)
    ]
    present = [name for name in known if name in found]
    expected = f"one or more of {', '.join(known)}, separated by commas"
    for name in names:
        if name not in known:
            yield invalid_value(setting, name, expected, known)
    if lacking := [name for name in names if name in known and name not in found]:
        kept = [name for name in names if name in present] or present
        yield (
            f"config.{setting} names {', '.join(lacking)}, which no layer of the model has; use"
            f" --config.{setting}={','.join(kept)}; the model has {','.join(present)}"
        )


def _kind_problems(model: ModelConfig, kind: KindConfig) -> Iterator[str]:
    path = f"model.kinds.{kind.name}"
    if kind.name not in model.used_kinds:
        yield (
            f"config.{path} has no effect, since config.model.layer_kinds does not name it; use"
            f" --config.model.layer_kinds={','.join((*model.layer_kinds, kind.name))}, or remove it"
        )
    yield from range_problems(path, kind)
    names = mixers_by_layer_kind()
    feed_forwards = (*FEED_FORWARDS, "none")
    for setting, known in (("attention", names), ("feed_forward", feed_forwards)):
        value = getattr(kind, setting)
        if value and value not in known:
            yield invalid_value(f"{path}.{setting}", value, f"one of {', '.join(known)}", known)
            return
    own = blocks_of(model.layer_config(kind.name))
    if not own:
        yield f"config.{path} has attention='none' and feed_forward='none', so its layers compute nothing; set one"
        return
    sizes = {name.removeprefix("attention.") for block in own for name in block.sizes}
    for name in ("num_heads", "num_kv_heads", "head_dim", "ffn_dim"):
        if getattr(kind, name) and name not in sizes:
            layers = own[-1 if name == "ffn_dim" else 0].layers
            yield f"config.{path}.{name}={getattr(kind, name)} has no effect in {layers}; remove it"
    if kind.attention and kind.name in names and kind.attention != kind.name:
        yield f"config.{path}.attention={kind.attention!r} contradicts the name {kind.name!r}; use a different name"


def without_effect(section: str, values: Any, names: Iterable[str], reason: str) -> Iterator[str]:
    """The settings among `names` of a section that are not the default."""
    for name in names:
        if getattr(values, name) != getattr(type(values)(), name):
            yield f"config.{section}.{name}={getattr(values, name)!r} has no effect {reason}"


def lora_problems(config: Config) -> Iterator[str]:
    """Problems of the section lora, and settings of frozen parameters where no parameter is frozen."""
    lora = config.lora
    train = config.train
    names = [*projection_paths()]
    if lora.rank or lora.projections != LoraConfig().projections:
        yield from projection_problems(config, "lora.projections", lora.projections, names)
    if not lora.projections:
        yield f"config.lora.projections is empty: name one or more of {', '.join(names)}"
    if lora.init_from and not config.model.init_from:
        yield f"config.lora.init_from={lora.init_from} needs the base of the adapters; set config.model.init_from"
    if not (lora.rank or lora.init_from):
        yield from without_effect("lora", lora, vars(lora), "without --config.lora.rank=RANK")
    if not (lora.rank or train.trainable or train.frozen):
        if not train.checkpoint_frozen:
            yield (
                "config.train.checkpoint_frozen=False has no effect, since no parameter is frozen: set"
                " config.lora.rank, config.train.trainable or config.train.frozen, or remove it"
            )
        if config.precision.frozen != "bf16":
            yield (
                f"config.precision.frozen={config.precision.frozen!r} has no effect, since no parameter is frozen: set"
                " config.lora.rank, config.train.trainable or config.train.frozen, or remove it"
            )


# Value of compute -> the beginnings of the names of its settings.
_COMPUTE_SETTINGS = dict(fp8=("fp8_", "bf16_layers"), fp16=("loss_scale",))

_NAMES = (*MATMUL_NAMES, *EXPERT_PROJECTIONS)


def precision_problems(config: Config) -> Iterator[str]:
    """Reasons why the precision of `config` is invalid."""
    precision = config.precision
    defaults = PrecisionConfig()
    if precision.compute == "fp8" or precision.fp8_matmuls != defaults.fp8_matmuls:
        yield from projection_problems(
            config, "precision.fp8_matmuls", precision.fp8_matmuls, _NAMES
        )
    setting = f"config.precision.bf16_layers={precision.bf16_layers}"
    num_layers = config.model.num_layers
    named = [layer + num_layers if layer < 0 else layer for layer in precision.bf16_layers]
    if not all(0 <= layer < num_layers for layer in named):
        yield f"{setting}: the model has {num_layers} layers; they are 0 to {num_layers - 1}, or -{num_layers} to -1"
    elif len(named) != len({*named}):
        yield f"{setting} names a layer twice, of {num_layers}: they are {named}, counted from 0; remove one"
    elif len(named) == num_layers:
        yield (
            f"{setting} are all layers, so compute='fp8' equals bf16; remove one, or use"
            " --config.precision.compute=bf16 --config.precision.bf16_layers="
        )
    for compute, prefixes in _COMPUTE_SETTINGS.items():
        for name, value in vars(precision).items():
            is_unused = name.startswith(prefixes) and precision.compute != compute
            if is_unused and value != getattr(defaults, name):
                yield (
                    f"config.precision.{name}={value!r} is for compute={compute!r}, and config.precision.compute is"
                    f" {precision.compute!r}; use --config.precision.compute={compute}, or remove it"
                )
    if (
        precision.fp8_amax_history_len != defaults.fp8_amax_history_len
        and precision.fp8_scaling != "delayed"
    ):
        yield (
            f"config.precision.fp8_amax_history_len={precision.fp8_amax_history_len} is for delayed scaling, and"
            f" config.precision.fp8_scaling is {precision.fp8_scaling!r}; use --config.precision.fp8_scaling=delayed,"
            " or remove it"
        )
    if precision.compute == "fp8" and precision.reduce == "fp32":
        yield (
            "unsupported: config.precision.reduce='fp32' with compute='fp8', whose products return gradients in bf16;"
            " use --config.precision.reduce=compute"
        )
    if precision.compute == "fp8" and not precision.fp8_matmuls:
        yield (
            "config.precision.compute='fp8' with no fp8_matmuls is bf16; name at least one, or use"
            " --config.precision.compute=bf16"
        )
    if precision.frozen in ("nf4", "mxfp4"):
        yield from _quantized_problems(config)
    if not precision.loss_scale_min <= precision.loss_scale <= precision.loss_scale_max:
        yield (
            f"config.precision.loss_scale={precision.loss_scale} is not between loss_scale_min="
            f"{precision.loss_scale_min} and loss_scale_max={precision.loss_scale_max}"
        )
    if (
        precision.compute == "fp8"
        and precision.fp8_scaling == "delayed"
        and config.memory.tile_tokens
    ):
        yield (
            "unsupported: config.precision.fp8_scaling='delayed' needs each product of a layer once per microbatch, and"
            f" config.memory.tile_tokens={config.memory.tile_tokens} computes it tile by tile;"
            " use --config.precision.fp8_scaling=current"
        )


def _quantized_problems(config: Config) -> Iterator[str]:
    setting = f"config.precision.frozen={config.precision.frozen!r}"
    memory = config.memory
    quantized = quantized_matrices(config.model, config)
    if config.precision.frozen == "mxfp4" and not quantized:
        yield f"{setting} is for frozen experts of gpt-oss, and this model has none; use --config.precision.frozen=nf4"
    if memory.remat == "none":
        yield (
            f"unsupported: {setting} with config.memory.remat='none', which would save the dequantized weights of all"
            " layers; use --config.memory.remat=matmuls"
        )
    if memory.node_copy_devices:
        yield (
            f"unsupported: {setting} with config.memory.node_copy_devices={memory.node_copy_devices};"
            " use --config.memory.node_copy_devices=0"
        )
    for path, (matrix, form, _) in quantized.items():
        last = [*matrix.inputs.values()][-1]
        if form == "mxfp4" and last % 32:
            yield (
                f"unsupported: {setting} needs experts whose inputs are multiples of 32, and {path} has {last}; use"
                " --config.precision.frozen=bf16"
            )
            return
        if last % 2 or matrix.num_inputs * matrix.num_outputs % 64:
            yield (
                f"unsupported: {setting} needs matrices with an even number of inputs and a multiple of 64 entries, and"
                f" {path} has {matrix.num_inputs} inputs and {matrix.num_outputs} outputs; use"
                " --config.precision.frozen=bf16"
            )
            return
