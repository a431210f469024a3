"""The training state: what a step takes and returns, and what a checkpoint holds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.config import Config
from jaxlc.core.axes import TENSOR
from jaxlc.models import decoder
from jaxlc.sharding import rules


class TrainState(NamedTuple):
    step: jax.Array  # int32: optimizer steps done
    params: dict  # float32 master weights
    opt_state: optax.OptState
    rng: jax.Array  # PRNG key data, uint32; a new one each step, for whatever in a model is random


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """V as stored: the next multiple of tensor."""
    return -(-vocab_size // tensor) * tensor


def make_state(config: Config, mesh: Mesh, optimizer: optax.GradientTransformation) -> TrainState:
    """The state of step 0, a pure function of config.train.seed, the same on every mesh up to vocabulary padding."""
    init_key, rng = jax.random.split(jax.random.key(config.train.seed))
    params = decoder.init(config.model, padded_vocab_size(config.model.vocab_size, mesh.shape[TENSOR]), init_key)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.random.key_data(rng))


def abstract_state(config: Config, mesh: Mesh, optimizer: optax.GradientTransformation, dims) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is allocated.

    Parameters lie as the rules say, optimizer moments as their parameter, everything else on every device.
    """
    shapes = jax.eval_shape(lambda: make_state(config, mesh, optimizer))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def stored(shape, names):
        spec = rules.storage_spec(names, shape.shape, mesh)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    def replicated(shape):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=everywhere)

    return TrainState(
        step=replicated(shapes.step),
        params=jax.tree.map(stored, shapes.params, dims),
        opt_state=optax.tree_map_params(
            optimizer, stored, shapes.opt_state, dims, transform_non_params=replicated
        ),
        rng=replicated(shapes.rng),
    )
