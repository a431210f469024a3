"""Ulysses: an all-to-all gives each rank all tokens of some of the heads; a second one returns the
result.

Jacobs et al. 2023, arXiv:2309.14509. The kernel gets whole sequences, so there is no ring and no
zigzag order: tokens are put into natural order between the two exchanges. The heads are split, so
the context size must divide the number of query heads of a rank. Where there are fewer key/value
heads than ranks, they are repeated.

Ulysses within groups of ranks, a ring between the groups (USP: Fang and Zhao 2024,
arXiv:2405.07719).

The context axis is split in two: the inner ranks are neighbors and exchange heads for tokens, the
outer ranks form the ring. Ulysses alone is limited by the number of heads; a ring alone sends K and
V through all ranks. Place the inner ranks within an NVLink domain, since nothing overlaps with
their all-to-all. The ring's sends overlap with attention, so the outer ranks may be on different
nodes.

Zigzag order over all n = outer x inner ranks is also zigzag order over the groups. Rank r = o inner
+ i holds the chunks r and 2n - 1 - r. Over i = 0 .. inner - 1 these are two runs of neighboring
chunks: the runs o and 2 outer - 1 - o, if counted in runs of `inner` chunks.
"""

import functools
from collections.abc import Callable

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jaxlc.attention.contract import AttentionSpec, Kernel, OutLse, QueryResults, prepared
from jaxlc.attention.key_ranges import TokenInfo, key_ranges
from jaxlc.attention.strategies.strategy import ShardedQKV, attention_vjp, repeat_heads
from jaxlc.core import Unsupported, scopes
from jaxlc.sharding.document_layout import natural_order, zigzag_order
from jaxlc.sharding.mesh import Ranks


def prepare(tokens: TokenInfo, kernel: Kernel | None, spec: AttentionSpec, ranks: Ranks):
    """The `ranges` of `attend`, once per training step: int32 [b, T], of all tokens in natural
    order.

    Args:
      kernel: the kernel of `attend`, whose `prepare` is applied to the ranges. None: it is not.
    """
    tokens = gather_tokens(tokens, ranks)
    ranges = key_ranges(tokens, tokens, spec)
    return ranges if ranges is None else prepared(kernel, ranges, tokens.segments_BT.shape[1], spec)


def ranges_specs(spec: AttentionSpec, batch_axes: tuple[str, ...], ranks: Ranks) -> PartitionSpec:
    """The PartitionSpec of all arrays of `prepare`."""
    return PartitionSpec(batch_axes)


def gather_tokens(tokens: TokenInfo, ranks: Ranks) -> TokenInfo:
    """The tokens of all ranks in natural order: [b, t] -> [b, T]."""

    def gather(x_bt):
        return _to_natural(lax.all_gather(x_bt, ranks.axis, axis=1, tiled=True), ranks.size)

    return tokens.map(gather)


def attend(qkv: ShardedQKV, kernel: Kernel, spec: AttentionSpec, ranks: Ranks) -> OutLse:
    """Attention of this rank's queries over the whole sequence; call inside `shard_map`.

    Raises:
      Unsupported: the query or key/value heads of a rank do not split over the context axis.
    """
    return exchange(functools.partial(attend_on_device, kernel=kernel, spec=spec), qkv, ranks)


def _forward(qkv: ShardedQKV, kernel: Kernel, spec: AttentionSpec, ranks: None):
    return kernel.forward(*qkv[:4], spec)


def _backward(
    qkv: ShardedQKV, results: QueryResults, kernel: Kernel, spec: AttentionSpec, ranks: None
):
    return kernel.backward(*qkv[:4], spec, results)


# Attention of this device's queries over this device's keys: one kernel call, without
# communication.
attend_on_device = attention_vjp(_forward, _backward)


def exchange(attend_tokens: Callable, qkv: ShardedQKV, ranks: Ranks) -> OutLse:
    """`attend_tokens(qkv)` on the tokens of all ranks, in natural order, and on this rank's share
    of the heads.

    Args:
      qkv: this rank's tokens; its ranges are of the tokens of all ranks.

    Returns:
      out_btnH and lse_bnt of this rank's tokens, in layout order.
    """
    num_heads, num_kv_heads = (x.shape[2] for x in qkv[:2])
    size = ranks.size
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise Unsupported(
            f"unsupported: {num_heads} query and {num_kv_heads} key/value heads per rank do not split over {size}"
            " ulysses ranks; use a number of ranks that divides them, or strategy ring"
        )
    q_btnH, k_bskH, v_bskH, ranges, sinks_n = qkv
    k_bskH, v_bskH = (repeat_heads(x, size) for x in (k_bskH, v_bskH))
    q_bTnH, k_bSkH, v_bSkH = (_heads_to_tokens(x, ranks) for x in (q_btnH, k_bskH, v_bskH))
    if sinks_n is not None:
        own_heads = num_heads // size
        sinks_n = lax.dynamic_slice_in_dim(
            sinks_n, lax.axis_index(ranks.axis) * own_heads, own_heads
        )
    out_bTnH, lse_bnT = attend_tokens(ShardedQKV(q_bTnH, k_bSkH, v_bSkH, ranges, sinks_n))
    lse_bTn1 = lse_bnT.swapaxes(1, 2)[..., None]
    out_btnH, lse_btn1 = (_tokens_to_heads(x, ranks) for x in (out_bTnH, lse_bTn1))
    return out_btnH, lse_btn1[..., 0].swapaxes(1, 2)


@jax.named_scope(scopes.ALL_TO_ALL)
def _heads_to_tokens(x_btnH: jax.Array, ranks: Ranks) -> jax.Array:
    """[b, t, n, H] -> [b, T, n / ranks, H], in natural order."""
    return _to_natural(
        lax.all_to_all(x_btnH, ranks.axis, split_axis=2, concat_axis=1, tiled=True), ranks.size
    )


@jax.named_scope(scopes.ALL_TO_ALL)
def _tokens_to_heads(x_bTnH: jax.Array, ranks: Ranks) -> jax.Array:
    """The inverse: [b, T, n / ranks, H] -> [b, t, n, H], in layout order."""
    x_bTnH = x_bTnH[:, zigzag_order(x_bTnH.shape[1], ranks.size)]
    return lax.all_to_all(x_bTnH, ranks.axis, split_axis=1, concat_axis=2, tiled=True)


def _to_natural(x_bT: jax.Array, num_ranks: int) -> jax.Array:
    return x_bT[:, natural_order(zigzag_order(x_bT.shape[1], num_ranks))]
