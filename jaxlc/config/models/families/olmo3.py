"""Olmo 3: groups of three sliding layers and a full one (transformers: models/olmo3)."""

import functools

from jaxlc.config.models.families.family import Family, read_layer_types, write_layer_types

OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    layer_kinds=(frozenset({"sliding", "full"}), frozenset({"full"})),
    read_kinds=functools.partial(read_layer_types, default=("sliding", "sliding", "sliding", "full")),
    write_kinds=write_layer_types,
    settings=dict(qk_norm="projection", norm_placement="post"),
    defaults=dict(num_key_value_heads=None, head_dim=None, sliding_window=4096, rope_theta=5e5, rms_norm_eps=1e-5),
    rope_by_layer_type=True,
    required_values=dict(attention_bias=(False,)),
)
