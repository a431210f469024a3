"""Checks of the kinds of layers of a model. Imports no jax."""

from collections.abc import Iterator

from jaxlc.config.frozen import Config
from jaxlc.config.models.model_schema import DELTA_SETTINGS, LAYER_KINDS, KindConfig, ModelConfig
from jaxlc.config.ranges import range_problems
from jaxlc.config.values import invalid_value


def layer_problems(config: Config) -> Iterator[str]:
    """Problems of model.layer_kinds and model.kinds, and contradictions with the settings that depend on it."""
    model = config.model
    names = list(dict.fromkeys((*LAYER_KINDS, *(kind.name for kind in model.kinds))))
    unknown = [kind for kind in model.used_kinds if kind not in names]
    if unknown or not model.layer_kinds:
        name = unknown[0] if unknown else ""
        setting = "model.layer_kinds" if not unknown or name in model.layer_kinds else "model.first_layer_kinds"
        expected = f"one or more of {', '.join(names)}, separated by commas"
        if name:
            expected += f", or a new kind with its settings, such as --config.model.kinds.{name}.attention=full"
        yield invalid_value(setting, name, expected, names)
    for kind in model.kinds:
        yield from _kind_problems(model, kind)
    has_sliding = "sliding" in model.attentions
    if has_sliding and not model.window:
        yield "config.model.layer_kinds has sliding layers, which need a window: set config.model.window, in tokens"
    if model.window and not has_sliding:
        yield (
            f"config.model.window={model.window} has no effect, since config.model.layer_kinds names no sliding layers;"
            " use --config.model.layer_kinds=sliding, or sliding,full for alternating layers"
        )
    num_named, first = len(model.first_layer_kinds) + len(model.layer_kinds), ""
    if num_named > model.num_layers:
        if model.first_layer_kinds:
            first = "first_layer_kinds and config.model."
        yield (
            f"config.model.{first}layer_kinds names {num_named} layers and config.model.num_layers is"
            f" {model.num_layers}; use --config.model.num_layers={num_named} or more, or fewer kinds"
        )
    yield from _group_problems(config)


def shapes(model: ModelConfig) -> dict[str, ModelConfig]:
    """The sizes of each kind of layers, by the path of their settings: model, or model.kinds.NAME."""
    own = {kind.name for kind in model.kinds}
    # Layers with attention first: those without have other heads.
    kinds = sorted(model.used_kinds, key=lambda kind: model.of_kind(kind).mixer != "attention")
    by_path: dict[str, ModelConfig] = {}
    for kind in kinds:
        by_path.setdefault(f"model.kinds.{kind}" if kind in own else "model", model.of_kind(kind))
    return by_path


# Those of Qwen3.5-9B.
_QWEN3_5_SIZES = dict(zip(DELTA_SETTINGS, (16, 32, 128, 128, 4), strict=True))


def delta_net_problems(config: Config) -> Iterator[str]:
    """Problems of gated_delta_net layers; none if the model has no such layers."""
    model, mesh = config.model, config.mesh
    if "gated_delta_net" not in model.attentions:
        return
    missing = [f"--config.model.{name}={size}" for name, size in _QWEN3_5_SIZES.items() if getattr(model, name) < 1]
    if missing:
        yield (
            "config.model.layer_kinds has gated_delta_net layers, whose sizes are not set; use a model.preset or"
            f" model.init_from that has such layers, or the sizes of Qwen 3.5: {' '.join(missing)}"
        )
    key_heads, value_heads = model.delta_key_heads, model.delta_value_heads
    if value_heads % key_heads:
        yield (
            f"config.model.delta_value_heads={value_heads} is not a multiple of delta_key_heads={key_heads}: every key"
            " head serves the same number of value heads; use"
            f" --config.model.delta_value_heads={-(-value_heads // key_heads) * key_heads}"
        )
    if config.attention.shared_prefixes and config.memory.tile_tokens:
        yield (
            "unsupported: config.attention.shared_prefixes=True with gated_delta_net layers and"
            f" config.memory.tile_tokens={config.memory.tile_tokens}; use --config.memory.tile_tokens=0, or"
            " --config.attention.shared_prefixes=False, which repeats the prefixes"
        )
    if config.memory.parameters == "host":
        yield (
            "unsupported: config.memory.parameters='host' with gated_delta_net layers, since kernels would read their"
            " weights in host memory; use --config.memory.parameters=device"
        )
    fragment_tokens = config.data.seq_len // (2 * mesh.context)
    if fragment_tokens < model.delta_conv_taps - 1:
        yield (
            f"the convolutions of gated_delta_net layers read config.model.delta_conv_taps={model.delta_conv_taps}"
            f" tokens, and the parts of a sequence have {fragment_tokens} (data.seq_len / (2 x mesh.context)); use"
            f" --config.data.seq_len={2 * mesh.context * mesh.tensor * (model.delta_conv_taps - 1)} or more, or fewer"
            " context ranks"
        )


def _kind_problems(model: ModelConfig, kind: KindConfig) -> Iterator[str]:
    path = f"model.kinds.{kind.name}"
    if kind.name not in model.used_kinds:
        yield (
            f"config.{path} has no effect, since config.model.layer_kinds does not name it; use"
            f" --config.model.layer_kinds={','.join((*model.layer_kinds, kind.name))}, or remove it"
        )
    yield from range_problems(path, kind)
    sizes = [name for name in ("num_heads", "num_kv_heads", "head_dim") if getattr(kind, name)]
    if sizes and model.attention_of(kind.name) == "gated_delta_net":
        yield (
            f"config.{path}.{sizes[0]} has no effect in gated_delta_net layers, whose heads are in"
            " config.model.delta_key_heads and the settings next to it; remove it"
        )
    if kind.attention and kind.name in LAYER_KINDS and kind.attention != kind.name:
        yield f"config.{path}.attention={kind.attention!r} contradicts the name {kind.name!r}; use a different name"


def _group_problems(config: Config) -> Iterator[str]:
    """Memory settings that require groups of layers, and that model.layer_kinds contradicts."""
    memory, period = config.memory, len(config.model.layer_kinds)
    group, num_layers = memory.layers_per_remat_group, config.model.num_group_layers
    setting = f"config.memory.layers_per_remat_group={group}"
    if group > 1 and group % period:
        yield f"{setting} is not a multiple of the {period} layers of config.model.layer_kinds; use 1 or {period}"
    if num_layers % group:
        layers = f"config.model.num_layers={num_layers}"
        if num_layers != config.model.num_layers:
            layers = f"the {num_layers} layers in whole groups of config.model.layer_kinds"
        yield f"{setting} does not divide {layers}; use a divisor"
