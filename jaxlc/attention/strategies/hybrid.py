"""Ulysses within groups of ranks, a ring between the groups (USP: Fang and Zhao 2024, arXiv:2405.07719).

The context axis is split in two: the inner ranks are neighbors and exchange heads for tokens, the outer ranks form the
ring. Ulysses alone is limited by the number of heads; a ring alone sends K and V through all ranks. Place the inner
ranks within an NVLink domain, since nothing overlaps with their all-to-all. The ring's sends overlap with attention, so
the outer ranks may be on different nodes.

Zigzag order over all n = outer x inner ranks is also zigzag order over the groups. Rank r = o inner + i holds the
chunks r and 2n - 1 - r. Over i = 0 .. inner - 1 these are two runs of neighboring chunks: the runs o and
2 outer - 1 - o, if counted in runs of `inner` chunks.
"""

import functools

import jax
from jax.sharding import PartitionSpec

from jaxlc.attention.contract import AttentionSpec, Kernel
from jaxlc.attention.key_ranges import TokenInfo
from jaxlc.attention.strategies import ring, ulysses
from jaxlc.attention.strategies.strategy import ShardedQKV
from jaxlc.sharding.mesh import Ranks


def prepare(tokens: TokenInfo, kernel: Kernel | None, spec: AttentionSpec, outer: Ranks, inner: Ranks):
    """The `ranges` of `attend`, as `ring.prepare`; of all tokens of the group, in natural order."""
    return ring.prepare(ulysses.gather_tokens(tokens, inner), kernel, spec, outer)


def ranges_specs(spec: AttentionSpec, batch_axes: tuple[str, ...], outer: Ranks, inner: Ranks) -> PartitionSpec:
    """The PartitionSpec of all arrays of `prepare`."""
    return ring.ranges_specs(spec, batch_axes, outer)


def attend(
    qkv: ShardedQKV, kernel: Kernel, spec: AttentionSpec, outer: Ranks, inner: Ranks
) -> tuple[jax.Array, jax.Array]:
    """Attention of this rank's queries over the whole sequence; call inside `shard_map`. As `ring.attend`.

    Raises:
      Unsupported: the query or key/value heads of a rank do not split over the inner ranks.
    """
    attend_group = functools.partial(ring.attend, kernel=kernel, spec=spec, ranks=outer)
    return ulysses.exchange(attend_group, qkv, inner)
