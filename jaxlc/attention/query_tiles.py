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
    earlier group's   either piece sees the first half of the block
    later group's     the mirror image sees all of it

They are seen in visits (visits.py): kernel calls of a piece of queries over some pieces of keys, so that a kernel's
workspace does not grow with the sequence. A hop of K/V hides behind the visits, as in ring.py; of K and V a device
holds its own block, the one at hand and the one in flight.

In the backward dK/dV travel with their block, and what travels is the sum over all tiles so far: the home block's
accumulator itself, so that there is no second array of its size. It hops piece by piece in place, before the visits and
not beside them: the time is small beside that of a long sequence's visits, and a second array in float32 is not.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlc.attention.api import choose, repeat_heads
from jaxlc.attention.contract import AttentionSpec, Kernel
from jaxlc.attention.kv_blocks import Group, Rows, segments_of_groups
from jaxlc.config import AttentionConfig
from jaxlc.core import scopes
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.core.errors import Unsupported, UserError
from jaxlc.sharding.mesh import Ranks, split_context


def make_tiled(
    config: AttentionConfig,
    mesh: Mesh,
    *,
    tiles: int,
    num_kv_heads: int,
    scale: float | None = None,
    keys_per_visit: int = 16_384,
) -> "TiledAttention":
    """Causal attention by tiles, for a sequence split on the mesh in zigzag order.

    Args:
      tiles: n. A visit's kernel has as many query tiles to spread over a GPU as a piece has, times the heads of a
        rank after the exchange: few of them leave it idle.
      keys_per_visit: tokens of keys that one kernel call may see, if a piece is not longer. Merging what it found moves
        18 bytes an entry of out: on an H100 800 / keys_per_visit of what the call takes, at 600 TFLOP/s and 3.35 TB/s.
    Raises:
      Unsupported: strategy all_gather, a window, or key/value heads that do not split over the ranks that exchange.
    """
    if config.strategy == "all_gather":
        raise Unsupported("strategy all_gather does not attend by tiles; choose ring, ulysses or hybrid")
    if config.window:
        raise Unsupported(f"attention by tiles sees all earlier tokens, and window is {config.window}; choose 0")
    exchanging = {"ring": 1, "ulysses": mesh.shape[CONTEXT], "hybrid": config.ulysses_degree}[config.strategy]
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
        keys_per_visit=keys_per_visit,
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
    """See the head of the file. Its own dimensions: P pieces of a tile; C = 2 for K and V; S all tokens, block by
    block, and s a block's."""

    config: AttentionConfig
    split_mesh: Mesh  # the devices, context cut into outer and inner
    outer: Ranks  # the ring
    inner: Ranks  # exchange heads for tokens
    tiles: int
    num_kv_heads: int
    kv_heads_stored: int  # repeated where there are fewer than tensor ranks
    scale: float | None
    keys_per_visit: int  # tokens

    def empty(self, batch: int, num_tokens: int, head_dim: int, dtype) -> jax.Array:
        """Zeros where K and V go: kv_CBSKH.

        Raises:
          UserError: the tokens do not split into pieces.
        """
        context = self.outer.size * self.inner.size
        if num_tokens % (2 * context * self.tiles):
            raise UserError(
                f"{num_tokens} tokens do not split into {self.tiles} tiles of 2 x {context} equal pieces;"
                f" use a multiple of {2 * context * self.tiles}"
            )
        zeros_CBSKH = jnp.zeros((2, batch, num_tokens, self.kv_heads_stored, head_dim), dtype)
        return lax.with_sharding_constraint(zeros_CBSKH, NamedSharding(self.split_mesh, self._blocks))

    def put(self, kv: jax.Array, k_BtKH: jax.Array, v_BtKH: jax.Array, tile) -> jax.Array:
        """kv with the keys and values of a tile in their places."""

        def local(kv_CbskH, k_btkH, v_btkH, tile):
            group = self._group(tile)
            pieces_PCbtkH = group.pieces_of(jnp.stack([k_btkH, v_btkH]), tokens_dim=2)

            def put_piece(kv_CbskH, operands):
                piece, piece_CbtkH = operands
                return group.with_keys(kv_CbskH, piece_CbtkH, group.place_of(piece)), None

            return lax.scan(put_piece, kv_CbskH, (jnp.arange(group.num_pieces), pieces_PCbtkH))[0]

        k_BtKH, v_BtKH = (repeat_heads(x, self.split_mesh.shape[TENSOR]) for x in (k_BtKH, v_BtKH))
        split = self._split(local, (self._blocks, self._heads, self._heads, _WHOLE), self._blocks)
        return split(kv, k_BtKH, v_BtKH, tile)

    def take(self, dkv: jax.Array, tile) -> tuple[jax.Array, jax.Array]:
        """(dk_BtKH, dv_BtKH), float32: the gradients of the keys and values that `put` put there."""

        def local(dkv_CbskH, tile):
            group = self._group(tile)
            places_P = group.place_of(jnp.arange(group.num_pieces))
            pieces_PCbtkH = lax.map(lambda place: group.keys_at(dkv_CbskH, place), places_P)
            dk_btkH, dv_btkH = group.tokens_of(pieces_PCbtkH, tokens_dim=2)
            return dk_btkH, dv_btkH

        dk_BtKH, dv_BtKH = self._split(local, (self._blocks, _WHOLE), (self._heads, self._heads))(dkv, tile)
        return self._sum_repeated(dk_BtKH), self._sum_repeated(dv_BtKH)

    def forward(self, q_BtNH: jax.Array, kv: jax.Array, tile, segments_BT) -> tuple[jax.Array, jax.Array]:
        """Attention of a tile's queries over all keys.

        Args:
          segments_BT: int32 segment ids of the whole row in layout order; None: one document.
        Returns:
          out_BtNH in q's dtype, lse_BNt float32.
        """
        group_of = self._group_with_kernel(q_BtNH, segments_BT)

        def local(q_btnH, kv_CbskH, tile, segments_bt):
            group = group_of(tile, segments_bt)
            out_PbtnH, lse_Pbnt = group.forward(group.pieces_of(q_btnH), kv_CbskH)
            lse_btn = group.tokens_of(lse_Pbnt.swapaxes(2, 3))
            return group.tokens_of(out_PbtnH.astype(q_btnH.dtype)), lse_btn.swapaxes(1, 2)

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
        """The gradients of `forward`'s out.

        Returns:
          dq_BtNH in q's dtype, and dkv with this tile's share added.
        """
        group_of = self._group_with_kernel(q_BtNH, segments_BT)

        def local(q_btnH, kv_CbskH, dkv_CbskH, tile, out_btnH, lse_bnt, dout_btnH, segments_bt):
            group = group_of(tile, segments_bt)
            q, out, lse_Pbtn, dout = map(group.pieces_of, (q_btnH, out_btnH, lse_bnt.swapaxes(1, 2), dout_btnH))
            dq_PbtnH, dkv_CbskH = group.backward(Rows(q, out, lse_Pbtn.swapaxes(2, 3), dout), kv_CbskH, dkv_CbskH)
            return group.tokens_of(dq_PbtnH.astype(q_btnH.dtype)), dkv_CbskH

        heads, blocks = self._heads, self._blocks
        in_specs = (heads, blocks, blocks, _WHOLE, heads, self._rows, heads, self._tokens)
        split = self._split(local, in_specs, (heads, blocks))
        return split(q_BtNH, kv, dkv, tile, out_BtNH, lse_BNt, dout_BtNH, segments_BT)

    def _group_with_kernel(self, q_BtNH: jax.Array, segments_BT) -> Callable:
        """(tile, segments_bt) -> Group, inside `shard_map`."""
        head_dim, packed = q_BtNH.shape[-1], segments_BT is not None
        kernel = choose(self.config, self.split_mesh, head_dim=head_dim, dtype=q_BtNH.dtype, packed=packed).kernel
        piece_tokens = q_BtNH.shape[1] // (2 * self.outer.size * self.inner.size)
        half_a_block = self.inner.size * self.tiles
        fitting = (
            n for n in range(1, half_a_block + 1) if half_a_block % n == 0 and n * piece_tokens <= self.keys_per_visit
        )
        return functools.partial(self._group, kernel=kernel, places_per_visit=max(fitting, default=1))

    def _group(self, tile, segments_bt=None, kernel: Kernel | None = None, places_per_visit: int = 1) -> Group:
        return Group(
            kernel=kernel,
            spec=AttentionSpec(
                scale=self.scale,
                query_block_tokens=self.config.query_block_tokens,
                key_block_tokens=self.config.key_block_tokens,
            ),
            outer=self.outer,
            inner=self.inner,
            tiles=self.tiles,
            places_per_visit=places_per_visit,
            tile=tile,
            segments_Obs=None if segments_bt is None else segments_of_groups(segments_bt, self.outer, self.inner),
        )

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
        return PartitionSpec(None, BATCH_AXES, self.outer.axis, (TENSOR, self.inner.axis), None)

    def _split(self, local: Callable, in_specs: tuple, out_specs) -> Callable:
        local = jax.named_scope(scopes.CORE_ATTENTION)(local)
        # check_vma: see api.make.
        return jax.shard_map(local, mesh=self.split_mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


_WHOLE = PartitionSpec()
