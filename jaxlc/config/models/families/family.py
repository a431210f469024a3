"""The description of a model family. Imports no jax."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxlc.config.kinds import FEED_FORWARDS, MIXERS, mixer_path
from jaxlc.config.kinds.contract import LayerTensor
from jaxlc.config.models.model_schema import ModelConfig
from jaxlc.config.values import defaults_of, flattened
from jaxlc.core import UserError

Fields = Mapping[str, Any]  # the content of config.json


class ReadFields(dict[str, Any]):
    """The fields of config.json at `where`; reading one that is missing or null raises UserError."""

    def __init__(self, where: str, fields: Mapping[str, Any]):
        super().__init__(fields)
        self._where = where

    def __getitem__(self, name: str) -> Any:
        if (value := self.get(name)) is None:
            raise UserError(
                f"{self._where} has no field {name}, or it is null or 0: it is incomplete; download it again"
            )
        return value


_COMMON = (
    *("norm_placement", "zero_centered_norm", "activation", "scale_embeddings"),
    *("mlp_bias", "logits_scaling", "mamba2.norm"),
    *("experts.router", "experts.bias", "experts.shared_gate", "experts.choice_bias"),
    "experts.latent_dim",
    *(f"attention.{name}" for name in ("qk_norm", "qkv_bias", "out_bias", "sinks")),
    *("attention.gate", "attention.gate_projection", "attention.interleaved"),
    *(f"delta_net.{x}" for x in ("norm_placement", "norm_epsilon", "negative_eigenvalues")),
)
# Settings of ModelConfig that are equal in all models of a family, with the values that most
# families have.
COMMON_SETTINGS: dict[str, Any] = {
    path: value
    for path, value in flattened(defaults_of(ModelConfig)).items()
    if path in _COMMON or path.endswith("_multiplier")
}


LAYER_TYPES = {
    name: mixer.layer_types[name] for mixer in MIXERS.values() for name in mixer.layer_types
}
_KINDS = {layer_type: name for name, layer_type in LAYER_TYPES.items()}
_KINDS["attention"] = "full"  # the older name, which transformers reads as well


def read_layer_types(config: Fields, default: Sequence[str] = ("full",)) -> list[str]:
    """The kinds of all layers by the field layer_types; if it is absent, the group `default`,
    repeated.
    """
    if config.get("layer_types"):
        return [_KINDS.get(name, name) for name in config["layer_types"]]
    return [default[i % len(default)] for i in range(config["num_hidden_layers"])]


def write_layer_types(model: ModelConfig) -> dict[str, Any]:
    """The fields layer_types and sliding_window."""
    return dict(
        layer_types=[LAYER_TYPES[kind] for kind in model.kinds_of_layers],
        sliding_window=model.attention.window or None,
    )


def kind_sets(*kinds: str) -> tuple[tuple[str, ...], ...]:
    """All sets of some of these kinds, for families whose models may have any of them."""
    sizes = range(1, len(kinds) + 1)
    return tuple(x for size in sizes for x in itertools.combinations(kinds, size))


def nothing(_: Any) -> dict[str, Any]:
    """The fields, or the settings, that most families do not have."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A `model_type` of config.json that the decoder computes exactly."""

    model_type: str
    # Entry of "architectures". Empty: transformers has no class for the language model alone, which is exported as the
    # first family with its layers.
    architecture: str
    # the sets of kinds that models may have
    layer_kinds: tuple[tuple[str, ...], ...] = (("full",),)
    # The kind of each layer in config.json. An unknown type of layer is returned as it is.
    read_kinds: Callable[[Fields], Sequence[str]] = read_layer_types
    # The fields of config.json for the layers of a model, as `read_kinds` reads them.
    write_kinds: Callable[[ModelConfig], dict[str, Any]] = nothing
    # settings that differ from COMMON_SETTINGS
    settings: Mapping[str, Any] = field(default_factory=dict)
    # More fields of config.json -> ModelConfig. attention_bias stands for attention.qkv_bias
    # and attention.out_bias.
    fields: Mapping[str, str] = field(default_factory=dict)
    # Settings that several fields give, or fields of another form; and these fields of a model.
    read_settings: Callable[[Fields], dict[str, Any]] = nothing
    write_settings: Callable[[ModelConfig], dict[str, Any]] = nothing
    varying: tuple[str, ...] = ()  # the settings that `read_settings` gives
    # The field with the number of shared experts, each as wide as the others. "": fields give
    # experts.shared_ffn_dim itself, or models have none.
    num_shared_field: str = ""
    exported_type: str = ""  # model_type of exports, where it differs
    activation_field: str = "hidden_act"
    length_field: str = "max_position_embeddings"  # of the longest sequence
    # The values that transformers uses for fields that are absent; a needed field that is absent here is required.
    # Fields that only the functions above read are known if they are here, or in `irrelevant`. With
    # partial_rotary_factor, RoPE may rotate a part of a head, and with rotary_dim, this field may give its size; with
    # llama_4_scaling_beta, YaRN may scale queries.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Fields of this family that change the computation, and the only values that are supported.
    required_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Values of model.rope.scaling that transformers computes in this family; empty: all.
    rope_scalings: tuple[str, ...] = ()
    # Whether rope_parameters has an entry for each layer type. RoPE of sliding layers is not scaled then; its base is
    # rope_local_base_freq if `defaults` has that field, and otherwise rope_theta.
    rope_by_layer_type: bool = False
    # The model_type of models with images whose text_config describes this language model, which other families may
    # have too: the model_type of text_config chooses, and the first one is the default; prefixes of the names of its
    # tensors there -> prefixes in `tensors`, last the one of modules in transformers 5; and prefixes of the other
    # tensors, which are not trained; "{num_layers}" stands for the number of layers. Without multimodal_type, released
    # files of the language model itself have these prefixes.
    multimodal_type: str = ""
    multimodal_prefixes: Mapping[str, str] = field(default_factory=dict)
    other_prefixes: tuple[str, ...] = ()
    # Mixer or feed-forward block -> its parameters whose tensors have other names than in
    # `config.kinds` -> ends of these names.
    tensor_names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # Parts of the names of tensors -> what this family has in their place, in names of aliases, too.
    name_parts: Mapping[str, str] = field(default_factory=dict)
    # End of the name of a tensor that is several parameters -> the setting with the number of groups of its rows: each
    # group has rows of every parameter, one after the other. Other tensors are one group.
    row_groups: Mapping[str, str] = field(default_factory=dict)
    # What files of other programs have in place of these fields and tensors (transformers: attribute_map of a config,
    # and conversion_mapping.py): another name of a field -> its name; other tensors of parameters; and the end of the
    # name of a tensor -> the ends of the names of the tensors that have its rows, one after the other.
    field_aliases: Mapping[str, str] = field(default_factory=dict)
    tensor_aliases: tuple[LayerTensor, ...] = ()
    joined_tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    irrelevant: tuple[str, ...] = ()  # more fields that do not change the computation
    quantization: str = ""  # quant_method of the weights that models may have besides fp8; "": none
    # Feed-forward blocks of the layers besides dense -> their tensors.
    feed_forward_tensors: Mapping[str, tuple[LayerTensor, ...]] = field(default_factory=dict)
    # More kinds of layers that models may have, and their settings: entries of model.kinds.
    kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def tensors_of(
        self, mixers: tuple[str, ...] = (), feed_forward: str = ""
    ) -> tuple[LayerTensor, ...]:
        """The tensors that checkpoints may have, with layers of entries of `config.kinds.MIXERS`
        and one of FEED_FORWARDS, in the order of the computation of a layer.
        """
        settings = {**COMMON_SETTINGS, **self.settings}
        known = {name: kind.tensors for name, kind in FEED_FORWARDS.items()}
        mlp = (known | {**self.feed_forward_tensors}).get(feed_forward, ())
        norms = (settings[MIXERS[name].norm_setting] for name in mixers)
        norm_placement = next(norms, "") or settings["norm_placement"]
        own = tuple(
            (mixer_path(name, mixers), self._named(name, MIXERS[name].tensors)) for name in mixers
        )
        mlp = self._named(feed_forward, mlp)
        tensors = _tensors(norm_placement, own, mlp, self.tensor_aliases)
        return tuple(map(self._with_own_parts, tensors)) if self.name_parts else tensors

    def _with_own_parts(self, tensor: LayerTensor) -> LayerTensor:
        """`tensor` with the names of `name_parts`."""
        name = tensor.name
        alias = tensor.alias
        for part, own in self.name_parts.items():
            name = name.replace(part, own)
        alias = None if alias is None else self._with_own_parts(alias)
        return tensor._replace(name=name, alias=alias)

    def _named(self, block: str, tensors: tuple[LayerTensor, ...]) -> tuple[LayerTensor, ...]:
        """`tensors` with the names of `tensor_names`."""
        names = self.tensor_names.get(block, {})
        return tuple(x._replace(name=names.get(x.param, x.name)) for x in tensors)

    def num_row_groups(self, tensor: LayerTensor, model: ModelConfig) -> int:
        """The number of groups of the rows of a tensor; see `row_groups`."""
        ends = (end for end in self.row_groups if tensor.name.endswith(f".{end}"))
        return next((model.by_path[self.row_groups[end]] for end in ends), 1)

    def prefixes_left_out(self, model: ModelConfig) -> tuple[str, ...]:
        """`other_prefixes` of a model."""
        return tuple(prefix.format(num_layers=model.num_layers) for prefix in self.other_prefixes)

    def prefix_of(self, names: Iterable[str]) -> str:
        """The key of `multimodal_prefixes` that names in files of a model with images begin with; "" without images."""
        prefixes = (x for name in names for x in self.multimodal_prefixes if name.startswith(x))
        return next(prefixes, "")

    def with_prefix(self, name: str, prefix: str) -> str:
        """The name of a tensor of the language model in a model with images.

        Args:
          prefix: of `prefix_of`.
        """
        own = self.multimodal_prefixes.get(prefix, "")
        return prefix + name.removeprefix(own) if name.startswith(own) else name

    @property
    def has_one_attention_bias(self) -> bool:
        """Whether the field attention_bias is for all projections of attention; otherwise, it is for
        all but the output.
        """
        own = {*self.settings, *self.fields.values()}
        return "attention_bias" in self.fields and "attention.out_bias" not in own

    @property
    def has_dense_layers(self) -> bool:
        """Whether models may have dense layers."""
        return "dense" in (self.feed_forward_tensors or ("dense",)) or any(
            kind.get("feed_forward") == "dense" for kind in self.kinds.values()
        )


@functools.cache
def _tensors(
    norm_placement: str,
    mixers: tuple[tuple[str, tuple[LayerTensor, ...]], ...],
    feed_forward: tuple[LayerTensor, ...],
    aliases: tuple[LayerTensor, ...],
) -> tuple[LayerTensor, ...]:
    """The tensors that a layer may have, by the names that Llama introduced and all families use."""
    alias_of = {alias.param: alias for alias in aliases}

    def complete(block: str, x: LayerTensor, alias: LayerTensor | None = None) -> LayerTensor:
        return x._replace(
            param=f"layers/{block}{x.param}",
            name=f"model.layers.{{layer}}.{x.name}",
            alias=alias and complete(block, alias),
        )

    def layer(block: str, tensors: Iterable[LayerTensor]) -> Iterator[LayerTensor]:
        return (complete(block, x, alias_of.get(x.param)) for x in tensors)

    before_attention, after_attention, before_mlp, after_mlp = (
        [LayerTensor(f"{param}/scale", f"{name}.weight") for name in names]
        for param, names in zip(_NORM_PARAMS, _NORM_NAMES[norm_placement])
    )
    return (
        LayerTensor("embedding", "model.embed_tokens.weight", None),
        *layer("", before_attention),
        *(tensor for path, tensors in mixers for tensor in layer(f"{path}/", tensors)),
        *layer("", [*after_attention, *before_mlp]),
        *layer("mlp/", feed_forward),
        *layer("", after_mlp),
        LayerTensor("final_norm/scale", "model.norm.weight"),
        # absent if the embeddings are tied
        LayerTensor("head", "lm_head.weight", 1),
    )


_NORM_PARAMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
# norm_placement -> names of the norms before and after attention, before and after the MLP. post_attention_layernorm
# is before the MLP in Llama and after attention in the others.
_NORM_NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "pre": (("input_layernorm",), (), ("post_attention_layernorm",), ()),
    "post": ((), ("post_attention_layernorm",), (), ("post_feedforward_layernorm",)),
    "pre_and_post": (
        ("input_layernorm",),
        ("post_attention_layernorm",),
        ("pre_feedforward_layernorm",),
        ("post_feedforward_layernorm",),
    ),
}
