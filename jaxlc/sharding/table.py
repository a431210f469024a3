"""The sharding table: the sharding of every parameter, and the dimensions that a rule could not shard."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxlc.core import html
from jaxlc.core.axes import mesh_text
from jaxlc.core.counts import count_text
from jaxlc.core.text_table import aligned
from jaxlc.sharding.nodes import storage_order
from jaxlc.sharding.rules import axes_of, storage_axes, storage_spec

_HEADINGS = ("parameter", "shape", "dtype", "sharded over", "bytes/device", "")
_ALIGN = "llllrl"


@dataclass(frozen=True, kw_only=True)
class ParameterSharding:
    """How one parameter is stored."""

    name: str  # path in the tree, such as layers/attention/query
    dims: tuple[str, ...]  # names of the dimensions
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    bytes_per_device: int
    num_bytes: int
    unsharded: tuple[str, ...]  # a reason for each dimension that is not sharded over all axes of its rule

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        shape = " ".join(f"{name}={size}" for name, size in zip(self.dims, self.shape))
        reasons = "; ".join(self.unsharded)
        return self.name, shape, self.dtype, _spec_text(self.dims, self.spec), f"{self.bytes_per_device:,}", reasons


@dataclass(frozen=True, kw_only=True)
class ShardingTable:
    """The parameters of a model on a mesh; `print` and notebooks show a table. `rows` has the values."""

    rows: tuple[ParameterSharding, ...]
    num_devices: int

    @property
    def totals(self) -> str:
        """One line: parameters, bytes, and bytes per device."""
        num_params = sum(math.prod(row.shape) for row in self.rows)
        num_bytes = sum(row.num_bytes for row in self.rows)
        device_bytes = sum(row.bytes_per_device for row in self.rows)
        return (
            f"{num_params:,} parameters, {num_bytes:,} bytes; {device_bytes:,} bytes per device"
            f" ({device_bytes / num_bytes:.1%}) on a mesh of {count_text(self.num_devices, 'device')}"
        )

    def __str__(self) -> str:
        return "\n".join([*aligned([_HEADINGS, *(row.cells for row in self.rows)], _ALIGN), self.totals]) + "\n"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html.table(_HEADINGS, [row.cells for row in self.rows], align=_ALIGN) + html.paragraph(self.totals)


def sharding_table(abstract_params, dims, mesh: Mesh) -> ShardingTable:
    """The sharding of every parameter. A `!` marks a dimension that is not sharded over all its axes.

    Args:
      abstract_params: pytree of arrays or `jax.ShapeDtypeStruct`s.
      dims: the same tree; each leaf is a tuple of dimension names.
      mesh: of attached or absent devices.
    """
    rows = []

    def add_row(path, param, names) -> None:
        spec = storage_spec(names, param.shape, mesh)
        rows.append(
            ParameterSharding(
                name=jax.tree_util.keystr(path, simple=True, separator="/"),
                dims=names,
                shape=tuple(param.shape),
                dtype=str(param.dtype),
                spec=spec,
                bytes_per_device=math.prod(_shard_shape(param.shape, spec, mesh)) * param.dtype.itemsize,
                num_bytes=param.size * param.dtype.itemsize,
                unsharded=tuple(_unsharded(names, param.shape, spec, mesh)),
            )
        )

    jax.tree_util.tree_map_with_path(add_row, abstract_params, dims)
    return ShardingTable(rows=tuple(rows), num_devices=mesh.size)


def _num_shards(axes: tuple[str, ...], mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _shard_shape(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the local shard of a device."""
    return tuple(size // _num_shards(axes_of(entry), mesh) for size, entry in zip(shape, spec))


def _spec_text(names: tuple[str, ...], spec: PartitionSpec) -> str:
    sharded = [f"{name}:{'+'.join(axes_of(entry))}" for name, entry in zip(names, spec) if entry is not None]
    return " ".join(sharded) or "-"


def _unsharded(names: tuple[str, ...], shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> Iterator[str]:
    """Yields a reason for each dimension that is not sharded over all axes of its rule."""
    for name, size, entry in zip(names, shape, spec):
        rule_axes = tuple(axis for axis in storage_order(storage_axes(name), mesh) if mesh.shape[axis] > 1)
        if axes_of(entry) != rule_axes:
            product = mesh_text({axis: mesh.shape[axis] for axis in rule_axes})
            yield f"! {name}={size} is not divisible by {product}"
