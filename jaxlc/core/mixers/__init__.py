"""What mixes the tokens of a layer: a module for each mixer with its parameters, its cost and its Hugging Face names.

A module has

    matrices(layer)            the weight matrices by name
    num_vector_entries(layer)  entries of all other parameters: norms, biases, gates, convolutions
    state_flops(layer)         model FLOPs per token of the forward pass, besides products with weights and attention
    TENSORS                    the Hugging Face tensors of the parameters, in the order of the computation

FEED_FORWARDS has a module with `matrices` and `num_vector_entries` for each feed-forward block. `jaxlc.models` has the
computation.
"""

from collections.abc import Mapping
from types import ModuleType

from jaxlc.core.mixers import attention_mixer, delta_net_mixer, dense_feed_forward, expert_feed_forward
from jaxlc.core.mixers.layer_shape import LayerShape, Matrix

MIXERS: Mapping[str, ModuleType] = {"attention": attention_mixer, "gated_delta_net": delta_net_mixer}
FEED_FORWARDS: Mapping[str, ModuleType] = {"dense": dense_feed_forward, "experts": expert_feed_forward}


def mixer_matrices(layer: LayerShape) -> dict[str, Matrix]:
    """The weight matrices of the mixer of a layer, by name."""
    return MIXERS[layer.mixer].matrices(layer)


def layer_matrices(layer: LayerShape) -> dict[str, Matrix]:
    """All weight matrices of a layer, by their paths within the layer."""
    mixer = {f"attention/{name}": matrix for name, matrix in mixer_matrices(layer).items()}
    feed_forward = FEED_FORWARDS[layer.feed_forward].matrices(layer)
    return mixer | {f"mlp/{name}": matrix for name, matrix in feed_forward.items()}


def param_names(layer: LayerShape) -> set[str]:
    """The names of all parameters that a layer may have, without adapters."""
    tensors = (*MIXERS[layer.mixer].TENSORS, *FEED_FORWARDS[layer.feed_forward].TENSORS)
    norms = {f"{block}{place}_norm/scale" for block in ("attention", "mlp") for place in ("", "_post")}
    vectors = {f"attention/{tensor.param}" for tensor in tensors}
    return norms | vectors | layer_matrices(layer).keys()


def num_vector_entries(layer: LayerShape) -> int:
    """Entries of all parameters of a layer that are not in `layer_matrices`."""
    num_norms = 4 if layer.norm_placement == "pre_and_post" else 2
    blocks = MIXERS[layer.mixer], FEED_FORWARDS[layer.feed_forward]
    return num_norms * layer.model_dim + sum(block.num_vector_entries(layer) for block in blocks)


def state_flops(layer: LayerShape) -> int:
    """Model FLOPs per token of the forward pass of a recurrence; 0: the layer has none."""
    return MIXERS[layer.mixer].state_flops(layer)
