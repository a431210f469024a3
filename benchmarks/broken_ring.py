"""A ring that is broken on purpose, to show what a model does whose context ranks do not exchange keys and values."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import KeyRanges
from jaxlc.attention.ring import RingState
from jaxlc.core.axes import CONTEXT
from jaxlc.generation import cached_attention, generator
from jaxlc.generation.cache import layout_for


@contextlib.contextmanager
def broken_ring() -> Iterator[None]:
    """Inside, queries attend only to keys of their own context rank: in training, evaluation and generation.

    Generation splits the KV cache into one run of consecutive tokens per rank instead of many short blocks.
    """
    attend_own = functools.partial(_attend_own, cached_attention._attend_all)
    patches = (
        mock.patch.object(RingState, "forward_step", _forward_step),
        mock.patch.object(RingState, "backward_step", _backward_step),
        mock.patch.object(cached_attention, "_attend_all", attend_own),
        mock.patch.object(generator, "layout_for", _contiguous_layout),
    )
    with contextlib.ExitStack() as stack:
        jax.clear_caches()  # functions that were traced with the ring
        stack.callback(jax.clear_caches)
        for patch in patches:
            stack.enter_context(patch)
        yield


def _forward_step(self, step, q, k, v, out_lse, in_flight=()):
    return in_flight, out_lse


def _backward_step(self, step, q, k, v, results, dq, in_flight=()):
    return in_flight, dq, *(jnp.zeros(x.shape, jnp.float32) for x in (k, v))


def _contiguous_layout(num_tokens, mesh):
    layout = layout_for(num_tokens, mesh)
    return dataclasses.replace(layout, block_tokens=layout.tokens_per_rank)


def _attend_own(attend, q_bcnH, *args, layout, forward, spec):
    """`_attend_all`, in which a rank has no keys for the queries at positions of other ranks."""
    new = args[-1]
    positions_bC = new.positions_BC(q_bcnH.shape[1] * layout.num_ranks)
    is_own_bC = layout.is_stored_on(lax.axis_index(CONTEXT), positions_bC)

    def own_forward(q, k, v, ranges, spec):
        return forward(q, k, v, KeyRanges(*(jnp.where(is_own_bC, x, 0) for x in ranges)), spec)

    return attend(q_bcnH, *args, layout=layout, forward=own_forward, spec=spec)
