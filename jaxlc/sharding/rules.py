"""Sharding rules: which mesh axes shard which dimension of parameters and activations, and a table
of the results.

Parameters have two shardings. For storage they are also sharded over fsdp and context, whose ranks
use the same weights (ZeRO-3, Rajbhandari et al. 2020). For compute a layer gathers its weights,
which then remain sharded over tensor only (Shoeybi et al. 2019). A dimension is sharded over the
subset of its axes with the largest product that divides it. With config.memory.node_copy_devices
there is a third one, of the copy of a node (`nodes`).

The sharding table has the sharding of every parameter, and the dimensions that a rule could not
shard.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.core import BATCH_AXES, CONTEXT, TENSOR, aligned, count_text, mesh_text, text
from jaxlc.core.axes import WEIGHT_AXES
from jaxlc.sharding.mesh import Nodes, shard_map, storage_order

Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """The mesh axes of every parameter dimension in storage, and of every dimension of the
    activations.
    """

    model: Axes = WEIGHT_AXES  # D of every weight matrix
    heads: Axes = (TENSOR,)  # N of wq [D, N, H] and wo [N, H, D]
    kv_heads: Axes = (TENSOR,)  # K of wk and wv [D, K, H]; replicated if tensor does not divide K
    ffn: Axes = (TENSOR,)  # F of w_gate and w_up [D, F] and w_down [F, D], and of experts
    experts: Axes = ()  # E: every rank computes the experts of its tokens
    vocab: Axes = (TENSOR,)  # V of embedding [V, D] and head [D, V]
    head_dim: Axes = ()  # H: attention needs the entire head dimension
    latent: Axes = ()  # R of the matrix [D, R] of a latent
    sharded_latent: Axes = WEIGHT_AXES  # R of the matrix [R, N, H] that expands it
    rank: Axes = ()  # R of the matrix of an adapter that has a dimension D
    sharded_rank: Axes = WEIGHT_AXES  # R of the other matrix
    layers: Axes = ()  # L: every rank runs every layer
    norm: Axes = ()  # D or H of a norm's scale: a few kilobytes
    bias: Axes = ()  # H or D of a bias, E of a router's
    ffn_bias: Axes = (TENSOR,)  # F of the biases of feed-forward layers
    sinks: Axes = (TENSOR,)  # N of the attention sinks, one logit per head
    taps: Axes = ()  # P of short convolutions, whose channels are heads
    decay: Axes = (TENSOR,)  # H of the decay of recurrent states, two numbers per head
    unsharded: Axes = ()  # any other dimension, of a model that is not ours

    residual: tuple[Axes, ...] = (BATCH_AXES, (CONTEXT, TENSOR), ())  # x_BTD between blocks
    gathered: tuple[Axes, ...] = (BATCH_AXES, (CONTEXT,), ())  # x_BTD as input of a block's matmuls
    heads_out: tuple[Axes, ...] = (BATCH_AXES, (CONTEXT,), (TENSOR,), ())  # q_BTNH, k_BTKH, v_BTKH
    ffn_out: tuple[Axes, ...] = (BATCH_AXES, (CONTEXT,), (TENSOR,))  # gate_BTF, up_BTF


RULES = ShardingRules()


def is_vector(dims: Axes) -> bool:
    """Whether a parameter with these dimensions is the scale of a norm, a bias, the attention sinks
    or a decay.

    They are used in float32, without a cast to the compute dtype, and have no weight decay.
    """
    return not {"norm", "bias", "ffn_bias", "sinks", "decay"}.isdisjoint(dims)


def storage_axes(name: str) -> Axes:
    """The mesh axes of the parameter dimension `name` in storage."""
    return vars(RULES)[name]


def storage_spec(dims: Axes, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The sharding of a stored parameter. `dims` names its dimensions, e.g. ("model", "heads",
    "head_dim").

    `mesh` may be `Nodes.mesh`.
    """
    return _fit([storage_order(storage_axes(name), mesh) for name in dims], shape, mesh)


def copy_spec(dims: Axes, shape: tuple[int, ...], nodes: Nodes) -> PartitionSpec:
    """The sharding of a parameter in the copy of one node: as stored, without the axes over nodes."""
    stored = storage_spec(dims, shape, nodes.mesh)
    return PartitionSpec(
        *(tuple(a for a in axes_of(entry) if a not in nodes.outer) or None for entry in stored)
    )


def is_copied(dims: Axes) -> bool:
    """Whether the copy of a node has this parameter: a matrix that fsdp and context shard."""
    return not is_vector(dims) and any(set(storage_axes(name)) & set(WEIGHT_AXES) for name in dims)


def axes_of(entry) -> Axes:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def compute_spec(dims: Axes, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The sharding of a parameter in use by a layer: gathered over fsdp and context, sharded over
    tensor.
    """
    compute_axes = [
        tuple(axis for axis in storage_axes(name) if axis not in WEIGHT_AXES) for name in dims
    ]
    return _fit(compute_axes, shape, mesh)


def _fit(dim_axes, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    assert len(dim_axes) == len(shape), (dim_axes, shape)
    return PartitionSpec(
        *(_largest_divisor(axes, size, mesh) for axes, size in zip(dim_axes, shape))
    )


def _largest_divisor(axes: Axes, dim_size: int, mesh: Mesh) -> Axes | str | None:
    """The subset of `axes` with the largest product that divides dim_size, as an entry of a
    PartitionSpec.
    """
    axes = [axis for axis in axes if mesh.shape[axis] > 1]
    subsets = [
        subset for length in range(len(axes) + 1) for subset in itertools.combinations(axes, length)
    ]
    product = {subset: math.prod(mesh.shape[axis] for axis in subset) for subset in subsets}
    best = max(
        (subset for subset in subsets if dim_size % product[subset] == 0), key=product.__getitem__
    )
    return {0: None, 1: best[0] if best else None}.get(len(best), best)


@dataclass(frozen=True)
class Sharder:
    """Applies the rules to a model's values. Models use the mesh only through this object."""

    mesh: Mesh
    # parameters are stored on the mesh of these nodes; weights may be their copies
    nodes: Nodes | None = None
    weights_are_gathered: bool = False  # `weight` has already been applied to all weights
    weights_on_host: bool = False  # parameters and their gradients are stored in host memory
    reduces_in_float32: bool = False  # gradients of layer weights are summed over ranks in float32
    # config.runtime.expert_kernel: what multiplies the tokens of a rank with experts
    expert_kernel: str = "blocks"

    def fetched(self, params):
        """Copies a tree of parameters to the device; their gradients are copied back to where they
        are stored.
        """
        return jax.device_put(params, jax.memory.Space.Device) if self.weights_on_host else params

    def weight(self, stored: jax.Array, dims: Axes, dtype) -> jax.Array:
        """Casts a stored parameter to `dtype` and then gathers it for compute: the all-gather moves
        `dtype`.

        Of the copy of a node, the result keeps the dimension of nodes; `product` and `by_rank`
        accept it, and `gathered_over_node` removes it.

        The first constraint has no effect in the forward pass. In the backward pass it shards the
        gradient immediately, so that the sum over ranks becomes a reduce-scatter. The barrier keeps
        the cast before the gather: without it, XLA moved the cast after the gather when it
        recomputed a layer, and gathered float32.
        """
        if self.weights_are_gathered:
            return stored
        stored = self._stored(stored, dims)
        return self._in_use(jax.lax.optimization_barrier(stored.astype(dtype)), dims)

    def layer_weight(self, stored: jax.Array, dims: Axes, dtype) -> jax.Array:
        """As `weight`, for a matrix product of a layer; its values in float32 if gradients are
        reduced in float32.

        The gather still moves `dtype`. The gradient has the dtype of the array that the product
        reads, and the sum over ranks that of the gradient, so the product must get a float32 array
        (`models.matmuls`).
        """
        if self.weights_are_gathered or not self.reduces_in_float32 or dtype == stored.dtype:
            return self.weight(stored, dims, dtype)

        @jax.custom_vjp
        def rounded(stored):
            return self.weight(stored, dims, dtype).astype(stored.dtype)

        def backward(_, gradient):
            return (self._stored(self._in_use(gradient, dims), dims),)

        rounded.defvjp(lambda stored: (rounded(stored), None), backward)
        return rounded(stored)

    def head(self, stored: jax.Array, dims: Axes, dtype) -> jax.Array:
        """As `weight`, for the output head, whose gradient the loss has already scattered to the
        storage sharding.

        The backward of `weight` would gather it first: its constraint to the sharding for compute
        applies to the gradient too.
        """

        @jax.custom_vjp
        def gathered(stored):
            return self.weight(stored, dims, dtype)

        def backward(_, gradient):
            # Without the barrier, XLA held a second copy of the float32 gradient where weights are
            # in host memory.
            gradient = jax.lax.optimization_barrier(self._stored(gradient, dims))
            return (gradient.astype(stored.dtype),)

        gathered.defvjp(lambda stored: (gathered(stored), None), backward)
        return gathered(stored)

    def product(self, function: Callable, x: jax.Array, w: jax.Array, dims: Axes) -> jax.Array:
        """`function(x, w)`, linear in w: contracts the last dimensions of x [B, T, ...] with the
        first of w.

        Where `w` is of the copy of a node, its gradient is the sum over the tokens of the node.

        Args:
          w: a result of `weight`; dims: the names of its dimensions.
        """
        if not self._is_copy(w, dims):
            return function(x, w)
        nodes = self.nodes
        features = tuple(compute_spec(dims, w.shape[1:], self.mesh))
        tokens = tuple(_fit(RULES.gathered[:2], x.shape[:2], self.mesh))
        x_spec = PartitionSpec(*tokens, *features[: x.ndim - 2])
        out_spec = PartitionSpec(*tokens, *features[x.ndim - 2 :])
        w_spec = self._compute_spec(w, dims)

        def gradient(x, w, dout):
            (dw,) = jax.vjp(functools.partial(function, x), w[0])[1](dout)
            return jax.lax.psum(dw, nodes.inner)[None]

        @jax.custom_vjp
        def run(x, w):
            return function(x, self.gathered_over_node(w, dims))

        def backward(operands, dout):
            x, w = operands
            dout = self._constrain(dout, out_spec)
            (dx,) = jax.vjp(lambda x: function(x, self.gathered_over_node(w, dims)), x)[1](dout)
            in_specs = nodes.spec(x_spec), w_spec, nodes.spec(out_spec)
            return dx, shard_map(gradient, nodes.mesh, in_specs, w_spec)(x, w, dout)

        run.defvjp(lambda *operands: (run(*operands), operands), backward)
        return run(x, w)

    def gathered_over_node(self, w: jax.Array, dims: Axes) -> jax.Array:
        """A result of `weight` without the dimension of nodes, if it has one: each rank has the
        weights of its node.
        """
        if not self._is_copy(w, dims):
            return w
        spec = compute_spec(dims, w.shape[1:], self.mesh)
        in_specs = self._compute_spec(w, dims)
        split = shard_map(operator.itemgetter(0), self.nodes.mesh, in_specs, spec)
        return self._constrain(split(w), spec)

    def _is_copy(self, w: jax.Array, dims: Axes) -> bool:
        return w.ndim == len(dims) + 1

    def _stored(self, w: jax.Array, dims: Axes) -> jax.Array:
        """A parameter, or one of the copy of a node, in its sharding for storage."""
        mesh = self._storage_mesh
        if self._is_copy(w, dims):
            spec = PartitionSpec(self.nodes.outer, *copy_spec(dims, w.shape[1:], self.nodes))
        else:
            spec = storage_spec(dims, w.shape, mesh)
        return self._constrain(w, spec, mesh)

    def _in_use(self, w: jax.Array, dims: Axes) -> jax.Array:
        """A parameter, or one of the copy of a node, in its sharding for compute."""
        mesh = self._storage_mesh if self._is_copy(w, dims) else self.mesh
        return self._constrain(w, self._compute_spec(w, dims), mesh)

    def _compute_spec(self, w: jax.Array, dims: Axes) -> PartitionSpec:
        outer = (self.nodes.outer,) if self._is_copy(w, dims) else ()
        return PartitionSpec(*outer, *compute_spec(dims, w.shape[-len(dims) :], self.mesh))

    @property
    def _storage_mesh(self) -> Mesh:
        return self.mesh if self.nodes is None else self.nodes.mesh

    def residual(self, x_BTD: jax.Array) -> jax.Array:
        return self._activation(x_BTD, RULES.residual)

    def gathered(self, x_BTD: jax.Array) -> jax.Array:
        # The barrier keeps a preceding cast before the gather, as in `weight`.
        return self._activation(jax.lax.optimization_barrier(x_BTD), RULES.gathered)

    def heads(self, x_BTNH: jax.Array) -> jax.Array:
        return self._activation(x_BTNH, RULES.heads_out)

    def ffn(self, x_BTF: jax.Array) -> jax.Array:
        return self._activation(x_BTF, RULES.ffn_out)

    def by_rank(self, function: Callable, tokens: Any, weights: Any, dims: Any) -> jax.Array:
        """`function(tokens, weights)` of each rank's tokens, summed over tensor: an x_BTD sharded as the residual
        stream.

        The function gets the tokens of all tensor ranks, and weights that are sharded over tensor; it may sort tokens,
        since no other rank has them. Gradients of weights are summed over the other axes in the dtype of the weights.

        Args:
          tokens: tree of arrays [B, T, ...] that are `gathered`.
          weights: tree of arrays that `weight` returned; dims: the same tree of their dimensions. Gradients of the copy
            of a node are sums over the tokens of the node.
        """
        first = jax.tree.leaves(tokens)[0]
        rows, sequence = _fit(RULES.gathered[:2], first.shape[:2], self.mesh)
        _, residual = _fit(RULES.residual[:2], first.shape[:2], self.mesh)
        leaves, tree = jax.tree.flatten(weights)
        dims = tree.flatten_up_to(dims)
        translated = (lambda spec: spec) if self.nodes is None else self.nodes.spec

        def local(tokens, weights):
            pairs = zip(jax.tree.leaves(weights), dims)
            own = [w[0] if self._is_copy(w, names) else w for w, names in pairs]
            out = function(tokens, tree.unflatten(own))
            if self.mesh.shape[TENSOR] == 1:
                return out
            return jax.lax.psum_scatter(out, TENSOR, scatter_dimension=1, tiled=True)

        tokens_spec = PartitionSpec(rows, sequence)
        out_spec = PartitionSpec(rows, residual)
        # Gradients of tokens are partial sums over tensor, of weights over the other axes.
        specs = tree.unflatten(list(map(self._compute_spec, leaves, dims)))
        in_specs = (translated(tokens_spec), specs)
        out_specs = translated(out_spec)
        return shard_map(local, self._storage_mesh, in_specs, out_specs)(tokens, weights)

    def _activation(self, x: jax.Array, dim_axes: tuple[Axes, ...]) -> jax.Array:
        return self._constrain(x, _fit(dim_axes, x.shape, self.mesh))

    def _constrain(self, x: jax.Array, spec: PartitionSpec, mesh: Mesh | None = None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh or self.mesh, spec))


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
    # a reason for each dimension that is not sharded over all axes of its rule
    unsharded: tuple[str, ...]

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        shape = " ".join(f"{name}={size}" for name, size in zip(self.dims, self.shape))
        reasons = "; ".join(self.unsharded)
        sharded = [
            f"{name}:{'+'.join(axes_of(entry))}"
            for name, entry in zip(self.dims, self.spec)
            if entry is not None
        ]
        return (
            self.name,
            shape,
            self.dtype,
            (" ".join(sharded) or "-"),
            f"{self.bytes_per_device:,}",
            reasons,
        )


@dataclass(frozen=True, kw_only=True)
class ShardingTable:
    """The parameters of a model on a mesh; `print` and notebooks show a table. `rows` has the
    values.
    """

    rows: tuple[ParameterSharding, ...]
    num_params: int
    num_devices: int

    @property
    def totals(self) -> str:
        """One line: parameters, bytes, and bytes per device."""
        num_bytes = sum(row.num_bytes for row in self.rows)
        device_bytes = sum(row.bytes_per_device for row in self.rows)
        return (
            f"{self.num_params:,} parameters, {num_bytes:,} bytes; {device_bytes:,} bytes per device"
            f" ({device_bytes / num_bytes:.1%}) on a mesh of {count_text(self.num_devices, 'device')}"
        )

    def __str__(self) -> str:
        return (
            "\n".join(
                [*aligned([_HEADINGS, *(row.cells for row in self.rows)], _ALIGN), self.totals]
            )
            + "\n"
        )

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return text.preformatted(str(self))


def sharding_table(abstract_params, dims, mesh: Mesh) -> ShardingTable:
    """The sharding of every parameter. A `!` marks a dimension that is not sharded over all its
    axes.

    Args:
      abstract_params: pytree of arrays or `jax.ShapeDtypeStruct`s.
      dims: the same tree; each leaf is a tuple of dimension names.
      mesh: of attached or absent devices.
    """
    rows = []

    def add_row(path, param, names) -> None:
        spec = storage_spec(names, param.shape, mesh)
        shard_shape = NamedSharding(mesh, spec).shard_shape(param.shape)
        rows.append(
            ParameterSharding(
                name=jax.tree_util.keystr(path, simple=True, separator="/"),
                dims=names,
                shape=tuple(param.shape),
                dtype=str(param.dtype),
                spec=spec,
                bytes_per_device=math.prod(shard_shape) * param.dtype.itemsize,
                num_bytes=param.size * param.dtype.itemsize,
                unsharded=tuple(_unsharded(names, param.shape, spec, mesh)),
            )
        )

    jax.tree_util.tree_map_with_path(add_row, abstract_params, dims)
    num_params = num_entries(abstract_params)
    return ShardingTable(rows=tuple(rows), num_params=num_params, num_devices=mesh.size)


def num_entries(params) -> int:
    """The number of parameters of a tree of arrays, or of weights that have a shape and are stored as
    other arrays, such as those in NF4.
    """
    leaves = jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, "shape"))
    return sum(math.prod(x.shape) for x in leaves)


def _unsharded(
    names: tuple[str, ...], shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh
) -> Iterator[str]:
    """Yields a reason for each dimension that is not sharded over all axes of its rule."""
    for name, size, entry in zip(names, shape, spec):
        rule_axes = tuple(
            axis for axis in storage_order(storage_axes(name), mesh) if mesh.shape[axis] > 1
        )
        if axes_of(entry) != rule_axes:
            product = mesh_text({axis: mesh.shape[axis] for axis in rule_axes})
            yield f"! {name}={size} is not divisible by {product}"
