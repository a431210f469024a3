"""The gated delta rule over a rank's tokens; for code inside `shard_map`.

The fragments of a rank are cut into groups of chunks. Two passes compute several groups at once: the first the affine
map of each group, the second the outputs of each group from the state that enters it. Between them are a scan over the
maps of a fragment, and one exchange between ranks. So the number of sequential steps is that of the chunks of a group
and of the groups, not that of all chunks. Groups are recomputed in the backward pass.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.delta_rule.chunk_rule import CHUNK_TOKENS, Affine, Tokens, affine_map, outputs
from jaxlc.attention.delta_rule.entering_states import entering_states
from jaxlc.attention.strategies.fragments import predecessors
from jaxlc.core import scopes
from jaxlc.sharding.mesh import Ranks

GROUP_TOKENS = 1024
_GROUPS_AT_ONCE = 4  # of one sequence: about 2 GiB of temporaries with 32 heads of dimension 128


@jax.named_scope(scopes.DELTA_RULE)
def delta_rule(
    q_btGK: jax.Array,
    k_btGK: jax.Array,
    v_btHV: jax.Array,
    g_btH: jax.Array,
    beta_btH: jax.Array,
    segments_bt: jax.Array | None,
    *,
    ranks: Ranks,
    num_fragments: int,
    scale: float,
) -> jax.Array:
    """The outputs [b, t, H, V] in the dtype of q. See `jaxlc.attention.gated_delta_rule`.

    Args:
      num_fragments: of each rank; 1: the ranks have consecutive parts of the sequence. 2: zigzag order.
    """
    num_sequences, num_tokens = q_btGK.shape[:2]
    if segments_bt is None:
        segments_bt = jnp.ones((num_sequences, num_tokens), jnp.int32)
    arrays = (q_btGK, k_btGK, v_btHV, g_btH, beta_btH, segments_bt)
    fragment_tokens = num_tokens // num_fragments
    num_groups = math.ceil(fragment_tokens / GROUP_TOKENS)
    group_tokens = math.ceil(fragment_tokens / (num_groups * CHUNK_TOKENS)) * CHUNK_TOKENS
    fragments = [Tokens(*parts, None) for parts in zip(*(jnp.split(x, num_fragments, axis=1) for x in arrays))]
    before = predecessors([fragment.segments_BL[:, -1] for fragment in fragments], ranks)
    groups = [_groups(*pair, num_groups, group_tokens) for pair in zip(fragments, before)]
    groups = jax.tree.map(lambda *parts: jnp.concatenate(parts), *groups)  # [num_fragments * num_groups, B, ...]
    in_groups = functools.partial(lax.map, batch_size=max(1, _GROUPS_AT_ONCE // num_sequences))

    if len(groups.segments_BL) * ranks.size == 1:
        shape = num_sequences, v_btHV.shape[2], k_btGK.shape[3], v_btHV.shape[3]
        states = jnp.zeros((1, *shape), jnp.promote_types(jnp.float32, q_btGK.dtype))
    else:
        maps = in_groups(jax.checkpoint(functools.partial(affine_map, scale=scale)), groups)
        of_fragments = [jax.tree.map(lambda x, i=i: jnp.split(x, num_fragments)[i], maps) for i in range(num_fragments)]
        entering = entering_states([_total(maps) for maps in of_fragments], ranks)
        states = jnp.concatenate([_states(maps, S) for maps, S in zip(of_fragments, entering)])
    out = in_groups(jax.checkpoint(lambda pair: outputs(*pair, scale=scale)), (groups, states))
    out = out.reshape(num_fragments, num_groups, num_sequences, group_tokens, *out.shape[3:])
    out = jnp.moveaxis(out, 2, 0).reshape(num_sequences, num_fragments, num_groups * group_tokens, *out.shape[4:])
    return out[:, :, :fragment_tokens].reshape(num_sequences, num_tokens, *out.shape[3:])


def _groups(tokens: Tokens, segment_before_B: jax.Array, num_groups: int, group_tokens: int) -> Tokens:
    """Arrays [num_groups, B, group_tokens, ...]. Tokens are appended that do not change the state: 0 in all arrays."""

    missing = num_groups * group_tokens - tokens.segments_BL.shape[1]

    def cut(x, mode="constant"):
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), mode=mode)
        return x.reshape(x.shape[0], num_groups, group_tokens, *x.shape[2:]).swapaxes(0, 1)

    *arrays, segments_BL, _ = tokens
    segments = cut(segments_BL, mode="edge")
    return Tokens(*map(cut, arrays), segments, jnp.concatenate([segment_before_B[None], segments[:-1, :, -1]]))


def _total(maps: Affine) -> Affine:
    """The map of all groups of a fragment, [groups, B, ...] -> [B, ...]."""
    first, rest = (jax.tree.map(lambda x, part=part: x[part], maps) for part in (0, slice(1, None)))
    return lax.scan(lambda total, group: (group.after(total), None), first, rest)[0]


def _states(maps: Affine, S: jax.Array) -> jax.Array:
    """The state that enters each group of a fragment, from the state that enters the first one."""
    return lax.scan(lambda S, group: (group(S), S), S, maps)[1]
