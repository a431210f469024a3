"""One optimizer step as a pure function: loss and gradients of a batch, the gradient norm, the update, the metrics."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlc.config import Config
from jaxlc.models import freezing
from jaxlc.step import mixed_precision, update
from jaxlc.step.batch import Batch, attention_pairs, num_invalid_indices
from jaxlc.step.custom_model import CustomObjective
from jaxlc.step.losses.expert_balance import ExpertMetrics, expert_metrics, with_balanced_biases
from jaxlc.step.losses.policy_loss import PolicySums, denominator, means
from jaxlc.step.objective import Objective
from jaxlc.step.optimizer import StepOptimizer
from jaxlc.step.state import TrainState, to_memory_kind


class StepMetrics(NamedTuple):
    """Scalars, float32 unless noted, replicated."""

    # Mean cross entropy in nats over all weighted tokens of the step; NaN if a token or position is out of range.
    loss: jax.Array
    grad_norm: jax.Array  # before clipping
    learning_rate: jax.Array
    target_tokens: jax.Array  # sum of the loss weights
    is_finite: jax.Array  # bool: of loss and gradients; if False, the update was skipped
    loss_scale: jax.Array | None  # with fp16 only: of this step
    skipped_steps: jax.Array | None  # with fp16 only, int32: updates skipped since step 0
    attention_pairs: jax.Array | None  # with a document mask only: see `batch.attention_pairs`
    policy: PolicySums | None  # with posttrain.loss only: the means of the step
    experts: ExpertMetrics | None  # with model.num_experts only; arrays [layers with experts] among them


@dataclass(frozen=True, kw_only=True)
class StepFunction:
    """(state, batch) -> (state, metrics), to call under `jit`."""

    config: Config
    objective: Objective | CustomObjective
    optimizer: StepOptimizer
    memory_spaces: TrainState  # the `jax.memory.Space` of each array of the state

    @property
    def _trainable_dims(self):
        return freezing.split(self.objective.dims, self.objective.frozen)[0]

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        is_decoder = isinstance(self.objective, Objective)
        has_documents = self.config.attention.document_mask and is_decoder
        num_invalid = num_invalid_indices(batch, self.config.model.vocab_size) if is_decoder else 0
        pairs = attention_pairs(batch, self.config.model) if has_documents else None
        # No copy, only types: with absent devices the types of the arguments do not include the memory space.
        state = jax.tree.map(to_memory_kind, state, self.memory_spaces)
        # The division by the sum of weights of all ranks and microbatches: a single one may have no target tokens.
        target_tokens = batch.loss_weights.sum()
        posttrain = self.config.posttrain
        total = denominator(batch, posttrain) if posttrain.loss else target_tokens
        to_mean = jnp.where(total > 0, 1.0 / total, 0.0)
        loss_scale = state.scaling.loss_scale
        if loss_scale is not None:  # multiplies the mean loss, before anything is rounded to float16
            batch = batch._replace(loss_weights=batch.loss_weights * (loss_scale.scale * to_mean))
            to_mean = 1.0 / loss_scale.scale
        sums, gradients, histories, experts = self.objective.loss_and_grads(
            state.params, batch, state.scaling.histories
        )
        policy = means(sums, batch, posttrain) if posttrain.loss else None
        loss = jnp.where(num_invalid == 0, sums * to_mean if policy is None else policy.loss, jnp.nan)
        grad_norm = update.gradient_norm(gradients, self._trainable_dims, to_mean)
        # A step that is not finite does not change the parameters, so the loop can skip it, or stop with a valid state.
        is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        trainable, frozen = freezing.split(state.params, self.objective.frozen)
        trainable, opt_state = update.update(
            self.optimizer.of,
            self._trainable_dims,
            update.ParamsAndOptState(trainable, state.opt_state),
            gradients,
            scale=to_mean,
            grad_norm=grad_norm,
            is_finite=is_finite,
        )
        if experts is not None and self.config.train.balance_bias_rate:
            model, train = self.config.model, self.config.train
            trainable = with_balanced_biases(trainable, experts.counts_LE, is_finite, model, train)
        metrics = StepMetrics(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=self.optimizer.learning_rate(state.opt_state),
            target_tokens=target_tokens,
            is_finite=is_finite,
            loss_scale=loss_scale and loss_scale.scale,
            skipped_steps=loss_scale and loss_scale.skipped_steps + ~is_finite,
            attention_pairs=pairs,
            policy=policy,
            experts=experts and expert_metrics(experts, len(batch.tokens)),
        )
        scaling = mixed_precision.after_step(state.scaling, histories, is_finite, self.config.precision)
        rng = jax.random.key_data(jax.random.split(jax.random.wrap_key_data(state.rng))[0])
        params = freezing.join(trainable, frozen) if self.objective.frozen else trainable
        return TrainState(state.step + 1, params, opt_state, rng, scaling), metrics
