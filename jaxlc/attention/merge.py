"""Exact merge of attention results over disjoint sets of keys."""

import jax
import jax.numpy as jnp


def merge(
    out_a_BTNH: jax.Array, lse_a_BNT: jax.Array, out_b_BTNH: jax.Array, lse_b_BNT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) over the union of two disjoint sets of keys, from the (out, lse) of each set; all
    float32.

    out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b). The larger lse is subtracted first,
    so no exponential overflows. A side without visible keys (lse -inf) has weight 0; two such sides
    give (0, -inf). Commutative.
    """
    max_BNT = jnp.maximum(lse_a_BNT, lse_b_BNT)
    is_empty_BNT = jnp.isneginf(max_BNT)
    max_BNT = jnp.where(is_empty_BNT, 0.0, max_BNT)
    weight_a_BNT, weight_b_BNT = jnp.exp(lse_a_BNT - max_BNT), jnp.exp(lse_b_BNT - max_BNT)
    total_BNT = jnp.where(is_empty_BNT, 1.0, weight_a_BNT + weight_b_BNT)

    def per_query(x_BNT):
        return x_BNT.swapaxes(1, 2)[..., None]

    out_BTNH = out_a_BTNH * per_query(weight_a_BNT / total_BNT) + out_b_BTNH * per_query(
        weight_b_BNT / total_BNT
    )
    return out_BTNH, jnp.where(is_empty_BNT, -jnp.inf, max_BNT + jnp.log(total_BNT))


def merge_parts(out_PBTNH: jax.Array, lse_PBNT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`merge` of P disjoint sets of keys at once: (out_BTNH, lse_BNT) over their union; all
    float32.
    """
    lse_BNT = jax.nn.logsumexp(lse_PBNT, axis=0)
    weights_PBNT = jnp.exp(lse_PBNT - jnp.where(jnp.isneginf(lse_BNT), 0.0, lse_BNT))
    return jnp.einsum("PBTNH,PBNT->BTNH", out_PBTNH, weights_PBNT), lse_BNT
