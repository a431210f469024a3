"""The copies of the parameters that nodes gather once per step, and the sums of their gradients over nodes.

    stored      [L, D, ...]          D sharded over the ranks of a node, and over the nodes
    copy        [L, nodes, D, ...]   nodes sharded over the nodes, D over the ranks of a node

See `sharding.nodes`. Norm scales, biases and other vectors have no copy: they are kilobytes, and are not sharded.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxlc.core import scopes
from jaxlc.core.axes import LAYER_STACKS
from jaxlc.sharding.nodes import Nodes
from jaxlc.sharding.rules import axes_of, copy_spec, is_copied, storage_spec


@dataclass(frozen=True)
class NodeCopies:
    """Gathers copies and sums their gradients, under `jit`."""

    nodes: Nodes
    compute_dtype: jnp.dtype
    reduce: Literal["compute", "fp32"]  # config.precision.reduce

    @jax.named_scope(scopes.GATHER_NODE_COPY)
    def gathered(self, params: dict, dims: dict) -> dict:
        """The parameters with copies in place of matrices.

        Those of layers are in the compute dtype, since layers gather in it; the embedding and the output head, whose
        gradients are always summed in float32, keep the dtype in which they are stored, and so do layers if their
        gradients are summed in float32.
        """

        def copy(path, stored: jax.Array, dims: tuple[str, ...]) -> jax.Array:
            if not is_copied(dims):
                return stored
            spec, out_spec = self._specs(dims, stored.shape)
            dtype = self._reduce_dtype(path, stored.dtype)

            def gather(x: jax.Array) -> jax.Array:
                x = x.astype(dtype)
                for dim, entry in enumerate(spec):
                    if axes := self._over_nodes(entry):
                        x = lax.all_gather(x, axes, axis=dim, tiled=True)
                return jnp.expand_dims(x, _nodes_dim(dims))

            return self._mapped(gather, spec, out_spec)(stored)

        return jax.tree.map_with_path(copy, params, dims)

    @jax.named_scope(scopes.SUM_OVER_NODES)
    def summed(self, gradients: dict, dims: dict) -> dict:
        """Gradients of the parameters, float32 and sharded as these, from those of the copies."""

        def add(path, gradient: jax.Array, dims: tuple[str, ...]) -> jax.Array:
            if not is_copied(dims):
                return gradient
            nodes_dim = _nodes_dim(dims)
            shape = gradient.shape[:nodes_dim] + gradient.shape[nodes_dim + 1 :]
            spec, copy = self._specs(dims, shape)
            dtype = self._reduce_dtype(path, gradient.dtype)

            def scatter(x: jax.Array) -> jax.Array:
                x, remaining = x.squeeze(nodes_dim).astype(dtype), set(self.nodes.outer)
                for dim, entry in enumerate(spec):
                    if axes := self._over_nodes(entry):
                        x = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
                        remaining -= set(axes)
                return lax.psum(x, tuple(axis for axis in self.nodes.outer if axis in remaining)).astype(gradient.dtype)

            return self._mapped(scatter, copy, spec)(gradient)

        return jax.tree.map_with_path(add, gradients, dims)

    def _specs(self, dims: tuple[str, ...], shape: tuple[int, ...]) -> tuple[PartitionSpec, PartitionSpec]:
        """The shardings of a parameter and of its copy."""
        at, copy = _nodes_dim(dims), copy_spec(dims, shape, self.nodes)
        return storage_spec(dims, shape, self.nodes.mesh), PartitionSpec(*copy[:at], self.nodes.outer, *copy[at:])

    def _over_nodes(self, entry) -> tuple[str, ...]:
        """The axes over nodes, of more than one, in an entry of a PartitionSpec."""
        return tuple(axis for axis in axes_of(entry) if axis in self.nodes.outer)

    def _reduce_dtype(self, path, dtype) -> jnp.dtype:
        """The dtype in which a parameter is gathered, and its gradient summed, across nodes."""
        is_layer = path[0].key in LAYER_STACKS
        return self.compute_dtype if is_layer and self.reduce == "compute" else dtype

    def _mapped(self, function, in_spec: PartitionSpec, out_spec: PartitionSpec):
        specs = dict(in_specs=(in_spec,), out_specs=out_spec, check_vma=False)
        return jax.shard_map(function, mesh=self.nodes.mesh, **specs)


def _nodes_dim(dims: tuple[str, ...]) -> int:
    """The dimension of nodes in the copy of a parameter: after that of layers, which scans remove."""
    return int(dims[0] == "layers")
