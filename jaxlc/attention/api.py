"""The doors: `make` builds the attention a model calls, `attend` is for people and notebooks."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxlc.attention import all_gather, blockwise, reference, ring, ulysses
from jaxlc.attention.contract import AttentionSpec, Kernel, Masks
from jaxlc.config import AttentionConfig
from jaxlc.core.axes import BATCH_AXES, CONTEXT, DATA, FSDP, TENSOR
from jaxlc.core.errors import UserError
from jaxlc.sharding.layout import natural_order, zigzag_order

KERNELS: dict[str, Kernel] = {"blockwise": blockwise, "reference": reference}
STRATEGIES: dict[str, Callable] = {
    "ring": ring.attend,
    "all_gather": all_gather.attend,
    "ulysses": ulysses.attend,
}

Attend = Callable[..., tuple[jax.Array, jax.Array]]


def choose_kernel(name: str, platform: str) -> tuple[str, str]:
    """The kernel that `name` means on `platform`, and a sentence that says why."""
    if name != "auto":
        return _known(name, KERNELS, "kernel"), "named in the config"
    return "blockwise", f"auto: the portable XLA kernel runs on {platform}; no vendor kernel is wired in yet"


def make(config: AttentionConfig, mesh: Mesh, *, causal: bool = True, scale: float | None = None) -> Attend:
    """Attention over a sequence split on the mesh, in layout order, on global arrays.

    Returns:
      `attend(q_BTNH, k_BSKH, v_BSKH, positions_BT, segments_BT) -> (out_BTNH, lse_BNT float32)`, to be called under
      `jit`. positions and segments are int32 and travel in the same layout order; segments may be None. B is split
      over data and fsdp, T over context, N over tensor. Where tensor exceeds K, key/value heads are repeated here,
      outside `shard_map`, so that their gradients are summed.
    """
    kernel_name, _ = choose_kernel(config.kernel, mesh.devices.flat[0].platform)
    spec = AttentionSpec(
        causal=causal,
        scale=scale,
        query_block_tokens=config.query_block_tokens,
        key_block_tokens=config.key_block_tokens,
    )
    strategy = STRATEGIES[_known(config.strategy, STRATEGIES, "strategy")]
    num_ranks, tensor = mesh.shape[CONTEXT], mesh.shape[TENSOR]
    tokens = PartitionSpec(BATCH_AXES, CONTEXT)
    heads = PartitionSpec(BATCH_AXES, CONTEXT, TENSOR, None)
    results = heads, PartitionSpec(BATCH_AXES, TENSOR, CONTEXT)

    def local(q_btnH, k_bskH, v_bskH, positions_bt, segments_bt):
        # Masks are the same in every layer, and differentiating a scan over layers takes what is the same out of the
        # loop: all tiles of all masks, T x S numbers. Tied to the queries, they stay inside, one tile at a time.
        q_btnH, positions_bt, segments_bt = lax.optimization_barrier((q_btnH, positions_bt, segments_bt))
        masks = Masks.of_row(positions_bt, segments_bt)
        return strategy(q_btnH, k_bskH, v_bskH, masks, KERNELS[kernel_name], spec, num_ranks)

    def attend(q_BTNH, k_BSKH, v_BSKH, positions_BT, segments_BT):
        k_BSKH, v_BSKH = (_repeat_heads(x, tensor) for x in (k_BSKH, v_BSKH))
        in_specs = (heads, heads, heads, tokens, None if segments_BT is None else tokens)
        # check_vma: custom_vjp rules and Pallas interpret mode hold values whose variance is not tracked; every
        # operand varies over every axis here, so nothing needs the tracking.
        split = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=results, check_vma=False)
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
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Exact attention over a sequence split on `mesh`; arrays in natural order. Works under `jit` and `grad`.

    Args:
      q_BTNH: queries; N a multiple of K. Any float dtype.
      k_BSKH, v_BSKH: keys and values, S == T.
      mesh: has the axes data, fsdp, context and tensor, of type Auto.
      strategy: how the sequence is split over context: "ring", "all_gather" or "ulysses".
      kernel: "auto", or one by name, which then never falls back.
      causal: a query sees its own and earlier positions only.
      segment_ids: [B, T] int32; tokens see their own segment only, and 0 is padding. None: one segment.
      scale: multiplies q . k; None is 1/sqrt(H).
    Returns:
      out_BTNH in q's dtype, in natural order.
    Raises:
      UserError: a shape that does not split over the mesh, or an unknown strategy or kernel; says which.
      NotImplementedError: the strategy cannot do what is asked; names the limit and the value.
    """
    _check_shapes(q_BTNH, k_BSKH, v_BSKH, segment_ids, mesh)
    if any(axis_type != AxisType.Auto for axis_type in mesh.axis_types):
        raise UserError(
            "the mesh has Explicit or Manual axes, as jax.make_mesh makes them unless told otherwise; make it with"
            " axis_types=(jax.sharding.AxisType.Auto,) * 4, or with jaxlc.sharding.mesh.make_mesh"
        )
    config = AttentionConfig(strategy=_known(strategy, STRATEGIES, "strategy"), kernel=kernel)
    choose_kernel(kernel, "any")
    return _attend(q_BTNH, k_BSKH, v_BSKH, segment_ids, config, mesh, causal, scale)


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _attend(q_BTNH, k_BSKH, v_BSKH, segments_BT, config, mesh, causal, scale):
    batch, num_tokens = q_BTNH.shape[:2]
    order = zigzag_order(num_tokens, mesh.shape[CONTEXT])
    positions_BT = jnp.broadcast_to(jnp.asarray(order, jnp.int32), (batch, num_tokens))
    in_layout = (None if x is None else x[:, order] for x in (q_BTNH, k_BSKH, v_BSKH))
    segments_BT = None if segments_BT is None else segments_BT[:, order]
    out_BTNH, _ = make(config, mesh, causal=causal, scale=scale)(*in_layout, positions_BT, segments_BT)
    return out_BTNH[:, natural_order(order)]


def _repeat_heads(x_BSKH: jax.Array, tensor: int) -> jax.Array:
    num_kv_heads = x_BSKH.shape[2]
    if num_kv_heads % tensor == 0:
        return x_BSKH
    return jnp.repeat(x_BSKH, tensor // num_kv_heads, axis=2)


def _known(name: str, table: dict, what: str) -> str:
    if name not in table:
        raise UserError(f"there is no attention {what} {name!r}; known: {', '.join(sorted(table))}")
    return name


def _check_shapes(q_BTNH, k_BSKH, v_BSKH, segments_BT, mesh: Mesh) -> None:
    batch, num_tokens, num_heads, head_dim = q_BTNH.shape
    num_kv_heads = k_BSKH.shape[2]
    rows, context, tensor = mesh.shape[DATA] * mesh.shape[FSDP], mesh.shape[CONTEXT], mesh.shape[TENSOR]
    if k_BSKH.shape[:2] != (batch, num_tokens) or v_BSKH.shape[:3] != k_BSKH.shape[:3] or k_BSKH.shape[3] != head_dim:
        shapes = f"q {q_BTNH.shape}, k {k_BSKH.shape} and v {v_BSKH.shape}"
        raise UserError(f"{shapes} do not match; give q as [B, T, N, H], k and v as [B, T, K, H]")
    if segments_BT is not None and segments_BT.shape != (batch, num_tokens):
        raise UserError(f"segment_ids are {segments_BT.shape} and must be [B, T] = {(batch, num_tokens)}")
    if num_heads % num_kv_heads:
        raise UserError(f"{num_heads} query heads are not a multiple of {num_kv_heads} key/value heads")
    if num_heads % tensor or (num_kv_heads % tensor and tensor % num_kv_heads):
        raise UserError(f"{num_heads} query and {num_kv_heads} key/value heads do not split over tensor={tensor}")
    if batch % rows:
        raise UserError(f"{batch} rows do not split over data x fsdp = {rows}; use a multiple of {rows}")
    if num_tokens % (2 * context):
        raise UserError(f"{num_tokens} tokens do not split over context={context}; use a multiple of {2 * context}")
