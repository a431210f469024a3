"""The nodes of a mesh, for weights that are gathered across nodes once per step (config.memory.node_copy_devices).

A mesh of several nodes has two networks: a fast one within a node, and a slower one between nodes. The parameters stay
sharded over all ranks of fsdp and context. Once per step each node gathers a copy in the compute dtype, sharded over
its own ranks (hpZ of ZeRO++, Wang et al. 2023, arXiv:2306.10209); layers gather their weights from it. Gradients of the
copy are sums over the tokens of the node; they are summed over the nodes once per step.

The copy of a parameter has one more dimension, of nodes, which is sharded over the nodes: so it takes the memory of one
copy per node, and its gradient, an array of the same shape, may differ between nodes.
"""

import math
from dataclasses import dataclass

from jax.sharding import Mesh, PartitionSpec

from jaxlc.core.axes import CONTEXT, DATA, FSDP, TENSOR, WEIGHT_AXES
from jaxlc.sharding.mesh import split_context

_OUTER, _INNER = (tuple(f"{axis}_{part}" for axis in WEIGHT_AXES) for part in ("outer", "inner"))


@dataclass(frozen=True)
class Nodes:
    """The devices of a mesh with fsdp and context split in two axes each: over nodes (outer) and in a node (inner)."""

    mesh: Mesh

    @property
    def outer(self) -> tuple[str, ...]:
        """The axes over nodes. Ranks of `data` have copies and gradients of their own, whether they share a node."""
        return (DATA, *_OUTER)

    @property
    def inner(self) -> tuple[str, ...]:
        """The axes within a node whose ranks use the same weights."""
        return _INNER

    def axes(self, axes: str | tuple[str, ...]) -> tuple[str, ...]:
        """Axes of the unsplit mesh as axes of this one."""
        names = (axes,) if isinstance(axes, str) else axes
        return tuple(part for axis in names for part in (_parts(axis) if axis in WEIGHT_AXES else (axis,)))

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """A sharding over the unsplit mesh as one over this mesh."""
        return PartitionSpec(*(None if entry is None else self.axes(entry) for entry in spec))


def _parts(axis: str) -> tuple[str, str]:
    return f"{axis}_outer", f"{axis}_inner"


def nodes_of(mesh: Mesh, node_devices: int) -> Nodes | None:
    """The nodes of `node_devices` consecutive devices each; None if that is 0. `config.checks` checks the number."""
    if not node_devices:
        return None
    ranks = node_devices // mesh.shape[TENSOR]
    inner_context = math.gcd(ranks, mesh.shape[CONTEXT])
    split, _ = split_context(mesh, ranks // inner_context, FSDP)
    split, _ = split_context(split, inner_context, CONTEXT)
    return Nodes(split)


def storage_order(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """Axes that shard a dimension, as axes of `mesh`, which may be that of `Nodes`.

    There, the ranks of a node vary slowest, so that the shards that one rank of each node stores are consecutive: the
    gather across nodes joins them, and that within a node joins the results.
    """
    if FSDP in mesh.shape or not set(axes) & set(WEIGHT_AXES):
        return axes
    return (*_INNER, *_OUTER, *(axis for axis in axes if axis not in WEIGHT_AXES))
