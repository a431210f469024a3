"""The ring steps of all ranks, run on one device, together compute attention over the whole
sequence.
"""

import functools

import jax
import jax.numpy as jnp

from benchmarks import ring_steps
from jaxlc.attention.contract import AttentionSpec, QueryResults
from jaxlc.attention.kernels import blockwise, reference
from jaxlc.sharding.document_layout import natural_order, zigzag_order
from tests.attention.cases import TOKENS, assert_rows_match, inputs
from tests.tolerances import FLOAT32_PARITY

RANKS = 3


def test_run_rank_all_ranks_match_reference():
    q, k, v, _ = inputs(batch=1)
    spec = AttentionSpec()
    out, lse = reference.forward(q, k, v, None, spec)
    expected = out, *reference.backward(q, k, v, None, spec, QueryResults(out, lse, out, 0 * lse))

    blocks = [ring_steps._blocks(x, RANKS) for x in (q, k, v)]
    outs, dqs, dkvs = [], [], [0.0] * RANKS
    for rank in range(RANKS):
        run_rank = jax.jit(functools.partial(ring_steps.run_rank, blockwise, spec, rank=rank))
        out, _, dq, gradients = run_rank(*blocks)
        outs.append(out)
        dqs.append(dq)
        for s, dkv in enumerate(gradients):
            source = (rank - s) % RANKS
            dkvs[source] = jnp.stack(dkv) + dkvs[source]
    dk, dv = (jnp.concatenate([dkv[i] for dkv in dkvs], axis=1) for i in (0, 1))
    natural = natural_order(zigzag_order(TOKENS, RANKS))
    actual = [
        x[:, natural] for x in (jnp.concatenate(outs, axis=1), jnp.concatenate(dqs, axis=1), dk, dv)
    ]
    assert_rows_match(actual, expected, FLOAT32_PARITY)
