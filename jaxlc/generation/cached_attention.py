"""Attention of a chunk of new tokens over the KV cache, context parallel.

Each rank computes the queries of the whole chunk against the keys that it stores, and the partial results are merged by
their log-sum-exp, as in Yang et al. 2024 (arXiv:2411.01783, "pass-Q"): only queries and results are sent, which are
much smaller than the cache. In sliding layers each rank computes its own queries against the last tokens.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxlc.attention.choose import KERNELS, choose_kernel
from jaxlc.attention.contract import AttentionProblem, AttentionSpec, Kernel, KeyRanges
from jaxlc.attention.sharded_attention import repeat_heads
from jaxlc.config import AttentionConfig
from jaxlc.core import scopes
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.generation.cache import KV, CacheLayout, kv_spec


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
    window: int | None  # of sliding layers. None: all earlier tokens

    def __call__(
        self, q_BCNH: jax.Array, k_BCKH: jax.Array, v_BCKH: jax.Array, cache: KV, layer: jax.Array, new: NewTokens
    ) -> tuple[jax.Array, KV]:
        """Appends the keys and values of the new tokens to layer `layer` of `cache`, and attends.

        Args:
          q_BCNH, k_BCKH, v_BCKH: of a chunk of C tokens, a multiple of the context axis, which splits C.
          layer: index into the first dimension of `cache`, int32.
        Returns:
          out_BCNH in the dtype of q; padding has any value. The cache with the new tokens.
        """
        kernel = _kernel_for(self.config.kernel, self.mesh.devices.flat[0], q_BCNH)
        local = _attend_window if self.window else functools.partial(_attend_all, layout=self.layout)
        spec = AttentionSpec(
            causal=False,
            query_block_tokens=self.config.query_block_tokens,
            key_block_tokens=self.config.key_block_tokens,
        )
        heads = PartitionSpec(BATCH_AXES, CONTEXT, TENSOR, None)
        of_cache = kv_spec("sliding" if self.window else "full")
        of_batch = PartitionSpec(BATCH_AXES)
        specs = (heads, heads, heads, KV(of_cache, of_cache), PartitionSpec(), NewTokens(of_batch, of_batch))
        split = jax.shard_map(
            functools.partial(local, kernel=kernel, spec=spec),
            mesh=self.mesh,
            in_specs=specs,
            out_specs=(heads, KV(of_cache, of_cache)),
            check_vma=False,
        )
        k_BCKH, v_BCKH = (repeat_heads(x, self.mesh.shape[TENSOR]) for x in (k_BCKH, v_BCKH))
        with jax.named_scope(scopes.CORE_ATTENTION):
            return split(q_BCNH, k_BCKH, v_BCKH, cache, layer, new)


def _kernel_for(name: str, device: jax.Device, q_BCNH: jax.Array) -> Kernel:
    """The kernel `name`, or the fastest one that supports any key ranges: those of a training run may not, as cudnn."""
    problem = AttentionProblem(
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", None),
        dtype=q_BCNH.dtype.name,
        head_dim=q_BCNH.shape[-1],
        value_dim=q_BCNH.shape[-1],
        window=None,
        implicit_positions=False,
    )
    is_supported = name in KERNELS and KERNELS[name].unsupported(problem) is None
    return choose_kernel(name if is_supported else "auto", problem).kernel


def _attend_all(
    q_bcnH: jax.Array,
    k_bckH: jax.Array,
    v_bckH: jax.Array,
    cache: KV,
    layer: jax.Array,
    new: NewTokens,
    *,
    layout: CacheLayout,
    kernel: Kernel,
    spec: AttentionSpec,
) -> tuple[jax.Array, KV]:
    """Attention to all earlier tokens; runs inside `shard_map`."""
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
    out_bCnH, lse_bnC = kernel.forward(q_bCnH, k_bskH, v_bskH, ranges, spec)
    max_bnC = lax.pmax(lse_bnC, CONTEXT)
    weights_bCn = jnp.exp(lse_bnC - jnp.where(jnp.isneginf(max_bnC), 0.0, max_bnC)).swapaxes(1, 2)
    sums_bcnX = lax.psum_scatter(
        jnp.concatenate([out_bCnH * weights_bCn[..., None], weights_bCn[..., None]], axis=-1),
        CONTEXT,
        scatter_dimension=1,
        tiled=True,
    )
    out_bcnH, total_bcn1 = sums_bcnX[..., :-1], sums_bcnX[..., -1:]
    return (out_bcnH / jnp.where(total_bcn1 == 0, 1.0, total_bcn1)).astype(q_bcnH.dtype), cache


def _attend_window(
    q_bcnH: jax.Array,
    k_bckH: jax.Array,
    v_bckH: jax.Array,
    cache: KV,
    layer: jax.Array,
    new: NewTokens,
    *,
    kernel: Kernel,
    spec: AttentionSpec,
) -> tuple[jax.Array, KV]:
    """Attention to the last tokens; runs inside `shard_map`."""
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
    out_bcnH, _ = kernel.forward(q_bcnH, *(x.astype(q_bcnH.dtype) for x in (k_bSkH, v_bSkH)), ranges, spec)

    last = jax.vmap(lambda x_SkH, num_new: lax.dynamic_slice_in_dim(x_SkH, num_new, window))
    updated = (last(x, new.num_new_B) for x in (k_bSkH, v_bSkH))
    cache = KV(*(lax.dynamic_update_index_in_dim(old, x, layer, 0) for old, x in zip(cache, updated, strict=True)))
    return out_bcnH.astype(q_bcnH.dtype), cache
