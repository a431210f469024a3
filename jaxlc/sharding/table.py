"""The sharding table: the sharding of every parameter, and the dimensions that a rule could not shard."""

import math
from collections.abc import Iterator

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxlc.sharding.rules import storage_axes, storage_spec

_HEADINGS = ("parameter", "shape", "dtype", "sharded over", "bytes/device", "")


def sharding_table(abstract_params: dict, dims: dict, mesh: Mesh) -> str:
    """Formats one line per parameter, and the totals. A `!` marks a dimension that is not sharded over all its axes.

    Args:
      abstract_params: nested dict of arrays or `jax.ShapeDtypeStruct`s.
      dims: the same tree; each leaf is a tuple of dimension names.
      mesh: of attached or absent devices.
    """
    rows, num_params, global_bytes, device_bytes = [_HEADINGS], 0, 0, 0
    for path, param in jax.tree.leaves_with_path(abstract_params):
        names = _at(dims, path)
        spec = storage_spec(names, param.shape, mesh)
        per_device_bytes = math.prod(_shard_shape(param.shape, spec, mesh)) * param.dtype.itemsize
        rows.append(
            (
                "/".join(key.key for key in path),
                " ".join(f"{name}={size}" for name, size in zip(names, param.shape)),
                str(param.dtype),
                _spec_text(names, spec),
                f"{per_device_bytes:,}",
                "; ".join(_unsharded(names, param.shape, spec, mesh)),
            )
        )
        num_params += param.size
        global_bytes += param.size * param.dtype.itemsize
        device_bytes += per_device_bytes
    totals = (
        f"{num_params:,} parameters, {global_bytes:,} bytes; {device_bytes:,} bytes per device"
        f" ({device_bytes / global_bytes:.1%}) on a mesh of {mesh.size} devices"
    )
    return "\n".join([*_aligned(rows), totals]) + "\n"


def _at(tree: dict, path) -> tuple[str, ...]:
    for key in path:
        tree = tree[key.key]
    return tree


def _axes(entry) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _num_shards(axes: tuple[str, ...], mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _shard_shape(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the local shard of a device."""
    return tuple(size // _num_shards(_axes(entry), mesh) for size, entry in zip(shape, spec))


def _spec_text(names: tuple[str, ...], spec: PartitionSpec) -> str:
    sharded = [f"{name}:{'+'.join(_axes(entry))}" for name, entry in zip(names, spec) if entry is not None]
    return " ".join(sharded) or "-"


def _unsharded(names: tuple[str, ...], shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> Iterator[str]:
    """Yields a reason for each dimension that is not sharded over all axes of its rule."""
    for name, size, entry in zip(names, shape, spec):
        rule_axes = tuple(axis for axis in storage_axes(name) if mesh.shape[axis] > 1)
        if _axes(entry) != rule_axes:
            product = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in rule_axes)
            yield f"! {name}={size} is not divisible by {product}"


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Pads the columns to equal width; numbers are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    numbers = _HEADINGS.index("bytes/device")
    for row in rows:
        cells = [cell.rjust(w) if i == numbers else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        yield "  ".join(cells).rstrip()
