"""Old names of settings, which config files, flags and stored configs may have: one table. Imports
no jax.

To be removed in 2027-12.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxlc.config.values import SettingError

# Name in the section model -> path there.
RENAMED = {
    "delta_key_heads": "delta_net.key_heads",
    "delta_value_heads": "delta_net.value_heads",
    "delta_key_dim": "delta_net.key_dim",
    "delta_value_dim": "delta_net.value_dim",
    "delta_conv_taps": "delta_net.conv_taps",
    "delta_norm_placement": "delta_net.norm_placement",
    "delta_norm_epsilon": "delta_net.norm_epsilon",
    "delta_negative_eigenvalues": "delta_net.negative_eigenvalues",
    "sliding_rope_theta": "rope.sliding_theta",
    "sliding_rope_scaling": "rope.sliding_scaling",
    "rope_theta": "rope.theta",
    "rope_scaling": "rope.scaling",
    "rope_fraction": "rope.fraction",
    "rope_scaling_factor": "rope.factor",
    "rope_scaling_original_tokens": "rope.original_tokens",
    "rope_scaling_low_freq_factor": "rope.low_freq_factor",
    "rope_scaling_high_freq_factor": "rope.high_freq_factor",
    "rope_scaling_beta_fast": "rope.beta_fast",
    "rope_scaling_beta_slow": "rope.beta_slow",
    "rope_scaling_attention_factor": "rope.attention_factor",
    "rope_scaling_truncate": "rope.truncate",
    "rope_scaling_query_beta": "rope.query_beta",
    "rope_scaling_query_mscale": "rope.query_mscale",
    "rope_scaling_short_factors": "rope.short_factors",
    "rope_scaling_long_factors": "rope.long_factors",
    "num_heads": "attention.num_heads",
    "num_kv_heads": "attention.num_kv_heads",
    "head_dim": "attention.head_dim",
    "qk_norm": "attention.qk_norm",
    "qkv_bias": "attention.qkv_bias",
    "attention_out_bias": "attention.out_bias",
    "attention_sinks": "attention.sinks",
    "attention_gate": "attention.gate",
    "query_scale_dim": "attention.query_scale_dim",
    "attention_output_multiplier": "attention.output_multiplier",
    "window": "attention.window",
    "num_experts": "experts.num_experts",
    "experts_per_token": "experts.experts_per_token",
    "expert_ffn_dim": "experts.ffn_dim",
    "router": "experts.router",
    "renormalize_router": "experts.renormalize",
    "router_choice_bias": "experts.choice_bias",
    "router_groups": "experts.groups",
    "router_groups_per_token": "experts.groups_per_token",
    "router_scale": "experts.scale",
    "expert_bias": "experts.bias",
    "shared_ffn_dim": "experts.shared_ffn_dim",
    "shared_expert_gate": "experts.shared_gate",
}
_PREFIX = re.compile(r"(stages\.[^.]+\.)?model\.")


def new_path(path: str) -> str:
    """The path of a setting, where `path` has an old name of it; otherwise `path`."""
    prefix = _PREFIX.match(path)
    return prefix[0] + RENAMED.get(path[prefix.end() :], path[prefix.end() :]) if prefix else path


def renamed(part: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the part at the path `part`, with new names in place of old ones.

    Raises:
      SettingError: an old and a new name of one setting have different values.
    """
    result = dict(values)
    for name, value in values.items():
        section, _, setting = new_path(f"{part}.{name}").removeprefix(f"{part}.").rpartition(".")
        if not section:
            continue
        own = dict(result.get(section) or {})
        if value is not None:
            check_same(f"{part}.{name}", value, f"{part}.{section}.{setting}", own.get(setting))
            own[setting] = value
        del result[name]
        result[section] = own
    return result


def check_same(old: str, old_value: Any, new: str, new_value: Any) -> None:
    """Checks the values of an old and a new name of a setting, or None.

    Raises:
      SettingError: they differ.
    """
    if None not in (old_value, new_value) and old_value != new_value:
        raise SettingError(
            f"config.{old}={old_value} contradicts config.{new}={new_value}: {old} is the old name of {new}; remove it"
        )
