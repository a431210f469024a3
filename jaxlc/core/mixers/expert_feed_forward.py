"""A mixture of experts: a router chooses some of E gated feed-forward blocks for each token; a shared expert computes
all tokens. `jaxlc.models.kinds.experts` has the computation.

Families store experts in three ways, which are tables of names: a tensor for each expert; one for all, whose gate and
up are rows; or where they are columns in turn.

The rows of each expert are padded to whole blocks. At most (rows + experts (m - 1)) / m blocks of m rows are needed,
whatever the routing.
"""

import math

from jaxlc.core.mixers.layer_shape import LayerShape, Matrix, MixerTensor

# A tensor for each expert: transformers, models/qwen3_moe.
TENSORS = (
    MixerTensor("router", "mlp.gate.weight", 1),
    MixerTensor("expert_gate", "mlp.experts.{expert}.gate_proj.weight", 1),
    MixerTensor("expert_up", "mlp.experts.{expert}.up_proj.weight", 1),
    MixerTensor("expert_down", "mlp.experts.{expert}.down_proj.weight", 1),
)
# A tensor for all experts, an nn.Linear of each; its first rows are gate: transformers, models/qwen3_5_moe.
STACKED_LINEAR_TENSORS = (
    MixerTensor("router", "mlp.gate.weight", 1),
    MixerTensor("expert_gate", "mlp.experts.gate_up_proj", 1, is_stacked=True),
    MixerTensor("expert_up", "mlp.experts.gate_up_proj", 1, is_stacked=True),
    MixerTensor("expert_down", "mlp.experts.down_proj", 1, is_stacked=True),
)
# The bias of the choice, which files have in float32: transformers, models/glm4_moe.
CHOICE_BIAS = MixerTensor("choice_bias", "mlp.gate.e_score_correction_bias", is_float32=True)


def shared_tensors(module: str) -> tuple[MixerTensor, ...]:
    """The shared expert of this name and its gate: transformers, models/qwen3_5_moe and glm4_moe."""
    parts = (MixerTensor(f"shared/w_{x}", f"mlp.{module}.{x}_proj.weight", 1) for x in ("gate", "up", "down"))
    return (*parts, MixerTensor("shared_gate", f"mlp.{module}_gate.weight", 1))


# A tensor for all experts, whose columns are those of gate and up in turn: transformers, models/gpt_oss.
STACKED_TENSORS = (
    MixerTensor("router", "mlp.router.weight", 1),
    MixerTensor("router_bias", "mlp.router.bias"),
    MixerTensor("expert_gate", "mlp.experts.gate_up_proj", None, interleaved=0),
    MixerTensor("expert_up", "mlp.experts.gate_up_proj", None, interleaved=1),
    MixerTensor("gate_bias", "mlp.experts.gate_up_proj_bias", None, interleaved=0),
    MixerTensor("up_bias", "mlp.experts.gate_up_proj_bias", None, interleaved=1),
    MixerTensor("expert_down", "mlp.experts.down_proj", None),
    MixerTensor("down_bias", "mlp.experts.down_proj_bias", None),
)

# By config.runtime.expert_kernel. mosaic copies no weights for a block.
_MAX_BLOCK_ROWS = dict(blocks=512, mosaic=64)


def block_rows(num_rows: int, num_experts: int, kernel: str = "blocks") -> int:
    """Rows of a block: a power of two, so that padding is about an eighth of the rows if experts have equal loads.

    Args:
      kernel: config.runtime.expert_kernel.
    """
    mean = num_rows / num_experts
    return min(_MAX_BLOCK_ROWS[kernel], 2 ** max(0, int(math.log2(max(1.0, mean / 4)))))


def num_blocks(num_rows: int, num_experts: int, kernel: str = "blocks") -> int:
    """Blocks that are enough for every routing of `num_rows` rows."""
    rows = block_rows(num_rows, num_experts, kernel)
    return (num_rows + min(num_experts, num_rows) * (rows - 1)) // rows


def matrices(layer: LayerShape) -> dict[str, Matrix]:
    """router [D, E]; for each expert expert_gate and expert_up [D, F], expert_down [F, D]; the shared expert, and its
    gate [D, 1]."""
    model, ffn, shared = dict(model=layer.model_dim), dict(ffn=layer.expert_ffn_dim), dict(ffn=layer.shared_ffn_dim)
    counts = layer.num_experts, layer.experts_per_token
    matrices = dict(
        router=Matrix(model, dict(experts=layer.num_experts)),
        expert_gate=Matrix(model, ffn, *counts),
        expert_up=Matrix(model, ffn, *counts),
        expert_down=Matrix(ffn, model, *counts),
    )
    if layer.shared_ffn_dim:
        sizes = {"w_gate": (model, shared), "w_up": (model, shared), "w_down": (shared, model)}
        matrices |= {f"shared/{name}": Matrix(*dims) for name, dims in sizes.items()}
    return matrices | (dict(shared_gate=Matrix(model, dict(experts=1))) if layer.shared_expert_gate else {})


def num_vector_entries(layer: LayerShape) -> int:
    """Biases of the router, of its choice and of the experts."""
    entries = 1 + 2 * layer.expert_ffn_dim + layer.model_dim
    return layer.num_experts * (layer.router_choice_bias + layer.expert_bias * entries)
