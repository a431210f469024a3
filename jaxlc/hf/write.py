"""Writes safetensors files tensor by tensor, in any order: the place of each tensor is known from the shapes."""

import json
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from jaxlc.hf.safetensors_files import DTYPES, INDEX_FILE, SINGLE_FILE


class TensorWriter:
    """A context manager that writes the tensors of a model to files of limited size, and their index."""

    def __init__(
        self,
        directory: Path,
        shapes: Iterable[tuple[str, tuple[int, ...]]],
        *,
        dtype: str,
        max_shard_bytes: int,
        single_file: str = SINGLE_FILE,
        float32_names: Collection[str] = (),
    ):
        """
        Args:
          directory: exists, and has no safetensors files.
          shapes: name and shape of all tensors, in their order in the files.
          dtype: of the files, a key of DTYPES; arrays are converted.
          max_shard_bytes: largest number of bytes of tensors in a file; a larger tensor has a file of its own.
          single_file: name of the file if there is only one.
          float32_names: tensors that are float32 in any case.
        """
        shapes = [*shapes]
        self._dtypes = {name: "F32" if name in float32_names else dtype for name, _ in shapes}
        self._place: dict[str, tuple[IO[bytes], int, tuple[int, ...]]] = {}
        self._missing = {name: math.prod(shape) for name, shape in shapes}  # values
        self._files: list[IO[bytes]] = []
        shards = _split([(name, shape, self._num_bytes(name, shape)) for name, shape in shapes], max_shard_bytes)
        file_of: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            file = single_file if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            file_of |= {name: file for name, _ in shard}
            self._create(directory / file, shard)
        if len(shards) > 1:
            total = sum(self._num_bytes(name, shape) for name, shape in shapes)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
            (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, name: str, array: np.ndarray, region: tuple[slice, ...] = ()) -> None:
        """Writes one tensor, or a region of it, converted to the dtype of the files; once.

        Args:
          region: slices of its first dimensions.
        """
        (file, offset_bytes, shape), dtype = self._place[name], DTYPES[self._dtypes[name]]
        ranges = [range(*piece.indices(size)) for piece, size in zip(region, shape)]
        ranges += [range(size) for size in shape[len(region) :]]
        region_shape = tuple(map(len, ranges))
        assert array.size == math.prod(region_shape) and array.shape == region_shape[-array.ndim :], (name, array.shape)
        if _is_one_range(ranges, shape):
            first = sum(part[0] * math.prod(shape[dim + 1 :]) for dim, part in enumerate(ranges)) if array.size else 0
            file.seek(offset_bytes + first * dtype.itemsize)
            converted = np.ascontiguousarray(array, dtype)
            file.write(memoryview(converted.reshape(-1).view(np.uint8)))
        else:
            file.flush()
            tensor = np.memmap(file, dtype, "r+", offset_bytes, shape)
            tensor[region] = array
            tensor.flush()
        self._missing[name] -= array.size
        if not self._missing[name]:
            del self._missing[name]

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        for file in self._files:
            file.close()
        assert error_type is not None or not self._missing, f"not written: {sorted(self._missing)}"

    def _num_bytes(self, name: str, shape: Sequence[int]) -> int:
        return math.prod(shape) * DTYPES[self._dtypes[name]].itemsize

    def _create(self, path: Path, shard: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}  # transformers requires it
        end = 0
        for name, shape in shard:
            start, end = end, end + self._num_bytes(name, shape)
            header[name] = {"dtype": self._dtypes[name], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = path.open("w+b")  # closed in __exit__
        file.write(len(text).to_bytes(8, "little") + text)
        self._files.append(file)
        for name, shape in shard:
            self._place[name] = file, 8 + len(text) + header[name]["data_offsets"][0], shape


def _is_one_range(ranges: Sequence[range], shape: Sequence[int]) -> bool:
    """Whether these values of a tensor are consecutive: dimensions after the first with several values are whole."""
    first = next((dim for dim, part in enumerate(ranges) if len(part) > 1), len(ranges))
    whole = all(len(part) == size for part, size in zip(ranges[first + 1 :], shape[first + 1 :]))
    return whole and all(part.step == 1 for part in ranges)


def _split(
    tensors: list[tuple[str, tuple[int, ...], int]], max_shard_bytes: int
) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Name and shape of consecutive tensors that fit into one file, given also their bytes."""
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled_bytes = 0
    for name, shape, num_bytes in tensors:
        if shards[-1] and filled_bytes + num_bytes > max_shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append((name, shape))
        filled_bytes += num_bytes
    return shards
