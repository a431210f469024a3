"""A GPU kernel for every mask: causal, windows, any key ranges (Pallas on Triton).

Forward and backward skip fully masked blocks. On a CPU the kernel runs in Pallas' interpreter, for tests only.

JAX 0.11 deprecates the Triton backend of Pallas. The kernels are imported where they are called, so that a program with
another kernel never imports it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import AttentionProblem, AttentionSpec, KeyRanges, QueryResults
from jaxlc.attention.kernels.block_mask import BlockMask, rectangle_block_ranges
from jaxlc.attention.kernels.tuning import MAX_HEAD_DIM, MIN_BLOCK_TOKENS, tuning_params

_DTYPES = ("bfloat16", "float16", "float32")


def unsupported(problem: AttentionProblem) -> str | None:
    """See `contract.Kernel.unsupported`."""
    if problem.platform not in ("gpu", "cpu"):
        return f"platform {problem.platform} (supported: gpu; cpu for tests)"
    if problem.platform == "gpu":
        major = (problem.compute_capability or "").partition(".")[0]
        if not major.isdigit() or int(major) < 8:
            return f"compute capability {problem.compute_capability} (supported: 8.0 and later)"
    if problem.dtype not in _DTYPES:
        return f"dtype {problem.dtype} (supported: {', '.join(_DTYPES)})"
    for name, width in (("head dim {}", problem.head_dim), ("head dim {} of values", problem.value_dim)):
        if width > MAX_HEAD_DIM:
            return f"{name.format(width)} (supported: up to {MAX_HEAD_DIM})"
    return None


@functools.partial(jax.jit, static_argnames="spec")
def forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, ranges: KeyRanges | None, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """See `contract.Kernel.forward`."""
    from jaxlc.attention.kernels.flash_forward import flash_forward

    return _call(flash_forward, spec, (q_BTNH, k_BSKH, v_BSKH, ranges))


@functools.partial(jax.jit, static_argnames="spec")
def forward_in_layer(
    q_BTNH: jax.Array, k_BLSKH: jax.Array, v_BLSKH: jax.Array, layer: jax.Array, ranges: KeyRanges, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """See `contract`."""
    from jaxlc.attention.kernels.flash_forward import flash_forward

    mask = _mask("flash_forward", q_BTNH, k_BLSKH, spec)
    blocks_per_range = q_BTNH.shape[1] // ranges.start_BT.shape[1] // mask.query_block
    ranges = KeyRanges(*(jnp.repeat(x, blocks_per_range, axis=1) for x in ranges))
    blocks = rectangle_block_ranges(*ranges, mask.kv_block)
    ranges = KeyRanges(*(jnp.repeat(x, mask.query_block, axis=1) for x in ranges))
    return _call(flash_forward, spec, (q_BTNH, k_BLSKH, v_BLSKH, ranges, layer[None], blocks))


@functools.partial(jax.jit, static_argnames="spec")
def backward(q_BTNH, k_BSKH, v_BSKH, ranges: KeyRanges | None, spec: AttentionSpec, results: QueryResults):
    """See `contract.Kernel.backward`."""
    from jaxlc.attention.kernels.flash_backward import QueryStats, flash_dkv, flash_dq
    from jaxlc.attention.kernels.triton_blocks import LOG2_E

    out_BTNH, lse_BNT, dout_BTNH, dlse_BNT = results
    delta_BTN = jnp.einsum("BTNH,BTNH->BTN", *(x.astype(jnp.float32) for x in (out_BTNH, dout_BTNH)))
    stats = QueryStats(
        dout_BTNH.astype(v_BSKH.dtype),
        jnp.where(jnp.isneginf(lse_BNT), 0.0, LOG2_E * lse_BNT),
        delta_BTN.swapaxes(1, 2) - dlse_BNT,
    )
    operands = (q_BTNH, k_BSKH, v_BSKH, ranges, stats)
    return _call(flash_dq, spec, operands), *_call(flash_dkv, spec, operands)


def _call(kernel: Callable, spec: AttentionSpec, operands: tuple):
    """Runs `kernel` compiled, or interpreted on a CPU; the lowering selects by its platform."""
    from jaxlc.attention.kernels.triton_blocks import KernelParams

    q_BTNH, k = operands[:2]
    tuning, mask = tuning_params(kernel.__name__, q_BTNH.dtype.name), _mask(kernel.__name__, q_BTNH, k, spec)

    def run(interpret: bool):
        scale = spec.scale_for(q_BTNH.shape[-1])
        return functools.partial(
            kernel, params=KernelParams(mask=mask, scale=scale, tuning=tuning, interpret=interpret)
        )

    return lax.platform_dependent(*operands, cpu=run(interpret=True), default=run(interpret=False))


def _mask(kernel: str, q_BTNH: jax.Array, k: jax.Array, spec: AttentionSpec) -> BlockMask:
    tuning = tuning_params(kernel, q_BTNH.dtype.name)
    return BlockMask(
        causal=spec.causal,
        window=spec.window,
        num_queries=q_BTNH.shape[1],
        num_keys=k.shape[-3],
        query_block=_block_tokens(spec.query_block_tokens, tuning.query_block_tokens),
        kv_block=_block_tokens(spec.key_block_tokens, tuning.kv_block_tokens),
    )


def _block_tokens(limit: int, tuned: int) -> int:
    """The tuned block size, or the largest power of 2 up to `limit` if that is smaller."""
    return max(MIN_BLOCK_TOKENS, min(tuned, 1 << (limit.bit_length() - 1)))
