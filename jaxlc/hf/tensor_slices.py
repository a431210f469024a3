"""Which part of a Hugging Face tensor a part of a parameter is, and the conversions between them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxlc.config.models.families import Tensor


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A tensor, or those of several layers, and the parameter that they become."""

    tensor: Tensor
    shape: tuple[int, ...]  # shape of the parameter, for one layer
    layers: Sequence[int] | None = None  # for a stacked parameter: the indices of its layers in the model
    first_row: int = 0  # of a parameter that is a part of the rows of its tensor
    num_rows: int = 0  # rows of the tensor; 0: those of the parameter

    @property
    def names(self) -> list[str]:
        """The names of the tensors of all layers, or of the only one."""
        if self.layers is None:
            return [self.tensor.name]
        return [self.tensor.name.format(layer=layer) for layer in self.layers]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in a file: nn.Linear stores [out, in]."""
        rows, *others = self.part_shape
        return self.num_rows or rows, *others

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of the part of the tensor that the parameter is."""
        inputs = self.tensor.num_inputs
        if inputs is None:
            return self.shape
        if inputs == 0:
            return (math.prod(self.shape),)
        outputs, inputs = math.prod(self.shape[inputs:]), math.prod(self.shape[:inputs])
        return (outputs, 1, inputs) if self.tensor.is_convolution else (outputs, inputs)

    def stored_slices(self, slices: Sequence[slice]) -> tuple[slice, ...]:
        """The part of the stored tensor that has these slices of the parameter."""
        inputs = self.tensor.num_inputs
        if inputs is None:
            return tuple(slices)
        if inputs == 0:
            return (_flat_slice(slices, self.shape),)
        rows = _flat_slice(slices[inputs:], self.shape[inputs:])
        rows = slice(self.first_row + rows.start, self.first_row + rows.stop)
        columns = _flat_slice(slices[:inputs], self.shape[:inputs])
        return (rows, slice(0, 1), columns) if self.tensor.is_convolution else (rows, columns)

    def from_stored(self, part: np.ndarray, slices: Sequence[slice]) -> np.ndarray:
        """A part that `stored_slices` selects, as a part of the parameter: a view."""
        if self.tensor.num_inputs is None:
            return part
        part = part[:, 0] if self.tensor.is_convolution else part
        return part.T.reshape([len(range(*piece.indices(size))) for piece, size in zip(slices, self.shape)])

    def to_stored(self, param: np.ndarray) -> np.ndarray:
        """The stored tensor, or part of it, of a whole parameter of one layer."""
        if not self.tensor.num_inputs:
            return param.reshape(self.part_shape)
        rows, *_, columns = self.part_shape
        return param.reshape(columns, rows).T.reshape(self.part_shape)


def _flat_slice(slices: Sequence[slice], sizes: Sequence[int]) -> slice:
    """The slice of flattened dimensions; only the first of them may be cut."""
    start, stop, _ = slices[0].indices(sizes[0])
    for piece, size in zip(slices[1:], sizes[1:]):
        assert piece.indices(size) == (0, size, 1), "sharding rules do not cut head_dim"
    stride = math.prod(sizes[1:])
    return slice(start * stride, stop * stride)
