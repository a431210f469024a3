"""Entry points: `attend` is the public API, `make` builds the attention function that models call."""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jaxlc.attention import all_gather, hybrid, ring, ulysses
from jaxlc.attention.choose import KernelSelection, choose_kernel
from jaxlc.attention.contract import AttentionProblem, AttentionSpec, Kernel
from jaxlc.attention.key_ranges import TokenInfo
from jaxlc.attention.mesh_axes import (
    DEFAULT_AXES,
    AttentionAxes,
    check_contiguous,
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

    attend: Callable  # this function and the next run inside `shard_map`; see strategy.py
    prepare: Callable
    ranges_specs: Callable  # `(spec, batch axes, *ranks)` -> the PartitionSpecs of the result of `prepare`
    implicit_positions: bool  # without packed documents, its kernel calls have implicit positions
    implicit_positions_in_windows: bool = False  # with sliding windows, too


STRATEGIES: dict[str, Strategy] = {
    "ring": Strategy(ring.attend, ring.prepare, ring.ranges_specs, implicit_positions=True),
    "all_gather": Strategy(all_gather.attend, all_gather.prepare, all_gather.ranges_specs, implicit_positions=False),
    "ulysses": Strategy(
        ulysses.attend,
        ulysses.prepare,
        ulysses.ranges_specs,
        implicit_positions=True,
        implicit_positions_in_windows=True,
    ),
    "hybrid": Strategy(hybrid.attend, hybrid.prepare, hybrid.ranges_specs, implicit_positions=True),
}


def choose(
    config: AttentionConfig,
    mesh: Mesh | None,
    *,
    head_dim: int,
    dtype,
    packed: bool,
    window: int | None = None,
    value_dim: int | None = None,
    num_elements: int = 0,
) -> KernelSelection:
    """The kernel that `make(config, mesh, window=window)` calls for such arrays, and the reason.

    Args:
      mesh: its first device decides. None: `jax.devices()[0]`.
      head_dim: head dim of queries and keys.
      dtype: dtype of q, k and v.
      packed: whether the call has key ranges.
      window: of `make`.
      value_dim: head dim of values. None: equal to head_dim.
      num_elements: of a device's shard of q. 0: unknown.
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
        document_ranges=packed and strategy.implicit_positions and window is None,
        num_elements=num_elements,
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
) -> "ShardedAttention":
    """Attention over a sequence split on the mesh, as functions of global arrays.

    Args:
      window: a query attends to itself and the window - 1 tokens before it; requires causal. None: all earlier tokens.
      axes: the axes of the mesh that split the batch, the sequence and the heads.
      token_order: the order of the tokens of all arguments and results; see `attend`.
    Raises:
      UserError: the strategy is unknown, or `config.ulysses_degree` does not divide the context axis.
    """
    _known_strategy(config.strategy)
    inner = config.ulysses_degree if config.strategy == "hybrid" else None
    split_mesh, ranks = split_context(mesh, inner, axes.context)
    spec = _spec(config, causal, window, scale)
    return ShardedAttention(
        config=config, mesh=mesh, split_mesh=split_mesh, ranks=ranks, spec=spec, axes=axes, token_order=token_order
    )


@dataclass(frozen=True, kw_only=True)
class ShardedAttention:
    """Attention over a sequence split on a mesh, to be called under `jit`; `make` builds it.

    The tokens of all arguments and results are in `token_order`.
    """

    config: AttentionConfig
    mesh: Mesh
    split_mesh: Mesh  # the mesh with the context axis split into `ranks`
    ranks: tuple[Ranks, ...]
    spec: AttentionSpec
    axes: AttentionAxes
    token_order: TokenOrder

    def prepare(self, positions_BT: jax.Array | None, segments_BT: jax.Array | None):
        """The mask of packed documents as key ranges, for all layers of a training step.

        Args:
          positions_BT: int32; count from the start of the sequence, or restart with each document. None: they follow
            from the token order.
          segments_BT: int32. Tokens attend within their own segment only, which is contiguous; 0 is padding. None: each
            sequence is one document.
        Returns:
          The `ranges` of a call, a tree of arrays; None if nothing is masked, or if the mask is implicit.
        """
        if segments_BT is None and (positions_BT is None or not self.spec.causal):
            return None
        tokens, _, _ = self.axes.specs(tuple(split.axis for split in self.ranks))
        local = functools.partial(
            _prepare_shard, config=self.config, spec=self.spec, ranks=self.ranks, token_order=self.token_order
        )
        specs = STRATEGIES[self.config.strategy].ranges_specs(self.spec, self.axes.batch, *self.ranks)
        in_specs = tuple(None if x is None else tokens for x in (positions_BT, segments_BT))
        return self._split(local, in_specs, specs)(positions_BT, segments_BT)

    def __call__(
        self, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, ranges=None
    ) -> tuple[jax.Array, jax.Array]:
        """(out_BTNH, lse_BNT float32).

        Where the ranks of the head axis exceed K, key/value heads are repeated here, outside `shard_map`, so that their
        gradients are summed.

        Args:
          ranges: of `prepare`. None: each sequence is one document.
        """
        _, heads, lse = self.axes.specs(tuple(split.axis for split in self.ranks))
        kernel = choose(
            self.config, self.mesh, head_dim=q_BTNH.shape[-1], value_dim=v_BSKH.shape[-1], dtype=q_BTNH.dtype,
            packed=ranges is not None, window=self.spec.window,
            num_elements=math.prod(NamedSharding(self.split_mesh, heads).shard_shape(q_BTNH.shape)),
        ).kernel  # fmt: skip
        local = functools.partial(
            _attend_shard,
            config=self.config,
            kernel=kernel,
            spec=self.spec,
            ranks=self.ranks,
            token_order=self.token_order,
        )
        num_head_ranks = self.axes.num_head_ranks(self.mesh)
        k_BSKH, v_BSKH = (repeat_heads(x, num_head_ranks) for x in (k_BSKH, v_BSKH))
        ranges_specs = None
        if ranges is not None:
            ranges_specs = STRATEGIES[self.config.strategy].ranges_specs(self.spec, self.axes.batch, *self.ranks)
        split = self._split(local, (heads, heads, heads, ranges_specs), (heads, lse))
        return split(q_BTNH, k_BSKH, v_BSKH, ranges)

    def _split(self, local: Callable, in_specs: tuple, out_specs) -> Callable:
        # check_vma: values in custom_vjp rules and in Pallas interpret mode have no tracked variance. Every operand
        # varies over every axis here, so the tracking is not needed.
        split = jax.shard_map(local, mesh=self.split_mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

        def call(*operands):
            with _current_mesh(self.split_mesh):
                return split(*operands)

        return call


def _current_mesh(mesh: Mesh) -> AbstractContextManager:
    """Allows `shard_map` over `mesh` where `jax.set_mesh` has set another mesh of the same devices."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


@jax.named_scope(scopes.CORE_ATTENTION)
def _prepare_shard(
    positions_bt: jax.Array | None,
    segments_bt: jax.Array | None,
    *,
    config: AttentionConfig,
    spec: AttentionSpec,
    ranks: tuple[Ranks, ...],
    token_order: TokenOrder,
):
    """The `ranges` of `_attend_shard`; runs inside `shard_map`. See `ShardedAttention.prepare`."""
    all_ranks = _as_one_axis(ranks)
    tokens = TokenInfo(positions_bt, segments_bt)
    if token_order == "natural":
        tokens = tokens.map(lambda x_bt: to_zigzag(x_bt, all_ranks))
    if positions_bt is None:
        tokens = tokens._replace(positions_BT=all_ranks.positions(*segments_bt.shape))
    return STRATEGIES[config.strategy].prepare(tokens, spec, *ranks)


@jax.named_scope(scopes.CORE_ATTENTION)
def _attend_shard(
    q_btnH: jax.Array,
    k_bskH: jax.Array,
    v_bskH: jax.Array,
    key_ranges,
    *,
    config: AttentionConfig,
    kernel: Kernel,
    spec: AttentionSpec,
    ranks: tuple[Ranks, ...],
    token_order: TokenOrder,
) -> tuple[jax.Array, jax.Array]:
    """(out_btnH, lse_bnt float32) of this rank's shard; runs inside `shard_map`. See `ShardedAttention`."""
    all_ranks = _as_one_axis(ranks)
    if token_order == "natural":
        q_btnH, k_bskH, v_bskH = (to_zigzag(x, all_ranks) for x in (q_btnH, k_bskH, v_bskH))
    # Ranges are the same in every layer. Differentiating a scan over layers would hoist the dense masks of all blocks
    # out of the loop: T x S entries. The barrier ties them to the queries, so they are computed inside the loop, block
    # by block.
    q_btnH, key_ranges = lax.optimization_barrier((q_btnH, key_ranges))
    strategy = STRATEGIES[config.strategy]
    with jax.named_scope(scopes.SLIDING_WINDOW) if spec.window else nullcontext():
        out_btnH, lse_bnt = strategy.attend(ShardedQKV(q_btnH, k_bskH, v_bskH, key_ranges), kernel, spec, *ranks)
    if token_order == "natural":
        return to_natural(out_btnH, all_ranks), to_natural(lse_bnt, all_ranks, dim=2)
    return out_btnH, lse_bnt


def _as_one_axis(ranks: tuple[Ranks, ...]) -> Ranks:
    return Ranks(tuple(split.axis for split in ranks), math.prod(split.size for split in ranks))


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
      segment_ids: [B, T] int32. Tokens attend within their own segment only; 0 is padding. The tokens of a segment must
        be contiguous in natural order. This is checked for concrete arrays; traced arrays, as under `jit`, are not
        checked, and the results for other segments are undefined. None: one segment.
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
      Unsupported: the strategy or kernel does not support the problem; the message has the value and the limit. Or a
        segment is not contiguous.
    """
    call = _checked_call(mesh, strategy, kernel, causal, window, ulysses_ranks, scale, token_order)
    check_shapes(q_BTNH, k_BSKH, v_BSKH, segment_ids)
    if is_manual(context_axis, q_BTNH):
        results = _attend_local(q_BTNH, k_BSKH, v_BSKH, segment_ids, call, context_axis)
    else:
        axes = resolve_axes(mesh, context_axis, batch_axes, head_axis)
        check_split(q_BTNH, k_BSKH, mesh, axes)
        if segment_ids is not None:
            check_contiguous(segment_ids, mesh.shape[context_axis] if token_order == "zigzag" else 1)
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
    return attend(q_BTNH, k_BSKH, v_BSKH, attend.prepare(None, segments_BT))


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
        packed=segments_bt is not None, window=call.window, num_elements=q_btnH.size,
    ).kernel  # fmt: skip
    settings = dict(
        config=call.config,
        spec=_spec(call.config, call.causal, call.window, call.scale),
        ranks=(Ranks(context_axis, lax.axis_size(context_axis)),),
        token_order=call.token_order,
    )
    ranges = None if segments_bt is None else _prepare_shard(None, segments_bt, **settings)
    return _attend_shard(q_btnH, k_bskH, v_bskH, ranges, kernel=kernel, **settings)


def _spec(config: AttentionConfig, causal: bool, window: int | None, scale: float | None) -> AttentionSpec:
    return AttentionSpec(
        causal=causal,
        window=window,
        scale=scale,
        query_block_tokens=config.query_block_tokens,
        key_block_tokens=config.key_block_tokens,
    )


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
