"""The training step: built here for the loop, the plan, the sweeps and the benchmarks alike. Nobody else jits one."""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc import attention
from jaxlc.attention.tiled import layout_of, tiles_of
from jaxlc.config import Config, MemoryConfig
from jaxlc.core.axes import BATCH_AXES, CONTEXT
from jaxlc.core.errors import UserError
from jaxlc.models import decoder
from jaxlc.models.rope import rope_tables
from jaxlc.models.tiled import Tiling
from jaxlc.runtime import transport
from jaxlc.runtime.xla_flags import compile_options
from jaxlc.sharding.layout import token_at
from jaxlc.sharding.rules import Sharder
from jaxlc.train import precision, update
from jaxlc.train.loss import LossSpec, loss_sums, token_losses
from jaxlc.train.optimizer import learning_rate_schedule, make_optimizer, updates_made
from jaxlc.train.remat import keeps_attention, make_remat
from jaxlc.train.state import (
    TrainState,
    abstract_state,
    first_state,
    is_on_host,
    lacks_host_memory,
    memory_spaces,
    put,
)


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
    loss_scale: jax.Array | None  # of fp16 only: this step's
    skipped_steps: jax.Array | None  # of fp16 only, int32: updates left out since step 0


_ROW_SPEC = PartitionSpec(BATCH_AXES, CONTEXT)
BATCH_SPEC = PartitionSpec(None, *_ROW_SPEC)
_DTYPES = Batch(jnp.int32, jnp.int32, jnp.float32, jnp.int32, jnp.int32)


def row_positions(shape: tuple[int, int], mesh: Mesh) -> jax.Array:
    """[rows, tokens] int32: each token's place in its row, in layout order."""
    num_tokens = shape[1]
    positions_T = token_at(jnp.arange(num_tokens, dtype=jnp.int32), num_tokens, mesh.shape[CONTEXT])
    return lax.with_sharding_constraint(jnp.broadcast_to(positions_T, shape), NamedSharding(mesh, _ROW_SPEC))


def build_step(config: Config, mesh: Mesh) -> "TrainStep":
    """The training step of `config` on `mesh`; allocates and compiles nothing yet. The devices need not be here.

    Raises:
      UserError: they cannot multiply in config.precision.
    """
    precision.check_devices(config.precision, mesh.devices.flat)
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
    def memory_spaces(self) -> TrainState:
        """Where each array of the state rests; `abstract_state` tells it only of devices that are here."""
        return memory_spaces(self.config.memory, self.mesh, self._optimizer, self.abstract_state)

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
        return compile_options(
            self._platform,
            preset=self.config.runtime.xla_preset,
            transport=self.transport and self.transport.name,
            environment=os.environ,
        )

    def init(self) -> TrainState:
        """The state of step 0, each device making its own part."""
        return first_state(self.config, self.mesh, self._optimizer, self.abstract_state)

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
            dtype=precision.compute_dtype(self.config.precision.compute, self._platform),
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

    def _hidden_and_head(self, params, batch: Batch, histories: dict | None = None):
        """Final hidden states before their norm, its scale, and the output head; hidden states in tiles, if so set."""
        if self.config.attention.document_mask:
            positions, masks = batch.positions, (batch.positions, batch.segment_ids)
        else:  # a row is one document; attention then knows the order of tokens by their place in it
            positions, masks = row_positions(batch.positions.shape, self.mesh), (None, None)

        return decoder.apply(
            params,
            self.config.model,
            self._in_tiles(batch.tokens),
            self._in_tiles(positions),
            attend=self._attend(*masks),
            shard=Sharder(self.mesh, weights_on_host=is_on_host(params)),
            remat=make_remat(self._memory),
            compute_dtype=precision.compute_dtype(self.config.precision.compute, self._platform),
            tables=rope_tables(self.config.model, self.config.data.sequence_tokens),
            fp8=precision.make_fp8(self.config.precision, histories),
            histories=histories,
        )

    @property
    def _memory(self) -> MemoryConfig:
        """config.memory, without offloading where there is no host memory to use."""
        memory = self.config.memory
        if lacks_host_memory(self.mesh) is None:
            return memory
        return dataclasses.replace(memory, keep=(*memory.keep, *memory.offload), offload=())

    @property
    def _num_tiles(self) -> int:
        """Of a row; 0: layers do not run in tiles."""
        tile_tokens = self.config.memory.tile_tokens
        return tile_tokens and self.config.data.sequence_tokens // (self.mesh.shape[CONTEXT] * tile_tokens)

    def _in_tiles(self, x_BT: jax.Array) -> jax.Array:
        return tiles_of(x_BT, self.mesh.shape[CONTEXT], self._num_tiles) if self._num_tiles else x_BT

    def _attend(self, positions: jax.Array | None, segment_ids: jax.Array | None) -> Callable | Tiling:
        """Attention as the decoder wants it."""
        if self._num_tiles:
            tile_attention = attention.make_tiled(
                self.config.attention, self.mesh, tiles=self._num_tiles, num_kv_heads=self.config.model.num_kv_heads
            )
            return Tiling(tile_attention, segment_ids, keeps_attention(self._memory))
        attend = attention.make(self.config.attention, self.mesh)
        return lambda q, k, v: attend(q, k, v, positions, segment_ids)[0]

    def token_losses(self, params, batch: Batch) -> jax.Array:
        """Cross entropy of each token of a batch [rows, tokens], in nats, float32; for evaluation."""
        losses = token_losses(*self._hidden_and_head(params, batch), self._in_tiles(batch.targets), self._loss_spec)
        return layout_of(losses, self.mesh.shape[CONTEXT]) if self._num_tiles else losses

    def gradients(self, params, batch: Batch):
        """Gradient and cross entropy, both summed over the step's tokens, one microbatch after the other."""
        (gradients, _), cross_entropy = self._sums(params, None, batch)
        return gradients, cross_entropy

    def _sums(self, params, histories: dict | None, batch: Batch):
        """((gradient, next histories), cross entropy) of a batch: sums over it; of histories, the largest."""

        def objective(params, histories, part: Batch):
            hidden_and_head = self._hidden_and_head(params, part, histories)
            targets, weights = self._in_tiles(part.targets), self._in_tiles(part.loss_weights)
            sums = loss_sums(*hidden_and_head, targets, weights, self._loss_spec)
            return sums.objective, sums.cross_entropy

        differentiate = jax.grad(objective, argnums=(0, 1), has_aux=True)

        def add_microbatch(totals, part: Batch):
            (gradients, seen), (part_totals, cross_entropy) = totals, differentiate(params, histories, part)
            gradients = update.add(gradients, part_totals[0], self.dims)
            return (gradients, jax.tree.map(jnp.maximum, seen, part_totals[1])), cross_entropy

        if not is_on_host(params):
            zeros = jax.tree.map(jnp.zeros_like, (params, histories))
            totals, cross_entropy = lax.scan(add_microbatch, zeros, batch)
            return totals, cross_entropy.sum()
        # No zeros: they would be made on the device. The first microbatch's gradients are where the others are added.
        first, others = jax.tree.map(lambda x: x[0], batch), jax.tree.map(lambda x: x[1:], batch)
        totals, first_cross_entropy = differentiate(params, histories, first)
        if len(batch.tokens) == 1:
            return totals, first_cross_entropy
        totals, cross_entropy = lax.scan(add_microbatch, totals, others)
        return totals, first_cross_entropy + cross_entropy.sum()

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
        (gradients, histories), cross_entropy = self._sums(state.params, state.scaling.histories, batch)
        loss = cross_entropy * to_mean
        grad_norm = update.gradient_norm(gradients, self.dims, to_mean)
        # A bad step leaves the state as it was: the loop may skip it, or stop with a state worth saving.
        is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        params, opt_state = update.update(
            lambda dims: make_optimizer(self.config.optimizer, self._schedule, dims),
            self.dims,
            update.Weights(state.params, state.opt_state),
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
        scaling = precision.after_step(state.scaling, histories, is_finite, self.config.precision)
        rng = jax.random.key_data(jax.random.split(jax.random.wrap_key_data(state.rng))[0])
        return TrainState(state.step + 1, params, opt_state, rng, scaling), metrics
