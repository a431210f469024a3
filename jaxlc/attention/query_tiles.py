"""Attention of one tile of queries over all keys, for layers that scan over tiles of tokens.

    tiled = make_tiled(config, mesh, tiles=n, num_kv_heads=K)
    kv = tiled.empty(batch, num_tokens, head_dim, dtype)    K and V of the whole sequence; opaque
    ranges = tiled.prepare(positions_BT, segments_BT, ..)   once per training step
    kv = tiled.put(kv, k_BtKH, v_BtKH, tile)                for each tile
    kv = tiled.exchange(kv, ranges)                         before the first query
    out_BtNH, lse_BNt = tiled.forward(q_BtNH, kv, tile, ranges, sinks_N)
    dq_BtNH, dkv, dsinks_N = tiled.backward(q_BtNH, kv, dkv, tile, out_BtNH, lse_BNt, dout_BtNH, ranges, sinks_N)
    dkv = tiled.add_exchanged(dkv, ranges)                  after the last query
    dk_BtKH, dv_BtKH = tiled.take(dkv, tile)                for each tile

Arrays are global, for use under `jit`. t counts a tile's tokens on all ranks, and `tile` may be traced. `tiles_of`
splits a sequence in layout order into tiles. dkv has the shape of kv in float32. JAX differentiates none of these
functions: forward and backward are separate calls.

A rank's chunks lo and hi (sharding/document_layout.py) are split into n sub-chunks each. Its tile j
consists of sub-chunk j of lo and sub-chunk n-1-j of hi. Groups of `inner` neighboring ranks
exchange heads for tokens, and the groups form a ring of size `outer`: inner is 1 for strategy ring,
outer is 1 for ulysses. So a group has a block of J = 2 inner n sub-chunks in natural order. Of tile
j, it has two sub-chunks of each of its ranks i: those with index p = i n + j and J-1-p (the mirror
image) in the block. Every tile then has the same work:

    own block                  sub-chunk p attends to the p sub-chunks before it and causally to itself; so does J-1-p
    block of an earlier group  both sub-chunks attend to the first half of the block
    block of a later group     the mirror image attends to the whole block

The work is done in KV block steps (kv_blocks.py): kernel calls of a sub-chunk of queries over some sub-chunks of keys,
so that a kernel's workspace does not grow with the sequence. Sends of K/V overlap with these steps, as in ring.py. Of K
and V, a device stores its own block, the current one and the one in flight.

In the backward pass, dK/dV are sent along with their block. The array that is sent is the sum over all tiles so far,
the owner's accumulator itself, so that there is no second array of its size. It is sent sub-chunk by sub-chunk, in
place, before the steps instead of overlapping with them. The time of these sends is small compared with the steps of a
long sequence; a second float32 array would not be small.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.attention import contract
from jaxlc.attention.contract import AttentionSpec, Kernel, KeysValues, OutLse, QueryResults
from jaxlc.attention.kernels.choose import SharedPrefixKernel
from jaxlc.attention.key_ranges import TokenInfo, ring_key_ranges_of_halves
from jaxlc.attention.kv_blocks import CHUNKS, GroupState, SlidingSteps
from jaxlc.attention.strategies import ulysses, window_exchange
from jaxlc.attention.strategies.sharded_attention import attention_spec, choose
from jaxlc.attention.strategies.strategy import DEFAULT_AXES, AttentionSpecs, repeat_heads
from jaxlc.config import AttentionConfig
from jaxlc.core import BATCH_AXES, CONTEXT, TENSOR, Unsupported, UserError, scopes
from jaxlc.sharding.mesh import Ranks, shard_map, split_context


def tiles_of(x_BT: jax.Array, context: int, tiles: int) -> jax.Array:
    """[B, T, ...] in layout order -> [tiles, B, t, ...], without communication between ranks."""
    batch, num_tokens, *rest = x_BT.shape
    chunks = x_BT.reshape(batch, context, 2, tiles, num_tokens // (2 * context * tiles), *rest)
    pairs = jnp.stack([chunks[:, :, 0], chunks[:, :, 1, ::-1]], axis=2)
    return jnp.moveaxis(pairs, 3, 0).reshape(tiles, batch, num_tokens // tiles, *rest)


def layout_of(x_MBt: jax.Array, context: int) -> jax.Array:
    """The inverse of `tiles_of`."""
    tiles, batch, tile_tokens, *rest = x_MBt.shape
    pairs = x_MBt.reshape(tiles, batch, context, 2, tile_tokens // (2 * context), *rest)
    pairs = jnp.moveaxis(pairs, 0, 3)
    chunks = jnp.stack([pairs[:, :, 0], pairs[:, :, 1, ::-1]], axis=2)
    return chunks.reshape(batch, tiles * tile_tokens, *rest)


def make_tiled(
    config: AttentionConfig,
    mesh: Mesh,
    *,
    tiles: int,
    num_kv_heads: int,
    window: int | None = None,
    kv_tokens_per_step: int | None = None,
    shared_prefixes: int = 0,
    deterministic: bool = False,
) -> "TiledAttention":
    """Causal attention by tiles, for a sequence split on the mesh in zigzag order, or per document with mirrored pieces
    (`document_order`).

    Args:
      tiles: n. A kernel call has as many thread blocks as a sub-chunk has query blocks, times the heads of a rank after
        the exchange. With too many tiles, these are too few to occupy the GPU.
      num_kv_heads: K.
      window: a query attends to itself and the window - 1 tokens before it. None: to all earlier tokens.
      kv_tokens_per_step: limit of the keys of one kernel call, unless a sub-chunk is longer. Merging its result moves
        18 bytes per entry of out. On an H100 this takes 800 / kv_tokens_per_step of the call's time (estimated, at 600
        TFLOP/s and 3.35 TB/s; not yet timed on a GPU). None: from memory, see `_max_kv_tokens`.
      deterministic: as for `sharded_attention.make`.
      shared_prefixes: as for `sharded_attention.make`. Only in zigzag order: with mirrored
        pieces, a query would not reach all blocks of its prefix.
    Raises:
      Unsupported: strategy all_gather, or key/value heads that do not split over the inner ranks.
    """
    if config.strategy == "all_gather":
        raise Unsupported(
            "unsupported: strategy all_gather with layer tiles (supported: ring, ulysses, hybrid)"
        )
    inner_size = {"ring": 1, "ulysses": mesh.shape[CONTEXT], "hybrid": config.ulysses_degree}[
        config.strategy
    ]
    split_mesh, (outer, inner) = split_context(mesh, inner_size)
    tensor = mesh.shape[TENSOR]
    kv_heads_stored = num_kv_heads if num_kv_heads % tensor == 0 else tensor
    if kv_heads_stored // tensor % inner_size:
        raise Unsupported(
            f"unsupported: {kv_heads_stored // tensor} key/value heads per rank do not split over {inner_size} ulysses"
            " ranks, with layer tiles; use a number of ranks that divides them, or strategy ring"
        )
    return TiledAttention(
        config=config,
        split_mesh=split_mesh,
        outer=outer,
        inner=inner,
        tiles=tiles,
        num_kv_heads=num_kv_heads,
        kv_heads_stored=kv_heads_stored,
        window=window,
        kv_tokens_per_step=kv_tokens_per_step,
        shared_prefixes=shared_prefixes,
        deterministic=deterministic,
    )


@dataclass(frozen=True, kw_only=True)
class TiledAttention:
    """Attention by tiles; see the docstring of the module.

    Arrays without a shape suffix: kv and dkv are K and V, or their gradients, of the whole
    sequence, block by block, [2, B, S, K, H]. kv_block and dkv_block are a rank's shard of them,
    [2, b, s, k, H].
    """

    config: AttentionConfig
    split_mesh: Mesh  # the mesh with the context axis split into outer and inner
    outer: Ranks  # the ring of groups
    inner: Ranks  # the ranks of a group, which exchange heads for tokens
    tiles: int
    num_kv_heads: int
    # num_kv_heads, or the number of tensor ranks if that is larger (heads are repeated)
    kv_heads_stored: int
    window: int | None
    kv_tokens_per_step: int | None
    shared_prefixes: int = 0
    deterministic: bool = False

    def empty(self, batch: int, num_tokens: int, head_dim: int, dtype) -> jax.Array:
        """kv filled with zeros.

        Raises:
          UserError: the tokens do not split into sub-chunks.
        """
        context = self.outer.size * self.inner.size
        if num_tokens % (2 * context * self.tiles):
            raise UserError(
                f"{num_tokens} tokens do not split into {self.tiles} tiles of 2 x {context} equal sub-chunks;"
                f" use a multiple of {2 * context * self.tiles}"
            )
        zeros = jnp.zeros((2, batch, num_tokens, self.kv_heads_stored, head_dim), dtype)
        return lax.with_sharding_constraint(zeros, NamedSharding(self.split_mesh, self._blocks))

    def prepare(
        self,
        positions_BT: jax.Array,
        segments_BT: jax.Array | None,
        q_like=None,
        prefixes_BTD: jax.Array | None = None,
    ):
        """The mask as key ranges, once per training step.

        Args:
          positions_BT, segments_BT: int32, of the whole sequence in layout order. No segments: one document.
          q_like: of `ShardedAttention.prepare`; not used, since each call has other slices of the ranges.
          prefixes_BTD: int32, with `shared_prefixes`; see `key_ranges.TokenInfo`.
        Returns:
          The ranges of each group's tokens over each half of the block of each ring step, [ring steps, halves, B, S],
          or None for one document. With a sliding window, the result of `window_exchange.prepare`.
        """
        if segments_BT is None and self.window is None:
            return None

        def local(tokens: TokenInfo):
            tokens = ulysses.gather_tokens(tokens, self.inner)
            if self.window is not None:
                return window_exchange.prepare(tokens, None, self._spec, self.outer, CHUNKS)
            return ring_key_ranges_of_halves(tokens, self._spec, self.outer)

        tokens = TokenInfo(positions_BT, segments_BT, prefixes_BTD)
        return self._split(local, (tokens.map(lambda _: self._specs.tokens),), self._ranges)(tokens)

    def put(self, kv: jax.Array, k_BtKH: jax.Array, v_BtKH: jax.Array, tile) -> jax.Array:
        """kv with the keys and values of a tile written to it."""

        def local(kv_block, k_btkH, v_btkH, tile):
            group = self._group(tile)
            # [P, 2, b, t, k, H]
            kv_subchunks = group.to_subchunks(jnp.stack([k_btkH, v_btkH]), tokens_dim=2)

            def put_subchunk(kv_block, operands):
                subchunk, kv = operands
                return group.update_kv(kv_block, kv, group.index_in_block(subchunk)), None

            return lax.scan(
                put_subchunk, kv_block, (jnp.arange(group.num_tile_subchunks), kv_subchunks)
            )[0]

        k_BtKH, v_BtKH = (repeat_heads(x, self.split_mesh.shape[TENSOR]) for x in (k_BtKH, v_BtKH))
        split = self._split(
            local, (self._blocks, self._specs.heads, self._specs.heads, _REPLICATED), self._blocks
        )
        return split(kv, k_BtKH, v_BtKH, tile)

    def exchange(self, kv: jax.Array, ranges) -> jax.Array:
        """kv as `forward` and `backward` take it: for a sliding window, with the tokens that it
        reaches elsewhere.
        """
        return self._exchange(window_exchange.extend, kv, ranges)

    def add_exchanged(self, dkv: jax.Array, ranges) -> jax.Array:
        """The transpose of `exchange`."""
        return self._exchange(window_exchange.add_extended, dkv, ranges)

    def _exchange(self, exchange: Callable, kv: jax.Array, ranges) -> jax.Array:
        if self.window is None or self.outer.size == 1:
            return kv

        def local(kv_block, ranges_bs):
            return jax.vmap(lambda x_bskH: exchange(x_bskH, ranges_bs, self._spec, self.outer))(
                kv_block
            )

        return self._split(local, (self._blocks, self._ranges), self._blocks)(kv, ranges)

    def take(self, dkv: jax.Array, tile) -> KeysValues:
        """(dk_BtKH, dv_BtKH), float32: the gradients of the keys and values that `put` wrote for
        this tile.
        """

        def local(dkv_block, tile):
            group = self._group(tile)
            indices_P = group.index_in_block(jnp.arange(group.num_tile_subchunks))
            dkv_subchunks = lax.map(lambda index: group.slice_kv(dkv_block, index), indices_P)
            dk_btkH, dv_btkH = group.from_subchunks(dkv_subchunks, tokens_dim=2)
            return dk_btkH, dv_btkH

        split = self._split(
            local, (self._blocks, _REPLICATED), (self._specs.heads, self._specs.heads)
        )
        dk_BtKH, dv_BtKH = split(dkv, tile)
        return self._sum_repeated(dk_BtKH), self._sum_repeated(dv_BtKH)

    def forward(
        self, q_BtNH: jax.Array, kv: jax.Array, tile, ranges, sinks_N: jax.Array | None = None
    ) -> OutLse:
        """Attention of a tile's queries over all keys.

        Args:
          q_BtNH: queries of a tile.
          kv: of `exchange`, after `put` of all tiles.
          tile: index of the tile, int32.
          ranges: of `prepare`. None, without a window: each sequence is one document.
          sinks_N: float32; see contract.py. None: no sinks.
        Returns:
          out_BtNH in q's dtype, lse_BNt float32.
        """
        group_of = self._group_with_kernel(q_BtNH, ranges)

        def local(q_btnH, kv_block, tile, ranges_bs):
            group = group_of(tile, ranges_bs)
            out_PbtnH, lse_Pbnt = self._steps(group).forward(group.to_subchunks(q_btnH), kv_block)
            lse_btn = group.from_subchunks(lse_Pbnt.swapaxes(2, 3))
            return group.from_subchunks(out_PbtnH.astype(q_btnH.dtype)), lse_btn.swapaxes(1, 2)

        in_specs = (self._specs.heads, self._blocks, _REPLICATED, self._ranges)
        split = self._split(local, in_specs, (self._specs.heads, self._specs.lse))
        return contract.join(*split(q_BtNH, kv, tile, ranges), sinks_N)

    def backward(
        self,
        q_BtNH: jax.Array,
        kv: jax.Array,
        dkv: jax.Array,
        tile,
        out_BtNH: jax.Array,
        lse_BNt: jax.Array,
        dout_BtNH: jax.Array,
        ranges,
        sinks_N: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The gradients of `forward`'s out.

        Returns:
          dq_BtNH in q's dtype, dkv with this tile's contribution added, and this tile's gradient of the sinks, float32
          (None without sinks).
        """
        group_of = self._group_with_kernel(q_BtNH, ranges)

        def local(q_btnH, kv_block, dkv_block, tile, out_btnH, lse_bnt, dout_btnH, ranges_bs):
            group = group_of(tile, ranges_bs)
            q, out, lse_Pbtn, dout = map(
                group.to_subchunks, (q_btnH, out_btnH, lse_bnt.swapaxes(1, 2), dout_btnH)
            )
            results = out, lse_Pbtn.swapaxes(2, 3), dout
            dq_PbtnH, dkv_block = self._steps(group).backward(q, *results, kv_block, dkv_block)
            return group.from_subchunks(dq_PbtnH.astype(q_btnH.dtype)), dkv_block

        heads = self._specs.heads
        blocks = self._blocks
        in_specs = (heads, blocks, blocks, _REPLICATED, heads, self._specs.lse, heads, self._ranges)
        split = self._split(local, in_specs, (heads, blocks))
        dq_BtNH, dkv = split(q_BtNH, kv, dkv, tile, out_BtNH, lse_BNt, dout_BtNH, ranges)
        if sinks_N is None:
            return dq_BtNH, dkv, None
        results = QueryResults(out_BtNH, lse_BNt, dout_BtNH, jnp.zeros_like(lse_BNt))
        return dq_BtNH, dkv, contract.gradient(sinks_N, results)

    def _group_with_kernel(self, q_BtNH: jax.Array, ranges) -> Callable:
        """A function (tile, ranges_bs) -> GroupState, to be called inside `shard_map`."""
        kernel = choose(
            self.config, self.split_mesh, head_dim=q_BtNH.shape[-1], dtype=q_BtNH.dtype, packed=ranges is not None,
            window=self.window, ring_ranks=self.outer.size, shared_prefixes=self.shared_prefixes,
            deterministic=self.deterministic,
        ).kernel  # fmt: skip
        if self.shared_prefixes and ranges is not None:
            kernel = SharedPrefixKernel(kernel)
        return functools.partial(
            self._group, kernel=kernel, subchunks_per_step=self._subchunks_per_step(q_BtNH)
        )

    def _subchunks_per_step(self, q_BtNH: jax.Array) -> int:
        """The divisor of half a block's sub-chunks with the fewest kernel calls, within the limit
        of their keys.
        """
        subchunk_tokens = q_BtNH.shape[1] // (2 * self.outer.size * self.inner.size)
        max_tokens = self.kv_tokens_per_step or self._max_kv_tokens(q_BtNH)
        half_block = self.inner.size * self.tiles
        allowed = [
            n
            for n in range(1, half_block + 1)
            if half_block % n == 0 and n * subchunk_tokens <= max_tokens
        ]
        # Of a pair of sub-chunks: long steps in each block, short ones in the own block.
        return min(allowed, key=lambda n: (self.outer.size * 2 * half_block // n + n, n), default=1)

    def _max_kv_tokens(self, q_BtNH: jax.Array) -> int:
        """Keys of a kernel call whose arrays take `_KV_BYTES` per entry of the tile's queries.

        For a key these are K and V, their gradients with float32 sums, and the gradients by query
        head that kernels write for grouped queries. After the exchange of heads for tokens, a rank
        has more queries and fewer heads.
        """
        num_queries = q_BtNH.shape[1] // self.outer.size
        num_heads = q_BtNH.shape[2]
        return _KV_BYTES * num_heads * num_queries // (12 * self.kv_heads_stored + 4 * num_heads)

    def _steps(self, group: GroupState) -> GroupState | SlidingSteps:
        return group if self.window is None else SlidingSteps(group)

    def _group(
        self, tile, ranges_bs=None, kernel: Kernel | None = None, subchunks_per_step: int = 1
    ) -> GroupState:
        return GroupState(
            kernel=kernel,
            spec=self._spec,
            outer=self.outer,
            inner=self.inner,
            num_tiles=self.tiles,
            subchunks_per_step=subchunks_per_step,
            tile=tile,
            ranges=ranges_bs,
        )

    def _sum_repeated(self, x_BtKH: jax.Array) -> jax.Array:
        batch, tile_tokens, stored, head_dim = x_BtKH.shape
        repeats = stored // self.num_kv_heads
        return x_BtKH.reshape(batch, tile_tokens, self.num_kv_heads, repeats, head_dim).sum(axis=3)

    @property
    def _spec(self) -> AttentionSpec:
        return attention_spec(self.config, self.split_mesh, True, self.window, None)

    @property
    def _specs(self) -> AttentionSpecs:
        return DEFAULT_AXES.specs((self.outer.axis, self.inner.axis))

    @property
    def _ranges(self) -> PartitionSpec:
        tokens = BATCH_AXES, self.outer.axis
        return PartitionSpec(None, None, *tokens) if self.window is None else PartitionSpec(*tokens)

    @property
    def _blocks(self) -> PartitionSpec:
        return PartitionSpec(None, BATCH_AXES, self.outer.axis, (TENSOR, self.inner.axis), None)

    def _split(self, local: Callable, in_specs: tuple, out_specs) -> Callable:
        if self.window is not None:
            local = jax.named_scope(scopes.SLIDING_WINDOW)(local)
        local = jax.named_scope(scopes.CORE_ATTENTION)(local)
        return shard_map(local, self.split_mesh, in_specs, out_specs)


_REPLICATED = PartitionSpec()
# A layer's other activations of a tile take about 50 bytes per entry of the queries (with an MLP of
# 3.5 x model.dim).
_KV_BYTES = 20
