"""A ring played on one device: what its kernel calls and merges cost beside one call over everything.

Ranks of a causal ring do equal work, so n times what one rank computes is what the ring computes. One call over the
whole sequence computes the same attention. Their ratio is what cutting into steps costs, communication aside.
"""

import functools

import jax
import jax.numpy as jnp

from jaxlc.attention.contract import AttentionSpec, Kernel, Masks
from jaxlc.attention.ring import QueryResults, RingState
from jaxlc.sharding.layout import zigzag_order
from jaxlc.sharding.mesh import Ranks
from jaxlc.sweep.timing import seconds_of_calls

_NO_MASKS = Masks(None, None, None, None)


def measure(kernel: Kernel, spec: AttentionSpec, q_BTNH, k_BTKH, v_BTKH, num_ranks: int, repeats: int) -> dict:
    """Seconds (least of the calls) of the ring's steps on all ranks and of one call, forward and backward, causal."""
    whole = jax.jit(functools.partial(_monolithic, kernel, spec))
    blocks = [_blocks(x, num_ranks) for x in (q_BTNH, k_BTKH, v_BTKH)]
    steps = jax.jit(functools.partial(play, kernel, spec, rank=num_ranks // 2))
    ring_seconds = num_ranks * min(seconds_of_calls(steps, *blocks, repeats=repeats))
    whole_seconds = min(seconds_of_calls(whole, q_BTNH, k_BTKH, v_BTKH, repeats=repeats))
    return dict(
        seq_len=q_BTNH.shape[1],
        num_ranks=num_ranks,
        ring_seconds=ring_seconds,
        whole_seconds=whole_seconds,
        ring_over_whole=ring_seconds / whole_seconds,
    )


def play(kernel: Kernel, spec: AttentionSpec, q_blocks, k_blocks, v_blocks, *, rank: int):
    """What `rank` computes in a causal ring, forward and then backward with its out as the cotangent.

    Args:
      q_blocks, k_blocks, v_blocks: every rank's piece of the sequence, in zigzag order.
    Returns:
      out_btnH, lse_bnt and dq_btnH of that rank, and its share of everybody's dk and dv, in order of the steps.
    """
    num_ranks, q = len(q_blocks), q_blocks[rank]
    ring = RingState(kernel, spec, Ranks("", num_ranks), rank, None)
    steps = [(s, k_blocks[(rank - s) % num_ranks], v_blocks[(rank - s) % num_ranks]) for s in range(1, num_ranks)]
    k, v = k_blocks[rank], v_blocks[rank]
    out_lse = kernel.forward(q, k, v, _NO_MASKS, spec)
    for s, k_s, v_s in steps:
        _, out_lse = ring.forward_hop(s, q, k_s, v_s, out_lse)
    out, lse = out_lse
    out = out.astype(q.dtype)
    rows = QueryResults(out, lse, out, jnp.zeros_like(lse))
    dq, *dkv = kernel.backward(q, k, v, _NO_MASKS, spec, *rows)
    gradients = [tuple(dkv)]
    for s, k_s, v_s in steps:
        _, dq, *dkv = ring.backward_hop(s, q, k_s, v_s, rows, dq)
        gradients.append(tuple(dkv))
    return out, lse, dq, gradients


def _monolithic(kernel: Kernel, spec: AttentionSpec, q, k, v):
    out, lse = kernel.forward(q, k, v, _NO_MASKS, spec)
    out = out.astype(q.dtype)
    return out, lse, kernel.backward(q, k, v, _NO_MASKS, spec, out, lse, out, jnp.zeros_like(lse))


def _blocks(x_BT: jax.Array, num_ranks: int) -> list[jax.Array]:
    order = zigzag_order(x_BT.shape[1], num_ranks).reshape(num_ranks, -1)
    return [x_BT[:, places] for places in order]
