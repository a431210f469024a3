"""Attention of one tile of queries over all keys, for layers that are a scan over tiles of tokens.

    tiled = make_tiled(config, mesh, tiles=n, num_kv_heads=K)
    kv = tiled.empty(batch, num_tokens, head_dim, dtype)    K and V of the whole sequence; opaque
    kv = tiled.put(kv, k_BtKH, v_BtKH, tile)                for each tile, before the first query
    out_BtNH, lse_BNt = tiled.forward(q_BtNH, kv, tile, segments_BT)
    dq_BtNH, dkv = tiled.backward(q_BtNH, kv, dkv, tile, out_BtNH, lse_BNt, dout_BtNH, segments_BT)
    dk_BtKH, dv_BtKH = tiled.take(dkv, tile)                after the last query

Arrays are global, to be used under `jit`; t counts a tile's tokens on all ranks, `tile` may be traced. `tiles_of` puts
a sequence into tiles. dkv is as kv, but float32. JAX differentiates nothing of this: forward and backward are apart.

A rank's chunks lo and hi (sharding/layout.py) are cut into n pieces each, and its tile j is piece j of lo with piece
n-1-j of hi. I neighbouring ranks exchange heads for tokens, and O such groups form a ring: strategy ring is I = 1,
ulysses O = 1. A group then holds a block of J = 2 I n pieces in natural order, and of its tile j two pieces come from
each of its ranks: at place p = i n + j of the block, and at J-1-p, its mirror image. So every tile has the same work:

    own block         the piece at p sees p pieces whole, and itself causally; its mirror image J-1-p, and itself
    earlier group's   either piece sees the lo half of the block
    later group's     the mirror image sees all of it

A *visit* is one kernel call, a piece of queries over a piece of keys: a kernel's workspace is bounded by the tile,
however long the sequence. A hop of K/V hides behind the visits, as in ring.py; of K and V a device holds its own block,
the one at hand and the one in flight.

In the backward dK/dV travel with their block, and what travels is the sum over all tiles so far: the home block's
accumulator itself, so that there is no second array of its size. It hops piece by piece in place, after the visits and
not beside them: the time is small beside that of the visits of a long sequence, and the array in float32 is not.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.attention.api import choose, repeat_heads
from jaxlc.attention.contract import AttentionSpec, Kernel
from jaxlc.attention.visits import Group, Rows, piece_at, with_piece
from jaxlc.config import AttentionConfig
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.sharding.mesh import Ranks, split_context


def make_tiled(
    config: AttentionConfig, mesh: Mesh, *, tiles: int, num_kv_heads: int, scale: float | None = None
) -> "TiledAttention":
    """Causal attention by tiles, for a sequence split on the mesh in zigzag order.

    Raises:
      Unsupported: strategy all_gather, a window, or key/value heads that do not split over the ranks that exchange.
    """
    if config.strategy == "all_gather":
        raise Unsupported("strategy all_gather does not attend by tiles; choose ring, ulysses or hybrid")
    if config.window:
        raise Unsupported(f"attention by tiles sees all earlier tokens, and window is {config.window}; choose 0")
    exchanging = {"ring": 1, "ulysses": mesh.shape[CONTEXT], "hybrid": config.ulysses_ranks}[config.strategy]
    split_mesh, (outer, inner) = split_context(mesh, exchanging)
    tensor = mesh.shape[TENSOR]
    kv_heads_stored = num_kv_heads if num_kv_heads % tensor == 0 else tensor
    if kv_heads_stored // tensor % exchanging:
        raise Unsupported(
            f"attention by tiles splits key/value heads over {exchanging} ranks, and each of them has"
            f" {kv_heads_stored // tensor}; choose a number that divides them, or strategy ring"
        )
    return TiledAttention(
        config=config,
        split_mesh=split_mesh,
        outer=outer,
        inner=inner,
        tiles=tiles,
        num_kv_heads=num_kv_heads,
        kv_heads_stored=kv_heads_stored,
        scale=scale,
    )


def tiles_of(x_BT: jax.Array, context: int, tiles: int) -> jax.Array:
    """[B, T, ...] in layout order -> [tiles, B, t, ...]; each rank's tokens stay where they are."""
    batch, num_tokens, *rest = x_BT.shape
    chunks = x_BT.reshape(batch, context, 2, tiles, num_tokens // (2 * context * tiles), *rest)
    pairs = jnp.stack([chunks[:, :, 0], chunks[:, :, 1, ::-1]], axis=2)
    return jnp.moveaxis(pairs, 3, 0).reshape(tiles, batch, num_tokens // tiles, *rest)


def layout_of(x_nBt: jax.Array, context: int) -> jax.Array:
    """The inverse of `tiles_of`."""
    tiles, batch, tile_tokens, *rest = x_nBt.shape
    pairs = x_nBt.reshape(tiles, batch, context, 2, tile_tokens // (2 * context), *rest)
    pairs = jnp.moveaxis(pairs, 0, 3)
    chunks = jnp.stack([pairs[:, :, 0], pairs[:, :, 1, ::-1]], axis=2)
    return chunks.reshape(batch, tiles * tile_tokens, *rest)


@dataclass(frozen=True, kw_only=True)
class TiledAttention:
    """See the head of the file. Its own dimensions: J pieces of a block, P of a tile, C = 2 for K and V, s a piece's
    tokens."""

    config: AttentionConfig
    split_mesh: Mesh  # the devices, context cut into outer and inner
    outer: Ranks  # the ring
    inner: Ranks  # exchange heads for tokens
    tiles: int
    num_kv_heads: int
    kv_heads_stored: int  # repeated where there are fewer than tensor ranks
    scale: float | None

    def empty(self, batch: int, num_tokens: int, head_dim: int, dtype) -> jax.Array:
        """Zeros, where K and V go: kv_JCBsKH, J over all groups and s tokens of a piece.

        Raises:
          UserError: the tokens do not split into pieces.
        """
        num_pieces = 2 * self.outer.size * self.inner.size * self.tiles
        if num_tokens % num_pieces:
            raise UserError(
                f"{num_tokens} tokens do not split into 2 x {self.outer.size * self.inner.size} x {self.tiles} equal"
                f" pieces, of context ranks and tiles; use a multiple of {num_pieces}"
            )
        shape = num_pieces, 2, batch, num_tokens // num_pieces, self.kv_heads_stored, head_dim
        return lax.with_sharding_constraint(jnp.zeros(shape, dtype), NamedSharding(self.split_mesh, self._blocks))

    def put(self, kv: jax.Array, k_BtKH: jax.Array, v_BtKH: jax.Array, tile) -> jax.Array:
        """kv with the keys and values of a tile in their places."""

        def local(kv_JCbsKH, k_btKH, v_btKH, tile):
            group = self._group(tile)
            pieces_PCbsKH = group.pieces_of(jnp.stack([k_btKH, v_btKH]), tokens_dim=2)

            def put_piece(piece, kv_JCbsKH):
                return with_piece(kv_JCbsKH, piece_at(pieces_PCbsKH, piece), group.place(piece))

            return lax.fori_loop(0, len(pieces_PCbsKH), put_piece, kv_JCbsKH)

        k_BtKH, v_BtKH = (repeat_heads(x, self.split_mesh.shape[TENSOR]) for x in (k_BtKH, v_BtKH))
        split = self._split(local, (self._blocks, self._heads, self._heads, _WHOLE), self._blocks)
        return split(kv, k_BtKH, v_BtKH, tile)

    def take(self, dkv: jax.Array, tile) -> tuple[jax.Array, jax.Array]:
        """(dk_BtKH, dv_BtKH), float32: the gradients of the keys and values that `put` put there."""

        def local(dkv_JCbsKH, tile):
            group = self._group(tile)
            pieces_PCbsKH = dkv_JCbsKH[group.place(jnp.arange(2 * self.inner.size))]
            dk_btKH, dv_btKH = group.tokens_of(pieces_PCbsKH, tokens_dim=2)
            return dk_btKH, dv_btKH

        dk_BtKH, dv_BtKH = self._split(local, (self._blocks, _WHOLE), (self._heads, self._heads))(dkv, tile)
        return self._sum_repeated(dk_BtKH), self._sum_repeated(dv_BtKH)

    def forward(self, q_BtNH: jax.Array, kv: jax.Array, tile, segments_BT) -> tuple[jax.Array, jax.Array]:
        """Attention of a tile's queries over all keys.

        Args:
          segments_BT: int32 segment ids of the whole row in layout order; None: one document.
        Returns:
          out_BtNH in q's dtype, lse_BNt float32.
        """
        kernel = self._kernel(q_BtNH, segments_BT)

        def local(q_btNH, kv, tile, segments_bt):
            group = self._group(tile, kernel, segments_bt)
            out_PbsNH, lse_PbNs = group.forward(group.pieces_of(q_btNH), kv)
            lse_btN = group.tokens_of(lse_PbNs.swapaxes(2, 3))
            return group.tokens_of(out_PbsNH.astype(q_btNH.dtype)), lse_btN.swapaxes(1, 2)

        split = self._split(local, (self._heads, self._blocks, _WHOLE, self._tokens), (self._heads, self._rows))
        return split(q_BtNH, kv, tile, segments_BT)

    def backward(
        self,
        q_BtNH: jax.Array,
        kv: jax.Array,
        dkv: jax.Array,
        tile,
        out_BtNH: jax.Array,
        lse_BNt: jax.Array,
        dout_BtNH: jax.Array,
        segments_BT,
    ) -> tuple[jax.Array, jax.Array]:
        """The gradient of `forward`'s out.

        Returns:
          dq_BtNH in q's dtype, and dkv with this tile's share added.
        """
        kernel = self._kernel(q_BtNH, segments_BT)

        def local(q_btNH, kv, dkv, tile, out_btNH, lse_bNt, dout_btNH, segments_bt):
            group = self._group(tile, kernel, segments_bt)
            q, out, lse_PbsN, dout = map(group.pieces_of, (q_btNH, out_btNH, lse_bNt.swapaxes(1, 2), dout_btNH))
            rows = Rows(q, out, lse_PbsN.swapaxes(2, 3), dout)
            dq_PbsNH, dkv = group.backward(rows, kv, dkv)
            return group.tokens_of(dq_PbsNH.astype(q_btNH.dtype)), dkv

        heads, blocks = self._heads, self._blocks
        in_specs = (heads, blocks, blocks, _WHOLE, heads, self._rows, heads, self._tokens)
        split = self._split(local, in_specs, (heads, blocks))
        return split(q_BtNH, kv, dkv, tile, out_BtNH, lse_BNt, dout_BtNH, segments_BT)

    def _group(self, tile, kernel: Kernel | None = None, segments_bt: jax.Array | None = None) -> Group:
        spec = AttentionSpec(
            scale=self.scale,
            query_block_tokens=self.config.query_block_tokens,
            key_block_tokens=self.config.key_block_tokens,
        )
        return Group.here(kernel, spec, self.outer, self.inner, self.tiles, tile, segments_bt)

    def _kernel(self, q_BtNH: jax.Array, segments_BT) -> Kernel:
        packed = segments_BT is not None
        return choose(self.config, self.split_mesh, head_dim=q_BtNH.shape[-1], dtype=q_BtNH.dtype, packed=packed).kernel

    def _sum_repeated(self, x_BtKH: jax.Array) -> jax.Array:
        batch, tile_tokens, stored, head_dim = x_BtKH.shape
        repeats = stored // self.num_kv_heads
        return x_BtKH.reshape(batch, tile_tokens, self.num_kv_heads, repeats, head_dim).sum(axis=3)

    @property
    def _context(self) -> tuple[str, str]:
        return self.outer.axis, self.inner.axis

    @property
    def _tokens(self) -> PartitionSpec:
        return PartitionSpec(BATCH_AXES, self._context)

    @property
    def _heads(self) -> PartitionSpec:
        return PartitionSpec(BATCH_AXES, self._context, TENSOR, None)

    @property
    def _rows(self) -> PartitionSpec:
        return PartitionSpec(BATCH_AXES, TENSOR, self._context)

    @property
    def _blocks(self) -> PartitionSpec:
        return PartitionSpec(self.outer.axis, None, BATCH_AXES, None, (TENSOR, self.inner.axis), None)

    def _split(self, local: Callable, in_specs: tuple, out_specs) -> Callable:
        # check_vma: see api.make.
        return jax.shard_map(local, mesh=self.split_mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


_WHOLE = PartitionSpec()
