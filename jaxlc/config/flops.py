"""Model FLOPs of a training step, pairs of queries and keys, and parameter counts. All printed
rates, utilizations and estimates use them.

Model FLOPs are those of the model's matrix products, independent of how the program computes them.
They exclude recomputation (hardware FLOPs include it), the forward pass of a reference model,
norms, RoPE, softmax and the optimizer.

Products with weights: a matrix with P entries costs 2 P FLOPs per token in the forward pass (a
multiplication and an addition), 2 P for the gradient of its input, and 2 P for its own gradient,
which a frozen matrix does not have. The gradient of the input is not needed below the lowest
trained parameter: with a trained output head alone, the layers have a forward pass only. The
matrices of adapters (LoRA) count like others. Of experts and their adapters, P counts those that a
token is routed to. The embedding is a lookup and costs nothing. The output head is a product, also
where it is the transposed embedding.

Attention: a pair of a query and a key costs 2 H FLOPs for q . k and 2 H for the value in each of N
heads, 4 N H in the forward and 8 N H in the backward.

The kinds of layers give the FLOPs of a pair and of a token (`config.kinds.contract.MixingFlops`),
in the backward twice those in the forward.

The number of pairs in a sequence of T tokens:

    full     T^2            the convention of Megatron-LM and PaLM (2204.02311, appendix B): 12 L N H T per token
    causal   T (T + 1) / 2  the pairs that a causal mask leaves: half

In sliding layers with a window of W < T tokens they are T W and T W - W (W - 1) / 2. A pair in a
layer whose kind has other heads counts as many pairs as it has FLOPs (`num_layers_by_kind`).

A packed sequence has fewer pairs: the sum of the causal counts of its documents (`document_pairs`).
So the causal FLOPs of packed sequences, and the utilization that is computed from them, are
overestimates. State "causal", "full" or "documents" with every figure.

Which parameters are trained, and how many, from the config alone, and the chunk of the loss that
fits beside them. Imports no jax.
"""

import fnmatch
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxlc.config.kinds import (
    branches_of,
    layer_matrices,
    mixing_flops,
    norms_of,
    param_names,
    projection_paths,
)
from jaxlc.config.kinds.contract import Matrix
from jaxlc.config.models.families import FAMILIES
from jaxlc.config.models.model_schema import LayerConfig, ModelConfig
from jaxlc.config.schema import LoraConfig, PrecisionConfig, RunConfig, TrainConfig
from jaxlc.core.hardware import Device

# Bytes per entry of frozen matrices. nf4 has a byte for 64 entries, and 4 for 256 of these; mxfp4 a byte for 32
# entries. Matrices that are not quantized are bf16 there.
_QUANTIZED_BYTES = {"nf4": 0.5 + 1 / 64 + 4 / 64 / 256, "mxfp4": 0.5 + 1 / 32}
FROZEN_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "nf4": 2, "mxfp4": 2}


def is_trained(name: str, lora: LoraConfig, train: TrainConfig) -> bool:
    """Whether train.trainable and train.frozen select this parameter of the model for training.

    Args:
      name: such as layers/attention/wq, of a parameter that is not an adapter.
    """
    is_selected = _matches(name, train.trainable) if train.trainable else not lora.rank
    return is_selected and not _matches(name, train.frozen)


def trains_layers(model: ModelConfig, lora: LoraConfig, train: TrainConfig) -> bool:
    """Whether the embedding or a parameter of the layers is trained, so that gradients reach the
    layers.
    """
    names = {"embedding"}
    for (_, *kind), layers in model.layer_stacks.items():
        layer = model.layer_config(model.kinds_of_layers[layers[0]])
        names |= {"/".join(("layers", *kind, name)) for name in param_names(layer)}
    return bool(lora.rank) or any(is_trained(name, lora, train) for name in names)


def num_adapter_params(model: ModelConfig, lora: LoraConfig, *, active: bool = False) -> int:
    """The number of entries of all adapters; with `active`, of those that multiply a token."""
    known = projection_paths()
    paths = {path for name in lora.projections for path in known[name]}
    return lora.rank * sum_over_layers(
        model,
        lambda layer: sum(
            matrix.low_rank_size(active=active)
            for path, matrix in layer_matrices(layer).items()
            if path in paths
        ),
    )


def num_frozen_params(model: ModelConfig, lora: LoraConfig, train: TrainConfig) -> int:
    """The number of entries of the frozen matrices; norms and biases, a few kilobytes, are not
    counted.
    """
    sizes = matrix_sizes(model, active=False)
    return sum(size for name, size in sizes.items() if not is_trained(name, lora, train))


def matrix_sizes(model: ModelConfig, *, active: bool) -> dict[str, int]:
    """Entries of each matrix, of all layers together, by the names in the parameter tree; with
    `active`, those that multiply a token."""
    vocabulary = ("embedding",) if model.tie_embeddings else ("embedding", "head")
    sizes = Counter(dict.fromkeys(vocabulary, model.vocab_size * model.model_dim))
    for _, name, num_layers, matrix in _stacked_matrices(model):
        sizes[name] += num_layers * (matrix.active_size if active else matrix.size)
    return dict(sizes)


def _stacked_matrices(model: ModelConfig) -> Iterator[tuple[str, str, int, Matrix]]:
    """The matrices of all stacks of layers: their paths in the parameter tree, such as
    layers_2/attention/wq; their names, in which all stacks are layers; layers; and sizes.
    """
    for (stack, *kind), layers in model.layer_stacks.items():
        layer = model.layer_config(model.kinds_of_layers[layers[0]])
        for name, matrix in layer_matrices(layer).items():
            own = "/".join((*kind, name))
            yield f"{stack}/{own}", f"layers/{own}", len(layers), matrix


class QuantizedMatrix(NamedTuple):
    """A frozen matrix of layers that is stored in 4 bits."""

    matrix: Matrix
    format: str  # "nf4" or "mxfp4": `models.quantized`
    num_layers: int

    @property
    def num_dims(self) -> tuple[int, int]:
        """Of the inputs and of the outputs."""
        return len(self.matrix.inputs), len(self.matrix.outputs)


def quantized_matrices(model: ModelConfig, config: RunConfig) -> dict[str, QuantizedMatrix]:
    """The frozen matrices that precision.frozen quantizes, by their paths in the parameter tree, such
    as layers_2/attention/wq. nf4: the matrices of layers, without routers. mxfp4: the experts of a
    family that has them in MXFP4, which nf4 does not change.
    """
    frozen = config.precision.frozen
    found = dict[str, QuantizedMatrix]()
    if frozen not in _QUANTIZED_BYTES:
        return {}
    has_mxfp4 = any(
        family.quantization == "mxfp4" and family.settings.items() <= model.by_path.items()
        for family in FAMILIES.values()
    )
    for path, name, num_layers, matrix in _stacked_matrices(model):
        is_frozen = not is_trained(name, config.lora, config.train)
        form = "mxfp4" if has_mxfp4 and matrix.num_experts > 1 else "nf4"
        if "experts" not in matrix.outputs and is_frozen and frozen in ("nf4", form):
            found[path] = QuantizedMatrix(matrix, form, num_layers)
    return found


def frozen_bytes(model: ModelConfig, config: RunConfig) -> float:
    """The bytes of the frozen matrices."""
    num_bytes = FROZEN_BYTES[config.precision.frozen]
    saved = sum(
        (num_bytes - _QUANTIZED_BYTES[form]) * num_layers * matrix.size
        for matrix, form, num_layers in quantized_matrices(model, config).values()
    )
    return num_bytes * num_frozen_params(model, config.lora, config.train) - saved


# beyond 4096 the traffic is below a quarter of the products' time
_SMALLEST_CHUNK, *_LARGER_CHUNKS = 1024, 2048, 4096
_FREE_MEMORY_FRACTION = 0.04  # for the float32 logits of a chunk, the largest of its arrays


def loss_chunk_tokens(model: ModelConfig, config: RunConfig, device: Device | None) -> int:
    """Tokens per device whose logits are computed at once: config.memory.loss_chunk_tokens, or
    chosen if that is 0.

    Runs, plans and searches call this function, so they agree. The choice is the largest of 1024,
    2048 and 4096 whose logits take at most 4% of the device memory without the state and the
    gradients. It ignores activations, whose size is known only after compilation.

    Args:
      device: None, as for a CPU: 1024.
    """
    memory, mesh = config.memory, config.mesh
    if memory.loss_chunk_tokens or device is None:
        return memory.loss_chunk_tokens or _SMALLEST_CHUNK
    num_trained, frozen = _trained_and_frozen(model, config.lora, config.train, config.precision)
    is_on_device = memory.parameters == "device"
    # float32 weights and gradients, and the two moments
    state_bytes = 8 * num_trained * (is_on_device + (memory.optimizer == "device"))
    state_bytes += is_on_device * frozen
    free_bytes = device.memory_bytes - state_bytes / (mesh.fsdp * mesh.context * mesh.tensor)
    bytes_per_token = 4 * model.vocab_size / mesh.tensor
    most_tokens = _FREE_MEMORY_FRACTION * free_bytes / bytes_per_token
    return max((x for x in _LARGER_CHUNKS if x <= most_tokens), default=_SMALLEST_CHUNK)


@functools.lru_cache(maxsize=64)  # a search asks for thousands of candidates
def _trained_and_frozen(
    model: ModelConfig, lora: LoraConfig, train: TrainConfig, precision: PrecisionConfig
) -> tuple[int, float]:
    """The number of trained parameters, adapters included, and the bytes of the frozen ones."""
    trained = num_params(model) - num_frozen_params(model, lora, train)
    config = RunConfig(lora=lora, train=train, precision=precision)
    return trained + num_adapter_params(model, lora), frozen_bytes(model, config)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


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
    per_token = sum_over_layers(model, lambda layer: mixing_flops(layer).per_token)
    mixing = float(_flops_per_pair(model)) * num_pairs + num_tokens * per_token
    num_passes = 3 if trains_layers(model, lora, train) else 1
    return StepFlops(
        2.0 * num_tokens * sum(product_entries(model, lora, train)), num_passes * mixing
    )


def product_entries(model: ModelConfig, lora: LoraConfig, train: TrainConfig) -> ProductEntries:
    """The entries that determine the FLOPs of products with weights."""
    sizes = matrix_sizes(model, active=True)
    if not model.tie_embeddings:
        del sizes["embedding"]
    num_adapters = num_adapter_params(model, lora, active=True)
    forward = sum(sizes.values()) + num_adapters
    weight_gradients = (
        sum(size for name, size in sizes.items() if is_trained(name, lora, train)) + num_adapters
    )
    if trains_layers(model, lora, train):
        input_gradients = forward
    else:
        head = model.model_dim * model.vocab_size
        input_gradients = head if is_trained("final_norm/scale", lora, train) else 0
    return ProductEntries(forward, input_gradients, weight_gradients)


def document_pairs(
    model: ModelConfig, lengths: Sequence[int], prefix_lengths: Sequence[int] = ()
) -> float:
    """Pairs of a packed sequence with documents of these lengths in tokens, summed over the layers.

    Args:
      prefix_lengths: tokens of the shared prefixes that each document continues. Empty: none.
    """
    earlier = prefix_lengths if len(prefix_lengths) else [0] * len(lengths)
    return sum(
        layers * (causal_pairs(int(before + length), window) - causal_pairs(int(before), window))
        for window, layers in (
            (model.window_of(kind), layers) for kind, layers in num_layers_by_kind(model).items()
        )
        for before, length in zip(earlier, lengths, strict=True)
    )


def num_layers_by_kind(model: ModelConfig) -> dict[str, float]:
    """Layers of each kind with pairs, as the number of layers with the heads of the model whose
    pairs have as many FLOPs."""
    weights: dict[str, float] = {}
    for kind in model.used_kinds:
        layer = model.layer_config(kind)
        per_pair = mixing_flops(layer).per_pair
        if per_pair:
            weights[kind] = model.num_layers_of(kind) * per_pair / _flops_per_pair(model)
    return weights


def _flops_per_pair(model: ModelConfig) -> int:
    """Of a layer with the heads of the model: 2 H for q . k and 2 H for the value, in each of N
    heads.
    """
    return 4 * model.attention.num_heads * model.attention.head_dim


def causal_pairs(seq_len: int, window: int | None = None) -> int:
    """Pairs of a query and a key that a causal mask, or a window in tokens, leaves in one sequence."""
    reach = min(window or seq_len, seq_len)
    return seq_len * reach - reach * (reach - 1) // 2


def num_params(model: ModelConfig) -> int:
    """The number of parameters, without the padding of the vocabulary."""
    vectors = sum_over_layers(model, _num_vector_entries) + model.model_dim
    return sum(matrix_sizes(model, active=False).values()) + vectors


def sum_over_layers(model: ModelConfig, count: Callable[[LayerConfig], int]) -> int:
    """The sum of `count` of all layers."""
    return sum(
        model.num_layers_of(kind) * count(model.layer_config(kind)) for kind in model.used_kinds
    )


def _num_vector_entries(layer: LayerConfig) -> int:
    """Entries of all parameters of a layer that are not in `layer_matrices`."""
    num_norms = (1 + (layer.norm_placement == "pre_and_post")) * len(norms_of(layer))
    own = sum(block.num_vector_entries(layer) for block in branches_of(layer).values())
    return num_norms * layer.model_dim + own
