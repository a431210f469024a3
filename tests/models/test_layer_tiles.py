"""A layer on tiles against the same layer on whole sequences, on one device, with reference
attention.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlc.attention import contract
from jaxlc.attention.contract import AttentionSpec, KeyRanges, QueryResults
from jaxlc.attention.kernels import reference
from jaxlc.models import layer_tiles
from jaxlc.models.block import Init
from jaxlc.models.contract import LayerOutput, LayerTokens
from jaxlc.models.kinds.attention import AttentionTiles
from jaxlc.models.layer_stack import DecoderLayer
from jaxlc.models.offloaded_layers import LayerParams
from jaxlc.models.rope import rope_tables
from jaxlc.sharding.rules import Sharder
from tests.models.small import small_mesh, small_model
from tests.tolerances import FLOAT32_PARITY, max_relative_error

B, T = 2, 24


class _TileAttention:
    """Tiles are consecutive parts of the sequence; kv is [2, B, S, K, H]. An exchange doubles it."""

    def __init__(self, tile_tokens: int, num_kv_heads: int):
        self.tile_tokens, self.num_kv_heads = tile_tokens, num_kv_heads

    def empty(self, batch, num_tokens, head_dim, dtype):
        return jnp.zeros((2, batch, num_tokens, self.num_kv_heads, head_dim), dtype)

    def put(self, kv, k_BtKH, v_BtKH, tile):
        return jax.lax.dynamic_update_slice_in_dim(
            kv, jnp.stack([k_BtKH, v_BtKH]), tile * self.tile_tokens, axis=2
        )

    def exchange(self, kv, ranges):
        return 2 * kv

    add_exchanged = exchange

    def take(self, kv, tile):
        return tuple(
            jax.lax.dynamic_slice_in_dim(kv, tile * self.tile_tokens, self.tile_tokens, axis=2)
        )

    def _key_ranges(self, q_BtNH, tile):
        positions = jnp.broadcast_to(
            tile * self.tile_tokens + jnp.arange(q_BtNH.shape[1]), q_BtNH.shape[:2]
        )
        return KeyRanges(jnp.zeros_like(positions), positions + 1)

    def forward(self, q_BtNH, kv, tile, ranges, sinks_N):
        results = reference.forward(
            q_BtNH, *(kv / 2), self._key_ranges(q_BtNH, tile), AttentionSpec()
        )
        return contract.join(*results, sinks_N)

    def backward(self, q_BtNH, kv, dkv, tile, out_BtNH, lse_BNt, dout_BtNH, ranges, sinks_N):
        key_ranges = self._key_ranges(q_BtNH, tile)
        results = QueryResults(out_BtNH, lse_BNt, dout_BtNH, jnp.zeros_like(lse_BNt))
        dq_BtNH, dk_BSKH, dv_BSKH = reference.backward(
            q_BtNH, *(kv / 2), key_ranges, AttentionSpec(), results
        )
        dsinks_N = None if sinks_N is None else contract.gradient(sinks_N, results)
        return dq_BtNH, dkv + jnp.stack([dk_BSKH, dv_BSKH]) / 2, dsinks_N


def _attend(operands):
    ((q_BTNH, k_BTKH, v_BTKH, sinks_N),) = operands
    results = reference.forward(q_BTNH, k_BTKH, v_BTKH, None, AttentionSpec())
    return [contract.join(*results, sinks_N)[0]]


ATTENTION = dict(sinks=True, gate=True, out_bias=True)
GEMMA = dict(
    attention=dict(qk_norm="head"),
    norm_placement="pre_and_post",
    zero_centered_norm=True,
    activation="gelu_tanh",
)
OLMO = dict(
    attention=dict(qk_norm="projection", qkv_bias=True, query_scale_dim=24, **ATTENTION),
    norm_placement="post",
    mlp_bias=True,
    residual_multiplier=0.4,
)


@pytest.mark.parametrize(
    "num_tiles, saves_attention, variant", [(1, False, {}), (3, True, GEMMA), (4, False, OLMO)]
)
def test_run_layer_on_tiles_equals_whole_layer(
    num_tiles, saves_attention, variant, monkeypatch: pytest.MonkeyPatch
):
    """Both return the sum of squares of the output."""
    after_attention = DecoderLayer.after_attention

    def with_sum(self, *operands, shard):
        output, chosen = after_attention(self, *operands, shard=shard)
        return output._replace(sums=dict(squares=(output.x_BTD**2).sum())), chosen

    monkeypatch.setattr(DecoderLayer, "after_attention", with_sum)
    model = small_model(**variant)
    layer_def, params = nnx.split(DecoderLayer(model.layer_config("full"), Init(jax.random.key(0))))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda w: w + 0.2 * rng.standard_normal(w.shape).astype(np.float32), params
    )
    x_BTD, dy_BTD = rng.standard_normal((2, B, T, model.model_dim)).astype(np.float32)
    positions_BT = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    shard, tables = Sharder(small_mesh()), rope_tables(model, "full", T)

    def whole(params, x_BTD):
        layer = nnx.merge(layer_def, params)
        tokens = LayerTokens(positions_BT)
        return layer(x_BTD, tokens, attend=_attend, shard=shard, tables=tables)[0]

    def to_tiles(x_BT):
        return jnp.stack(jnp.split(x_BT, num_tiles, axis=1))

    def in_tiles(params, x_BTD):
        (y_nBtD, sums), _ = layer_tiles.run_layer(
            layer_def,
            LayerParams(params, nnx.State({})),
            to_tiles(x_BTD),
            LayerTokens(to_tiles(positions_BT)),
            [None],
            mixers=[AttentionTiles(_TileAttention(T // num_tiles, model.attention.num_kv_heads))],
            saves_attention=saves_attention,
            shard=shard,
            tables=tables,
        )
        return LayerOutput(jnp.concatenate(y_nBtD, axis=1), sums)

    def with_gradients(layer):
        output, backward = jax.vjp(layer, params, x_BTD)
        return output, *backward(LayerOutput(dy_BTD, dict(squares=jnp.float32(0.7))))

    run = jax.jit(with_gradients, static_argnums=0)
    errors = jax.tree.map(max_relative_error, run(in_tiles), run(whole))
    assert max(jax.tree.leaves(errors)) <= FLOAT32_PARITY, errors
