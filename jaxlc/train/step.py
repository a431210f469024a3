"""The training step: built here for the loop, the plan, the sweeps and the benchmarks alike. Nobody else jits one."""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc import attention
from jaxlc.config import Config
from jaxlc.core.axes import BATCH_AXES, CONTEXT
from jaxlc.core.errors import UserError
from jaxlc.models import decoder
from jaxlc.models.rope import rope_tables
from jaxlc.runtime import transport
from jaxlc.runtime.xla_flags import compile_options
from jaxlc.sharding.layout import token_at
from jaxlc.sharding.rules import Sharder
from jaxlc.train.loss import LossSpec, loss_sums, token_losses
from jaxlc.train.optimizer import learning_rate_schedule, make_optimizer, updates_made
from jaxlc.train.remat import make_remat
from jaxlc.train.state import TrainState, abstract_state, make_state


class Batch(NamedTuple):
    """[accumulation, rows, tokens] each, tokens in layout order."""

    tokens: jax.Array  # int32
    targets: jax.Array  # int32: the next token of the same document
    loss_weights: jax.Array  # float32: 0 at a document's last token and on padding
    positions: jax.Array  # int32: earlier tokens of the same document in the row
    segment_ids: jax.Array  # int32: 0 is padding


class StepMetrics(NamedTuple):
    """Scalars, float32 but for is_finite, the same on every device."""

    loss: jax.Array  # mean cross entropy in nats over all weighted tokens of the step
    grad_norm: jax.Array  # before clipping
    learning_rate: jax.Array
    target_tokens: jax.Array  # sum of the loss weights
    is_finite: jax.Array  # bool: loss and gradient; where they are not, the update was left out


_ROW_SPEC = PartitionSpec(BATCH_AXES, CONTEXT)
BATCH_SPEC = PartitionSpec(None, *_ROW_SPEC)
_DTYPES = Batch(jnp.int32, jnp.int32, jnp.float32, jnp.int32, jnp.int32)


def compute_dtype(precision: str, platform: str) -> jnp.dtype:
    """config.precision.compute as a dtype; "auto" is bfloat16 except on CPU, which emulates it."""
    name = {"auto": "fp32" if platform == "cpu" else "bf16"}.get(precision, precision)
    return jnp.dtype({"bf16": jnp.bfloat16, "fp32": jnp.float32}[name])


def row_positions(shape: tuple[int, int], mesh: Mesh) -> jax.Array:
    """[rows, tokens] int32: each token's place in its row, in layout order."""
    num_tokens = shape[1]
    positions_T = token_at(jnp.arange(num_tokens, dtype=jnp.int32), num_tokens, mesh.shape[CONTEXT])
    return lax.with_sharding_constraint(jnp.broadcast_to(positions_T, shape), NamedSharding(mesh, _ROW_SPEC))


def build_step(config: Config, mesh: Mesh) -> "TrainStep":
    """The training step of `config` on `mesh`; allocates and compiles nothing yet. The devices need not be here."""
    return TrainStep(config=config, mesh=mesh)


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """The jitted step, with the state and batch it takes. `mesh` may be of devices that are not here."""

    config: Config
    mesh: Mesh

    @cached_property
    def dims(self):
        """The parameters' tree with each one's dimension names."""
        return decoder.dims_of(self.config.model)

    @cached_property
    def abstract_state(self) -> TrainState:
        return abstract_state(self.config, self.mesh, self._optimizer, self.dims)

    @cached_property
    def abstract_batch(self) -> Batch:
        train, num_tokens = self.config.train, self.config.data.sequence_tokens
        shape = (train.accumulation_steps, train.rows_per_step // train.accumulation_steps, num_tokens)
        sharding = NamedSharding(self.mesh, BATCH_SPEC)
        return Batch(*(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for dtype in _DTYPES))

    @cached_property
    def jitted(self):
        """(state, batch) -> (state, StepMetrics); the state's buffers are given up to its successor."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(self._step, donate_argnums=0, out_shardings=(shardings, everywhere))

    def compile(self, extra_options: dict[str, bool | int | str] | None = None):
        """The executable for the mesh's devices, with the compiler options of their platform and `extra_options`.

        Raises:
          UserError: an offload that the program for a GPU does not contain.
        """
        lowered = self.jitted.lower(self.abstract_state, self.abstract_batch)
        compiled = lowered.compile(compiler_options=self.compiler_options | (extra_options or {}))
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
        return compile_options(
            self._platform,
            preset=self.config.runtime.xla_preset,
            transport=self.transport and self.transport.name,
            environment=os.environ,
        )

    def init(self) -> TrainState:
        """The state of step 0, each device making its own part."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        return jax.jit(lambda: make_state(self.config, self.mesh, self._optimizer), out_shardings=shardings)()

    @cached_property
    def transport(self) -> transport.Choice | None:
        """How attention's hops travel, and why that way; None on CPU."""
        return transport.choose(self.config.runtime, tuple(self.mesh.devices.flat))

    @property
    def kernel(self) -> attention.Choice:
        """The attention kernel of the step, and why that one."""
        return attention.choose(
            self.config.attention,
            self.mesh,
            head_dim=self.config.model.head_dim,
            dtype=compute_dtype(self.config.precision.compute, self._platform),
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

    @cached_property
    def _loss_spec(self) -> LossSpec:
        return LossSpec(
            mesh=self.mesh,
            vocab_size=self.config.model.vocab_size,
            chunk_tokens=self.config.memory.loss_chunk_tokens,
            z_loss=self.config.train.z_loss,
            norm_epsilon=self.config.model.norm_epsilon,
        )

    def _hidden_and_head(self, params, batch: Batch):
        """Final hidden states before their norm, its scale, and the output head."""
        attend = attention.make(self.config.attention, self.mesh)
        if self.config.attention.document_mask:
            positions, masks = batch.positions, (batch.positions, batch.segment_ids)
        else:  # a row is one document; attention then knows the order of tokens by their place in it
            positions, masks = row_positions(batch.positions.shape, self.mesh), (None, None)

        def attend_row(q, k, v):
            return attend(q, k, v, *masks)[0]

        return decoder.apply(
            params,
            self.config.model,
            batch.tokens,
            positions,
            attend=attend_row,
            shard=Sharder(self.mesh),
            remat=make_remat(self.config.memory),
            compute_dtype=compute_dtype(self.config.precision.compute, self._platform),
            tables=rope_tables(self.config.model, self.config.data.sequence_tokens),
        )

    def token_losses(self, params, batch: Batch) -> jax.Array:
        """Cross entropy of each token of a batch [rows, tokens], in nats, float32; for evaluation."""
        return token_losses(*self._hidden_and_head(params, batch), batch.targets, self._loss_spec)

    def gradients(self, params, batch: Batch):
        """Gradient and cross entropy, both summed over the step's tokens, one microbatch after the other."""

        def objective(params, part: Batch):
            sums = loss_sums(*self._hidden_and_head(params, part), part.targets, part.loss_weights, self._loss_spec)
            return sums.objective, sums.cross_entropy

        def add_microbatch(gradients, part: Batch):
            part_gradients, cross_entropy = jax.grad(objective, has_aux=True)(params, part)
            return jax.tree.map(jnp.add, gradients, part_gradients), cross_entropy

        gradients, cross_entropy = lax.scan(add_microbatch, jax.tree.map(jnp.zeros_like, params), batch)
        return gradients, cross_entropy.sum()

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        gradients, cross_entropy = self.gradients(state.params, batch)
        # Divided once, by the weights of all ranks and microbatches: one of either may have no target at all.
        target_tokens = batch.loss_weights.sum()
        per_token = jnp.where(target_tokens > 0, 1.0 / target_tokens, 0.0)
        gradients = jax.tree.map(lambda g: g * per_token, gradients)
        loss, grad_norm = cross_entropy * per_token, optax.tree.norm(gradients)

        updates, opt_state = self._optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # A bad step leaves the state as it was: the loop may skip it, or stop with a state worth saving.
        is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(is_finite, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        metrics = StepMetrics(
            loss=loss,
            grad_norm=grad_norm,
            # The optimizer counts the updates it made; a step that was left out is not among them.
            learning_rate=jnp.float32(self._schedule(updates_made(state.opt_state))),
            target_tokens=target_tokens,
            is_finite=is_finite,
        )
        rng = jax.random.key_data(jax.random.split(jax.random.wrap_key_data(state.rng))[0])
        return TrainState(state.step + 1, params, opt_state, rng), metrics
