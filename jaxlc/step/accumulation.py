"""Gradient accumulation: sums over the microbatches of a step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.step import update
from jaxlc.step.batch import Batch
from jaxlc.step.state import is_on_host


def accumulate(objective: Callable, params, batch: Batch, dims, histories: dict | None = None):
    """Sums of the loss and its gradients over a batch [gradient accumulation steps, sequences, tokens].

    Args:
      objective: `(params, histories, microbatch) -> (objective, cross_entropy)`, both float32 sums over the microbatch;
        the first is differentiated. The second may be a tree of sums.
      params: pytree of arrays, in device or host memory.
      dims: the parameter tree with a tuple of dimension names per leaf.
      histories: amax histories of FP8 delayed scaling, or None.
    Returns:
      The sums of the second result; the sum of the gradients; the next histories, which are the maximum over the
      microbatches, or None.
    """
    differentiate = jax.grad(objective, argnums=(0, 1), has_aux=True)

    def add_microbatch(totals, part: Batch):
        (gradients, amax), (part_totals, cross_entropy) = totals, differentiate(params, histories, part)
        gradients = update.add(gradients, part_totals[0], dims)
        return (gradients, jax.tree.map(jnp.maximum, amax, part_totals[1])), cross_entropy

    if not is_on_host(params):
        # float32 also of the copies of nodes, which may have the compute dtype.
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), (params, histories))
        totals, cross_entropy = lax.scan(add_microbatch, zeros, batch)
        return jax.tree.map(lambda x: x.sum(0), cross_entropy), *totals
    # No zeros, which would be allocated on the device: the sum starts with the gradients of the first microbatch.
    first, others = jax.tree.map(lambda x: x[0], batch), jax.tree.map(lambda x: x[1:], batch)
    totals, first_cross_entropy = differentiate(params, histories, first)
    if len(batch.tokens) == 1:
        return first_cross_entropy, *totals
    totals, cross_entropy = lax.scan(add_microbatch, totals, others)
    return jax.tree.map(lambda first, others: first + others.sum(0), first_cross_entropy, cross_entropy), *totals
