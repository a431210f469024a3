"""Reads slices of the tensors in safetensors files, and writes such files.

The package safetensors checks the headers. Data are read from a memory map, because numpy, which the
package would use, has no FP8. The writer takes tensors, and parts of them, in any order: the place
of each tensor is known from the shapes. Format (https://github.com/huggingface/safetensors): 8
bytes with the length of the header, a JSON header with the dtype, shape and byte range of each
tensor, and the data, little-endian and row-major.

Weights in MXFP4 (OCP Microscaling Formats, version 1.0, section 5.3), as files of gpt-oss have
them: a weight [experts, inputs, outputs] NAME is stored as two tensors, with the inputs last:

    NAME_blocks  uint8 [experts, outputs, inputs / 32, 16]  two values of 4 bits (E2M1), the first one in the low bits
    NAME_scales  uint8 [experts, outputs, inputs / 32]      exponent of the scale of 32 values, plus 127 (E8M0)

Weights in FP8 (quant_method fp8: DeepSeek-V3, section 3.3.2, arXiv:2412.19437), as files of many
families have them: a weight NAME is stored in float8_e4m3fn, with its scales. A weight is the
float32 product of both, rounded to bfloat16:

    NAME            float8_e4m3fn [..., outputs, inputs]
    NAME_scale_inv  [..., blocks of outputs, blocks of inputs]  blocks of weight_block_size, the last of which may be
                                                                smaller; or one number if weight_block_size is null
"""

import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxlc.config.models.config_json import BITSANDBYTES, language_model_of, quantization_of
from jaxlc.config.models.pretrained import CONFIG_FILE, read_json
from jaxlc.core import Unsupported, UserError, reason_of
from jaxlc.core.files import file_inside, groups_within, other_format, read_json_file, write_json
from jaxlc.models.quantized import BLOCK, MX_BLOCK, SCALES_BLOCK, Mxfp4, Nf4, scale_values

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Name in the header -> dtype. Others, such as I32, are of quantized weights.
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_STORED_DTYPES = DTYPES | {
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}

Read = Callable[
    ..., np.ndarray
]  # (tensor, *slices) -> a part of a tensor that is in a file as it is


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor is stored."""

    path: Path
    name: str  # in the file
    dtype: str  # as in the header
    shape: tuple[int, ...]
    offset_bytes: int = 0  # of its data in the file

    def read(self, read: Read, slices: Sequence[slice]) -> np.ndarray:
        """A part of the tensor; `read(tensor, *slices)` reads that of a tensor that is in a file as
        it is.
        """
        return read(self, *slices)

    @property
    def bytes(self) -> np.ndarray:
        """The bytes of the tensor, uint8; of one that is in a file as it is, mapped to memory."""
        return self.read(_mapped, ()).reshape(-1).view(np.uint8)


Tensors = dict[str, StoredTensor]  # by name


def _mapped(tensor: StoredTensor, *slices: slice) -> np.ndarray:
    """A part of a tensor that is in a file as it is; bytes if its dtype is unknown."""
    num_bytes = _num_bytes(tensor.shape, tensor.dtype)
    dtype = _STORED_DTYPES.get(tensor.dtype)
    if num_bytes:
        data = np.memmap(tensor.path, np.uint8, "r", tensor.offset_bytes, (num_bytes,))
    else:
        data = np.empty(0, np.uint8)  # which cannot be mapped
    return data if dtype is None else data.view(dtype).reshape(tensor.shape)[slices]


def _num_bytes(shape: Sequence[int], dtype: str) -> int:
    bits = re.search(r"\d+", dtype)  # BOOL names none
    return math.prod(shape) * (int(bits[0]) if bits else 8) // 8


@dataclass(frozen=True, kw_only=True)
class JoinedTensor(StoredTensor):
    """The rows of several tensors, one after the other, as float32: their dtypes may differ."""

    parts: Sequence[StoredTensor]

    def read(self, read: Read, slices: Sequence[slice]) -> np.ndarray:
        start, stop, _ = slices[0].indices(self.shape[0])
        arrays = []
        for part in self.parts:
            rows = slice(max(0, start), max(0, stop))
            arrays.append(part.read(read, (rows, *slices[1:])).astype(np.float32))
            start -= part.shape[0]
            stop -= part.shape[0]
        return np.concatenate(arrays)


class TensorFiles:
    """The tensors of a directory with config.json and model.safetensors, or several files and their
    index. A quantized weight is one tensor of dtype BF16.
    """

    def __init__(self, directory: Path, adapter_file: str = ""):
        """Reads the headers of all files.

        Args:
          adapter_file: the only file to read, of a directory of `peft`.
        Raises:
          UserError: a file is missing, truncated, or not a safetensors file, or as `_dequantized`.
          Unsupported: as `_dequantized`.
        """
        self.directory = directory
        self.bytes_read = 0  # bytes of tensor data
        self.tensors: Tensors = {}
        paths = {directory / adapter_file: set[str]()} if adapter_file else _files_of(directory)
        for path, names in paths.items():
            header = _read_header(path)
            missing = sorted(names - header.keys())
            if missing:
                raise UserError(
                    f"{path} has no tensor {missing[0]}, which {INDEX_FILE} lists; download both again"
                )
            # Of tensors that several files have, that of the file in the index.
            self.tensors = header | self.tensors | {name: header[name] for name in names}
        if adapter_file:
            return
        config = language_model_of(read_json(directory / CONFIG_FILE))
        self.tensors = _dequantized(self.tensors, quantization_of(config))

    def read(self, name: str, *slices: slice) -> np.ndarray:
        """A copy of a part of a tensor, in its own dtype; only the pages of that part are read.

        Raises:
          UserError: it has NaN or infinite values.
        """
        tensor = self.tensors[name]
        part = tensor.read(self._read, slices)
        if not _is_finite(part):
            raise _not_finite(tensor)
        return part

    def read_part(
        self,
        tensor: "Nf4Tensor | Mxfp4Tensor",
        part: str,
        slices: Sequence[slice],
        shape: Sequence[int],
    ) -> np.ndarray:
        """A part of the codes, scales, maxima or offset of a tensor, as `part` names them.

        Args:
          shape: of the whole array, which may differ from that in the file.
        Raises:
          UserError: as `read`.
        """
        array = stored = getattr(tensor, part)
        if isinstance(stored, StoredTensor):
            array = self._read(replace(stored, shape=tuple(shape)), *slices)
        is_infinite = array.dtype.kind == "f" and not _is_finite(array)
        if part == "scales" and isinstance(tensor, Mxfp4Tensor):
            is_infinite = array.max(initial=0) > _MAX_SCALE
        if is_infinite:
            raise _not_finite(tensor)
        return array

    def _read(self, tensor: StoredTensor, *slices: slice) -> np.ndarray:
        """A copy of a part of a tensor that is in a file as it is."""
        part = np.array(_mapped(tensor, *slices))
        self.bytes_read += part.nbytes
        return part


def _not_finite(tensor: StoredTensor) -> UserError:
    return UserError(
        f"{tensor.name} in {tensor.path} has NaN or infinite values; download it again, or use another model"
    )


def _is_finite(array: np.ndarray) -> bool:
    """Whether no value is NaN or infinite.

    The largest bits as signed and as unsigned integers belong to the values with the largest
    exponents, of positive and of negative sign. This is faster than `numpy.isfinite` and makes no
    copy.
    """
    infinity, minus_infinity = np.array([np.inf, -np.inf], array.dtype)
    signed, unsigned = (f"{kind}{array.dtype.itemsize}" for kind in "iu")
    return not array.size or bool(
        array.view(signed).max() < infinity.view(signed)
        and array.view(unsigned).max() < minus_infinity.view(unsigned)
    )


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
        raise UserError(
            f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{f'; it {problem}' if problem else ''}"
        )
    try:
        file_of: dict[str, str] = read_json_file(index_path)["weight_map"]
        files: dict[Path, set[str]] = {}
        for name, file in file_of.items():
            files.setdefault(file_inside(directory, file), set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"cannot read {index_path} ({reason_of(error)}); download it again"
        ) from error
    single = directory / SINGLE_FILE
    if single.is_file() and single not in files:
        raise UserError(
            f"{directory} has {SINGLE_FILE} and {INDEX_FILE} with other files; remove one of them"
        )
    missing = sorted(path.name for path in files if not path.is_file())
    if missing:
        raise UserError(
            f"{directory} has no file {missing[0]}, which {INDEX_FILE} lists ({len(missing)} of {len(files)} files are"
            " missing); download the model again"
        )
    return files


def _read_header(path: Path) -> Tensors:
    """The tensors of one file.

    Raises:
      UserError: it is truncated, or not a safetensors file.
    """
    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(num_bytes))
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} is not a valid safetensors file ({reason_of(error)}); download it again"
        ) from error
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(
            path=path,
            name=name,
            dtype=part["dtype"],
            shape=tuple(part["shape"]),
            offset_bytes=8 + num_bytes + part["data_offsets"][0],
        )
        for name, part in header.items()
    }


BLOCKS, SCALES = "_blocks", "_scales"
_MAX_SCALE = 252  # with which the largest value is finite


@dataclass(frozen=True, kw_only=True)
class Mxfp4Tensor(StoredTensor):
    """The two tensors as one of dtype BF16, in which all values are exact; `path` is that of the
    blocks.
    """

    codes: StoredTensor  # uint8 [experts, outputs, inputs / 2], those of the blocks
    scales: StoredTensor

    def read(self, read: Read, slices: Sequence[slice]) -> np.ndarray:
        """bfloat16: a part of the weight. `read(tensor, *slices)` reads a part of a stored tensor."""
        experts, inputs, outputs = slices
        start, stop, _ = inputs.indices(self.shape[1])
        first = start // MX_BLOCK
        last = -(-stop // MX_BLOCK)
        codes = slice(first * MX_BLOCK // 2, last * MX_BLOCK // 2)
        packed = read(self.codes, experts, outputs, codes)
        exponents = read(self.scales, experts, outputs, slice(first, last)).astype(np.int32) - 127
        weights = _products(Mxfp4, packed, np.ldexp(np.float32(1), exponents))
        own = slice(start - first * MX_BLOCK, stop - first * MX_BLOCK)
        return weights[..., own].swapaxes(1, 2)


def _products(quantized: type[Mxfp4 | Nf4], codes: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """bfloat16 [..., inputs]: the values of packed codes times the factors of their blocks, [..., blocks]."""
    pairs = np.stack([codes >> shift & 15 for shift in quantized.SHIFTS], axis=-1)
    values = quantized.VALUES[pairs].reshape(*factors.shape, -1) * factors[..., None]
    return values.astype(ml_dtypes.bfloat16).reshape(*factors.shape[:-1], -1)


_SCALE = "_scale_inv"
_ACTIVATION_SCALE = "activation_scale"
_SCALE_DTYPES = (*DTYPES, "F8_E8M0")
_CONVERTED_ROWS = 128  # at a time, so that few values are in float32
# The values of all bytes: a table is faster than a conversion by ml_dtypes.
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Fp8Tensor(StoredTensor):
    """A weight in FP8 and its scales as one tensor of dtype BF16; path and name are the weight's."""

    weights: StoredTensor
    scales: StoredTensor  # as many dimensions as the weights have
    block: tuple[int, int]

    def read(self, read: Read, slices: Sequence[slice]) -> np.ndarray:
        """bfloat16: a part of the weight. `read(tensor, *slices)` reads a part of a stored tensor."""
        values = read(self.weights, *slices)
        weights = np.empty(values.shape, ml_dtypes.bfloat16)
        if not values.size:
            return weights
        *experts, rows, columns = *slices, *[slice(None)] * (values.ndim - len(slices))
        places = [
            np.arange(size)[part] // block
            for size, part, block in zip(self.shape[-2:], (rows, columns), self.block)
        ]
        scales = read(self.scales, *experts, *(slice(x[0], x[-1] + 1) for x in places))
        row_blocks, column_blocks = (x - x[0] for x in places)
        for start in range(0, len(row_blocks), _CONVERTED_ROWS):
            part = slice(start, start + _CONVERTED_ROWS)
            factors = scales.astype(np.float32)[..., row_blocks[part], :].take(column_blocks, -1)
            floats = _E4M3.take(values[..., part, :].view(np.uint8), mode="clip")
            with np.errstate(over="ignore"):  # infinite values are an error of `TensorFiles.read`
                weights[..., part, :] = floats * factors
        return weights


_NF4_STATE = ".quant_state.bitsandbytes__nf4"
_NF4_PARTS = (".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map")


@dataclass(frozen=True, kw_only=True)
class Nf4Tensor(StoredTensor):
    """A weight in NF4 of bitsandbytes as one tensor of dtype BF16; path and name are the weight's."""

    codes: StoredTensor
    scales: StoredTensor
    maxima: StoredTensor
    offset: np.float32

    def read(self, read: Read, slices: Sequence[slice]) -> np.ndarray:
        """bfloat16: a part of the weight, from its blocks; from all if these cross rows."""
        num_rows, num_columns = self.shape
        if num_columns % BLOCK:
            one_row = replace(self, shape=(1, num_rows * num_columns))
            return one_row.read(read, ()).reshape(self.shape)[tuple(slices)]
        rows, columns = (*slices, slice(None), slice(None))[:2]
        start, stop, _ = columns.indices(num_columns)
        first = start // BLOCK
        last = -(-stop // BLOCK)
        shape = num_rows, num_columns // BLOCK
        stored = replace(self.codes, shape=(*shape, BLOCK // 2)), replace(self.scales, shape=shape)
        codes, scales = (read(tensor, rows, slice(first, last)) for tensor in stored)
        places = np.arange(math.prod(shape)).reshape(shape)[rows, first:last] // SCALES_BLOCK
        factors = scale_values()[scales] * read(self.maxima).reshape(-1)[places] + self.offset
        own = slice(start - first * BLOCK, stop - first * BLOCK)
        return _products(Nf4, codes, factors)[:, own]


def _dequantized(tensors: Mapping[str, StoredTensor], quantization: Mapping[str, Any]) -> Tensors:
    """`tensors` with each quantized weight as one tensor of dtype BF16.

    Args:
      quantization: quantization_config of config.json, empty if it has none.
    Raises:
      UserError: a weight in FP8 has no scales, or scales of another shape.
      Unsupported: scales in FP8 files have an unknown dtype.
    """
    method = quantization.get("quant_method")
    whole, suffixes = {}, ()
    if method == "mxfp4":
        whole = _joined_mxfp4(tensors)
        suffixes = (BLOCKS, SCALES)
    elif method == BITSANDBYTES:
        whole = _joined_nf4(tensors)
        suffixes = (_NF4_STATE, *_NF4_PARTS)
    elif method == "fp8":
        block_size = quantization.get("weight_block_size", (128, 128))
        whole = {
            name: _fp8_tensor(name, tensors, block_size)
            for name, tensor in tensors.items()
            if tensor.dtype == "F8_E4M3" and len(tensor.shape) > 1
        }
        suffixes = (_SCALE,)
        tensors = {x: y for x, y in tensors.items() if not x.endswith(_ACTIVATION_SCALE)}
    parts = {name + suffix for name in whole for suffix in suffixes}
    return {name: tensor for name, tensor in tensors.items() if name not in parts} | whole


def _fp8_tensor(
    name: str, tensors: Mapping[str, StoredTensor], block_size: Sequence[int] | None
) -> Fp8Tensor:
    """The weight `name` with its scales; see `_dequantized`."""
    weights = tensors[name]
    scales = tensors.get(name + _SCALE)
    if scales is None:
        raise UserError(
            f"{weights.path} has {name} in FP8 without its scales {name}{_SCALE}; download the model again, or use"
            " its weights in bfloat16"
        )
    if scales.dtype not in _SCALE_DTYPES:
        raise Unsupported(
            f"unsupported: {scales.name} in {scales.path} has dtype {scales.dtype}; scales of FP8 may have"
            f" {', '.join(_SCALE_DTYPES)}"
        )
    *experts, rows, columns = weights.shape
    # of stacked experts: a number for the rows of the gate, and one for those of up
    parts = scales.shape[1] if experts and len(scales.shape) == 3 and not block_size else 1
    whole = max(rows // max(parts, 1), 1), max(columns, 1)
    block = (block_size[0], block_size[1]) if block_size else whole
    shape = *experts, -(-rows // block[0]), -(-columns // block[1])
    is_number = not (block_size or experts) and scales.shape in ((), (1,))
    if scales.shape != shape and not is_number:
        raise UserError(
            f"{scales.name} in {scales.path} has shape {list(scales.shape)}; {name} of shape {list(weights.shape)} with"
            f" weight_block_size={json.dumps(block_size)} in config.json needs {list(shape)}: correct that, or"
            " download both again"
        )
    return Fp8Tensor(
        path=weights.path,
        name=name,
        dtype="BF16",
        shape=weights.shape,
        weights=weights,
        scales=replace(scales, shape=shape),
        block=block,
    )


def _joined_nf4(tensors: Mapping[str, StoredTensor]) -> Tensors:
    """Each weight in NF4 as one tensor.

    Raises:
      Unsupported: it has blocks of other sizes, scales that are not quantized, or another format.
      UserError: a part has another size than the weight needs.
    """
    whole = {}
    for state_name in [name for name in tensors if name.endswith(_NF4_STATE)]:
        name = state_name.removesuffix(_NF4_STATE)
        state = json.loads(bytes(tensors[state_name].bytes))
        codes = tensors[name]
        absmax, nested, *maps = (tensors.get(name + part) for part in _NF4_PARTS)
        sizes = state.get("blocksize"), state.get("nested_blocksize"), codes.dtype
        num_blocks, entries_over = divmod(math.prod(state["shape"]), BLOCK)
        if absmax is None or nested is None or entries_over or sizes != (BLOCK, SCALES_BLOCK, "U8"):
            raise Unsupported(
                f"unsupported: {name} in {codes.path} has (blocksize, nested_blocksize, storage) {sizes}, and shape"
                f" {state['shape']}; NF4 of bitsandbytes is read with ({BLOCK}, {SCALES_BLOCK}, 'U8'), which"
                f" bnb_4bit_use_double_quant=True gives, and whole blocks; or use the weights in bfloat16"
            )
        needed = num_blocks * BLOCK // 2, num_blocks, -(-num_blocks // SCALES_BLOCK)
        for part, size in zip((codes, absmax, nested), needed):
            if math.prod(part.shape) != size:
                raise UserError(
                    f"{part.name} in {part.path} has shape {list(part.shape)}; its weight needs {size} values:"
                    " download it again"
                )
        for values, table in zip((Nf4.VALUES, scale_values()), maps):
            if table is not None and not np.allclose(_mapped(table), values, rtol=0, atol=1e-6):
                raise Unsupported(f"unsupported: {table.name} in {codes.path} is not that of NF4")
        whole[name] = Nf4Tensor(
            path=codes.path,
            name=name,
            dtype="BF16",
            shape=tuple(state["shape"]),
            codes=codes,
            scales=absmax,
            maxima=nested,
            offset=np.float32(state["nested_offset"]),
        )
    return whole


def _joined_mxfp4(tensors: Mapping[str, StoredTensor]) -> Tensors:
    """Each pair of blocks and scales as one tensor, without those that miss the other one."""
    whole = {}
    for name in (name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)):
        blocks = tensors[name + BLOCKS]
        scales = tensors.get(name + SCALES)
        expected = () if scales is None else (*scales.shape, MX_BLOCK // 2)
        if blocks.dtype != "U8" or len(expected) != 4 or blocks.shape != expected:
            continue
        experts, outputs, groups = scales.shape
        whole[name] = Mxfp4Tensor(
            path=blocks.path,
            name=name,
            dtype="BF16",
            shape=(experts, groups * MX_BLOCK, outputs),
            codes=replace(blocks, shape=(experts, outputs, groups * MX_BLOCK // 2)),
            scales=scales,
        )
    return whole


class TensorWriter(contextlib.ExitStack):
    """A context manager that writes the tensors of a model to files of limited size, and their
    index.
    """

    def __init__(
        self,
        directory: Path,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        max_shard_bytes: int,
    ):
        """
        Args:
          directory: exists, and has no safetensors files.
          tensors: dtype, a key of DTYPES or of a header, and shape of all tensors, in their order in the files.
          max_shard_bytes: largest number of bytes of tensors in a file; a larger tensor has a file of its own.
        """
        super().__init__()
        self.push(self._check_written)
        self._place: dict[str, tuple[IO[bytes], int, str, tuple[int, ...]]] = {}
        self._missing = {name: math.prod(shape) for name, (_, shape) in tensors.items()}  # values
        names = list(tensors)
        sizes = [_num_bytes(shape, dtype) for dtype, shape in tensors.values()]
        groups = groups_within(sizes, max_shard_bytes)
        file_of: dict[str, str] = {}
        for number, group in enumerate(groups, 1):
            file = f"model-{number:05}-of-{len(groups):05}.safetensors"
            if len(groups) == 1:
                file = SINGLE_FILE
            shard = {names[index]: tensors[names[index]] for index in group}
            file_of |= dict.fromkeys(shard, file)
            self._create(directory / file, shard)
        if len(groups) > 1:
            index = {
                "metadata": {"total_size": sum(sizes)},
                "weight_map": dict(sorted(file_of.items())),
            }
            write_json(directory / INDEX_FILE, index)

    def write(self, name: str, array: np.ndarray, region: tuple[slice, ...] = ()) -> None:
        """Writes one tensor, or a region of it, converted to the dtype of the files; once.

        Args:
          region: slices of its first dimensions.
        """
        file, offset_bytes, dtype_name, shape = self._place[name]
        dtype = _STORED_DTYPES[dtype_name]
        # Its memory is never written: addresses in it are places in the stored tensor.
        tensor = np.zeros(shape, dtype)
        target = tensor[*region, ...]
        assert array.size == target.size and array.shape == target.shape[-array.ndim :], (
            name,
            array.shape,
        )
        if target.flags.c_contiguous:
            file.seek(offset_bytes + target.ctypes.data - tensor.ctypes.data)
            file.write(np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8))
        else:
            if self._missing[name] == tensor.size:
                # On a full disk, this raises an error, and a write to mapped memory kills the process.
                file.seek(offset_bytes)
                file.write(tensor.reshape(-1).view(np.uint8))
            file.flush()
            stored = np.memmap(file, dtype, "r+", offset_bytes, shape)
            stored[region] = array
            stored.flush()
        self._missing[name] -= array.size
        if not self._missing[name]:
            del self._missing[name]

    def write_bytes(self, name: str, data: np.ndarray) -> None:
        """Writes the bytes of a tensor, uint8, as they are."""
        file, offset_bytes, *_ = self._place[name]
        file.seek(offset_bytes)
        file.write(data)
        del self._missing[name]

    def _check_written(self, error_type: type[BaseException] | None, *_: object) -> None:
        assert error_type is not None or not self._missing, f"not written: {sorted(self._missing)}"

    def _create(self, path: Path, shard: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}  # transformers requires it
        end = 0
        for name, (dtype, shape) in shard.items():
            start = end
            end += _num_bytes(shape, dtype)
            header[name] = dict(dtype=dtype, shape=shape, data_offsets=(start, end))
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = self.enter_context(path.open("w+b"))
        file.write(len(text).to_bytes(8, "little") + text)
        for name, place in shard.items():
            self._place[name] = file, 8 + len(text) + header[name]["data_offsets"][0], *place
