"""Sliding windows: only the tails that a window reaches travel, to both neighbours, and no ring turns.

In zigzag order rank r holds chunks r and 2 R - 1 - r of R ranks. The chunk before its first lies on rank r - 1, the
chunk before its second on rank r + 1 (on the last rank: is its own first). So one shift along this folded line brings
every chunk its predecessor, and a window of w tokens needs the last w - 1 tokens before each chunk: as many shifts as
chunks are in there, the last one of a tail only. One kernel call then sees each chunk's queries and, in front of its
own keys, those tokens: its halo (the term of stencil codes).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxlc.attention.contract import AttentionSpec, Kernel, Masks
from jaxlc.core import scopes
from jaxlc.sharding.mesh import Ranks


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def attend(
    q_btnH: jax.Array,
    k_bskH: jax.Array,
    v_bskH: jax.Array,
    masks: Masks,
    kernel: Kernel,
    spec: AttentionSpec,
    ranks: Ranks,
) -> tuple[jax.Array, jax.Array]:
    """Attention of this rank's piece in the window that `spec` has; call inside `shard_map`. As `ring.attend`."""
    out, lse = kernel.forward(*_chunk_operands(q_btnH, k_bskH, v_bskH, masks, spec, ranks), spec)
    return _joined(out).astype(q_btnH.dtype), _joined(lse, axis=2)


def _forward_rule(q, k, v, masks, kernel, spec, ranks):
    out, lse = attend(q, k, v, masks, kernel, spec, ranks)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")  # see ring.py
    return (out, lse), (q, k, v, masks, out, lse)


def _backward_rule(kernel, spec, ranks, residuals, cotangents):
    q, k, v, masks, *rows = residuals
    operands = _chunk_operands(q, k, v, masks, spec, ranks)
    out, lse, dout, dlse = (_chunks(x, axis) for x, axis in zip([*rows, *cotangents], (1, 2, 1, 2), strict=True))
    dq, dk, dv = kernel.backward(*operands, spec, out, lse, dout, dlse)
    # A token's gradient comes from its own chunk and from every halo that it is in: back along the same line, float32.
    kv_like = jax.ShapeDtypeStruct((*k.shape[:3], k.shape[3] + v.shape[3]), jnp.float32)
    extend = functools.partial(_extended, halo_tokens=_halo_tokens(q, spec, ranks), ranks=ranks)
    (dkv,) = jax.linear_transpose(extend, kv_like)(jnp.concatenate([dk, dv], axis=-1))
    dk, dv = dkv[..., : k.shape[3]], dkv[..., k.shape[3] :]
    return _joined(dq).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


attend.defvjp(_forward_rule, _backward_rule)


def _chunk_operands(q, k, v, masks: Masks, spec, ranks: Ranks):
    """(q, k, v, masks) of one kernel call: the two chunks are rows of its batch, keys have their halo in front."""
    extend = functools.partial(_extended, halo_tokens=_halo_tokens(q, spec, ranks), ranks=ranks)
    kv = extend(jnp.concatenate([k, v], axis=-1))
    positions, segments = _positions(q, masks, ranks), masks.q_segments_BT
    if segments is None:
        segments = jnp.ones_like(positions)  # what no rank sends arrives as 0: the halo of the first chunk is padding
    k_positions, k_segments = jnp.moveaxis(extend(jnp.stack([positions, segments], axis=-1)), -1, 0)
    chunk_masks = Masks(_chunks(positions), k_positions, _chunks(segments), k_segments)
    return _chunks(q), kv[..., : k.shape[3]], kv[..., k.shape[3] :], chunk_masks


def _halo_tokens(q_btnH, spec: AttentionSpec, ranks: Ranks) -> int:
    chunk_tokens = q_btnH.shape[1] // 2
    return min(spec.window - 1, (2 * ranks.size - 1) * chunk_tokens)


@jax.named_scope(scopes.WINDOW_HALO)
def _extended(x_bs: jax.Array, halo_tokens: int, ranks: Ranks) -> jax.Array:
    """[b, s, ...] -> [2 b, halo + s / 2, ...]: both chunks, each with the tokens before it. Linear in x."""
    pair = jnp.split(x_bs, 2, axis=1)
    pieces, missing = [_stacked(pair)], halo_tokens
    while missing > 0:
        taken = min(missing, pair[0].shape[1])
        pair = _predecessors([x[:, x.shape[1] - taken :] for x in pair], ranks)
        pieces.insert(0, _stacked(pair))
        missing -= taken
    return jnp.concatenate(pieces, axis=1)


def _predecessors(pair, ranks: Ranks):
    """What lies one chunk further back on the folded line; zeros before its beginning."""
    lo, hi = pair
    from_left = lax.ppermute(lo, ranks.axis, [(rank, rank + 1) for rank in range(ranks.size - 1)])
    from_right = lax.ppermute(hi, ranks.axis, [(rank + 1, rank) for rank in range(ranks.size - 1)])
    return from_left, jnp.where(lax.axis_index(ranks.axis) == ranks.size - 1, lo, from_right)


def _positions(q_btnH, masks: Masks, ranks: Ranks) -> jax.Array:
    return masks.q_positions_BT if masks.q_positions_BT is not None else ranks.positions(*q_btnH.shape[:2])


def _stacked(pair) -> jax.Array:
    return jnp.concatenate(pair, axis=0)


def _chunks(x: jax.Array, axis: int = 1) -> jax.Array:
    return _stacked(jnp.split(x, 2, axis))


def _joined(x: jax.Array, axis: int = 1) -> jax.Array:
    return jnp.concatenate(jnp.split(x, 2), axis)
