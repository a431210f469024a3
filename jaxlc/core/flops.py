"""Pairs of queries and keys, and parameter counts of a decoder. `jaxlc.config.step_flops` computes FLOPs from them.

The number of pairs in a sequence of T tokens:

    full     T^2            the convention of Megatron-LM and PaLM (2204.02311, appendix B): 12 L N H T per token
    causal   T (T + 1) / 2  the pairs that a causal mask leaves: half

In sliding layers with a window of W < T tokens they are T W and T W - W (W - 1) / 2. A pair in a layer whose kind has
other heads counts as many pairs as it has FLOPs (`num_layers_by_kind`). A gated_delta_net layer has no pairs.

A packed sequence has fewer pairs: the sum of the causal counts of its documents (`document_pairs`). So the causal FLOPs
of packed sequences, and the utilization that is computed from them, are overestimates. State "causal", "full" or
"documents" with every figure.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxlc.core.mixers import layer_matrices, num_vector_entries
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


def full_pairs(model: DecoderShape, seq_len: int) -> float:
    """Pairs of one sequence without a causal mask, but with windows, summed over the layers."""
    layers = num_layers_by_kind(model).items()
    return seq_len * sum(number * min(model.window_of(kind) or seq_len, seq_len) for kind, number in layers)


def num_matmul_params(model: DecoderShape) -> int:
    """The number of entries of all weight matrices in matrix products: the layers and the output head."""
    return sum_over_layers(model, _layer_matmul_params) + model.model_dim * model.vocab_size


def num_params(model: DecoderShape) -> int:
    """The number of parameters, without the padding of the vocabulary."""
    embedding = 0 if model.tie_embeddings else model.vocab_size * model.model_dim  # tied: counted as the head
    vectors = sum_over_layers(model, num_vector_entries) + model.model_dim
    return num_matmul_params(model) + embedding + vectors


def sum_over_layers(model: DecoderShape, count: Callable[[LayerShape], int]) -> int:
    """The sum of `count` of all layers."""
    return sum(model.num_layers_of(kind) * count(model.of_kind(kind)) for kind in model.used_kinds)


def _layer_matmul_params(layer: LayerShape) -> int:
    return sum(matrix.size for matrix in layer_matrices(layer).values())
