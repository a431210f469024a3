"""Which parameters are trained, and how many, from the config alone. Imports no jax."""

import fnmatch

from jaxlc.config.models.model_schema import ModelConfig
from jaxlc.config.schema import LoraConfig, TrainConfig

FROZEN_BYTES = {"bf16": 2, "fp32": 4}  # per entry, by precision.frozen


def is_trained(name: str, lora: LoraConfig, train: TrainConfig) -> bool:
    """Whether train.trainable and train.frozen select this parameter of the model for training.

    Args:
      name: such as layers/attention/wq, of a parameter that is not an adapter.
    """
    is_selected = _matches(name, train.trainable) if train.trainable else not lora.rank
    return is_selected and not _matches(name, train.frozen)


def num_adapter_params(model: ModelConfig, lora: LoraConfig) -> int:
    """The number of entries of all adapters."""
    if not lora.rank:
        return 0
    heads, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    sizes = dict(  # inputs + outputs
        query=model.model_dim + model.num_heads * model.query_dim,
        key=model.model_dim + key_value,
        value=model.model_dim + key_value,
        attention_projected=heads + model.model_dim,
        mlp_gate=model.model_dim + model.ffn_dim,
        mlp_up=model.model_dim + model.ffn_dim,
        mlp_down=model.ffn_dim + model.model_dim,
    )
    return lora.rank * model.num_layers * sum(sizes[name] for name in {*lora.projections})


def num_frozen_params(model: ModelConfig, lora: LoraConfig, train: TrainConfig, *, matmuls_only: bool = False) -> int:
    """The number of entries of the frozen matrices; norms and biases, a few kilobytes, are not counted.

    Args:
      matmuls_only: without the embedding, unless it is the output head too.
    """
    sizes = _matrix_sizes(model)
    if matmuls_only and not model.tie_embeddings:
        del sizes["embedding"]
    return sum(size for name, size in sizes.items() if not is_trained(name, lora, train))


def _matrix_sizes(model: ModelConfig) -> dict[str, int]:
    """Entries of each matrix, of all layers together, by the names in the parameter tree."""
    heads = model.model_dim * model.num_heads
    key_value = model.model_dim * model.num_kv_heads * model.head_dim
    of_layer = {
        "attention/wq": heads * model.query_dim,
        "attention/wk": key_value,
        "attention/wv": key_value,
        "attention/wo": heads * model.head_dim,
        **{f"mlp/{name}": model.model_dim * model.ffn_dim for name in ("w_gate", "w_up", "w_down")},
    }
    vocabulary = ("embedding",) if model.tie_embeddings else ("embedding", "head")
    return {
        **{f"layers/{name}": model.num_layers * size for name, size in of_layer.items()},
        **dict.fromkeys(vocabulary, model.vocab_size * model.model_dim),
    }


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
