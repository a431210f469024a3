"""The types of the fields of config.json. Imports no jax."""

import typing
from collections.abc import Mapping
from typing import Any

from jaxlc.config.ranges import Above0, From1
from jaxlc.core.errors import UserError

Count = From1[int]
Positive = Above0[float]
_WORDS: dict[Any, str] = {
    Count: "an integer, at least 1",
    Positive: "a number greater than 0",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list[str]: "a list of strings",
    list[int]: "a list of integers",
    list[float]: "a list of numbers",
}
_FIELDS: dict[Any, tuple[str, ...]] = {
    Count: (
        *("vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "query_pre_attn_scalar", "full_attention_interval"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
        *("linear_key_head_dim", "linear_value_head_dim", "decoder_sparse_step"),
        *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
        *("shared_expert_intermediate_size", "n_routed_experts", "n_group", "topk_group"),
    ),
    Positive: ("rope_theta", "rope_local_base_freq"),
    int: (
        *("sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval"),
        *("n_shared_experts", "first_k_dense_replace"),
    ),
    float: (
        *("max_position_embeddings", "original_max_position_embeddings", "rms_norm_eps"),
        *("partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "routed_scaling_factor", "swiglu_alpha", "swiglu_limit"),
    ),
    bool: (
        *("tie_word_embeddings", "truncate", "attention_bias", "attn_output_gate", "use_qk_norm"),
        *("norm_topk_prob", "output_router_logits"),
    ),
    str: ("model_type", "rope_type", "type"),
    dict: (
        *("rope_scaling", "rope_parameters", "full_attention", "sliding_attention"),
        *("quantization_config", "compression_config"),
    ),
    list[str]: ("architectures", "layer_types"),
    list[int]: ("mlp_only_layers", "no_rope_layers"),
    list[float]: ("short_factor", "long_factor"),
}
_TYPES = {name: hint for hint, names in _FIELDS.items() for name in names}


def typed_fields(fields: Mapping[str, Any], where: str, path: str = "") -> dict[str, Any]:
    """`fields`, with null for a part that the model does not have: programs also write false, 0, "", [] or {}. Such a
    value of true or false is false, and other numbers that may be 0 are unchanged.

    Args:
      fields: the content of config.json, or an object in it.
      where: the path of the file.
      path: of the object in the file, such as "rope_scaling.".
    Raises:
      UserError: a field that is read has another type.
    """
    typed = dict(fields)
    for name, value in fields.items():
        hint = _TYPES.get(name, object)
        if not value and hint not in (object, float):
            typed[name] = False if hint is bool else None
        elif value is not None and not _has_type(value, hint):
            raise UserError(f"{where} has {path}{name}={value!r}: expected {_WORDS[hint]}")
        elif isinstance(value, dict):
            typed[name] = typed_fields(value, where, f"{path}{name}.")
    return typed


def _has_type(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(_has_type(item, typing.get_args(hint)[0]) for item in value)
    if isinstance(value, bool):  # a subclass of int
        return hint in (bool, object)
    if hint in (Count, Positive):
        return isinstance(value, int if hint is Count else (int, float)) and value > 0
    return isinstance(value, (int, float) if hint is float else hint)
