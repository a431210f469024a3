"""The operands and the custom gradient of all strategies that split a sequence over devices.

Every strategy is two functions that run inside `shard_map`, on this rank's shard of the sequence:

    prepare(tokens: TokenInfo, kernel, spec, *ranks) -> ranges    once per training step
    attend(qkv: ShardedQKV, kernel, spec, *ranks) -> (out_btnH in q's dtype, lse_bnt float32)

`ranges` is the mask as key ranges, in the form that this strategy's kernel calls need, or what the kernel's `prepare`
computed from them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxlc.attention import sinks
from jaxlc.attention.contract import AttentionSpec, Kernel, QueryResults
from jaxlc.sharding.mesh import Ranks


class ShardedQKV(NamedTuple):
    """This rank's shard of queries, keys and values, all in the same token order."""

    q_btnH: jax.Array
    k_bskH: jax.Array
    v_bskH: jax.Array
    ranges: Any  # arrays that the strategy's `prepare` returns. None: an implicit mask
    sinks_n: jax.Array | None = None  # float32, of the heads of q; `attention_vjp` reads it, strategies do not


def repeat_heads(x_BSKH: jax.Array, num_ranks: int) -> jax.Array:
    """Repeats key/value heads up to the number of ranks that split them, if there are fewer heads."""
    num_kv_heads = x_BSKH.shape[2]
    return x_BSKH if num_kv_heads % num_ranks == 0 else jnp.repeat(x_BSKH, num_ranks // num_kv_heads, axis=2)


ForwardFn = Callable[[ShardedQKV, Kernel, AttentionSpec, Ranks | None], tuple[jax.Array, jax.Array]]
BackwardFn = Callable[
    [ShardedQKV, QueryResults, Kernel, AttentionSpec, Ranks | None], tuple[jax.Array, jax.Array, jax.Array]
]


def attention_vjp(forward: ForwardFn, backward: BackwardFn, *, inline: bool = False) -> Callable:
    """A differentiable `attend(qkv, kernel, spec, ranks)` from a forward and a backward function.

    Args:
      forward: `(qkv, kernel, spec, ranks) -> (out_btnH, lse_bnt)`; out in q's dtype or float32, lse float32.
      backward: `(qkv, results, kernel, spec, ranks) -> (dq_btnH, dk_bskH, dv_bskH)`, in q's dtype or float32.
      inline: trace the operations of `forward` into the rule for differentiation. The default traces one opaque call,
        which `jax.checkpoint` recomputes as a whole; with `inline` it sees the single operations, and moves those that
        do not depend on differentiated inputs out of loops.
    Returns:
      A function of the same arguments as `forward`, in whose results the sinks have joined. It casts out to the dtype
      of q, and the gradients to the dtypes of q, k and v. Its residuals are qkv, out and lse; out and lse have the
      checkpoint names "attention_out" and "attention_lse".
    """

    def forward_cast(qkv: ShardedQKV, kernel: Kernel, spec: AttentionSpec, ranks: Ranks | None = None):
        out, lse = sinks.join(*forward(qkv, kernel, spec, ranks), qkv.sinks_n)
        return out.astype(qkv.q_btnH.dtype), lse

    def forward_rule(qkv, kernel, spec, ranks):
        out, lse = (forward_cast if inline else attend)(qkv, kernel, spec, ranks)
        # Named inside the rule, so that the names apply to the residuals. A remat policy that saves both names then
        # does not run the forward again. Names outside the rule would apply to other values.
        out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
        return (out, lse), (qkv, out, lse)

    def backward_rule(kernel, spec, ranks, residuals, cotangents):
        qkv, out, lse = residuals
        results = QueryResults(out, lse, *cotangents)
        gradients = backward(qkv, results, kernel, spec, ranks)
        dq, dk, dv = (dx.astype(x.dtype) for dx, x in zip(gradients, qkv[:3], strict=True))
        dsinks = None if qkv.sinks_n is None else sinks.gradient(qkv.sinks_n, results)
        return (ShardedQKV(dq, dk, dv, None, dsinks),)

    attend = functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))(forward_cast)
    attend.defvjp(forward_rule, backward_rule)
    return attend
