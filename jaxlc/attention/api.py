"""The public functions of attention over a split sequence: `attend`, and `dot_product_attention`
with the signature of `jax.nn.dot_product_attention`.

Both check their arguments and call `strategies.sharded_attention.make`.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxlc.attention.key_ranges import TokenInfo
from jaxlc.attention.strategies.sharded_attention import (
    TokenOrder,
    attend_shard,
    attention_spec,
    check_token_order,
    choose,
    known_strategy,
    make,
    prepare_shard,
)
from jaxlc.attention.strategies.strategy import (
    AttentionAxes,
    check_contiguous,
    check_shapes,
    check_split,
    is_manual,
    resolve_axes,
)
from jaxlc.config import AttentionConfig
from jaxlc.core import CONTEXT, Unsupported, UserError
from jaxlc.sharding.mesh import Ranks


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    mesh: Mesh | None = None,
    strategy: str = "ring",
    kernel: str = "auto",
    causal: bool = True,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    ulysses_ranks: int | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    context_axis: str = CONTEXT,
    batch_axes: str | Sequence[str] | None = None,
    head_axis: str | None = None,
    token_order: TokenOrder = "natural",
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention over a sequence split on a mesh axis. Works under `jit`, `grad`, `vmap` and `jax.checkpoint`.

    Inside a `shard_map` over `context_axis`, arrays are local shards, and the ranks of the axis hold consecutive parts
    of `token_order`. Elsewhere they are global arrays.

    Args:
      q_BTNH: queries, any float dtype. N must be a multiple of K.
      k_BSKH, v_BSKH: keys and values, S == T.
      mesh: a mesh with axes of type Auto. None: only inside `shard_map`; kernels are chosen for `jax.devices()[0]`.
      strategy: how the sequence is split: "ring", "all_gather", "ulysses" or "hybrid" (not inside `shard_map`).
      kernel: "auto", or the name of a kernel, which then never falls back to another one.
      causal: whether a query attends to its own and earlier positions only.
      window: a query attends to itself and the window - 1 tokens before it; requires causal. None: all earlier tokens.
      segment_ids: [B, T] int32. Tokens attend within their own segment only; 0 is padding. The tokens of a segment must
        be contiguous in natural order. This is checked for concrete arrays; traced arrays, as under `jit`, are not
        checked, and the results for other segments are undefined. None: one segment.
      ulysses_ranks: for "hybrid": number of neighboring ranks that exchange heads, a divisor of the context size.
      scale: multiplies q . k. None: 1/sqrt(H).
      sinks: [N], a logit per query head in the denominator of the softmax, as in gpt-oss. None: no sinks.
      context_axis, batch_axes, head_axis: names of the mesh axes that split T, B and N. None: "data" and "fsdp" for
        B, "tensor" for N, as far as the mesh has them. Arrays are replicated over other axes.
      token_order: of all arguments and results. "natural", or "zigzag" (`zigzag_order`), which saves an exchange.
      return_lse: also return the log-sum-exp of each query's scores, which is differentiable, too.
    Returns:
      out_BTNH in q's dtype. With return_lse: (out_BTNH, lse_BNT float32). Fully masked queries: 0, and sink or -inf.
    Raises:
      UserError: a shape does not split over the mesh, or a name is unknown.
      Unsupported: the strategy or kernel does not support the problem; the message has the value and the limit. Or a
        segment is not contiguous.
    """
    call = _checked_call(mesh, strategy, kernel, causal, window, ulysses_ranks, scale, token_order)
    check_shapes(q_BTNH, k_BSKH, v_BSKH, segment_ids, sinks)
    if is_manual(context_axis, q_BTNH):
        results = _attend_local(q_BTNH, k_BSKH, v_BSKH, segment_ids, sinks, call, context_axis)
    else:
        axes = resolve_axes(mesh, context_axis, batch_axes, head_axis)
        heads = f"{q_BTNH.shape[2]} query and {k_BSKH.shape[2]} key/value heads"
        check_split(q_BTNH.shape[:3], k_BSKH.shape[2], call.mesh, axes, heads=heads)
        if segment_ids is not None:
            check_contiguous(
                segment_ids, call.mesh.shape[axes.context] if call.token_order == "zigzag" else 1
            )
        results = _attend_global(q_BTNH, k_BSKH, v_BSKH, segment_ids, sinks, call, axes)
    return results if return_lse else results[0]


class _Call(NamedTuple):
    """The static arguments of `attend`; hashable."""

    mesh: Mesh | None
    config: AttentionConfig
    causal: bool
    window: int | None
    scale: float | None
    token_order: TokenOrder


def _checked_call(
    mesh, strategy, kernel, causal, window, ulysses_ranks, scale, token_order
) -> _Call:
    if window is not None and (window < 1 or not causal):
        raise UserError(
            f"invalid window={window} with causal={causal}: expected window of at least 1 token, and causal=True"
        )
    if ulysses_ranks is not None and strategy != "hybrid":
        raise UserError(
            f"invalid ulysses_ranks={ulysses_ranks} for strategy {strategy!r}: expected None unless strategy='hybrid'"
        )
    check_token_order(token_order)
    config = AttentionConfig(
        strategy=known_strategy(strategy), kernel=kernel, ulysses_degree=ulysses_ranks or 1
    )
    return _Call(mesh, config, causal, window, scale, token_order)


@jax.jit(static_argnums=(5, 6))
def _attend_global(q_BTNH, k_BSKH, v_BSKH, segments_BT, sinks_N, call: _Call, axes: AttentionAxes):
    attend = make(
        call.config, call.mesh, causal=call.causal, window=call.window, scale=call.scale, axes=axes,
        token_order=call.token_order,
    )  # fmt: skip
    return attend(q_BTNH, k_BSKH, v_BSKH, attend.prepare(None, segments_BT), sinks_N)


@jax.jit(static_argnums=(5, 6))
def _attend_local(q_btnH, k_bskH, v_bskH, segments_bt, sinks_n, call: _Call, context_axis: str):
    """`attend` inside the caller's `shard_map`, where the context axis is Manual."""
    if call.config.strategy == "hybrid":
        raise Unsupported(
            "unsupported: strategy hybrid inside shard_map (supported: ring, all_gather, ulysses)"
        )
    if q_btnH.shape[1] % 2:
        raise UserError(
            f"a local shard of {q_btnH.shape[1]} tokens has no two equal chunks; use an even number of tokens"
        )
    kernel = choose(
        call.config, call.mesh, head_dim=q_btnH.shape[-1], value_dim=v_bskH.shape[-1], dtype=q_btnH.dtype,
        packed=segments_bt is not None, window=call.window, num_elements=q_btnH.size,
        ring_ranks=1 if call.config.strategy == "ulysses" else lax.axis_size(context_axis),
    ).kernel  # fmt: skip
    settings = dict(
        config=call.config,
        spec=attention_spec(call.config, call.mesh, call.causal, call.window, call.scale),
        ranks=(Ranks(context_axis, lax.axis_size(context_axis)),),
        token_order=call.token_order,
    )
    ranges = (
        None
        if segments_bt is None
        else prepare_shard(TokenInfo(None, segments_bt), kernel=None, **settings)
    )
    return attend_shard(q_btnH, k_bskH, v_bskH, ranges, sinks_n, kernel=kernel, **settings)


# `implementation` of jax.nn -> kernel
_KERNELS = {None: "auto", "xla": "blockwise", "cudnn": "cudnn"}


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
    query = jnp.asarray(query)
    key = jnp.asarray(key)
    value = jnp.asarray(value)
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
    return out, lax.stop_gradient(
        lse_BNT.swapaxes(1, 2).reshape(query.shape[:-1]).astype(key.dtype)
    )


def _kernel(implementation: str | None) -> str:
    if implementation not in _KERNELS:
        raise UserError(
            f"invalid implementation={implementation!r}: expected None, 'xla' or 'cudnn'"
        )
    return _KERNELS[implementation]


def _check_operands(query: jax.Array, key: jax.Array, value: jax.Array, bias, mask) -> None:
    shapes = f"query {query.shape}, key {key.shape} and value {value.shape}"
    if query.ndim not in (3, 4) or key.ndim != query.ndim or value.shape != key.shape:
        raise UserError(
            f"invalid shapes {shapes}: expected query [B, T, N, H], key and value [B, S, K, H], all with or without B"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise UserError(
            f"invalid dtypes {query.dtype}, {key.dtype} and {value.dtype}: expected equal dtypes"
        )
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


def _causal_window(
    is_causal: bool, local_window_size: int | tuple[int, int] | None
) -> tuple[bool, int | None]:
    """`causal` and `window` of `attend`, which includes the query's own token."""
    if local_window_size is None:
        return is_causal, None
    left, right = (
        (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    )
    if left < 0 or right < 0:
        raise Unsupported(
            f"unsupported: local_window_size={local_window_size} (supported: 0 and positive sizes)"
        )
    if right and not is_causal:
        raise Unsupported(
            f"unsupported: local_window_size={local_window_size} with is_causal=False, a window over later tokens"
            f" (supported: is_causal=True, or local_window_size=({left}, 0))"
        )
    return True, left + 1


def _sequence_lengths(
    query: jax.Array, causal: bool, query_lengths, key_lengths
) -> jax.Array | None:
    """The number of tokens of each sequence that are not padding. None: all.

    Segment ids mask padded queries and keys together. That is exact if both have the same length,
    and if queries attend to earlier keys only.
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
        raise UserError(
            f"invalid query_seq_lengths {lengths.dtype}{lengths.shape}: expected int32 of shape ({batch},)"
        )
    return lengths


def _are_equal(a, b) -> bool:
    if a is b:
        return True
    if a is None or b is None or isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return False  # the values of traced arrays are unknown
    return np.array_equal(np.asarray(a), np.asarray(b))
