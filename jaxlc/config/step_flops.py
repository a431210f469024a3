"""Model FLOPs of a training step. All printed rates, utilizations and estimates use them. Imports no jax.

Model FLOPs are those of the model's matrix products, independent of how the program computes them. They exclude
recomputation (hardware FLOPs include it), the forward pass of a reference model, norms, RoPE, softmax and the
optimizer.

Products with weights: a matrix with P entries costs 2 P FLOPs per token in the forward pass (a multiplication and an
addition), 2 P for the gradient of its input, and 2 P for its own gradient, which a frozen matrix does not have. The
gradient of the input is not needed below the lowest trained parameter: with a trained output head alone, the layers
have a forward pass only. The matrices of adapters (LoRA) count like others. Of experts and their adapters, P counts
those that a token is routed to. The embedding is a lookup and costs nothing. The output head is a product, also where
it is the transposed embedding.

Attention: a pair of a query and a key (`jaxlc.core.flops`) costs 2 H FLOPs for q . k and 2 H for the value in each of N
heads, 4 N H in the forward and 8 N H in the backward.

Each head of a gated_delta_net layer multiplies its state [K, V] three times per token, 6 K V FLOPs in the forward and
12 K V in the backward (`core/mixers`).
"""

from typing import NamedTuple

from jaxlc.config.models.model_schema import ModelConfig
from jaxlc.config.schema import LoraConfig, TrainConfig
from jaxlc.config.trained_params import is_trained, matrix_sizes, num_adapter_params, trains_layers
from jaxlc.core.flops import sum_over_layers
from jaxlc.core.mixers import state_flops


class StepFlops(NamedTuple):
    """Model FLOPs of one optimizer step, over all devices."""

    products: float  # with weight matrices, those of adapters included
    mixing: float  # attention between pairs of tokens, and recurrences

    @property
    def total(self) -> float:
        return self.products + self.mixing


class ProductEntries(NamedTuple):
    """Entries of the matrices that a token is multiplied by, in each of the three products."""

    forward: int
    input_gradients: int
    weight_gradients: int


def step_flops(
    model: ModelConfig, lora: LoraConfig, train: TrainConfig, *, num_tokens: int, num_pairs: float
) -> StepFlops:
    """Model FLOPs of forward and backward.

    Args:
      num_tokens: of the step, padding included.
      num_pairs: pairs of a query and a key, summed over the sequences of the step and over the layers.
    """
    mixing = 4.0 * model.num_heads * model.head_dim * num_pairs + num_tokens * sum_over_layers(model, state_flops)
    num_passes = 3 if trains_layers(model, lora, train) else 1
    return StepFlops(2.0 * num_tokens * sum(product_entries(model, lora, train)), num_passes * mixing)


def product_entries(model: ModelConfig, lora: LoraConfig, train: TrainConfig) -> ProductEntries:
    """The entries that determine the FLOPs of products with weights."""
    sizes = matrix_sizes(model, active=True)
    if not model.tie_embeddings:
        del sizes["embedding"]
    num_adapters = num_adapter_params(model, lora, active=True)
    forward = sum(sizes.values()) + num_adapters
    weight_gradients = sum(size for name, size in sizes.items() if is_trained(name, lora, train)) + num_adapters
    if trains_layers(model, lora, train):
        input_gradients = forward
    else:
        head = model.model_dim * model.vocab_size
        input_gradients = head if is_trained("final_norm/scale", lora, train) else 0
    return ProductEntries(forward, input_gradients, weight_gradients)
