"""The training step, used by the loop, the plan, the sweep and the benchmarks; only this module jits it."""

import dataclasses
import functools
import os
from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc import attention
from jaxlc.config import Config, LoraConfig
from jaxlc.core import hardware
from jaxlc.core.axes import CONTEXT
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.models import freezing
from jaxlc.models.blocks import mosaic_product
from jaxlc.runtime import compilation_cache, transport
from jaxlc.runtime.xla_flags import compile_options, slop_percent
from jaxlc.sharding.nodes import nodes_of
from jaxlc.sharding.table import ShardingTable, sharding_table
from jaxlc.step import mixed_precision, sequence_order
from jaxlc.step.batch import BATCH_SPEC, Batch, abstract_batch, abstract_sequences
from jaxlc.step.custom_model import NATURAL, CustomObjective, Model, check_methods, check_supported
from jaxlc.step.layer_kernels import by_kind, layer_kernels
from jaxlc.step.losses.loss import TokenLoss
from jaxlc.step.losses.policy_loss import PolicyLoss
from jaxlc.step.objective import Objective
from jaxlc.step.optimizer import StepOptimizer, learning_rate_schedule
from jaxlc.step.sequence_order import SequenceOrder
from jaxlc.step.state import (
    DEVICE,
    TrainState,
    abstract_state,
    bytes_per_device,
    first_state,
    make_state,
    memory_spaces,
    to_memory_kind,
)
from jaxlc.step.step_function import StepFunction, StepMetrics

_HOST_MEMORY_SPACE = "S(5)"  # in the layouts of XLA's programs


def build_step(
    config: Config,
    mesh: Mesh,
    *,
    model: Model | None = None,
    loss: TokenLoss | None = None,
    policy_loss: PolicyLoss | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> "TrainStep":
    """The training step of `config` on `mesh`; allocates and compiles nothing. The devices may be absent.

    Args:
      model: a model to train instead of the decoder of config.model; see `custom_model.Model`.
      loss: the loss of each token instead of cross entropy: `(logits float32 [tokens, vocab_size], targets int32
        [tokens]) -> losses float32 [tokens]`, differentiable. It is called for chunks of tokens.
      policy_loss: a loss of the log-probabilities of answers instead of the formula of config.posttrain.loss; see
        `policy_loss.PolicyLoss`. That setting then selects the arrays of a batch, and what the sum is divided by.
      optimizer: an optax optimizer that replaces config.optimizer, gradient clipping included.
    Raises:
      UserError: the devices do not support config.precision or config.runtime.expert_kernel, or a setting does not
        support the custom model, loss or optimizer.
    """
    mixed_precision.check_devices(config.precision, mesh.devices.flat)
    if config.runtime.expert_kernel == "mosaic":
        mosaic_product.check_devices(mesh.devices.flat)
    check_methods("model", model, ("init", "apply"))
    check_methods("optimizer", optimizer, ("init", "update"))
    check_supported(config, has_model=model is not None, has_loss=loss is not None, has_optimizer=optimizer is not None)
    if policy_loss is not None and not config.posttrain.loss:
        raise UserError("policy_loss has no effect without config.posttrain.loss; set it to grpo, dapo, dr_grpo or dpo")
    return TrainStep(
        config=config, mesh=mesh, model=model, token_loss=loss, policy_loss=policy_loss, custom_optimizer=optimizer
    )


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """The jitted step and its abstract arguments. The devices of `mesh` may be absent (AOT compilation)."""

    config: Config
    mesh: Mesh
    model: Model | None = None  # the next four: see `build_step`
    token_loss: TokenLoss | None = None
    policy_loss: PolicyLoss | None = None
    custom_optimizer: optax.GradientTransformation | None = None

    @cached_property
    def objective(self) -> Objective | CustomObjective:
        options = dict(config=self.config, mesh=self.mesh, token_loss=self.token_loss)
        if self.model is not None:
            return CustomObjective(model=self.model, **options)
        return Objective(**options, policy_loss=self.policy_loss)

    @property
    def compute_dtype(self) -> jax.numpy.dtype:
        """The dtype of the residual stream and of all matrix products that are not in FP8."""
        return mixed_precision.compute_dtype(self.config.precision.compute, self.mesh.devices.flat[0].platform)

    @property
    def dims(self):
        """The parameter tree with a tuple of dimension names per leaf."""
        return self.objective.dims

    @property
    def frozen(self) -> frozenset[str]:
        """The names of the parameters that are not trained, as in `models.freezing`."""
        return self.objective.frozen

    @cached_property
    def abstract_state(self) -> TrainState:
        return abstract_state(
            self.config, self.storage_mesh, self.objective.init_params, self._optimizer, self.dims, self.frozen
        )

    @property
    def sharding_table(self) -> ShardingTable:
        """The shape, sharding and bytes per device of each parameter, to print or to display in a notebook."""
        return sharding_table(self.abstract_state.params, self.dims, self.storage_mesh)

    @property
    def storage_mesh(self) -> Mesh:
        """The mesh of the shardings of the state: with config.memory.node_copy_devices, the same devices with fsdp and
        context split into axes over nodes and within a node."""
        nodes = nodes_of(self.mesh, self.config.memory.node_copy_devices)
        return self.mesh if nodes is None else nodes.mesh

    @cached_property
    def memory_spaces(self) -> TrainState:
        """The memory of each array of the state; the shardings of `abstract_state` drop it for absent devices."""
        return memory_spaces(self.config.memory, self.mesh, self._optimizer, self.abstract_state)

    @cached_property
    def abstract_batch(self) -> Batch:
        return abstract_batch(self.config, self.mesh, self.sequence_order.chained is not None)

    @cached_property
    def jitted(self):
        """(state, batch) -> (state, StepMetrics); the buffers of the old state are donated."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        replicated = NamedSharding(self.mesh, PartitionSpec())
        function = StepFunction(
            config=self.config,
            objective=self.objective,
            optimizer=self._step_optimizer,
            memory_spaces=self.memory_spaces,
        )

        def _step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:  # a name in profiles
            return function(state, batch)

        return jax.jit(_step, donate_argnums=0, out_shardings=(shardings, replicated))

    def lower(self) -> jax.stages.Lowered:
        return self.jitted.lower(self.abstract_state, self.abstract_batch)

    def compile(
        self,
        extra_options: dict[str, bool | int | str] | None = None,
        lowered: jax.stages.Lowered | None = None,
    ) -> jax.stages.Compiled:
        """Compiles the step for the devices of the mesh, with `compiler_options` and `extra_options`.

        Args:
          lowered: the result of `lower`, if the caller changed it.
        Raises:
          UserError: config.memory.offload is set, and the program for a GPU has nothing in host memory.
        """
        compiled = self._compile(lowered or self.lower(), extra_options)
        offload = self.config.memory.offload
        if offload and self._platform == "gpu" and not _uses_host_memory(compiled):
            raise UserError(
                f"config.memory.offload={offload} has no effect: the compiled step has no buffers in host memory;"
                " these layers do not compute such tensors, or this compiler ignores offloading"
            )
        return compiled

    @cached_property
    def jitted_evaluation(self):
        """(params, microbatch) -> the loss of each token in nats, float32 [sequences, tokens], replicated."""

        def token_losses(params, batch: Batch) -> jax.Array:
            params = jax.tree.map(to_memory_kind, params, self.memory_spaces.params)  # only types: see `StepFunction`
            return self.objective.token_losses(params, batch)

        return jax.jit(token_losses, out_shardings=NamedSharding(self.mesh, PartitionSpec()))

    def lower_evaluation(self) -> jax.stages.Lowered:
        """Lowers `jitted_evaluation` for one sequence per rank of the data and fsdp axes."""
        return self.jitted_evaluation.lower(self.abstract_state.params, self.abstract_evaluation_batch)

    @cached_property
    def abstract_evaluation_batch(self) -> Batch:
        """Arrays [sequences, tokens]."""
        return abstract_sequences(self.config, self.mesh, self.sequence_order.chained is not None)

    def compile_evaluation(
        self,
        extra_options: dict[str, bool | int | str] | None = None,
        lowered: jax.stages.Lowered | None = None,
    ) -> jax.stages.Compiled:
        """Compiles `jitted_evaluation` with the options of the step, so that it uses the same transport and memory.

        Args:
          lowered: the result of `lower_evaluation`, if the caller changed it.
        """
        return self._compile(lowered or self.lower_evaluation(), extra_options)

    @cached_property
    def reference(self) -> "TrainStep | None":
        """The model of posttrain.reference_model, with its weights in host memory; None: the loss needs none.

        It is never trained: only its parameters and `jitted_log_probs` are used.

        Raises:
          Unsupported: a custom model.
        """
        config = self.config
        if not config.posttrain.uses_reference_model:
            return None
        if self.model is not None:
            raise Unsupported("unsupported: config.posttrain.reference='model' with a custom model")
        init_from = config.posttrain.reference_model or config.model.init_from
        reference_config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, init_from=init_from),
            memory=dataclasses.replace(config.memory, parameters="host", optimizer="device", remat="full"),
            train=dataclasses.replace(config.train, trainable=(), frozen=()),
            lora=LoraConfig(),
        )
        return dataclasses.replace(self, config=reference_config)

    @cached_property
    def jitted_log_probs(self):
        """(params, batch) -> the log-probability of each target, float32, with the shape and sharding of the batch."""

        def log_probs(params, batch: Batch) -> jax.Array:
            params = jax.tree.map(to_memory_kind, params, self.memory_spaces.params)  # only types: see `StepFunction`
            return jax.lax.map(lambda part: self.objective.log_probs(params, part), batch)

        return jax.jit(log_probs, out_shardings=NamedSharding(self.mesh, BATCH_SPEC))

    def lower_log_probs(self) -> jax.stages.Lowered:
        """Lowers `jitted_log_probs` for the batch of a step."""
        return self.jitted_log_probs.lower(
            self.abstract_state.params, self.abstract_batch._replace(reference_log_probs=None)
        )

    def compile_log_probs(
        self,
        extra_options: dict[str, bool | int | str] | None = None,
        lowered: jax.stages.Lowered | None = None,
    ) -> jax.stages.Compiled:
        """Compiles `jitted_log_probs`; as `compile_evaluation`."""
        return self._compile(lowered or self.lower_log_probs(), extra_options)

    def _compile(self, lowered: jax.stages.Lowered, extra_options) -> jax.stages.Compiled:
        with compilation_cache.for_step(self.mesh.devices.flat):
            return lowered.compile(compiler_options=self.compiler_options | (extra_options or {}))

    @property
    def compiler_options(self) -> dict[str, bool | int | str]:
        """Options for the platform, runtime.xla_preset and the transport, without those that XLA_FLAGS sets."""
        memory = self.config.memory
        return compile_options(
            self._platform,
            preset=self.config.runtime.xla_preset,
            transport=self.transport and self.transport.name,
            uses_host_memory=bool(memory.offload) or "host" in (memory.parameters, memory.optimizer),
            is_deterministic=self.config.runtime.deterministic,
            max_slop_percent=self._max_slop_percent,
            environment=os.environ,
        )

    @property
    def _max_slop_percent(self) -> int | None:
        device, runtime = hardware.find(self.mesh.devices.flat[0].device_kind), self.config.runtime
        if device is None or runtime.unified_memory:
            return None
        arguments_bytes = bytes_per_device(self.abstract_state, self.memory_spaces, DEVICE)
        arguments_bytes += bytes_per_device(self.abstract_batch)
        return slop_percent(runtime.memory_fraction * device.memory_bytes, device.memory_bytes, arguments_bytes)

    def init(self, params=None) -> TrainState:
        """The state of step 0; each device initializes its own shards.

        Args:
          params: pretrained parameters with the shardings of `abstract_state`. None: random ones.
        """
        return first_state(
            self.config, self.objective.init_params, self._optimizer, self.abstract_state, params, self.frozen
        )

    def init_params(self, names: Set[str]) -> dict:
        """The parameters of step 0 with these names, as in `models.freezing`; the others are not computed."""

        def select(tree) -> dict:
            return freezing.split(tree, names)[1]

        shardings = jax.tree.map(lambda x: x.sharding, select(self.abstract_state.params))
        state = functools.partial(make_state, self.config, self.objective.init_params, self._optimizer, self.frozen)
        return jax.jit(lambda: select(state().params), out_shardings=shardings)()

    @cached_property
    def transport(self) -> transport.TransportSelection | None:
        """The transport of attention's sends and why it was selected; None on CPU."""
        return transport.choose(self.config.runtime, tuple(self.mesh.devices.flat))

    @property
    def kernels(self) -> dict[str, attention.KernelSelection]:
        """The attention kernel of each kind of layers and why it was selected."""
        return layer_kernels(self.config, self.mesh)

    @property
    def kernel_names(self) -> str:
        """ "cudnn"; if the kinds of layers have different kernels, "sliding: pallas, full: cudnn"."""
        return ", ".join(by_kind({kind: kernel.name for kind, kernel in self.kernels.items()}))

    @property
    def kernel_choice(self) -> str:
        """As `kernel_names`, with reasons."""
        return "; ".join(by_kind({kind: f"{kernel.name} ({kernel.reason})" for kind, kernel in self.kernels.items()}))

    @cached_property
    def sequence_order(self) -> SequenceOrder:
        """The order of tokens in the arrays of a batch."""
        num_tokens, context = self.config.data.seq_len, self.mesh.shape[CONTEXT]
        if self.model is None:
            return sequence_order.choose(self.config, context)
        if self.objective.token_order == NATURAL:
            return sequence_order.natural(num_tokens)
        return sequence_order.zigzag(num_tokens, context)

    @property
    def _platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @cached_property
    def _step_optimizer(self) -> StepOptimizer:
        schedule = learning_rate_schedule(self.config.optimizer, self.config.train.steps)
        return StepOptimizer(config=self.config.optimizer, schedule=schedule, custom=self.custom_optimizer)

    @cached_property
    def _optimizer(self) -> optax.GradientTransformation:
        """The optimizer of all trainable parameters."""
        return self._step_optimizer.of(freezing.split(self.dims, self.frozen)[0])


def _uses_host_memory(compiled: jax.stages.Compiled) -> bool:
    """Whether the program has buffers in host memory.

    A program from the compilation cache may lack their sizes, so its text is also searched for their memory space.
    """
    return bool(compiled.memory_analysis().host_temp_size_in_bytes) or _HOST_MEMORY_SPACE in compiled.as_text()
