"""The types of the fields of config.json. Imports no jax."""

import typing
from collections.abc import Mapping
from typing import Any

from jaxlc.config.ranges import From1
from jaxlc.core.errors import UserError

Count = From1[int]
_WORDS: dict[Any, str] = {
    Count: "an integer, at least 1",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list[str]: "a list of strings",
    list[int]: "a list of integers",
    list[float]: "a list of numbers",
}
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "head_dim"), Count),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "query_pre_attn_scalar"), Count),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"), Count),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "full_attention_interval"), Count),
    **dict.fromkeys(("sliding_window", "sliding_window_pattern", "_sliding_window_pattern"), int),
    "no_rope_layer_interval": int,
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"), Count),
    **dict.fromkeys(("shared_expert_intermediate_size", "n_routed_experts", "n_group", "topk_group"), Count),
    **dict.fromkeys(("n_shared_experts", "first_k_dense_replace"), int),
    "use_qk_norm": bool,
    "routed_scaling_factor": float,
    **dict.fromkeys(("swiglu_alpha", "swiglu_limit"), float),
    "quantization_config": dict,
    **dict.fromkeys(("norm_topk_prob", "output_router_logits"), bool),
    "decoder_sparse_step": Count,
    "mlp_only_layers": list[int],
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings", "rms_norm_eps"), float),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "partial_rotary_factor", "factor"), float),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"), float),
    **dict.fromkeys(("mscale", "mscale_all_dim"), float),
    **dict.fromkeys(("tie_word_embeddings", "truncate", "attention_bias", "attn_output_gate"), bool),
    **dict.fromkeys(("model_type", "rope_type", "type"), str),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "full_attention", "sliding_attention"), dict),
    **dict.fromkeys(("architectures", "layer_types"), list[str]),
    **dict.fromkeys(("short_factor", "long_factor"), list[float]),
    "no_rope_layers": list[int],
}


def check_types(fields: Mapping[str, Any], where: str, path: str = "") -> None:
    """Checks the types of the fields that are read; null is absent.

    Args:
      fields: the content of config.json, or an object in it.
      where: the path of the file.
      path: of the object in the file, such as "rope_scaling.".
    Raises:
      UserError: a field has another type.
    """
    for name, value in fields.items():
        hint = _TYPES.get(name)
        if value is None or hint is None:
            continue
        if not _has_type(value, hint):
            raise UserError(f"{where} has {path}{name}={value!r}: expected {_WORDS[hint]}")
        if isinstance(value, dict):
            check_types(value, where, f"{path}{name}.")


def _has_type(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(_has_type(item, typing.get_args(hint)[0]) for item in value)
    if isinstance(value, bool):  # a subclass of int
        return hint is bool
    if hint is Count:
        return isinstance(value, int) and value >= 1
    return isinstance(value, (int, float) if hint is float else hint)
