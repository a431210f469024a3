"""One kernel call as a differentiable function: for strategies that need no hops between kernel and gradient."""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxlc.attention.contract import AttentionSpec, Kernel, Masks


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, masks: Masks, kernel: Kernel, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """Attention of this device's queries over this device's keys: out_BTNH in q's dtype, lse_BNT float32."""
    out, lse = kernel.forward(q_BTNH, k_BSKH, v_BSKH, masks, spec)
    return out.astype(q_BTNH.dtype), lse


def _forward_rule(q, k, v, masks, kernel, spec):
    out, lse = attend(q, k, v, masks, kernel, spec)
    # Named inside the rule, as in ring.py: kept by name, they spare the kernel's second run.
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (out, lse), (q, k, v, masks, out, lse)


def _backward_rule(kernel, spec, residuals, cotangents):
    q, k, v, masks, out, lse = residuals
    dq, dk, dv = kernel.backward(q, k, v, masks, spec, out, lse, *cotangents)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


attend.defvjp(_forward_rule, _backward_rule)
