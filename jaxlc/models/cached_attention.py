"""Attention of new tokens over the KV cache, whose tokens the context axis shards."""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxlc.attention import contract
from jaxlc.attention.contract import (
    AttentionSpec,
    Kernel,
    KeyRanges,
    OutLse,
    merge,
    merge_parts,
    prepared,
)
from jaxlc.attention.kernels.choose import KERNELS, KernelSelection, choose_kernel
from jaxlc.attention.strategies import sharded_attention
from jaxlc.attention.strategies.strategy import repeat_heads
from jaxlc.config import AttentionConfig
from jaxlc.core import BATCH_AXES, CONTEXT, TENSOR, Unsupported, num_replicas, scopes
from jaxlc.models.contract import CachedKernels, CacheLayout, NewTokens, decode_tokens
from jaxlc.sharding.mesh import shard_map


def kv_spec(window: int | None, head_axis: str | None = TENSOR) -> PartitionSpec:
    """The sharding of the arrays of a cache, for layers with this window."""
    return PartitionSpec(BATCH_AXES, None, None if window else CONTEXT, head_axis, None)


class KV(NamedTuple):
    """Keys and values of some layers that have the same place in the period of layer kinds.

    [B, layers, tokens, K, H]; K is repeated to the size of the tensor axis if that is larger.
    Layers that attend to all earlier tokens shard the tokens over context.
    """

    k: jax.Array
    v: jax.Array


_MIN_ROWS = 16  # the smallest query block of a kernel
_NUM_PROGRAMS = 256  # about two per multiprocessor of an H100
_MIN_PART_KEYS = 512
_KV_BLOCK = 128  # parts are whole blocks of a kernel
_BLOCK_KEYS = 1024


def attend_one(
    kernel: Kernel,
    q_B1NH: jax.Array,
    k_BLSKH: jax.Array,
    v_BLSKH: jax.Array,
    layer: jax.Array,
    num_keys_B: jax.Array,
    spec: AttentionSpec,
) -> OutLse:
    """Attention of one query per sequence over a layer of the KV cache, which is read in place.

    On a GPU, the query heads that share a key/value head become rows of one query block, so that each key is read once.
    The keys are split into parts, which are computed in parallel and merged by their log-sum-exp (Flash-Decoding, Dao
    et al. 2023, pytorch.org/blog/flash-decoding). Each part is a query block with its own key range. Kernels that
    cannot read a layer in place get its keys and values in short blocks, one after the other.

    Args:
      kernel: supports any key ranges.
      spec: not causal.
    Returns:
      (out_B1NH, lse_BN1) over the first num_keys_B keys of layer `layer`, float32; without keys 0 and -inf.
    """
    batch, _, num_heads, width = q_B1NH.shape
    num_kv_heads = k_BLSKH.shape[3]
    q_BGKH = q_B1NH.reshape(batch, num_kv_heads, -1, width).swapaxes(1, 2)
    # A cache of another dtype is cast block by block.
    in_place = hasattr(kernel, "forward_in_layer") and k_BLSKH.dtype == q_B1NH.dtype
    attend = _in_parts if in_place else _in_blocks
    out_BGKH, lse_BKG = attend(kernel, q_BGKH, k_BLSKH, v_BLSKH, layer, num_keys_B, spec)
    return out_BGKH.swapaxes(1, 2).reshape(batch, 1, num_heads, -1), lse_BKG.reshape(
        batch, num_heads, 1
    )


def _in_parts(kernel, q_BGKH, k_BLSKH, v_BLSKH, layer, num_keys_B, spec):
    batch, groups, num_kv_heads, _ = q_BGKH.shape
    max_keys = k_BLSKH.shape[2]
    num_rows = max(_MIN_ROWS, 1 << (groups - 1).bit_length())
    num_parts = max(1, min(_NUM_PROGRAMS // (batch * num_kv_heads), max_keys // _MIN_PART_KEYS))
    part_keys = -(-max_keys // (num_parts * _KV_BLOCK)) * _KV_BLOCK
    first_P = part_keys * jnp.arange(num_parts, dtype=jnp.int32)
    end_BP = jnp.minimum(first_P + part_keys, num_keys_B[:, None])
    ranges = KeyRanges(jnp.minimum(first_P, end_BP), end_BP)
    q_BRKH = jnp.pad(q_BGKH, ((0, 0), (0, num_rows - groups), (0, 0), (0, 0)))
    spec = dataclasses.replace(spec, query_block_tokens=num_rows)
    out, lse = kernel.forward_in_layer(
        jnp.tile(q_BRKH, (1, num_parts, 1, 1)), k_BLSKH, v_BLSKH, layer, ranges, spec
    )
    out_BPRKH = out.reshape(batch, num_parts, num_rows, num_kv_heads, -1)
    lse_BKPR = lse.reshape(batch, num_kv_heads, num_parts, num_rows)
    return merge_parts(
        jnp.moveaxis(out_BPRKH, 1, 0)[:, :, :groups], jnp.moveaxis(lse_BKPR, 2, 0)[..., :groups]
    )


def _in_blocks(kernel, q_BGKH, k_BLSKH, v_BLSKH, layer, num_keys_B, spec):
    batch, groups, num_kv_heads, _ = q_BGKH.shape
    max_keys = k_BLSKH.shape[2]
    block = min(_BLOCK_KEYS, max_keys)
    spec = dataclasses.replace(spec, key_block_tokens=block)  # few queries: scores are small
    ends_BG = jnp.broadcast_to(num_keys_B[:, None], (batch, groups))

    def add_block(index, out_lse):
        # the last block may overlap with the one before it
        first = jnp.minimum(index * block, max_keys - block)
        zero = jnp.int32(0)
        k, v = (
            lax.dynamic_slice(x, (zero, layer, first, zero, zero), (batch, 1, block, *x.shape[3:]))[
                :, 0
            ].astype(q_BGKH.dtype)
            for x in (k_BLSKH, v_BLSKH)
        )
        ranges = KeyRanges(jnp.full_like(ends_BG, index * block), ends_BG).within(first, block)
        out, lse = kernel.forward(q_BGKH, k, v, ranges, spec)
        return merge(*out_lse, out.astype(jnp.float32), lse)

    none = (
        jnp.zeros((*q_BGKH.shape[:3], v_BLSKH.shape[-1]), jnp.float32),
        jnp.full((batch, num_kv_heads, groups), -jnp.inf),
    )
    return lax.fori_loop(0, (num_keys_B.max() + block - 1) // block, add_block, none)


_TOKENS = PartitionSpec(BATCH_AXES, CONTEXT, TENSOR, None)
_BATCH = PartitionSpec(BATCH_AXES)
_LSE = PartitionSpec(BATCH_AXES, TENSOR, CONTEXT)
# arrays that differ between the ranks that share sequences
_PER_RANK = PartitionSpec((*BATCH_AXES, CONTEXT))


@dataclass(frozen=True, kw_only=True)
class CachedAttention(CachedKernels):
    """Attention of new tokens over the KV cache, context parallel, and the update of the cache; under `jit`.

    A chunk of a prompt attends in two parts that are merged by their log-sum-exp:

        tokens of the chunk    causal, with the strategy and kernel of training, since padding comes last
        tokens in the cache    all queries of a sequence attend to all of them. Each rank computes the queries of the
                               whole chunk against the keys that it stores. Queries and results are exchanged, which
                               are much smaller than the cache ("pass-Q", Yang et al. 2024, arXiv:2411.01783).

    In sliding layers each rank computes its own queries against the last tokens and those of the chunk, in one call. In
    a decoding step, each rank computes the one query of each sequence against the keys that it stores.
    """

    config: AttentionConfig
    mesh: Mesh
    layout: CacheLayout
    # tokens that a query of a sliding layer attends to. None: all earlier tokens
    window: int | None
    q_like: jax.ShapeDtypeStruct  # q_BCNH of all calls
    num_kv_heads: int
    head_axis: ClassVar[str | None] = TENSOR  # splits the heads of the cache; None: no axis does

    def bind(self, new: NewTokens) -> Callable:
        """See `contract.Cached`. All layers share the key ranges over the tokens in the cache."""
        return functools.partial(self, new=new, ranges=self._ranges(new))

    def _ranges(self, new: NewTokens) -> Any:
        if self.window or self._is_decoding:
            return None

        def local(new: NewTokens):
            num_keys_b = self.layout.num_stored(lax.axis_index(CONTEXT), new.num_past_B)
            end_bC = jnp.where(new.is_new_BC(self.q_like.shape[1]), num_keys_b[:, None], 0)
            ranges = KeyRanges(jnp.zeros_like(end_bC), end_bC)
            return prepared(
                self._cache_kernel.kernel, ranges, self.layout.tokens_per_rank, self._spec
            )

        with jax.named_scope(scopes.CORE_ATTENTION):
            return shard_map(local, self.mesh, (NewTokens(_BATCH, _BATCH),), _PER_RANK)(new)

    def __call__(
        self,
        q_BCNH: jax.Array,
        k_BCKH: jax.Array,
        v_BCKH: jax.Array,
        sinks_N: jax.Array | None = None,
        *,
        cache: KV,
        layer: jax.Array,
        new: NewTokens,
        ranges: Any,
    ) -> tuple[jax.Array, KV]:
        """Appends the keys and values of the new tokens to layer `layer` of `cache`, and attends.

        Args:
          q_BCNH, k_BCKH, v_BCKH: of a chunk of C tokens, a multiple of the context axis, which splits C.
          sinks_N: float32; see attention/contract.py. None: no sinks.
          layer: index into the second dimension of `cache`, int32.
          ranges: of `_ranges`.
        Returns:
          out_BCNH in the dtype of q; padding has any value. The cache with the new tokens.
        """
        kv = KV(*(repeat_heads(x, self.mesh.shape[TENSOR]) for x in (k_BCKH, v_BCKH)))
        return self._attend(
            q_BCNH, kv, kv, sinks_N, cache=cache, layer=layer, new=new, ranges=ranges
        )

    def _attend(
        self,
        q_BCNH: jax.Array,
        kv: KV,
        added: Any,
        sinks_N: jax.Array | None,
        *,
        cache: Any,
        layer: jax.Array,
        new: NewTokens,
        ranges: Any,
        weights: Any = None,
    ) -> tuple[jax.Array, Any]:
        """As `__call__`, with what the cache has of the new tokens, in `added`.

        Args:
          weights: the `Expansion` of what the cache has; None: these are keys and values.
        """
        local = (
            self._decode
            if self._is_decoding
            else self._attend_window
            if self.window
            else self._attend_past
        )
        cache_spec = kv_spec(self.window, self.head_axis)
        caches = jax.tree.map(lambda x: cache_spec, cache)
        in_specs = (
            _TOKENS,
            PartitionSpec(BATCH_AXES, CONTEXT, self.head_axis, None),
            caches,
            PartitionSpec(),
            NewTokens(_BATCH, _BATCH),
            _PER_RANK,
            None if weights is None else weights.specs(TENSOR),
        )
        split = shard_map(local, self.mesh, in_specs, (_TOKENS, _LSE, caches))
        window_scope = jax.named_scope(scopes.SLIDING_WINDOW) if self.window else nullcontext()
        with jax.named_scope(scopes.CORE_ATTENTION), window_scope, jax.named_scope(scopes.KV_CACHE):
            out_BCNH, lse_BNC, cache = split(q_BCNH, added, cache, layer, new, ranges, weights)
        if not (self.window or self._is_decoding):
            config, _ = self._chunk_kernel
            attend = sharded_attention.make(config, self.mesh, token_order="natural")
            out, lse = attend(q_BCNH, *kv)
            with jax.named_scope(scopes.CORE_ATTENTION):
                out_BCNH, lse_BNC = merge(out_BCNH, lse_BNC, out.astype(jnp.float32), lse)
        with jax.named_scope(scopes.CORE_ATTENTION):
            # once: out and lse are over all keys here
            out_BCNH, _ = contract.join(out_BCNH, lse_BNC, sinks_N)
        return out_BCNH.astype(q_BCNH.dtype), cache

    @property
    def kernels(self) -> dict[str, KernelSelection]:
        past = {"tokens in the cache": self._cache_kernel}
        if self.window or self._is_decoding:
            return past
        _, kernel = self._chunk_kernel
        return {"tokens of the chunk": kernel} | past

    @property
    def _is_decoding(self) -> bool:
        return self.q_like.shape[1] == decode_tokens(self.mesh)

    @property
    def _cached_dim(self) -> int:
        """The head dim of calls over the cache."""
        return self.q_like.shape[-1]

    @property
    def _spec(self) -> AttentionSpec:
        return sharded_attention.attention_spec(self.config, self.mesh, False, None, None)

    @property
    def _chunk_kernel(self) -> tuple[AttentionConfig, KernelSelection]:
        """The config of a call within a chunk, with kernel auto if the named one does not support
        this device; and its kernel.
        """
        choose = functools.partial(
            sharded_attention.choose,
            mesh=self.mesh,
            head_dim=self.q_like.shape[-1],
            dtype=self.q_like.dtype,
            packed=False,
        )
        try:
            return self.config, choose(self.config)
        except Unsupported:
            config = dataclasses.replace(self.config, kernel="auto")
            return config, choose(config)

    @property
    def _cache_kernel(self) -> KernelSelection:
        """The kernel of calls over the cache; `auto` if the named one does not support their
        ranges.

        A chunk of full layers has the form of packed documents: all queries of a sequence have the
        same keys.
        """
        batch, chunk_tokens, num_heads, _ = self.q_like.shape
        head_dim = self._cached_dim
        num_rows = max(chunk_tokens * num_heads, self.layout.tokens_per_rank * self.num_kv_heads)
        batch_ranks = num_replicas(self.mesh.shape)
        problem = sharded_attention.problem_on(
            self.mesh,
            self.q_like.dtype,
            head_dim=head_dim,
            value_dim=head_dim,
            window=self.window,
            implicit_positions=False,
            document_ranges=not (self.window or self._is_decoding),
            num_elements=num_rows * head_dim * batch // (batch_ranks * self.mesh.shape[TENSOR]),
        )
        name = self.config.kernel
        is_supported = name in KERNELS and KERNELS[name].unsupported(problem) is None
        return choose_kernel(name if is_supported else "auto", problem)

    # The methods below run inside `shard_map`. They return (out_bcnH float32, lse_bnc, cache).

    def _keys_values(self, stored: Any, weights: Any) -> KV:
        """Keys and values of a layer of the cache."""
        del weights
        return stored

    def _attend_to_cache(self, q_b1nH, cache: Any, layer: jax.Array, num_keys_b, weights: Any):
        """`attend_one` over the cache of this rank."""
        del weights
        kernel = self._cache_kernel.kernel
        return attend_one(kernel, q_b1nH, *cache, layer, num_keys_b, self._spec)

    def _attend_past(self, q_bcnH, added, cache, layer, new: NewTokens, ranges, weights):
        """Attention of a chunk to the tokens in the cache, without those of the chunk."""
        q_bCnH, added = jax.tree.map(_gathered, (q_bcnH, added))
        cache = self._store(cache, layer, new, added)
        stored = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, layer, 1, keepdims=False).astype(q_bCnH.dtype),
            cache,
        )
        k_bskH, v_bskH = self._keys_values(stored, weights)
        out_bCnH, lse_bnC = self._cache_kernel.kernel.forward(
            q_bCnH, k_bskH, v_bskH, ranges, self._spec
        )
        # [ranks, ...] for the queries of this rank
        out_bRcnH = out_bCnH.reshape(len(out_bCnH), -1, *q_bcnH.shape[1:])
        lse_bnRc = lse_bnC.reshape(*lse_bnC.shape[:2], -1, q_bcnH.shape[1])
        out_RbcnH = lax.all_to_all(out_bRcnH, CONTEXT, 1, 0)
        lse_Rbnc = lax.all_to_all(lse_bnRc, CONTEXT, 2, 0)
        return *merge_parts(out_RbcnH.astype(jnp.float32), lse_Rbnc), cache

    def _attend_window(self, q_bcnH, added, cache, layer, new: NewTokens, ranges, weights):
        """Attention of a chunk to the last tokens, whether they are in the cache or in the chunk."""
        batch, c = q_bcnH.shape[:2]
        window = self.window
        chunk = jax.tree.map(_gathered, added)
        # Key s is the token num_past - window + s.
        slots_bw = (new.num_past_B[:, None] + jnp.arange(window, dtype=jnp.int32)) % window
        past = [x[jnp.arange(batch)[:, None], layer, slots_bw] for x in cache]
        # XLA would copy a cache that is read after the update
        past, cache = lax.optimization_barrier((past, cache))
        cache = self._store(cache, layer, new, chunk)
        k_bSkH, v_bSkH = (
            jnp.concatenate([old.astype(x.dtype), x], 1) for old, x in zip(past, chunk, strict=True)
        )

        index_c = lax.axis_index(CONTEXT) * c + jnp.arange(c, dtype=jnp.int32)
        is_new_bc = index_c < new.num_new_B[:, None]
        end_bc = jnp.broadcast_to(index_c + window + 1, (batch, c))
        start_bc = jnp.maximum(end_bc - window, window - new.num_past_B[:, None])
        ranges = KeyRanges(*(jnp.where(is_new_bc, x, 0) for x in (start_bc, end_bc)))
        out_bcnH, lse_bnc = self._cache_kernel.kernel.forward(
            q_bcnH, k_bSkH, v_bSkH, ranges, self._spec
        )
        return out_bcnH.astype(jnp.float32), lse_bnc, cache

    def _decode(self, q_bcnH, added, cache, layer, new: NewTokens, ranges, weights):
        """Attention of the first query, which is repeated, to the tokens in the cache and itself."""
        q_bCnH, added = jax.tree.map(_gathered, (q_bcnH, added))
        cache = self._store(cache, layer, new, added)
        num_tokens_b = new.num_past_B + new.num_new_B
        if self.window:  # all context ranks have the same tokens, in any order
            num_keys_b = jnp.minimum(num_tokens_b, self.window)
        else:
            num_keys_b = self.layout.num_stored(lax.axis_index(CONTEXT), num_tokens_b)
        results = self._attend_to_cache(q_bCnH[:, :1], cache, layer, num_keys_b, weights)
        if not self.window:
            results = merge_parts(*(lax.all_gather(x, CONTEXT) for x in results))
        out_b1nH, lse_bn1 = results
        out_bcnH = jnp.broadcast_to(out_b1nH, (*q_bcnH.shape[:3], out_b1nH.shape[-1]))
        return out_bcnH, jnp.broadcast_to(lse_bn1, (*lse_bn1.shape[:2], q_bcnH.shape[1])), cache

    def _store(self, cache, layer: jax.Array, new: NewTokens, added):
        """The cache with the new tokens that this rank stores, of those in `added`."""
        chunk_tokens = added[0].shape[1]
        positions_bC = new.positions_BC(chunk_tokens)
        is_stored_bC = new.is_new_BC(chunk_tokens)
        if self.window:
            is_stored_bC &= jnp.arange(chunk_tokens) >= new.num_new_B[:, None] - self.window
            slots_bC = positions_bC % self.window
        else:
            rank = lax.axis_index(CONTEXT)
            is_stored_bC &= self.layout.is_stored_on(rank, positions_bC)
            slots_bC = self.layout.num_stored(rank, positions_bC)
        slots_bC = jnp.where(is_stored_bC, slots_bC, cache[0].shape[2])  # others are dropped
        sequences_b1 = jnp.arange(len(slots_bC))[:, None]

        def stored(cached, x):
            return cached.at[sequences_b1, layer, slots_bC].set(x.astype(cached.dtype), mode="drop")

        return jax.tree.map(stored, cache, added)


def _gathered(x_bcnH: jax.Array) -> jax.Array:
    """The tokens of all context ranks."""
    return lax.all_gather(x_bcnH, CONTEXT, axis=1, tiled=True)
