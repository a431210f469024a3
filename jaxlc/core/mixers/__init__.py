"""What mixes the tokens of a layer: a module for each mixer with its parameters, its cost and its Hugging Face names.

A module has

    matrices(layer)            the weight matrices by name
    num_vector_entries(layer)  entries of all other parameters: norms, biases, gates, convolutions
    state_flops(layer)         model FLOPs per token of the forward pass, besides products with weights and attention
    TENSORS                    the Hugging Face tensors of the parameters, in the order of the computation

`jaxlc.models` has the computation.
"""

from collections.abc import Mapping
from types import ModuleType

from jaxlc.core.mixers import attention_mixer, delta_net_mixer
from jaxlc.core.mixers.layer_shape import LayerShape, Matrix

MIXERS: Mapping[str, ModuleType] = {"attention": attention_mixer, "gated_delta_net": delta_net_mixer}


def mixer_matrices(layer: LayerShape) -> dict[str, Matrix]:
    """The weight matrices of the mixer of a layer, by name."""
    return MIXERS[layer.mixer].matrices(layer)


def layer_matrices(layer: LayerShape) -> dict[str, Matrix]:
    """All weight matrices of a layer, by their paths within the layer."""
    mixer = {f"attention/{name}": matrix for name, matrix in mixer_matrices(layer).items()}
    model, ffn = dict(model=layer.model_dim), dict(ffn=layer.ffn_dim)
    mlp = dict(w_gate=Matrix(model, ffn), w_up=Matrix(model, ffn), w_down=Matrix(ffn, model))
    return mixer | {f"mlp/{name}": matrix for name, matrix in mlp.items()}


def num_vector_entries(layer: LayerShape) -> int:
    """Entries of all parameters of a layer that are not in `layer_matrices`."""
    num_norms = 4 if layer.norm_placement == "pre_and_post" else 2
    return num_norms * layer.model_dim + MIXERS[layer.mixer].num_vector_entries(layer)


def state_flops(layer: LayerShape) -> int:
    """Model FLOPs per token of the forward pass of a recurrence; 0: the layer has none."""
    return MIXERS[layer.mixer].state_flops(layer)
