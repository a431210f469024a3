"""The batch of a training step."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.config import Config, ModelConfig
from jaxlc.core.axes import BATCH_AXES, CONTEXT
from jaxlc.core.flops import num_layers_by_kind
from jaxlc.sharding.layout import token_at


class Batch(NamedTuple):
    """Arrays [gradient accumulation steps, sequences, tokens], tokens in layout order."""

    tokens: jax.Array  # int32
    targets: jax.Array  # int32: the next token of the same document
    loss_weights: jax.Array  # float32: 0 at a document's last token and on padding
    positions: jax.Array  # int32: number of earlier tokens of the same document in the sequence
    segment_ids: jax.Array  # int32: 0 is padding


_SEQUENCE_SPEC = PartitionSpec(BATCH_AXES, CONTEXT)
BATCH_SPEC = PartitionSpec(None, *_SEQUENCE_SPEC)
_DTYPES = Batch(jnp.int32, jnp.int32, jnp.float32, jnp.int32, jnp.int32)


def sequence_positions(shape: tuple[int, int], mesh: Mesh) -> jax.Array:
    """int32 of `shape` [sequences, tokens]: the position of each token in its sequence, in layout order."""
    num_tokens = shape[1]
    positions_T = token_at(jnp.arange(num_tokens, dtype=jnp.int32), num_tokens, mesh.shape[CONTEXT])
    return lax.with_sharding_constraint(jnp.broadcast_to(positions_T, shape), NamedSharding(mesh, _SEQUENCE_SPEC))


def attention_pairs(batch: Batch, model: ModelConfig) -> jax.Array:
    """Pairs of a query and a key that the document mask leaves in a batch, summed over the layers; float32."""
    is_text = batch.segment_ids > 0
    pairs = jnp.float32(0)
    for kind, num_layers in num_layers_by_kind(model).items():
        num_keys = jnp.minimum(batch.positions + 1, model.window_of(kind) or batch.positions.shape[-1])
        # First by sequence: a sum in float32 over all tokens would round away single addends.
        by_sequence = jnp.where(is_text, num_keys, 0).sum(-1, dtype=jnp.float32)
        pairs += num_layers * by_sequence.sum()
    return pairs


def abstract_batch(config: Config, mesh: Mesh) -> Batch:
    """Shapes, dtypes and shardings of the batch of a step."""
    train, num_tokens = config.train, config.data.seq_len
    shape = (
        train.gradient_accumulation_steps,
        train.global_batch_size // train.gradient_accumulation_steps,
        num_tokens,
    )
    sharding = NamedSharding(mesh, BATCH_SPEC)
    return Batch(*(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for dtype in _DTYPES))


def abstract_sequences(config: Config, mesh: Mesh) -> Batch:
    """As `abstract_batch`, of one microbatch with one sequence per rank of the data and fsdp axes; arrays [B, S]."""
    shape = math.prod(mesh.shape[axis] for axis in BATCH_AXES), config.data.seq_len
    sharding = NamedSharding(mesh, _SEQUENCE_SPEC)
    return Batch(*(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for dtype in _DTYPES))
