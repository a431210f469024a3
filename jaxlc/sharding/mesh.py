"""The device mesh and its nodes. core/axes.py defines the names of the axes.

With config.memory.node_copy_devices, weights are gathered across nodes once per step. A mesh of
several nodes has two networks: a fast one within a node, and a slower one between nodes. The
parameters stay sharded over all ranks of fsdp and context. Once per step each node gathers a copy
in the compute dtype, sharded over its own ranks (hpZ of ZeRO++, Wang et al. 2023,
arXiv:2306.10209); layers gather their weights from it. Gradients of the copy are sums over the
tokens of the node; they are summed over the nodes once per step.

The copy of a parameter has one more dimension, of nodes, which is sharded over the nodes: so it
takes the memory of one copy per node, and its gradient, an array of the same shape, may differ
between nodes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jaxlc.config import MeshConfig
from jaxlc.core import CONTEXT, MESH_AXES, TENSOR, UserError, count_text, mesh_text
from jaxlc.core.axes import DATA, FSDP, WEIGHT_AXES
from jaxlc.sharding.document_layout import token_at


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh of `config` over `devices` (None: all devices) in their order; tensor peers are neighbors.

    Axes have type Auto, so that the compiler completes the shardings that the code does not specify. The default of
    `jax.make_mesh` is Explicit.

    Raises:
      UserError: the mesh needs another number of devices. (`config.check_num_devices` also suggests a valid mesh.)
    """
    devices = jax.devices() if devices is None else devices
    if config.num_devices != len(devices):
        is_larger = config.num_devices > len(devices)
        way = (
            f"on CPU call jaxlc.start(simulated_devices={config.num_devices}) before anything uses a device"
            if is_larger
            else f"pass devices=jax.devices()[:{config.num_devices}]"
        )
        raise UserError(
            f"the mesh {mesh_text(vars(config))} needs {count_text(config.num_devices, 'device')} but the number of"
            f" devices is {len(devices)}; use a mesh of {count_text(len(devices), 'device')}, such as"
            f" context={len(devices)}, or {way}"
        )
    shape = tuple(vars(config)[axis] for axis in MESH_AXES)
    return Mesh(
        np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)
    )


def abstract_mesh(config: MeshConfig) -> AbstractMesh:
    """The mesh of `config` without devices, for the shapes of arrays before JAX starts."""
    shape = tuple(vars(config)[axis] for axis in MESH_AXES)
    return AbstractMesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def all_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of all mesh axes, slowest first; axes that `sizes` does not name have size 1.

    Raises:
      UserError: an unknown axis.
    """
    unknown = sorted(set(sizes) - set(MESH_AXES))
    if unknown:
        raise UserError(f"unknown mesh axis {unknown[0]!r}: expected {', '.join(MESH_AXES)}")
    return {axis: sizes.get(axis, 1) for axis in MESH_AXES}


class Ranks(NamedTuple):
    """The ranks of a mesh axis that splits a sequence in zigzag order, for code inside `shard_map`."""

    axis: str | tuple[str, ...]  # several axes count as one, the last varying fastest
    size: int

    def positions(self, batch: int, num_tokens: int) -> jax.Array:
        """The positions in the sequence of this rank's `num_tokens` local tokens, int32 [batch,
        num_tokens].
        """
        indices_T = lax.axis_index(self.axis) * num_tokens + jnp.arange(num_tokens, dtype=jnp.int32)
        return jnp.broadcast_to(
            token_at(indices_T, self.size * num_tokens, self.size), (batch, num_tokens)
        )


def ranks_of(mesh: Mesh, axis: str = CONTEXT) -> Ranks:
    """The ranks of an axis of the mesh."""
    return Ranks(axis, mesh.shape[axis])


def shard_map(local: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`jax.shard_map` without the tracking of check_vma, which does not know how values vary in rules
    of `custom_vjp` and in Pallas' interpret mode. Operands here vary over each axis that splits them.
    """
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def split_context(
    mesh: Mesh, inner: int | None, axis: str = CONTEXT
) -> tuple[Mesh, tuple[Ranks, ...]]:
    """Splits the context axis of `mesh` into an outer axis and an inner axis of `inner` neighboring
    ranks.

    With `inner=None` the mesh is unchanged and has one set of ranks. `axis` is the name of the
    context axis.

    Raises:
      UserError: `inner` does not divide the axis.
    """
    if inner is None:
        return mesh, (ranks_of(mesh, axis),)
    if mesh.shape[axis] % inner:
        raise UserError(
            f"invalid value {inner} for ulysses_degree: expected a divisor of {axis}={mesh.shape[axis]}"
        )
    ranks = Ranks(f"{axis}_outer", mesh.shape[axis] // inner), Ranks(f"{axis}_inner", inner)
    shape: dict[Any, int] = {}
    for name, size in mesh.shape.items():
        shape |= dict(ranks) if name == axis else {name: size}
    devices = mesh.devices.reshape(tuple(shape.values()))
    return Mesh(devices, tuple(shape), axis_types=(AxisType.Auto,) * len(shape)), ranks


_OUTER, _INNER = (tuple(f"{axis}_{part}" for axis in WEIGHT_AXES) for part in ("outer", "inner"))


@dataclass(frozen=True)
class Nodes:
    """The devices of a mesh with fsdp and context split in two axes each: over nodes (outer) and in
    a node (inner).
    """

    mesh: Mesh

    @property
    def outer(self) -> tuple[str, ...]:
        """The axes over nodes. Ranks of `data` have copies and gradients of their own, whether they
        share a node.
        """
        return (DATA, *_OUTER)

    @property
    def inner(self) -> tuple[str, ...]:
        """The axes within a node whose ranks use the same weights."""
        return _INNER

    def axes(self, axes: str | tuple[str, ...]) -> tuple[str, ...]:
        """Axes of the unsplit mesh as axes of this one."""
        names = (axes,) if isinstance(axes, str) else axes
        return tuple(
            part for axis in names for part in (_parts(axis) if axis in WEIGHT_AXES else (axis,))
        )

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """A sharding over the unsplit mesh as one over this mesh."""
        return PartitionSpec(*(None if entry is None else self.axes(entry) for entry in spec))


def _parts(axis: str) -> tuple[str, str]:
    return f"{axis}_outer", f"{axis}_inner"


def nodes_of(mesh: Mesh, node_devices: int) -> Nodes | None:
    """The nodes of `node_devices` consecutive devices each; None if that is 0. `config.checks`
    checks the number.
    """
    if not node_devices:
        return None
    ranks = node_devices // mesh.shape[TENSOR]
    inner_context = math.gcd(ranks, mesh.shape[CONTEXT])
    split, _ = split_context(mesh, ranks // inner_context, FSDP)
    split, _ = split_context(split, inner_context, CONTEXT)
    return Nodes(split)


def storage_order(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """Axes that shard a dimension, as axes of `mesh`, which may be `Nodes.mesh`.

    There, the ranks of a node vary slowest, so that the shards that one rank of each node stores
    are consecutive: the gather across nodes joins them, and that within a node joins the results.
    """
    if FSDP in mesh.shape or not set(axes) & set(WEIGHT_AXES):
        return axes
    return (*_INNER, *_OUTER, *(axis for axis in axes if axis not in WEIGHT_AXES))
