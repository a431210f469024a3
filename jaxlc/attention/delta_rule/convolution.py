"""A causal convolution of few taps along a sequence that is split over ranks; for code inside `shard_map`."""

import jax
import jax.numpy as jnp

from jaxlc.attention.delta_rule.prefix_taps import taps_of_prefixes
from jaxlc.attention.strategies.fragments import is_first, predecessors
from jaxlc.core import scopes
from jaxlc.sharding.mesh import Ranks


@jax.named_scope(scopes.CONVOLUTION)
def convolution(
    x_btW: jax.Array,
    weights_PW: jax.Array,
    segments_bt: jax.Array | None,
    prefixes_bt: jax.Array | None = None,
    *,
    ranks: Ranks,
    num_fragments: int,
    past_bPW: jax.Array | None = None,
) -> jax.Array:
    """The convolution of each channel, [b, t, W] in the dtype of x. See `jaxlc.attention.short_convolution`.

    Each fragment receives the last P - 1 tokens before it, and their segments.

    Args:
      prefixes_bt: of `delta_rule`: the first tokens of a segment also read the last ones of the segment it continues.
      past_bPW: the P - 1 tokens before the sequence, without segments. None: there are none.
    """
    if segments_bt is None:
        segments_bt = jnp.ones(x_btW.shape[:2], jnp.int32)
    x, segments = (jnp.split(array, num_fragments, axis=1) for array in (x_btW, segments_bt))
    num_before = len(weights_PW) - 1
    if num_before == 0:
        return x_btW * weights_PW[0].astype(x_btW.dtype)
    before, segments_before = (
        predecessors([part[:, -num_before:] for part in parts], ranks) for parts in (x, segments)
    )
    if past_bPW is not None:
        before[0] = jnp.where(is_first(ranks), past_bPW.astype(x_btW.dtype), before[0])
        segments_before = [jnp.ones_like(part) for part in segments_before]
    x, segments = (
        [jnp.concatenate(pair, axis=1) for pair in zip(*pairs)] for pairs in ((before, x), (segments_before, segments))
    )
    of_prefixes = [None] * num_fragments
    if prefixes_bt is not None:
        of_prefixes = taps_of_prefixes(x, segments, jnp.split(prefixes_bt, num_fragments, axis=1), weights_PW, ranks)
    return jnp.concatenate([convolved(*parts[:2], weights_PW, parts[2]) for parts in zip(x, segments, of_prefixes)], 1)


def convolved(
    x_BLW: jax.Array, segments_BL: jax.Array, weights_PW: jax.Array, added_BLW: jax.Array | None = None
) -> jax.Array:
    """Of tokens after the first P - 1, the sum of `added_BLW` and the tokens of their segment that the taps reach."""
    num_taps = len(weights_PW)
    num_tokens = x_BLW.shape[1] - (num_taps - 1)
    own = segments_BL[:, num_taps - 1 :]
    wide = jnp.promote_types(jnp.float32, x_BLW.dtype)

    def tap(i):
        part = slice(i, i + num_tokens)
        is_own = (segments_BL[:, part] == own)[..., None]
        return jnp.where(is_own, x_BLW[:, part], 0).astype(wide) * weights_PW[i].astype(wide)

    return sum(map(tap, range(num_taps)), 0 if added_BLW is None else added_BLW).astype(x_BLW.dtype)
