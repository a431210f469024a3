"""Reads the parameters of a model from Hugging Face files into sharded arrays, one stacked
parameter at a time.

A process reads only the byte ranges of its own shards. Host memory holds the shards of one
parameter at a time, in the target dtype, and a part of one layer. The layout of a parameter says
which part of a Hugging Face tensor a part of it is, and how it is converted.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlc.config import ModelConfig
from jaxlc.config.kinds.contract import LayerTensor
from jaxlc.config.models.families import Family
from jaxlc.core import Unsupported, Update, UserError
from jaxlc.hf.files import (
    DTYPES,
    JoinedTensor,
    Mxfp4Tensor,
    Nf4Tensor,
    StoredTensor,
    TensorFiles,
    Tensors,
)
from jaxlc.models import decoder, quantized
from jaxlc.models.quantized import Nf4, Quantized, is_quantized
from jaxlc.runtime.watchdog import problem_of_any_process

T = TypeVar("T")
Index = tuple[tuple[int, int, int], ...]  # (start, stop, 1) of each dimension


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A tensor, or those of several layers, and the parameter that they become."""

    tensor: LayerTensor
    shape: tuple[int, ...]  # shape of the parameter, for one layer and one expert
    # for a stacked parameter: the indices of its layers in the model
    layers: Sequence[int] | None = None
    num_experts: int | None = None  # of a parameter with a tensor for each expert, or a part of one
    # A parameter may be a part of the rows of its tensor, or a part of each of several groups of them.
    num_rows: int = 0  # rows of the tensor; 0: those of the parameter
    num_groups: int = 1  # groups of these rows, which have equal sizes
    first_row: int = 0  # of the parameter in each group

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The leading dimensions of the parameter, those of its tensors or their parts: layers and
        experts.
        """
        sizes = None if self.layers is None else len(self.layers), self.num_experts
        return tuple(size for size in sizes if size is not None)

    def name_at(self, place: tuple[int, ...]) -> str:
        """The name of the tensor at a place in `stack_shape`."""
        if self.layers is None:
            return self.tensor.name
        return self.tensor.name.format(layer=self.layers[place[0]], expert=place[-1])

    def stored_parts(
        self, param: np.ndarray, place: tuple[int, ...]
    ) -> list[tuple[tuple[slice, ...], np.ndarray]]:
        """The parts of the tensor that a place in `stack_shape` is: their slices, where dimensions
        after those given are whole, and their values.

        Args:
          param: the parameter at this place, one of `arrays`.
        """
        slices = self.stored_slices([slice(0, size) for size in self.shape], place)
        stored = self.to_stored(param)
        stored = stored.T if self.tensor.is_transposed else stored
        return list(zip(slices, np.split(stored, len(slices))))

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
        experts = (
            (self.num_experts,) if self.tensor.is_stacked and self.num_experts is not None else ()
        )
        shape = *experts, self.num_rows or rows, *others
        return (*shape[:-2], *shape[:-3:-1]) if self.tensor.is_transposed else shape

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of the part of the tensor that the parameter is."""
        inputs = self.tensor.num_inputs
        if inputs is None:
            return (
                self.shape
                if self.tensor.interleaved is None
                else (*self.shape[:-1], 2 * self.shape[-1])
            )
        if inputs == 0:
            return (math.prod(self.shape),)
        outputs = math.prod(self.shape[inputs:])
        inputs = math.prod(self.shape[:inputs])
        return (outputs, 1, inputs) if self.tensor.is_convolution else (outputs, inputs)

    def stored_rows(self, rows: slice) -> Iterator[slice]:
        """The rows of the tensor that are these rows of the parameter, in each group."""
        size, stride = (
            num_rows // self.num_groups
            for num_rows in (self.part_shape[0], self.num_rows or self.part_shape[0])
        )
        first = rows.start // size
        for group in range(first, max(first + 1, -(-rows.stop // size))):
            shift = group * (stride - size) + self.first_row
            start = max(rows.start, group * size)
            stop = min(rows.stop, (group + 1) * size)
            yield slice(start + shift, stop + shift)

    def stored_slices(
        self, slices: Sequence[slice], place: tuple[int, ...]
    ) -> list[tuple[slice, ...]]:
        """The parts of the stored tensor at a place in `stack_shape` that have these slices of the
        parameter, one after the other in the dimension of rows.
        """
        inputs = self.tensor.num_inputs
        if inputs is None:
            parts = [(*slices[:-1], self.stored_columns(slices[-1]))]
        else:
            rows = self.stored_rows(_flat_slice(slices[inputs:], self.shape[inputs:]))
            one = (slice(0, 1),) if self.tensor.is_convolution else ()
            columns = (_flat_slice(slices[:inputs], self.shape[:inputs]),) if inputs else ()
            parts = [(x, *one, *columns) for x in rows]
        expert = (slice(place[-1], place[-1] + 1),) if self.tensor.is_stacked else ()
        return [(*expert, *part[:: -1 if self.tensor.is_transposed else 1]) for part in parts]

    def stored_columns(self, columns: slice) -> slice:
        """The columns of the tensor that are these columns of the parameter."""
        first = self.tensor.interleaved
        if first is None:
            return columns
        start, stop, _ = columns.indices(self.shape[-1])
        return slice(2 * start + first, 2 * stop + first, 2) if stop > start else slice(0, 0)

    def from_stored(self, part: np.ndarray, slices: Sequence[slice]) -> np.ndarray:
        """The parts that `stored_slices` selects, joined, as a part of the parameter: a view."""
        if self.tensor.num_inputs is None:
            return part
        part = part[0] if self.tensor.is_stacked else part
        part = part[:, 0] if self.tensor.is_convolution else part
        return (part if self.tensor.is_transposed else part.T).reshape(
            [len(range(*piece.indices(size))) for piece, size in zip(slices, self.shape)]
        )

    def to_stored(self, param: np.ndarray) -> np.ndarray:
        """The stored tensor of one of `arrays`, or the rows or columns of it that the parameter is."""
        if self.tensor.num_inputs is None:
            return param
        if not self.tensor.num_inputs:
            return param.reshape(self.part_shape)
        rows, *_, columns = self.part_shape
        return param.reshape(columns, rows).T.reshape(self.part_shape)


Layouts = dict[str, Layout]  # by the path of the parameter


def _flat_slice(slices: Sequence[slice], sizes: Sequence[int]) -> slice:
    """The slice of flattened dimensions, of which there may be none; only the first may be cut."""
    if not sizes:
        return slice(0, 1)
    start, stop, _ = slices[0].indices(sizes[0])
    for piece, size in zip(slices[1:], sizes[1:]):
        assert piece.indices(size) == (0, size, 1), "sharding rules do not cut head_dim"
    stride = math.prod(sizes[1:])
    return slice(start * stride, stop * stride)


_HEAD = "lm_head.weight"
ROUNDED = "; frozen weights are rounded to bf16 (config.precision.frozen)"
_BUFFERS = ("rotary_emb.inv_freq",)  # computed from config.json; old checkpoints contain it


def load_params(
    directory: Path,
    family: Family,
    abstract_params: Any,
    model: ModelConfig,
    progress: Update | None = None,
) -> tuple[dict, str]:
    """The parameters of the model in `directory`, and what this process read, for the start report.

    Args:
      abstract_params: shapes, dtypes and shardings of the parameters; shardings may be in host memory. The vocabulary
        may be larger than `model.vocab_size`, and is padded with zeros.
      progress: called with the bytes of parameters done and in total.
    Raises:
      UserError: as `open_files`; or a tensor has NaN or infinite values.
      Unsupported: as `open_files`.
    """
    files, layouts = open_files(directory, family, model)
    abstract = dict(paths_of(abstract_params))
    total = sum(map(_num_bytes, abstract.values()))
    done = 0
    loaded = {}

    def load(path: str, param: Any) -> Any:
        array = jax.block_until_ready(_load(files, layouts[path], param))
        if path == "embedding" and _HEAD in layouts:
            _check_tied_head(files, _load(files, layouts[_HEAD], param), array)
        return array

    for path, param in abstract.items():
        loaded[path] = _together(functools.partial(load, path, param))
        done += _num_bytes(param)
        if progress is not None:
            progress(done, total)
    leaves = jax.tree.leaves([loaded[path] for path in abstract])
    read = f"{files.bytes_read:,} bytes read by this process"
    formats, is_rounded = set(), False
    for path, param in abstract.items():
        tensors = [files.tensors[name] for name in layouts[path].names]
        if not is_quantized(param):
            is_16_bit = param.dtype.itemsize == 2
            is_rounded |= is_16_bit and any(x.dtype != "BF16" for x in tensors)
        elif not all(isinstance(x, Nf4Tensor | Mxfp4Tensor) for x in tensors):
            formats.add(type(param).__name__.upper())
    if formats:
        read += f"; frozen matrices are quantized to {' and '.join(sorted(formats))} (config.precision.frozen)"
    if is_rounded:
        read += ROUNDED
    return jax.tree.unflatten(jax.tree.structure(abstract_params), leaves), read


def _together(read: Callable[[], T]) -> T:
    """What `read` returns; all processes raise an error if it fails in one, instead of waiting for
    it. All of them call this function in the same order.
    """
    error = None
    try:
        result = read()
    except UserError as raised:
        error = raised
    if problem := problem_of_any_process("weights", str(error or "")):
        raise error or UserError(problem)
    return result


def open_files(directory: Path, family: Family, model: ModelConfig) -> tuple[TensorFiles, Layouts]:
    """The files of the model in `directory`, and the layouts of its parameters by path. Reads only the headers.

    Raises:
      UserError: a file or tensor is missing, is damaged or has an unexpected shape.
      Unsupported: a tensor has a dtype of quantized weights, or the model has tensors of an unknown name.
    """
    files = TensorFiles(directory)
    files.tensors = language_tensors(files, family, model)
    layouts = layouts_of(family, model, functools.partial(_as_stored, files.tensors))
    if model.tie_embeddings and _HEAD in files.tensors:  # a copy of the embedding, or the only one
        embedding = layouts["embedding"]
        layouts[_HEAD] = dataclasses.replace(
            embedding, tensor=embedding.tensor._replace(name=_HEAD)
        )
        if embedding.tensor.name not in files.tensors:
            layouts["embedding"] = layouts[_HEAD]
    _check(files, layouts)
    return files, layouts


def shapes_of(model: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """All parameters but adapters by path, without vocabulary padding."""
    return dict(paths_of(decoder.abstract_params(model, model.vocab_size)))


def layouts_of(
    family: Family,
    model: ModelConfig,
    choose: Callable[[Layout, Layout], Layout] = lambda own, other: own,
) -> Layouts:
    """The layout of the tensor of each parameter, by the parameter's path, without vocabulary
    padding.

    Args:
      choose: (the layout of a parameter, the layout of its alias) -> the one to use.
    """
    layouts = {}
    outside = {tensor.param: tensor for tensor in family.tensors_of()}
    abstract = shapes_of(model)
    stacks = {"/".join(path) + "/": layers for path, layers in model.layer_stacks.items()}
    for path, param in abstract.items():
        if not path.startswith(tuple(stacks)):
            layouts[path] = Layout(tensor=outside[path], shape=param.shape)
    for stack, layers in stacks.items():
        layer = model.layer_config(model.kinds_of_layers[layers[0]])
        tensors = family.tensors_of(layer.mixers, layer.feed_forward)
        paths = {tensor: stack + tensor.param.removeprefix("layers/") for tensor in tensors}
        own, others = (
            {
                path: _stacked_layout(choice(tensor), abstract[path].shape, layers)
                for tensor, path in paths.items()
                if path in abstract
            }
            for choice in (lambda x: x, lambda x: x.alias or x)
        )
        for path, layout in own.items():
            groups = family.num_row_groups(layout.tensor, model)
            layouts[path] = choose(
                _part_of_rows(layout, own.values(), groups),
                _part_of_rows(others[path], others.values(), groups),
            )
    return {path: layouts[path] for path in abstract}


def _as_stored(stored: Mapping[str, StoredTensor], layout: Layout, other: Layout) -> Layout:
    """`layout`, or `other`, its alias, if the files have the alias in the first layer."""
    tensor = stored.get(other.name_at((0,) * len(other.stack_shape)))
    has_other = tensor is not None and (
        other.tensor.name != layout.tensor.name
        or tensor.shape == other.stored_shape != layout.stored_shape
    )
    return other if has_other else layout


def _stacked_layout(tensor: LayerTensor, shape: tuple[int, ...], layers: Sequence[int]) -> Layout:
    """The layout of a parameter with the dimensions [layers, ...]; [layers, experts, ...] with a
    tensor, or a part of one, per expert."""
    if "{expert}" in tensor.name or tensor.is_stacked:
        return Layout(tensor=tensor, shape=shape[2:], layers=layers, num_experts=shape[1])
    return Layout(tensor=tensor, shape=shape[1:], layers=layers)


def _part_of_rows(layout: Layout, in_layer: Collection[Layout], num_groups: int) -> Layout:
    """`layout`, with its place among the parameters of a layer that have the same tensor, in their
    order in each group of rows.
    """
    parts = [other for other in in_layer if other.tensor.name == layout.tensor.name]
    if len(parts) == 1 or layout.tensor.interleaved is not None:
        return layout
    rows = [part.part_shape[0] for part in parts]
    first_row = sum(rows[: parts.index(layout)]) // num_groups
    return dataclasses.replace(
        layout, num_groups=num_groups, first_row=first_row, num_rows=sum(rows)
    )


def paths_of(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the path, such as "layers/attention/wq", and the value of each leaf; tuples and
    `Quantized` are leaves.
    """
    for path, leaf in jax.tree.leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, (tuple, Quantized))
    ):
        yield "/".join(key.key for key in path), leaf


def _num_bytes(param: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(param))


def language_tensors(files: TensorFiles, family: Family, model: ModelConfig) -> Tensors:
    """The tensors of the language model in `files`, with the names that they have in a model
    without images.
    """
    return _joined(language_model_tensors(files.tensors, family, model), family)


def language_model_tensors(
    tensors: Mapping[str, Any], family: Family, model: ModelConfig
) -> dict[str, Any]:
    """The tensors of the language model, with the names that they have in a model without images."""
    renamed = {}
    left_out = family.prefixes_left_out(model)
    for name, tensor in tensors.items():
        if not name.startswith(left_out):
            prefix = family.prefix_of([name])
            renamed[family.multimodal_prefixes.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return renamed


def _joined(tensors: Tensors, family: Family) -> Tensors:
    """`tensors`, with `family.joined_tensors` of all layers in place of their parts."""
    for whole, ends in family.joined_tensors.items():
        for name in [name for name in tensors if name.endswith(f".{ends[0]}")]:
            layer = name.removesuffix(ends[0])
            parts = [tensors.pop(layer + end) for end in ends if layer + end in tensors]
            shape = sum(part.shape[0] for part in parts), *parts[0].shape[1:]
            worst = max(parts, key=lambda part: (part.dtype not in DTYPES, part.dtype != "BF16"))
            tensors[layer + whole] = JoinedTensor(
                path=worst.path, name=worst.name, dtype=worst.dtype, shape=shape, parts=parts
            )
    return tensors


def _check(files: TensorFiles, layouts: Mapping[str, Layout]) -> None:
    """Compares names, shapes and dtypes of all tensors with those that the model needs."""
    needed = {name: layout for layout in layouts.values() for name in layout.names}
    for name, layout in needed.items():
        tensor = files.tensors.get(name)
        if tensor is None:
            hint = (
                "; a model without it needs tie_word_embeddings=true in config.json"
                if "lm_head" in name
                else ""
            )
            raise UserError(
                f"{files.directory} has no tensor {name}, which config.json implies{hint}"
            )
        if tensor.dtype not in DTYPES:
            raise Unsupported(
                f"unsupported: {name} in {tensor.path} has dtype {tensor.dtype}; supported are {', '.join(DTYPES)}, and"
                " F8_E4M3 with scales and quantization_config in config.json (quant_method fp8)"
            )
        if tensor.shape != layout.stored_shape:
            raise UserError(
                f"{name} in {tensor.path} has shape {list(tensor.shape)}, and config.json implies"
                f" {list(layout.stored_shape)}: they are of different models"
            )
    unknown = sorted(
        name for name in files.tensors.keys() - needed.keys() if not name.endswith(_BUFFERS)
    )
    if unknown:
        raise Unsupported(
            f"unsupported: {files.directory} has the tensor {unknown[0]} ({len(unknown)} unknown tensors), which the"
            " architecture in config.json does not have"
        )


def _check_tied_head(files: TensorFiles, head: jax.Array, embedding: jax.Array) -> None:
    """Compares the output head in the files with the embedding, which replaces it, in the shards of
    this process.

    Raises:
      UserError: they differ.
    """
    for ours, theirs in zip(head.addressable_shards, embedding.addressable_shards, strict=True):
        if not np.array_equal(ours.data, theirs.data):
            raise UserError(
                f"{_HEAD} in {files.directory} differs from the embedding, and config.json has"
                " tie_word_embeddings=true: set it to false there; transformers does not tie the weights of such files"
            )


def _load(files: TensorFiles, layout: Layout, param: Any) -> jax.Array | Quantized:
    """One parameter; stacked ones are read layer by layer into the shard."""
    if is_quantized(param):
        return _load_quantized(files, layout, param)
    return _from_shards(param, lambda index: read_shard(files, layout, index, param))


def _from_shards(param: Any, read_part: Callable[[Index], np.ndarray]) -> jax.Array:
    """An array from its shards, each of which is read once."""
    shards: dict[Index, np.ndarray] = {}  # several devices may have the same shard

    def read(slices: tuple[slice, ...]) -> np.ndarray:
        index = _bounds(slices, param.shape)
        if index not in shards:
            shards[index] = read_part(index)
        return shards[index]

    return jax.make_array_from_callback(param.shape, param.sharding, read)


def _bounds(slices: Sequence[slice], shape: Sequence[int]) -> Index:
    return tuple(piece.indices(size) for piece, size in zip(slices, shape))


def _load_quantized(files: TensorFiles, layout: Layout, param: Quantized) -> Quantized:
    """One parameter in 4 bits, layer by layer: as the files have it, or quantized.

    Raises:
      Unsupported: the parameter is a part of a tensor in NF4, whose blocks have also other parts.
    """
    stored_as = Nf4Tensor if isinstance(param, Nf4) else Mxfp4Tensor
    quantize = _quantizer(files, layout, param)
    layers = []
    for layer, names in enumerate(np.reshape(layout.names, (param.shape[0], -1))):
        stored = [x for x in map(files.tensors.get, names) if isinstance(x, stored_as)]
        if stored and (layout.num_rows or len(stored) < len(names)):
            raise Unsupported(
                f"unsupported: {stored[0].name} in {stored[0].path} has several parameters in NF4, or belongs to"
                " experts of which others are not in 4 bits; use --config.precision.frozen=bf16, or a model with"
                " weights in bfloat16"
            )
        layers.append(stored or quantize(layer))

    def load(array: Any, name: str) -> jax.Array:
        def read_layer(layer: list | dict, index: Index) -> np.ndarray:
            if isinstance(layer, dict):
                return layer[name, index[1:]]
            return _read_stored(files, layout, layer, name, array.shape, index)

        return _from_shards(array, lambda index: np.stack([read_layer(x, index) for x in layers]))

    return type(param)(map(load, param.arrays, param.NAMES), param.sizes)


def _read_stored(
    files: TensorFiles,
    layout: Layout,
    tensors: Sequence[Nf4Tensor | Mxfp4Tensor],
    name: str,
    shape: Sequence[int],
    index: Index,
) -> np.ndarray:
    """The part of a layer, whose tensors are in 4 bits, in a shard.

    Args:
      name, shape: of an array of the parameter.
    """
    slices = [slice(*bounds) for bounds in index]
    num_stacked = len(layout.stack_shape)
    if num_stacked > 1:  # experts with tensors of their own
        tensors = tensors[slices[1]]
    shape = [*shape[num_stacked:]]
    slices = slices[num_stacked:]
    if layout.tensor.interleaved is not None:
        shape[1] = 2 * shape[1]
        slices[1] = layout.stored_columns(slices[1])
    parts = [files.read_part(tensor, name, slices, shape) for tensor in tensors]
    return np.stack(parts) if num_stacked > 1 else parts[0]


def _quantizer(
    files: TensorFiles, layout: Layout, param: Quantized
) -> Callable[[int], dict[tuple[str, Index], np.ndarray]]:
    """Returns a function that quantizes a layer, and returns its parts in the shards of this
    process, by the names of arrays and the bounds of dimensions after the first.

    A process reads its shards only. All processes compute together, since a block may be in several
    shards, and the offset of NF4 is a mean over the matrix.
    """

    def on_device(*spec: Any) -> NamedSharding:
        return NamedSharding(param.codes.sharding.mesh, PartitionSpec(*spec))

    stack, inputs, outputs = param.split(param.codes.sharding.spec)
    sharding = on_device(*stack, *inputs, *outputs)
    weights = jax.ShapeDtypeStruct((1, *param.shape[1:]), np.float32, sharding=sharding)
    quantize = jax.jit(
        functools.partial(type(param).of, sizes=param.sizes),
        out_shardings=jax.tree.map(lambda x: on_device(*x.sharding.spec), param),
    )
    largest_magnitudes = jax.jit(
        functools.partial(quantized.largest_magnitudes, sizes=param.sizes),
        out_shardings=on_device(),
    )

    def quantize_layer(layer: int) -> dict[tuple[str, Index], np.ndarray]:
        def read(index: Index) -> np.ndarray:
            return read_shard(files, layout, ((layer, layer + 1, 1), *index[1:]), weights)

        matrices = _together(lambda: _from_shards(weights, read))
        options = {}
        if isinstance(param, Nf4):
            largest = np.asarray(largest_magnitudes(matrices))
            options["offset"] = largest.mean(-1, dtype=np.float64).astype(np.float32)
        return {
            (name, _bounds(shard.index, array.shape)[1:]): np.asarray(shard.data)[0]
            for name, array in zip(param.NAMES, quantize(matrices, **options).arrays)
            for shard in array.addressable_shards
        }

    return quantize_layer


def read_shard(files: TensorFiles, layout: Layout, index: Index, param: Any) -> np.ndarray:
    """A shard of a parameter: `index` has (start, stop, 1) of each dimension, vocabulary padding
    included.
    """
    shard = np.zeros([stop - start for start, stop, _ in index], param.dtype)
    num_stacked = len(layout.stack_shape)
    first = [start for start, *_ in index[:num_stacked]]
    within = index[num_stacked:]
    # Rows of vocabulary padding are not in the file, and remain 0.
    slices = [
        slice(min(start, size), min(stop, size))
        for (start, stop, _), size in zip(within, layout.shape)
    ]
    target = tuple(slice(0, piece.stop - piece.start) for piece in slices)
    for place in np.ndindex(shard.shape[:num_stacked]):
        stored_place = tuple(start + i for start, i in zip(first, place))
        name = layout.name_at(stored_place)
        parts = [files.read(name, *x) for x in layout.stored_slices(slices, stored_place)]
        rows = int(layout.tensor.is_stacked)  # the dimension
        part = np.concatenate(parts, axis=rows) if len(parts) > 1 else parts[0]
        shard[place][target] = layout.from_stored(part, slices)
    return shard
