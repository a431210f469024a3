"""Ulysses inside, ring outside (USP: Fang and Zhao 2024, arXiv:2405.07719).

The context axis is cut in two: neighbouring ranks exchange heads for tokens, groups of them form the ring. Ulysses
alone stops at the number of heads; a ring alone sends K and V once around all ranks. Put the exchange, which has
nothing to hide behind, on NVLink and the hops, which hide behind attention, on the network between nodes.

Zigzag order over all ranks is zigzag order over the groups as well: rank r = o I + i holds chunks r and 2 R - 1 - r,
and for i = 0 .. I - 1 those are two runs of I neighbouring chunks, o and 2 O - 1 - o when counted in runs.
"""

import functools

import jax

from jaxlc.attention import ring, ulysses
from jaxlc.attention.contract import AttentionSpec, Kernel, Masks
from jaxlc.sharding.mesh import Ranks


def attend(
    q_btnH: jax.Array,
    k_bskH: jax.Array,
    v_bskH: jax.Array,
    masks: Masks,
    kernel: Kernel,
    spec: AttentionSpec,
    outer: Ranks,
    inner: Ranks,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the whole sequence, this rank's piece of it; call inside `shard_map`. As `ring.attend`.

    Raises:
      Unsupported: the query heads of a rank, or its key/value heads, do not split over the inner ranks.
    """
    attend_group = functools.partial(ring.attend, kernel=kernel, spec=spec, ranks=outer)
    return ulysses.exchange(attend_group, q_btnH, k_bskH, v_bskH, masks, inner)
