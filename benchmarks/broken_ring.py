"""A ring that is broken on purpose, to show what a model does whose context ranks do not exchange
keys and values.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp

from jaxlc.attention.strategies.ring import RingState


@contextlib.contextmanager
def broken_ring() -> Iterator[None]:
    """Inside, queries attend only to keys of their own context rank, in training and in all
    functions of a `Result`.
    """
    patches = (
        mock.patch.object(RingState, "forward_step", _forward_step),
        mock.patch.object(RingState, "backward_step", _backward_step),
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
