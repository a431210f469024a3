"""Parameters of the modules of a layer, and the products of a block with its weights.

A parameter is declared once, by `matrix`, `bias_vector` or in RMSNorm: its shape, the names of its
dimensions, its initial value. The abstract tree, shardings, byte counts and the sharding table are
derived. Parameters are float32, or bf16 if they are frozen; a layer computes in the dtype of its
input.

Also the random keys of initial values, and loops over chunks of tokens.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxlc.config import LoraConfig, ModelConfig
from jaxlc.config.kinds.contract import Matrix
from jaxlc.models.lora import make_adapters
from jaxlc.models.matmuls import Fp8, Matmuls, in_use
from jaxlc.sharding.rules import Sharder

# larger than any number of parameters of a layer, by which their keys are derived
_LORA_STREAM = 2**31 - 1


# replay: layers take the recorded experts; record: `LayerOutput.sums` has the chosen ones, int32
# [B, T, k], or in tiles [n, B, t, k]
Routing = Literal["", "replay", "record"]


class Init:
    """What layers are made with: which of their products are in FP8, their adapters and routing, and
    a random key for each parameter, derived from one key.

    The keys are equal to the keys of `flax.nnx.Rngs`, whose counters are arrays: updates of them take
    a third of the time to trace the initialization. Adapters do not change the keys of the model.
    """

    def __init__(
        self,
        key: jax.Array,
        fp8: Fp8 | None = None,
        lora: LoraConfig | None = None,
        routing: Routing = "",
    ):
        self.fp8 = fp8
        self.lora = lora
        self.routing = routing
        self._key = key
        self._num_params = self._num_adapter_params = 0

    def param_key(self) -> jax.Array:
        """The key of the next parameter of the model."""
        self._num_params += 1
        return jax.random.fold_in(self._key, self._num_params - 1)

    def adapter_key(self) -> jax.Array:
        """The key of the next parameter of an adapter."""
        self._num_adapter_params += 1
        return jax.random.fold_in(
            jax.random.fold_in(self._key, _LORA_STREAM), self._num_adapter_params - 1
        )


class RMSNorm(nnx.Module):
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467): x / rms(x) * factor over the last
    dimensions; computed in float32, returned in the dtype of x.

    The factor is the parameter `scale`, or 1 + scale if `zero_centered`; initially it is 1.
    """

    def __init__(self, *, epsilon: float, zero_centered: bool = False, **dims: int):
        """
        Args:
          dims: names and sizes of the dimensions to norm, the last one "norm": `norm=D`, or `heads=N, norm=H` for all
            heads together.
        """
        self.scale = nnx.Param(
            jnp.full(tuple(dims.values()), 0.0 if zero_centered else 1.0), dims=tuple(dims)
        )
        self.epsilon = epsilon
        self.zero_centered = zero_centered

    @property
    def factor(self) -> jax.Array:
        """float32, of the shape of the dimensions."""
        return 1 + self.scale[...] if self.zero_centered else self.scale[...]

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.factor, self.epsilon)


def rms_norm(x: jax.Array, factor: jax.Array, epsilon: float) -> jax.Array:
    """The function of `RMSNorm`, over the dimensions of `factor`; the loss applies it to chunks of
    hidden states.
    """
    wide = x.astype(jnp.float32)
    normed_dims = tuple(range(-factor.ndim, 0))
    inverse_rms = jax.lax.rsqrt(jnp.mean(wide**2, axis=normed_dims, keepdims=True) + epsilon)
    return (wide * inverse_rms * factor).astype(x.dtype)


def over_chunks(body: Callable, carry, num_tokens: int, chunk_tokens: int):
    """Calls `body(carry, start, size) -> (carry, out)` for each chunk of tokens, in order; `size`
    is static. The last chunk may be shorter: padding the array would copy it.

    An array of the carry that `body` reads with `dynamic_slice_in_dim` and writes with
    `dynamic_update_slice_in_dim` is updated in place.

    Returns:
      The carry, and the outs of all chunks, stacked.
    """
    chunk_tokens = min(chunk_tokens, num_tokens)
    num_whole, rest = divmod(num_tokens, chunk_tokens)
    starts = chunk_tokens * jnp.arange(num_whole)
    carry, outs = lax.scan(lambda carry, start: body(carry, start, chunk_tokens), carry, starts)
    if rest:
        carry, last = body(carry, num_whole * chunk_tokens, rest)
        outs = jax.tree.map(lambda stacked, out: jnp.concatenate([stacked, out[None]]), outs, last)
    return carry, outs


_TRUNCATED_STD = 0.87962566  # standard deviation of a standard normal cut at -2 and 2


def matrix(init: Init, *, fan_in: int, depth_scale: float = 1.0, **dims: int) -> nnx.Param:
    """Declares a weight with its dimensions, e.g. `matrix(init, fan_in=D, model=D, heads=N,
    head_dim=H)`.

    The initial value is a normal with standard deviation `depth_scale`/sqrt(fan_in), truncated at
    two deviations, so that an input of unit variance gives an output of unit variance at every
    width. At D = 4096 the deviation is 0.016, close to the constant 0.02 of many models of that
    size; a constant would be wrong at other widths.
    """
    std = depth_scale / fan_in**0.5
    unit_variance = (
        jax.random.truncated_normal(init.param_key(), -2.0, 2.0, tuple(dims.values()))
        / _TRUNCATED_STD
    )
    return nnx.Param(std * unit_variance, dims=tuple(dims))


def weight(init: Init, shape: Matrix, model: ModelConfig) -> nnx.Param:
    """Declares a weight of `config.kinds` by `matrix`."""
    depth_scale = residual_depth_scale(model) if "model" in shape.outputs else 1.0
    return matrix(
        init, fan_in=shape.num_inputs, depth_scale=depth_scale, **shape.inputs, **shape.outputs
    )


def bias_vector(is_used: bool, **dims: int) -> nnx.Param | None:
    """Declares the bias of a projection, initially 0: `bias_vector(True, heads=N, bias=H)`; the
    last dimension is "bias". None if it is not used.
    """
    if not is_used:
        return None
    return nnx.Param(jnp.zeros(tuple(dims.values()), jnp.float32), dims=tuple(dims))


def residual_depth_scale(model: ModelConfig) -> float:
    """Scale of the two matrices per layer whose results are added to the residual stream, so that
    the sum of all 2L results has the size of one of them (GPT-2, Radford et al. 2019, section 2.3).
    """
    return (2 * model.num_layers) ** -0.5


class Block(nnx.Module):
    """The projections of a block, which may be in FP8, and their adapters, if it has any."""

    def __init__(
        self,
        model: ModelConfig,
        init: Init,
        weights: Mapping[str, Matrix],
        projections: Mapping[str, str],
    ):
        """Declares the matrices, as attributes of their names, and their adapters.

        Args:
          weights: from the description of the block, see `config.kinds.contract.Block`.
          projections: the matrix of each product by the name of the product; the block may lack some.
        """
        names = [name for name, path in projections.items() if path in weights]
        self.matmul = Matmuls(init.fp8, *names)
        self.lora = make_adapters(model, init.lora, names, init.adapter_key)
        self.projections = tuple(projections.items())
        for name, shape in weights.items():
            setattr(self, name, weight(init, shape, model))
        # names of projections, and factors of their outputs; 1 for all others
        self.multipliers: tuple[tuple[str, float], ...] = ()

    def project(self, name: str, subscripts: str, x: jax.Array, *, shard: Sharder) -> jax.Array:
        """einsum(subscripts, x, matrix of the projection), plus the output of the adapter, times its
        multiplier.
        """
        weight = getattr(self, dict(self.projections)[name])
        multiply = functools.partial(self.matmul, name, subscripts)
        out = shard.product(multiply, x, in_use(weight, shard, x.dtype), weight.dims)
        if self.lora is not None:
            out = self.lora.add(name, subscripts, out, x, shard=shard)
        return scaled(out, dict(self.multipliers).get(name, 1.0))


def scaled(x: jax.Array, factor: float | jax.Array) -> jax.Array:
    """x * factor, multiplied in float32, since a factor such as 0.22 is not exact in bfloat16; in
    the dtype of x.
    """
    if isinstance(factor, float) and factor == 1:
        return x
    return (factor * x.astype(jnp.float32)).astype(x.dtype)


def add_bias(x: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """x + bias, added in float32, so that the gradient of the bias is summed in float32; in the
    dtype of x.
    """
    return x if bias is None else (x.astype(jnp.float32) + bias[...]).astype(x.dtype)
