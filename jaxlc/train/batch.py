"""What a step is given: rows of tokens, and what is known of each token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.config import Config
from jaxlc.core.axes import BATCH_AXES, CONTEXT
from jaxlc.sharding.layout import token_at


class Batch(NamedTuple):
    """[accumulation, rows, tokens] each, tokens in layout order."""

    tokens: jax.Array  # int32
    targets: jax.Array  # int32: the next token of the same document
    loss_weights: jax.Array  # float32: 0 at a document's last token and on padding
    positions: jax.Array  # int32: earlier tokens of the same document in the row
    segment_ids: jax.Array  # int32: 0 is padding


_ROW_SPEC = PartitionSpec(BATCH_AXES, CONTEXT)
BATCH_SPEC = PartitionSpec(None, *_ROW_SPEC)
_DTYPES = Batch(jnp.int32, jnp.int32, jnp.float32, jnp.int32, jnp.int32)


def row_positions(shape: tuple[int, int], mesh: Mesh) -> jax.Array:
    """[rows, tokens] int32: each token's place in its row, in layout order."""
    num_tokens = shape[1]
    positions_T = token_at(jnp.arange(num_tokens, dtype=jnp.int32), num_tokens, mesh.shape[CONTEXT])
    return lax.with_sharding_constraint(jnp.broadcast_to(positions_T, shape), NamedSharding(mesh, _ROW_SPEC))


def abstract_batch(config: Config, mesh: Mesh) -> Batch:
    """Shapes, dtypes and shardings of a step's batch."""
    train, num_tokens = config.train, config.data.seq_len
    shape = (
        train.gradient_accumulation_steps,
        train.global_batch_size // train.gradient_accumulation_steps,
        num_tokens,
    )
    sharding = NamedSharding(mesh, BATCH_SPEC)
    return Batch(*(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for dtype in _DTYPES))
