"""Frozen weights in NF4 (QLoRA, Dettmers et al. 2023, arXiv:2305.14314), with the numbers of
bitsandbytes 0.50.

Entries of a matrix are in the order of its Hugging Face tensor, [outputs, inputs], on every mesh:

    codes    of 16 values between -1 and 1, in 4 bits; the first of two is in the high bits
    scales   each block of 64 entries has its largest magnitude; minus the mean over the matrix, it is one of 256 codes
    maxima   each block of 256 scales has the largest magnitude of these differences, float32
    offset   the mean, float32

Weights are gathered as codes and dequantized by the layer that uses them, in the forward and again
in the backward pass; their values are bf16 in every compute dtype.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BLOCK, SCALES_BLOCK = 64, 256
# bitsandbytes, functional.get_4bit_type
VALUES = np.array(
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


@jax.tree_util.register_pytree_with_keys_class
class Nf4:
    """Matrices [stack..., inputs..., outputs...] in NF4: of layers, or of experts of layers.

    Attributes:
      codes: uint8 [stack..., outputs..., inputs...], the last one halved.
      scales: uint8 [stack..., outputs..., inputs...], the last one divided by 64; if that does not divide it,
        [stack..., blocks].
      maxima: float32 [stack..., blocks of scales].
      offset: float32 [stack...].
      num_inputs, num_outputs: numbers of dimensions, called `sizes` together.
    """

    NAMES = "codes", "scales", "maxima", "offset"

    def __init__(self, arrays: Any, sizes: tuple[int, int]):
        self.codes, self.scales, self.maxima, self.offset = arrays
        self.num_inputs, self.num_outputs = self._sizes = sizes

    def tree_flatten_with_keys(self):
        keys = map(jax.tree_util.DictKey, self.NAMES)
        return [*zip(keys, self._arrays)], self._sizes

    @classmethod
    def tree_unflatten(cls, sizes: tuple[int, int], arrays: Any) -> "Nf4":
        return cls(arrays, sizes)

    @property
    def _arrays(self) -> tuple[Any, Any, Any, Any]:
        return self.codes, self.scales, self.maxima, self.offset

    @property
    def stack_shape(self) -> tuple[int, ...]:
        return self.codes.shape[: self.codes.ndim - self.num_inputs - self.num_outputs]

    @property
    def shape(self) -> tuple[int, ...]:
        """[stack..., inputs..., outputs...]"""
        stack, inputs, outputs = self._split(self.codes.shape)
        return *stack, *inputs[:-1], 2 * inputs[-1], *outputs

    @classmethod
    def of(cls, weights: jax.Array, sizes: tuple[int, int]) -> "Nf4":
        """Quantizes matrices [stack..., inputs..., outputs...]."""
        order, num_stacked = tuple(range(weights.ndim)), weights.ndim - sum(sizes)
        inputs = num_stacked + sizes[0]
        stored = weights.transpose(
            *order[:num_stacked], *order[inputs:], *order[num_stacked:inputs]
        )
        codes, largest = quantized(stored.reshape(*stored.shape[:num_stacked], -1))
        offset = largest.mean(-1)
        scales, maxima = quantized_scales(largest, offset)
        return cls.shaped((codes, scales, maxima, offset), stored.shape, sizes)

    @classmethod
    def shaped(cls, arrays: Any, shape: tuple[int, ...], sizes: tuple[int, int]) -> "Nf4":
        """From flat codes and scales [stack..., n].

        Args:
          shape: [stack..., outputs..., inputs...] of the matrices.
        """
        codes, scales, *others = arrays
        *before, last = shape
        if last % BLOCK == 0:
            scales = scales.reshape(*before, last // BLOCK)
        return cls((codes.reshape(*before, last // 2), scales, *others), sizes)

    def _split(self, of_codes: tuple) -> tuple[tuple, tuple, tuple]:
        """The stack, the inputs and the outputs."""
        inputs = len(of_codes) - self.num_inputs
        outputs = inputs - self.num_outputs
        return of_codes[:outputs], of_codes[inputs:], of_codes[outputs:inputs]

    def __getitem__(self, index: Any) -> "Nf4":
        """Of all arrays; flax reads the value of a parameter as `param[...]`."""
        return jax.tree.map(lambda x: x[index], self)

    def dims(self, names: tuple[str, ...]) -> "Nf4":
        """The names of the dimensions of the arrays.

        Args:
          names: of [stack..., inputs..., outputs...].
        """
        outputs = len(names) - self.num_outputs
        stack, inputs = (
            names[: outputs - self.num_inputs],
            names[outputs - self.num_inputs : outputs],
        )
        codes = *stack, *names[outputs:], *inputs
        flat = *stack, "unsharded"
        is_flat = self.scales.ndim < self.codes.ndim
        arrays = codes, flat if is_flat else codes, flat, stack
        return Nf4(arrays, self._sizes)

    def in_use(self, gather: Callable, names: tuple[str, ...], dtype: Any) -> jax.Array:
        """The weights in `dtype`, from the arrays that `gather(array, names of dimensions, dtype)`
        returns.
        """
        gathered = jax.tree.map(lambda x, dims: gather(x, dims, x.dtype), self, self.dims(names))
        return gathered.dequantized().astype(dtype)

    def dequantized(self) -> jax.Array:
        """bf16 [stack..., inputs..., outputs...]."""
        codes, num_stacked = self.codes, len(self.stack_shape)
        num_blocks = 2 * math.prod(codes.shape[num_stacked:]) // BLOCK
        maxima = jnp.repeat(self.maxima, SCALES_BLOCK, axis=-1)[..., :num_blocks]
        offset = jnp.expand_dims(self.offset, range(num_stacked, self.scales.ndim))
        values = jnp.asarray(scale_values())[self.scales]
        scales = values * maxima.reshape(self.scales.shape) + offset
        pairs = jnp.stack([codes >> 4, codes & 15], axis=-1)
        entries = jnp.asarray(VALUES)[pairs].reshape(*scales.shape, BLOCK) * scales[..., None]
        stack, inputs, outputs = self._split(codes.shape)
        whole = entries.astype(jnp.bfloat16).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
        order = self._split(tuple(range(whole.ndim)))
        return whole.transpose(*order[0], *order[1], *order[2])


def quantized(entries: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes, uint8 [..., n / 2], and the largest magnitude of each block, float32 [..., n / 64].

    Args:
      entries: [..., n], matrices in the order of their tensors.
    """
    blocks = entries.astype(jnp.float32).reshape(*entries.shape[:-1], -1, BLOCK)
    largest = jnp.abs(blocks).max(-1)
    normed = blocks * (1 / jnp.maximum(largest, _TINY))[..., None]
    bounds = (VALUES[:-1] + VALUES[1:]) / 2
    codes = sum((normed > bound).astype(jnp.uint8) for bound in bounds)
    pairs = codes.reshape(*entries.shape[:-1], -1, 2)
    return pairs[..., 0] << 4 | pairs[..., 1], largest


def quantized_scales(largest: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
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
    values, first = [np.float32(0), np.float32(1)], np.float32(0.1)
    for exponent in range(7):
        places = np.arange(2**exponent + 1)
        # `torch.linspace`: from both ends, where a product and a sum are rounded once
        step = np.float64((1 - first) / np.float32(2**exponent))
        bounds = np.where(places < len(places) // 2, first + step * places, 1 - step * places[::-1])
        bounds = bounds.astype(np.float32)
        middles = np.float32(10.0 ** (exponent - 6)) * ((bounds[:-1] + bounds[1:]) / 2)
        values += [*middles, *-middles]
    return np.sort(np.array(values, np.float32))


def is_nf4(x: Any) -> bool:
    return isinstance(x, Nf4)
