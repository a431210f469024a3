"""The portable kernel: attention tile by tile in plain XLA, O(T + S) memory, on any device.

The softmax runs online over key tiles (Milakov and Gimelshein 2018; FlashAttention, algorithm 1), and the
backward recomputes each tile's weights from the row's lse (FlashAttention-2, algorithm 2). A tile in which no
query sees any key is skipped, which is what makes causal rows cost half and short packed documents little.

Letters of this file, beside those of core/axes.py: I query tiles, J key tiles, Z = B x K (each key/value head of each
row is one batched product), R = G x T rows of a tile: the G query heads that read the same key/value head, one after
the other. Every product is written so that neither operand is transposed along its rows: on CPU such a product is four
times slower than the others, which is why the backward holds its scores, and dq, transposed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import AttentionSpec, KernelCase, Masks


class _Queries(NamedTuple):
    """Query tiles; inside a scan over them, one of them, without the I."""

    q_IZRH: jax.Array
    positions_IBT: jax.Array | None
    segments_IBT: jax.Array | None


class _Keys(NamedTuple):
    k_JZSH: jax.Array
    v_JZSH: jax.Array
    positions_JBS: jax.Array | None
    segments_JBS: jax.Array | None


class _RowResults(NamedTuple):
    """What the backward knows of each query row."""

    dout_IZRH: jax.Array
    lse_IZ1R: jax.Array  # -inf replaced by 0: such a row has no visible key in any tile
    delta_IZ1R: jax.Array  # sum_H(dout out) - dlse


def unsupported(case: KernelCase) -> None:
    """See `contract.Kernel.unsupported`: it does everything, everywhere."""


def forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, masks: Masks, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """See `contract.Kernel.forward`."""
    queries, keys = _tiled_operands(q_BTNH, k_BSKH, v_BSKH, masks, spec)
    num_rows, value_dim = queries.q_IZRH.shape[1:3], v_BSKH.shape[-1]

    def query_tile(_, tile_queries: _Queries):
        def key_tile(carry, tile_keys: _Keys):
            visible_BTS = _visible(tile_queries, tile_keys, spec)

            def attend(carry):
                return _online_softmax(carry, tile_queries, tile_keys, visible_BTS, spec)

            return _if_any(visible_BTS, attend, carry), None

        start = (
            jnp.full((*num_rows, 1), -jnp.inf, jnp.float32),
            jnp.zeros((*num_rows, 1), jnp.float32),
            jnp.zeros((*num_rows, value_dim), jnp.float32),
        )
        (max_ZR1, total_ZR1, out_ZRH), _ = lax.scan(key_tile, start, keys)
        is_empty = total_ZR1 == 0
        total_ZR1 = jnp.where(is_empty, 1.0, total_ZR1)
        return None, (out_ZRH / total_ZR1, jnp.where(is_empty, -jnp.inf, max_ZR1 + jnp.log(total_ZR1)))

    _, (out_IZRH, lse_IZR1) = lax.scan(query_tile, None, queries)
    lse_BTN1 = _untiled(lse_IZR1, q_BTNH, k_BSKH.shape[2])
    return _untiled(out_IZRH, q_BTNH, k_BSKH.shape[2]), lse_BTN1[..., 0].swapaxes(1, 2)


def backward(q_BTNH, k_BSKH, v_BSKH, masks, spec, out_BTNH, lse_BNT, dout_BTNH, dlse_BNT):
    """See `contract.Kernel.backward`."""
    num_kv_heads = k_BSKH.shape[2]
    queries, keys = _tiled_operands(q_BTNH, k_BSKH, v_BSKH, masks, spec)
    tile_tokens = min(spec.query_block_tokens, q_BTNH.shape[1])
    results = _row_results(num_kv_heads, tile_tokens, out_BTNH, lse_BNT, dout_BTNH, dlse_BNT)

    def key_tile(dq_IZHR, tile_keys: _Keys):
        def query_tile(dkv, tiles):
            tile_queries, tile_results, dq_ZHR = tiles
            visible_BTS = _visible(tile_queries, tile_keys, spec)
            visible_BST = None if visible_BTS is None else visible_BTS.swapaxes(1, 2)

            def add(gradients):
                shares = _tile_gradients(tile_queries, tile_keys, tile_results, visible_BST, spec)
                return tuple(map(jnp.add, gradients, shares))

            dq_ZHR, *dkv = _if_any(visible_BST, add, (dq_ZHR, *dkv))
            return tuple(dkv), dq_ZHR

        start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (tile_keys.k_JZSH, tile_keys.v_JZSH))
        dkv, dq_IZHR = lax.scan(query_tile, start, (queries, results, dq_IZHR))
        return dq_IZHR, dkv

    dq_IZHR = jnp.zeros(queries.q_IZRH.swapaxes(2, 3).shape, jnp.float32)
    dq_IZHR, (dk_JZSH, dv_JZSH) = lax.scan(key_tile, dq_IZHR, keys)
    dk_BSKH, dv_BSKH = _untiled(dk_JZSH, k_BSKH, num_kv_heads), _untiled(dv_JZSH, v_BSKH, num_kv_heads)
    return _untiled(dq_IZHR.swapaxes(2, 3), q_BTNH, num_kv_heads), dk_BSKH, dv_BSKH


def _online_softmax(carry, queries: _Queries, keys: _Keys, visible_BTS, spec: AttentionSpec):
    """Takes one key tile into the running (max, sum of exponentials, unnormalized out) of a query tile."""
    max_ZR1, total_ZR1, out_ZRH = carry
    scale = spec.scale_for(queries.q_IZRH.shape[-1])
    scores_ZRS = scale * _matmul("ZRH,ZSH->ZRS", queries.q_IZRH, keys.k_JZSH)
    scores_ZRS = _mask(scores_ZRS, visible_BTS, -jnp.inf)
    new_max_ZR1 = jnp.maximum(max_ZR1, scores_ZRS.max(axis=-1, keepdims=True))
    finite_max_ZR1 = jnp.where(jnp.isneginf(new_max_ZR1), 0.0, new_max_ZR1)  # -inf - -inf is NaN
    p_ZRS = jnp.exp(scores_ZRS - finite_max_ZR1)
    shrink_ZR1 = jnp.exp(max_ZR1 - finite_max_ZR1)
    total_ZR1 = shrink_ZR1 * total_ZR1 + p_ZRS.sum(axis=-1, keepdims=True)
    out_ZRH = shrink_ZR1 * out_ZRH + _matmul("ZRS,ZSH->ZRH", p_ZRS.astype(keys.v_JZSH.dtype), keys.v_JZSH)
    return new_max_ZR1, total_ZR1, out_ZRH


def _tile_gradients(queries: _Queries, keys: _Keys, results: _RowResults, visible_BST, spec: AttentionSpec):
    """This pair of tiles' share of (dq_ZHR, dk_ZSH, dv_ZSH), float32."""
    scale, dtype = spec.scale_for(keys.k_JZSH.shape[-1]), keys.v_JZSH.dtype
    scores_ZSR = scale * _matmul("ZSH,ZRH->ZSR", keys.k_JZSH, queries.q_IZRH)
    p_ZSR = _mask(jnp.exp(scores_ZSR - results.lse_IZ1R), visible_BST, 0.0, rows_are_last=True)
    p_ZSR = lax.optimization_barrier(p_ZSR)  # or XLA on CPU computes the exponentials again for each of their two uses
    dp_ZSR = _matmul("ZSH,ZRH->ZSR", keys.v_JZSH, results.dout_IZRH)
    ds_ZSR = (scale * p_ZSR * (dp_ZSR - results.delta_IZ1R)).astype(dtype)
    dq_ZHR = _matmul("ZHS,ZSR->ZHR", keys.k_JZSH.swapaxes(1, 2), ds_ZSR)
    dk_ZSH = _matmul("ZSR,ZRH->ZSH", ds_ZSR, queries.q_IZRH)
    dv_ZSH = _matmul("ZSR,ZRH->ZSH", p_ZSR.astype(dtype), results.dout_IZRH)
    return dq_ZHR, dk_ZSH, dv_ZSH


def _matmul(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _visible(queries: _Queries, keys: _Keys, spec: AttentionSpec) -> jax.Array | None:
    masks = Masks(queries.positions_IBT, keys.positions_JBS, queries.segments_IBT, keys.segments_JBS)
    return masks.visible_BTS(spec)


def _mask(x: jax.Array, visible: jax.Array | None, hidden: float, rows_are_last: bool = False) -> jax.Array:
    """x_ZRS with visible_BTS or, with rows_are_last, x_ZSR with visible_BST: R is G x T, Z is B x K."""
    if visible is None:
        return x
    batch, *tile = visible.shape
    if rows_are_last:
        grouped, visible = x.reshape(batch, -1, tile[0], x.shape[2] // tile[1], tile[1]), visible[:, None, :, None]
    else:
        grouped, visible = x.reshape(batch, -1, x.shape[1] // tile[0], *tile), visible[:, None, None]
    return jnp.where(visible, grouped, hidden).reshape(x.shape)


def _if_any(visible: jax.Array | None, compute, carry):
    return compute(carry) if visible is None else lax.cond(visible.any(), compute, lambda carry: carry, carry)


def _row_results(num_kv_heads, tile_tokens, out_BTNH, lse_BNT, dout_BTNH, dlse_BNT) -> _RowResults:
    delta_BTN = jnp.einsum("BTNH,BTNH->BTN", *(x.astype(jnp.float32) for x in (out_BTNH, dout_BTNH)))
    delta_BTN -= dlse_BNT.swapaxes(1, 2)
    lse_BTN = jnp.where(jnp.isneginf(lse_BNT), 0.0, lse_BNT).swapaxes(1, 2)
    lse_IZR1, delta_IZR1 = (_tiled_heads(x[..., None], num_kv_heads, tile_tokens) for x in (lse_BTN, delta_BTN))
    dout_IZRH = _tiled_heads(dout_BTNH, num_kv_heads, tile_tokens)
    return _RowResults(dout_IZRH, lse_IZR1.swapaxes(2, 3), delta_IZR1.swapaxes(2, 3))


def _tiled_operands(q_BTNH, k_BSKH, v_BSKH, masks: Masks, spec: AttentionSpec) -> tuple[_Queries, _Keys]:
    """Pads T and S to whole tiles; padding has segment id 0, so nobody sees it."""
    (batch, num_queries, _, _), (_, num_keys, num_kv_heads, _) = q_BTNH.shape, k_BSKH.shape
    tile_T, tile_S = min(spec.query_block_tokens, num_queries), min(spec.key_block_tokens, num_keys)
    q_segments, k_segments = masks.q_segments_BT, masks.k_segments_BS
    if q_segments is None and (num_queries % tile_T or num_keys % tile_S):
        q_segments = jnp.ones((batch, num_queries), jnp.int32)
        k_segments = jnp.ones((batch, num_keys), jnp.int32)
    q_positions, k_positions = None, None
    if spec.causal:
        q_positions, k_positions, _, _ = masks.with_positions(batch, num_queries, num_keys)
    q_IZRH = _tiled_heads(q_BTNH, num_kv_heads, tile_T)
    queries = _Queries(q_IZRH, _tiled(q_positions, tile_T), _tiled(q_segments, tile_T))
    k_JZSH, v_JZSH = (_tiled_heads(x, num_kv_heads, tile_S) for x in (k_BSKH, v_BSKH))
    return queries, _Keys(k_JZSH, v_JZSH, _tiled(k_positions, tile_S), _tiled(k_segments, tile_S))


def _tiled(x_BT: jax.Array | None, tile_tokens: int) -> jax.Array | None:
    """[B, T, ...] -> [I, B, tile, ...], with zeros up to a whole number of tiles."""
    if x_BT is None:
        return None
    missing = -x_BT.shape[1] % tile_tokens
    x_BT = jnp.pad(x_BT, [(0, 0), (0, missing)] + [(0, 0)] * (x_BT.ndim - 2)) if missing else x_BT
    return x_BT.reshape(x_BT.shape[0], -1, tile_tokens, *x_BT.shape[2:]).swapaxes(0, 1)


def _tiled_heads(x_BTNH: jax.Array, num_kv_heads: int, tile_tokens: int) -> jax.Array:
    """[B, T, N, H] -> [I, B x K, G x tile, H]."""
    x_IBTNH = _tiled(x_BTNH, tile_tokens)
    num_tiles, batch, _, num_heads, width = x_IBTNH.shape
    x_IBTKGH = x_IBTNH.reshape(*x_IBTNH.shape[:3], num_kv_heads, num_heads // num_kv_heads, width)
    return x_IBTKGH.transpose(0, 1, 3, 4, 2, 5).reshape(num_tiles, batch * num_kv_heads, -1, width)


def _untiled(x_IZRH: jax.Array, like_BTNH: jax.Array, num_kv_heads: int) -> jax.Array:
    """The inverse of `_tiled_heads`, with the padding of T taken off."""
    batch, num_tokens, num_heads, _ = like_BTNH.shape
    num_tiles, _, _, width = x_IZRH.shape
    x_IBKGTH = x_IZRH.reshape(num_tiles, batch, num_kv_heads, num_heads // num_kv_heads, -1, width)
    x_BITKGH = x_IBKGTH.transpose(1, 0, 4, 2, 3, 5)
    return x_BITKGH.reshape(batch, -1, num_heads, width)[:, :num_tokens]
