"""Bytes of a training step before it is compiled: the state from its shapes, activations from the
kinds of layers.

`jaxlc plan` has the bytes of the compiled step; these are for what comes before: the pool of pinned
host memory, which must be known when JAX starts, and the order in which a search compiles
candidates.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import jax

from jaxlc.config import Config, unchecked
from jaxlc.config.kinds import blocks_of
from jaxlc.models import lora
from jaxlc.runtime import memory as runtime_memory
from jaxlc.sharding.mesh import abstract_mesh
from jaxlc.step.state import bytes_per_device
from jaxlc.step.step import TrainStep

T = TypeVar("T")


class StateBytes(NamedTuple):
    """Bytes of the training state per device."""

    trained: int  # float32 weights that are trained, adapters included; gradients take as many
    frozen: int  # weights that are not trained
    optimizer: int
    reference: int  # weights of the reference model, in host memory


def state_bytes(config: Config) -> StateBytes:
    """The bytes of each part of the state, from its shapes and shardings. Starts no device."""
    # the copies of nodes are not in the state
    config = unchecked(config, {"memory.node_copy_devices": 0})
    step = TrainStep(config=config, mesh=abstract_mesh(config.mesh))
    state = _traced(lambda: step.abstract_state)
    trained, frozen = lora.split(state.params, step.frozen)
    reference = step.reference
    return StateBytes(
        trained=bytes_per_device(trained),
        frozen=bytes_per_device(frozen),
        optimizer=bytes_per_device(state.opt_state),
        reference=bytes_per_device(_traced(lambda: reference.abstract_state.params))
        if reference
        else 0,
    )


def _traced(function: Callable[[], T]) -> T:
    """The result of a function that computes shapes: JAX traces its operations and runs none on a
    device.
    """
    results: list[T] = []
    jax.eval_shape(lambda: results.append(function()))
    return results[0]


class PinnedBytes(NamedTuple):
    """Pinned host memory per GPU that a training step needs, estimated."""

    # with memory.optimizer and memory.parameters "host", and the weights of the reference model
    state: int
    # Gradients and offloaded activations within a step, or copies of the arrays on the GPU while a checkpoint is
    # written, whichever is more.
    temporary: int

    @property
    def pooled(self) -> int:
        """The bytes in regions of the pool of pinned host memory."""
        return runtime_memory.region_bytes(self.state) + self.temporary


def pinned_bytes(config: Config, state: StateBytes | None = None) -> PinnedBytes:
    """What `config` needs; 0 if it uses no host memory. `jaxlc plan` has the bytes of the compiled
    step.

    Args:
      state: of `state_bytes`. None: it is computed.
    """
    memory = config.memory
    uses_host = memory.offload or "host" in (memory.parameters, memory.optimizer)
    if not uses_host and not config.posttrain.uses_reference_model:
        return PinnedBytes(0, 0)
    state = state or state_bytes(config)
    if not uses_host:
        return PinnedBytes(state.reference, 0)
    on_host = state.reference
    on_device = 0
    gradients = 0
    if memory.parameters == "host":
        on_host += state.trained + state.frozen
        # The sum over microbatches, and the gradients of the current one.
        gradients = state.trained * (2 if config.train.gradient_accumulation_steps > 1 else 1)
    else:
        on_device += state.trained + (state.frozen if config.train.checkpoint_frozen else 0)
    if memory.optimizer == "host":
        on_host += state.optimizer
    else:
        on_device += state.optimizer
    # activations of all layers, for one microbatch; see step/remat.py
    group = config.memory.layers_per_remat_group
    names = [name for name in config.memory.offload if group == 1 or name == "residual"]
    offloaded = math.ceil(activation_bytes(config, names, config.model.num_remat_groups(group)))
    return PinnedBytes(on_host, max(gradients + offloaded, on_device))


def activation_bytes(config: Config, names: Iterable[str], num_layers: int) -> float:
    """Bytes of named activations (`config.kinds.tensor_names`) of `num_layers` average layers, for
    one microbatch on one GPU."""
    model = config.model
    names = list(names)
    num_tokens = config.tokens_per_step // config.train.gradient_accumulation_steps
    itemsize = 4 if config.precision.compute == "fp32" else 2
    bytes_per_token = 0.0
    for kind in model.used_kinds:
        layer = model.layer_config(kind)
        named = Counter(residual=itemsize * model.model_dim)
        for block in blocks_of(layer):
            named.update(block.saved_bytes(layer, config, itemsize))
        bytes_per_token += model.num_layers_of(kind) * sum(named.get(name, 0.0) for name in names)
    return num_tokens * bytes_per_token * num_layers / model.num_layers / config.mesh.num_devices
