"""What describes a model family. Data only; imports no jax."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Tensor:
    """A tensor of a Hugging Face checkpoint and the parameter that it becomes.

    `nn.Linear` stores [out, in]; our parameters are [in, out], with one dimension for heads and one for head_dim. So a
    linear weight is transposed, and reshaped to the dimensions of the parameter.
    """

    name: str  # "{layer}" stands for the index of the layer
    param: str  # path of the parameter: "layers/attention/wq"; parameters under layers/ are stacked over the layers
    # Number of leading dimensions of the parameter, without that of the layers, that are the inputs of an nn.Linear. 0:
    # not a linear weight; stored with the dimensions of the parameter.
    num_inputs: int = 0


@dataclass(frozen=True, kw_only=True)
class Family:
    """A `model_type` of config.json that the decoder computes exactly."""

    model_type: str
    architecture: str  # entry of "architectures"
    qk_norm: Literal["none", "head", "projection"]  # as in ModelConfig
    tensors: tuple[Tensor, ...]
    # The values that transformers uses for fields that are absent; a needed field that is absent here is required.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Fields of this family that change the computation, and the only values that are supported.
    required_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Whether rope_parameters has an entry for each layer type. RoPE of sliding layers is not scaled then; its base is
    # rope_local_base_freq if `defaults` has that field, and otherwise rope_theta.
    rope_by_layer_type: bool = False
    irrelevant: frozenset[str] = frozenset()  # more fields that do not change the computation


def decoder_tensors(*, qk_norm: bool) -> tuple[Tensor, ...]:
    """The names that Llama introduced and most families use, in the order of the layers' computation."""
    prefix, norms = "model.layers.{layer}.", ()
    if qk_norm:
        norms = (
            Tensor(prefix + "self_attn.q_norm.weight", "layers/attention/q_norm/scale"),
            Tensor(prefix + "self_attn.k_norm.weight", "layers/attention/k_norm/scale"),
        )
    return (
        Tensor("model.embed_tokens.weight", "embedding"),
        Tensor(prefix + "input_layernorm.weight", "layers/attention_norm/scale"),
        Tensor(prefix + "self_attn.q_proj.weight", "layers/attention/wq", num_inputs=1),
        Tensor(prefix + "self_attn.k_proj.weight", "layers/attention/wk", num_inputs=1),
        Tensor(prefix + "self_attn.v_proj.weight", "layers/attention/wv", num_inputs=1),
        *norms,
        Tensor(prefix + "self_attn.o_proj.weight", "layers/attention/wo", num_inputs=2),
        Tensor(prefix + "post_attention_layernorm.weight", "layers/mlp_norm/scale"),
        Tensor(prefix + "mlp.gate_proj.weight", "layers/mlp/w_gate", num_inputs=1),
        Tensor(prefix + "mlp.up_proj.weight", "layers/mlp/w_up", num_inputs=1),
        Tensor(prefix + "mlp.down_proj.weight", "layers/mlp/w_down", num_inputs=1),
        Tensor("model.norm.weight", "final_norm/scale"),
        Tensor("lm_head.weight", "head", num_inputs=1),  # absent if the embeddings are tied
    )
