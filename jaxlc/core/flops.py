"""Model FLOPs and parameter counts of a decoder. All printed rates and utilizations use them.

Model FLOPs are those of the model's matrix products, independent of how the program computes them. They exclude
recomputation (hardware FLOPs include it), norms, RoPE, softmax and the optimizer.

Matrix products: a weight matrix with P entries costs 2 P FLOPs per token in the forward (a multiplication and an
addition) and 4 P in the backward (the gradients of input and weight), 6 P in total. The embedding is a lookup and costs
nothing. The output head is a matrix product, also where it is the transposed embedding. Of experts, P counts those that
a token is routed to.

Attention: a pair of a query and a key costs 2 H FLOPs for q . k and 2 H for the value in each of N heads, 4 N H in the
forward and 8 N H in the backward. The number of pairs in a sequence of T tokens:

    full     T^2            the convention of Megatron-LM and PaLM (2204.02311, appendix B): 12 L N H T per token
    causal   T (T + 1) / 2  the pairs that a causal mask leaves: half

A gated_delta_net layer has no pairs: each head multiplies its state [K, V] three times per token, 6 K V FLOPs in the
forward and 12 K V in the backward (`core/mixers`).

In sliding layers with a window of W < T tokens they are T W and T W - W (W - 1) / 2. A pair in a layer whose kind has
other heads counts as many pairs as it has FLOPs (`num_layers_by_kind`).

A packed sequence has fewer pairs: the sum of the causal counts of its documents (`document_pairs`). So the causal FLOPs
of packed sequences, and the utilization that is computed from them, are overestimates. State "causal", "full" or
"documents" with every figure.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from jaxlc.core.mixers import layer_matrices, num_vector_entries, state_flops
from jaxlc.core.mixers.layer_shape import LayerShape


class DecoderShape(Protocol):
    """The fields of a model that determine its counts; `jaxlc.config.ModelConfig` has them."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def used_kinds(self) -> Sequence[str]: ...
    def num_layers_of(self, kind: str) -> int: ...
    def of_kind(self, kind: str) -> LayerShape: ...
    def window_of(self, kind: str) -> int | None: ...
    @property
    def model_dim(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def tie_embeddings(self) -> bool: ...


def training_flops(
    model: DecoderShape, *, num_sequences: int, seq_len: int, attention: Literal["causal", "full"]
) -> float:
    """Model FLOPs of forward and backward of one optimizer step over `num_sequences` of `seq_len`, on all devices."""
    count = {"full": _all_pairs, "causal": causal_pairs}[attention]
    pairs = sum(layers * count(seq_len, model.window_of(kind)) for kind, layers in num_layers_by_kind(model).items())
    return num_sequences * step_flops(model, num_tokens=seq_len, num_pairs=pairs)


def step_flops(model: DecoderShape, *, num_tokens: int, num_pairs: float) -> float:
    """Model FLOPs of forward and backward.

    Args:
      num_pairs: pairs of a query and a key, summed over the layers.
    """
    flops = matmul_flops(model, num_tokens) + 12.0 * model.num_heads * model.head_dim * num_pairs
    return flops + 3.0 * num_tokens * _sum_over_layers(model, state_flops)


def matmul_flops(model: DecoderShape, num_tokens: int) -> float:
    """Model FLOPs of the products with weight matrices, forward and backward."""
    return 6.0 * num_active_matmul_params(model) * num_tokens


def document_pairs(model: DecoderShape, lengths: Sequence[int], prefix_lengths: Sequence[int] = ()) -> float:
    """Pairs of a packed sequence with documents of these lengths in tokens, summed over the layers.

    Args:
      prefix_lengths: tokens of the shared prefix that each document continues. Empty: none.
    """
    earlier = prefix_lengths if len(prefix_lengths) else [0] * len(lengths)
    return sum(
        layers * (causal_pairs(int(before + length), window) - causal_pairs(int(before), window))
        for window, layers in ((model.window_of(kind), layers) for kind, layers in num_layers_by_kind(model).items())
        for before, length in zip(earlier, lengths, strict=True)
    )


def num_layers_by_kind(model: DecoderShape) -> dict[str, float]:
    """Layers of each kind with attention, as the number of layers with the heads of the model whose attention has as
    many FLOPs."""
    shapes = {kind: model.of_kind(kind) for kind in model.used_kinds}
    width = model.num_heads * model.head_dim
    return {
        kind: model.num_layers_of(kind) * shape.num_heads * shape.head_dim / width
        for kind, shape in shapes.items()
        if shape.mixer == "attention"
    }


def causal_pairs(seq_len: int, window: int | None = None) -> int:
    """Pairs of a query and a key that a causal mask, or a window in tokens, leaves in one sequence."""
    reach = min(window or seq_len, seq_len)
    return seq_len * reach - reach * (reach - 1) // 2


def _all_pairs(seq_len: int, window: int | None) -> int:
    return seq_len * min(window or seq_len, seq_len)


def num_matmul_params(model: DecoderShape) -> int:
    """The number of entries of all weight matrices in matrix products: the layers and the output head."""
    return _sum_over_layers(model, _layer_matmul_params) + model.model_dim * model.vocab_size


def num_active_matmul_params(model: DecoderShape) -> int:
    """As `num_matmul_params`, of the matrices that multiply a token: of experts, those that the router chooses."""
    return _sum_over_layers(model, _layer_active_params) + model.model_dim * model.vocab_size


def num_params(model: DecoderShape) -> int:
    """The number of parameters, without the padding of the vocabulary."""
    embedding = 0 if model.tie_embeddings else model.vocab_size * model.model_dim  # tied: counted as the head
    vectors = _sum_over_layers(model, num_vector_entries) + model.model_dim
    return num_matmul_params(model) + embedding + vectors


def _sum_over_layers(model: DecoderShape, count: Callable[[LayerShape], int]) -> int:
    """The sum of `count` of all layers."""
    return sum(model.num_layers_of(kind) * count(model.of_kind(kind)) for kind in model.used_kinds)


def _layer_matmul_params(layer: LayerShape) -> int:
    return sum(matrix.size for matrix in layer_matrices(layer).values())


def _layer_active_params(layer: LayerShape) -> int:
    return sum(matrix.active_size for matrix in layer_matrices(layer).values())
