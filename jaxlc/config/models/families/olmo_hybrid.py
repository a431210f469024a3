"""Olmo Hybrid: groups of three gated_delta_net layers and one with attention (transformers: models/olmo_hybrid).

The published models have no RoPE: the base, in rope_parameters or not, is null. Without this field, it is 10000.
"""

from typing import Any

from jaxlc.config.models.families.family import Family, Fields, read_layer_types
from jaxlc.config.models.model_schema import ModelConfig

_LINEAR = "gated_delta_net"


def _read_kinds(config: Fields) -> list[str]:
    """Without layer_types, every fourth layer has attention, or the last one of fewer layers."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    full = "nope" if parameters.get("rope_theta", config.get("rope_theta", 0)) is None else "full"
    kinds = read_layer_types(config, default=(_LINEAR, _LINEAR, _LINEAR, "full"))
    if not config.get("layer_types") and "full" not in kinds:
        kinds[-1] = "full"
    return [full if kind == "full" else kind for kind in kinds]


def _write_kinds(model: ModelConfig) -> dict[str, Any]:
    types = ["linear_attention" if kind == _LINEAR else "full_attention" for kind in model.kinds_of_layers]
    return dict(layer_types=types)


OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    layer_kinds=(frozenset({_LINEAR, "nope"}), frozenset({_LINEAR, "full"})),
    read_kinds=_read_kinds,
    write_kinds=_write_kinds,
    settings={
        "qk_norm": "projection",
        "norm_placement": "post",
        "delta_net.norm_placement": "pre",
        "delta_net.norm_epsilon": 1e-5,  # a constant of the model, which rms_norm_eps does not change
        "delta_net.negative_eigenvalues": True,
    },
    fields={
        "linear_num_key_heads": "delta_net.key_heads",
        "linear_num_value_heads": "delta_net.value_heads",
        "linear_key_head_dim": "delta_net.key_dim",
        "linear_value_head_dim": "delta_net.value_dim",
        "linear_conv_kernel_dim": "delta_net.conv_taps",
        "linear_allow_neg_eigval": "delta_net.negative_eigenvalues",
    },
    defaults=dict(
        num_key_value_heads=None,
        head_dim=None,
        linear_num_key_heads=None,
        linear_num_value_heads=None,
        linear_key_head_dim=None,
        linear_value_head_dim=None,
        linear_conv_kernel_dim=4,
        linear_allow_neg_eigval=True,
    ),
    tensor_names={
        _LINEAR: {
            **{f"w{x}": f"linear_attn.{x}_proj.weight" for x in "qkvba"},
            "wz": "linear_attn.g_proj.weight",
            "out_norm/scale": "linear_attn.o_norm.weight",
            "wo": "linear_attn.o_proj.weight",
        }
    },
    joined_tensors={  # save_pretrained writes three equal parts of the convolution, whatever the sizes of q, k and v
        "input_layernorm.weight": ("attention_layer_norm.weight",),
        "post_attention_layernorm.weight": ("feedforward_layer_norm.weight",),
        "linear_attn.conv1d.weight": tuple(f"linear_attn.{x}_conv1d.weight" for x in "qkv"),
    },
    required_values=dict(attention_bias=(False,)),
    irrelevant=frozenset(  # of initial values
        f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")
    ),
)
