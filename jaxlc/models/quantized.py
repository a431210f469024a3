"""Frozen weights in 4 bits: NF4 and MXFP4.

Weights are gathered as codes and dequantized by the layer that uses them, in the forward and again
in the backward pass; their values are bf16 in every compute dtype. Entries of a matrix are in the
order of its Hugging Face tensor, [outputs, inputs], on every mesh.

NF4 (QLoRA, Dettmers et al. 2023, arXiv:2305.14314), with the numbers of bitsandbytes 0.50:

    codes    of 16 values between -1 and 1, in 4 bits; the first of two is in the high bits
    scales   each block of 64 entries has its largest magnitude; minus the mean over the matrix, it is one of 256 codes
    maxima   each block of 256 scales has the largest magnitude of these differences, float32
    offset   the mean, float32

MXFP4 (OCP Microscaling Formats, version 1.0), in which gpt-oss has its experts:

    codes    values of E2M1, in 4 bits; the first of two is in the low bits
    scales   each block of 32 entries has a power of two: its exponent plus 127 (E8M0)
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BLOCK, SCALES_BLOCK = 64, 256
# bitsandbytes, functional.get_4bit_type
_NF4_VALUES = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
# Its quantization of scales on CPU rounds them to this number of values first.
_GRID = 65536
_TINY = np.finfo(np.float32).tiny  # smaller values may be flushed to 0


# OCP Microscaling Formats, section 5.3.1: without the sign, which is the highest bit of a code
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
MX_BLOCK = 32
_E2M1_EXPONENT = 2  # of its largest value


class Quantized:
    """Matrices [stack..., inputs..., outputs...] of codes and scales: of layers, or of experts of
    layers.

    Attributes:
      arrays: those of `NAMES`.
      codes: uint8 [stack..., outputs..., inputs...], the last one halved.
      scales: uint8 [stack..., outputs..., inputs...], the last one divided by the size of a block.
    """

    NAMES: tuple[str, ...] = "codes", "scales"
    VALUES: np.ndarray  # of the codes
    SHIFTS: tuple[int, int]  # of the first and of the second code in a byte

    def __init__(self, arrays: Any, sizes: tuple[int, int]):
        """`sizes`: numbers of dimensions of the inputs and of the outputs."""
        self.arrays, self.sizes = tuple(arrays), sizes

    def tree_flatten_with_keys(self):
        keys = map(jax.tree_util.DictKey, self.NAMES)
        return [*zip(keys, self.arrays)], self.sizes

    @classmethod
    def tree_unflatten(cls, sizes: tuple[int, int], arrays: Any) -> "Quantized":
        return cls(arrays, sizes)

    @classmethod
    def of(cls, weights: jax.Array, sizes: tuple[int, int]) -> "Quantized":
        """Quantizes matrices [stack..., inputs..., outputs...]."""
        raise NotImplementedError

    @property
    def codes(self) -> Any:
        return self.arrays[0]

    @property
    def scales(self) -> Any:
        return self.arrays[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """[stack..., inputs..., outputs...]"""
        stack, inputs, outputs = self.split(self.codes.shape)
        return *stack, *inputs[:-1], 2 * inputs[-1], *outputs

    def split(self, code_dims: Sequence) -> tuple[Sequence, Sequence, Sequence]:
        """The stack, the inputs and the outputs."""
        inputs = len(code_dims) - self.sizes[0]
        outputs = inputs - self.sizes[1]
        return code_dims[:outputs], code_dims[inputs:], code_dims[outputs:inputs]

    def __getitem__(self, index: Any) -> "Quantized":
        """Of all arrays; flax reads the value of a parameter as `param[...]`."""
        return jax.tree.map(lambda x: x[index], self)

    def dims(self, names: tuple[str, ...]) -> "Quantized":
        """The names of the dimensions of the arrays.

        Args:
          names: of [stack..., inputs..., outputs...].
        """
        outputs = len(names) - self.sizes[1]
        inputs = outputs - self.sizes[0]
        codes = *names[:inputs], *names[outputs:], *names[inputs:outputs]
        flat = *names[:inputs], "unsharded"
        is_flat = self.scales.ndim < self.codes.ndim
        arrays = codes, flat if is_flat else codes, flat, names[:inputs]
        return type(self)(arrays[: len(self.NAMES)], self.sizes)

    def in_use(self, gather: Callable, names: tuple[str, ...], dtype: Any) -> jax.Array:
        """The weights in `dtype`, from the arrays that `gather(array, names of dimensions, dtype)`
        returns.
        """
        gathered = jax.tree.map(lambda x, dims: gather(x, dims, x.dtype), self, self.dims(names))
        return gathered.dequantized().astype(dtype)

    def dequantized(self) -> jax.Array:
        """bf16 [stack..., inputs..., outputs...]."""
        codes, factors = self.codes, self.factors()
        pairs = jnp.stack([codes >> shift & 15 for shift in self.SHIFTS], axis=-1)
        entries = jnp.asarray(self.VALUES)[pairs].reshape(*factors.shape, -1) * factors[..., None]
        whole = entries.astype(jnp.bfloat16).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
        stack, inputs, outputs = self.split(tuple(range(whole.ndim)))
        return whole.transpose(*stack, *inputs, *outputs)

    def factors(self) -> jax.Array:
        """float32: what the values of each block are multiplied by, in the shape of `scales`."""
        raise NotImplementedError


def _as_stored(weights: jax.Array, sizes: tuple[int, int]) -> jax.Array:
    """[stack..., outputs..., inputs...] of matrices [stack..., inputs..., outputs...]."""
    order = tuple(range(weights.ndim))
    inputs = weights.ndim - sum(sizes)
    outputs = inputs + sizes[0]
    return weights.transpose(*order[:inputs], *order[outputs:], *order[inputs:outputs])


@jax.tree_util.register_pytree_with_keys_class
class Nf4(Quantized):
    """In NF4. If 64 does not divide the last dimension of the inputs, scales are [stack..., blocks].

    Attributes:
      maxima: float32 [stack..., blocks of scales].
      offset: float32 [stack...].
    """

    NAMES = "codes", "scales", "maxima", "offset"
    VALUES, SHIFTS = _NF4_VALUES, (4, 0)

    @classmethod
    def of(
        cls, weights: jax.Array, sizes: tuple[int, int], offset: jax.Array | None = None
    ) -> "Nf4":
        """`offset`: None, or a more exact mean of `largest_magnitudes`."""
        blocks = _blocks(weights, sizes)
        largest = largest_magnitudes(weights, sizes)
        offset = largest.mean(-1) if offset is None else offset
        normed = blocks * (1 / jnp.maximum(largest, _TINY)).reshape(*blocks.shape[:-1], 1)
        *before, last = _as_stored(weights, sizes).shape
        codes = _codes(normed, cls.VALUES).reshape(*before, last)
        scales, maxima = _quantized_scales(largest, offset)
        if last % BLOCK == 0:
            scales = scales.reshape(*before, last // BLOCK)
        return cls((codes[..., ::2] << 4 | codes[..., 1::2], scales, maxima, offset), sizes)

    def factors(self) -> jax.Array:
        codes, scales, maxima, offset = self.arrays
        num_blocks = 2 * math.prod(codes.shape[offset.ndim :]) // BLOCK
        maxima = jnp.repeat(maxima, SCALES_BLOCK, axis=-1)[..., :num_blocks]
        offset = jnp.expand_dims(offset, range(offset.ndim, scales.ndim))
        values = jnp.asarray(scale_values())[scales]
        return values * maxima.reshape(scales.shape) + offset


@jax.tree_util.register_pytree_with_keys_class
class Mxfp4(Quantized):
    """In MXFP4, as the files of gpt-oss have its experts; 32 divides the last dimension of the
    inputs.
    """

    VALUES = np.concatenate([E2M1, -E2M1])
    SHIFTS = (0, 4)

    @classmethod
    def of(cls, weights: jax.Array, sizes: tuple[int, int]) -> "Mxfp4":
        """Exact for values that are in MXFP4. Others are rounded to the nearest value, with the
        scale of section 6.3: the exponent of the largest magnitude, less that of E2M1.
        """
        stored = _as_stored(weights.astype(jnp.float32), sizes)
        blocks = stored.reshape(*stored.shape[:-1], -1, MX_BLOCK)
        _, exponents = jnp.frexp(jnp.abs(blocks).max(-1))  # of a fraction below 1
        scales = jnp.clip(exponents - 1 - _E2M1_EXPONENT + 127, 1, 254).astype(jnp.uint8)
        codes = _codes(jnp.abs(blocks) / _power_of_two(scales)[..., None], E2M1)
        codes = (codes | jnp.signbit(blocks).astype(jnp.uint8) << 3).reshape(stored.shape)
        return cls((codes[..., ::2] | codes[..., 1::2] << 4, scales), sizes)

    def factors(self) -> jax.Array:
        return _power_of_two(self.scales)


def _power_of_two(exponents: jax.Array) -> jax.Array:
    """float32, from exponents plus 127, uint8; 0 for the smallest one, which is subnormal."""
    return jax.lax.bitcast_convert_type(exponents.astype(jnp.uint32) << 23, jnp.float32)


FORMATS = {"nf4": Nf4, "mxfp4": Mxfp4}  # by `config.flops.QuantizedMatrix.format`


def _codes(entries: jax.Array, values: np.ndarray) -> jax.Array:
    """uint8: the indices of the values, which ascend, that are nearest to the entries."""
    bounds = (values[:-1] + values[1:]) / 2
    return sum((entries > bound).astype(jnp.uint8) for bound in bounds)


def _blocks(weights: jax.Array, sizes: tuple[int, int]) -> jax.Array:
    """float32 [stack..., blocks, 64], or [stack..., outputs..., inputs..., 64] if no block has
    several rows: shards of inputs then remain shards.
    """
    stored = _as_stored(weights, sizes).astype(jnp.float32)
    num_kept = stored.ndim - (1 if stored.shape[-1] % BLOCK == 0 else sum(sizes))
    return stored.reshape(*stored.shape[:num_kept], -1, BLOCK)


def largest_magnitudes(weights: jax.Array, sizes: tuple[int, int]) -> jax.Array:
    """float32 [stack..., blocks] of matrices [stack..., inputs..., outputs...] in NF4."""
    stack = weights.shape[: weights.ndim - sum(sizes)]
    return jnp.abs(_blocks(weights, sizes)).max(-1).reshape(*stack, -1)


def _quantized_scales(largest: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scales, uint8 [..., blocks], and maxima, float32 [..., blocks of scales], from the largest
    magnitudes of blocks [..., blocks] and their mean [...].
    """
    differences = largest - offset[..., None]
    *stack, num_blocks = largest.shape
    padding = [*[(0, 0)] * len(stack), (0, -num_blocks % SCALES_BLOCK)]
    groups = jnp.pad(differences, padding).reshape(*stack, -1, SCALES_BLOCK)
    maxima = jnp.abs(groups).max(-1)
    normed = groups / jnp.maximum(maxima, _TINY)[..., None]
    places = jnp.round((normed + 1) * ((_GRID - 1) / 2)).astype(jnp.int32)
    scales = jnp.asarray(_codes_on_grid())[places]
    return scales.reshape(*stack, -1)[..., :num_blocks], maxima


@functools.cache
def _codes_on_grid() -> np.ndarray:
    """The code of the value that is nearest to each of the values from -1 to 1."""
    values = scale_values().astype(np.float64)
    grid = np.linspace(-1, 1, _GRID)
    return np.searchsorted((values[:-1] + values[1:]) / 2, grid).astype(np.uint8)


@functools.cache
def scale_values() -> np.ndarray:
    """The 256 values of the codes of scales, float32, ascending: the signed dynamic data type
    (Dettmers 2015, arXiv:1511.04561), as `functional.create_dynamic_map` of bitsandbytes has it.
    """
    values = [np.float32(0), np.float32(1)]
    first = np.float32(0.1)
    for exponent in range(7):
        places = np.arange(2**exponent + 1)
        # `torch.linspace`: from both ends, where a product and a sum are rounded once
        step = np.float64((1 - first) / np.float32(2**exponent))
        bounds = np.where(places < len(places) // 2, first + step * places, 1 - step * places[::-1])
        bounds = bounds.astype(np.float32)
        middles = np.float32(10.0 ** (exponent - 6)) * ((bounds[:-1] + bounds[1:]) / 2)
        values += [*middles, *-middles]
    return np.sort(np.array(values, np.float32))


def is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)
