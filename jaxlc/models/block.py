"""Parameters of the modules of a layer, and the products of a block with its weights.

A parameter is declared once, by `matrix`, `bias_vector` or in RMSNorm: its shape, the names of its dimensions, its
initial value. The abstract tree, shardings, byte counts and the sharding table are derived. Parameters are float32, or
bf16 if they are frozen; a layer computes in the dtype of its input.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlc.config import LoraConfig, ModelConfig
from jaxlc.core.mixers.layer_shape import Matrix
from jaxlc.models.init_keys import InitKeys
from jaxlc.models.lora import make_adapters
from jaxlc.models.matmuls import Fp8, Matmuls, in_use
from jaxlc.sharding.rules import Sharder

_TRUNCATED_STD = 0.87962566  # standard deviation of a standard normal cut at -2 and 2


def matrix(keys: InitKeys, *, fan_in: int, depth_scale: float = 1.0, **dims: int) -> nnx.Param:
    """Declares a weight with its dimensions, e.g. `matrix(keys, fan_in=D, model=D, heads=N, head_dim=H)`.

    The initial value is a normal with standard deviation `depth_scale`/sqrt(fan_in), truncated at two deviations, so
    that an input of unit variance gives an output of unit variance at every width. At D = 4096 the deviation is 0.016,
    close to the constant 0.02 of many models of that size; a constant would be wrong at other widths.
    """
    std = depth_scale / fan_in**0.5
    unit_variance = jax.random.truncated_normal(keys.params(), -2.0, 2.0, tuple(dims.values())) / _TRUNCATED_STD
    return nnx.Param(std * unit_variance, dims=tuple(dims))


def weight(keys: InitKeys, shape: Matrix, depth_scale: float = 1.0) -> nnx.Param:
    """Declares a weight of `core/mixers` by `matrix`."""
    return matrix(keys, fan_in=shape.num_inputs, depth_scale=depth_scale, **shape.inputs, **shape.outputs)


def bias_vector(**dims: int) -> nnx.Param:
    """Declares the bias of a projection, initially 0: `bias_vector(heads=N, bias=H)`; the last dimension is "bias"."""
    return nnx.Param(jnp.zeros(tuple(dims.values()), jnp.float32), dims=tuple(dims))


def residual_depth_scale(model: ModelConfig) -> float:
    """Scale of the two matrices per layer whose results are added to the residual stream, so that the sum of all 2L
    results has the size of one of them (GPT-2, Radford et al. 2019, section 2.3)."""
    return (2 * model.num_layers) ** -0.5


class Block(nnx.Module):
    """The projections of a block, which may be in FP8, and their adapters, if it has any."""

    def __init__(
        self, model: ModelConfig, keys: InitKeys, fp8: Fp8 | None, lora: LoraConfig | None, projections: tuple[str, ...]
    ):
        self.matmul = Matmuls(fp8, *projections)
        self.lora = make_adapters(model, lora, projections, keys)

    def project(self, name: str, subscripts: str, x: jax.Array, weight: nnx.Param, *, shard: Sharder) -> jax.Array:
        """einsum(subscripts, x, weight), plus the output of the adapter."""
        multiply = functools.partial(self.matmul, name, subscripts)
        out = shard.product(multiply, x, in_use(weight, shard, x.dtype), weight.dims)
        return out if self.lora is None else self.lora.add(name, subscripts, out, x, shard=shard)


def add_bias(x: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """x + bias, added in float32, so that the gradient of the bias is summed in float32; in the dtype of x."""
    return x if bias is None else (x.astype(jnp.float32) + bias[...]).astype(x.dtype)
