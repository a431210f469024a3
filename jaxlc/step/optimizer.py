"""AdamW and its learning-rate schedules, from optax."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from jaxlc.config import OptimizerConfig
from jaxlc.sharding.rules import is_vector


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns number of earlier updates -> learning rate: from schedule_start on a linear warm-up, then

    cosine    a cosine decay (Loshchilov and Hutter 2017), which would reach final_learning_rate_ratio x peak one step
              after the last step, as in transformers;
    linear    a linear decay to the same;
    wsd       the peak, then a linear decay over the last decay_steps (MiniCPM, Hu et al. 2024, section 4);
    constant  the peak.

    Args:
      steps: the length of the schedule, if config.schedule_steps is 0.
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_learning_rate_ratio
    after_warmup = max(1, (config.schedule_steps or steps) - config.warmup_steps)
    if config.schedule == "cosine":
        main = optax.cosine_decay_schedule(peak, after_warmup, alpha=config.final_learning_rate_ratio)
    elif config.schedule == "linear":
        main = optax.linear_schedule(peak, final, after_warmup)
    elif config.schedule == "wsd":
        decay = optax.linear_schedule(peak, final, config.decay_steps)
        main = optax.join_schedules([optax.constant_schedule(peak), decay], [after_warmup - config.decay_steps])
    else:
        main = optax.constant_schedule(peak)
    # Without an initial learning rate, step 0 has peak / warmup_steps, not 0.
    initial = config.initial_learning_rate_ratio * peak
    first = initial + (peak - initial) / max(1, config.warmup_steps)
    warmup = optax.linear_schedule(first, peak, max(1, config.warmup_steps - 1))
    schedule = optax.join_schedules([warmup, main], [config.warmup_steps])
    if not config.schedule_start:
        return schedule
    # At least 0: with fp16, skipped steps of earlier stages do not count as updates.
    return lambda num_updates: schedule(jnp.maximum(num_updates - config.schedule_start, 0))


def updates_made(opt_state: optax.OptState) -> jax.Array:
    """Number of updates that the optimizer has made, int32; the step of its schedule."""
    return optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0][1]


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule, dims) -> optax.GradientTransformationExtraArgs:
    """Clipping by the global norm, then AdamW (Loshchilov and Hutter 2019).

    `update` takes the global norm as `grad_norm`, so that it can be called on a part of the parameters, with the
    gradients and moments of that part.

    Args:
      dims: dimension names of the parameters, or of a part of them. They select the parameters with weight decay:
        matrices, and by setting embeddings, norm scales and biases.
    """

    def decays(names: tuple[str, ...]) -> bool:
        return config.decay_norms if is_vector(names) else config.decay_embeddings or names[0] != "vocab"

    has_decay = jax.tree.map(decays, dims, is_leaf=lambda x: isinstance(x, tuple))
    adamw = optax.adamw(
        schedule,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=has_decay,
    )
    if not config.max_grad_norm:
        return optax.with_extra_args_support(adamw)
    return optax.chain(_clip_by_given_norm(config.max_grad_norm), adamw)


@dataclass(frozen=True, kw_only=True)
class StepOptimizer:
    """The optimizer of a training step: config.optimizer, or a custom one."""

    config: OptimizerConfig
    schedule: optax.Schedule
    custom: optax.GradientTransformation | None = None

    def of(self, dims) -> optax.GradientTransformationExtraArgs:
        """The optimizer of the parameters with these `dims`, which are all trainable ones or a part of them."""
        if self.custom is not None:
            return optax.with_extra_args_support(self.custom)
        return make_optimizer(self.config, self.schedule, dims)

    def learning_rate(self, opt_state: optax.OptState) -> jax.Array:
        """The learning rate of the next update, float32; NaN if a custom optimizer does not store it."""
        if self.custom is None:
            return jnp.float32(self.schedule(updates_made(opt_state)))  # skipped steps do not count
        return jnp.float32(optax.tree.get(opt_state, "learning_rate", jnp.nan))  # as optax.inject_hyperparams does


def _clip_by_given_norm(max_grad_norm: float) -> optax.GradientTransformationExtraArgs:
    """optax.clip_by_global_norm (Pascanu et al. 2013) with the norm as an argument of `update`."""

    def update(gradients, state, params=None, *, grad_norm: jax.Array, **_):
        del params
        is_small = grad_norm < max_grad_norm
        return jax.tree.map(lambda g: jnp.where(is_small, g, g / grad_norm * max_grad_norm), gradients), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
