"""Ulysses: an all-to-all gives each rank all tokens of some heads, and another takes the result back.

Jacobs et al. 2023, arXiv:2309.14509. The kernel sees whole sequences, so it needs no ring and no zigzag: tokens are
put into natural order between the two exchanges. Heads are what is split, so the context size must divide the query
heads of a rank; key/value heads are repeated where there are fewer of them than ranks.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention import local
from jaxlc.attention.contract import AttentionSpec, Kernel, Masks
from jaxlc.core import scopes
from jaxlc.core.errors import Unsupported
from jaxlc.sharding.layout import natural_order, zigzag_order
from jaxlc.sharding.mesh import Ranks


def attend(
    q_btnH: jax.Array,
    k_bskH: jax.Array,
    v_bskH: jax.Array,
    masks: Masks,
    kernel: Kernel,
    spec: AttentionSpec,
    ranks: Ranks,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the whole sequence, this rank's piece of it; call inside `shard_map`. As `ring.attend`.

    Raises:
      Unsupported: the query heads of a rank, or its key/value heads, do not split over the context axis.
    """
    attend_whole = functools.partial(local.attend, kernel=kernel, spec=spec)
    return exchange(attend_whole, q_btnH, k_bskH, v_bskH, masks, ranks)


def exchange(attend_tokens: Callable, q_btnH, k_bskH, v_bskH, masks: Masks, ranks: Ranks):
    """`attend_tokens(q, k, v, masks)` on all tokens of the ranks, in natural order, and some of the heads."""
    num_heads, num_kv_heads, size = q_btnH.shape[2], k_bskH.shape[2], ranks.size
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise Unsupported(
            f"ulysses splits heads over {size} ranks, and each of them has {num_heads} query and"
            f" {num_kv_heads} key/value heads; choose a number that divides them, or strategy ring"
        )
    k_bskH, v_bskH = (_repeated(x, size) for x in (k_bskH, v_bskH))
    q_bTmH, k_bSlH, v_bSlH = (_tokens_of_some_heads(x, ranks) for x in (q_btnH, k_bskH, v_bskH))
    whole = Masks(*(None if x is None else _natural(_gathered(x, ranks), size) for x in masks))
    out_bTmH, lse_bmT = attend_tokens(q_bTmH, k_bSlH, v_bSlH, whole)
    lse_bTm1 = lse_bmT.swapaxes(1, 2)[..., None]
    out_btnH, lse_btn1 = (_heads_of_some_tokens(x, ranks) for x in (out_bTmH, lse_bTm1))
    return out_btnH, lse_btn1[..., 0].swapaxes(1, 2)


def _repeated(x_bskH: jax.Array, num_ranks: int) -> jax.Array:
    num_kv_heads = x_bskH.shape[2]
    return x_bskH if num_kv_heads % num_ranks == 0 else jnp.repeat(x_bskH, num_ranks // num_kv_heads, axis=2)


@jax.named_scope(scopes.ALL_TO_ALL)
def _tokens_of_some_heads(x_btnH: jax.Array, ranks: Ranks) -> jax.Array:
    """[b, t, n, H] -> [b, T, n / ranks, H], natural order."""
    return _natural(lax.all_to_all(x_btnH, ranks.axis, split_axis=2, concat_axis=1, tiled=True), ranks.size)


@jax.named_scope(scopes.ALL_TO_ALL)
def _heads_of_some_tokens(x_bTmH: jax.Array, ranks: Ranks) -> jax.Array:
    """The inverse: [b, T, n / ranks, H] -> [b, t, n, H], layout order."""
    x_bTmH = x_bTmH[:, zigzag_order(x_bTmH.shape[1], ranks.size)]
    return lax.all_to_all(x_bTmH, ranks.axis, split_axis=1, concat_axis=2, tiled=True)


def _natural(x_bT: jax.Array, num_ranks: int) -> jax.Array:
    return x_bT[:, natural_order(zigzag_order(x_bT.shape[1], num_ranks))]


def _gathered(x_bt: jax.Array, ranks: Ranks) -> jax.Array:
    return lax.all_gather(x_bt, ranks.axis, axis=1, tiled=True)
