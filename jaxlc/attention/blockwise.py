"""The portable kernel: attention tile by tile in plain XLA, O(T + S) memory, on any device.

The softmax runs online over key tiles (Milakov and Gimelshein 2018; FlashAttention, algorithm 1), and the
backward recomputes each tile's weights from the row's lse (FlashAttention-2, algorithm 2). A tile in which no
query sees any key is skipped, which is what makes causal rows cost half and short packed documents little.

Rows and key/value heads are folded into one leading dimension Z = B x K, so that every product here is a plain
batched matrix product and every array is tiled along its dimension 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import AttentionSpec, KernelCase, Masks


class _Queries(NamedTuple):
    """What belongs to the queries of a call or, after `_tile`, of one tile."""

    q_ZTGH: jax.Array  # the G query heads that read the same key/value head stay together
    positions_BT: jax.Array | None
    segments_BT: jax.Array | None


class _Keys(NamedTuple):
    k_ZSH: jax.Array
    v_ZSH: jax.Array
    positions_BS: jax.Array | None
    segments_BS: jax.Array | None


class _RowResults(NamedTuple):
    """What the backward knows of each query row."""

    dout_ZTGH: jax.Array
    lse_ZTG: jax.Array  # -inf replaced by 0: such a row has no visible key in any tile
    delta_ZTG: jax.Array  # sum_H(dout out) - dlse


def unsupported(case: KernelCase) -> None:
    """See `contract.Kernel.unsupported`: it does everything, everywhere."""


def forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, masks: Masks, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """See `contract.Kernel.forward`."""
    num_kv_heads = k_BSKH.shape[2]
    queries, keys, tile_T, tile_S = _tiled_operands(q_BTNH, k_BSKH, v_BSKH, masks, spec)
    (num_rows, padded_T, num_groups, _), padded_S = queries.q_ZTGH.shape, keys.k_ZSH.shape[1]

    def query_tile(_, i):
        tile_queries = _tile(queries, i, tile_T)

        def key_tile(carry, j):
            tile_keys = _tile(keys, j, tile_S)
            visible = _visible(tile_queries, tile_keys, spec)

            def attend(carry):
                return _online_softmax(carry, tile_queries, tile_keys, visible, spec)

            return _if_any(visible, attend, lambda carry: carry, carry), None

        rows = (num_rows, tile_T, num_groups)
        start = (
            jnp.full(rows, -jnp.inf, jnp.float32),
            jnp.zeros(rows, jnp.float32),
            jnp.zeros((*rows, v_BSKH.shape[-1]), jnp.float32),
        )
        (max_ZTG, total_ZTG, out_ZTGH), _ = lax.scan(key_tile, start, jnp.arange(padded_S // tile_S))
        is_empty = total_ZTG == 0
        total_ZTG = jnp.where(is_empty, 1.0, total_ZTG)
        lse_ZTG = jnp.where(is_empty, -jnp.inf, max_ZTG + jnp.log(total_ZTG))
        return None, (out_ZTGH / total_ZTG[..., None], lse_ZTG[..., None])

    _, (out, lse) = lax.scan(query_tile, None, jnp.arange(padded_T // tile_T))
    out_BTNH, lse_BTN1 = (_unfold(_join(x), num_kv_heads, q_BTNH.shape[1]) for x in (out, lse))
    return out_BTNH, lse_BTN1[..., 0].swapaxes(1, 2)


def backward(q_BTNH, k_BSKH, v_BSKH, masks, spec, out_BTNH, lse_BNT, dout_BTNH, dlse_BNT):
    """See `contract.Kernel.backward`."""
    num_queries, (_, num_keys, num_kv_heads, _) = q_BTNH.shape[1], k_BSKH.shape
    queries, keys, tile_T, tile_S = _tiled_operands(q_BTNH, k_BSKH, v_BSKH, masks, spec)
    results = _row_results(num_kv_heads, tile_T, out_BTNH, lse_BNT, dout_BTNH, dlse_BNT)
    num_query_tiles, num_key_tiles = queries.q_ZTGH.shape[1] // tile_T, keys.k_ZSH.shape[1] // tile_S

    def key_tile(dq, j):
        tile_keys = _tile(keys, j, tile_S)

        def query_tile(carry, i):
            dq, dk, dv = carry
            tile_queries, tile_results = _tile((queries, results), i, tile_T)
            visible = _visible(tile_queries, tile_keys, spec)

            def differentiate(_):
                return _tile_gradients(tile_queries, tile_keys, tile_results, visible, spec)

            def nothing(_):
                return jax.tree.map(jnp.zeros_like, (_tile(dq, i, tile_T), dk, dv))

            dq_tile, dk_tile, dv_tile = _if_any(visible, differentiate, nothing, None)
            dq = lax.dynamic_update_slice_in_dim(dq, _tile(dq, i, tile_T) + dq_tile, i * tile_T, axis=1)
            return (dq, dk + dk_tile, dv + dv_tile), None

        start = (dq, *(jnp.zeros(x.shape, jnp.float32) for x in (tile_keys.k_ZSH, tile_keys.v_ZSH)))
        (dq, dk, dv), _ = lax.scan(query_tile, start, jnp.arange(num_query_tiles))
        return dq, (dk, dv)

    dq, (dk, dv) = lax.scan(key_tile, jnp.zeros(queries.q_ZTGH.shape, jnp.float32), jnp.arange(num_key_tiles))
    dk, dv = (_unfold(_join(x)[:, :, None], num_kv_heads, num_keys) for x in (dk, dv))
    return _unfold(dq, num_kv_heads, num_queries), dk, dv


def _online_softmax(carry, queries: _Queries, keys: _Keys, visible, spec: AttentionSpec):
    """Takes one key tile into the running (max, sum of exponentials, unnormalized out) of a query tile."""
    max_ZTG, total_ZTG, out_ZTGH = carry
    scores_ZTGS = _mask(_scores(queries, keys, spec), visible, -jnp.inf)
    new_max_ZTG = jnp.maximum(max_ZTG, scores_ZTGS.max(axis=-1))
    finite_max_ZTG = jnp.where(jnp.isneginf(new_max_ZTG), 0.0, new_max_ZTG)  # -inf - -inf is NaN
    p_ZTGS = jnp.exp(scores_ZTGS - finite_max_ZTG[..., None])
    shrink_ZTG = jnp.exp(max_ZTG - finite_max_ZTG)
    out_tile_ZTGH = _matmul("ZTGS,ZSH->ZTGH", p_ZTGS.astype(keys.v_ZSH.dtype), keys.v_ZSH)
    total_ZTG = shrink_ZTG * total_ZTG + p_ZTGS.sum(axis=-1)
    return new_max_ZTG, total_ZTG, shrink_ZTG[..., None] * out_ZTGH + out_tile_ZTGH


def _tile_gradients(queries: _Queries, keys: _Keys, results: _RowResults, visible, spec: AttentionSpec):
    """This pair of tiles' share of (dq, dk, dv), float32."""
    scale, dtype = spec.scale_for(keys.k_ZSH.shape[-1]), keys.v_ZSH.dtype
    p_ZTGS = _mask(jnp.exp(_scores(queries, keys, spec) - results.lse_ZTG[..., None]), visible, 0.0)
    dp_ZTGS = _matmul("ZTGH,ZSH->ZTGS", results.dout_ZTGH, keys.v_ZSH)
    ds_ZTGS = (scale * p_ZTGS * (dp_ZTGS - results.delta_ZTG[..., None])).astype(dtype)
    dq_ZTGH = _matmul("ZTGS,ZSH->ZTGH", ds_ZTGS, keys.k_ZSH)
    dk_ZSH = _matmul("ZTGS,ZTGH->ZSH", ds_ZTGS, queries.q_ZTGH)
    dv_ZSH = _matmul("ZTGS,ZTGH->ZSH", p_ZTGS.astype(dtype), results.dout_ZTGH)
    return dq_ZTGH, dk_ZSH, dv_ZSH


def _scores(queries: _Queries, keys: _Keys, spec: AttentionSpec) -> jax.Array:
    return spec.scale_for(keys.k_ZSH.shape[-1]) * _matmul("ZTGH,ZSH->ZTGS", queries.q_ZTGH, keys.k_ZSH)


def _matmul(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _visible(queries: _Queries, keys: _Keys, spec: AttentionSpec) -> jax.Array | None:
    masks = Masks(queries.positions_BT, keys.positions_BS, queries.segments_BT, keys.segments_BS)
    return masks.visible_BTS(spec)


def _mask(x_ZTGS: jax.Array, visible_BTS: jax.Array | None, hidden: float) -> jax.Array:
    if visible_BTS is None:
        return x_ZTGS
    x_BKTGS = x_ZTGS.reshape(visible_BTS.shape[0], -1, *x_ZTGS.shape[1:])
    return jnp.where(visible_BTS[:, None, :, None, :], x_BKTGS, hidden).reshape(x_ZTGS.shape)


def _if_any(visible: jax.Array | None, compute, skip, operand):
    return compute(operand) if visible is None else lax.cond(visible.any(), compute, skip, operand)


def _row_results(num_kv_heads, tile_T, out_BTNH, lse_BNT, dout_BTNH, dlse_BNT) -> _RowResults:
    delta_BTN = jnp.einsum("BTNH,BTNH->BTN", *(x.astype(jnp.float32) for x in (out_BTNH, dout_BTNH)))
    delta_BTN -= dlse_BNT.swapaxes(1, 2)
    lse_BTN = jnp.where(jnp.isneginf(lse_BNT), 0.0, lse_BNT).swapaxes(1, 2)
    lse_ZTG1, delta_ZTG1 = (_fold(x[..., None], num_kv_heads) for x in (lse_BTN, delta_BTN))
    dout_ZTGH = _fold(dout_BTNH, num_kv_heads)
    return _RowResults(*(_pad(x, tile_T) for x in (dout_ZTGH, lse_ZTG1[..., 0], delta_ZTG1[..., 0])))


def _tiled_operands(q_BTNH, k_BSKH, v_BSKH, masks: Masks, spec: AttentionSpec):
    """Folds the heads and pads T and S to whole tiles; padding has segment id 0, so nobody sees it."""
    (batch, num_queries, _, _), (_, num_keys, num_kv_heads, _) = q_BTNH.shape, k_BSKH.shape
    tile_T, tile_S = min(spec.query_block_tokens, num_queries), min(spec.key_block_tokens, num_keys)
    q_segments, k_segments = masks.q_segments_BT, masks.k_segments_BS
    if q_segments is None and (num_queries % tile_T or num_keys % tile_S):
        q_segments = jnp.ones((batch, num_queries), jnp.int32)
        k_segments = jnp.ones((batch, num_keys), jnp.int32)
    q_positions, k_positions = None, None
    if spec.causal:
        q_positions, k_positions, _, _ = masks.with_positions(batch, num_queries, num_keys)
    queries = _Queries(_fold(q_BTNH, num_kv_heads), q_positions, q_segments)
    keys = _Keys(*(_fold(x, num_kv_heads)[:, :, 0] for x in (k_BSKH, v_BSKH)), k_positions, k_segments)
    padded_queries = jax.tree.map(lambda x: _pad(x, tile_T), queries)
    return padded_queries, jax.tree.map(lambda x: _pad(x, tile_S), keys), tile_T, tile_S


def _fold(x_BTNH: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, T, N, H] -> [B x K, T, G, H]."""
    batch, num_tokens, _, width = x_BTNH.shape
    x_BTKGH = x_BTNH.reshape(batch, num_tokens, num_kv_heads, -1, width)
    return x_BTKGH.swapaxes(1, 2).reshape(batch * num_kv_heads, num_tokens, -1, width)


def _unfold(x_ZTGH: jax.Array, num_kv_heads: int, num_tokens: int) -> jax.Array:
    """The inverse of `_fold`, with the padding of T taken off."""
    _, _, num_groups, width = x_ZTGH.shape
    x_BKTGH = x_ZTGH[:, :num_tokens].reshape(-1, num_kv_heads, num_tokens, num_groups, width)
    return x_BKTGH.swapaxes(1, 2).reshape(-1, num_tokens, num_kv_heads * num_groups, width)


def _pad(x: jax.Array, tile: int) -> jax.Array:
    """Zeros up to a whole number of tiles along dimension 1."""
    missing = -x.shape[1] % tile
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) if missing else x


def _tile(tree, index: jax.Array, tile: int):
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index * tile, tile, axis=1), tree)


def _join(tiles: jax.Array) -> jax.Array:
    """(number of tiles, B, tile, ...) -> (B, T, ...)."""
    joined = jnp.moveaxis(tiles, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])
