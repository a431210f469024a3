"""Which parameters are trained, and how many, from the config alone. Imports no jax."""

import fnmatch
from collections import Counter

from jaxlc.config.kinds import layer_matrices, param_names, projection_paths
from jaxlc.config.models.model_schema import LayerConfig, ModelConfig
from jaxlc.config.schema import LoraConfig, TrainConfig

FROZEN_BYTES = {"bf16": 2, "fp32": 4}  # per entry, by precision.frozen


def is_trained(name: str, lora: LoraConfig, train: TrainConfig) -> bool:
    """Whether train.trainable and train.frozen select this parameter of the model for training.

    Args:
      name: such as layers/attention/wq, of a parameter that is not an adapter.
    """
    is_selected = _matches(name, train.trainable) if train.trainable else not lora.rank
    return is_selected and not _matches(name, train.frozen)


def trains_layers(model: ModelConfig, lora: LoraConfig, train: TrainConfig) -> bool:
    """Whether the embedding or a parameter of the layers is trained, so that gradients reach the layers."""
    names = {"embedding"}
    for (_, *kind), layers in model.layer_stacks.items():
        layer = model.of_kind(model.kinds_of_layers[layers[0]])
        names |= {"/".join(("layers", *kind, name)) for name in param_names(layer)}
    return bool(lora.rank) or any(is_trained(name, lora, train) for name in names)


def num_adapter_params(model: ModelConfig, lora: LoraConfig, *, active: bool = False) -> int:
    """The number of entries of all adapters; with `active`, of those that multiply a token."""
    if not lora.rank:
        return 0
    return lora.rank * sum(
        model.num_layers_of(kind) * _adapter_size(model.of_kind(kind), lora, active) for kind in model.used_kinds
    )


def _adapter_size(layer: LayerConfig, lora: LoraConfig, active: bool) -> int:
    """Inputs and outputs of the adapters of a layer."""
    matrices = layer_matrices(layer)
    paths = projection_paths()
    params = {path for name in lora.projections for path in paths[name]} & matrices.keys()
    return sum(matrices[param].low_rank_size(active=active) for param in params)


def num_frozen_params(model: ModelConfig, lora: LoraConfig, train: TrainConfig) -> int:
    """The number of entries of the frozen matrices; norms and biases, a few kilobytes, are not counted."""
    sizes = matrix_sizes(model, active=False)
    return sum(size for name, size in sizes.items() if not is_trained(name, lora, train))


def matrix_sizes(model: ModelConfig, *, active: bool) -> dict[str, int]:
    """Entries of each matrix, of all layers together, by the names in the parameter tree; with `active`, those that
    multiply a token."""
    vocabulary = ("embedding",) if model.tie_embeddings else ("embedding", "head")
    sizes = Counter(dict.fromkeys(vocabulary, model.vocab_size * model.model_dim))
    for (_, *kind), layers in model.layer_stacks.items():  # the last layers have the names of the others
        for name, matrix in layer_matrices(model.of_kind(model.kinds_of_layers[layers[0]])).items():
            sizes["/".join(("layers", *kind, name))] += len(layers) * (matrix.active_size if active else matrix.size)
    return dict(sizes)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
