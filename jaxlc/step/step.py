"""The training step, used by the loop, the plan, the sweep and the benchmarks; only this module
jits it.

One optimizer step is a pure function: loss and gradients of a batch, the gradient norm, the update,
the metrics. Before it is compiled, its attention kernels are checked on the GPU that is about to
train.
"""

import os
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc import attention
from jaxlc.attention.kernels import pallas
from jaxlc.attention.kernels.cudnn import check_deterministic
from jaxlc.attention.kernels.packed_check import check_packed
from jaxlc.attention.key_ranges import SMALL_SHARED_MEMORY, WIDE_HEAD_DIM
from jaxlc.attention.recurrence.sharded_rule import check_kernel
from jaxlc.config import Config, LoraConfig, ModelConfig, unchecked
from jaxlc.config.checks.all_checks import check
from jaxlc.config.kinds import MIXERS
from jaxlc.config.kinds.contract import RecurrentKind
from jaxlc.core import CONTEXT, Unsupported, UserError, hardware
from jaxlc.models import expert_products, lora
from jaxlc.models.contract import ChoosesKernel
from jaxlc.models.expert_products import check_product
from jaxlc.models.kinds import kinds_on_mesh, mixers_on_mesh
from jaxlc.posttrain.losses import PolicyLoss, PolicySums, denominator, means
from jaxlc.runtime import compilation_cache, xla_flags
from jaxlc.runtime.xla_flags import Options, compile_options, slop_percent
from jaxlc.sharding.mesh import nodes_of
from jaxlc.sharding.rules import ShardingTable, sharding_table
from jaxlc.step import precision, update
from jaxlc.step.batch import (
    BATCH_SPEC,
    Batch,
    SequenceOrder,
    abstract_batch,
    attention_pairs,
    choose_order,
    in_natural_order,
    in_zigzag_order,
    num_invalid_indices,
)
from jaxlc.step.custom_model import NATURAL, CustomObjective, Model, check_methods, check_supported
from jaxlc.step.loss import (
    ExpertMetrics,
    TokenLoss,
    expert_metrics,
    num_filled,
    with_balanced_biases,
)
from jaxlc.step.objective import Objective
from jaxlc.step.state import DEVICE, StateMaker, TrainState, bytes_per_device, to_memory_kind
from jaxlc.step.update import StepOptimizer, learning_rate_schedule


class StepMetrics(NamedTuple):
    """Scalars, float32 unless noted, replicated."""

    # Mean cross entropy in nats over all weighted tokens of the step; NaN if a token or position is
    # out of range.
    loss: jax.Array
    grad_norm: jax.Array  # before clipping
    learning_rate: jax.Array
    target_tokens: jax.Array  # sum of the loss weights
    is_finite: jax.Array  # bool: of loss and gradients; if False, the update was skipped
    loss_scale: jax.Array | None  # with fp16 only: of this step
    skipped_steps: jax.Array | None  # with fp16 only, int32: updates skipped since step 0
    attention_pairs: jax.Array | None  # with a document mask only: see `batch.attention_pairs`
    policy: PolicySums | None  # with posttrain.loss only: the means of the step
    # with model.experts.num_experts only; arrays [layers with experts] among them
    experts: ExpertMetrics | None


def layer_kernels(config: Config, mesh: Mesh) -> dict[str, attention.KernelSelection]:
    """The attention kernel of each kind of layers that chooses one, and why it was selected.

    Raises:
      UserError: the kernel that the config names does not support a kind.
    """
    dtype = precision.compute_dtype(config.precision, mesh)
    kernels = {}
    for kind, on in kinds_on_mesh(config, mesh, dtype).items():
        for mixer, own in mixers_on_mesh(on):
            if issubclass(mixer, ChoosesKernel):
                kernels[kind] = mixer.kernel(own)
    return kernels


def by_kind(texts: Mapping[str, str]) -> Iterator[str]:
    """Yields the texts of the kinds of layers with their names; if they are equal, the text alone;
    if there are none, "none"."""
    if len(set(texts.values())) <= 1:
        yield next(iter(texts.values()), "none")
    else:
        for kind, text in texts.items():
            yield f"{kind}: {text}"


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
        `posttrain.losses.PolicyLoss`. That setting then selects the arrays of a batch, and what the sum is divided by.
      optimizer: an optax optimizer that replaces config.optimizer, gradient clipping included.
    Raises:
      UserError: the devices do not support config.precision, config.runtime.expert_kernel or
        config.runtime.delta_kernel, or a setting does not support the custom model, loss or optimizer.
    """
    on_devices = precision.on_devices(config.precision, mesh.devices.flat)
    if on_devices != config.precision:
        config = replace(config, precision=on_devices)
        check(config, on_devices=False)
    if config.runtime.expert_kernel == "mosaic":
        expert_products.check_devices(mesh.devices.flat)
    for setting, alternative, excluded in (
        ("expert_kernel", "blocks", SMALL_SHARED_MEMORY),
        ("delta_kernel", "xla", ()),
    ):
        if vars(config.runtime)[setting] == "pallas":
            pallas.check_devices(mesh.devices.flat, setting, alternative, excluded)
    check_methods("model", model, ("init", "apply"))
    check_methods("optimizer", optimizer, ("init", "update"))
    check_supported(
        config,
        has_model=model is not None,
        has_loss=loss is not None,
        has_optimizer=optimizer is not None,
    )
    if policy_loss is not None and not config.posttrain.loss:
        raise UserError(
            "policy_loss has no effect without config.posttrain.loss; set it to grpo, dapo, dr_grpo, cispo or dpo"
        )
    return TrainStep(
        config=config,
        mesh=mesh,
        model=model,
        token_loss=loss,
        policy_loss=policy_loss,
        custom_optimizer=optimizer,
    )


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """The jitted step and its abstract arguments. The devices of `mesh` may be absent (AOT
    compilation).
    """

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
        return precision.compute_dtype(self.config.precision, self.mesh)

    @property
    def dims(self):
        """The parameter tree with a tuple of dimension names per leaf."""
        return self.objective.dims

    @property
    def frozen(self) -> frozenset[str]:
        """The names of the parameters that are not trained, as in `models.lora`."""
        return self.objective.frozen

    @cached_property
    def abstract_state(self) -> TrainState:
        return self._states.abstract()

    @property
    def sharding_table(self) -> ShardingTable:
        """The shape, sharding and bytes per device of each parameter, to print or to display in a
        notebook.
        """
        return sharding_table(self.abstract_state.params, self.dims, self.storage_mesh)

    @property
    def storage_mesh(self) -> Mesh:
        """The mesh of the shardings of the state: with config.memory.node_copy_devices, the same
        devices with fsdp and context split into axes over nodes and within a node."""
        nodes = nodes_of(self.mesh, self.config.memory.node_copy_devices)
        return self.mesh if nodes is None else nodes.mesh

    @cached_property
    def memory_spaces(self) -> TrainState:
        """The memory of each array of the state; the shardings of `abstract_state` drop it for
        absent devices.
        """
        return self._states.memory_spaces(self.abstract_state)

    @cached_property
    def abstract_batch(self) -> Batch:
        return abstract_batch(self.config, self.mesh, self.sequence_order.chained is not None)

    @cached_property
    def jitted(self):
        """(state, batch) -> (state, StepMetrics); the buffers of the old state are donated."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        replicated = NamedSharding(self.mesh, PartitionSpec())

        # a name in profiles
        def _step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
            return self._run(state, batch)

        return jax.jit(_step, donate_argnums=0, out_shardings=(shardings, replicated))

    def _run(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """One optimizer step, under `jit`."""
        trainable_dims, _ = lora.split(self.dims, self.frozen)
        is_decoder = self.model is None
        has_documents = self.config.attention.document_mask and is_decoder
        num_invalid = num_invalid_indices(batch, self.config.model) if is_decoder else 0
        pairs = attention_pairs(batch, self.config.model) if has_documents else None
        # No copy, only types: with absent devices the types of the arguments do not include the
        # memory space.
        state = jax.tree.map(to_memory_kind, state, self.memory_spaces)
        # The division by the sum of weights of all ranks and microbatches: a single one may have no
        # target tokens.
        target_tokens = batch.loss_weights.sum()
        posttrain = self.config.posttrain
        total = denominator(batch, posttrain)
        to_mean = jnp.where(total > 0, 1.0 / total, 0.0)
        loss_scale = state.scaling.loss_scale
        # multiplies the mean loss, before anything is rounded to float16
        if loss_scale is not None:
            batch = batch._replace(loss_weights=batch.loss_weights * (loss_scale.scale * to_mean))
            to_mean = 1.0 / loss_scale.scale
        sums, gradients, histories, experts = self.objective.loss_and_grads(
            state.params, batch, state.scaling.histories
        )
        policy = means(sums, batch, posttrain) if posttrain.loss else None
        loss = jnp.where(
            num_invalid == 0, sums * to_mean if policy is None else policy.loss, jnp.nan
        )
        grad_norm = update.gradient_norm(gradients, trainable_dims, to_mean)
        # A step that is not finite does not change the parameters, so the loop can skip it, or stop
        # with a valid state.
        is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        trainable, frozen = lora.split(state.params, self.frozen)
        trainable, opt_state = update.update(
            self._step_optimizer.of,
            trainable_dims,
            update.ParamsAndOptState(trainable, state.opt_state),
            gradients,
            scale=to_mean,
            grad_norm=grad_norm,
            is_finite=is_finite,
        )
        if experts is not None and self.config.train.balance_bias_rate:
            model = self.config.model
            train = self.config.train
            trainable = with_balanced_biases(trainable, experts.counts_LE, is_finite, model, train)
        metrics = StepMetrics(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=self._step_optimizer.learning_rate(state.opt_state),
            target_tokens=target_tokens,
            is_finite=is_finite,
            loss_scale=loss_scale and loss_scale.scale,
            skipped_steps=loss_scale and loss_scale.skipped_steps + ~is_finite,
            attention_pairs=pairs,
            policy=policy,
            experts=experts and expert_metrics(experts, num_filled(batch.segment_ids)),
        )
        scaling = precision.after_step(state.scaling, histories, is_finite, self.config.precision)
        rng = jax.random.key_data(jax.random.split(jax.random.wrap_key_data(state.rng))[0])
        params = lora.join(trainable, frozen) if self.frozen else trainable
        return TrainState(state.step + 1, params, opt_state, rng, scaling), metrics

    def lower(self) -> jax.stages.Lowered:
        return self.jitted.lower(self.abstract_state, self.abstract_batch)

    def compile(
        self,
        extra_options: Options | None = None,
        lowered: jax.stages.Lowered | None = None,
    ) -> jax.stages.Compiled:
        """Compiles the step for the devices of the mesh, with `compiler_options` and `extra_options`.

        Args:
          lowered: the result of `lower`, if the caller changed it.
        Raises:
          UserError: config.memory.offload is set, and the program for a GPU has nothing in host memory.
        """
        compiled = self.compile_lowered(lowered or self.lower(), extra_options)
        offload = self.config.memory.offload
        # A program from the compilation cache may lack the sizes of its buffers in host memory, so
        # its text is also searched for their memory space.
        if (
            offload
            and self._platform == "gpu"
            and not compiled.memory_analysis().host_temp_size_in_bytes
            and _HOST_MEMORY_SPACE not in compiled.as_text()
        ):
            raise UserError(
                f"config.memory.offload={offload} has no effect: the compiled step has no buffers in host memory;"
                " these layers do not compute such tensors, or this compiler ignores offloading"
            )
        return compiled

    @cached_property
    def jitted_evaluation(self):
        """(params, microbatch) -> the loss of each token in nats, float32 [sequences, tokens],
        replicated.
        """

        def token_losses(params, batch: Batch) -> jax.Array:
            # only types: see `_run`
            params = jax.tree.map(to_memory_kind, params, self.memory_spaces.params)
            return self.objective.token_losses(params, batch)

        return jax.jit(token_losses, out_shardings=NamedSharding(self.mesh, PartitionSpec()))

    def lower_evaluation(self) -> jax.stages.Lowered:
        """Lowers `jitted_evaluation` for one sequence per rank of the data and fsdp axes."""
        return self.jitted_evaluation.lower(
            self.abstract_state.params, self.abstract_evaluation_batch
        )

    @cached_property
    def abstract_evaluation_batch(self) -> Batch:
        """Arrays [sequences, tokens]."""
        has_fragments = self.sequence_order.chained is not None
        return abstract_batch(self.config, self.mesh, has_fragments, is_evaluated=True)

    def compile_evaluation(self) -> jax.stages.Compiled:
        """Compiles `jitted_evaluation`."""
        return self.compile_lowered(self.lower_evaluation())

    @cached_property
    def reference(self) -> "TrainStep | None":
        """The model of posttrain.reference_model, with its weights in host memory; None: the loss
        needs none.

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
        reference_config = unchecked(
            config,
            {
                "model.init_from": init_from,
                "memory.parameters": "host",
                "memory.optimizer": "device",
                "memory.remat": "full",
                "train.trainable": (),
                "train.frozen": (),
                "posttrain.replay_routing": False,
            },
            lora=LoraConfig(),
        )
        return replace(self, config=reference_config)

    @cached_property
    def jitted_log_probs(self):
        """(params, batch) -> the log-probability of each target, float32, with the shape and
        sharding of the batch.
        """

        def log_probs(params, batch: Batch) -> jax.Array:
            # only types: see `_run`
            params = jax.tree.map(to_memory_kind, params, self.memory_spaces.params)
            return jax.lax.map(lambda part: self.objective.log_probs(params, part), batch)

        return jax.jit(log_probs, out_shardings=NamedSharding(self.mesh, BATCH_SPEC))

    def lower_log_probs(self) -> jax.stages.Lowered:
        """Lowers `jitted_log_probs` for the batch of a step."""
        return self.jitted_log_probs.lower(
            self.abstract_state.params, self.abstract_batch._replace(reference_log_probs=None)
        )

    def compile_lowered(
        self, lowered: jax.stages.Lowered, extra_options: Options | None = None
    ) -> jax.stages.Compiled:
        """Compiles a program with the options of the step, so that it uses the same transport and
        memory."""
        with compilation_cache.for_step(self.mesh.devices.flat):
            return lowered.compile(compiler_options=self.compiler_options | (extra_options or {}))

    @property
    def compiler_options(self) -> Options:
        """Options for the platform, runtime.xla_preset and the transport, without those that
        XLA_FLAGS sets.
        """
        memory = self.config.memory
        return compile_options(
            self._platform,
            preset=self.config.runtime.xla_preset,
            transport=self.transport and self.transport.name,
            uses_host_memory=bool(memory.offload)
            or "host" in (memory.parameters, memory.optimizer),
            is_deterministic=self.config.runtime.deterministic,
            max_slop_percent=self._max_slop_percent,
            environment=os.environ,
        )

    @property
    def _max_slop_percent(self) -> int | None:
        device = hardware.find(self.mesh.devices.flat[0].device_kind)
        runtime = self.config.runtime
        if device is None or runtime.unified_memory:
            return None
        arguments_bytes = bytes_per_device(self.abstract_state, self.memory_spaces, DEVICE)
        arguments_bytes += bytes_per_device(self.abstract_batch)
        return slop_percent(
            runtime.memory_fraction * device.memory_bytes, device.memory_bytes, arguments_bytes
        )

    def init(self, params=None) -> TrainState:
        """The state of step 0; each device initializes its own shards.

        Args:
          params: pretrained parameters with the shardings of `abstract_state`. None: random ones.
        """
        return self._states.on_devices(self.abstract_state, params)

    def init_params(self, names: Set[str]) -> dict:
        """The parameters of step 0 with these names, as in `models.lora`; the others are not
        computed.
        """

        def select(tree) -> dict:
            return lora.split(tree, names)[1]

        shardings = jax.tree.map(lambda x: x.sharding, select(self.abstract_state.params))
        made = jax.jit(lambda: select(self._states.make().params), out_shardings=shardings)
        return made()

    @cached_property
    def transport(self) -> xla_flags.TransportSelection | None:
        """The transport of attention's sends and why it was selected; None on CPU."""
        return xla_flags.choose(self.config.runtime, tuple(self.mesh.devices.flat))

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
        return "; ".join(
            by_kind(
                {kind: f"{kernel.name} ({kernel.reason})" for kind, kernel in self.kernels.items()}
            )
        )

    @cached_property
    def sequence_order(self) -> SequenceOrder:
        """The order of tokens in the arrays of a batch."""
        num_tokens = self.config.data.seq_len
        context = self.mesh.shape[CONTEXT]
        if self.model is None:
            return choose_order(self.config, context)
        if self.objective.token_order == NATURAL:
            return in_natural_order(num_tokens)
        return in_zigzag_order(num_tokens, context)

    @property
    def _platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @cached_property
    def _states(self) -> StateMaker:
        return StateMaker(
            config=self.config,
            mesh=self.storage_mesh,
            init_params=self.objective.init_params,
            optimizer=self._step_optimizer.of(lora.split(self.dims, self.frozen)[0]),
            dims=self.dims,
            frozen=self.frozen,
        )

    @cached_property
    def _step_optimizer(self) -> StepOptimizer:
        schedule = learning_rate_schedule(self.config.optimizer, self.config.train.steps)
        return StepOptimizer(
            config=self.config.optimizer,
            schedule=schedule,
            mesh=self.storage_mesh,
            custom=self.custom_optimizer,
        )


def check_kernels(step: TrainStep) -> list[str]:
    """Checks kernels on a GPU of this process, if the step has them: compares cuDNN's and fa3's calls for
    packed documents and the kernels of experts with the reference, and the version of cuDNN
    with what config.runtime.deterministic needs.

    Returns:
      Lines with the errors; none without such kernels.
    Raises:
      UserError: as `check_packed`, `check_deterministic` and `check_product`.
    """
    config = step.config
    device = jax.local_devices()[0]
    if device.platform != "gpu" or step.model is not None:
        return []
    lines = _check_attention(step, device)
    expert_kernel = config.runtime.expert_kernel
    if expert_kernel != "blocks":
        model = config.model
        ffn_dim = model.experts.ffn_dim // config.mesh.tensor
        width = model.experts.latent_dim or model.model_dim
        sizes = dict(num_experts=model.experts.num_experts, model_dim=width, ffn_dim=ffn_dim)
        lines.append(check_product(expert_kernel, device, **sizes))
    if config.runtime.delta_kernel == "pallas":
        lines += _check_recurrence(config.model, device)
    return lines


def _check_recurrence(model: ModelConfig, device: jax.Device) -> list[str]:
    sizes = {}
    for layer in map(model.layer_config, model.layer_kinds):
        for kind in (MIXERS[name] for name in layer.mixers):
            if isinstance(kind, RecurrentKind) and kind.has_kernel:
                widths = kind.recurrence(layer)
                sizes[widths.key_dim, widths.value_dim] = None
    return [check_kernel(device, key_dim=K, value_dim=V) for K, V in sizes]


def _check_attention(step: TrainStep, device: jax.Device) -> list[str]:
    config = step.config
    names = {kind: selected.name for kind, selected in step.kernels.items()}
    if config.runtime.deterministic and "cudnn" in names.values():
        check_deterministic(device)
    shapes = dict.fromkeys((name, config.model.layer_config(kind)) for kind, name in names.items())
    lines = [
        check_packed(
            name,
            device,
            num_heads=shape.attention.num_heads,
            num_kv_heads=shape.attention.num_kv_heads,
            head_dim=shape.attention.head_dim,
            dtype=step.compute_dtype,
        )
        for name, shape in shapes
        if _is_checked(name, shape, config)
    ]
    return list(dict.fromkeys(lines))


def _is_checked(kernel: str, layer: ModelConfig, config: Config) -> bool:
    """Whether the kernel is compared with the reference: no GPU has run such calls of it yet, or
    their results depend on the version of a library.
    """
    if kernel == "pallas":
        return layer.attention.head_dim > WIDE_HEAD_DIM
    return kernel == "fa3" or (kernel == "cudnn" and config.attention.document_mask)
