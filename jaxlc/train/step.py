"""The training step: built here for the loop, the plan, the sweeps and the benchmarks alike. Nobody else jits one."""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc import attention
from jaxlc.config import Config
from jaxlc.core.errors import UserError
from jaxlc.runtime import transport
from jaxlc.runtime.xla_flags import compile_options
from jaxlc.train import mixed_precision, update
from jaxlc.train.batch import Batch, abstract_batch
from jaxlc.train.objective import Objective
from jaxlc.train.optimizer import learning_rate_schedule, make_optimizer, updates_made
from jaxlc.train.state import TrainState, abstract_state, first_state, memory_spaces, put


class StepMetrics(NamedTuple):
    """Scalars, float32 but for is_finite, the same on every device."""

    loss: jax.Array  # mean cross entropy in nats over all weighted tokens of the step
    grad_norm: jax.Array  # before clipping
    learning_rate: jax.Array
    target_tokens: jax.Array  # sum of the loss weights
    is_finite: jax.Array  # bool: loss and gradient; where they are not, the update was left out
    loss_scale: jax.Array | None  # of fp16 only: this step's
    skipped_steps: jax.Array | None  # of fp16 only, int32: updates left out since step 0


def build_step(config: Config, mesh: Mesh) -> "TrainStep":
    """The training step of `config` on `mesh`; allocates and compiles nothing yet. The devices need not be here.

    Raises:
      UserError: they cannot multiply in config.precision.
    """
    mixed_precision.check_devices(config.precision, mesh.devices.flat)
    return TrainStep(config=config, mesh=mesh)


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """The jitted step, with the state and batch it takes. `mesh` may be of devices that are not here."""

    config: Config
    mesh: Mesh

    @cached_property
    def objective(self) -> Objective:
        return Objective(config=self.config, mesh=self.mesh)

    @property
    def dims(self):
        """The parameters' tree with each one's dimension names."""
        return self.objective.dims

    @cached_property
    def abstract_state(self) -> TrainState:
        return abstract_state(self.config, self.mesh, self._optimizer, self.dims)

    @cached_property
    def memory_spaces(self) -> TrainState:
        """Where each array of the state rests; `abstract_state` tells it only of devices that are here."""
        return memory_spaces(self.config.memory, self.mesh, self._optimizer, self.abstract_state)

    @cached_property
    def abstract_batch(self) -> Batch:
        return abstract_batch(self.config, self.mesh)

    @cached_property
    def jitted(self):
        """(state, batch) -> (state, StepMetrics); the state's buffers are given up to its successor."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(self._step, donate_argnums=0, out_shardings=(shardings, everywhere))

    def lower(self) -> jax.stages.Lowered:
        return self.jitted.lower(self.abstract_state, self.abstract_batch)

    def compile(
        self,
        extra_options: dict[str, bool | int | str] | None = None,
        lowered: jax.stages.Lowered | None = None,
    ) -> jax.stages.Compiled:
        """The executable for the mesh's devices, with the compiler options of their platform and `extra_options`.

        Args:
          lowered: of `lower`, where the caller had something to change in it.
        Raises:
          UserError: an offload that the program for a GPU does not contain.
        """
        compiled = (lowered or self.lower()).compile(compiler_options=self.compiler_options | (extra_options or {}))
        offload = self.config.memory.offload
        if offload and self._platform == "gpu" and not compiled.memory_analysis().host_temp_size_in_bytes:
            raise UserError(
                f"config.memory.offload={offload} was asked for, and the compiled step holds nothing in host memory:"
                " nothing of that is made in these layers, or this compiler leaves it out"
            )
        return compiled

    @property
    def compiler_options(self) -> dict[str, bool | int | str]:
        """By the devices' platform, the preset of the config and the transport; without what XLA_FLAGS has set."""
        memory = self.config.memory
        return compile_options(
            self._platform,
            preset=self.config.runtime.xla_preset,
            transport=self.transport and self.transport.name,
            uses_host_memory=bool(memory.offload) or "host" in (memory.parameters, memory.optimizer),
            environment=os.environ,
        )

    def init(self) -> TrainState:
        """The state of step 0, each device making its own part."""
        return first_state(self.config, self.mesh, self._optimizer, self.abstract_state)

    @cached_property
    def transport(self) -> transport.TransportSelection | None:
        """How attention's hops travel, and why that way; None on CPU."""
        return transport.choose(self.config.runtime, tuple(self.mesh.devices.flat))

    @property
    def kernel(self) -> attention.KernelSelection:
        """The attention kernel of the step, and why that one."""
        return attention.choose(
            self.config.attention,
            self.mesh,
            head_dim=self.config.model.head_dim,
            dtype=mixed_precision.compute_dtype(self.config.precision.compute, self._platform),
            packed=self.config.attention.document_mask,
        )

    @property
    def _platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @cached_property
    def _schedule(self):
        return learning_rate_schedule(self.config.optimizer, self.config.train.steps)

    @cached_property
    def _optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(self.config.optimizer, self._schedule, self.dims)

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        # Changes nothing but types: those of the arguments do not tell of the host's memory where no device is here.
        state = jax.tree.map(put, state, self.memory_spaces)
        # Divided once, by the weights of all ranks and microbatches: one of either may have no target at all.
        target_tokens = batch.loss_weights.sum()
        to_mean = jnp.where(target_tokens > 0, 1.0 / target_tokens, 0.0)
        loss_scale = state.scaling.loss_scale
        if loss_scale is not None:  # the mean loss is multiplied by it, before anything is rounded to float16
            batch = batch._replace(loss_weights=batch.loss_weights * (loss_scale.scale * to_mean))
            to_mean = 1.0 / loss_scale.scale
        (gradients, histories), cross_entropy = self.objective.sums(state.params, state.scaling.histories, batch)
        loss = cross_entropy * to_mean
        grad_norm = update.gradient_norm(gradients, self.dims, to_mean)
        # A bad step leaves the state as it was: the loop may skip it, or stop with a state worth saving.
        is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        params, opt_state = update.update(
            lambda dims: make_optimizer(self.config.optimizer, self._schedule, dims),
            self.dims,
            update.ParamsAndOptState(state.params, state.opt_state),
            gradients,
            scale=to_mean,
            grad_norm=grad_norm,
            is_finite=is_finite,
        )
        metrics = StepMetrics(
            loss=loss,
            grad_norm=grad_norm,
            # The optimizer counts the updates it made; a step that was left out is not among them.
            learning_rate=jnp.float32(self._schedule(updates_made(state.opt_state))),
            target_tokens=target_tokens,
            is_finite=is_finite,
            loss_scale=loss_scale and loss_scale.scale,
            skipped_steps=loss_scale and loss_scale.skipped_steps + ~is_finite,
        )
        scaling = mixed_precision.after_step(state.scaling, histories, is_finite, self.config.precision)
        rng = jax.random.key_data(jax.random.split(jax.random.wrap_key_data(state.rng))[0])
        return TrainState(state.step + 1, params, opt_state, rng, scaling), metrics
