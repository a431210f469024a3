"""The training state: what a step takes and returns, and what a checkpoint holds."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.config import Config, MemoryConfig
from jaxlc.core.axes import TENSOR
from jaxlc.models import decoder
from jaxlc.sharding import rules
from jaxlc.train.mixed_precision import Scaling, first_scaling

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
PINNED_HOST = "pinned_host"  # HOST, as shardings and programs name it
_MADE_AT_ONCE_BYTES = 2**30


class TrainState(NamedTuple):
    step: jax.Array  # int32: optimizer steps done
    params: dict  # float32 master weights
    opt_state: optax.OptState
    rng: jax.Array  # PRNG key data, uint32; a new one each step, for whatever in a model is random
    scaling: Scaling = Scaling()  # what fp16 and fp8 keep from step to step


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """V as stored: the next multiple of tensor."""
    return -(-vocab_size // tensor) * tensor


def make_state(config: Config, mesh: Mesh, optimizer: optax.GradientTransformation) -> TrainState:
    """The state of step 0, a pure function of config.train.seed, the same on every mesh up to vocabulary padding."""
    init_key, rng = jax.random.split(jax.random.key(config.train.seed))
    params = decoder.init(config.model, padded_vocab_size(config.model.vocab_size, mesh.shape[TENSOR]), init_key)
    scaling = first_scaling(config.precision, config.model)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.random.key_data(rng), scaling)


def first_state(
    config: Config, mesh: Mesh, optimizer: optax.GradientTransformation, abstract: TrainState
) -> TrainState:
    """`make_state` on the devices of `mesh`; a few arrays after the other where some rest in host memory, since all
    are made on the device."""
    leaves, tree = jax.tree.flatten(abstract)
    on_host = any(leaf.sharding.memory_kind == PINNED_HOST for leaf in leaves)
    groups = _groups(leaves) if on_host else [range(len(leaves))]

    def make(group) -> list[jax.Array]:
        def of_group():
            state = jax.tree.leaves(make_state(config, mesh, optimizer))
            return [state[index] for index in group]

        return jax.block_until_ready(jax.jit(of_group, out_shardings=[leaves[index].sharding for index in group])())

    return tree.unflatten([leaf for group in groups for leaf in make(group)])


def _groups(leaves: list[jax.ShapeDtypeStruct]) -> list[list[int]]:
    """Places of neighbours that together take no more than _MADE_AT_ONCE_BYTES of a device, or are alone."""
    groups, filled_bytes = [], _MADE_AT_ONCE_BYTES
    for index, leaf in enumerate(leaves):
        filled_bytes += bytes_per_device(leaf)
        if filled_bytes > _MADE_AT_ONCE_BYTES:
            groups.append([])
            filled_bytes = bytes_per_device(leaf)
        groups[-1].append(index)
    return groups


def bytes_per_device(abstract, spaces=None, space: jax.memory.Space | None = None) -> int:
    """Of a tree of `jax.ShapeDtypeStruct`s with shardings: the part of one device, if need be in `space` only."""
    leaves = jax.tree.leaves(abstract)
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, its_space in zip(leaves, jax.tree.leaves(spaces) or [None] * len(leaves), strict=True)
        if its_space is space
    )


def memory_spaces(
    config: MemoryConfig, mesh: Mesh, optimizer: optax.GradientTransformation, abstract: TrainState
) -> TrainState:
    """A `jax.memory.Space` for each array of the state: where it rests between steps, and within the step too."""
    has_host = lacks_host_memory(mesh) is None
    params = HOST if has_host and config.parameters == "host" else DEVICE
    moments = HOST if has_host and config.optimizer == "host" else DEVICE
    return jax.tree.map(lambda _: DEVICE, abstract)._replace(
        params=jax.tree.map(lambda _: params, abstract.params),
        opt_state=optax.tree_map_params(
            optimizer, lambda _: moments, abstract.opt_state, transform_non_params=lambda _: DEVICE
        ),
    )


def is_on_host(*trees) -> bool:
    """Whether any of these arrays, traced or not, rests in host memory."""
    return any(memory_kind_of(x) is HOST for x in jax.tree.leaves(trees))


def memory_kind_of(x: jax.Array) -> jax.memory.Space:
    return jax.typeof(x).memory_space


def put(x: jax.Array, space: jax.memory.Space) -> jax.Array:
    """`x` in that memory; under `jit`."""
    return x if memory_kind_of(x) is space else jax.device_put(x, space)


def lacks_host_memory(mesh: Mesh) -> str | None:
    """Why programs on the devices of `mesh` cannot use pinned host memory; None if they can.

    On CPU, jax 0.10 has no implementation of the transfers ("annotate_device_placement"); 0.11.2 and 0.12 have.
    """
    if mesh.devices.flat[0].platform == "cpu" and jax.__version_info__ < (0, 11):
        return f"jax {jax.__version__} cannot use host memory on CPU; 0.11 can"
    return None


def memory_lines(config: MemoryConfig, mesh: Mesh) -> list[str]:
    """For the start of a run: what rests in host memory, or why it does not."""
    problem = lacks_host_memory(mesh)
    asked = [name for name in ("parameters", "optimizer") if vars(config)[name] == "host"]
    if problem is not None:
        asked += config.offload
    if not asked:
        return []
    where = "in pinned host memory" if problem is None else f"on the device all the same: {problem}"
    return [f"memory     {' and '.join(asked)} (config.memory) rest {where}"]


def abstract_state(config: Config, mesh: Mesh, optimizer: optax.GradientTransformation, dims) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is allocated.

    Parameters lie as the rules say, optimizer moments as their parameter, everything else on every device. What
    `memory_spaces` puts in host memory has shardings that say so, which devices that are not here leave out.
    """
    shapes = jax.eval_shape(lambda: make_state(config, mesh, optimizer))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def stored(shape, names):
        spec = rules.storage_spec(names, shape.shape, mesh)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    def resting(shape, space):
        kind = PINNED_HOST if space is HOST else None
        sharding = NamedSharding(mesh, shape.sharding.spec, memory_kind=kind)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    def replicated(shape):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=everywhere)

    abstract = TrainState(
        step=replicated(shapes.step),
        params=jax.tree.map(stored, shapes.params, dims),
        opt_state=optax.tree_map_params(optimizer, stored, shapes.opt_state, dims, transform_non_params=replicated),
        rng=replicated(shapes.rng),
        scaling=jax.tree.map(replicated, shapes.scaling),
    )
    return jax.tree.map(resting, abstract, memory_spaces(config.memory, mesh, optimizer, abstract))
