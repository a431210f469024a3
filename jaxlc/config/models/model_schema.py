"""The section `model` of the settings; see `jaxlc.config.schema`. Imports no jax."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from jaxlc.config.models.hub import is_model_id
from jaxlc.config.ranges import Above0, Above0UpTo1, From1, ZeroOrFrom2
from jaxlc.core.axes import FIRST_LAYERS, LAST_LAYERS, LAYERS

# Kinds of layers that model.layer_kinds may name, besides those of model.kinds.
LAYER_KINDS = ("full", "sliding", "nope", "gated_delta_net")
# The sizes of gated_delta_net layers.
DELTA_SETTINGS = ("delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim", "delta_conv_taps")
# How they differ between families.
DELTA_VARIATIONS = ("delta_norm_placement", "delta_norm_epsilon", "delta_negative_eigenvalues")
# The settings of layers with experts.
EXPERT_SETTINGS = ("num_experts", "experts_per_token", "expert_ffn_dim", "router", "renormalize_router", "expert_bias")
EXPERT_SETTINGS += ("shared_ffn_dim", "shared_expert_gate", "router_choice_bias", "router_groups")
EXPERT_SETTINGS += ("router_groups_per_token", "router_scale")


@dataclass(frozen=True, kw_only=True)
class KindConfig:
    """How the layers of one kind differ from the settings of the model, as --config.model.kinds.NAME.KEY."""

    name: str  # an entry of model.layer_kinds: full, sliding, nope, gated_delta_net, or another name
    # attention of the layers, as in model.layer_kinds. Empty: that of the name; full if it names none.
    attention: Literal["", "full", "sliding", "nope", "gated_delta_net"] = ""
    num_heads: int = 0  # number of query heads; 0: model.num_heads
    num_kv_heads: int = 0  # number of key/value heads; 0: model.num_kv_heads
    head_dim: int = 0  # width of each attention head; 0: model.head_dim
    ffn_dim: int = 0  # width of the feed-forward layer; 0: model.ffn_dim
    # feed-forward block of the layers. dense: all tokens use the same weights, of width ffn_dim. Empty: the experts of
    # the model, or dense if model.num_experts is 0.
    feed_forward: Literal["", "dense"] = ""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-style decoder. `preset` gives the shape of a published model; the other settings override it."""

    preset: str  # name of a published model in jaxlc/config/models/presets.py, such as llama3.1-8b or qwen3-8b
    # model whose weights training starts from: a Hugging Face directory, a hub id ORGANIZATION/NAME, or the workdir of
    # a run. It gives the shape as well, and preset has no effect; docs/pretrained.md. Empty: random weights.
    init_from: str = ""
    vocab_size: From1[int]  # number of token ids, at least those of the tokenizer; padded to a multiple of mesh.tensor
    num_layers: From1[int]  # number of decoder layers (attention and feed-forward)
    model_dim: From1[int]  # width of the residual stream; "hidden_size" in Hugging Face configs
    num_heads: From1[int]  # number of query heads
    # number of key/value heads, a divisor of num_heads: fewer than num_heads is grouped-query attention, 1 is
    # multi-query attention.
    num_kv_heads: From1[int]
    head_dim: From1[int]  # width of each attention head; even, because RoPE rotates pairs of dimensions
    ffn_dim: From1[int]  # width of the gated feed-forward layer; "intermediate_size" in Hugging Face configs
    tie_embeddings: bool  # use the transposed token embedding as the output head
    # RMSNorm of queries and keys before RoPE. head: of each head, as in Qwen 3 and Gemma 3. projection: of all heads
    # together, as in Olmo 3.
    qk_norm: Literal["none", "head", "projection"] = "none"
    # RMSNorms around attention and feed-forward. pre: of their input, as in Llama. post: of their output before it is
    # added to the residual stream, as in Olmo 3. pre_and_post: of both, as in Gemma 3.
    norm_placement: Literal["pre", "post", "pre_and_post"] = "pre"
    zero_centered_norm: bool = False  # RMSNorms multiply by 1 + scale instead of scale, as in Gemma
    norm_epsilon: Above0[float]  # added to the mean square in RMSNorm
    qkv_bias: bool = False  # biases of the query, key and value projections, as in Qwen 2.5
    attention_out_bias: bool = False  # bias of the output projection of attention, as in gpt-oss
    # a trained logit per query head that joins the denominator of the attention softmax, as in gpt-oss.
    attention_sinks: bool = False
    # the output of attention is multiplied by the sigmoid of a gate before its projection; the query projection
    # computes the gate as well, as in Qwen 3.5.
    attention_gate: bool = False
    # function of the feed-forward gate; gelu_tanh in Gemma. clamped_swiglu: that of the experts of gpt-oss, which also
    # bounds gate and up projection.
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    # mixture of experts: number of experts in the feed-forward block of each layer; docs/experts.md. 0: dense layers,
    # without experts. model.kinds.NAME.feed_forward=dense makes the layers of a kind dense.
    num_experts: int = 0
    experts_per_token: int = 0  # experts that each token is routed to; "num_experts_per_tok" in Hugging Face configs
    expert_ffn_dim: int = 0  # width of each expert; "moe_intermediate_size" in Hugging Face configs
    # weights of the chosen experts. softmax: their probabilities among all experts, as in Qwen 3. topk_softmax: the
    # softmax of the logits of the chosen experts only, as in gpt-oss. sigmoid: the sigmoid of each logit, as in
    # DeepSeek V3 and GLM 4.5.
    router: Literal["softmax", "topk_softmax", "sigmoid"] = "softmax"
    # softmax and sigmoid router: the weights of the chosen experts are divided by their sum; "norm_topk_prob" in
    # Hugging Face configs.
    renormalize_router: bool = False
    # sigmoid router: a bias of each expert is added for the choice, and not for the weights. It has no gradient;
    # train.balance_bias_rate changes it. "e_score_correction_bias" in Hugging Face files.
    router_choice_bias: bool = False
    # sigmoid router: the experts are this many groups, in order. A token is routed to experts of some groups: those
    # with the largest sums of two scores. "n_group" in Hugging Face configs.
    router_groups: From1[int] = 1
    router_groups_per_token: From1[int] = 1  # number of these groups; "topk_group" in Hugging Face configs
    # factor of the weights of the chosen experts; "routed_scaling_factor" in Hugging Face configs.
    router_scale: Above0[float] = 1.0
    expert_bias: bool = False  # biases of the router and of all products of the experts, as in gpt-oss
    # width of the shared expert, a feed-forward block of all tokens whose output is added to that of the experts;
    # "shared_expert_intermediate_size" in Hugging Face configs. 0: none.
    shared_ffn_dim: int = 0
    # the output of the shared expert is multiplied by the sigmoid of a product of the input, as in Qwen 3.5.
    shared_expert_gate: bool = False
    scale_embeddings: bool = False  # multiply token embeddings by sqrt(model_dim), as in Gemma
    # attention logits are divided by the square root of this number; "query_pre_attn_scalar" in Hugging Face configs.
    # 0: head_dim.
    query_scale_dim: int = 0
    # kinds of the layers, a group that repeats, after the first_layer_kinds: without these, layer i has kind
    # layer_kinds[i % length]. full: attention to all
    # earlier tokens. sliding: attention to the last `window` tokens. nope: as full, without position embedding.
    # gated_delta_net: linear attention with a state, as in Qwen 3.5.
    layer_kinds: tuple[str, ...] = ("full",)
    # kinds of the first layers, before the groups of layer_kinds; such as the dense layers of GLM 4.5. They are part of
    # num_layers.
    first_layer_kinds: tuple[str, ...] = ()
    # kinds of layers whose heads or feed-forward layer have other sizes; docs/architecture.md. Set the fields of a kind
    # with config.model.kinds.NAME.FIELD; a new NAME adds a kind, which layer_kinds and first_layer_kinds may name.
    kinds: tuple[KindConfig, ...] = ()
    delta_key_heads: int = 0  # gated_delta_net layers: number of key heads, which queries have too
    delta_value_heads: int = 0  # gated_delta_net layers: number of value heads, a multiple of delta_key_heads
    delta_key_dim: int = 0  # gated_delta_net layers: width of a key head
    delta_value_dim: int = 0  # gated_delta_net layers: width of a value head
    delta_conv_taps: int = 0  # gated_delta_net layers: tokens that the convolution of queries, keys and values reads
    # gated_delta_net layers: their norm_placement, where it differs from that of the other layers, as in Olmo Hybrid.
    # Empty: norm_placement.
    delta_norm_placement: Literal["", "pre", "post", "pre_and_post"] = ""
    # gated_delta_net layers: added to the mean square in the norm of their output. 0: norm_epsilon.
    delta_norm_epsilon: float = 0.0
    # gated_delta_net layers: the step size of the correction of the state is from 0 to 2 instead of 0 to 1, so that
    # the state may change its sign, as in Olmo Hybrid.
    delta_negative_eigenvalues: bool = False
    # sliding layers: window in tokens; a query attends to its own token and the window - 1 tokens before it. 0: the
    # model has no sliding layers.
    window: int = 0
    sliding_rope_theta: Above0[float] = 10_000.0  # base of the RoPE frequencies of sliding layers
    sliding_rope_scaling: bool = False  # rope_scaling applies to sliding layers, too, as in gpt-oss
    rope_theta: Above0[float]  # base of the RoPE frequencies: 500000 in Llama 3; longer contexts use a larger one
    # how RoPE frequencies are changed to extend the context; docs/pretrained.md. linear: divided by the factor. ntk: a
    # larger base. dynamic_ntk: a base that grows with data.seq_len. yarn: low frequencies divided, high ones unchanged,
    # sharper attention. longrope: each divided by a factor of its own. llama3: as in Llama 3.1.
    rope_scaling: Literal["none", "linear", "ntk", "dynamic_ntk", "yarn", "longrope", "llama3"] = "none"
    rope_scaling_factor: From1[float] = 1.0  # new context length divided by the original one
    # context length in tokens that the model was trained with before scaling; dynamic_ntk, yarn, longrope and llama3.
    rope_scaling_original_tokens: ZeroOrFrom2[int] = 0
    # llama3: wavelengths above rope_scaling_original_tokens / this are scaled fully.
    rope_scaling_low_freq_factor: Above0[float] = 1.0
    # llama3: wavelengths below rope_scaling_original_tokens / this are not scaled.
    rope_scaling_high_freq_factor: Above0[float] = 4.0
    # yarn: frequencies with more turns than this within rope_scaling_original_tokens are not scaled.
    rope_scaling_beta_fast: Above0[float] = 32.0
    # yarn: frequencies with fewer turns than this within rope_scaling_original_tokens are scaled fully.
    rope_scaling_beta_slow: Above0[float] = 1.0
    # yarn, longrope: factor of cos and sin, whose square multiplies attention logits. 0: computed from
    # rope_scaling_factor.
    rope_scaling_attention_factor: float = 0.0
    rope_scaling_truncate: bool = True  # yarn: round the limits between the frequency bands to whole dimensions
    # longrope: divisors of the frequencies if data.seq_len is at most rope_scaling_original_tokens.
    rope_scaling_short_factors: tuple[float, ...] = ()
    rope_scaling_long_factors: tuple[float, ...] = ()  # longrope: divisors of the frequencies for longer sequences
    # fraction of head_dim that RoPE rotates, its first dimensions; the others are unchanged.
    rope_fraction: Above0UpTo1[float] = 1.0

    @property
    def num_last_layers(self) -> int:
        """Number of layers after the last whole group of layer_kinds."""
        return (self.num_layers - len(self.first_layer_kinds)) % len(self.layer_kinds)

    @property
    def num_group_layers(self) -> int:
        """Number of layers in whole groups of layer_kinds."""
        return self.num_layers - len(self.first_layer_kinds) - self.num_last_layers

    @property
    def used_kinds(self) -> tuple[str, ...]:
        """The kinds that some layers have, each once."""
        return tuple(dict.fromkeys((*self.first_layer_kinds, *self.layer_kinds)))

    @property
    def query_dim(self) -> int:
        """The width of a head in the query projection: head_dim, and as much for the gate."""
        return 2 * self.head_dim if self.attention_gate else self.head_dim

    @property
    def mixer(self) -> str:
        """What mixes the tokens of a layer with these sizes, the result of `of_kind`: a key of `core.mixers.MIXERS`."""
        return "gated_delta_net" if self.delta_value_heads else "attention"

    @property
    def feed_forward(self) -> str:
        """The feed-forward block of a layer with these sizes, the result of `of_kind`: a key of
        `core.mixers.FEED_FORWARDS`."""
        return "experts" if self.num_experts else "dense"

    @property
    def used_ffn_dim(self) -> int:
        """The width of the feed-forward block of a token: of the experts that it is routed to, and the shared one."""
        if not self.num_experts:
            return self.ffn_dim
        return self.experts_per_token * self.expert_ffn_dim + self.shared_ffn_dim

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layers have no experts."""
        return any(self.of_kind(kind).feed_forward == "dense" for kind in self.used_kinds)

    @property
    def kinds_of_layers(self) -> tuple[str, ...]:
        """The kind of each layer."""
        first, group = self.first_layer_kinds, self.layer_kinds
        return (*first, *(group[layer % len(group)] for layer in range(self.num_layers - len(first))))

    def kinds_of_iteration(self, stack: str) -> tuple[str, ...]:
        """The kinds of the layers that an iteration of the loop over one of LAYER_STACKS runs."""
        last = self.layer_kinds[: self.num_last_layers]
        return {FIRST_LAYERS: self.first_layer_kinds, LAYERS: self.layer_kinds, LAST_LAYERS: last}[stack]

    def num_layers_of(self, kind: str) -> int:
        """Number of layers of this kind."""
        return self.kinds_of_layers.count(kind)

    def attention_of(self, kind: str) -> str:
        """The attention of layers of this kind: an entry of LAYER_KINDS."""
        own = next((settings.attention for settings in self.kinds if settings.name == kind), "")
        return own or (kind if kind in LAYER_KINDS else "full")

    @property
    def attentions(self) -> frozenset[str]:
        """The attention of all layers: some of LAYER_KINDS."""
        return frozenset(map(self.attention_of, self.used_kinds))

    def window_of(self, kind: str) -> int | None:
        """The window in tokens of layers of this kind; None: attention to all earlier tokens."""
        return self.window if self.attention_of(kind) == "sliding" else None

    def of_kind(self, kind: str) -> "ModelConfig":
        """The settings of the layers of this kind: those of the model with the sizes of the kind. Layers that are not
        gated_delta_net have 0 for the sizes of these, and dense layers have no experts."""
        own = next((vars(settings) for settings in self.kinds if settings.name == kind), dict[str, Any]())
        sizes = {name: size for name, size in own.items() if name not in ("name", "attention", "feed_forward") and size}
        if own.get("feed_forward") == "dense":
            sizes |= {name: DEFAULTS[name] for name in EXPERT_SETTINGS}
        if self.delta_value_heads and self.attention_of(kind) != "gated_delta_net":
            sizes |= dict.fromkeys(DELTA_SETTINGS, 0)
        elif self.delta_norm_placement:
            sizes |= dict(norm_placement=self.delta_norm_placement)
        return dataclasses.replace(self, **sizes) if sizes else self

    @property
    def layer_stacks(self) -> dict[tuple[str, ...], list[int]]:
        """The indices of the layers of each parameter stack, by its path in the parameter tree.

        ("layers",) and ("last_layers",) if all layers have equal shapes, otherwise ("layers", KIND) for each kind. The
        layers after the last whole group of layer_kinds are in last_layers, those of first_layer_kinds in first_layers.
        """
        has_equal_shapes = len({self.of_kind(kind) for kind in self.used_kinds}) == 1
        stacks: dict[tuple[str, ...], list[int]] = {}
        for layer, kind in enumerate(self.kinds_of_layers):
            in_group = layer - len(self.first_layer_kinds)
            stack = FIRST_LAYERS if in_group < 0 else LAYERS if in_group < self.num_group_layers else LAST_LAYERS
            path = (stack,) if has_equal_shapes else (stack, kind)
            stacks.setdefault(path, []).append(layer)
        return stacks


DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in dataclasses.fields(ModelConfig)}


def model_name(model: Mapping[str, Any]) -> str:
    """The name of a model in titles and messages: the hub id or last directory of its init_from, or else its preset.

    Args:
      model: the settings `preset` and `init_from`, among others: `vars(config.model)`, or a stored dictionary of it.
    """
    init_from = model.get("init_from", "")
    if not init_from or is_model_id(init_from):
        return init_from or model.get("preset", "")
    path = PurePath(init_from)
    cached = [part for part in path.parts if part.startswith("models--")]  # a snapshot in the cache of the hub
    if cached:
        return cached[-1].removeprefix("models--").replace("--", "/")
    is_checkpoint = path.parent.name == "checkpoints"
    return f"{path.parent.parent.name} step {path.name}" if is_checkpoint else path.name or init_from
