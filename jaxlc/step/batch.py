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
from jaxlc.data.sequences.batch_arrays import array_dtypes
from jaxlc.sharding.layout import token_at


class Batch(NamedTuple):
    """Arrays [gradient accumulation steps, sequences, tokens], tokens in layout order."""

    tokens: jax.Array  # int32
    targets: jax.Array  # int32: the next token of the same document
    loss_weights: jax.Array  # float32: 0 at a document's last token and on padding
    positions: jax.Array  # int32: number of earlier tokens of the same document in the sequence, and of its prefix
    segment_ids: jax.Array  # int32: 0 is padding
    # The next are None unless the config needs them: `data.sequences.batch_arrays.array_dtypes`. Each has the values of
    # the token's document or target.
    prefix_ids: jax.Array | None = None  # int32: the segment id of the prefix that the document continues; 0: none
    advantages: jax.Array | None = None  # float32; of pairs: 1 for the chosen answer, -1 for the rejected one
    answer_weights: jax.Array | None = None  # float32: 1 / number of targets of the answer; 0 outside of answers
    old_log_probs: jax.Array | None = None  # float32; NaN: unknown, if posttrain.old_log_probs is not record
    reference_log_probs: jax.Array | None = None  # float32
    # int32, of the order of tokens, not of the data: `sequence_order.SequenceOrder.chained`; `Assignment.fragments`
    fragment_ids: jax.Array | None = None


_SEQUENCE_SPEC = PartitionSpec(BATCH_AXES, CONTEXT)
BATCH_SPEC = PartitionSpec(None, *_SEQUENCE_SPEC)


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


def num_invalid_indices(batch: Batch, vocab_size: int) -> jax.Array:
    """Tokens, weighted targets and positions out of range, which JAX would clamp without an error; float32.

    Batches of a run are checked on the host (`data.sequences.user_batches`), those of other loops only here.
    """
    targets = jnp.where(batch.loss_weights > 0, batch.targets, 0)
    ends = ((batch.tokens, vocab_size), (targets, vocab_size), (batch.positions, batch.positions.shape[-1]))
    return sum(((x < 0) | (x >= end)).astype(jnp.float32) for x, end in ends).sum()


def abstract_batch(config: Config, mesh: Mesh, has_fragments: bool = False) -> Batch:
    """Shapes, dtypes and shardings of the batch of a step.

    Args:
      has_fragments: whether the order of tokens has `SequenceOrder.chained`.
    """
    train, num_tokens = config.train, config.data.seq_len
    shape = (
        train.gradient_accumulation_steps,
        train.global_batch_size // train.gradient_accumulation_steps,
        num_tokens,
    )
    batch = _abstract(config, shape, NamedSharding(mesh, BATCH_SPEC), has_fragments)
    if config.posttrain.uses_reference_model:
        batch = batch._replace(reference_log_probs=batch.loss_weights)  # added to the data by `train.reference_model`
    return batch


def abstract_sequences(config: Config, mesh: Mesh, has_fragments: bool = False) -> Batch:
    """As `abstract_batch`, of one microbatch with one sequence per rank of the data and fsdp axes; arrays [B, S]."""
    shape = math.prod(mesh.shape[axis] for axis in BATCH_AXES), config.data.seq_len
    return _abstract(config, shape, NamedSharding(mesh, _SEQUENCE_SPEC), has_fragments)


def _abstract(config: Config, shape: tuple[int, ...], sharding: NamedSharding, has_fragments: bool) -> Batch:
    dtypes = array_dtypes(config) | ({"fragment_ids": jnp.int32} if has_fragments else {})
    return Batch(**{name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()})
