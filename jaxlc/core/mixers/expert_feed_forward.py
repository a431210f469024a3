"""A mixture of experts: a router chooses some of E gated feed-forward blocks for each token. `jaxlc.models.experts` has
the computation.

Families store experts in two ways: a tensor for each expert, or one for all. Both are tables of names.
"""

from jaxlc.core.mixers.layer_shape import LayerShape, Matrix, MixerTensor

# transformers: the released files of models/qwen3_moe.
TENSORS = (
    MixerTensor("router", "mlp.gate.weight", 1),
    MixerTensor("expert_gate", "mlp.experts.{expert}.gate_proj.weight", 1),
    MixerTensor("expert_up", "mlp.experts.{expert}.up_proj.weight", 1),
    MixerTensor("expert_down", "mlp.experts.{expert}.down_proj.weight", 1),
)


def matrices(layer: LayerShape) -> dict[str, Matrix]:
    """router [D, E]; for each expert expert_gate and expert_up [D, F], expert_down [F, D]."""
    model, ffn = dict(model=layer.model_dim), dict(ffn=layer.expert_ffn_dim)
    counts = layer.num_experts, layer.experts_per_token
    return dict(
        router=Matrix(model, dict(experts=layer.num_experts)),
        expert_gate=Matrix(model, ffn, *counts),
        expert_up=Matrix(model, ffn, *counts),
        expert_down=Matrix(ffn, model, *counts),
    )


def num_vector_entries(layer: LayerShape) -> int:
    """Biases of the router and of the experts."""
    entries = 1 + 2 * layer.expert_ffn_dim + layer.model_dim
    return layer.expert_bias * layer.num_experts * entries
