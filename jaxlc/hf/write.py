"""Writes safetensors files tensor by tensor, in any order: the place of each tensor is known from the shapes."""

import json
import math
from collections.abc import Iterable, Sequence
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
    ):
        """
        Args:
          directory: exists, and has no safetensors files.
          shapes: name and shape of all tensors, in their order in the files.
          dtype: of the files, a key of DTYPES; arrays are converted.
          max_shard_bytes: largest number of bytes of tensors in a file; a larger tensor has a file of its own.
          single_file: name of the file if there is only one.
        """
        self._dtype = DTYPES[dtype]
        self._place: dict[str, tuple[IO[bytes], int, tuple[int, ...]]] = {}
        self._missing = {name: math.prod(shape) for name, shape in shapes}  # values
        self._files: list[IO[bytes]] = []
        shards = _split([*shapes], self._dtype.itemsize, max_shard_bytes)
        file_of: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            file = single_file if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            file_of |= {name: file for name, _ in shard}
            self._create(directory / file, shard, dtype)
        if len(shards) > 1:
            total = sum(math.prod(shape) for shard in shards for _, shape in shard) * self._dtype.itemsize
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
            (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, name: str, array: np.ndarray, first_row: int = 0) -> None:
        """Writes one tensor, or rows of it from `first_row` on, converted to the dtype of the files; once."""
        file, offset_bytes, shape = self._place[name]
        assert array.shape[1:] == shape[1:] and first_row + len(array) <= shape[0], (name, array.shape, shape)
        converted = np.ascontiguousarray(array, self._dtype)
        file.seek(offset_bytes + first_row * math.prod(shape[1:]) * self._dtype.itemsize)
        file.write(memoryview(converted.reshape(-1).view(np.uint8)))
        self._count(name, array)

    def write_columns(self, name: str, array: np.ndarray, first_column: int) -> None:
        """Writes every second column of a tensor, from `first_column` on, converted to the dtype of the files; once."""
        file, offset_bytes, shape = self._place[name]
        assert array.shape == (*shape[:-1], shape[-1] // 2), (name, array.shape, shape)
        file.flush()
        tensor = np.memmap(file, self._dtype, "r+", offset_bytes, shape)
        tensor[..., first_column::2] = array
        tensor.flush()
        self._count(name, array)

    def _count(self, name: str, array: np.ndarray) -> None:
        self._missing[name] -= array.size
        if not self._missing[name]:
            del self._missing[name]

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        for file in self._files:
            file.close()
        assert error_type is not None or not self._missing, f"not written: {sorted(self._missing)}"

    def _create(self, path: Path, shard: Sequence[tuple[str, tuple[int, ...]]], dtype: str) -> None:
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}  # transformers requires it
        end = 0
        for name, shape in shard:
            start, end = end, end + math.prod(shape) * self._dtype.itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = path.open("w+b")  # closed in __exit__
        file.write(len(text).to_bytes(8, "little") + text)
        self._files.append(file)
        for name, shape in shard:
            self._place[name] = file, 8 + len(text) + header[name]["data_offsets"][0], shape


def _split(
    shapes: list[tuple[str, tuple[int, ...]]], itemsize: int, max_shard_bytes: int
) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Consecutive tensors that fit into one file."""
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled_bytes = 0
    for name, shape in shapes:
        num_bytes = math.prod(shape) * itemsize
        if shards[-1] and filled_bytes + num_bytes > max_shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append((name, shape))
        filled_bytes += num_bytes
    return shards
