"""Attention masks as one contiguous range of keys per query.

Causal masks, documents and sliding windows have this form for every block of keys in which the tokens of a document
are contiguous, with ascending positions. That holds for a whole packed sequence in natural order and for any of its
tokens in ascending order: a rank's tokens in zigzag order, a halo followed by its chunk, slices of these. It holds for
a rank's tokens under per-document sharding (sharding/document_layout.py). It does not hold for documents that are
interleaved, nor for the tokens of all ranks in layout order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import AttentionSpec, Masks


class KeyRanges(NamedTuple):
    """Query t attends to the keys start_BT[t] <= s < end_BT[t]; int32. start == end == 0 for a fully masked row."""

    start_BT: jax.Array
    end_BT: jax.Array

    def dense_mask_BTS(self, num_keys: int) -> jax.Array:
        keys_S = jnp.arange(num_keys)
        return (self.start_BT[:, :, None] <= keys_S) & (keys_S < self.end_BT[:, :, None])


def key_ranges(masks: Masks, spec: AttentionSpec, num_keys: int) -> KeyRanges:
    """The ranges of `masks` with explicit positions (`Masks.with_positions`) if `spec` is causal.

    O((T + S) log S) time and O(T + S) memory. The caller ensures that documents are contiguous, see the docstring of
    the module; it is not checked.
    """
    q_segments_BT, k_segments_BS = masks.q_segments_BT, masks.k_segments_BS
    if q_segments_BT is None:
        if not spec.causal:
            raise ValueError("a mask without segment ids that is not causal masks nothing")
        q_segments_BT, k_segments_BS = jnp.ones_like(masks.q_positions_BT), jnp.ones_like(masks.k_positions_BS)
    first_BT, end_BT = jax.vmap(_document_ranges)(q_segments_BT, k_segments_BS)
    if spec.causal:
        bisect = jax.vmap(_first_key_from, in_axes=(0, 0, 0, 0))
        document_end_BT = end_BT
        end_BT = bisect(masks.k_positions_BS, masks.q_positions_BT + 1, first_BT, document_end_BT)
        if spec.window is not None:
            first_BT = bisect(masks.k_positions_BS, masks.q_positions_BT + 1 - spec.window, first_BT, document_end_BT)
    is_empty_BT = first_BT >= end_BT
    return KeyRanges(*(jnp.where(is_empty_BT, 0, x).astype(jnp.int32) for x in (first_BT, end_BT)))


def _document_ranges(q_segments_T: jax.Array, k_segments_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First and last + 1 key of each query's document. Segment ids may be any integers in any order."""
    by_segment_S = jnp.argsort(k_segments_S, stable=True)
    sorted_S = k_segments_S[by_segment_S]
    left_T, right_T = (jnp.searchsorted(sorted_S, q_segments_T, side=side) for side in ("left", "right"))
    num_keys_T = jnp.where(q_segments_T == 0, 0, right_T - left_T)
    first_T = by_segment_S[jnp.minimum(left_T, len(k_segments_S) - 1)]
    return first_T, first_T + num_keys_T


def _first_key_from(k_positions_S: jax.Array, position_T: jax.Array, first_T: jax.Array, end_T: jax.Array):
    """The first key in [first, end) whose position is at least `position`, or end; positions ascend in the range."""

    def halve(_, bounds):
        low_T, high_T = bounds  # the result is in [low, high]
        middle_T = (low_T + high_T) // 2
        is_before = (low_T < high_T) & (k_positions_S[jnp.minimum(middle_T, len(k_positions_S) - 1)] < position_T)
        return jnp.where(is_before, middle_T + 1, low_T), jnp.where(is_before, high_T, jnp.maximum(low_T, middle_T))

    return lax.fori_loop(0, len(k_positions_S).bit_length(), halve, (first_T, end_T))[0]
