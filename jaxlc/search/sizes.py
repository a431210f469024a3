"""Local sizes of a training step on one GPU, from the config alone: the terms of the formulas for memory and time."""

from dataclasses import dataclass

from jaxlc.config import Config
from jaxlc.config.trained_params import num_adapter_params, num_frozen_params
from jaxlc.core.flops import num_params


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Tokens, features and parameters of one GPU. Parameters are counted in entries."""

    num_microbatches: int
    num_sequences: int  # of a microbatch on one data-parallel replica
    tokens: float  # of a microbatch on one context rank
    num_shards: int  # of the stored parameters
    gather_ranks: int  # that gather the weights of a layer from each other
    query_dim: float  # features of the query heads of a tensor rank
    key_dim: float  # features of the key heads of a tensor rank, as of the value heads
    ffn_dim: float  # of a tensor rank
    residual_dim: float  # features of the residual stream per token, which is split over tensor by tokens
    layer_params: float  # matrices of one layer on a tensor rank
    head_params: float  # embedding or output head on a tensor rank
    num_trained: float  # all trained parameters, before sharding
    num_frozen: float

    @property
    def trained_share(self) -> float:
        """Fraction of the parameters that have gradients."""
        return self.num_trained / (self.num_trained + self.num_frozen)


def sizes_of(config: Config) -> Sizes:
    model, mesh, train = config.model, config.mesh, config.train
    replicas = mesh.data * mesh.fsdp
    num_sequences = max(1, train.global_batch_size // (train.gradient_accumulation_steps * replicas))
    key_heads = max(model.num_kv_heads / mesh.tensor, 1)
    query_dim, ffn_dim = model.num_heads * model.head_dim / mesh.tensor, model.ffn_dim / mesh.tensor
    num_frozen = num_frozen_params(model, config.lora, train)
    return Sizes(
        num_microbatches=train.gradient_accumulation_steps,
        num_sequences=num_sequences,
        tokens=num_sequences * config.data.seq_len / mesh.context,
        num_shards=mesh.fsdp * mesh.context * mesh.tensor,
        gather_ranks=mesh.fsdp * mesh.context,
        query_dim=query_dim,
        key_dim=key_heads * model.head_dim,
        ffn_dim=ffn_dim,
        residual_dim=model.model_dim / mesh.tensor,
        layer_params=model.model_dim * (2 * query_dim + 2 * key_heads * model.head_dim + 3 * ffn_dim),
        head_params=model.model_dim * model.vocab_size / mesh.tensor,
        num_trained=num_params(model) - num_frozen + num_adapter_params(model, config.lora),
        num_frozen=num_frozen,
    )
