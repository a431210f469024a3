"""Calls of tokamax's attention kernels for Hopper and Blackwell (Pallas on Mosaic GPU; github.com/openxla/tokamax).

tokamax's public function selects a kernel by the default device, so it cannot compile for an absent GPU, and it has no
gradient of the lse. Hence this module calls the two kernel functions of each GPU generation, which are private. They
depend on no device as long as their grid is not persistent, that is, not one program per multiprocessor.

Mosaic GPU reads the GPU generation once per process (jaxlib 0.12.0.1): a process can compile for Hopper or for
Blackwell, not for both.
"""

import functools
import importlib
import inspect
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlc.core import extras, scopes

VERSION = "0.0.17"  # the version that was checked; the extra in pyproject.toml pins it
BLOCK_TOKENS = 128  # the block sizes of all kernels divide it
HEAD_DIM_MULTIPLE = 8
# GPU generation, as the major version of the compute capability -> its kernels. The kernels for Ampere have no
# backward. The backward for Blackwell with head dim 256 needs 270,436 bytes of shared memory of 232,448.
MAX_HEAD_DIM = {"9": 256, "10": 192}
_GENERATIONS = {"9": "sm90", "10": "sm100"}
_PACKAGE = "tokamax._src.ops.attention"
_FORWARD_PARAMETERS = {
    "q", "k", "v", "bias", "mask", "k_start", "k_end", "is_causal", "logits_soft_cap", "logits_scale", "out_dtype",
    "normalize_output", "return_residuals", "use_stable_softmax", "rescale_threshold", "config",
}  # fmt: skip
_BACKWARD_PARAMETERS = {
    "q", "k", "v", "residuals", "out", "dout", "bias", "mask", "k_start", "k_end", "logits_scale", "logits_soft_cap",
    "is_causal", "ds_dtype", "config",
}  # fmt: skip


class KernelMask(NamedTuple):
    """Which keys a query attends to: those of its range, and with `is_causal` no later ones than itself."""

    start_BT: jax.Array | None  # int32; with end_BT. A fully masked row has start >= end. None: all keys
    end_BT: jax.Array | None
    is_causal: bool  # by index: needs as many queries as keys


class Modules(NamedTuple):
    """tokamax's modules of one GPU generation."""

    forward: ModuleType
    backward: ModuleType


def forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: KernelMask, *, scale: float, generation: str
) -> tuple[jax.Array, jax.Array]:
    """Returns (out_BTNH, lse_BNT), float32. A fully masked row has out 0, lse -inf.

    Args:
      q_BTNH, k_BSKH, v_BSKH: bfloat16 or float16; T and S are multiples of BLOCK_TOKENS.
      generation: a key of MAX_HEAD_DIM.
    """
    module = modules(generation).forward
    config = module.Config(**_forward_config(generation, q_BTNH.shape[-1], v_BSKH.shape[-1]))

    def one_sequence(q_TNH, k_SKH, v_SKH, start_1T, end_1T):
        return module.flash_attention_kernel(
            q_TNH, k_SKH, v_SKH, None, None, start_1T, end_1T, is_causal=mask.is_causal, logits_soft_cap=None,
            logits_scale=scale, out_dtype=jnp.dtype(jnp.float32), normalize_output=True, return_residuals=True,
            use_stable_softmax=True, rescale_threshold=1.0, config=config,
        )  # fmt: skip

    with jax.named_scope(scopes.MOSAIC_FORWARD), _causal_scope(mask):
        out_BTNH, (max_BNT, total_BNT) = jax.vmap(one_sequence)(q_BTNH, k_BSKH, v_BSKH, *_ranges(mask))
    return out_BTNH, max_BNT + jnp.log(total_BNT)


def backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: KernelMask,
    out_BTNH: jax.Array,
    lse_BNT: jax.Array,
    dout_BTNH: jax.Array,
    *,
    scale: float,
    generation: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (dq, dk, dv) in q's dtype, without the gradient of the lse. The ranges of `mask` skip no blocks.

    Args:
      out_BTNH: any float dtype; the kernel reads it in out . dout only. out and lse may be over more keys than k.
      lse_BNT: finite.
      dout_BTNH: in q's dtype.
    """
    module = modules(generation).backward
    config = module.Config(**_backward_config(generation, q_BTNH.shape[-1], v_BSKH.shape[-1]))

    def one_sequence(q_TNH, k_SKH, v_SKH, start_1T, end_1T, out_TNH, lse_NT, dout_TNH):
        max_and_total = lse_NT, jnp.ones_like(lse_NT)  # p = exp(scores - max) / total
        return module.flash_attention_vjp_kernel(
            q_TNH, k_SKH, v_SKH, max_and_total, out_TNH, dout_TNH, None, None, start_1T, end_1T, logits_scale=scale,
            logits_soft_cap=None, is_causal=mask.is_causal, ds_dtype=None, config=config,
        )[:3]  # fmt: skip

    # tokamax computes out . dout in the dtype that both promote to.
    with jax.named_scope(scopes.MOSAIC_BACKWARD), _causal_scope(mask), jax.numpy_dtype_promotion("standard"):
        return jax.vmap(one_sequence)(q_BTNH, k_BSKH, v_BSKH, *_ranges(mask), out_BTNH, lse_BNT, dout_BTNH)


@functools.cache
def modules(generation: str) -> Modules:
    """tokamax's modules for a GPU generation.

    Raises:
      UserError: tokamax is not installed.
      NotImplementedError: this version of tokamax has other kernel functions.
    """
    extras.require("tokamax", "attention.kernel=mosaic")
    name = _GENERATIONS[generation]
    parts = [
        (f"pallas_mosaic_gpu_kernel_{name}", "flash_attention_kernel", _FORWARD_PARAMETERS),
        (f"pallas_mosaic_gpu_vjp_kernel_{name}", "flash_attention_vjp_kernel", _BACKWARD_PARAMETERS),
    ]
    loaded = []
    for module_name, function, expected in parts:
        changed = f"this version of tokamax has changed {function} (supported: tokamax {VERSION})"
        try:
            module = importlib.import_module(f"{_PACKAGE}.{module_name}")
            parameters = set(inspect.signature(getattr(module, function)).parameters)
        except (ImportError, AttributeError) as error:
            raise NotImplementedError(f"{changed}: {error}") from None
        if parameters != expected:
            raise NotImplementedError(f"{changed}: other parameters ({', '.join(sorted(parameters ^ expected))})")
        loaded.append(module)
    return Modules(*loaded)


def _causal_scope(mask: KernelMask) -> AbstractContextManager:
    """Marks a causal call for `jaxlc.hlo.attention_kernels`."""
    return jax.named_scope(scopes.MOSAIC_CAUSAL) if mask.is_causal else nullcontext()


def _ranges(mask: KernelMask) -> tuple[jax.Array | None, jax.Array | None]:
    """start and end as [B, 1, T], where 1 stands for the heads."""
    start_BT, end_BT = (None if x is None else x[:, None, :] for x in mask[:2])
    return start_BT, end_BT


def _forward_config(generation: str, head_dim: int, value_dim: int) -> dict[str, Any]:
    """tokamax's default for the head dims, from its estimates of shared memory, without a persistent grid."""
    if generation == "9":
        has_large_blocks = head_dim + value_dim <= 320
        return dict(block_q=64, block_kv=128 if has_large_blocks else 64, num_stages=2, persistent=False)
    num_stages = 2 if head_dim + value_dim <= 256 else 1
    return dict(block_q=128, block_kv=128, num_stages=num_stages, collective=False, persistent=False)


def _backward_config(generation: str, head_dim: int, value_dim: int) -> dict[str, Any]:
    """As `_forward_config`."""
    if generation == "9":
        num_stages = 2 if head_dim + value_dim <= 384 else 1
        return dict(block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64, num_stages=num_stages)
    block = 128 if max(head_dim, value_dim) <= 128 else 64
    return dict(block_q_dkv=block, block_kv_dkv=128, block_q_dq=128, block_kv_dq=block, num_stages=2, residual_stages=2)
