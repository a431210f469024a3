"""Attention of a chunk of new tokens over the KV cache, context parallel.

Each rank computes the queries of the whole chunk against the keys that it stores, and the partial results are merged by
their log-sum-exp, as in Yang et al. 2024 (arXiv:2411.01783, "pass-Q"): only queries and results are sent, which are
much smaller than the cache. In sliding layers each rank computes its own queries against the last tokens.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxlc.attention import sinks
from jaxlc.attention.contract import AttentionProblem, AttentionSpec, Kernel, KeyRanges
from jaxlc.attention.kernels.choose import KERNELS, KernelSelection, choose_kernel
from jaxlc.attention.merge import merge_parts
from jaxlc.attention.strategies.sharded_attention import attention_spec
from jaxlc.attention.strategies.strategy import repeat_heads
from jaxlc.config import AttentionConfig
from jaxlc.core import scopes
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.generation.cache import KV, CacheLayout, kv_spec

Forward = Callable[[jax.Array, jax.Array, jax.Array, KeyRanges, AttentionSpec], tuple[jax.Array, jax.Array]]
_MAX_ROWS = 128  # queries times query heads of a key/value head: at most one query block of a kernel
_NUM_PROGRAMS = 256  # about two per multiprocessor of an H100
_MIN_PART_KEYS = 512


class NewTokens(NamedTuple):
    """The new tokens of each sequence, which may be fewer than the chunk has: the rest is padding."""

    num_past_B: jax.Array  # int32: tokens in the cache
    num_new_B: jax.Array  # int32, in 0 .. C

    def positions_BC(self, chunk_tokens: int) -> jax.Array:
        return self.num_past_B[:, None] + jnp.arange(chunk_tokens, dtype=jnp.int32)


@dataclass(frozen=True, kw_only=True)
class CachedAttention:
    """Attention of one kind of layers, and the update of its cache; to be called under `jit`."""

    config: AttentionConfig
    mesh: Mesh
    layout: CacheLayout
    window: int | None  # tokens that a query of a sliding layer attends to. None: all earlier tokens

    def __call__(
        self,
        q_BCNH: jax.Array,
        k_BCKH: jax.Array,
        v_BCKH: jax.Array,
        cache: KV,
        layer: jax.Array,
        new: NewTokens,
        sinks_N: jax.Array | None = None,
    ) -> tuple[jax.Array, KV]:
        """Appends the keys and values of the new tokens to layer `layer` of `cache`, and attends.

        Args:
          q_BCNH, k_BCKH, v_BCKH: of a chunk of C tokens, a multiple of the context axis, which splits C.
          layer: index into the first dimension of `cache`, int32.
          sinks_N: float32; see attention/sinks.py. None: no sinks.
        Returns:
          out_BCNH in the dtype of q; padding has any value. The cache with the new tokens.
        """
        device = self.mesh.devices.flat[0]
        kernel = kernel_for(self.config.kernel, device, dtype=q_BCNH.dtype, head_dim=q_BCNH.shape[-1]).kernel
        # Blockwise loops on CPU gain nothing from more parts.
        forward = functools.partial(forward_in_parts, kernel) if device.platform == "gpu" else kernel.forward
        local = _attend_window if self.window else functools.partial(_attend_all, layout=self.layout)
        spec = attention_spec(self.config, causal=False, window=None, scale=None)
        heads = PartitionSpec(BATCH_AXES, CONTEXT, TENSOR, None)
        cache_spec = kv_spec("sliding" if self.window else "full")
        batch_spec = PartitionSpec(BATCH_AXES)
        specs = (heads, heads, heads, KV(cache_spec, cache_spec), PartitionSpec(), NewTokens(batch_spec, batch_spec))
        split = jax.shard_map(
            functools.partial(local, forward=forward, spec=spec),
            mesh=self.mesh,
            in_specs=specs,
            out_specs=(heads, PartitionSpec(BATCH_AXES, TENSOR, CONTEXT), KV(cache_spec, cache_spec)),
            check_vma=False,
        )
        k_BCKH, v_BCKH = (repeat_heads(x, self.mesh.shape[TENSOR]) for x in (k_BCKH, v_BCKH))
        window_scope = jax.named_scope(scopes.SLIDING_WINDOW) if self.window else nullcontext()
        with jax.named_scope(scopes.CORE_ATTENTION), window_scope:
            out_BCNH, lse_BNC, cache = split(q_BCNH, k_BCKH, v_BCKH, cache, layer, new)
            out_BCNH, _ = sinks.join(out_BCNH, lse_BNC, sinks_N)  # once, after the merge over ranks
            return out_BCNH.astype(q_BCNH.dtype), cache


def kernel_for(name: str, device: jax.Device, *, dtype: jnp.dtype, head_dim: int) -> KernelSelection:
    """The kernel `name`, or the fastest one that supports any key ranges: those of a training run may not, as cudnn."""
    problem = AttentionProblem(
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", None),
        dtype=jnp.dtype(dtype).name,
        head_dim=head_dim,
        value_dim=head_dim,
        window=None,
        implicit_positions=False,
    )
    is_supported = name in KERNELS and KERNELS[name].unsupported(problem) is None
    return choose_kernel(name if is_supported else "auto", problem)


def forward_in_parts(
    kernel: Kernel,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    ranges: KeyRanges,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array]:
    """`kernel.forward` that occupies a GPU also if there are few queries, as in decoding.

    A kernel has one program per query block and head. If all queries fit one block, the query heads that share a
    key/value head become queries of one head, so that each key is read once, and the keys are split into parts that
    are computed in parallel and merged by their log-sum-exp (Flash-Decoding, Dao et al. 2023,
    pytorch.org/blog/flash-decoding).
    """
    (batch, num_queries, num_heads, width), (num_keys, num_kv_heads) = q_BTNH.shape, k_BSKH.shape[1:3]
    groups = num_heads // num_kv_heads
    if num_queries * groups > _MAX_ROWS:
        return kernel.forward(q_BTNH, k_BSKH, v_BSKH, ranges, spec)
    parts = _num_parts(num_keys, batch * num_kv_heads)
    q_BRKH = q_BTNH.reshape(batch, num_queries, num_kv_heads, groups, width).swapaxes(2, 3)
    q_BRKH = q_BRKH.reshape(batch, num_queries * groups, num_kv_heads, width)
    part_keys = num_keys // parts
    part_ranges = [ranges.within(part * part_keys, part_keys) for part in range(parts)]
    # [B, P, ...] -> [BP, ...]
    ranges = KeyRanges(*(jnp.repeat(jnp.stack(x, axis=1), groups, axis=2) for x in zip(*part_ranges, strict=True)))
    ranges = KeyRanges(*(x.reshape(batch * parts, -1) for x in ranges))
    k, v = (x.reshape(batch * parts, part_keys, num_kv_heads, -1) for x in (k_BSKH, v_BSKH))
    out, lse = kernel.forward(jnp.repeat(q_BRKH, parts, axis=0), k, v, ranges, spec)

    out_BRKH, lse_BKR = merge_parts(*(x.reshape(batch, parts, *x.shape[1:]).swapaxes(0, 1) for x in (out, lse)))

    def ungrouped(x_BRK):  # [B, TG, K, ...] -> [B, T, N, ...]
        x_BTGK = x_BRK.reshape(batch, num_queries, groups, *x_BRK.shape[2:])
        return x_BTGK.swapaxes(2, 3).reshape(batch, num_queries, num_heads, *x_BRK.shape[3:])

    return ungrouped(out_BRKH), ungrouped(lse_BKR.swapaxes(1, 2)).swapaxes(1, 2)


def _num_parts(num_keys: int, programs_per_part: int) -> int:
    """A power of two: `_NUM_PROGRAMS` programs, unless a part would be too short or num_keys does not split."""
    parts = 1
    while (
        2 * parts * programs_per_part <= _NUM_PROGRAMS
        and num_keys % (2 * parts) == 0
        and num_keys // (2 * parts) >= _MIN_PART_KEYS
    ):
        parts *= 2
    return parts


def _attend_all(
    q_bcnH: jax.Array,
    k_bckH: jax.Array,
    v_bckH: jax.Array,
    cache: KV,
    layer: jax.Array,
    new: NewTokens,
    *,
    layout: CacheLayout,
    forward: Forward,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array, KV]:
    """(out_bcnH, lse_bnc, the cache) of attention to all earlier tokens; runs inside `shard_map`."""
    rank = lax.axis_index(CONTEXT)
    q_bCnH, k_bCkH, v_bCkH = (lax.all_gather(x, CONTEXT, axis=1, tiled=True) for x in (q_bcnH, k_bckH, v_bckH))
    positions_bC = new.positions_BC(q_bCnH.shape[1])
    is_new_bC = jnp.arange(q_bCnH.shape[1]) < new.num_new_B[:, None]

    is_own_bC = is_new_bC & layout.is_stored_on(rank, positions_bC)
    slots_bC = jnp.where(is_own_bC, layout.num_stored(rank, positions_bC), layout.tokens_per_rank)  # others: dropped
    sequences_b1 = jnp.arange(len(slots_bC))[:, None]
    cache = KV(*(
        stored.at[layer, sequences_b1, slots_bC].set(x.astype(stored.dtype), mode="drop")
        for stored, x in zip(cache, (k_bCkH, v_bCkH), strict=True)
    ))  # fmt: skip
    k_bskH, v_bskH = (lax.dynamic_index_in_dim(x, layer, keepdims=False).astype(q_bCnH.dtype) for x in cache)

    end_bC = jnp.where(is_new_bC, layout.num_stored(rank, positions_bC + 1), 0)
    ranges = KeyRanges(jnp.zeros_like(end_bC), end_bC)
    out_bCnH, lse_bnC = forward(q_bCnH, k_bskH, v_bskH, ranges, spec)
    max_bnC = lax.pmax(lse_bnC, CONTEXT)
    weights_bCn = jnp.exp(lse_bnC - jnp.where(jnp.isneginf(max_bnC), 0.0, max_bnC)).swapaxes(1, 2)
    sums_bcnX = lax.psum_scatter(
        jnp.concatenate([out_bCnH * weights_bCn[..., None], weights_bCn[..., None]], axis=-1),
        CONTEXT,
        scatter_dimension=1,
        tiled=True,
    )
    out_bcnH, total_bcn1 = sums_bcnX[..., :-1], sums_bcnX[..., -1:]
    max_bnc = lax.dynamic_slice_in_dim(max_bnC, rank * q_bcnH.shape[1], q_bcnH.shape[1], axis=2)
    lse_bnc = max_bnc + jnp.log(total_bcn1[..., 0].swapaxes(1, 2))
    return out_bcnH / jnp.where(total_bcn1 == 0, 1.0, total_bcn1), lse_bnc, cache


def _attend_window(
    q_bcnH: jax.Array,
    k_bckH: jax.Array,
    v_bckH: jax.Array,
    cache: KV,
    layer: jax.Array,
    new: NewTokens,
    *,
    forward: Forward,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array, KV]:
    """(out_bcnH, lse_bnc, the cache) of attention to the last tokens; runs inside `shard_map`."""
    (batch, c), window = q_bcnH.shape[:2], cache.k.shape[2]
    chunks = (lax.all_gather(x, CONTEXT, axis=1, tiled=True) for x in (k_bckH, v_bckH))
    past = [lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in cache]
    k_bSkH, v_bSkH = (jnp.concatenate([old, x.astype(old.dtype)], axis=1) for old, x in zip(past, chunks, strict=True))

    # Key s is the token num_past - window + s.
    index_c = lax.axis_index(CONTEXT) * c + jnp.arange(c, dtype=jnp.int32)
    is_new_bc = index_c < new.num_new_B[:, None]
    end_bc = jnp.broadcast_to(index_c + window + 1, (batch, c))
    start_bc = jnp.maximum(end_bc - window, window - new.num_past_B[:, None])
    ranges = KeyRanges(*(jnp.where(is_new_bc, x, 0) for x in (start_bc, end_bc)))
    out_bcnH, lse_bnc = forward(q_bcnH, *(x.astype(q_bcnH.dtype) for x in (k_bSkH, v_bSkH)), ranges, spec)

    last = jax.vmap(lambda x_SkH, num_new: lax.dynamic_slice_in_dim(x_SkH, num_new, window))
    updated = (last(x, new.num_new_B) for x in (k_bSkH, v_bSkH))
    cache = KV(*(lax.dynamic_update_index_in_dim(old, x, layer, 0) for old, x in zip(cache, updated, strict=True)))
    return out_bcnH, lse_bnc, cache
