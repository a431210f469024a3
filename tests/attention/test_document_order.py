"""Attention over a packed sequence in the order of per-document sharding, against natural order on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlc.attention import make
from jaxlc.config import AttentionConfig
from jaxlc.sharding.document_layout import document_order
from jaxlc.sharding.layout import natural_order
from tests.attention.cases import split_mesh

LENGTHS = [37, 3, 52, 1, 20, 11]  # and 4 tokens of padding
TOKENS = 128
SEGMENTS_T = np.pad(np.repeat(np.arange(1, len(LENGTHS) + 1), LENGTHS), (0, TOKENS - sum(LENGTHS))).astype(np.int32)
POSITIONS_T = np.pad(np.concatenate([np.arange(length) for length in LENGTHS]), (0, TOKENS - sum(LENGTHS)))


def results(order_T: np.ndarray, **settings):
    """(loss, gradients) in natural order; the arrays of the sequence are in the order `order_T`."""
    context = settings.pop("context")
    rng = np.random.default_rng(0)
    qkv = [jnp.asarray(rng.normal(size=(1, TOKENS, heads, 8)), jnp.float32) for heads in (4, 2, 2)]
    config = AttentionConfig(kernel="blockwise", query_block_tokens=16, key_block_tokens=8, **settings)
    attend = make(config, split_mesh(context=context))
    masks = (jnp.asarray(x[order_T], jnp.int32)[None] for x in (POSITIONS_T, SEGMENTS_T))

    def loss(*qkv):
        out_BTNH, lse_BNT = attend(*(x[:, order_T] for x in qkv), attend.prepare(*masks))
        out_BTNH, lse_BNT = out_BTNH[:, natural_order(order_T)], lse_BNT[:, :, natural_order(order_T)]
        weights_BTNH = jnp.cos(jnp.arange(out_BTNH.size).reshape(out_BTNH.shape))
        lse_BNT = jnp.where(jnp.isfinite(lse_BNT), lse_BNT, 0.0)  # of padding: -inf
        return (out_BTNH * weights_BTNH).sum() + jnp.sin(lse_BNT).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*qkv)


@functools.cache
def expected():
    return results(np.arange(TOKENS), context=1)


@pytest.mark.parametrize(
    "strategy, outer, inner",
    [("ring", 2, 1), ("ring", 4, 1), ("ring", 8, 1), ("hybrid", 2, 2), ("hybrid", 4, 2), ("all_gather", 4, 1)],
    ids=str,
)  # the number of groups of ranks in the ring, and the number of ranks in each
def test_document_order_equals_natural_order_on_one_device(strategy, outer, inner):
    order_T = document_order(SEGMENTS_T, outer, inner)
    split = dict(strategy=strategy, ulysses_degree=inner)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
        results(order_T, context=outer * inner, **split),
        expected(),
    )
