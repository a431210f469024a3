"""The matrix products of a block with its weights: `jnp.einsum`, or FP8 products.

FP8 (Micikevicius et al. 2022, arXiv:2209.05433): x and w are scaled and rounded to e4m3, dout to
e5m2; all three products of a training step, x w, dout w^T and x^T dout, use the rounded operands
and accumulate in float32. Scaling is per tensor, over all ranks:

    current   by the largest absolute value (amax) of the tensor itself, which costs an extra pass over it;
    delayed   by the largest amax of the last steps, separately for x, w and dout of each product of each layer.

Delayed scaling needs state, and models are pure functions: `History` is an input like the
parameters, and its "gradient" is its next value (as in `flax.linen.fp8_ops`).
"""

import functools
import re
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import compute_scale, get_fp8_max, quantize
from jax import lax

from jaxlc.core import scopes
from jaxlc.models.quantized import is_quantized
from jaxlc.sharding.rules import Sharder

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
_X, _W, _DOUT = range(3)  # indices into a history
# The backward pass of a rematerialized layer computes the activation of these products and both its gradients. XLA on
# GPUs has a kernel for each, and each reads the products: it merges no kernels whose operands are its own matrix
# products. Behind a barrier, it merges them.
_BEHIND_BARRIER = ("mlp_gate", "mlp_up")


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """Which matrix products are in FP8, and how they are scaled."""

    # names in config.schema.MATMUL_NAMES and EXPERT_PROJECTIONS; other products use the dtype of
    # their input
    matmuls: tuple[str, ...]
    scaling: Literal["current", "delayed"]
    history_steps: int  # length of the amax history of delayed scaling
    # layers without FP8 products; negative indices count from the end
    bf16_layers: tuple[int, ...] = ()


class History(nnx.Variable):
    """float32 [products, 3, steps]: amax of x, w and dout in the previous steps, latest first; 0:
    no step yet. Its gradient is its next value."""


class IsBf16(nnx.Variable):
    """float32 scalar: 1 in the layers of `Fp8.bf16_layers`, 0 in the others. An input like the
    parameters; a float, so that it can be among the differentiated arguments."""


class Matmuls(nnx.Module):
    """The matrix products of one block, by name."""

    def __init__(self, fp8: Fp8 | None, *names: str):
        self.names = names
        self.fp8_names = () if fp8 is None else tuple(name for name in names if name in fp8.matmuls)
        is_delayed = fp8 is not None and fp8.scaling == "delayed"
        self.history = (
            History(jnp.zeros((len(names), 3, fp8.history_steps))) if is_delayed else None
        )
        self.is_bf16 = (
            IsBf16(jnp.zeros(()), dims=()) if fp8 is not None and fp8.bf16_layers else None
        )

    def __call__(self, name: str, subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
        """einsum(subscripts, x, w) in the dtype of x; it contracts the last dimensions of x with
        the first of w.
        """
        assert name in self.names, name
        if name not in self.fp8_names:
            out = product(subscripts, x, w)
            return lax.optimization_barrier(out) if name in _BEHIND_BARRIER else out
        history = None if self.history is None else self.history[self.names.index(name)]
        if self.is_bf16 is None:
            return fp8_product(x, w, history, _num_contracted(subscripts))
        return fp8_or_bf16_product(x, w, history, self.is_bf16[...], _num_contracted(subscripts))


@jax.named_scope(scopes.GATHER_WEIGHTS)
def in_use(param: nnx.Param, shard: Sharder, dtype) -> jax.Array:
    """A declared weight, cast to `dtype` and gathered, as a matrix product reads it."""
    stored = param[...]
    if is_quantized(stored):
        return stored.in_use(shard.weight, param.dims, dtype)
    return shard.layer_weight(stored, param.dims, dtype)


def product(subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """einsum(subscripts, x, w) in the dtype of x. If w is float32 and x is not, the gradient of w
    is not rounded.
    """
    if w.dtype == x.dtype:
        return jnp.einsum(subscripts, x, w)
    return float32_gradient_product(subscripts, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def float32_gradient_product(subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """einsum(subscripts, x, w) with w rounded to the dtype of x; the gradient of w, a float32
    array, is not rounded.
    """
    return jnp.einsum(subscripts, x, w.astype(x.dtype))


def _float32_gradient_forward(subscripts, x, w):
    return float32_gradient_product(subscripts, x, w), (x, w.astype(x.dtype))


def _float32_gradient_backward(subscripts, residuals, dout):
    x, w = residuals
    x_dims, w_dims, out_dims = dims_of_product(subscripts)
    dx = jnp.einsum(f"{out_dims},{w_dims}->{x_dims}", dout, w)
    return dx, jnp.einsum(
        f"{x_dims},{out_dims}->{w_dims}", x, dout, preferred_element_type=jnp.float32
    )


float32_gradient_product.defvjp(_float32_gradient_forward, _float32_gradient_backward)


def dims_of_product(subscripts: str) -> list[str]:
    """["BTD", "DNH", "BTNH"] of "BTD,DNH->BTNH"."""
    return re.split(",|->", subscripts)


def _num_contracted(subscripts: str) -> int:
    """Number of contracted dimensions, 1 for "BTD,DNH->BTNH": the last of x and the first of w, in
    the same order.
    """
    x, w, result = dims_of_product(subscripts)
    num_contracted = (len(x) + len(w) - len(result)) // 2
    assert (
        x[:-num_contracted] + w[num_contracted:] == result
        and x[-num_contracted:] == w[:num_contracted]
    ), subscripts
    return num_contracted


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def fp8_product(
    x: jax.Array, w: jax.Array, history: jax.Array | None, num_contracted: int
) -> jax.Array:
    """The FP8 product that contracts the last `num_contracted` dimensions of x with the first of w, in the dtype of x.

    Args:
      history: float32 [3, steps] as in `History` for delayed scaling, None for current scaling; its gradient is its
        next value.
    """
    return _forward_rule(x, w, history, num_contracted)[0]


def _forward_rule(x, w, history, num_contracted):
    x_8, x_scale, x_amax = to_fp8(x, E4M3, history, _X)
    w_8, w_scale, w_amax = to_fp8(w, E4M3, history, _W)
    contracted = range(x.ndim - num_contracted, x.ndim), range(num_contracted)
    out = scaled_product(x_8, w_8, contracted, x_scale * w_scale, x.dtype)
    return out, (x_8, w_8, x_scale, w_scale, x_amax, w_amax, history)


def _backward_rule(num_contracted, residuals, dout):
    x_8, w_8, x_scale, w_scale, x_amax, w_amax, history = residuals
    dout_8, dout_scale, dout_amax = to_fp8(dout, E5M2, history, _DOUT)
    num_rows = x_8.ndim - num_contracted
    contracted_with_w = range(num_rows, dout.ndim), range(num_contracted, w_8.ndim)
    dx = scaled_product(dout_8, w_8, contracted_with_w, dout_scale * w_scale, dout.dtype)
    dw = scaled_product(
        x_8, dout_8, (range(num_rows), range(num_rows)), x_scale * dout_scale, dout.dtype
    )
    if history is None:
        return dx, dw, None
    amax = jnp.stack([x_amax, w_amax, dout_amax])
    return dx, dw, jnp.roll(history, 1, axis=1).at[:, 0].set(amax)


fp8_product.defvjp(_forward_rule, _backward_rule)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def fp8_or_bf16_product(
    x: jax.Array, w: jax.Array, history: jax.Array | None, is_bf16: jax.Array, num_contracted: int
) -> jax.Array:
    """`fp8_product`, or a product in the dtype of x if the float32 scalar `is_bf16` is 1; its next
    history is then 0.

    Only the operands are saved for the backward pass, which rounds them again: JAX's derivative of
    `lax.cond` saves the residuals of all branches, which took a third more memory for the layers of
    a step.
    """
    return _either(is_bf16, lambda product: product(x, w, history, num_contracted))


def _either(is_bf16, compute):
    return lax.cond(is_bf16 > 0, lambda: compute(_plain_product), lambda: compute(fp8_product))


def _plain_product(x, w, _history, num_contracted):
    return jnp.tensordot(x, w, num_contracted)


def _either_forward_rule(x, w, history, is_bf16, num_contracted):
    return fp8_or_bf16_product(x, w, history, is_bf16, num_contracted), (x, w, history, is_bf16)


def _either_backward_rule(num_contracted, residuals, dout):
    *operands, is_bf16 = residuals

    def gradients(product):
        return jax.vjp(lambda *operands: product(*operands, num_contracted), *operands)[1](dout)

    return *_either(is_bf16, gradients), jnp.zeros_like(is_bf16)


fp8_or_bf16_product.defvjp(_either_forward_rule, _either_backward_rule)


def to_fp8(
    x: jax.Array, dtype, history: jax.Array | None = None, row: int = _X, axes: tuple[str, ...] = ()
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (x / scale rounded to `dtype` and clipped to its range; scale; amax of x).

    Args:
      history: as in `fp8_product`; row: the index of x in it.
      axes: mesh axes over which x is split, if the function is called within `shard_map`.

    The scale is a power of two: then only the rounding to `dtype` changes a value, and the product
    of two scales is exact in bfloat16. FP8 values are floating-point numbers, so this costs no
    precision until they underflow.
    """
    amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
    if axes:
        amax = lax.pmax(amax, axes)
    expected_amax = amax if history is None else history[row].max()
    # 1 if the expected amax is 0 or not finite.
    exact_scale = compute_scale(expected_amax, jnp.float32(1), get_fp8_max(dtype, jnp.float32))
    mantissa, exponent = jnp.frexp(exact_scale)  # 0.5 <= mantissa < 1
    scale = jnp.ldexp(jnp.float32(1), exponent - (mantissa == 0.5))
    return quantize(x, dtype, scale, jnp.float32), scale, amax


def scaled_product(
    a: jax.Array, b: jax.Array, contracted, scale: jax.Array, dtype, batch=((), ())
) -> jax.Array:
    """The product of two FP8 arrays, times a scale, in `dtype`.

    Args:
      contracted, batch: dimensions of a, and of b.
    """
    dimensions = (tuple(tuple(dims) for dims in contracted), batch)
    return lax.dot_general(a, b, dimensions, preferred_element_type=dtype) * scale.astype(dtype)
