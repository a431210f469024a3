"""The gated delta rule over a rank's tokens; for code inside `shard_map`.

The fragments of a rank are cut into groups of chunks. Several groups are computed at once: the affine map of each
group, and its outputs as functions of the state that enters it. Then follow a scan over the maps of a fragment, one
exchange between ranks, and one product for the outputs. So the number of sequential steps is that of the chunks of a
group and of the groups, not that of all chunks. Groups are recomputed in the backward pass.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.delta_rule import chunk_rule
from jaxlc.attention.delta_rule.chunk_rule import Tokens, map_and_reads, outputs, read
from jaxlc.attention.delta_rule.entering_states import continued_states, entering_states, states_of_groups
from jaxlc.attention.strategies.fragments import is_last, predecessors
from jaxlc.core import scopes
from jaxlc.sharding.mesh import Ranks

GROUP_TOKENS = 1024
_GROUPS_AT_ONCE = 4  # of one sequence: 2.2 GiB of temporaries with 32 heads of dimension 128


@jax.named_scope(scopes.DELTA_RULE)
def delta_rule(
    q_btGK: jax.Array,
    k_btGK: jax.Array,
    v_btHV: jax.Array,
    g_btH: jax.Array,
    beta_btH: jax.Array,
    segments_bt: jax.Array | None,
    prefixes_bt: jax.Array | None = None,
    *,
    ranks: Ranks,
    num_fragments: int,
    scale: float,
) -> jax.Array:
    """The outputs [b, t, H, V] in the dtype of q. See `jaxlc.attention.gated_delta_rule`.

    Args:
      prefixes_bt: the segment that a token's segment continues, 0: none. A segment is followed by those that continue
        it. None: no segment continues another one.
      num_fragments: of each rank; 1: the ranks have consecutive parts of the sequence. 2: zigzag order.
    """
    arrays = (q_btGK, k_btGK, v_btHV, g_btH, beta_btH, segments_bt, prefixes_bt)
    groups = _groups_of_rank(arrays, ranks, num_fragments)
    if len(groups.segments_BL) * ranks.size == 1:
        states = _first_state(q_btGK, v_btHV, 1 if prefixes_bt is None else 2)[None]
        out = _in_groups(jax.checkpoint(lambda pair: outputs(*pair, scale=scale)[0]), (groups, states))
    else:
        maps, reads = _in_groups(jax.checkpoint(functools.partial(map_and_reads, scale=scale)), groups)
        of_fragments = [jax.tree.map(lambda x, i=i: jnp.split(x, num_fragments)[i], maps) for i in range(num_fragments)]
        states = jnp.concatenate(entering_states(of_fragments, ranks))
        out = _in_groups(lambda pair: read(*pair), (reads, states))
    return _in_order(out, q_btGK.shape[1], num_fragments)


@jax.named_scope(scopes.DELTA_RULE)
def delta_rule_in_groups(
    groups: Tokens, fragment_GB: jax.Array, *, ranks: Ranks, num_fragments: int, scale: float
) -> jax.Array:
    """The outputs [G, B, g, H, V] of groups of tokens in the order of per-document sharding.

    Args:
      groups: arrays [G, B, g, ...].
      fragment_GB, num_fragments: of `document_fragments.GroupTable`.
    """
    in_groups = functools.partial(_in_groups, at_once=groups_at_once(*groups.v_BLHV.shape[:3]))
    maps, reads = in_groups(jax.checkpoint(functools.partial(map_and_reads, scale=scale)), groups)
    states = states_of_groups(maps, fragment_GB, ranks, num_fragments)
    return in_groups(lambda pair: read(*pair), (reads, states))


@jax.named_scope(scopes.DELTA_RULE)
def continued_delta_rule(
    q_btGK: jax.Array,
    k_btGK: jax.Array,
    v_btHV: jax.Array,
    g_btH: jax.Array,
    beta_btH: jax.Array,
    initial_bHKV: jax.Array,
    *,
    ranks: Ranks,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """The outputs [b, t, H, V], and the state after the last token, of one segment that starts with `initial_bHKV`.

    The ranks have consecutive tokens. Those with g and beta 0 do not change the state. Not differentiable.
    """
    groups = _groups_of_rank((q_btGK, k_btGK, v_btHV, g_btH, beta_btH, None, None), ranks, 1)
    groups = groups._replace(segment_before_B=jnp.ones_like(groups.segment_before_B))
    maps, reads = _in_groups(functools.partial(map_and_reads, scale=scale), groups)
    states = continued_states(maps, initial_bHKV, ranks)
    out = _in_groups(lambda pair: read(*pair), (reads, states))
    state = jax.tree.map(lambda x: x[-1], maps)(states[-1])
    if ranks.size > 1:
        state = lax.psum(jnp.where(is_last(ranks), state, 0), ranks.axis)
    return _in_order(out, q_btGK.shape[1], 1), state


def _first_state(q_btGK: jax.Array, v_btHV: jax.Array, num_states: int) -> jax.Array:
    num_sequences, _, num_heads, value_dim = v_btHV.shape
    shape = num_sequences, num_heads, num_states * q_btGK.shape[-1], value_dim
    return jnp.zeros(shape, jnp.promote_types(jnp.float32, q_btGK.dtype))


def groups_at_once(num_groups: int, num_sequences: int, group_tokens: int) -> int:
    """Groups of each batch of `delta_rule_in_groups`. The batches are few, and equal if that divides the number of
    groups: XLA compiles a smaller last batch for minutes, with all that computes its operands."""
    most = max(1, _GROUPS_AT_ONCE * GROUP_TOKENS // (num_sequences * group_tokens))
    return math.ceil(num_groups / math.ceil(num_groups / most))


def _in_groups(function: Callable, groups: Any, at_once: int = 0) -> Any:
    """`function` of each group, several at once; `groups` is a tree of arrays [groups, B, ...]."""
    num_sequences = jax.tree.leaves(groups)[0].shape[1]
    return lax.map(function, groups, batch_size=at_once or max(1, _GROUPS_AT_ONCE // num_sequences))


def _groups_of_rank(arrays: tuple, ranks: Ranks, num_fragments: int) -> Tokens:
    """The groups of all fragments of a rank, arrays [fragments x groups, B, tokens, ...], from arrays [b, t, ...]."""
    *arrays, segments_bt, prefixes_bt = arrays
    num_sequences, num_tokens = arrays[0].shape[:2]
    if segments_bt is None:
        segments_bt = jnp.ones((num_sequences, num_tokens), jnp.int32)
    fragment_tokens = num_tokens // num_fragments
    num_groups = math.ceil(fragment_tokens / GROUP_TOKENS)
    group_tokens = math.ceil(fragment_tokens / (num_groups * chunk_rule.CHUNK_TOKENS)) * chunk_rule.CHUNK_TOKENS
    tokens = Tokens(*arrays, segments_bt, None, prefixes_bt)
    parts = jax.tree.map(lambda x: jnp.split(x, num_fragments, axis=1), tokens)
    fragments = [
        jax.tree.map(lambda parts, i=i: parts[i], parts, is_leaf=lambda parts: isinstance(parts, list))
        for i in range(num_fragments)
    ]
    before = predecessors([fragment.segments_BL[:, -1] for fragment in fragments], ranks)
    groups = [groups_of(*pair, num_groups, group_tokens) for pair in zip(fragments, before)]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *groups)


def _in_order(out: jax.Array, num_tokens: int, num_fragments: int) -> jax.Array:
    """[fragments x groups, B, group tokens, ...] -> [b, t, ...], without the tokens that were appended."""
    out = out.reshape(num_fragments, -1, *out.shape[1:])
    out = jnp.moveaxis(out, 2, 0)
    out = out.reshape(len(out), num_fragments, -1, *out.shape[4:])
    return out[:, :, : num_tokens // num_fragments].reshape(len(out), num_tokens, *out.shape[3:])


def groups_of(tokens: Tokens, segment_before_B: jax.Array, num_groups: int, group_tokens: int) -> Tokens:
    """Arrays [num_groups, B, group_tokens, ...]. Tokens are appended that do not change the state: 0 in all arrays."""

    missing = num_groups * group_tokens - tokens.segments_BL.shape[1]

    def cut(x, mode="constant"):
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), mode=mode)
        return x.reshape(x.shape[0], num_groups, group_tokens, *x.shape[2:]).swapaxes(0, 1)

    *arrays, segments_BL, _, prefixes_BL = tokens
    segments = cut(segments_BL, mode="edge")
    before = jnp.concatenate([segment_before_B[None], segments[:-1, :, -1]])
    return Tokens(*map(cut, arrays), segments, before, None if prefixes_BL is None else cut(prefixes_BL, mode="edge"))
