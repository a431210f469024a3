"""Gated DeltaNet over a chunk of new tokens, from the state after the tokens before it, context parallel.

A chunk of a prompt is split over the context ranks, which exchange the maps of their states as in training. The state
after it is on all context ranks. In a decoding step they all compute the same token.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxlc.attention.delta_rule.chunk_rule import Tokens, one_output
from jaxlc.attention.delta_rule.sharded_delta_net import FILTERS, HEADS, filtered, unit_length
from jaxlc.attention.delta_rule.sharded_rule import continued_delta_rule
from jaxlc.attention.kernels.choose import KernelSelection
from jaxlc.core.axes import BATCH_AXES, CONTEXT
from jaxlc.generation.cache import PAST_SPEC, STATE_SPEC, DeltaStates, decode_tokens
from jaxlc.generation.new_tokens import NewTokens
from jaxlc.sharding.mesh import Ranks

_BATCH = PartitionSpec(BATCH_AXES)


@dataclass(frozen=True, kw_only=True)
class CachedDeltaNet:
    """The tokens of one kind of layers, and the update of its states; to be called under `jit`."""

    mesh: Mesh
    chunk_tokens: int  # of all calls

    @property
    def kernels(self) -> dict[str, KernelSelection]:
        """No kernels of attention."""
        return {}

    def prepare(self, new: NewTokens) -> Any:
        """What all layers share: nothing."""
        del new

    def __call__(self, *operands: jax.Array, cache: DeltaStates, layer: jax.Array, new: NewTokens, ranges: Any):
        """The outputs out_BCHV, those of padding of any value, and the cache with the states of layer `layer` after the
        new tokens.

        Args:
          operands: those of `ShardedDeltaNet`, of a chunk that the context axis splits.
        """
        del ranges
        states = DeltaStates(STATE_SPEC, PAST_SPEC, PAST_SPEC, PAST_SPEC)
        in_specs = (*[HEADS] * 5, *[FILTERS] * 3, states, PartitionSpec(), NewTokens(_BATCH, _BATCH))
        is_decoding = self.chunk_tokens == decode_tokens(self.mesh)
        split = jax.shard_map(
            self._decode if is_decoding else self._prefill,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=(HEADS, states),
            check_vma=False,  # as in `ShardedDeltaNet`
        )
        return split(*operands, cache, layer, new)

    @property
    def _ranks(self) -> Ranks:
        return Ranks(CONTEXT, self.mesh.shape[CONTEXT])

    # The methods below run inside `shard_map`.

    def _prefill(self, q, k, v, g, beta, filter_q, filter_k, filter_v, cache: DeltaStates, layer, new: NewTokens):
        state, *past = (lax.dynamic_index_in_dim(x, layer, 1, keepdims=False) for x in cache)
        first = lax.axis_index(CONTEXT) * q.shape[1]
        is_new = (first + jnp.arange(q.shape[1]) < new.num_new_B[:, None])[..., None]
        g, beta = jnp.where(is_new, g, 0), jnp.where(is_new, beta, 0)  # padding does not change the state
        taps = zip((q, k, v), (filter_q, filter_k, filter_v), past)
        inputs = (
            filtered(x, taps, None, ranks=self._ranks, num_fragments=1, past_bPW=before.reshape(*before.shape[:2], -1))
            for x, taps, before in taps
        )
        inputs = _normed(*inputs)
        out, state = continued_delta_rule(*inputs, g, beta, state, ranks=self._ranks, scale=q.shape[-1] ** -0.5)
        past = [_last_inputs(before, x, first, new) for before, x in zip(past, (q, k, v))]
        return out, _updated(cache, layer, [state, *past])

    def _decode(self, q, k, v, g, beta, filter_q, filter_k, filter_v, cache: DeltaStates, layer, new: NewTokens):
        state, *past = (lax.dynamic_index_in_dim(x, layer, 1, keepdims=False) for x in cache)
        num_local = q.shape[1]
        q, k, v, g, beta = (lax.all_gather(x, CONTEXT, axis=1, tiled=True)[:, :1] for x in (q, k, v, g, beta))
        inputs = [jnp.concatenate([before.astype(x.dtype), x], axis=1) for before, x in zip(past, (q, k, v))]
        alone = dict(ranks=Ranks(CONTEXT, 1), num_fragments=1)
        last = (filtered(x, taps, None, **alone)[:, -1:] for x, taps in zip(inputs, (filter_q, filter_k, filter_v)))
        out, new_state = one_output(Tokens(*_normed(*last), g, beta, None, None), state, q.shape[-1] ** -0.5)
        values = [new_state, *(x[:, 1:] for x in inputs)]
        is_new = new.num_new_B > 0
        values = [
            jnp.where(is_new.reshape(-1, *[1] * (x.ndim - 1)), x, old.astype(x.dtype))
            for x, old in zip(values, (state, *past))
        ]
        return jnp.broadcast_to(out, (len(out), num_local, *out.shape[2:])), _updated(cache, layer, values)


def _normed(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return unit_length(q), unit_length(k), v


def _last_inputs(past_bPhW: jax.Array, x_bthW: jax.Array, first: jax.Array, new: NewTokens) -> jax.Array:
    """The last P - 1 tokens of the past and of the new tokens, of which this rank has those from `first` on."""
    num_past = past_bPhW.shape[1]
    index_bP = new.num_new_B[:, None] - num_past + jnp.arange(num_past)  # in the chunk; negative: in the past
    local_bP = index_bP - first
    is_here = (local_bP >= 0) & (local_bP < x_bthW.shape[1]) & (index_bP >= 0)

    def taken(x, index_bP, is_taken_bP):
        values = jnp.take_along_axis(x, index_bP[..., None, None], axis=1, mode="clip")
        return jnp.where(is_taken_bP[..., None, None], values, 0)

    here = lax.psum(taken(x_bthW, local_bP, is_here), CONTEXT)
    return taken(past_bPhW, num_past + index_bP, index_bP < 0) + here.astype(past_bPhW.dtype)


def _updated(cache: DeltaStates, layer: jax.Array, values: list[jax.Array]) -> DeltaStates:
    return DeltaStates(*(
        lax.dynamic_update_index_in_dim(stored, x.astype(stored.dtype), layer, 1)
        for stored, x in zip(cache, values, strict=True)
    ))  # fmt: skip
