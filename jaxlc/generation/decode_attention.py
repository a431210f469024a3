"""Attention of one query per sequence over a layer of the KV cache, which is read in place.

On a GPU, the query heads that share a key/value head become rows of one query block, so that each key is read once. The
keys are split into parts, which are computed in parallel and merged by their log-sum-exp (Flash-Decoding, Dao et al.
2023, pytorch.org/blog/flash-decoding). Each part is a query block with its own key range. Kernels that cannot read a
layer in place get its keys and values in short blocks, one after the other.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import AttentionSpec, Kernel, KeyRanges
from jaxlc.attention.merge import merge, merge_parts

_MIN_ROWS = 16  # the smallest query block of a kernel
_NUM_PROGRAMS = 256  # about two per multiprocessor of an H100
_MIN_PART_KEYS = 512
_KV_BLOCK = 128  # parts are whole blocks of a kernel
_BLOCK_KEYS = 1024


def attend_one(
    kernel: Kernel,
    q_B1NH: jax.Array,
    k_BLSKH: jax.Array,
    v_BLSKH: jax.Array,
    layer: jax.Array,
    num_keys_B: jax.Array,
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array]:
    """(out_B1NH, lse_BN1) over the first num_keys_B keys of layer `layer`, float32; without keys 0 and -inf.

    Args:
      kernel: supports any key ranges.
      spec: not causal.
    """
    (batch, _, num_heads, width), num_kv_heads = q_B1NH.shape, k_BLSKH.shape[3]
    q_BGKH = q_B1NH.reshape(batch, num_kv_heads, -1, width).swapaxes(1, 2)
    # A cache of another dtype is cast block by block.
    in_place = hasattr(kernel, "forward_in_layer") and k_BLSKH.dtype == q_B1NH.dtype
    attend = _in_parts if in_place else _in_blocks
    out_BGKH, lse_BKG = attend(kernel, q_BGKH, k_BLSKH, v_BLSKH, layer, num_keys_B, spec)
    return out_BGKH.swapaxes(1, 2).reshape(batch, 1, num_heads, -1), lse_BKG.reshape(batch, num_heads, 1)


def _in_parts(kernel, q_BGKH, k_BLSKH, v_BLSKH, layer, num_keys_B, spec):
    (batch, groups, num_kv_heads, _), max_keys = q_BGKH.shape, k_BLSKH.shape[2]
    num_rows = max(_MIN_ROWS, 1 << (groups - 1).bit_length())
    num_parts = max(1, min(_NUM_PROGRAMS // (batch * num_kv_heads), max_keys // _MIN_PART_KEYS))
    part_keys = -(-max_keys // (num_parts * _KV_BLOCK)) * _KV_BLOCK
    first_P = part_keys * jnp.arange(num_parts, dtype=jnp.int32)
    end_BP = jnp.minimum(first_P + part_keys, num_keys_B[:, None])
    ranges = KeyRanges(jnp.minimum(first_P, end_BP), end_BP)
    q_BRKH = jnp.pad(q_BGKH, ((0, 0), (0, num_rows - groups), (0, 0), (0, 0)))
    spec = dataclasses.replace(spec, query_block_tokens=num_rows)
    out, lse = kernel.forward_in_layer(jnp.tile(q_BRKH, (1, num_parts, 1, 1)), k_BLSKH, v_BLSKH, layer, ranges, spec)
    out_BPRKH = out.reshape(batch, num_parts, num_rows, num_kv_heads, -1)
    lse_BKPR = lse.reshape(batch, num_kv_heads, num_parts, num_rows)
    return merge_parts(jnp.moveaxis(out_BPRKH, 1, 0)[:, :, :groups], jnp.moveaxis(lse_BKPR, 2, 0)[..., :groups])


def _in_blocks(kernel, q_BGKH, k_BLSKH, v_BLSKH, layer, num_keys_B, spec):
    (batch, groups, num_kv_heads, _), max_keys = q_BGKH.shape, k_BLSKH.shape[2]
    block = min(_BLOCK_KEYS, max_keys)
    ends_BG = jnp.broadcast_to(num_keys_B[:, None], (batch, groups))

    def add_block(index, out_lse):
        first = jnp.minimum(index * block, max_keys - block)  # the last block may overlap with the one before it
        k, v = (
            lax.dynamic_slice(x, (0, layer, first, 0, 0), (batch, 1, block, *x.shape[3:]))[:, 0].astype(q_BGKH.dtype)
            for x in (k_BLSKH, v_BLSKH)
        )
        ranges = KeyRanges(jnp.full_like(ends_BG, index * block), ends_BG).within(first, block)
        out, lse = kernel.forward(q_BGKH, k, v, ranges, spec)
        return merge(*out_lse, out.astype(jnp.float32), lse)

    none = (
        jnp.zeros((*q_BGKH.shape[:3], v_BLSKH.shape[-1]), jnp.float32),
        jnp.full((batch, num_kv_heads, groups), -jnp.inf),
    )
    return lax.fori_loop(0, (num_keys_B.max() + block - 1) // block, add_block, none)
