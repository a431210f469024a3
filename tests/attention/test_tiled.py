"""Attention by tiles against the oracle: put, forward, backward and take, driven tile by tile as a layer does."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxlc.attention.tiled import layout_of, make_tiled, tiles_of
from jaxlc.config import AttentionConfig
from jaxlc.core.axes import CONTEXT
from jaxlc.sharding.layout import natural_order, zigzag_order
from tests.attention.cases import TOKENS, assert_rows_match, inputs, oracle, segments, split_mesh
from tests.tolerances import FLOAT32_PARITY


def run(mesh, config, tiles, packed, **heads):
    """(out, (dq, dk, dv)) in natural order of `cases.inputs`."""
    context = mesh.shape[CONTEXT]
    order = zigzag_order(TOKENS, context)
    num_kv_heads = heads.get("num_kv_heads", 2)
    tiled = make_tiled(config, mesh, tiles=tiles, num_kv_heads=num_kv_heads)
    segments_BT = jnp.asarray(segments()[:, order]) if packed else None

    @jax.jit
    def all_tiles(*operands):
        q_nBtNH, k_nBtKH, v_nBtKH, dout_nBtNH = (tiles_of(x[:, order], context, tiles) for x in operands)
        numbers = jnp.arange(tiles, dtype=jnp.int32)
        batch, _, _, head_dim = operands[1].shape
        empty = tiled.empty(batch, TOKENS, head_dim, jnp.float32)
        kv, _ = lax.scan(lambda kv, tile: (tiled.put(kv, *tile), None), empty, (k_nBtKH, v_nBtKH, numbers))

        def through(dkv, tile):
            q_BtNH, dout_BtNH, number = tile
            out_BtNH, lse_BNt = tiled.forward(q_BtNH, kv, number, segments_BT)
            rows = out_BtNH, lse_BNt, dout_BtNH
            dq_BtNH, dkv = tiled.backward(q_BtNH, kv, dkv, number, *rows, segments_BT)
            return dkv, (out_BtNH, dq_BtNH)

        dkv, (out_nBtNH, dq_nBtNH) = lax.scan(through, jnp.zeros_like(kv), (q_nBtNH, dout_nBtNH, numbers))
        dk_nBtKH, dv_nBtKH = lax.map(lambda number: tiled.take(dkv, number), numbers)
        results = (layout_of(x, context)[:, natural_order(order)] for x in (out_nBtNH, dq_nBtNH, dk_nBtKH, dv_nBtKH))
        return tuple(results)

    out, *gradients = all_tiles(*inputs(**heads))
    return out, tuple(gradients)


class Case(NamedTuple):
    strategy: str
    axes: dict[str, int]
    tiles: int
    num_heads: int = 4
    num_kv_heads: int = 2
    packed: bool = True
    kernel: str = "blockwise"
    ulysses_ranks: int = 1


@pytest.mark.parametrize(
    "case",
    [
        Case("ring", dict(context=1), 1, packed=False),
        Case("ring", dict(context=2), 2),
        Case("hybrid", dict(context=4), 2, ulysses_ranks=2),
        Case("ulysses", dict(context=2), 4),
    ],
    ids=str,
)
def test_matches_the_oracle(case: Case):
    config = AttentionConfig(strategy=case.strategy, kernel=case.kernel, ulysses_ranks=case.ulysses_ranks)
    heads = dict(num_heads=case.num_heads, num_kv_heads=case.num_kv_heads)
    got = run(split_mesh(**case.axes), config, case.tiles, case.packed, **heads)
    assert_rows_match(got, oracle(packed=case.packed, **heads), FLOAT32_PARITY)
