"""cuDNN's fused attention: the fastest kernel on NVIDIA GPUs, for rows of one document.

Calls `jax._src.cudnn.fused_attention_stablehlo`, which is private: the public door (`jax.nn.dot_product_attention`)
rounds the lse and drops its gradient, and a ring needs a backward that takes the whole row's out and lse. All that
depends on JAX's version is in `_call`. Masks go by index, aligned at the first query and the first key ("top left":
cuDNN frontend, graph_properties.h, `set_causal_mask`), so a causal call needs as many keys as queries; then every row
sees a key, and none has lse -inf.

What is rounded: cuDNN returns out, dq, dk and dv in the dtype of q, and they become float32 here. In a ring each
partial result is thus rounded once, and all sums over hops are float32. Merge weights sum to 1, so the error of the
merged out is that of one rounding, however many hops there are; the error of dq, dk and dv stays 2^-9 (bfloat16) of
the sum of the shares' magnitudes. dq is summed in no fixed order: its last bits differ between runs.
"""

import inspect
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import dispatch
from jax._src.cudnn import fused_attention_stablehlo as fmha

from jaxlc.attention.contract import AttentionProblem, AttentionSpec, Masks
from jaxlc.core.errors import Unsupported

_DTYPES = ("bfloat16", "float16")
_MAX_HEAD_DIM = 128  # in the backward of every capability from 8.0; Hopper's 256 needs newer cuDNN versions
_HEAD_DIM_MULTIPLE = 8

# JAX allows one mesh only in a program with these primitives, for the sake of its own wrapper around them that splits
# arrays. They are called without it here, inside `shard_map`, and strategy hybrid has a mesh of its own there.
dispatch.prim_requires_devices_during_lowering.difference_update(
    {fmha._dot_product_attention_fwd_p, fmha._dot_product_attention_bwd_p}
)


def unsupported(case: AttentionProblem) -> str | None:
    """See `contract.Kernel.unsupported`; the limits are those of cuDNN 9.8, the oldest that JAX 0.10 takes."""
    if case.platform != "gpu":
        return f"it needs an NVIDIA GPU, and this is {case.platform}"
    major = (case.compute_capability or "").partition(".")[0]
    if not major.isdigit() or int(major) < 8:
        return f"it needs compute capability 8.0, and this GPU has {case.compute_capability}"
    if case.dtype not in _DTYPES:
        return f"dtype {case.dtype}, and it does {' and '.join(_DTYPES)}"
    if case.head_dim > _MAX_HEAD_DIM or case.head_dim % _HEAD_DIM_MULTIPLE:
        return f"head dim {case.head_dim}, and it does multiples of {_HEAD_DIM_MULTIPLE} up to {_MAX_HEAD_DIM}"
    if case.value_dim != case.head_dim:
        return f"values of head dim {case.value_dim} for queries of {case.head_dim}, and it does equal ones"
    if not case.implicit_positions:
        return "it masks by index, which is not enough for documents, windows in a ring or all_gather"
    return None


def forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, masks: Masks, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """See `contract.Kernel.forward`.

    Raises:
      Unsupported: masks that do not go by index, or a causal call with T != S.
    """
    settings = _settings(q_BTNH, k_BSKH, masks, spec)
    operands = (q_BTNH, k_BSKH, v_BSKH, *_unused(q_BTNH))
    out_BTNH, lse_BNT = _call(fmha._dot_product_attention_fwd_impl, *operands, **settings, is_training=True)
    return out_BTNH.astype(jnp.float32), lse_BNT


def backward(q_BTNH, k_BSKH, v_BSKH, masks, spec, out_BTNH, lse_BNT, dout_BTNH, dlse_BNT):
    """See `contract.Kernel.backward`; raises as `forward`.

    cuDNN knows no gradient of the lse: it computes ds = p (dout . v - dout . out). What dlse adds, p dlse, is what the
    same call gives where dout . v is dlse and out is 0: with dlse as the only nonzero feature of dout, and 1 as that of
    v. It is rounded to the dtype of q, like dout. Where the caller does not use the lse, XLA sees a dlse of zeros, and
    leaves that branch out of the program.
    """
    settings = _settings(q_BTNH, k_BSKH, masks, spec)

    def gradients(v_BSKH, out_BTNH, dout_BTNH):
        operands = (q_BTNH, k_BSKH, v_BSKH, *_unused(q_BTNH), lse_BNT)
        rows = (x.astype(q_BTNH.dtype) for x in (out_BTNH, dout_BTNH))
        results = _call(fmha._dot_product_attention_bwd_impl, *operands, *rows, **settings)
        return tuple(x.astype(jnp.float32) for x in results)

    dq_BTNH, dk_BSKH, dv_BSKH = gradients(v_BSKH, out_BTNH, dout_BTNH)

    def with_dlse(dq_BTNH, dk_BSKH):
        first_feature_H = jnp.arange(v_BSKH.shape[-1]) == 0
        ones_BSKH = jnp.broadcast_to(first_feature_H, v_BSKH.shape).astype(v_BSKH.dtype)
        dlse_BTNH = jnp.where(first_feature_H, dlse_BNT.swapaxes(1, 2)[..., None], 0.0)
        more_dq_BTNH, more_dk_BSKH, _ = gradients(ones_BSKH, jnp.zeros_like(out_BTNH), dlse_BTNH)
        return dq_BTNH + more_dq_BTNH, dk_BSKH + more_dk_BSKH

    # XLA knows that a product with zeros is zero. `any` of them it evaluates, at compile time: 1.8 s a call at 8192
    # tokens of 32 heads, and in proportion.
    has_dlse = jnp.vdot(dlse_BNT, dlse_BNT) != 0
    dq_BTNH, dk_BSKH = lax.cond(has_dlse, with_dlse, lambda *dqk: dqk, dq_BTNH, dk_BSKH)
    return dq_BTNH, dk_BSKH, dv_BSKH


def workspace_bytes(q_shape: tuple[int, ...], k_shape: tuple[int, ...], backward: bool) -> int:
    """What one call allocates beside operands and results, at most: a program compiled without a GPU has 0 there.

    The backward sums dq in float32 [B, N, T, H] and keeps dout . out, float32 [B, N, T] (cuDNN frontend 1.x,
    scaled_dot_product_flash_attention.h: `dQ_accum_size`, `softmax_sum_size`). With grouped queries dk and dv exist
    once for every query head, in a dtype of 2 bytes (`dK_fullhead`, `dV_fullhead`), unless the engine that cuDNN picks
    on the GPU sums them itself. The forward asks for nothing that grows with T.

    Args:
      q_shape, k_shape: [B, T, N, H] and [B, S, K, H], of one device.
    """
    if not backward:
        return 0
    batch, _, num_heads, head_dim = q_shape
    _, num_keys, num_kv_heads, _ = k_shape
    workspace = 4 * math.prod(q_shape) + 4 * math.prod(q_shape[:-1])
    if num_heads != num_kv_heads:
        workspace += 2 * 2 * batch * num_keys * num_heads * head_dim
    return workspace


def _settings(q_BTNH: jax.Array, k_BSKH: jax.Array, masks: Masks, spec: AttentionSpec) -> dict:
    """What is static about a call, by the names that JAX gives it."""
    if masks.q_segments_BT is not None or (spec.causal and masks.q_positions_BT is not None):
        raise Unsupported("attention kernel cudnn masks by index, and got positions or segment ids")
    num_queries, num_keys = q_BTNH.shape[1], k_BSKH.shape[1]
    if spec.causal and num_queries != num_keys:
        raise Unsupported(
            f"causal attention of {num_queries} queries over {num_keys} keys: kernel cudnn does equal numbers only"
        )
    return dict(
        scale=spec.scale_for(q_BTNH.shape[-1]),
        mask_type=fmha.MaskType.CAUSAL if spec.causal else fmha.MaskType.NO_MASK,
        # cuDNN's window counts as ours does: the query itself and the window - 1 tokens before it.
        sliding_window_length=spec.window,
        layout=fmha.AttentionLayout.BTNH.value,
        dropout_rate=0.0,
        seed=0,
        variadic_args=(False, False),  # neither a bias nor its gradient
    )


def _unused(q_BTNH: jax.Array) -> tuple[jax.Array, ...]:
    """Operands that must be there though the call reads none: bias, lengths, offsets and page tables of k and v."""
    return (jnp.zeros(0, q_BTNH.dtype),) * 7


def _call(implementation: Callable, *operands: jax.Array, **settings) -> tuple[jax.Array, ...]:
    """`implementation` as this version of JAX wants it: 0.12 knows score modifiers, 0.10 and 0.11 do not."""
    known = inspect.signature(implementation).parameters
    no_modifier = {"score_mod_args": (), "score_mod": None}
    return implementation(*operands, **settings, **{name: no_modifier[name] for name in no_modifier if name in known})
