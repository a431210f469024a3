"""Entry points: `attend` is the public API, `make` builds the attention function that models call."""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxlc.attention import all_gather, hybrid, ring, ulysses
from jaxlc.attention.choose import KernelSelection, choose_kernel
from jaxlc.attention.contract import AttentionProblem, AttentionSpec, Kernel, Masks
from jaxlc.attention.mesh_axes import (
    DEFAULT_AXES,
    AttentionAxes,
    check_shapes,
    check_split,
    is_manual,
    resolve_axes,
)
from jaxlc.attention.reorder import to_natural, to_zigzag
from jaxlc.attention.strategy import ShardedQKV
from jaxlc.config import AttentionConfig
from jaxlc.core import scopes
from jaxlc.core.axes import CONTEXT
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.sharding.mesh import Ranks, split_context

TokenOrder = Literal["natural", "zigzag"]


class Strategy(NamedTuple):
    """A way to split a sequence over the context axis."""

    attend: Callable  # runs inside `shard_map`; see strategy.py
    implicit_positions: bool  # without packed documents, its kernel calls have implicit positions
    implicit_positions_in_windows: bool = False  # with sliding windows, too


STRATEGIES: dict[str, Strategy] = {
    "ring": Strategy(ring.attend, implicit_positions=True),
    "all_gather": Strategy(all_gather.attend, implicit_positions=False),
    "ulysses": Strategy(ulysses.attend, implicit_positions=True, implicit_positions_in_windows=True),
    "hybrid": Strategy(hybrid.attend, implicit_positions=True),
}

Attend = Callable[..., tuple[jax.Array, jax.Array]]


def choose(
    config: AttentionConfig,
    mesh: Mesh | None,
    *,
    head_dim: int,
    dtype,
    packed: bool,
    window: int | None = None,
    value_dim: int | None = None,
) -> KernelSelection:
    """The kernel that `make(config, mesh, window=window)` calls for such arrays, and the reason.

    Args:
      mesh: its first device decides. None: `jax.devices()[0]`.
      head_dim: head dim of queries and keys.
      dtype: dtype of q, k and v.
      packed: whether the call has explicit positions and segment ids.
      window: of `make`.
      value_dim: head dim of values. None: equal to head_dim.
    Raises:
      UserError, Unsupported: as `choose_kernel`.
    """
    strategy = STRATEGIES[_known_strategy(config.strategy)]
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    implicit_positions = strategy.implicit_positions_in_windows if window else strategy.implicit_positions
    problem = AttentionProblem(
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", None),
        dtype=jnp.dtype(dtype).name,
        head_dim=head_dim,
        value_dim=value_dim or head_dim,
        window=window,
        implicit_positions=implicit_positions and not packed,
    )
    return choose_kernel(config.kernel, problem)


def make(
    config: AttentionConfig,
    mesh: Mesh,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    axes: AttentionAxes = DEFAULT_AXES,
    token_order: TokenOrder = "zigzag",
) -> Attend:
    """Attention over a sequence split on the mesh, as a function of global arrays.

    Args:
      window: a query attends to itself and the window - 1 tokens before it; requires causal. None: all earlier tokens.
      axes: the axes of the mesh that split the batch, the sequence and the heads.
      token_order: the order of the tokens of all arguments and results; see `attend`.
    Returns:
      `attend(q_BTNH, k_BSKH, v_BSKH, positions_BT, segments_BT) -> (out_BTNH, lse_BNT float32)`, to be called under
      `jit`. positions and segments are int32, in the same token order. segments may be None: each sequence is one
      document. positions may be None: they follow from the token order. Where the ranks of the head axis exceed K,
      key/value heads are repeated here, outside `shard_map`, so that their gradients are summed.
    Raises:
      UserError: the strategy is unknown, or `config.ulysses_degree` does not divide the context axis.
    """
    _known_strategy(config.strategy)
    inner = config.ulysses_degree if config.strategy == "hybrid" else None
    split_mesh, ranks = split_context(mesh, inner, axes.context)
    tokens, heads, lse = axes.specs(tuple(split.axis for split in ranks))
    num_head_ranks = axes.num_head_ranks(mesh)

    def attend(q_BTNH, k_BSKH, v_BSKH, positions_BT, segments_BT):
        kernel = choose(
            config, mesh, head_dim=q_BTNH.shape[-1], value_dim=v_BSKH.shape[-1], dtype=q_BTNH.dtype,
            packed=segments_BT is not None or (causal and positions_BT is not None), window=window,
        ).kernel  # fmt: skip
        local = functools.partial(
            _attend_shard,
            config=config,
            kernel=kernel,
            causal=causal,
            window=window,
            scale=scale,
            ranks=ranks,
            token_order=token_order,
        )
        k_BSKH, v_BSKH = (repeat_heads(x, num_head_ranks) for x in (k_BSKH, v_BSKH))
        in_specs = (heads, heads, heads, *(None if x is None else tokens for x in (positions_BT, segments_BT)))
        # check_vma: values in custom_vjp rules and in Pallas interpret mode have no tracked variance. Every operand
        # varies over every axis here, so the tracking is not needed.
        split = jax.shard_map(local, mesh=split_mesh, in_specs=in_specs, out_specs=(heads, lse), check_vma=False)
        with _current_mesh(split_mesh):
            return split(q_BTNH, k_BSKH, v_BSKH, positions_BT, segments_BT)

    return attend


def _current_mesh(mesh: Mesh) -> AbstractContextManager:
    """Allows `shard_map` over `mesh` where `jax.set_mesh` has set another mesh of the same devices."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


@jax.named_scope(scopes.CORE_ATTENTION)
def _attend_shard(
    q_btnH: jax.Array,
    k_bskH: jax.Array,
    v_bskH: jax.Array,
    positions_bt: jax.Array | None,
    segments_bt: jax.Array | None,
    *,
    config: AttentionConfig,
    kernel: Kernel,
    causal: bool,
    window: int | None,
    scale: float | None,
    ranks: tuple[Ranks, ...],
    token_order: TokenOrder,
) -> tuple[jax.Array, jax.Array]:
    """(out_btnH, lse_bnt float32) of this rank's shard; runs inside `shard_map`. See `make` and `attend`."""
    spec = AttentionSpec(
        causal=causal,
        window=window,
        scale=scale,
        query_block_tokens=config.query_block_tokens,
        key_block_tokens=config.key_block_tokens,
    )
    all_ranks = Ranks(tuple(split.axis for split in ranks), math.prod(split.size for split in ranks))
    if token_order == "natural":
        q_btnH, k_bskH, v_bskH, positions_bt, segments_bt = (
            None if x is None else to_zigzag(x, all_ranks) for x in (q_btnH, k_bskH, v_bskH, positions_bt, segments_bt)
        )
    if segments_bt is not None and positions_bt is None:
        positions_bt = all_ranks.positions(*segments_bt.shape)
    # Masks are the same in every layer. Differentiating a scan over layers would hoist the dense masks of all blocks
    # out of the loop: T x S entries. The barrier ties them to the queries, so they are computed inside the loop, block
    # by block.
    q_btnH, masks = lax.optimization_barrier((q_btnH, Masks.self_attention(positions_bt, segments_bt)))
    strategy = STRATEGIES[config.strategy]
    with jax.named_scope(scopes.SLIDING_WINDOW) if window else nullcontext():
        out_btnH, lse_bnt = strategy.attend(ShardedQKV(q_btnH, k_bskH, v_bskH, masks), kernel, spec, *ranks)
    if token_order == "natural":
        return to_natural(out_btnH, all_ranks), to_natural(lse_bnt, all_ranks, dim=2)
    return out_btnH, lse_bnt


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
      segment_ids: [B, T] int32. Tokens attend within their own segment only; 0 is padding. None: one segment.
      ulysses_ranks: for "hybrid": number of neighboring ranks that exchange heads, a divisor of the context size.
      scale: multiplies q . k. None: 1/sqrt(H).
      context_axis, batch_axes, head_axis: names of the mesh axes that split T, B and N. None: "data" and "fsdp" for
        B, "tensor" for N, as far as the mesh has them. Arrays are replicated over other axes.
      token_order: of all arguments and results. "natural", or "zigzag" (`zigzag_order`), which saves an exchange.
      return_lse: also return the log-sum-exp of each query's scores, which is differentiable, too.
    Returns:
      out_BTNH in q's dtype. With return_lse: (out_BTNH, lse_BNT float32); of a fully masked query, (0, -inf).
    Raises:
      UserError: a shape does not split over the mesh, or a name is unknown.
      Unsupported: the strategy or kernel does not support the problem; the message has the value and the limit.
    """
    call = _checked_call(mesh, strategy, kernel, causal, window, ulysses_ranks, scale, token_order)
    check_shapes(q_BTNH, k_BSKH, v_BSKH, segment_ids)
    if is_manual(context_axis, q_BTNH):
        results = _attend_local(q_BTNH, k_BSKH, v_BSKH, segment_ids, call, context_axis)
    else:
        axes = resolve_axes(mesh, context_axis, batch_axes, head_axis)
        check_split(q_BTNH, k_BSKH, mesh, axes)
        results = _attend_global(q_BTNH, k_BSKH, v_BSKH, segment_ids, call, axes)
    return results if return_lse else results[0]


class _Call(NamedTuple):
    """The static arguments of `attend`; hashable."""

    mesh: Mesh | None
    config: AttentionConfig
    causal: bool
    window: int | None
    scale: float | None
    token_order: TokenOrder


def _checked_call(mesh, strategy, kernel, causal, window, ulysses_ranks, scale, token_order) -> _Call:
    if window is not None and (window < 1 or not causal):
        raise UserError(
            f"invalid window={window} with causal={causal}: expected window of at least 1 token, and causal=True"
        )
    if ulysses_ranks is not None and strategy != "hybrid":
        raise UserError(
            f"invalid ulysses_ranks={ulysses_ranks} for strategy {strategy!r}: expected None unless strategy='hybrid'"
        )
    if token_order not in get_args(TokenOrder):
        raise UserError(f"invalid token_order={token_order!r}: expected one of {', '.join(get_args(TokenOrder))}")
    config = AttentionConfig(strategy=_known_strategy(strategy), kernel=kernel, ulysses_degree=ulysses_ranks or 1)
    return _Call(mesh, config, causal, window, scale, token_order)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _attend_global(q_BTNH, k_BSKH, v_BSKH, segments_BT, call: _Call, axes: AttentionAxes):
    attend = make(
        call.config, call.mesh, causal=call.causal, window=call.window, scale=call.scale, axes=axes,
        token_order=call.token_order,
    )  # fmt: skip
    return attend(q_BTNH, k_BSKH, v_BSKH, None, segments_BT)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _attend_local(q_btnH, k_bskH, v_bskH, segments_bt, call: _Call, context_axis: str):
    """`attend` inside the caller's `shard_map`, where the context axis is Manual."""
    if call.config.strategy == "hybrid":
        raise Unsupported("unsupported: strategy hybrid inside shard_map (supported: ring, all_gather, ulysses)")
    if q_btnH.shape[1] % 2:
        raise UserError(
            f"a local shard of {q_btnH.shape[1]} tokens has no two equal chunks; use an even number of tokens"
        )
    kernel = choose(
        call.config, call.mesh, head_dim=q_btnH.shape[-1], value_dim=v_bskH.shape[-1], dtype=q_btnH.dtype,
        packed=segments_bt is not None, window=call.window,
    ).kernel  # fmt: skip
    return _attend_shard(
        q_btnH, k_bskH, v_bskH, None, segments_bt, config=call.config, kernel=kernel, causal=call.causal,
        window=call.window, scale=call.scale, ranks=(Ranks(context_axis, lax.axis_size(context_axis)),),
        token_order=call.token_order,
    )  # fmt: skip


def repeat_heads(x_BSKH: jax.Array, tensor: int) -> jax.Array:
    """Repeats key/value heads up to the number of tensor ranks, if there are fewer."""
    num_kv_heads = x_BSKH.shape[2]
    if num_kv_heads % tensor == 0:
        return x_BSKH
    return jnp.repeat(x_BSKH, tensor // num_kv_heads, axis=2)


def _known_strategy(name: str) -> str:
    if name not in STRATEGIES:
        raise UserError(f"unknown attention strategy {name!r}; known: {', '.join(sorted(STRATEGIES))}")
    return name
