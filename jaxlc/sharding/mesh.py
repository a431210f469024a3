"""The device mesh; its axes are defined in core/axes.py."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh

from jaxlc.config import MeshConfig
from jaxlc.core.axes import CONTEXT, MESH_AXES
from jaxlc.core.errors import UserError
from jaxlc.sharding.layout import token_at


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of `config` over `devices`, in their order: ranks of the tensor axis are neighbours.

    Axes have type Auto, so that the compiler completes partial shardings; `jax.make_mesh` makes them Explicit.

    Args:
      devices: None selects all devices.
    Raises:
      UserError: the number of devices does not match. (`config.check_num_devices` also suggests valid meshes.)
    """
    devices = jax.devices() if devices is None else devices
    if config.num_devices != len(devices):
        raise UserError(f"invalid number of devices {len(devices)}: expected {config.num_devices} for {config}")
    shape = tuple(vars(config)[axis] for axis in MESH_AXES)
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


class Ranks(NamedTuple):
    """A mesh axis over which a sequence is split in zigzag order, for code inside `shard_map`."""

    axis: str
    size: int

    def positions(self, batch: int, num_tokens: int) -> jax.Array:
        """Returns the natural positions of this rank's `num_tokens` tokens, [batch, num_tokens] int32."""
        places_T = lax.axis_index(self.axis) * num_tokens + jnp.arange(num_tokens, dtype=jnp.int32)
        return jnp.broadcast_to(token_at(places_T, self.size * num_tokens, self.size), (batch, num_tokens))


def split_context(mesh: Mesh, inner: int | None) -> tuple[Mesh, tuple[Ranks, ...]]:
    """Splits the context axis into an outer axis and an inner axis of `inner` neighbouring ranks.

    Args:
      inner: the Ulysses degree; None leaves the mesh unchanged.
    Returns:
      The mesh of the same devices, and the axes that replace context.
    Raises:
      UserError: `inner` does not divide context.
    """
    if inner is None:
        return mesh, (Ranks(CONTEXT, mesh.shape[CONTEXT]),)
    if mesh.shape[CONTEXT] % inner:
        raise UserError(f"ulysses_degree={inner} does not divide context={mesh.shape[CONTEXT]}")
    at = mesh.axis_names.index(CONTEXT)
    ranks = Ranks("context_outer", mesh.shape[CONTEXT] // inner), Ranks("context_inner", inner)
    names = (*mesh.axis_names[:at], *(part.axis for part in ranks), *mesh.axis_names[at + 1 :])
    shape = (*mesh.devices.shape[:at], *(part.size for part in ranks), *mesh.devices.shape[at + 1 :])
    return Mesh(mesh.devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names)), ranks
