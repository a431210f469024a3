"""The order of tokens in tiles, from layout order and back; query_tiles.py defines the tiles."""

import jax
import jax.numpy as jnp


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
