"""Mixed precision (config.precision): the compute dtype, FP8 matrix products, and dynamic loss
scaling for float16.

Master weights, moments and sums of gradients are always float32. float16 has 5 exponent bits, so
gradients below 6e-8 underflow: the mean loss is multiplied by a scale before the backward pass, and
gradients are divided by it in float32 (Micikevicius et al. 2018, arXiv:1710.03740, sections 3.2 and
5). If the scale is too large, a gradient is not finite: the update is skipped and the scale is
reduced. After enough steps without an overflow the scale is increased.

flax.training.dynamic_scale implements the same rule, but inside its own `value_and_grad`, which
would test and divide each microbatch separately; jmp has no upper bound of the scale.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxlc.config import ModelConfig, PrecisionConfig
from jaxlc.core import UserError
from jaxlc.models import decoder
from jaxlc.models.matmuls import Fp8

# compute -> the first compute capability with such matrix products
_FIRST_CAPABILITY = {"fp8": (8, 9), "bf16": (8, 0)}

DTYPES = {
    "bf16": jnp.bfloat16, "fp8": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32,
    "nf4": jnp.bfloat16, "mxfp4": jnp.bfloat16,  # of matrices that are not quantized
}  # fmt: skip


class LossScale(NamedTuple):
    scale: jax.Array  # float32: of the next step
    good_steps: jax.Array  # int32: steps without overflow since the scale last changed
    skipped_steps: jax.Array  # int32: updates skipped since step 0


class Scaling(NamedTuple):
    """The part of the training state that belongs to mixed precision."""

    loss_scale: LossScale | None = None  # with fp16
    histories: dict | None = None  # with fp8 and delayed scaling: see `models.matmuls.History`


def compute_dtype(config: PrecisionConfig, mesh: Mesh) -> jnp.dtype:
    """The dtype of the residual stream and of all matrix products that are not in FP8.
    config.compute="auto" is bfloat16, but float32 on CPU, which emulates bfloat16."""
    name = config.compute
    if name == "auto":
        name = "fp32" if mesh.devices.flat[0].platform == "cpu" else "bf16"
    return jnp.dtype(DTYPES[name])


def make_fp8(config: PrecisionConfig, histories: dict | None) -> Fp8 | None:
    """The FP8 recipe. Without histories, as in evaluation, scaling is current, not delayed."""
    if config.compute != "fp8":
        return None
    return Fp8(
        matmuls=config.fp8_matmuls,
        scaling="current" if histories is None else "delayed",
        history_steps=config.fp8_amax_history_len,
        bf16_layers=config.bf16_layers,
    )


def on_devices(config: PrecisionConfig, devices: Iterable[jax.Device]) -> PrecisionConfig:
    """The config with `auto` replaced by fp16 if a GPU among `devices` has no bf16 matrix products.

    Raises:
      UserError: a GPU has no matrix products of config.compute. CPUs emulate them.
    """
    for device in devices:
        text = getattr(device, "compute_capability", None)  # CPUs have none
        capability = tuple(map(int, str(text or "99.0").split(".")))
        if config.compute == "auto" and capability < _FIRST_CAPABILITY["bf16"]:
            return dataclasses.replace(config, compute="fp16")
        if capability < (first := _FIRST_CAPABILITY.get(config.compute, (0, 0))):
            others = [name for name, least in _FIRST_CAPABILITY.items() if capability >= least]
            raise UserError(
                f"config.precision.compute={config.compute!r} needs GPUs of compute capability {first[0]}.{first[1]} or"
                f" more, and {device.device_kind} has {text}; use"
                f" --config.precision.compute={(*others, 'fp16')[0]}"
            )
    return config


def first_scaling(config: PrecisionConfig, model: ModelConfig) -> Scaling:
    """The scaling state of step 0."""
    zero = jnp.zeros((), jnp.int32)
    if config.compute == "fp16":
        return Scaling(loss_scale=LossScale(jnp.float32(config.loss_scale), zero, zero))
    if config.compute == "fp8" and config.fp8_scaling == "delayed":
        return Scaling(histories=decoder.first_histories(model, make_fp8(config, {})))
    return Scaling()


def after_step(
    now: Scaling, next_histories: dict | None, is_finite: jax.Array, config: PrecisionConfig
) -> Scaling:
    """The scaling state after a step. A step that was not finite does not change the histories."""
    histories = optax.tree.where(is_finite, next_histories, now.histories)
    return Scaling(
        now.loss_scale and _next_loss_scale(now.loss_scale, is_finite, config), histories
    )


def is_retried(loss_scale: float | None, config: PrecisionConfig) -> bool:
    """Whether reducing `loss_scale`, with which a step was not finite, can fix such a step."""
    return loss_scale is not None and loss_scale > config.loss_scale_min


def _next_loss_scale(now: LossScale, is_finite: jax.Array, config: PrecisionConfig) -> LossScale:
    """The loss scale after a step with the loss scale `now`."""
    good_steps = jnp.where(is_finite, now.good_steps + 1, 0)
    grows = good_steps >= config.loss_scale_growth_interval
    larger = jnp.where(
        grows,
        jnp.minimum(now.scale * config.loss_scale_growth_factor, config.loss_scale_max),
        now.scale,
    )
    smaller = jnp.maximum(now.scale * config.loss_scale_backoff_factor, config.loss_scale_min)
    return LossScale(
        jnp.where(is_finite, larger, smaller),
        jnp.where(grows, 0, good_steps),
        now.skipped_steps + ~is_finite,
    )
