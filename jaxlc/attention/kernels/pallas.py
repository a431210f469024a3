"""A GPU kernel for every mask: causal, windows, any key ranges (Pallas on Triton;
FlashAttention-2).

Forward and backward skip fully masked blocks. On a CPU the kernel runs in Pallas' interpreter, for
tests only. JAX 0.11 deprecates the Triton backend of Pallas. It is imported where the kernel is
called, so that a program with another kernel never imports it.

Blocks: Triton's tensors have sizes that are powers of 2, and Triton does not check bounds. A block
that extends past the end of its array, in tokens or in head dim, is loaded and stored with a mask;
masked elements read as 0.

Forward (algorithm 1): one program per query block and head loops over the KV blocks that are not
fully masked. It keeps a running maximum, sum of exponentials and unnormalized output in registers.
Query heads that share a key/value head read it from the cache.

Backward (algorithm 2): one kernel for dQ, whose programs own query blocks, and one for dK and dV,
whose programs own KV blocks. Both compute the attention weights and their gradient: seven matrix
products instead of five. In return all sums are in registers, in a fixed order, without atomic
additions, so the results are bitwise reproducible. A program for dK and dV sums over the query
heads that share its key/value head.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxlc.attention.contract import (
    AttentionProblem,
    AttentionSpec,
    KeyRanges,
    KeysValues,
    OutLse,
    QueryResults,
)
from jaxlc.attention.key_ranges import (
    MAX_HEAD_DIM,
    MIN_BLOCK_TOKENS,
    BlockMask,
    Ranges,
    TuningParams,
    kv_block_ranges,
    query_block_ranges,
    rectangle_block_ranges,
    tuning_params,
)
from jaxlc.core import Unsupported

LOG2_E = math.log2(math.e)  # the hardware has exponentials to base 2 only
LN_2 = math.log(2.0)


def _triton() -> ModuleType:
    from jax.experimental.pallas import triton

    return triton


def check_devices(
    devices: Iterable[jax.Device], setting: str, alternative: str, excluded: Collection[str] = ()
) -> None:
    """Raises Unsupported if a device is a GPU that Triton's products do not support.

    Args:
      setting: of config.runtime, which selects the kernels.
      alternative: its value without them.
      excluded: compute capabilities that the kernels do not support.
    """
    but = f" but {', '.join(excluded)}" if excluded else ""
    for device in devices:
        capability = getattr(device, "compute_capability", None)  # a string; CPUs have none
        if capability is not None and (float(capability) < 8 or str(capability) in excluded):
            raise Unsupported(
                f"config.runtime.{setting}='pallas' needs GPUs of compute capability 8.0 or higher{but}, and"
                f" {device.device_kind} has {capability}; use --config.runtime.{setting}={alternative}"
            )


def run_kernel(
    kernel: Callable, operands: tuple, *, num_warps: int, num_stages: int, **options: Any
) -> Any:
    """Runs `kernel` by `pl.pallas_call`, compiled, or interpreted on a CPU; the lowering selects by
    its platform.
    """
    params = _triton().CompilerParams(num_warps=num_warps, num_stages=num_stages)

    def run(interpret: bool):
        return pl.pallas_call(kernel, compiler_params=params, interpret=interpret, **options)

    return lax.platform_dependent(*operands, cpu=run(interpret=True), default=run(interpret=False))


@dataclass(frozen=True, kw_only=True)
class KernelParams:
    """What a kernel computes besides its operands, and how it is compiled."""

    mask: BlockMask
    scale: float
    tuning: TuningParams

    def run(self, kernel: Callable, operands: tuple, **options: Any) -> Any:
        """`run_kernel` with these parameters; the first operands are q, k and v."""
        q_BTNH, _, v = operands[:3]
        return run_kernel(
            functools.partial(
                kernel,
                mask=self.mask,
                scale=self.scale,
                head_dim=q_BTNH.shape[-1],
                value_dim=v.shape[-1],
            ),
            operands,
            num_warps=self.tuning.num_warps,
            num_stages=self.tuning.num_stages,
            **options,
        )


def padded(width: int) -> int:
    """The width of a block whose rows have `width` elements: a power of 2, at least 16 for matrix
    products.
    """
    return max(16, pl.next_power_of_2(width))


def load(ref, first, *size: int) -> jax.Array:
    """The elements of a reference to one block, whose first row is row `first` of an array with
    `size`: (rows, width), or (rows,) for a block with one element per token.
    """
    inside = _inside(ref.shape, first, *size)
    return _triton().load(ref, mask=inside, other=None if inside is None else 0)


def store(ref, x: jax.Array, first, *size: int) -> None:
    _triton().store(ref, x, mask=_inside(ref.shape, first, *size))


def _inside_rows(block: int, first, num_rows: int) -> jax.Array | None:
    """Which rows of a block are inside the array. None: the block size divides the array, so all
    are.
    """
    return None if num_rows % block == 0 else first + jnp.arange(block) < num_rows


def _inside(shape: tuple[int, ...], first, num_rows: int, *width: int) -> jax.Array | None:
    rows = _inside_rows(shape[0], first, num_rows)
    if width == shape[1:]:
        return rows if rows is None or not width else jnp.broadcast_to(rows[:, None], shape)
    columns = jnp.broadcast_to((jnp.arange(shape[1]) < width[0])[None, :], shape)
    return columns if rows is None else columns & rows[:, None]


def load_mask(ranges: Ranges | None, first_T, first_S, mask: BlockMask, keys_first: bool = False):
    """The dense mask of one pair of blocks.

    Args:
      ranges: references to the key ranges of a whole row. None: the implicit mask.
      first_T, first_S: index of the first query and of the first key of the blocks.
      keys_first: return the transpose.
    Returns:
      bool [query_block, kv_block]. None: fully visible.
    """
    q_axis, k_axis = (0, 1) if keys_first else (1, 0)
    keys = jnp.expand_dims(first_S + jnp.arange(mask.kv_block, dtype=jnp.int32), k_axis)
    if ranges is None:
        start, end = mask.implicit_range(first_T + jnp.arange(mask.query_block, dtype=jnp.int32))
    else:  # queries past the end read as 0: an empty range
        start, end = (
            load(x.at[pl.ds(first_T, mask.query_block)], first_T, mask.num_queries) for x in ranges
        )
    dense_mask = None if end is None else keys < jnp.expand_dims(end, q_axis)
    if start is not None:
        dense_mask &= keys >= jnp.expand_dims(start, q_axis)
    is_key = _inside_rows(mask.kv_block, first_S, mask.num_keys)
    if dense_mask is not None or is_key is None:  # ranges contain no keys past the end
        return dense_mask
    shape = (mask.kv_block, mask.query_block) if keys_first else (mask.query_block, mask.kv_block)
    return jnp.broadcast_to(jnp.expand_dims(is_key, k_axis), shape)


def loop_over_blocks(blocks_ref, loop_body, carry):
    """`carry = loop_body(block, carry, masked)` over the blocks of all block ranges (see
    `attention.key_ranges`).
    """

    def one_range(index, carry):
        start, full, end = (blocks_ref[index, column] for column in range(3))
        carry = lax.fori_loop(start, full, functools.partial(loop_body, masked=True), carry)
        return lax.fori_loop(full, end, functools.partial(loop_body, masked=False), carry)

    return lax.fori_loop(0, blocks_ref.shape[0], one_range, carry)


def matmul(a: jax.Array, b: jax.Array, transpose_b: bool = False) -> jax.Array:
    """a b, or a b^T, with float32 sums. float32 operands are not rounded to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contracted = ((1,), (1 if transpose_b else 0,))
    return lax.dot_general(
        a, b, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def own_rows_spec(block_tokens: int, width: int) -> pl.BlockSpec:
    """The block spec of an operand [B, T, N, H] of which a program owns one block, for a grid
    (block, head, batch).
    """
    return pl.BlockSpec((None, block_tokens, None, padded(width)), lambda i, n, b: (b, i, n, 0))


def all_keys_spec(sizes: tuple[int, ...], heads_per_kv: int, width: int) -> pl.BlockSpec:
    """The block spec of all keys or values of a program's query head; the same grid.

    Args:
      sizes: (number of keys,), or (number of layers, number of keys).
    """
    zeros = (0,) * len(sizes)
    return pl.BlockSpec(
        (None, *sizes, None, padded(width)), lambda i, n, b: (b, *zeros, n // heads_per_kv, 0)
    )


def key_ranges_specs(ranges: Ranges | None):
    """Block specs of the key ranges of a whole row, for a grid (block, head, batch)."""
    return jax.tree.map(lambda x: pl.BlockSpec((None, x.shape[1]), lambda i, n, b: (b, 0)), ranges)


def block_ranges_spec(blocks: jax.Array) -> pl.BlockSpec:
    """The block spec of a program's block ranges; with an implicit mask, the whole batch shares
    them.
    """
    is_shared = blocks.shape[0] == 1
    return pl.BlockSpec(
        (None, None, *blocks.shape[2:]), lambda i, n, b: (0 if is_shared else b, i, 0, 0)
    )


class QueryStats(NamedTuple):
    """Per-query inputs of the backward pass; inside a kernel, references to them."""

    dout_BTNH: jax.Array  # in the dtype of q, k and v, for matrix products with them
    lse2_BNT: jax.Array  # float32: lse over all keys, to base 2; 0 for fully masked rows
    delta_BNT: jax.Array  # float32: sum_H(dout out) - dlse


def flash_dq(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    ranges: Ranges | None,
    stats: QueryStats,
    params: KernelParams,
) -> jax.Array:
    """Returns the contribution of these keys to dq_BTNH, float32."""
    mask = params.mask
    batch, num_queries, num_heads, head_dim = q_BTNH.shape
    _, num_keys, num_kv_heads, value_dim = v_BSKH.shape
    heads_per_kv = num_heads // num_kv_heads
    blocks = kv_block_ranges(ranges, mask)

    own_rows = functools.partial(own_rows_spec, mask.query_block)
    all_keys = functools.partial(all_keys_spec, (num_keys,), heads_per_kv)
    own_1d = pl.BlockSpec((None, None, mask.query_block), lambda i, n, b: (b, n, i))
    return params.run(
        _dq_kernel, (q_BTNH, k_BSKH, v_BSKH, ranges, stats, blocks),
        grid=(pl.cdiv(num_queries, mask.query_block), num_heads, batch),
        in_specs=[
            own_rows(head_dim), all_keys(head_dim), all_keys(value_dim), key_ranges_specs(ranges),
            QueryStats(own_rows(value_dim), own_1d, own_1d), block_ranges_spec(blocks),
        ],
        out_specs=own_rows(head_dim),
        out_shape=jax.ShapeDtypeStruct(q_BTNH.shape, jnp.float32),
        name="flash_dq",
    )  # fmt: skip


def _dq_kernel(
    q_ref, k_ref, v_ref, ranges, stats, blocks_ref, dq_ref, *, mask, scale, head_dim, value_dim
):
    first_T = pl.program_id(0) * mask.query_block
    q_TH = load(q_ref, first_T, mask.num_queries, head_dim)
    dout_TH = load(stats.dout_BTNH, first_T, mask.num_queries, value_dim)
    lse2_T, delta_T = (
        load(x, first_T, mask.num_queries) for x in (stats.lse2_BNT, stats.delta_BNT)
    )

    def loop_body(j, dq_TH, masked):
        first_S = j * mask.kv_block
        block = pl.ds(first_S, mask.kv_block)
        # Without a mask, blocks are complete: a multiple of the block size needs no check of
        # bounds.
        num_keys = mask.num_keys if masked else mask.kv_block * (mask.num_keys // mask.kv_block)
        k_SH = load(k_ref.at[block], first_S, num_keys, head_dim)
        v_SH = load(v_ref.at[block], first_S, num_keys, value_dim)
        p_TS = jnp.exp2(scale * LOG2_E * matmul(q_TH, k_SH, transpose_b=True) - lse2_T[:, None])
        if masked and (mask_TS := load_mask(ranges, first_T, first_S, mask)) is not None:
            p_TS = jnp.where(mask_TS, p_TS, 0.0)
        ds_TS = p_TS * (matmul(dout_TH, v_SH, transpose_b=True) - delta_T[:, None])
        return dq_TH + matmul(ds_TS.astype(k_SH.dtype), k_SH)

    dq_TH = loop_over_blocks(blocks_ref, loop_body, jnp.zeros(q_TH.shape, jnp.float32))
    store(dq_ref, scale * dq_TH, first_T, mask.num_queries, head_dim)


def flash_dkv(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    ranges: Ranges | None,
    stats: QueryStats,
    params: KernelParams,
) -> KeysValues:
    """Returns (dk_BSKH, dv_BSKH), float32, summed over the query heads of each key/value head."""
    mask = params.mask
    batch, num_queries, num_heads, head_dim = q_BTNH.shape
    _, num_keys, num_kv_heads, value_dim = v_BSKH.shape
    heads_per_kv = num_heads // num_kv_heads
    blocks = query_block_ranges(ranges, mask)

    own_rows = functools.partial(own_rows_spec, mask.kv_block)

    def all_queries(width):
        return pl.BlockSpec(
            (None, num_queries, heads_per_kv, padded(width)), lambda j, n, b: (b, 0, n, 0)
        )

    all_1d = pl.BlockSpec((None, heads_per_kv, num_queries), lambda j, n, b: (b, n, 0))
    return params.run(
        _dkv_kernel, (q_BTNH, k_BSKH, v_BSKH, ranges, stats, blocks),
        grid=(pl.cdiv(num_keys, mask.kv_block), num_kv_heads, batch),
        in_specs=[
            all_queries(head_dim), own_rows(head_dim), own_rows(value_dim), key_ranges_specs(ranges),
            QueryStats(all_queries(value_dim), all_1d, all_1d), block_ranges_spec(blocks),
        ],
        out_specs=[own_rows(head_dim), own_rows(value_dim)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (k_BSKH, v_BSKH)],
        name="flash_dkv",
    )  # fmt: skip


def _dkv_kernel(
    q_ref,
    k_ref,
    v_ref,
    ranges,
    stats,
    blocks_ref,
    dk_ref,
    dv_ref,
    *,
    mask,
    scale,
    head_dim,
    value_dim,
):
    first_S = pl.program_id(0) * mask.kv_block
    k_SH = load(k_ref, first_S, mask.num_keys, head_dim)
    v_SH = load(v_ref, first_S, mask.num_keys, value_dim)

    def loop_body(i, carry, masked, head):
        dk_SH, dv_SH = carry
        first_T = i * mask.query_block
        block = pl.ds(first_T, mask.query_block)
        # Queries past the end read as 0, and so does dout. They add nothing, so they need no mask.
        num_queries = (
            mask.num_queries
            if masked
            else mask.query_block * (mask.num_queries // mask.query_block)
        )
        q_TH = load(q_ref.at[block, head], first_T, num_queries, head_dim)
        dout_TH = load(stats.dout_BTNH.at[block, head], first_T, num_queries, value_dim)
        lse2_T, delta_T = (
            load(x.at[head, block], first_T, num_queries) for x in (stats.lse2_BNT, stats.delta_BNT)
        )
        # The transposed weights are the first operand of both matrix products below.
        p_ST = jnp.exp2(scale * LOG2_E * matmul(k_SH, q_TH, transpose_b=True) - lse2_T[None, :])
        if (
            masked
            and (mask_ST := load_mask(ranges, first_T, first_S, mask, keys_first=True)) is not None
        ):
            p_ST = jnp.where(mask_ST, p_ST, 0.0)
        ds_ST = p_ST * (matmul(v_SH, dout_TH, transpose_b=True) - delta_T[None, :])
        dv_SH += matmul(p_ST.astype(v_SH.dtype), dout_TH)
        return dk_SH + matmul(ds_ST.astype(k_SH.dtype), q_TH), dv_SH

    def one_head(head, carry):
        return loop_over_blocks(blocks_ref, functools.partial(loop_body, head=head), carry)

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k_SH, v_SH))
    dk_SH, dv_SH = lax.fori_loop(0, q_ref.shape[1], one_head, start)
    store(dk_ref, scale * dk_SH, first_S, mask.num_keys, head_dim)
    store(dv_ref, dv_SH, first_S, mask.num_keys, value_dim)


def flash_forward(
    q_BTNH: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ranges: Ranges | None,
    layer_1: jax.Array | None = None,
    blocks: jax.Array | None = None,
    *,
    params: KernelParams,
) -> OutLse:
    """Returns (out_BTNH, lse_BNT), both float32. A fully masked row has out 0, lse -inf.

    Args:
      k, v: [B, S, K, H]; [B, L, S, K, H] with `layer_1`, int32 [1], which selects a layer.
      blocks: the result of `kv_block_ranges` if it is known.
    """
    mask = params.mask
    batch, num_queries, num_heads, head_dim = q_BTNH.shape
    num_kv_heads, value_dim = v.shape[-2:]
    heads_per_kv = num_heads // num_kv_heads
    blocks = kv_block_ranges(ranges, mask) if blocks is None else blocks

    own_rows = functools.partial(own_rows_spec, mask.query_block)
    all_keys = functools.partial(all_keys_spec, v.shape[1:-2], heads_per_kv)
    return params.run(
        _kernel, (q_BTNH, k, v, ranges, blocks, layer_1),
        grid=(pl.cdiv(num_queries, mask.query_block), num_heads, batch),
        in_specs=[
            own_rows(head_dim), all_keys(head_dim), all_keys(value_dim),
            key_ranges_specs(ranges), block_ranges_spec(blocks),
            None if layer_1 is None else pl.BlockSpec((1,), lambda i, n, b: (0,)),
        ],
        out_specs=[own_rows(value_dim), pl.BlockSpec((None, None, mask.query_block), lambda i, n, b: (b, n, i))],
        out_shape=[
            jax.ShapeDtypeStruct((batch, num_queries, num_heads, value_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, num_heads, num_queries), jnp.float32),
        ],
        name="flash_forward",
    )  # fmt: skip


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    ranges,
    blocks_ref,
    layer_ref,
    out_ref,
    lse_ref,
    *,
    mask,
    scale,
    head_dim,
    value_dim,
):
    first_T = pl.program_id(0) * mask.query_block
    q_TH = load(q_ref, first_T, mask.num_queries, head_dim)
    layer = () if layer_ref is None else (layer_ref[0],)

    def loop_body(j, carry, masked):
        max_T, total_T, out_TH = carry
        first_S = j * mask.kv_block
        block = *layer, pl.ds(first_S, mask.kv_block)
        # Without a mask, blocks are complete: a multiple of the block size needs no check of
        # bounds.
        num_keys = mask.num_keys if masked else mask.kv_block * (mask.num_keys // mask.kv_block)
        k_SH = load(k_ref.at[block], first_S, num_keys, head_dim)
        scores_TS = scale * LOG2_E * matmul(q_TH, k_SH, transpose_b=True)
        if masked and (mask_TS := load_mask(ranges, first_T, first_S, mask)) is not None:
            scores_TS = jnp.where(mask_TS, scores_TS, -jnp.inf)
        new_max_T = jnp.maximum(max_T, scores_TS.max(axis=1))
        finite_max_T = jnp.where(new_max_T == -jnp.inf, 0.0, new_max_T)  # -inf - -inf is NaN
        p_TS = jnp.exp2(scores_TS - finite_max_T[:, None])
        shrink_T = jnp.exp2(max_T - finite_max_T)
        v_SH = load(v_ref.at[block], first_S, num_keys, value_dim)
        out_TH = shrink_T[:, None] * out_TH + matmul(p_TS.astype(v_SH.dtype), v_SH)
        return new_max_T, shrink_T * total_T + p_TS.sum(axis=1), out_TH

    start = (
        jnp.full(mask.query_block, -jnp.inf, jnp.float32),
        jnp.zeros(mask.query_block, jnp.float32),
        jnp.zeros((mask.query_block, v_ref.shape[-1]), jnp.float32),
    )
    max_T, total_T, out_TH = loop_over_blocks(blocks_ref, loop_body, start)
    is_empty = total_T == 0.0
    total_T = jnp.where(is_empty, 1.0, total_T)
    lse_T = jnp.where(is_empty, -jnp.inf, LN_2 * (max_T + jnp.log2(total_T)))
    store(out_ref, out_TH / total_T[:, None], first_T, mask.num_queries, value_dim)
    store(lse_ref, lse_T, first_T, mask.num_queries)


_DTYPES = ("bfloat16", "float16", "float32")


def unsupported(problem: AttentionProblem) -> str | None:
    """See `contract.Kernel.unsupported`."""
    if problem.platform not in ("gpu", "cpu"):
        return f"platform {problem.platform} (supported: gpu; cpu for tests)"
    if problem.platform == "gpu" and problem.major_capability < 8:
        return f"compute capability {problem.compute_capability} (supported: 8.0 and later)"
    if problem.dtype not in _DTYPES:
        return f"dtype {problem.dtype} (supported: {', '.join(_DTYPES)})"
    for name, width in (
        ("head dim {}", problem.head_dim),
        ("head dim {} of values", problem.value_dim),
    ):
        if width > MAX_HEAD_DIM:
            return f"{name.format(width)} (supported: up to {MAX_HEAD_DIM})"
    return None


@jax.jit(static_argnames="spec")
def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    ranges: KeyRanges | None,
    spec: AttentionSpec,
) -> OutLse:
    """See `contract.Kernel.forward`."""

    return _call(flash_forward, spec, (q_BTNH, k_BSKH, v_BSKH, ranges))


@jax.jit(static_argnames="spec")
def forward_in_layer(
    q_BTNH: jax.Array,
    k_BLSKH: jax.Array,
    v_BLSKH: jax.Array,
    layer: jax.Array,
    ranges: KeyRanges,
    spec: AttentionSpec,
) -> OutLse:
    """See `contract`."""

    mask = _params("flash_forward", q_BTNH, k_BLSKH, v_BLSKH, spec).mask
    blocks_per_range = q_BTNH.shape[1] // ranges.start_BT.shape[1] // mask.query_block
    ranges = KeyRanges(*(jnp.repeat(x, blocks_per_range, axis=1) for x in ranges))
    blocks = rectangle_block_ranges(*ranges, mask.kv_block)
    ranges = KeyRanges(*(jnp.repeat(x, mask.query_block, axis=1) for x in ranges))
    return _call(flash_forward, spec, (q_BTNH, k_BLSKH, v_BLSKH, ranges, layer[None], blocks))


@jax.jit(static_argnames="spec")
def backward(
    q_BTNH, k_BSKH, v_BSKH, ranges: KeyRanges | None, spec: AttentionSpec, results: QueryResults
):
    """See `contract.Kernel.backward`."""

    dout_BTNH = results.dout_BTNH.astype(v_BSKH.dtype)
    stats = QueryStats(dout_BTNH, LOG2_E * results.finite_lse_BNT, results.delta_BNT)
    operands = (q_BTNH, k_BSKH, v_BSKH, ranges, stats)
    return _call(flash_dq, spec, operands), *_call(flash_dkv, spec, operands)


def _call(kernel: Callable, spec: AttentionSpec, operands: tuple):
    """Runs `kernel` with the tuning parameters of its name."""
    q_BTNH, k, v = operands[:3]
    params = _params(kernel.__name__, q_BTNH, k, v, spec)
    return kernel(*operands, params=params)


def _params(kernel: str, q_BTNH, k, v, spec: AttentionSpec) -> KernelParams:
    """The parameters of one call. `k` and `v` may have an axis of layers, as for `flash_forward`."""
    head_dim = max(q_BTNH.shape[-1], v.shape[-1])
    tuning = tuning_params(kernel, q_BTNH.dtype.name, head_dim, spec.small_shared_memory)
    mask = BlockMask(
        causal=spec.causal,
        window=spec.window,
        num_queries=q_BTNH.shape[1],
        num_keys=k.shape[-3],
        query_block=_block_tokens(spec.query_block_tokens, tuning.query_block_tokens),
        kv_block=_block_tokens(spec.key_block_tokens, tuning.kv_block_tokens),
    )
    return KernelParams(mask=mask, scale=spec.scale_for(q_BTNH.shape[-1]), tuning=tuning)


def _block_tokens(limit: int, tuned: int) -> int:
    """The tuned block size, or the largest power of 2 up to `limit` if that is smaller."""
    return max(MIN_BLOCK_TOKENS, min(tuned, 1 << (limit.bit_length() - 1)))
