"""Which mesh axes split which dimension: the rules, as data, and what follows from them.

Parameters have two shardings. At rest they are also split over fsdp and context, whose ranks all use the same
weights (ZeRO-3, Rajbhandari et al. 2020); a layer gathers its own just before use, and they stay split over tensor
only (Shoeybi et al. 2019). A dimension is split over the largest subset of its axes that divides it.
"""

import itertools
import math
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR, WEIGHT_AXES

Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Mesh axes of every parameter dimension at rest, and of the activations dimension by dimension."""

    model: Axes = WEIGHT_AXES  # D of every weight matrix
    heads: Axes = (TENSOR,)  # N of wq [D, N, H] and wo [N, H, D]
    kv_heads: Axes = (TENSOR,)  # K of wk and wv [D, K, H]; whole on every rank where tensor does not divide K
    ffn: Axes = (TENSOR,)  # F of w_gate and w_up [D, F] and w_down [F, D]
    vocab: Axes = (TENSOR,)  # V of embedding [V, D] and head [D, V]
    head_dim: Axes = ()  # H: attention needs it whole
    layers: Axes = ()  # L: every rank runs every layer
    norm: Axes = ()  # D or H of a norm's scale: a few kilobytes

    residual: tuple[Axes, ...] = (BATCH_AXES, (CONTEXT, TENSOR), ())  # x_BTD between blocks
    gathered: tuple[Axes, ...] = (BATCH_AXES, (CONTEXT,), ())  # x_BTD as a block's matmuls read it
    heads_out: tuple[Axes, ...] = (BATCH_AXES, (CONTEXT,), (TENSOR,), ())  # q_BTNH, k_BTKH, v_BTKH
    ffn_out: tuple[Axes, ...] = (BATCH_AXES, (CONTEXT,), (TENSOR,))  # gate_BTF, up_BTF


RULES = ShardingRules()


def axes_at_rest(name: str, rules: ShardingRules = RULES) -> Axes:
    """Mesh axes that the rules name for a parameter's dimension `name`."""
    return vars(rules)[name]


def storage_spec(dims: Axes, shape: tuple[int, ...], mesh: Mesh, rules: ShardingRules = RULES) -> PartitionSpec:
    """How a parameter lies at rest. `dims` are the names of its dimensions, e.g. ("model", "heads", "head_dim")."""
    return _fit([axes_at_rest(name, rules) for name in dims], shape, mesh)


def compute_spec(dims: Axes, shape: tuple[int, ...], mesh: Mesh, rules: ShardingRules = RULES) -> PartitionSpec:
    """How a layer uses a parameter: gathered over fsdp and context, still split over tensor."""
    in_use = [tuple(axis for axis in axes_at_rest(name, rules) if axis not in WEIGHT_AXES) for name in dims]
    return _fit(in_use, shape, mesh)


def _fit(axes_of_dims, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    assert len(axes_of_dims) == len(shape), (axes_of_dims, shape)
    return PartitionSpec(*(_largest_divisor(axes, size, mesh) for axes, size in zip(axes_of_dims, shape)))


def _largest_divisor(axes: Axes, dim_size: int, mesh: Mesh) -> Axes | str | None:
    """The subset of `axes` with the largest product that divides dim_size, as a PartitionSpec's entry."""
    axes = [axis for axis in axes if mesh.shape[axis] > 1]
    subsets = [subset for length in range(len(axes) + 1) for subset in itertools.combinations(axes, length)]
    product = {subset: math.prod(mesh.shape[axis] for axis in subset) for subset in subsets}
    best = max((subset for subset in subsets if dim_size % product[subset] == 0), key=product.__getitem__)
    return {0: None, 1: best[0] if best else None}.get(len(best), best)


@dataclass(frozen=True)
class Sharder:
    """Puts a model's values where the rules say; the one thing about the mesh that a model is given."""

    mesh: Mesh
    rules: ShardingRules = RULES
    weights_are_gathered: bool = False  # whoever holds this has called `weight` for all that it is asked about
    weights_on_host: bool = False  # they rest there, and their gradients go there

    def fetched(self, params):
        """A tree of parameters on the device, while they are in use; its gradient goes to where they rest."""
        return jax.device_put(params, jax.memory.Space.Device) if self.weights_on_host else params

    def weight(self, stored: jax.Array, dims: Axes, dtype) -> jax.Array:
        """A float32 parameter as a layer uses it: cast first and gathered after, so that the gather moves `dtype`.

        The first constraint does nothing on the way in. On the way back it cuts the gradient to its piece at once,
        and the sum over ranks becomes a reduce-scatter. The barrier keeps the cast before the gather: without it XLA
        moved it behind, in the recomputation of a layer, and gathered float32.
        """
        if self.weights_are_gathered:
            return stored
        stored = self._constrain(stored, storage_spec(dims, stored.shape, self.mesh, self.rules))
        cast = jax.lax.optimization_barrier(stored.astype(dtype))
        return self._constrain(cast, compute_spec(dims, stored.shape, self.mesh, self.rules))

    def residual(self, x_BTD: jax.Array) -> jax.Array:
        return self._activation(x_BTD, self.rules.residual)

    def gathered(self, x_BTD: jax.Array) -> jax.Array:
        # The barrier: as in `weight`, a cast before the gather stays before it.
        return self._activation(jax.lax.optimization_barrier(x_BTD), self.rules.gathered)

    def heads(self, x_BTNH: jax.Array) -> jax.Array:
        return self._activation(x_BTNH, self.rules.heads_out)

    def ffn(self, x_BTF: jax.Array) -> jax.Array:
        return self._activation(x_BTF, self.rules.ffn_out)

    def _activation(self, x: jax.Array, axes_of_dims: tuple[Axes, ...]) -> jax.Array:
        return self._constrain(x, _fit(axes_of_dims, x.shape, self.mesh))

    def _constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
