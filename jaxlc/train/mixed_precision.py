"""What config.precision means: the compute dtype, products in 8 bits, and dynamic loss scaling for float16.

Master weights, moments and sums of gradients are float32 throughout. float16 has 5 bits of exponent, and gradients
vanish below 6e-8: so the mean loss is multiplied by a scale before the backward, and gradients are divided by it in
float32 (Micikevicius et al. 2018, arXiv:1710.03740, sections 3.2 and 5). A scale that is too large shows as a gradient
that is not finite: then the update is left out and the scale goes down. Without that for long enough it goes up.

flax.training.dynamic_scale has the same rule, but only inside of its own `value_and_grad`, which would judge and divide
each microbatch for itself; jmp has no upper bound. The rule is these few lines.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxlc.config import ModelConfig, PrecisionConfig
from jaxlc.core.errors import UserError
from jaxlc.models import decoder
from jaxlc.models.matmuls import Fp8

_FIRST_CAPABILITY_WITH_FP8 = (8, 9)


class LossScale(NamedTuple):
    scale: jax.Array  # float32: the next step's
    good_steps: jax.Array  # int32: finite steps since the scale has changed last
    skipped_steps: jax.Array  # int32: updates left out since step 0


class Scaling(NamedTuple):
    """What precision keeps from step to step; part of the training state."""

    loss_scale: LossScale | None = None  # of fp16
    histories: dict | None = None  # of fp8 with delayed scaling: see `models.matmuls.History`


def compute_dtype(precision: str, platform: str) -> jnp.dtype:
    """Of the residual stream and of all products that are not in 8 bits. `precision` is config.precision.compute;
    "auto" is bfloat16 except on CPU, which emulates it."""
    name = {"auto": "fp32" if platform == "cpu" else "bf16"}.get(precision, precision)
    return jnp.dtype({"bf16": jnp.bfloat16, "fp8": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}[name])


def make_fp8(config: PrecisionConfig, histories: dict | None) -> Fp8 | None:
    """The products in 8 bits. Without histories, as in evaluation, tensors are scaled by themselves."""
    if config.compute != "fp8":
        return None
    return Fp8(
        matmuls=config.fp8_matmuls,
        scaling="current" if histories is None else "delayed",
        history_steps=config.fp8_amax_history_len,
        bf16_layers=config.bf16_layers,
    )


def check_devices(config: PrecisionConfig, devices: Iterable[jax.Device]) -> None:
    """Raises UserError if a GPU of them has no products in 8 bits. CPUs emulate them."""
    if config.compute != "fp8":
        return
    for device in devices:
        capability = getattr(device, "compute_capability", None)  # a string; CPUs have none
        if capability and tuple(map(int, str(capability).split("."))) < _FIRST_CAPABILITY_WITH_FP8:
            raise UserError(
                f"config.precision.compute='fp8' needs GPUs of compute capability 8.9 or more, and {device.device_kind}"
                f" has {capability}; use --config.precision.compute=bf16"
            )


def first_scaling(config: PrecisionConfig, model: ModelConfig) -> Scaling:
    """At step 0."""
    zero = jnp.zeros((), jnp.int32)
    if config.compute == "fp16":
        return Scaling(loss_scale=LossScale(jnp.float32(config.loss_scale), zero, zero))
    if config.compute == "fp8" and config.fp8_scaling == "delayed":
        return Scaling(histories=decoder.first_histories(model, make_fp8(config, {})))
    return Scaling()


def after_step(now: Scaling, seen: dict | None, is_finite: jax.Array, config: PrecisionConfig) -> Scaling:
    """After a step that has `seen` these next histories; one that was not finite leaves them as they were."""
    histories = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), seen, now.histories)
    return Scaling(now.loss_scale and _next_loss_scale(now.loss_scale, is_finite, config), histories)


def is_retried(loss_scale: float | None, config: PrecisionConfig) -> bool:
    """Whether a step that was not finite is mended by a smaller scale, in float16; what its own was is given."""
    return loss_scale is not None and loss_scale > config.loss_scale_min


def _next_loss_scale(now: LossScale, is_finite: jax.Array, config: PrecisionConfig) -> LossScale:
    """After a step with `now`, whose loss and gradients were finite or not."""
    good_steps = jnp.where(is_finite, now.good_steps + 1, 0)
    grows = good_steps >= config.loss_scale_growth_interval
    larger = jnp.where(
        grows, jnp.minimum(now.scale * config.loss_scale_growth_factor, config.loss_scale_max), now.scale
    )
    smaller = jnp.maximum(now.scale * config.loss_scale_backoff_factor, config.loss_scale_min)
    return LossScale(
        jnp.where(is_finite, larger, smaller),
        jnp.where(grows, 0, good_steps),
        now.skipped_steps + ~is_finite,
    )
