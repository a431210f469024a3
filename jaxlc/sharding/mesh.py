"""The device mesh. core/axes.py defines the names of its axes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh

from jaxlc.config import MeshConfig
from jaxlc.core.axes import CONTEXT, MESH_AXES, mesh_text
from jaxlc.core.counts import count_text
from jaxlc.core.errors import UserError
from jaxlc.sharding.layout import token_at


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
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


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
        """The positions in the sequence of this rank's `num_tokens` local tokens, int32 [batch, num_tokens]."""
        indices_T = lax.axis_index(self.axis) * num_tokens + jnp.arange(num_tokens, dtype=jnp.int32)
        return jnp.broadcast_to(token_at(indices_T, self.size * num_tokens, self.size), (batch, num_tokens))


def split_context(mesh: Mesh, inner: int | None, axis: str = CONTEXT) -> tuple[Mesh, tuple[Ranks, ...]]:
    """Splits the context axis of `mesh` into an outer axis and an inner axis of `inner` neighboring ranks.

    With `inner=None` the mesh is unchanged and has one set of ranks. `axis` is the name of the context axis.

    Raises:
      UserError: `inner` does not divide the axis.
    """
    if inner is None:
        return mesh, (Ranks(axis, mesh.shape[axis]),)
    if mesh.shape[axis] % inner:
        raise UserError(f"invalid value {inner} for ulysses_degree: expected a divisor of {axis}={mesh.shape[axis]}")
    at = mesh.axis_names.index(axis)
    ranks = Ranks(f"{axis}_outer", mesh.shape[axis] // inner), Ranks(f"{axis}_inner", inner)
    names = (*mesh.axis_names[:at], *(group.axis for group in ranks), *mesh.axis_names[at + 1 :])
    shape = (*mesh.devices.shape[:at], *(group.size for group in ranks), *mesh.devices.shape[at + 1 :])
    return Mesh(mesh.devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names)), ranks
