"""The training state: the argument and result of a step, and the content of a checkpoint."""

import math
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxlc.config import Config, MemoryConfig
from jaxlc.core.files import groups_within
from jaxlc.models import lora
from jaxlc.sharding import rules
from jaxlc.step.precision import Scaling, first_scaling

DEVICE = jax.memory.Space.Device
HOST = jax.memory.Space.Host
PINNED_HOST = "pinned_host"  # the memory kind of HOST, in shardings and in compiled programs


class TrainState(NamedTuple):
    step: jax.Array  # int32: optimizer steps done
    params: dict  # float32 master weights; frozen matrices may be bf16
    opt_state: optax.OptState  # for the trainable parameters
    rng: jax.Array  # PRNG key data, uint32; a new key each step, for random operations of the model
    scaling: Scaling = Scaling()  # state of fp16 loss scaling and of fp8 delayed scaling


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """The stored vocabulary size: `vocab_size` rounded up to a multiple of tensor."""
    return -(-vocab_size // tensor) * tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class StateMaker:
    """Makes the training state of a step."""

    config: Config
    mesh: Mesh | AbstractMesh  # of the shardings
    init_params: Callable[[jax.Array], Any]  # from a PRNG key to the parameters, a pytree of arrays
    optimizer: optax.GradientTransformation
    dims: Any  # the parameter tree with a tuple of dimension names per leaf
    frozen: Set[str]  # names of the parameters that are not trained; see `models.lora`

    def make(self, params: Any = None) -> TrainState:
        """The state of step 0: a pure function of config.train.seed, equal on every mesh up to
        vocabulary padding.

        Args:
          params: the parameters of step 0. None: `init_params` makes them.
        """
        init_key, rng = jax.random.split(jax.random.key(self.config.train.seed % 2**32))
        if params is None:
            params = self.init_params(init_key)
        scaling = first_scaling(self.config.precision, self.config.model)
        opt_state = self.optimizer.init(lora.split(params, self.frozen)[0])
        step = jnp.zeros((), jnp.int32)
        return TrainState(step, params, opt_state, jax.random.key_data(rng), scaling)

    def on_devices(self, abstract: TrainState, params: Any = None) -> TrainState:
        """`make` on the devices of `abstract`. If some arrays are stored in host memory, arrays are initialized in
        groups, since each is computed on the device first.

        Args:
          params: the parameters of step 0, with the shardings of `abstract`. None: `init_params` makes them.
        """
        if params is not None:
            abstract = abstract._replace(params=None)
        leaves, tree = jax.tree.flatten(abstract)
        on_host = any(leaf.sharding.memory_kind == PINNED_HOST for leaf in leaves)
        groups = groups_within(map(bytes_per_device, leaves)) if on_host else [range(len(leaves))]

        def make(group) -> list[jax.Array]:
            def init_group(params):
                state = self.make(jax.tree.map(lambda x: to_memory_kind(x, DEVICE), params))
                if params is not None:
                    state = state._replace(params=None)
                state = jax.tree.leaves(state)
                return [state[index] for index in group]

            shardings = [leaves[index].sharding for index in group]
            return jax.block_until_ready(jax.jit(init_group, out_shardings=shardings)(params))

        state = tree.unflatten([leaf for group in groups for leaf in make(group)])
        return state if params is None else state._replace(params=params)

    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state; nothing is allocated.

        Parameters are sharded by `sharding.rules`, optimizer moments like their parameter; all else is
        replicated. Arrays that `memory_spaces` puts in host memory have shardings with that memory
        kind, except on absent devices (AOT compilation), whose shardings drop it.
        """
        mesh = self.mesh
        shapes = jax.eval_shape(self.make)
        trainable_dims, _ = lora.split(self.dims, self.frozen)
        replicated_sharding = NamedSharding(mesh, PartitionSpec())

        def stored(shape, names):
            if is_masked(shape):
                return shape
            # optimizer state of another shape, such as Adafactor's factored moments
            if len(names) != len(shape.shape):
                return replicated(shape)
            spec = rules.storage_spec(names, shape.shape, mesh)
            return jax.ShapeDtypeStruct(
                shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec)
            )

        def in_memory(shape, space):
            kind = PINNED_HOST if space is HOST else None
            sharding = NamedSharding(mesh, shape.sharding.spec, memory_kind=kind)
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

        def replicated(shape):
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=replicated_sharding)

        abstract = TrainState(
            step=replicated(shapes.step),
            params=jax.tree.map(stored, shapes.params, self.dims),
            opt_state=optax.tree_map_params(
                self.optimizer,
                stored,
                shapes.opt_state,
                trainable_dims,
                transform_non_params=replicated,
                is_leaf=is_masked,
            ),
            rng=replicated(shapes.rng),
            scaling=jax.tree.map(replicated, shapes.scaling),
        )
        return jax.tree.map(in_memory, abstract, self.memory_spaces(abstract))

    def memory_spaces(self, abstract: TrainState) -> TrainState:
        """The `jax.memory.Space` in which each array of the state is stored, between steps and within a
        step.
        """
        memory = self.config.memory
        has_host = lacks_host_memory(self.mesh) is None
        params = HOST if has_host and memory.parameters == "host" else DEVICE
        moments = HOST if has_host and memory.optimizer == "host" else DEVICE
        return jax.tree.map(lambda _: DEVICE, abstract)._replace(
            params=jax.tree.map(lambda _: params, abstract.params),
            opt_state=optax.tree_map_params(
                self.optimizer,
                lambda _: moments,
                abstract.opt_state,
                transform_non_params=lambda _: DEVICE,
            ),
        )


def bytes_per_device(abstract, spaces=None, space: jax.memory.Space | None = None) -> int:
    """Bytes that a tree of `jax.ShapeDtypeStruct`s with shardings takes on one device.

    Args:
      spaces: tree of the memory space of each array; only arrays in `space` are counted. None: all are counted.
    """
    leaves = jax.tree.leaves(abstract)
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, leaf_space in zip(
            leaves, jax.tree.leaves(spaces) or [None] * len(leaves), strict=True
        )
        if leaf_space is space
    )


def is_masked(x) -> bool:
    """Whether `x` is the empty placeholder of a parameter that another optimizer updates, as in
    `optax.masked`.
    """
    return isinstance(x, optax.MaskedNode)


def is_on_host(*trees) -> bool:
    """Whether any of these arrays, concrete or traced, is in host memory."""
    return any(memory_kind_of(x) is HOST for x in jax.tree.leaves(trees))


def memory_kind_of(x: jax.Array) -> jax.memory.Space:
    return jax.typeof(x).memory_space


def to_memory_kind(x: jax.Array, space: jax.memory.Space) -> jax.Array:
    """Copies `x` to that memory if it is not there; call it under `jit`."""
    return x if memory_kind_of(x) is space else jax.device_put(x, space)


def lacks_host_memory(mesh: Mesh | AbstractMesh) -> str | None:
    """Why programs on the devices of `mesh` cannot use pinned host memory; None if they can, or are
    not known.

    On CPU, JAX 0.10 does not implement the transfers ("annotate_device_placement"); 0.11.2 and 0.12
    do.
    """
    if isinstance(mesh, AbstractMesh):
        return None
    if mesh.devices.flat[0].platform == "cpu" and jax.__version_info__ < (0, 11):
        return f"jax {jax.__version__} cannot use host memory on CPU; 0.11 can"
    return None


def memory_lines(config: MemoryConfig, mesh: Mesh) -> list[str]:
    """Lines for the start of a run: the arrays that are stored in host memory, or why they are not."""
    problem = lacks_host_memory(mesh)
    requested = [name for name in ("parameters", "optimizer") if vars(config)[name] == "host"]
    if problem is not None:
        requested += config.offload
    if not requested:
        return []
    where = "in pinned host memory" if problem is None else f"on the device: {problem}"
    return [f"memory     {' and '.join(requested)} (config.memory) stored {where}"]
