"""The portable kernel: attention tile by tile in plain XLA, O(T + S) memory, on any device.

The softmax runs online over key tiles (Milakov and Gimelshein 2018; FlashAttention, algorithm 1), and the
backward recomputes each tile's weights from the row's lse (FlashAttention-2, algorithm 2). A tile is skipped where the
bounds of its positions and segment ids say that no query sees any key, which is what makes causal rows cost half and
short packed documents little.

Letters of this file, beside those of core/axes.py: I query tiles, J key tiles, R = G x T rows of a tile: the G query
heads that read the same key/value head, one after the other. Key/value heads are taken one at a time: then what a pair
of tiles needs stays in a core's cache. Scores, out and dq are held transposed, BSR and BHR. On CPU a product that has
transposed scores for its first operand takes three times as long, and the backward would have one; and XLA takes the
max over the rows of a tile five times as fast as the max of each row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import AttentionProblem, AttentionSpec, Masks
from jaxlc.core.errors import Unsupported


class _Queries(NamedTuple):
    """Query tiles of one key/value head; inside a scan over them, one of them, without the I."""

    q_IBRH: jax.Array
    positions_IBR: jax.Array | None
    segments_IBR: jax.Array | None


class _Keys(NamedTuple):
    k_JBSH: jax.Array
    v_JBSH: jax.Array
    positions_JBS: jax.Array | None
    segments_JBS: jax.Array | None


class _RowResults(NamedTuple):
    """What the backward knows of each query row."""

    dout_IBRH: jax.Array
    lse_IB1R: jax.Array  # -inf replaced by 0: such a row has no visible key in any tile
    delta_IB1R: jax.Array  # sum_H(dout out) - dlse


def unsupported(case: AttentionProblem) -> None:
    """See `contract.Kernel.unsupported`: it does everything, everywhere."""


def forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, masks: Masks, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """See `contract.Kernel.forward`.

    Raises:
      Unsupported: a scale that is not above 0: the largest score would not be that of the largest weight.
    """
    if spec.scale_for(q_BTNH.shape[-1]) <= 0:
        raise Unsupported(f"attention kernel blockwise: scale {spec.scale}, and it does scales above 0")
    queries, keys = _tiled_operands(q_BTNH, k_BSKH, v_BSKH, masks, spec)

    def one_head(operands):
        return _forward_of_head(*_of_head(queries, keys, *operands), spec)

    out_KIBHR, lse_KIB1R = lax.map(one_head, (queries.q_IBRH, keys.k_JBSH, keys.v_JBSH))
    return _untiled(out_KIBHR, q_BTNH), _untiled(lse_KIB1R, q_BTNH)[..., 0].swapaxes(1, 2)


def backward(q_BTNH, k_BSKH, v_BSKH, masks, spec, out_BTNH, lse_BNT, dout_BTNH, dlse_BNT):
    """See `contract.Kernel.backward`."""
    queries, keys = _tiled_operands(q_BTNH, k_BSKH, v_BSKH, masks, spec)
    tile_tokens = _tile_tokens(spec.query_block_tokens, q_BTNH.shape[1], spec)
    results = _row_results(k_BSKH.shape[2], tile_tokens, out_BTNH, lse_BNT, dout_BTNH, dlse_BNT)

    def one_head(operands):
        *qkv, results = operands
        return _backward_of_head(*_of_head(queries, keys, *qkv), results, spec)

    dq, dk, dv = lax.map(one_head, (queries.q_IBRH, keys.k_JBSH, keys.v_JBSH, results))
    return _untiled(dq, q_BTNH), _untiled(dk.swapaxes(3, 4), k_BSKH), _untiled(dv.swapaxes(3, 4), v_BSKH)


def _of_head(queries: _Queries, keys: _Keys, q_IBRH, k_JBSH, v_JBSH) -> tuple[_Queries, _Keys]:
    """The operands of one head. Tied together: masks are the same for every head, and what is the same in every round
    of a loop is taken out of it when `jax.checkpoint` is differentiated; all tiles of all masks, that would be."""
    return lax.optimization_barrier((queries._replace(q_IBRH=q_IBRH), keys._replace(k_JBSH=k_JBSH, v_JBSH=v_JBSH)))


def _forward_of_head(queries: _Queries, keys: _Keys, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    """(out_IBHR, lse_IB1R)"""
    (_, batch, rows, head_dim), value_dim = queries.q_IBRH.shape, keys.v_JBSH.shape[-1]

    def query_tile(_, tile_queries: _Queries):
        def key_tile(carry, tile_keys: _Keys):
            def attend(carry):
                return _online_softmax(carry, tile_queries, tile_keys, spec)

            return _unless_hidden(tile_queries, tile_keys, spec, attend, carry), None

        start = (
            jnp.full((batch, 1, rows), -jnp.inf, jnp.float32),
            jnp.zeros((batch, 1, rows), jnp.float32),
            jnp.zeros((batch, value_dim, rows), jnp.float32),
        )
        (max_B1R, total_B1R, out_BHR), _ = lax.scan(key_tile, start, keys)
        is_empty = total_B1R == 0
        total_B1R = jnp.where(is_empty, 1.0, total_B1R)
        lse_B1R = spec.scale_for(head_dim) * max_B1R + jnp.log(total_B1R)
        return None, (out_BHR / total_B1R, jnp.where(is_empty, -jnp.inf, lse_B1R))

    return lax.scan(query_tile, None, queries)[1]


def _backward_of_head(queries: _Queries, keys: _Keys, results: _RowResults, spec: AttentionSpec):
    """(dq_IBHR, dk_JBSH, dv_JBSH)"""

    def key_tile(dq_IBHR, tile_keys: _Keys):
        def query_tile(dkv, tiles):
            tile_queries, tile_results, dq_BHR = tiles

            def add(gradients):
                shares = _tile_gradients(tile_queries, tile_keys, tile_results, spec)
                return tuple(map(jnp.add, gradients, shares))

            dq_BHR, *dkv = _unless_hidden(tile_queries, tile_keys, spec, add, (dq_BHR, *dkv))
            return tuple(dkv), dq_BHR

        start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (tile_keys.k_JBSH, tile_keys.v_JBSH))
        dkv, dq_IBHR = lax.scan(query_tile, start, (queries, results, dq_IBHR))
        return dq_IBHR, dkv

    dq_IBHR = jnp.zeros(queries.q_IBRH.swapaxes(2, 3).shape, jnp.float32)
    dq_IBHR, (dk_JBSH, dv_JBSH) = lax.scan(key_tile, dq_IBHR, keys)
    return dq_IBHR, dk_JBSH, dv_JBSH


def _online_softmax(carry, queries: _Queries, keys: _Keys, spec: AttentionSpec):
    """Takes one key tile into the running (max, sum of exponentials, unnormalized out) of a query tile. The max is of
    unscaled scores."""
    max_B1R, total_B1R, out_BHR = carry
    scale = spec.scale_for(queries.q_IBRH.shape[-1])
    scores_BSR = _matmul("BSH,BRH->BSR", keys.k_JBSH, queries.q_IBRH)
    scores_BSR = _mask(scores_BSR, queries, keys, spec, -jnp.inf)
    new_max_B1R = jnp.maximum(max_B1R, scores_BSR.max(axis=1, keepdims=True))
    finite_max_B1R = jnp.where(jnp.isneginf(new_max_B1R), 0.0, new_max_B1R)  # -inf - -inf is NaN
    p_BSR = jnp.exp(scale * (scores_BSR - finite_max_B1R))
    shrink_B1R = jnp.exp(scale * (max_B1R - finite_max_B1R))
    total_B1R = shrink_B1R * total_B1R + p_BSR.sum(axis=1, keepdims=True)
    v_BHS, dtype = keys.v_JBSH.swapaxes(1, 2), keys.v_JBSH.dtype
    out_BHR = shrink_B1R * out_BHR + _matmul("BHS,BSR->BHR", v_BHS, p_BSR.astype(dtype))
    return new_max_B1R, total_B1R, out_BHR


def _tile_gradients(queries: _Queries, keys: _Keys, results: _RowResults, spec: AttentionSpec):
    """This pair of tiles' share of (dq_BHR, dk_BSH, dv_BSH), float32."""
    scale, dtype = spec.scale_for(keys.k_JBSH.shape[-1]), keys.v_JBSH.dtype
    scores_BSR = scale * _matmul("BSH,BRH->BSR", keys.k_JBSH, queries.q_IBRH)
    p_BSR = _mask(jnp.exp(scores_BSR - results.lse_IB1R), queries, keys, spec, 0.0)
    p_BSR = lax.optimization_barrier(p_BSR)  # or XLA on CPU computes the exponentials again for each of their two uses
    dp_BSR = _matmul("BSH,BRH->BSR", keys.v_JBSH, results.dout_IBRH)
    ds_BSR = (scale * p_BSR * (dp_BSR - results.delta_IB1R)).astype(dtype)
    dq_BHR = _matmul("BHS,BSR->BHR", keys.k_JBSH.swapaxes(1, 2), ds_BSR)
    dk_BSH = _matmul("BSR,BRH->BSH", ds_BSR, queries.q_IBRH)
    dv_BSH = _matmul("BSR,BRH->BSH", p_BSR.astype(dtype), results.dout_IBRH)
    return dq_BHR, dk_BSH, dv_BSH


def _matmul(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    def product(a, b):
        return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)

    if a.dtype == jnp.float32:
        return product(a, b)
    # XLA on CPU leaves narrow products to a library, and has none for some of those that the library does not take.
    return lax.platform_dependent(
        a, b, cpu=lambda *operands: product(*(x.astype(jnp.float32) for x in operands)), default=product
    )


def _mask(x_BSR: jax.Array, queries: _Queries, keys: _Keys, spec: AttentionSpec, hidden: float) -> jax.Array:
    """`hidden` where a query does not see a key."""
    masks = Masks(queries.positions_IBR, keys.positions_JBS, queries.segments_IBR, keys.segments_JBS)
    visible_BRS = masks.dense_mask_BTS(spec)
    return x_BSR if visible_BRS is None else jnp.where(visible_BRS.swapaxes(1, 2), x_BSR, hidden)


def _unless_hidden(queries: _Queries, keys: _Keys, spec: AttentionSpec, compute, carry):
    """`compute(carry)`, or carry where the bounds of positions and segment ids say that no query sees a key."""
    may_see_B = True
    if queries.segments_IBR is not None:
        (q_min, q_max), (k_min, k_max) = (_bounds(x) for x in (queries.segments_IBR, keys.segments_JBS))
        may_see_B = (q_min <= k_max) & (k_min <= q_max) & (q_max != 0)
    if spec.causal:
        (q_min, q_max), (k_min, k_max) = (_bounds(x) for x in (queries.positions_IBR, keys.positions_JBS))
        may_see_B &= q_max >= k_min
        if spec.window is not None:
            may_see_B &= q_min - k_max < spec.window
    return compute(carry) if may_see_B is True else lax.cond(may_see_B.any(), compute, lambda carry: carry, carry)


def _bounds(x_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x_BT.min(axis=1), x_BT.max(axis=1)


def _row_results(num_kv_heads, tile_tokens, out_BTNH, lse_BNT, dout_BTNH, dlse_BNT) -> _RowResults:
    """Of all key/value heads: each array with a leading K."""
    delta_BTN = (out_BTNH.astype(jnp.float32) * dout_BTNH.astype(jnp.float32)).sum(axis=-1)
    delta_BTN -= dlse_BNT.swapaxes(1, 2)
    lse_BTN = jnp.where(jnp.isneginf(lse_BNT), 0.0, lse_BNT).swapaxes(1, 2)
    lse, delta = (_tiled_heads(x[..., None], num_kv_heads, tile_tokens) for x in (lse_BTN, delta_BTN))
    return _RowResults(_tiled_heads(dout_BTNH, num_kv_heads, tile_tokens), lse.swapaxes(3, 4), delta.swapaxes(3, 4))


def _tiled_operands(q_BTNH, k_BSKH, v_BSKH, masks: Masks, spec: AttentionSpec) -> tuple[_Queries, _Keys]:
    """Of all key/value heads: q, k and v with a leading K, masks without, for they are the same for every head.

    T and S are padded to whole tiles; padding has segment id 0, so nobody sees it.
    """
    (batch, num_queries, _, _), (_, num_keys, num_kv_heads, _) = q_BTNH.shape, k_BSKH.shape
    tile_T = _tile_tokens(spec.query_block_tokens, num_queries, spec)
    tile_S = _tile_tokens(spec.key_block_tokens, num_keys, spec)
    q_segments, k_segments = masks.q_segments_BT, masks.k_segments_BS
    if q_segments is None and (num_queries % tile_T or num_keys % tile_S):
        q_segments = jnp.ones((batch, num_queries), jnp.int32)
        k_segments = jnp.ones((batch, num_keys), jnp.int32)
    q_positions, k_positions = None, None
    if spec.causal:
        q_positions, k_positions, _, _ = masks.with_positions(q_BTNH, k_BSKH)
    q = _tiled_heads(q_BTNH, num_kv_heads, tile_T)
    k, v = (_tiled_heads(x, num_kv_heads, tile_S) for x in (k_BSKH, v_BSKH))
    # Once for each of a tile's rows: a mask of T that is repeated for G heads makes XLA on CPU three times as slow.
    groups = q_BTNH.shape[2] // num_kv_heads
    queries = _Queries(q, *(_repeated(_tiled(x, tile_T), groups) for x in (q_positions, q_segments)))
    return queries, _Keys(k, v, _tiled(k_positions, tile_S), _tiled(k_segments, tile_S))


def _tile_tokens(asked: int, num_tokens: int, spec: AttentionSpec) -> int:
    """At least two tiles under a causal mask: with one, nothing could be skipped."""
    return min(asked, -(-num_tokens // 2) if spec.causal else num_tokens)


def _tiled(x_BT: jax.Array | None, tile_tokens: int) -> jax.Array | None:
    """[B, T, ...] -> [I, B, tile, ...], with zeros up to a whole number of tiles."""
    if x_BT is None:
        return None
    missing = -x_BT.shape[1] % tile_tokens
    x_BT = jnp.pad(x_BT, [(0, 0), (0, missing)] + [(0, 0)] * (x_BT.ndim - 2)) if missing else x_BT
    return x_BT.reshape(x_BT.shape[0], -1, tile_tokens, *x_BT.shape[2:]).swapaxes(0, 1)


def _repeated(x_IBT: jax.Array | None, groups: int) -> jax.Array | None:
    """x_IBR: the same for every query head of a key/value head."""
    return x_IBT if x_IBT is None else jnp.tile(x_IBT, groups)


def _tiled_heads(x_BTNH: jax.Array, num_kv_heads: int, tile_tokens: int) -> jax.Array:
    """[B, T, N, H] -> [K, I, B, G x tile, H]."""
    x_IBTNH = _tiled(x_BTNH, tile_tokens)
    *tiles, num_heads, width = x_IBTNH.shape
    x_IBTKGH = x_IBTNH.reshape(*tiles, num_kv_heads, num_heads // num_kv_heads, width)
    x_KIBGTH = x_IBTKGH.transpose(3, 0, 1, 4, 2, 5)
    return x_KIBGTH.reshape(*x_KIBGTH.shape[:3], -1, width)


def _untiled(x_KIBHR: jax.Array, like_BTNH: jax.Array) -> jax.Array:
    """[K, I, B, H, R] -> [B, T, N, H], with the padding of T taken off."""
    batch, num_tokens, num_heads, _ = like_BTNH.shape
    num_kv_heads, num_tiles, _, width, _ = x_KIBHR.shape
    x_KIBHGT = x_KIBHR.reshape(num_kv_heads, num_tiles, batch, width, num_heads // num_kv_heads, -1)
    return x_KIBHGT.transpose(2, 1, 5, 0, 4, 3).reshape(batch, -1, num_heads, width)[:, :num_tokens]
