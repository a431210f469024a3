"""Reads slices of the tensors in safetensors files, without reading the rest.

Format (https://github.com/huggingface/safetensors): 8 bytes with the length of the header, a JSON header with the
dtype, shape and byte range of each tensor, and the data, little-endian and row-major.
"""

import itertools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxlc.core.errors import UserError, reason_of
from jaxlc.core.foreign_files import other_format, parse_json, read_json_file
from jaxlc.core.paths import file_inside

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# Name in the header -> dtype. Others, such as F8_E4M3 or I32, are of quantized weights.
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_STORED_DTYPES = DTYPES | {"U8": np.dtype(np.uint8)}
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # the limit of the package safetensors


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor is stored."""

    path: Path
    dtype: str  # as in the header
    shape: tuple[int, ...]
    offset_bytes: int  # from the start of the file

    def read(self, read: Callable[..., np.ndarray], slices: Sequence[slice]) -> np.ndarray:
        """A part of the tensor; `read(tensor, *slices)` reads that of a tensor that is in a file as it is."""
        return read(self, *slices)


@dataclass(frozen=True, kw_only=True)
class JoinedTensor(StoredTensor):
    """The rows of several tensors, one after the other, as float32: their dtypes may differ."""

    parts: Sequence[StoredTensor]

    def read(self, read: Callable[..., np.ndarray], slices: Sequence[slice]) -> np.ndarray:
        start, stop, _ = slices[0].indices(self.shape[0])
        arrays = []
        for part in self.parts:
            arrays.append(read(part, slice(max(0, start), max(0, stop)), *slices[1:]).astype(np.float32))
            start, stop = start - part.shape[0], stop - part.shape[0]
        return np.concatenate(arrays)


class TensorFiles:
    """The tensors of a directory with model.safetensors, or several files and their index."""

    def __init__(self, directory: Path):
        """Reads the headers of all files.

        Raises:
          UserError: a file is missing, truncated, or not a safetensors file.
        """
        self.directory = directory
        self.bytes_read = 0  # bytes of tensor data
        self.tensors: dict[str, StoredTensor] = {}
        for path, names in _files_of(directory).items():
            header = _read_header(path)
            missing = sorted(names - header.keys())
            if missing:
                raise UserError(f"{path} has no tensor {missing[0]}, which {INDEX_FILE} lists; download both again")
            # Of tensors that several files have, that of the file in the index.
            self.tensors = header | self.tensors | {name: header[name] for name in names}

    def read(self, name: str, *slices: slice) -> np.ndarray:
        """A copy of a part of a tensor, in its own dtype; only the pages of that part are read.

        Raises:
          UserError: it has NaN or infinite values.
        """
        tensor = self.tensors[name]
        part = tensor.read(self._read, slices)
        if not _is_finite(part):
            raise UserError(
                f"{name} in {tensor.path} has NaN or infinite values; download it again, or use another model"
            )
        return part

    def _read(self, tensor: StoredTensor, *slices: slice) -> np.ndarray:
        """A copy of a part of a tensor that is in a file as it is."""
        dtype = _STORED_DTYPES[tensor.dtype]
        if not math.prod(tensor.shape):  # an empty file cannot be mapped
            return np.empty(tensor.shape, dtype)[slices]
        part = np.array(np.memmap(tensor.path, dtype, "r", tensor.offset_bytes, tensor.shape)[slices])
        self.bytes_read += part.nbytes
        return part


def _is_finite(array: np.ndarray) -> bool:
    """Whether no value is NaN or infinite.

    The largest bits as signed and as unsigned integers belong to the values with the largest exponents, of positive and
    of negative sign. This is faster than `numpy.isfinite` and makes no copy.
    """
    infinity, minus_infinity = np.array([np.inf, -np.inf], array.dtype)
    return not array.size or bool(
        _bits(array, "i").max() < _bits(infinity, "i") and _bits(array, "u").max() < _bits(minus_infinity, "u")
    )


def _bits(array: np.ndarray | np.generic, kind: str) -> np.ndarray | np.generic:
    return array.view(f"{kind}{array.dtype.itemsize}")


def _files_of(directory: Path) -> dict[Path, set[str]]:
    """The files of a model, and the tensors that the index expects in each; none without an index."""
    index_path = directory / INDEX_FILE
    if not index_path.is_file():
        if (directory / SINGLE_FILE).is_file():
            try:
                return {file_inside(directory, SINGLE_FILE): set()}
            except ValueError as error:
                raise UserError(f"cannot read {directory / SINGLE_FILE}: {error}") from None
        problem = other_format(directory)
        raise UserError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{f'; it {problem}' if problem else ''}")
    try:
        file_of: dict[str, str] = read_json_file(index_path)["weight_map"]
        files: dict[Path, set[str]] = {}
        for name, file in file_of.items():
            files.setdefault(file_inside(directory, file), set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read {index_path} ({reason_of(error)}); download it again") from error
    single = directory / SINGLE_FILE
    if single.is_file() and single not in files:
        raise UserError(f"{directory} has {SINGLE_FILE} and {INDEX_FILE} with other files; remove one of them")
    missing = sorted(path.name for path in files if not path.is_file())
    if missing:
        raise UserError(
            f"{directory} has no file {missing[0]}, which {INDEX_FILE} lists ({len(missing)} of {len(files)} files are"
            " missing); download the model again"
        )
    return files


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file.

    Raises:
      UserError: it is truncated, or not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            (header_bytes,) = _LENGTH.unpack(file.read(_LENGTH.size))
            data_start = _LENGTH.size + header_bytes
            if header_bytes > _MAX_HEADER_BYTES or data_start > num_bytes:
                raise ValueError(f"its header has {header_bytes} bytes and the file {num_bytes}")
            header = parse_json(file.read(header_bytes))
            header.pop("__metadata__", None)
            tensors, spans = {}, [(data_start, data_start)]
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                if not all(type(number) is int and number >= 0 for number in (start, end, *entry["shape"])):
                    raise ValueError(f"{name} has the offsets {start}, {end} and the shape {entry['shape']}")
                tensors[name] = StoredTensor(
                    path=path, dtype=entry["dtype"], shape=tuple(entry["shape"]), offset_bytes=data_start + start
                )
                dtype = _STORED_DTYPES.get(entry["dtype"])
                if dtype is not None and end - start != math.prod(entry["shape"]) * dtype.itemsize:
                    raise ValueError(f"{name} has {end - start} bytes and the shape {entry['shape']}")
                spans.append((data_start + start, data_start + end))
            spans.sort()
            if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
                raise ValueError("tensors overlap")
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a valid safetensors file ({reason_of(error)}); download it again") from error
    if spans[-1][1] > num_bytes:
        raise UserError(f"{path} is truncated: it has {num_bytes:,} of {spans[-1][1]:,} bytes; download it again")
    return tensors
