"""Entry points: `attend` is the public API, `make` builds the attention function that models call."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxlc.attention import all_gather, hybrid, ring, ulysses
from jaxlc.attention.choose import KernelSelection, choose_kernel
from jaxlc.attention.contract import AttentionProblem, AttentionSpec, Masks
from jaxlc.attention.strategy import ShardedQKV
from jaxlc.config import AttentionConfig
from jaxlc.core import scopes
from jaxlc.core.axes import BATCH_AXES, CONTEXT, DATA, FSDP, TENSOR
from jaxlc.core.errors import UserError
from jaxlc.sharding.layout import natural_order, zigzag_order
from jaxlc.sharding.mesh import split_context


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
    config: AttentionConfig, mesh: Mesh, *, head_dim: int, dtype, packed: bool, value_dim: int | None = None
) -> KernelSelection:
    """The kernel that `make(config, mesh)` calls for such arrays, and the reason. Raises as `choose_kernel`.

    Args:
      head_dim: head dim of queries and keys.
      dtype: dtype of q, k and v.
      packed: whether the call has explicit positions and segment ids.
      value_dim: head dim of values. None: equal to head_dim.
    """
    strategy = STRATEGIES[_known_strategy(config.strategy)]
    device = mesh.devices.flat[0]
    implicit_positions = strategy.implicit_positions_in_windows if config.window else strategy.implicit_positions
    problem = AttentionProblem(
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", None),
        dtype=jnp.dtype(dtype).name,
        head_dim=head_dim,
        value_dim=value_dim or head_dim,
        window=config.window or None,
        implicit_positions=implicit_positions and not packed,
    )
    return choose_kernel(config.kernel, problem)


def make(config: AttentionConfig, mesh: Mesh, *, causal: bool = True, scale: float | None = None) -> Attend:
    """Attention over a sequence split on the mesh: global arrays, tokens in layout order.

    Returns:
      `attend(q_BTNH, k_BSKH, v_BSKH, positions_BT, segments_BT) -> (out_BTNH, lse_BNT float32)`, to be called under
      `jit`. positions and segments are int32, in the same layout order. segments may be None: each sequence is one
      document. Then positions may be None too: they follow from the layout. B is split over data and fsdp, T over
      context, N over tensor. Where tensor exceeds K, key/value heads are repeated here, outside `shard_map`, so that
      their gradients are summed.
    """
    strategy = STRATEGIES[_known_strategy(config.strategy)]
    spec = AttentionSpec(
        causal=causal,
        window=config.window or None,
        scale=scale,
        query_block_tokens=config.query_block_tokens,
        key_block_tokens=config.key_block_tokens,
    )
    tensor = mesh.shape[TENSOR]
    split_mesh, ranks = split_context(mesh, config.ulysses_degree if config.strategy == "hybrid" else None)
    context = tuple(split.axis for split in ranks)
    tokens = PartitionSpec(BATCH_AXES, context)
    heads = PartitionSpec(BATCH_AXES, context, TENSOR, None)
    results = heads, PartitionSpec(BATCH_AXES, TENSOR, context)

    def attend(q_BTNH, k_BSKH, v_BSKH, positions_BT, segments_BT):
        kernel = choose(
            config, mesh, head_dim=q_BTNH.shape[-1], value_dim=v_BSKH.shape[-1], dtype=q_BTNH.dtype,
            packed=segments_BT is not None or (causal and positions_BT is not None),
        ).kernel  # fmt: skip

        @jax.named_scope(scopes.CORE_ATTENTION)
        def local(q_btnH, k_bskH, v_bskH, *positions_and_segments):
            # Masks are the same in every layer. Differentiating a scan over layers would hoist the dense masks of all
            # blocks out of the loop: T x S entries. The barrier ties them to the queries, so they are computed inside
            # the loop, block by block.
            q_btnH, masks = lax.optimization_barrier((q_btnH, Masks.self_attention(*positions_and_segments)))
            return strategy.attend(ShardedQKV(q_btnH, k_bskH, v_bskH, masks), kernel, spec, *ranks)

        k_BSKH, v_BSKH = (repeat_heads(x, tensor) for x in (k_BSKH, v_BSKH))
        in_specs = (heads, heads, heads, *(None if x is None else tokens for x in (positions_BT, segments_BT)))
        # check_vma: values in custom_vjp rules and in Pallas interpret mode have no tracked variance. Every operand
        # varies over every axis here, so the tracking is not needed.
        split = jax.shard_map(local, mesh=split_mesh, in_specs=in_specs, out_specs=results, check_vma=False)
        return split(q_BTNH, k_BSKH, v_BSKH, positions_BT, segments_BT)

    return attend


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    mesh: Mesh,
    strategy: str = "ring",
    kernel: str = "auto",
    causal: bool = True,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    ulysses_ranks: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Exact attention over a sequence split on `mesh`; arrays in natural token order. Works under `jit` and `grad`.

    Args:
      q_BTNH: queries, any float dtype. N must be a multiple of K.
      k_BSKH, v_BSKH: keys and values, S == T.
      mesh: a mesh with the axes data, fsdp, context and tensor, all of type Auto.
      strategy: how the sequence is split over context: "ring", "all_gather", "ulysses" or "hybrid".
      kernel: "auto", or the name of a kernel, which then never falls back to another one.
      causal: whether a query attends to its own and earlier positions only.
      window: a query attends to itself and the window - 1 tokens before it; requires causal. None: all earlier tokens.
      segment_ids: [B, T] int32. Tokens attend within their own segment only; 0 is padding. None: one segment.
      ulysses_ranks: for "hybrid" only: number of neighboring ranks that exchange heads. The ring has the size
        context / ulysses_ranks.
      scale: multiplies q . k. None: 1/sqrt(H).
    Returns:
      out_BTNH in q's dtype, in natural token order.
    Raises:
      UserError: a shape does not split over the mesh, or the strategy or kernel is unknown.
      Unsupported: the strategy or kernel does not support the problem; the message has the value and the limit.
    """
    _check_shapes(q_BTNH, k_BSKH, v_BSKH, segment_ids, mesh)
    if any(axis_type != AxisType.Auto for axis_type in mesh.axis_types):
        raise UserError(
            "the mesh has Explicit or Manual axes (the default of jax.make_mesh); create it with"
            " axis_types=(jax.sharding.AxisType.Auto,) * 4, or with jaxlc.sharding.mesh.make_mesh"
        )
    if window is not None and (window < 1 or not causal):
        raise UserError(
            f"invalid window={window} with causal={causal}: expected window of at least 1 token, and causal=True"
        )
    if ulysses_ranks is not None and strategy != "hybrid":
        raise UserError(
            f"invalid ulysses_ranks={ulysses_ranks} for strategy {strategy!r}: expected None unless strategy='hybrid'"
        )
    config = AttentionConfig(
        strategy=_known_strategy(strategy), kernel=kernel, window=window or 0, ulysses_degree=ulysses_ranks or 1
    )
    return _attend(q_BTNH, k_BSKH, v_BSKH, segment_ids, config, mesh, causal, scale)


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _attend(q_BTNH, k_BSKH, v_BSKH, segments_BT, config, mesh, causal, scale):
    order = zigzag_order(q_BTNH.shape[1], mesh.shape[CONTEXT])
    q_BTNH, k_BSKH, v_BSKH, segments_BT = (
        None if x is None else x[:, order] for x in (q_BTNH, k_BSKH, v_BSKH, segments_BT)
    )
    positions_BT = None
    if segments_BT is not None:
        positions_BT = jnp.broadcast_to(jnp.asarray(order, jnp.int32), segments_BT.shape)
    out_BTNH, _ = make(config, mesh, causal=causal, scale=scale)(q_BTNH, k_BSKH, v_BSKH, positions_BT, segments_BT)
    return out_BTNH[:, natural_order(order)]


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


def _check_shapes(q_BTNH, k_BSKH, v_BSKH, segments_BT, mesh: Mesh) -> None:
    batch, num_tokens, num_heads, head_dim = q_BTNH.shape
    num_kv_heads = k_BSKH.shape[2]
    batch_ranks, context, tensor = mesh.shape[DATA] * mesh.shape[FSDP], mesh.shape[CONTEXT], mesh.shape[TENSOR]
    if k_BSKH.shape[:2] != (batch, num_tokens) or v_BSKH.shape[:3] != k_BSKH.shape[:3] or k_BSKH.shape[3] != head_dim:
        shapes = f"q {q_BTNH.shape}, k {k_BSKH.shape} and v {v_BSKH.shape}"
        raise UserError(f"invalid shapes {shapes}: expected q [B, T, N, H], k and v [B, T, K, H]")
    if segments_BT is not None and segments_BT.shape != (batch, num_tokens):
        raise UserError(f"invalid shape {segments_BT.shape} for segment_ids: expected [B, T] = {(batch, num_tokens)}")
    if num_heads % num_kv_heads:
        raise UserError(f"{num_heads} query heads are not a multiple of {num_kv_heads} key/value heads")
    if num_heads % tensor or (num_kv_heads % tensor and tensor % num_kv_heads):
        raise UserError(f"{num_heads} query and {num_kv_heads} key/value heads do not split over tensor={tensor}")
    if batch % batch_ranks:
        raise UserError(
            f"a batch of {batch} does not split over data x fsdp = {batch_ranks}; use a multiple of {batch_ranks}"
        )
    if num_tokens % (2 * context):
        raise UserError(f"{num_tokens} tokens do not split over context={context}; use a multiple of {2 * context}")
