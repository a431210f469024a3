"""The overhead of splitting attention into ring steps, measured on one device and without
communication.

All ranks of a causal ring do equal work, so n times the time of one rank is the compute time of the
ring. It is compared with one kernel call over the whole sequence.
"""

import functools

import jax
import jax.numpy as jnp

from jaxlc.attention.contract import AttentionSpec, Kernel, QueryResults
from jaxlc.attention.strategies.ring import RingState
from jaxlc.search.measure import seconds_of_calls
from jaxlc.sharding.document_layout import zigzag_order
from jaxlc.sharding.mesh import Ranks


def measure(
    kernel: Kernel, spec: AttentionSpec, q_BTNH, k_BTKH, v_BTKH, num_ranks: int, repeats: int
) -> dict:
    """Times forward and backward of causal attention, as ring steps and as one call.

    Returns:
      ring_seconds (all steps of all ranks) and whole_seconds (one call), the minimum over `repeats` calls; their ratio
      ring_over_whole; seq_len and num_ranks.
    """
    one_call = jax.jit(functools.partial(_one_call, kernel, spec))
    blocks = [_blocks(x, num_ranks) for x in (q_BTNH, k_BTKH, v_BTKH)]
    steps = jax.jit(functools.partial(run_rank, kernel, spec, rank=num_ranks // 2))
    ring_seconds = num_ranks * min(seconds_of_calls(steps, *blocks, repeats=repeats))
    whole_seconds = min(seconds_of_calls(one_call, q_BTNH, k_BTKH, v_BTKH, repeats=repeats))
    return dict(
        seq_len=q_BTNH.shape[1],
        num_ranks=num_ranks,
        ring_seconds=ring_seconds,
        whole_seconds=whole_seconds,
        ring_over_whole=ring_seconds / whole_seconds,
    )


def run_rank(kernel: Kernel, spec: AttentionSpec, q_blocks, k_blocks, v_blocks, *, rank: int):
    """Runs the steps of one rank of a causal ring, forward and then backward with `out` as the cotangent.

    Args:
      q_blocks, k_blocks, v_blocks: the blocks of all ranks, in zigzag order.
    Returns:
      out_btnH, lse_bnt and dq_btnH of the rank, and per ring step the (dk, dv) of the block that it used.
    """
    num_ranks, q = len(q_blocks), q_blocks[rank]
    ring = RingState(kernel, spec, Ranks("", num_ranks), rank, None)
    steps = [
        (s, k_blocks[(rank - s) % num_ranks], v_blocks[(rank - s) % num_ranks])
        for s in range(1, num_ranks)
    ]
    k, v = k_blocks[rank], v_blocks[rank]
    out_lse = kernel.forward(q, k, v, None, spec)
    for s, k_s, v_s in steps:
        _, out_lse = ring.forward_step(s, q, k_s, v_s, out_lse)
    out, lse = out_lse
    out = out.astype(q.dtype)
    rows = QueryResults(out, lse, out, jnp.zeros_like(lse))
    dq, *dkv = kernel.backward(q, k, v, None, spec, rows)
    gradients = [tuple(dkv)]
    for s, k_s, v_s in steps:
        _, dq, *dkv = ring.backward_step(s, q, k_s, v_s, rows, dq)
        gradients.append(tuple(dkv))
    return out, lse, dq, gradients


def _one_call(kernel: Kernel, spec: AttentionSpec, q, k, v):
    out, lse = kernel.forward(q, k, v, None, spec)
    out = out.astype(q.dtype)
    return (
        out,
        lse,
        kernel.backward(q, k, v, None, spec, QueryResults(out, lse, out, jnp.zeros_like(lse))),
    )


def _blocks(x_BT: jax.Array, num_ranks: int) -> list[jax.Array]:
    order = zigzag_order(x_BT.shape[1], num_ranks).reshape(num_ranks, -1)
    return [x_BT[:, positions] for positions in order]
