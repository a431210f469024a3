"""Regression cases for masks. They are the sequences of one batch, so that one compilation tests
all of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxlc.attention import attend, contract
from jaxlc.attention.contract import AttentionSpec, KeyRanges
from jaxlc.attention.kernels import reference
from jaxlc.attention.key_ranges import TokenInfo, key_ranges
from jaxlc.attention.query_tiles import TiledAttention, layout_of, tiles_of
from jaxlc.config import MeshConfig
from jaxlc.sharding.document_layout import natural_order
from jaxlc.sharding.mesh import make_mesh
from tests.tolerances import max_relative_error

TOKENS = 96

# Lengths of the documents of each sequence; a negative length is padding.
DOCUMENTS = {
    "one_document": (96,),
    "packed": (40, 3, 29, 24),
    "padded": (61, -35),  # with context >= 3, one half of a rank's shard is all padding
    "padding_first": (-48, 48),  # with context = 2, all queries of one chunk are fully masked
    "all_padding": (-96,),
    "one_token_documents": (1,) * 96,
}
BATCH = len(DOCUMENTS)


def segments() -> np.ndarray:
    """[BATCH, TOKENS] int32."""
    return np.stack(
        [
            np.concatenate([np.full(abs(n), i + 1 if n > 0 else 0) for i, n in enumerate(lengths)])
            for lengths in DOCUMENTS.values()
        ]
    ).astype(np.int32)


def positions() -> np.ndarray:
    """[BATCH, TOKENS] int32: positions that restart with each document."""
    return np.stack(
        [np.concatenate([np.arange(abs(n)) for n in lengths]) for lengths in DOCUMENTS.values()]
    ).astype(np.int32)


def sequence_positions(batch: int = BATCH) -> jax.Array:
    """[batch, TOKENS] int32: positions that count from the start of the sequence."""
    return jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32), (batch, TOKENS))


def ranges(packed: bool, spec: AttentionSpec) -> KeyRanges | None:
    """Key ranges of the batch. Not packed: without segment ids, each sequence is one document."""
    tokens = TokenInfo(sequence_positions(), None)
    if packed:
        tokens = TokenInfo(jnp.asarray(positions()), jnp.asarray(segments()))
    return key_ranges(tokens, tokens, spec)


def inputs(
    batch=BATCH,
    num_tokens=TOKENS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    value_dim=None,
    dtype=jnp.float32,
    seed=0,
):
    """Random (q_BTNH, k_BSKH, v_BSKH, dout_BTNH)."""
    keys = jax.random.split(jax.random.key(seed), 4)
    value_dim = value_dim or head_dim
    widths = (
        (num_heads, head_dim),
        (num_kv_heads, head_dim),
        (num_kv_heads, value_dim),
        (num_heads, value_dim),
    )
    return tuple(
        jax.random.normal(k, (batch, num_tokens, *w)).astype(dtype)
        for k, w in zip(keys, widths, strict=True)
    )


def split_mesh(**axes: int) -> Mesh:
    """A mesh of the first simulated devices."""
    config = MeshConfig(**axes)
    return make_mesh(config, jax.devices()[: config.num_devices])


@functools.cache
def oracle(packed=True, causal=True, dtype=jnp.float32, window=None, sinks_N=None, **heads):
    """(out, gradients) of the reference in float32, for inputs rounded to `dtype`; heads as in
    `inputs`.

    Args:
      sinks_N: numbers, whose gradient, the last one, is [1, N]; None: no sinks.
    """
    q, k, v, dout = (x.astype(jnp.float32) for x in inputs(dtype=dtype, **heads))
    spec = AttentionSpec(causal=causal, window=window)

    def objective(operands):
        *qkv, sinks_1N = operands
        results = reference.forward(*qkv, ranges(packed, spec), spec)
        out, _ = contract.join(*results, None if sinks_1N is None else sinks_1N[0])
        return (out * dout).sum(), out

    operands = q, k, v, None if sinks_N is None else jnp.array([sinks_N])
    gradients, out = jax.jit(jax.grad(objective, has_aux=True))(operands)
    return out, gradients


def sharded(mesh, packed=True, causal=True, dtype=jnp.float32, window=None, heads=None, **settings):
    """The same through the public API, on a mesh; `settings` are arguments of `attend`."""
    q, k, v, dout = inputs(dtype=dtype, **(heads or {}))
    settings.update(
        causal=causal, window=window, segment_ids=jnp.asarray(segments()) if packed else None
    )

    def objective(q, k, v):
        out = attend(q, k, v, mesh=mesh, **settings)
        return (out * dout).sum(), out

    gradients, out = jax.jit(jax.grad(objective, (0, 1, 2), has_aux=True))(q, k, v)
    return out, gradients


def assert_rows_match(actual, expected, tolerance: float) -> None:
    """Compares each batch row of each array separately, so that large values in one do not mask
    errors in another.
    """
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        for row in range(y.shape[0]):
            # 0 up to rounding, such as dq and dk of one-token documents
            if np.abs(y[row]).max() < 1e-5:
                assert np.abs(x[row]).max() < 1e-5, (row, y.shape)
            else:
                assert max_relative_error(x[row], y[row]) <= tolerance, (row, y.shape)


def tiled_results(tiled: TiledAttention, order_T: np.ndarray, ranges, operands, sinks_N=None):
    """[out, dq, dk, dv, dsinks_1N or None] in natural order, tile by tile as in a layer; `operands`
    as of `inputs`.

    Args:
      order_T: the layout of the sequence.
      ranges: of `tiled.prepare`, in layout order.
      sinks_N: numbers; None: no sinks.
    """
    context, tiles = tiled.outer.size * tiled.inner.size, tiled.tiles
    sinks_N = None if sinks_N is None else jnp.array(sinks_N)

    @jax.jit
    def all_tiles(*operands):
        q_MBtNH, k_MBtKH, v_MBtKH, dout_MBtNH = (
            tiles_of(x[:, order_T], context, tiles) for x in operands
        )
        indices = jnp.arange(tiles, dtype=jnp.int32)
        empty = tiled.empty(q_MBtNH.shape[1], len(order_T), q_MBtNH.shape[-1], q_MBtNH.dtype)
        kv, _ = lax.scan(
            lambda kv, tile: (tiled.put(kv, *tile), None), empty, (k_MBtKH, v_MBtKH, indices)
        )
        kv = tiled.exchange(kv, ranges)

        def loop_body(dkv, operands):
            q_BtNH, dout_BtNH, tile = operands
            results = tiled.forward(q_BtNH, kv, tile, ranges, sinks_N)
            dq_BtNH, dkv, dsinks_N = tiled.backward(
                q_BtNH, kv, dkv, tile, *results, dout_BtNH, ranges, sinks_N
            )
            return dkv, (results[0], dq_BtNH, dsinks_N)

        dkv = jnp.zeros(kv.shape, jnp.float32)
        dkv, (out_MBtNH, dq_MBtNH, dsinks_MN) = lax.scan(
            loop_body, dkv, (q_MBtNH, dout_MBtNH, indices)
        )
        dkv = tiled.add_exchanged(dkv, ranges)
        results = out_MBtNH, dq_MBtNH, *lax.map(lambda index: tiled.take(dkv, index), indices)
        dsinks_1N = None if sinks_N is None else dsinks_MN.sum(0, keepdims=True)
        return [*(layout_of(x, context)[:, natural_order(order_T)] for x in results), dsinks_1N]

    return all_tiles(*operands)
