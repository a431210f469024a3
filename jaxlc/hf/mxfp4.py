"""Weights in MXFP4 (OCP Microscaling Formats, version 1.0, section 5.3), as files of gpt-oss have them.

A weight [experts, inputs, outputs] NAME is stored as two tensors, with the inputs last:

    NAME_blocks  uint8 [experts, outputs, inputs / 32, 16]  two values of 4 bits (E2M1), the first one in the low bits
    NAME_scales  uint8 [experts, outputs, inputs / 32]      exponent of the scale of 32 values, plus 127 (E8M0)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxlc.hf.safetensors_files import StoredTensor

_BLOCK_VALUES = 32
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_E2M1, -_E2M1])
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True, kw_only=True)
class Mxfp4Tensor(StoredTensor):
    """The two tensors as one of dtype BF16, in which all values are exact; `path` is that of the blocks."""

    blocks: StoredTensor
    scales: StoredTensor

    def read(self, read: Callable[..., np.ndarray], slices: Sequence[slice]) -> np.ndarray:
        """bfloat16: a part of the weight. `read(tensor, *slices)` reads a part of a stored tensor."""
        experts, inputs, outputs = slices
        start, stop, _ = inputs.indices(self.shape[1])
        groups = slice(start // _BLOCK_VALUES, -(-stop // _BLOCK_VALUES))
        packed = read(self.blocks, experts, outputs, groups, slice(None))
        exponents = read(self.scales, experts, outputs, groups).astype(np.int32) - 127
        values = np.stack([_VALUES[packed & 15], _VALUES[packed >> 4]], axis=-1).reshape(*packed.shape[:-1], -1)
        weights = np.ldexp(values, exponents[..., None]).astype(ml_dtypes.bfloat16)
        first = groups.start * _BLOCK_VALUES
        return weights.reshape(*packed.shape[:2], -1)[..., start - first : stop - first].swapaxes(1, 2)


def joined(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """`tensors` with each pair of blocks and scales as one tensor; a tensor without the other one is unchanged."""
    names = [name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)]
    whole = {}
    for name in names:
        blocks, scales = tensors[name + _BLOCKS], tensors.get(name + _SCALES)
        if scales is None or blocks.dtype != "U8" or blocks.shape[:-1] != scales.shape or len(scales.shape) != 3:
            continue
        experts, outputs, groups = scales.shape
        whole[name] = Mxfp4Tensor(
            path=blocks.path,
            dtype="BF16",
            shape=(experts, groups * _BLOCK_VALUES, outputs),
            offset_bytes=blocks.offset_bytes,
            blocks=blocks,
            scales=scales,
        )
    parts = {name + suffix for name in whole for suffix in (_BLOCKS, _SCALES)}
    return {name: tensor for name, tensor in tensors.items() if name not in parts} | whole
