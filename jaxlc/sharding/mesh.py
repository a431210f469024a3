"""The device mesh: devices in a grid, whose directions are named in core/axes.py."""

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
    """The mesh of `config` over `devices` (None: all there are), in their order: tensor peers are neighbours.

    Axes are of type Auto, so that the compiler completes the shardings that the code leaves open;
    `jax.make_mesh` would make them Explicit.

    Raises:
      UserError: the mesh needs another number of devices. (`config.check_num_devices` also says what does work.)
    """
    devices = jax.devices() if devices is None else devices
    if config.num_devices != len(devices):
        raise UserError(f"{config} needs {config.num_devices} devices and there are {len(devices)}; give it that many")
    shape = tuple(vars(config)[axis] for axis in MESH_AXES)
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


class Ranks(NamedTuple):
    """A mesh axis that splits a sequence, as code inside `shard_map` needs it; tokens are in zigzag order over it."""

    axis: str
    size: int

    def positions(self, batch: int, num_tokens: int) -> jax.Array:
        """[batch, num_tokens] int32: where in the row this rank's piece of `num_tokens` tokens stands."""
        places_T = lax.axis_index(self.axis) * num_tokens + jnp.arange(num_tokens, dtype=jnp.int32)
        return jnp.broadcast_to(token_at(places_T, self.size * num_tokens, self.size), (batch, num_tokens))


def split_context(mesh: Mesh, inner: int | None) -> tuple[Mesh, tuple[Ranks, ...]]:
    """The same devices with the context axis cut in two, `inner` ranks next to each other; None: as it is.

    Raises:
      UserError: `inner` does not divide the axis.
    """
    if inner is None:
        return mesh, (Ranks(CONTEXT, mesh.shape[CONTEXT]),)
    if mesh.shape[CONTEXT] % inner:
        raise UserError(f"ulysses_degree={inner} does not divide context={mesh.shape[CONTEXT]}, which it cuts in two")
    at = mesh.axis_names.index(CONTEXT)
    ranks = Ranks("context_outer", mesh.shape[CONTEXT] // inner), Ranks("context_inner", inner)
    names = (*mesh.axis_names[:at], *(each.axis for each in ranks), *mesh.axis_names[at + 1 :])
    shape = (*mesh.devices.shape[:at], *(each.size for each in ranks), *mesh.devices.shape[at + 1 :])
    return Mesh(mesh.devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names)), ranks
