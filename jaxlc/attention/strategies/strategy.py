"""What all strategies that split a sequence over devices share: operands, custom gradient, mesh
axes, checks of shapes.

Every strategy is two functions that run inside `shard_map`, on this rank's shard of the sequence:

    prepare(tokens: TokenInfo, kernel, spec, ranks) -> ranges     once per training step
    attend(qkv: ShardedQKV, kernel, spec, ranks) -> (out_btnH in q's dtype, lse_bnt float32)

`ranges` is the mask as key ranges, in the form that this strategy's kernel calls need, or what the
kernel's `prepare` computed from them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxlc.attention import contract
from jaxlc.attention.contract import (
    AttentionSpec,
    Gradients,
    Kernel,
    KeysValues,
    OutLse,
    QueryResults,
)
from jaxlc.core import BATCH_AXES, CONTEXT, TENSOR, Unsupported, UserError, scopes, suggestion
from jaxlc.sharding.document_layout import natural_order, zigzag_order
from jaxlc.sharding.mesh import Ranks


class AttentionSpecs(NamedTuple):
    """The PartitionSpecs of arrays of attention."""

    tokens: PartitionSpec  # [B, T]
    heads: PartitionSpec  # [B, T, N, H]
    lse: PartitionSpec  # [B, N, T]


class AttentionAxes(NamedTuple):
    """Names of mesh axes."""

    batch: tuple[str, ...]  # split B
    context: str  # splits T and S
    head: str | None  # splits N and K. None: heads are not split

    def specs(self, context: tuple[str, ...]) -> AttentionSpecs:
        """With T split over the axes `context`."""
        return AttentionSpecs(
            tokens=PartitionSpec(self.batch, context),
            heads=PartitionSpec(self.batch, context, self.head, None),
            lse=PartitionSpec(self.batch, self.head, context),
        )

    def num_head_ranks(self, mesh: Mesh) -> int:
        """The number of shards of the head dimension."""
        return 1 if self.head is None else mesh.shape[self.head]


DEFAULT_AXES = AttentionAxes(BATCH_AXES, CONTEXT, TENSOR)  # the axes of jaxlc's own meshes


def resolve_axes(
    mesh: Mesh | None,
    context_axis: str,
    batch_axes: str | Sequence[str] | None,
    head_axis: str | None,
) -> AttentionAxes:
    """The axes from the arguments of `attend`. None: the names of jaxlc's own meshes, as far as `mesh` has them.

    Raises:
      UserError: the mesh has no axis of that name, has axes that are not Auto, or an axis has two roles.
    """
    if mesh is None:
        raise UserError("attention outside of shard_map needs a mesh: pass mesh=")
    if any(axis_type != AxisType.Auto for axis_type in mesh.axis_types):
        raise UserError(
            "the mesh has Explicit or Manual axes (the default of jax.make_mesh); create it with"
            f" axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}, or with jaxlc.make_mesh"
        )
    _check_axis(mesh, "context_axis", context_axis)
    if head_axis is None:
        head_axis = TENSOR if TENSOR in mesh.axis_names and context_axis != TENSOR else None
    else:
        _check_axis(mesh, "head_axis", head_axis)
    if batch_axes is None:
        batch_axes = [
            axis
            for axis in BATCH_AXES
            if axis in mesh.axis_names and axis not in (context_axis, head_axis)
        ]
    batch_axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
    for axis in batch_axes:
        _check_axis(mesh, "batch_axes", axis)
    names = [context_axis, *batch_axes, *([] if head_axis is None else [head_axis])]
    if len(set(names)) < len(names):
        raise UserError(
            f"invalid axes: context_axis={context_axis!r}, batch_axes={batch_axes} and head_axis={head_axis!r} overlap;"
            " a mesh axis splits one dimension"
        )
    return AttentionAxes(batch_axes, context_axis, head_axis)


def is_manual(context_axis: str, q_BTNH: jax.Array) -> bool:
    """Whether the caller is inside `shard_map` over the context axis, so that arrays are local
    shards.

    Raises:
      Unsupported: inside `shard_map` over other axes only.
      UserError: the `shard_map` has check_vma=True, which the kernels do not support.
    """
    manual_axes = jax.sharding.get_abstract_mesh().manual_axes
    if manual_axes and context_axis not in manual_axes:
        raise Unsupported(
            f"unsupported: attention inside a shard_map over {', '.join(manual_axes)} but not over"
            f" context_axis={context_axis!r}; call outside of it, or add that axis to its axis_names"
        )
    if jax.typeof(q_BTNH).manual_axis_type.varying:
        raise UserError(
            "attention inside shard_map needs check_vma=False: pass it to jax.shard_map"
        )
    return bool(manual_axes)


def check_shapes(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BT: jax.Array | None,
    sinks_N: jax.Array | None,
) -> None:
    """Raises UserError unless the shapes of the operands, global or local, are consistent and q, k
    and v are floats.
    """
    q_shape = q_BTNH.shape
    k_shape = k_BSKH.shape
    are_consistent = (
        q_shape[:2] == k_shape[:2]
        and q_shape[3:] == k_shape[3:]
        and v_BSKH.shape[:3] == k_shape[:3]
    )
    if not (q_BTNH.ndim == k_BSKH.ndim == v_BSKH.ndim == 4 and are_consistent):
        raise UserError(
            f"invalid shapes q {q_shape}, k {k_shape} and v {v_BSKH.shape}: expected q [B, T, N, H], k and v"
            " [B, T, K, H]"
        )
    batch, num_tokens, num_heads, _ = q_shape
    num_kv_heads = k_shape[2]
    dtypes = [x.dtype for x in (q_BTNH, k_BSKH, v_BSKH)]
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise UserError(
            f"invalid dtypes {', '.join(map(str, dtypes))} of q, k, v: expected floats, such as bfloat16"
        )
    if segments_BT is not None and segments_BT.shape != (batch, num_tokens):
        raise UserError(
            f"invalid shape {segments_BT.shape} for segment_ids: expected [B, T] = {(batch, num_tokens)}"
        )
    if segments_BT is not None and not jnp.issubdtype(segments_BT.dtype, jnp.integer):
        raise UserError(f"invalid dtype {segments_BT.dtype} of segment_ids: expected int32")
    if sinks_N is not None and sinks_N.shape != (num_heads,):
        raise UserError(
            f"invalid shape {sinks_N.shape} for sinks: expected one per query head, {(num_heads,)}"
        )
    if num_heads % num_kv_heads:
        raise UserError(
            f"{num_heads} query heads are not a multiple of {num_kv_heads} key/value heads"
        )


def check_contiguous(segments_BT: jax.Array, context: int) -> None:
    """Raises Unsupported if a segment of a concrete array is not contiguous. Values of traced
    arrays are unknown.

    Args:
      context: the tokens are in zigzag order over this number of ranks; 1 is natural order.
    """
    if isinstance(segments_BT, jax.core.Tracer) or not getattr(
        segments_BT, "is_fully_addressable", True
    ):
        return
    ids_BT = np.asarray(segments_BT)
    if (ids_BT < -(2**31)).any() or (ids_BT >= 2**31).any():  # JAX would keep their last 32 bits
        raise UserError(
            f"invalid segment_ids from {ids_BT.min()} to {ids_BT.max()}: expected 32-bit integers"
        )
    ids_BT = ids_BT[:, natural_order(zigzag_order(ids_BT.shape[1], context))]
    for sequence, ids_T in enumerate(ids_BT):
        first_of_runs = ids_T[np.flatnonzero(np.diff(ids_T, prepend=0))]
        ids, num_runs = np.unique(first_of_runs[first_of_runs != 0], return_counts=True)
        if (num_runs > 1).any():
            raise Unsupported(
                f"unsupported: segment {ids[num_runs > 1][0]} of sequence {sequence} is not contiguous (supported:"
                " segments of contiguous tokens in natural order); give each part an id of its own"
            )


def check_split(
    shape_BTN: tuple[int, int, int], num_shared: int, mesh: Mesh, axes: AttentionAxes, *, heads: str
) -> None:
    """Raises UserError unless global arrays of this shape split over the mesh.

    Args:
      num_shared: key/value heads, each of which belongs to one or more of the N heads; they may be repeated on ranks.
      heads: the heads and their numbers, for the error.
    """
    batch, num_tokens, num_heads = shape_BTN
    context = mesh.shape[axes.context]
    head_ranks = axes.num_head_ranks(mesh)
    batch_ranks = math.prod(mesh.shape[axis] for axis in axes.batch)
    if num_heads % head_ranks or (num_shared % head_ranks and head_ranks % num_shared):
        raise UserError(f"{heads} do not split over {axes.head}={head_ranks}")
    if batch % batch_ranks:
        raise UserError(
            f"a batch of {batch} does not split over {' x '.join(axes.batch)} = {batch_ranks};"
            f" use a multiple of {batch_ranks}"
        )
    if num_tokens % (2 * context):
        raise UserError(
            f"{num_tokens} tokens do not split over {axes.context}={context}; use a multiple of {2 * context}"
        )


def _check_axis(mesh: Mesh, argument: str, axis: str) -> None:
    if axis not in mesh.axis_names:
        names = ", ".join(mesh.axis_names)
        question = suggestion(str(axis), mesh.axis_names)
        raise UserError(f"unknown {argument} {axis!r}: the mesh has the axes {names}{question}")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight_RnE", "a_Rr", "b_rnE"],
    meta_fields=["own_dim"],
)
@dataclass(frozen=True, kw_only=True)
class Expansion:
    """The weights of latent attention, by which keys and values are products of latents."""

    weight_RnE: jax.Array  # E: the part of a key that RoPE does not rotate, then the value
    # of an adapter, which adds latent a b; None: there is none
    a_Rr: jax.Array | None = None
    b_rnE: jax.Array | None = None
    own_dim: int  # width of that part of a key

    @property
    def value_dim(self) -> int:
        return self.weight_RnE.shape[-1] - self.own_dim

    def specs(self, head_axis: str | None) -> "Expansion":
        """The PartitionSpecs of the arrays."""
        by_head = PartitionSpec(None, head_axis, None)
        return jax.tree.map(lambda x: by_head if x.ndim == 3 else PartitionSpec(), self)

    @property
    def product_RnE(self) -> jax.Array:
        """The weights, with the product of the adapter added."""
        if self.a_Rr is None:
            return self.weight_RnE
        return self.weight_RnE + jnp.einsum("Rr,rnE->RnE", self.a_Rr, self.b_rnE)

    @jax.named_scope(scopes.EXPANSION)
    def keys_values(self, latent_bsC: jax.Array) -> KeysValues:
        """k_bsnH and v_bsnV, in the dtype of the latents.

        Args:
          latent_bsC: R entries, then the part of the key that all heads share.
        """
        dtype = latent_bsC.dtype
        rank = len(self.weight_RnE)
        latent_bsR, shared_bsP = jnp.split(latent_bsC, [rank], axis=-1)
        expanded = jnp.einsum("bsR,RnE->bsnE", latent_bsR, self.weight_RnE.astype(dtype))
        if self.a_Rr is not None:
            low = jnp.einsum("bsR,Rr->bsr", latent_bsR, self.a_Rr.astype(dtype))
            expanded += jnp.einsum("bsr,rnE->bsnE", low, self.b_rnE.astype(dtype))
        return split_expanded(expanded, shared_bsP, self.own_dim)


def split_expanded(expanded_bsnE: jax.Array, shared_bsP: jax.Array, own_dim: int) -> KeysValues:
    """k_bsnH and v_bsnV from the products of latents and the part of the key that all heads share."""
    own, v_bsnV = jnp.split(expanded_bsnE, [own_dim], axis=-1)
    shared = jnp.broadcast_to(shared_bsP[:, :, None], (*own.shape[:-1], shared_bsP.shape[-1]))
    return jnp.concatenate([own, shared], axis=-1), v_bsnV


class ShardedQKV(NamedTuple):
    """This rank's shard of queries, keys and values, all in the same token order."""

    q_btnH: jax.Array
    k_bskH: jax.Array  # with an `Expansion`: latent_bsC, float32
    v_bskH: "jax.Array | Expansion"
    ranges: Any  # arrays that the strategy's `prepare` returns. None: an implicit mask
    # float32, of the heads of q; `attention_vjp` reads it, strategies do not
    sinks_n: jax.Array | None = None


def joined(k_bskH: jax.Array, v_bskV: jax.Array) -> jax.Array:
    """Keys and values as one array, so that one collective moves both."""
    return jnp.concatenate([k_bskH, v_bskV], axis=-1)


def parted(kv: jax.Array, k_like: jax.Array) -> list[jax.Array]:
    """The inverse of `joined`, with any numbers of sequences and tokens."""
    return jnp.split(kv, [k_like.shape[-1]], axis=-1)


def repeat_heads(x: jax.Array, num_ranks: int, axis: int = 2) -> jax.Array:
    """Repeats the heads of the dimension `axis` up to the number of ranks that split them, if there
    are fewer heads.
    """
    num_heads = x.shape[axis]
    return x if num_heads % num_ranks == 0 else jnp.repeat(x, num_ranks // num_heads, axis=axis)


ForwardFn = Callable[[ShardedQKV, Kernel, AttentionSpec, Ranks | None], OutLse]
BackwardFn = Callable[
    [ShardedQKV, QueryResults, Kernel, AttentionSpec, Ranks | None],
    Gradients,
]


def attention_vjp(forward: ForwardFn, backward: BackwardFn, *, inline: bool = False) -> Callable:
    """A differentiable `attend(qkv, kernel, spec, ranks)` from a forward and a backward function.

    Args:
      forward: `(qkv, kernel, spec, ranks) -> (out_btnH, lse_bnt)`; out in q's dtype or float32, lse float32.
      backward: `(qkv, results, kernel, spec, ranks) -> (dq_btnH, dk_bskH, dv_bskH)`, in q's dtype or float32.
      inline: trace the operations of `forward` into the rule for differentiation. The default traces one opaque call,
        which `jax.checkpoint` recomputes as a whole; with `inline` it sees the single operations, and moves those that
        do not depend on differentiated inputs out of loops.
    Returns:
      A function of the same arguments as `forward`, in whose results the sinks have joined. It casts out to the dtype
      of q, and the gradients to the dtypes of q, k and v. Its residuals are qkv, out and lse; out and lse have the
      checkpoint names "attention_out" and "attention_lse".
    """

    def forward_cast(
        qkv: ShardedQKV, kernel: Kernel, spec: AttentionSpec, ranks: Ranks | None = None
    ):
        out, lse = contract.join(*forward(qkv, kernel, spec, ranks), qkv.sinks_n)
        return out.astype(qkv.q_btnH.dtype), lse

    def forward_rule(qkv, kernel, spec, ranks):
        out, lse = (forward_cast if inline else attend)(qkv, kernel, spec, ranks)
        # Named inside the rule, so that the names apply to the residuals. A remat policy that saves both names then
        # does not run the forward again. Names outside the rule would apply to other values.
        out = checkpoint_name(out, "attention_out")
        lse = checkpoint_name(lse, "attention_lse")
        return (out, lse), (qkv, out, lse)

    def backward_rule(kernel, spec, ranks, residuals, cotangents):
        qkv, out, lse = residuals
        results = QueryResults(out, lse, *cotangents)
        gradients = backward(qkv, results, kernel, spec, ranks)
        dq, dk, dv = jax.tree.map(lambda dx, x: dx.astype(x.dtype), gradients, tuple(qkv[:3]))
        dsinks = None if qkv.sinks_n is None else contract.gradient(qkv.sinks_n, results)
        return (ShardedQKV(dq, dk, dv, None, dsinks),)

    attend = functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))(forward_cast)
    attend.defvjp(forward_rule, backward_rule)
    return attend
