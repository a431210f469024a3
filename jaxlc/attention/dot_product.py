"""`dot_product_attention`: the signature of `jax.nn.dot_product_attention`, for a sequence split on a mesh axis."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxlc.attention.api import attend
from jaxlc.core.axes import CONTEXT
from jaxlc.core.errors import Unsupported, UserError

_KERNELS = {None: "auto", "xla": "blockwise", "cudnn": "cudnn"}  # `implementation` of jax.nn -> kernel


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    mesh: Mesh | None = None,
    context_axis: str = CONTEXT,
    batch_axes: str | Sequence[str] | None = None,
    head_axis: str | None = None,
    strategy: str = "ring",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`jax.nn.dot_product_attention` over a sequence split on a mesh axis; arrays in natural token order.

    The results are equal up to rounding, with one exception: the residual of a query beyond its length is -inf.

    Args:
      query: [B, T, N, H] or [T, N, H].
      key, value: [B, S, K, H] or [S, K, H] with S == T, of the dtype of query.
      bias, mask: must be None.
      query_seq_lengths, key_value_seq_lengths: int32 [B]. Either the same array for both, or query_seq_lengths alone
        with is_causal=True.
      local_window_size: (left, right): a query attends to the `left` tokens before it, itself and the `right` tokens
        after it. An integer w is (w, w). right must be 0 unless is_causal=True, which masks later tokens.
      implementation: the kernel: None is "auto" of `attend`, "xla" is "blockwise", "cudnn" is "cudnn".
      return_residual: also return the log-sum-exp [B, T, N] or [T, N], without gradient, in the dtype of key.
      scale, mesh, context_axis, batch_axes, head_axis, strategy: see `attend`. [T, N, H] is not split over batch axes.
    Returns:
      out of the shape and dtype of query, or (out, residual).
    Raises:
      Unsupported: an argument is unsupported over a split sequence; the message names it.
      UserError: shapes or dtypes do not match, or do not split over the mesh.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    _check_operands(query, key, value, bias, mask)
    causal, window = _causal_window(is_causal, local_window_size)
    lengths = _sequence_lengths(query, causal, query_seq_lengths, key_value_seq_lengths)
    is_batched = query.ndim == 4
    q_BTNH, k_BSKH, v_BSKH = (x if is_batched else x[None] for x in (query, key, value))
    segments_BT = None
    if lengths is not None:
        segments_BT = (jnp.arange(q_BTNH.shape[1]) < lengths[:, None]).astype(jnp.int32)
    out_BTNH, lse_BNT = attend(
        q_BTNH, k_BSKH, v_BSKH, mesh=mesh, strategy=strategy, kernel=_kernel(implementation), causal=causal,
        window=window, segment_ids=segments_BT, scale=scale, context_axis=context_axis,
        batch_axes=batch_axes if is_batched else (), head_axis=head_axis, return_lse=True,
    )  # fmt: skip
    out = out_BTNH.reshape(query.shape)
    if not return_residual:
        return out
    return out, lax.stop_gradient(lse_BNT.swapaxes(1, 2).reshape(query.shape[:-1]).astype(key.dtype))


def _kernel(implementation: str | None) -> str:
    if implementation not in _KERNELS:
        raise UserError(f"invalid implementation={implementation!r}: expected None, 'xla' or 'cudnn'")
    return _KERNELS[implementation]


def _check_operands(query: jax.Array, key: jax.Array, value: jax.Array, bias, mask) -> None:
    shapes = f"query {query.shape}, key {key.shape} and value {value.shape}"
    if query.ndim not in (3, 4) or key.ndim != query.ndim or value.shape != key.shape:
        raise UserError(
            f"invalid shapes {shapes}: expected query [B, T, N, H], key and value [B, S, K, H], all with or without B"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise UserError(f"invalid dtypes {query.dtype}, {key.dtype} and {value.dtype}: expected equal dtypes")
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None:
            raise Unsupported(
                f"unsupported: {name}, an array of T x S entries (supported: is_causal, local_window_size and sequence"
                " lengths here, segment_ids in jaxlc.attend)"
            )
    if query.shape[-3] != key.shape[-3]:
        raise Unsupported(
            f"unsupported: {shapes}: queries and keys differ in length (supported: self-attention, S == T)"
        )


def _causal_window(is_causal: bool, local_window_size: int | tuple[int, int] | None) -> tuple[bool, int | None]:
    """`causal` and `window` of `attend`, which includes the query's own token."""
    if local_window_size is None:
        return is_causal, None
    left, right = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    if left < 0 or right < 0:
        raise Unsupported(f"unsupported: local_window_size={local_window_size} (supported: 0 and positive sizes)")
    if right and not is_causal:
        raise Unsupported(
            f"unsupported: local_window_size={local_window_size} with is_causal=False, a window over later tokens"
            f" (supported: is_causal=True, or local_window_size=({left}, 0))"
        )
    return True, left + 1


def _sequence_lengths(query: jax.Array, causal: bool, query_lengths, key_lengths) -> jax.Array | None:
    """The number of tokens of each sequence that are not padding. None: all.

    Segment ids mask padded queries and keys together. That is exact if both have the same length, and if queries attend
    to earlier keys only.
    """
    if query_lengths is None and key_lengths is None:
        return None
    is_exact = _are_equal(query_lengths, key_lengths) or (causal and key_lengths is None)
    if not is_exact:
        raise Unsupported(
            "unsupported: key_value_seq_lengths other than query_seq_lengths (supported: the same array for both, or"
            " query_seq_lengths alone with is_causal=True)"
        )
    lengths = jnp.asarray(query_lengths)
    batch = query.shape[0] if query.ndim == 4 else 1
    if lengths.shape != (batch,) or lengths.dtype != jnp.int32:
        raise UserError(f"invalid query_seq_lengths {lengths.dtype}{lengths.shape}: expected int32 of shape ({batch},)")
    return lengths


def _are_equal(a, b) -> bool:
    if a is b:
        return True
    if a is None or b is None or isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return False  # the values of traced arrays are unknown
    return np.array_equal(np.asarray(a), np.asarray(b))
