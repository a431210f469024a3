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
    shape: tuple[int, ...]  # shape of the parameter, for one layer and one expert
    layers: Sequence[int] | None = None  # for a stacked parameter: the indices of its layers in the model
    num_experts: int | None = None  # of a parameter with a tensor for each expert, or a part of one
    first_row: int = 0  # of a parameter that is a part of the rows of its tensor
    num_rows: int = 0  # rows of the tensor; 0: those of the parameter

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The leading dimensions of the parameter, those of its tensors or their parts: layers and experts."""
        sizes = None if self.layers is None else len(self.layers), self.num_experts
        return tuple(size for size in sizes if size is not None)

    def name_at(self, place: tuple[int, ...]) -> str:
        """The name of the tensor at a place in `stack_shape`."""
        if self.layers is None:
            return self.tensor.name
        return self.tensor.name.format(layer=self.layers[place[0]], expert=place[-1])

    def region_at(self, place: tuple[int, ...]) -> tuple[slice, ...]:
        """The part of the tensor that a place in `stack_shape` is; dimensions after those of the result are whole."""
        if self.tensor.interleaved is not None:
            return (*[slice(None)] * (len(self.stored_shape) - 1), slice(self.tensor.interleaved, None, 2))
        rows = slice(self.first_row, self.first_row + self.part_shape[0])
        return (slice(place[-1], place[-1] + 1), rows) if self.tensor.is_stacked else (rows,)

    @property
    def places(self) -> list[tuple[int, ...]]:
        """All places in `stack_shape`, in the order of the parameter."""
        return [*np.ndindex(self.stack_shape)]

    @property
    def names(self) -> list[str]:
        """The names of the tensors at `places`."""
        return [self.name_at(place) for place in self.places]

    def arrays(self, param: np.ndarray) -> np.ndarray | list[np.ndarray]:
        """The part of a whole parameter that each of `places` is."""
        return param.reshape(-1, *self.shape) if self.stack_shape else [param]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in a file: nn.Linear stores [out, in]."""
        rows, *others = self.part_shape
        experts = (self.num_experts,) if self.tensor.is_stacked and self.num_experts is not None else ()
        return *experts, self.num_rows or rows, *others

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of the part of the tensor that the parameter is."""
        inputs = self.tensor.num_inputs
        if inputs is None:
            return self.shape if self.tensor.interleaved is None else (*self.shape[:-1], 2 * self.shape[-1])
        if inputs == 0:
            return (math.prod(self.shape),)
        outputs, inputs = math.prod(self.shape[inputs:]), math.prod(self.shape[:inputs])
        return (outputs, 1, inputs) if self.tensor.is_convolution else (outputs, inputs)

    def stored_slices(self, slices: Sequence[slice], place: tuple[int, ...] = ()) -> tuple[slice, ...]:
        """The part of the stored tensor at a place in `stack_shape` that has these slices of the parameter."""
        if self.tensor.is_stacked:
            return slice(place[-1], place[-1] + 1), *self._slices_of_part(slices)
        return self._slices_of_part(slices)

    def _slices_of_part(self, slices: Sequence[slice]) -> tuple[slice, ...]:
        inputs = self.tensor.num_inputs
        if inputs is None:
            return (*slices[:-1], self._columns(slices[-1]))
        if inputs == 0:
            return (_flat_slice(slices, self.shape),)
        rows = _flat_slice(slices[inputs:], self.shape[inputs:])
        rows = slice(self.first_row + rows.start, self.first_row + rows.stop)
        columns = _flat_slice(slices[:inputs], self.shape[:inputs])
        return (rows, slice(0, 1), columns) if self.tensor.is_convolution else (rows, columns)

    def _columns(self, columns: slice) -> slice:
        """The columns of the tensor that are these columns of the parameter."""
        first = self.tensor.interleaved
        if first is None:
            return columns
        start, stop, _ = columns.indices(self.shape[-1])
        return slice(2 * start + first, 2 * stop + first, 2) if stop > start else slice(0, 0)

    def from_stored(self, part: np.ndarray, slices: Sequence[slice]) -> np.ndarray:
        """A part that `stored_slices` selects, as a part of the parameter: a view."""
        if self.tensor.num_inputs is None:
            return part
        part = part[0] if self.tensor.is_stacked else part
        part = part[:, 0] if self.tensor.is_convolution else part
        return part.T.reshape([len(range(*piece.indices(size))) for piece, size in zip(slices, self.shape)])

    def to_stored(self, param: np.ndarray) -> np.ndarray:
        """The stored tensor of one of `arrays`, or the part of it that `region_at` gives."""
        if self.tensor.num_inputs is None:
            return param
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
