"""Qwen 3.5, dense text models whose layers all have gated attention (transformers: models/qwen3_5).

Published models also have layers of linear attention, which are not supported.
"""

import functools

from jaxlc.config.models.families.family import Family, read_layer_types, write_layer_types

QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    read_kinds=functools.partial(read_layer_types, default=(*("linear_attention",) * 3, "full")),
    write_kinds=write_layer_types,
    settings=dict(qk_norm="head", zero_centered_norm=True, attention_gate=True),
    fields={"attention_bias": "qkv_bias"},
    defaults=dict(num_key_value_heads=4, head_dim=256, attention_bias=False, partial_rotary_factor=0.25),
    irrelevant=frozenset(
        {
            *("full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
            *("linear_num_key_heads", "linear_num_value_heads"),  # without effect: no layer has linear attention
            *("mrope_section", "mrope_interleaved"),  # equal for all text: its positions have one dimension
        }
    ),
)
