"""The matrix products of a block with its weights: by `jnp.einsum`, or in 8 bits where a recipe says so.

8 bits (Micikevicius et al. 2022, arXiv:2209.05433): both operands are scaled and rounded to e4m3, the gradient that
comes back to e5m2, and all three products of a training step, x w, dout w^T and x^T dout, read these. Sums are float32
within a product. A scale is one number for a whole tensor, over all ranks:

    current   from the largest value of the tensor itself, which costs a pass over it first;
    delayed   from the largest value of so many steps before: of x, w and dout, for each product of each layer.

Delayed scaling keeps state, and a model here has none that changes: `History` is an input beside the parameters, and
what a step has seen leaves as its "gradient" (as in `flax.linen.fp8_ops`), to be put in its place.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import compute_scale, get_fp8_max, quantize
from jax import lax

_E4M3, _E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
_X, _W, _DOUT = range(3)  # rows of a history


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """Which products are in 8 bits, and how they are scaled."""

    matmuls: tuple[str, ...]  # names in config.schema.MATMUL_NAMES; the others are in the dtype of their input
    scaling: Literal["current", "delayed"]
    history_steps: int  # of delayed scaling
    bf16_layers: tuple[int, ...] = ()  # layers that have no product in 8 bits; negative: from the end


class History(nnx.Variable):
    """float32 [products, 3, steps]: the largest |x|, |w| and |dout| of the steps before, the last one first. 0: none
    yet. Its gradient is its next value."""


class IsBf16(nnx.Variable):
    """float32 scalar: 1 in a layer of `Fp8.bf16_layers`, 0 in the others. An input beside the parameters; float, so
    that it may be among what is differentiated."""


class Matmuls(nnx.Module):
    """The products of one block, by name."""

    def __init__(self, fp8: Fp8 | None, *names: str):
        self.names = names
        self.fp8_names = () if fp8 is None else tuple(name for name in names if name in fp8.matmuls)
        is_delayed = fp8 is not None and fp8.scaling == "delayed"
        self.history = History(jnp.zeros((len(names), 3, fp8.history_steps))) if is_delayed else None
        self.is_bf16 = IsBf16(jnp.zeros(()), dims=()) if fp8 is not None and fp8.bf16_layers else None

    def __call__(self, name: str, subscripts: str, x: jax.Array, w: jax.Array) -> jax.Array:
        """einsum(subscripts, x, w) in x's dtype: over the last dimensions of x and the first of w."""
        assert name in self.names, name
        if name not in self.fp8_names:
            return jnp.einsum(subscripts, x, w)
        history = None if self.history is None else self.history[self.names.index(name)]
        if self.is_bf16 is None:
            return fp8_product(x, w, history, _num_contracted(subscripts))
        return fp8_or_bf16_product(x, w, history, self.is_bf16[...], _num_contracted(subscripts))


def _num_contracted(subscripts: str) -> int:
    """Of "BTD,DNH->BTNH": 1. The dimensions that are summed are the last of x and the first of w, in one order."""
    operands, _, result = subscripts.partition("->")
    x, _, w = operands.partition(",")
    num_contracted = (len(x) + len(w) - len(result)) // 2
    assert x[:-num_contracted] + w[num_contracted:] == result and x[-num_contracted:] == w[:num_contracted], subscripts
    return num_contracted


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def fp8_product(x: jax.Array, w: jax.Array, history: jax.Array | None, num_contracted: int) -> jax.Array:
    """x w over the last `num_contracted` dimensions of x and the first of w, in x's dtype.

    Args:
      history: float32 [3, steps] as in `History`, for delayed scaling; its gradient is its next value.
    """
    return _forward_rule(x, w, history, num_contracted)[0]


def _forward_rule(x, w, history, num_contracted):
    x_8, x_scale, x_largest = _to_8_bits(x, _E4M3, history, _X)
    w_8, w_scale, w_largest = _to_8_bits(w, _E4M3, history, _W)
    contracted = range(x.ndim - num_contracted, x.ndim), range(num_contracted)
    out = _product(x_8, w_8, contracted, x_scale * w_scale, x.dtype)
    return out, (x_8, w_8, x_scale, w_scale, x_largest, w_largest, history)


def _backward_rule(num_contracted, residuals, dout):
    x_8, w_8, x_scale, w_scale, x_largest, w_largest, history = residuals
    dout_8, dout_scale, dout_largest = _to_8_bits(dout, _E5M2, history, _DOUT)
    num_rows = x_8.ndim - num_contracted
    kept_of_w = range(num_rows, dout.ndim), range(num_contracted, w_8.ndim)
    dx = _product(dout_8, w_8, kept_of_w, dout_scale * w_scale, dout.dtype)
    dw = _product(x_8, dout_8, (range(num_rows), range(num_rows)), x_scale * dout_scale, dout.dtype)
    if history is None:
        return dx, dw, None
    seen = jnp.stack([x_largest, w_largest, dout_largest])
    return dx, dw, jnp.roll(history, 1, axis=1).at[:, 0].set(seen)


fp8_product.defvjp(_forward_rule, _backward_rule)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def fp8_or_bf16_product(
    x: jax.Array, w: jax.Array, history: jax.Array | None, is_bf16: jax.Array, num_contracted: int
) -> jax.Array:
    """`fp8_product`, but in x's dtype where `is_bf16` is 1; it is a float32 scalar. There the next history is 0.

    Only operands are kept for the backward, where they are rounded again: a `lax.cond` that JAX differentiates keeps
    what any of its branches would, and the layers of a step took a third more memory.
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


def _to_8_bits(x: jax.Array, dtype, history: jax.Array | None, row: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(x / scale rounded to `dtype`, and cut off at its largest value; scale; largest |x|).

    The scale is a power of two: nothing but the rounding to `dtype` changes a value, and the product of two scales is
    exact in bfloat16. It costs no precision, since these are floating-point numbers too, up to where they underflow.
    """
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    expected = largest if history is None else history[row].max()
    # 1 where nothing is expected, or nothing finite.
    exact_scale = compute_scale(expected, jnp.float32(1), get_fp8_max(dtype, jnp.float32))
    mantissa, exponent = jnp.frexp(exact_scale)  # 0.5 <= mantissa < 1
    scale = jnp.ldexp(jnp.float32(1), exponent - (mantissa == 0.5))
    return quantize(x, dtype, scale, jnp.float32), scale, largest


def _product(a: jax.Array, b: jax.Array, contracted, scale: jax.Array, dtype) -> jax.Array:
    dimensions = (tuple(tuple(each) for each in contracted), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=dtype) * scale.astype(dtype)
