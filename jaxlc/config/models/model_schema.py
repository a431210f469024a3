"""The section `model` of the settings (see `jaxlc.config.schema`), the segments of a list of layer
kinds, and the settings that each `model.rope.scaling` uses. Imports no jax.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from jaxlc.config.kinds import FEED_FORWARDS, MIXERS, mixers_by_layer_kind, scaled_kinds
from jaxlc.config.kinds.attention import AttentionSettings
from jaxlc.config.kinds.delta_net import DeltaNetConfig
from jaxlc.config.kinds.experts import ExpertsConfig
from jaxlc.config.kinds.kda import KdaConfig
from jaxlc.config.kinds.latent import LatentConfig
from jaxlc.config.kinds.mamba2 import Mamba2Config
from jaxlc.config.values import (
    Above0,
    Above0UpTo1,
    From1,
    From1To10000,
    ZeroOrFrom2,
    flattened,
    plain,
)
from jaxlc.core.axes import FIRST_LAYERS, LAST_LAYERS, LAYERS

# Segments that the settings name are kept if they have at most this many layers in the compiled program.
_FEW_LAYERS = 8


class Segment(NamedTuple):
    """Consecutive layers of a group of kinds that repeats: a scan runs a group in each iteration,
    so the compiled program has the layers of one group.
    """

    name: str  # of their parameters in the parameter tree; see `core.axes.is_layers`
    kinds: tuple[str, ...]  # of the layers of an iteration
    num_iterations: int

    @property
    def num_layers(self) -> int:
        return len(self.kinds) * self.num_iterations

    def remat_group(self, num_layers: int) -> int:
        """The number of layers of a remat group: whole iterations that divide the segment, as many
        as have at most `num_layers` layers; at least one iteration."""
        period = len(self.kinds)
        sizes = range(period, self.num_layers + 1, period)
        return max(x for x in sizes if self.num_layers % x == 0 and x <= max(num_layers, period))


def first_and_group(kinds: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The settings model.first_layer_kinds and model.layer_kinds of layers of `kinds`: those with the fewest layers in
    both, and then the fewest first layers, up to `_FEW_LAYERS`; otherwise (), and `kinds` as they are.

    The last repetition of the group may be incomplete.
    """
    for num_layers in range(1, min(len(kinds), _FEW_LAYERS) + 1):
        for num_first in range(num_layers):
            if _num_repeated(kinds[num_first:], num_layers - num_first) == len(kinds) - num_first:
                return tuple(kinds[:num_first]), tuple(kinds[num_first:num_layers])
    return (), tuple(kinds)


def _num_repeated(kinds: Sequence[str], period: int) -> int:
    """The number of layers from the first on that repeat the first `period`; the last repetition
    may be incomplete."""
    end = (i for i in range(period, len(kinds)) if kinds[i] != kinds[i - period])
    return next(end, len(kinds))


@functools.cache
def segments_of(
    first: tuple[str, ...], group: tuple[str, ...], num_layers: int
) -> tuple[Segment, ...]:
    """The segments of the layers with model.first_layer_kinds, layer_kinds and num_layers, in their order.

    They are those that the settings name, if these have at most `_FEW_LAYERS` layers in the compiled program or no more
    than other segments: the first layers, the whole groups, and the rest of a group. Otherwise the number of layers in
    the program plus the number of segments is the smallest: each segment is a loop, with parameters of its own.
    """
    num_groups, num_last = divmod(num_layers - len(first), len(group))
    named = (
        Segment(FIRST_LAYERS, first, 1),
        Segment(LAYERS, group, num_groups),
        Segment(LAST_LAYERS, group[:num_last], 1),
    )
    named = tuple(segment for segment in named if segment.num_layers > 0)
    if _num_compiled(named) <= _FEW_LAYERS:
        return named
    kinds = tuple(kind for part in named for kind in part.kinds * part.num_iterations)
    best: dict[int, tuple[Any, ...]] = {len(kinds): (0, 0, ())}  # of the layers from a layer on
    for start in reversed(range(len(kinds))):
        best[start] = min(
            (cost + period + 1, layers + period, ((kinds[start : start + period], number), *parts))
            for period in range(1, len(kinds) - start + 1)
            for number in range(1, _num_repeated(kinds[start:], period) // period + 1)
            for cost, layers, parts in [best[start + period * number]]
        )
    names = (LAYERS, *(f"{LAYERS}_{number}" for number in range(2, len(kinds) + 1)))
    others = tuple(Segment(name, *part) for name, part in zip(names, best[0][-1]))
    return min(named, others, key=_num_compiled)


def longest(segments: Iterable[Segment]) -> Segment:
    """The longest segment of several iterations, if there are any."""
    return max(segments, key=lambda x: (x.num_iterations > 1, x.num_layers))


def _num_compiled(segments: Iterable[Segment]) -> int:
    return sum(len(segment.kinds) for segment in segments)


SectionT = TypeVar("SectionT")


@dataclass(frozen=True, kw_only=True)
class KindConfig:
    """How the layers of one kind differ from the settings of the model, as
    --config.model.kinds.NAME.KEY.
    """

    # an entry of model.layer_kinds: full, sliding, nope, gated_delta_net, none, or another name
    name: str
    # attention of the layers, as in model.layer_kinds; none: they have none. Empty: that of the name; full if it is
    # another name.
    attention: str = ""
    num_heads: int = 0  # number of query heads; 0: model.attention.num_heads
    num_kv_heads: int = 0  # number of key/value heads; 0: model.attention.num_kv_heads
    head_dim: int = 0  # width of each attention head; 0: model.attention.head_dim
    ffn_dim: int = 0  # width of the feed-forward layer; 0: model.ffn_dim
    # feed-forward block of the layers. dense: all tokens use the same weights, of width ffn_dim. none: the layers
    # have none, as in Nemotron-H. Empty: the experts of the model, or dense if model.experts.num_experts is 0.
    feed_forward: str = ""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embeddings; `jaxlc.models.rope` has the computation."""

    theta: Above0[float] = (
        10_000.0  # base of the frequencies: 500000 in Llama 3; longer contexts use a larger one
    )
    # how frequencies are changed to extend the context; docs/pretrained.md. linear: divided by the factor. ntk: a
    # larger base. dynamic_ntk: a base that grows with data.seq_len. yarn: low frequencies divided, high ones unchanged,
    # sharper attention. longrope: each divided by a factor of its own. llama3: as in Llama 3.1.
    scaling: Literal["none", "linear", "ntk", "dynamic_ntk", "yarn", "longrope", "llama3"] = "none"
    factor: From1[float] = 1.0  # of scaling: new context length divided by the original one
    # context length in tokens that the model was trained with before scaling; dynamic_ntk, yarn,
    # longrope and llama3.
    original_tokens: ZeroOrFrom2[int] = 0
    # llama3: wavelengths above original_tokens / this are scaled fully.
    low_freq_factor: Above0[float] = 1.0
    # llama3: wavelengths below original_tokens / this are not scaled.
    high_freq_factor: Above0[float] = 4.0
    # yarn: frequencies with more turns than this within original_tokens are not scaled.
    beta_fast: Above0[float] = 32.0
    # yarn: frequencies with fewer turns than this within original_tokens are scaled fully.
    beta_slow: Above0[float] = 1.0
    # yarn, longrope: factor of cos and sin, whose square multiplies attention logits. 0: computed from factor.
    attention_factor: float = 0.0
    truncate: bool = True  # yarn: round the limits between the frequency bands to whole dimensions
    # yarn: queries at position p of their document are multiplied by 1 + this x ln(1 + floor(p / original_tokens)),
    # as in Ministral 3; "llama_4_scaling_beta" in Hugging Face configs. 0: not.
    query_beta: float = 0.0
    # yarn: queries of latent layers are multiplied by the square of 1 + 0.1 x this x ln(factor), as in DeepSeek V3;
    # "mscale_all_dim" in Hugging Face configs. 0: not.
    query_mscale: float = 0.0
    # longrope: divisors of the frequencies if data.seq_len is at most original_tokens.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[
        float, ...
    ] = ()  # longrope: divisors of the frequencies for longer sequences
    # fraction of head_dim that RoPE rotates, its first dimensions; the others are unchanged.
    fraction: Above0UpTo1[float] = 1.0
    sliding_theta: Above0[float] = 10_000.0  # base of the frequencies of sliding layers
    sliding_scaling: bool = False  # scaling applies to sliding layers, too, as in gpt-oss


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-style decoder. `preset` gives the shape of a published model; the other settings
    override it.
    """

    # name of a published model in jaxlc/config/models/presets.py, such as llama3.1-8b or qwen3-8b
    preset: str
    # model whose weights training starts from: a Hugging Face directory, a hub id ORGANIZATION/NAME, or the workdir of
    # a run. It gives the shape as well, and preset has no effect; docs/pretrained.md. Empty: random weights.
    init_from: str = ""
    # number of token ids, at least those of the tokenizer; padded to a multiple of mesh.tensor. More than the model of
    # init_from has: rows of new tokens are added; docs/pretrained.md
    vocab_size: From1[int]
    num_layers: From1To10000[int]  # number of decoder layers (attention and feed-forward)
    model_dim: From1[int]  # width of the residual stream; "hidden_size" in Hugging Face configs
    # width of the gated feed-forward layer; "intermediate_size" in Hugging Face configs
    ffn_dim: From1[int]
    tie_embeddings: bool  # use the transposed token embedding as the output head
    # RMSNorms around attention and feed-forward. pre: of their input, as in Llama. post: of their output before it is
    # added to the residual stream, as in Olmo 3. pre_and_post: of both, as in Gemma 3.
    norm_placement: Literal["pre", "post", "pre_and_post"] = "pre"
    zero_centered_norm: bool = False  # RMSNorms multiply by 1 + scale instead of scale, as in Gemma
    norm_epsilon: Above0[float]  # added to the mean square in RMSNorm
    # function of the feed-forward gate; gelu_tanh in Gemma. clamped_swiglu: that of the experts of gpt-oss, which also
    # bounds gate and up projection. relu2: the square of ReLU, without a gate, as in Nemotron-H.
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"] = "silu"
    mlp_bias: bool = False  # biases of the three projections of dense layers
    mlp_gate_multiplier: Above0[float] = 1.0  # dense layers: factor of the gate before its function
    mlp_output_multiplier: Above0[float] = 1.0  # dense layers: factor of the projected output
    scale_embeddings: bool = False  # multiply token embeddings by sqrt(model_dim), as in Gemma
    # token embeddings are multiplied by it, as in Granite
    embedding_multiplier: Above0[float] = 1.0
    # the outputs of attention and of feed-forward blocks are multiplied by it before they are added
    # to the residual stream
    residual_multiplier: Above0[float] = 1.0
    logits_scaling: Above0[float] = 1.0  # logits are divided by it
    # kinds of the layers, a group that repeats, after the first_layer_kinds: without these, layer i has kind
    # layer_kinds[i % length]. For any other order, name all layers. full: attention to all earlier tokens. sliding:
    # attention to the last `attention.window` tokens. nope: as full, without position embedding. gated_delta_net:
    # linear attention with a state, as in Qwen 3.5. kimi_delta: the same with a decay of each channel, as in Kimi
    # Linear. latent: attention to all earlier tokens, whose keys and values come from a latent, as in DeepSeek V3;
    # latent_nope: without position embedding, as in Kimi Linear. mamba2: a state without attention, as in Granite 4.
    # full_mamba2: full and mamba2 of the same input, whose outputs are added, as in Falcon-H1. none: a feed-forward
    # block only.
    layer_kinds: tuple[str, ...] = ("full",)
    # kinds of the first layers, before the groups of layer_kinds; such as the dense layers of GLM 4.5. They are part of
    # num_layers.
    first_layer_kinds: tuple[str, ...] = ()
    # kinds of layers whose heads or feed-forward layer have other sizes; docs/architecture.md. Set the fields of a kind
    # with config.model.kinds.NAME.FIELD; a new NAME adds a kind, which layer_kinds and first_layer_kinds may name.
    kinds: tuple[KindConfig, ...] = ()
    attention: AttentionSettings = AttentionSettings()
    delta_net: DeltaNetConfig = DeltaNetConfig()
    kda: KdaConfig = KdaConfig()
    experts: ExpertsConfig = ExpertsConfig()
    latent: LatentConfig = LatentConfig()
    mamba2: Mamba2Config = Mamba2Config()
    rope: RopeConfig = RopeConfig()

    @property
    def rotated_dim(self) -> int:
        """Dimensions of a head that RoPE rotates."""
        return round(self.attention.head_dim * self.rope.fraction)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The layers, in their order."""
        return segments_of(self.first_layer_kinds, self.layer_kinds, self.num_layers)

    @property
    def num_compiled_layers(self) -> int:
        """The number of layers in the compiled program: those of an iteration of each segment."""
        return _num_compiled(self.segments)

    def num_remat_groups(self, layers_per_remat_group: int) -> int:
        """The number of remat groups with this memory.layers_per_remat_group."""
        if layers_per_remat_group == 1:
            return self.num_layers
        return sum(x.num_layers // x.remat_group(layers_per_remat_group) for x in self.segments)

    @property
    def repeated(self) -> Segment:
        """See `longest`."""
        return longest(self.segments)

    @property
    def used_kinds(self) -> tuple[str, ...]:
        """The kinds that some layers have, each once."""
        return tuple(dict.fromkeys((*self.first_layer_kinds, *self.layer_kinds)))

    def section(self, part: type[SectionT]) -> SectionT:
        """The settings of a kind of blocks."""
        return next(value for value in (self, *vars(self).values()) if isinstance(value, part))

    @property
    def by_path(self) -> dict[str, Any]:
        """The settings by their paths, such as "num_layers" and "delta_net.key_heads"."""
        return flattened({name: plain(value) for name, value in vars(self).items()})

    @property
    def kinds_of_layers(self) -> tuple[str, ...]:
        """The kind of each layer."""
        return tuple(kind for x in self.segments for kind in x.kinds * x.num_iterations)

    @property
    def layers_with_experts(self) -> list[int]:
        """The indices of the layers with experts."""
        kinds = {
            kind for kind in self.used_kinds if self.layer_config(kind).feed_forward == "experts"
        }
        return [layer for layer, kind in enumerate(self.kinds_of_layers) if kind in kinds]

    def num_layers_of(self, kind: str) -> int:
        """Number of layers of this kind."""
        return self.kinds_of_layers.count(kind)

    def attention_of(self, kind: str) -> str:
        """The attention of layers of this kind: a name of `kinds.mixers_by_layer_kind`."""
        own = next((settings.attention for settings in self.kinds if settings.name == kind), "")
        return own or (kind if kind in mixers_by_layer_kind() else "full")

    @property
    def attentions(self) -> frozenset[str]:
        """The attention of all layers."""
        return frozenset(map(self.attention_of, self.used_kinds))

    def window_of(self, kind: str) -> int | None:
        """The window in tokens of layers of this kind; None: attention to all earlier tokens."""
        return self.attention.window if self.attention_of(kind) == "sliding" else None

    @functools.lru_cache(maxsize=256)  # noqa: B019  searches ask tens of thousands of times
    def layer_config(self, kind: str) -> "LayerConfig":
        """The settings of the layers of this kind: those of the model with the sizes of the kind."""
        own = next(
            (vars(settings) for settings in self.kinds if settings.name == kind), dict[str, Any]()
        )
        heads = {name: size for name, size in own.items() if name in vars(self.attention) and size}
        settings: dict[str, Any] = {
            **vars(self),
            "attention": dataclasses.replace(self.attention, **heads),
            "ffn_dim": own.get("ffn_dim") or self.ffn_dim,
            "feed_forward": "",
        }
        settings["mixers"] = mixers = mixers_by_layer_kind()[self.attention_of(kind)]
        norms = (self.by_path[MIXERS[name].norm_setting] for name in mixers)
        settings["norm_placement"] = next(norms, "") or self.norm_placement
        settings["feed_forward"] = own.get("feed_forward") or self.default_feed_forward
        return LayerConfig(**settings)

    @property
    def default_feed_forward(self) -> str:
        """The feed-forward block of layers whose kind names none: a key of `kinds.FEED_FORWARDS`."""
        settings: dict[str, Any] = {**vars(self), "mixers": (), "feed_forward": ""}
        layer = LayerConfig(**settings)
        return next(kind.name for kind in reversed(FEED_FORWARDS.values()) if kind.is_chosen(layer))

    @property
    def layer_stacks(self) -> dict[tuple[str, ...], list[int]]:
        """The indices of the layers of each parameter stack, by its path in the parameter tree.

        The name of a segment if all layers have equal shapes, and otherwise (segment, KIND) for
        each kind.
        """
        has_equal_shapes = len({self.layer_config(kind) for kind in self.used_kinds}) == 1
        stacks: dict[tuple[str, ...], list[int]] = {}
        places = (
            (segment.name, kind)
            for segment in self.segments
            for kind in segment.kinds * segment.num_iterations
        )
        for layer, (stack, kind) in enumerate(places):
            stacks.setdefault((stack,) if has_equal_shapes else (stack, kind), []).append(layer)
        return stacks


@dataclass(frozen=True, kw_only=True)
class LayerConfig(ModelConfig):
    """The settings of the layers of one kind; `ModelConfig.layer_config` returns them."""

    mixers: tuple[str, ...]  # keys of `kinds.MIXERS`
    feed_forward: str  # a key of `kinds.FEED_FORWARDS`


SECTIONS_OF_MODEL: Mapping[str, type] = {
    field.name: type(field.default)
    for field in dataclasses.fields(ModelConfig)
    if dataclasses.is_dataclass(field.default)
}


def model_from(settings: Mapping[str, Any]) -> ModelConfig:
    """The model with these settings, by their paths; the inverse of `ModelConfig.by_path`. Kinds may
    also be a dictionary NAME -> fields.
    """
    values: dict[str, Any] = {name: value for name, value in settings.items() if "." not in name}
    kinds = values.get("kinds", ())
    if isinstance(kinds, Mapping):
        values["kinds"] = tuple(KindConfig(name=name, **own) for name, own in kinds.items())
    for name, part in SECTIONS_OF_MODEL.items():
        own = {
            path.partition(".")[2]: value
            for path, value in settings.items()
            if path.startswith(f"{name}.")
        }
        values[name] = part(**own)
    return ModelConfig(**values)


# Kind of scaling -> the settings of `RopeConfig` that it uses.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic_ntk": ("factor", "original_tokens"),
    "yarn": (
        *("factor", "original_tokens", "beta_fast", "beta_slow", "attention_factor", "truncate"),
        *("query_beta", "query_mscale"),
    ),
    "longrope": ("factor", "original_tokens", "attention_factor", "short_factors", "long_factors"),
    "llama3": ("factor", "original_tokens", "low_freq_factor", "high_freq_factor"),
}
# of the settings in PARAMETERS and the kind of scaling, by their paths
DEFAULTS: dict[str, Any] = {
    f"rope.{name}": value
    for name, value in vars(RopeConfig()).items()
    if name not in ("theta", "fraction", "sliding_theta", "sliding_scaling")
}
# with factor=1, attention factor 1, and queries that are not scaled
NO_EFFECT_AT_1 = ("linear", "ntk", "yarn", "llama3")


def with_scaling(shape: Mapping[str, Any], explicit: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model, `shape`, updated with `explicit`.

    If `explicit` names another kind of scaling, the parameters of the kind in `shape` return to
    their defaults, except the original context length if the new kind uses it as well.
    """
    scaling = explicit.get("rope.scaling", shape["rope.scaling"])
    if scaling == shape["rope.scaling"] or scaling not in PARAMETERS:
        return {**shape, **explicit}
    kept = {"rope.original_tokens"} if "original_tokens" in PARAMETERS[scaling] else set()
    return {
        **shape,
        **{name: value for name, value in DEFAULTS.items() if name not in kept},
        **explicit,
    }


def attention_factor(model: ModelConfig) -> float:
    """The factor of cos and sin that `rope.attention_factor` gives, or its rule if that is
    0.

    yarn: 0.1 ln s + 1 (Peng et al. 2023, arXiv:2309.00071, section 3.4); longrope: sqrt(1 + ln s /
    ln original tokens) (Ding et al. 2024, arXiv:2402.13753, the authors' code); 1 for the other
    kinds.
    """
    if model.rope.attention_factor:
        return model.rope.attention_factor
    log_factor = math.log(model.rope.factor)
    if model.rope.scaling == "yarn":
        return 0.1 * log_factor + 1
    if model.rope.scaling == "longrope":
        return math.sqrt(1 + log_factor / math.log(model.rope.original_tokens))
    return 1.0


def rope_problems(model: ModelConfig) -> Iterator[str]:
    """Contradictions among the RoPE settings."""
    rotated = round(model.attention.head_dim * model.rope.fraction, 6)  # fractions such as 64 / 192
    # their base has the exponent d / (d - 2)
    smallest = 4 if model.rope.scaling in ("ntk", "dynamic_ntk") else 2
    if rotated % 2 or rotated < smallest:
        yield (
            f"config.model.rope.fraction={model.rope.fraction} of head_dim={model.attention.head_dim} gives {rotated:g}"
            f" dimensions, and RoPE needs an even number, at least {smallest}; use a different rope.fraction"
        )
    yield from _unused_parameters(model)
    scaling = model.rope.scaling
    factor = model.rope.factor
    is_unscaled = scaling in NO_EFFECT_AT_1 and factor == 1 and not model.rope.query_beta
    scaled = scaled_kinds() | ({"sliding"} if model.rope.sliding_scaling else set())
    if scaling != "none" and scaled.isdisjoint(model.attentions):
        others = [
            f" --config.model.{name}={default}"
            for name, default in DEFAULTS.items()
            if name != "rope.scaling" and model.by_path[name] != default
        ]
        yield (
            f"config.model.rope.scaling={scaling!r} has no effect, since config.model.layer_kinds names no full or"
            f" latent layers; use --config.model.rope.scaling=none{''.join(others)}, or"
            " --config.model.rope.sliding_scaling for sliding layers"
        )
    if model.rope.sliding_scaling and "sliding" not in model.attentions:
        yield (
            "config.model.rope.sliding_scaling=True has no effect, since config.model.layer_kinds names no sliding"
            " layers; use --noconfig.model.rope.sliding_scaling"
        )
    if model.rope.query_beta and "sliding" in model.attentions and not model.rope.sliding_scaling:
        yield (
            f"config.model.rope.query_beta={model.rope.query_beta} scales the queries of sliding layers"
            " as well; use it with --config.model.rope.sliding_scaling, or set it to 0"
        )
    if is_unscaled and attention_factor(model) == 1:
        yield (
            f"config.model.rope.scaling={scaling!r} needs a rope.factor greater than 1, the new context length"
            " divided by the original one; use --config.model.rope.factor=4 or another factor"
        )
    if "original_tokens" in PARAMETERS[scaling] and not model.rope.original_tokens:
        yield (
            f"config.model.rope.scaling={scaling!r} needs --config.model.rope.original_tokens, the context"
            " length that the model was trained with; often max_position_embeddings of its config.json"
        )
    if scaling == "llama3" and model.rope.low_freq_factor >= model.rope.high_freq_factor:
        yield (
            f"config.model.rope.low_freq_factor={model.rope.low_freq_factor} must be less than"
            f" rope.high_freq_factor={model.rope.high_freq_factor}"
        )
    if scaling == "yarn" and model.rope.beta_slow >= model.rope.beta_fast:
        yield (
            f"config.model.rope.beta_slow={model.rope.beta_slow} must be less than"
            f" rope.beta_fast={model.rope.beta_fast}"
        )
    if scaling == "longrope":
        num_frequencies = model.rotated_dim // 2
        for setting, factors in (
            ("short_factors", model.rope.short_factors),
            ("long_factors", model.rope.long_factors),
        ):
            if len(factors) != num_frequencies:
                yield (
                    f"config.model.rope.{setting} has {len(factors)} numbers, and rope.scaling='longrope' needs"
                    f" {num_frequencies}, one for each frequency: head_dim x rope.fraction / 2"
                )
            if any(factor <= 0 for factor in factors):
                yield f"config.model.rope.{setting} contains {min(factors)}; its numbers must be greater than 0"


def _unused_parameters(model: ModelConfig) -> Iterator[str]:
    for name, value in vars(model.rope).items():
        default = getattr(RopeConfig, name)
        users = [kind for kind, names in PARAMETERS.items() if name in names]
        if not users or model.rope.scaling in users or value == default:
            continue
        yield (
            f"config.model.rope.{name}={value} has no effect with config.model.rope.scaling={model.rope.scaling!r}; use"
            f" --config.model.rope.scaling={' or '.join(users)} with it, or set it to {default}"
        )
