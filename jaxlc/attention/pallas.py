"""Our own GPU kernel for every mask: positions, documents, windows (`jaxlc.kernels`, Pallas on Triton).

Tiles that nobody sees are skipped, forward and backward. On a CPU it runs in Pallas' interpreter, which is for tests.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxlc.attention.contract import AttentionProblem, AttentionSpec, Masks
from jaxlc.kernels.block_mask import Rule, Tokens
from jaxlc.kernels.flash_backward import Rows, flash_dkv, flash_dq
from jaxlc.kernels.flash_forward import flash_forward
from jaxlc.kernels.triton_blocks import LOG2_E, KernelParams

_DTYPES = ("bfloat16", "float16", "float32")
_MAX_HEAD_DIM = 128  # a tile of more fills the registers
_SMALLEST_TILE = 16  # of a matrix product

# For an H100, from what its compiler says of registers and shared memory (docs/log.md); not yet timed on one.
_FORWARD = dict(query_tokens=128, key_tokens=128, num_warps=8, num_stages=2)
_DQ = dict(query_tokens=128, key_tokens=128, num_warps=8, num_stages=2)
_DKV = dict(query_tokens=64, key_tokens=128, num_warps=8, num_stages=2)
# Operands of twice the size, multiplied without tensor cores.
_FLOAT32 = dict(query_tokens=32, key_tokens=32, num_warps=4, num_stages=1)


def unsupported(case: AttentionProblem) -> str | None:
    """See `contract.Kernel.unsupported`."""
    if case.platform not in ("gpu", "cpu"):
        return f"platform {case.platform}, and it does gpu (and cpu, for tests)"
    if case.platform == "gpu":
        major = (case.compute_capability or "").partition(".")[0]
        if not major.isdigit() or int(major) < 8:
            return f"it needs compute capability 8.0, and this GPU has {case.compute_capability}"
    if case.dtype not in _DTYPES:
        return f"dtype {case.dtype}, and it does {', '.join(_DTYPES)}"
    for name, width in (("head dim", case.head_dim), ("head dim of values", case.value_dim)):
        if width > _MAX_HEAD_DIM:
            return f"{name} {width}, and it does up to {_MAX_HEAD_DIM}"
    return None


@functools.partial(jax.jit, static_argnames="spec")
def forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, masks: Masks, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """See `contract.Kernel.forward`."""
    operands = (q_BTNH, k_BSKH, v_BSKH, *_tokens(masks, spec))
    return _call(flash_forward, _FORWARD, spec, operands)


@functools.partial(jax.jit, static_argnames="spec")
def backward(q_BTNH, k_BSKH, v_BSKH, masks, spec, out_BTNH, lse_BNT, dout_BTNH, dlse_BNT):
    """See `contract.Kernel.backward`."""
    delta_BTN = jnp.einsum("BTNH,BTNH->BTN", *(x.astype(jnp.float32) for x in (out_BTNH, dout_BTNH)))
    rows = Rows(
        dout_BTNH.astype(v_BSKH.dtype),
        jnp.where(jnp.isneginf(lse_BNT), 0.0, LOG2_E * lse_BNT),
        delta_BTN.swapaxes(1, 2) - dlse_BNT,
    )
    operands = (q_BTNH, k_BSKH, v_BSKH, *_tokens(masks, spec), rows)
    return _call(flash_dq, _DQ, spec, operands), *_call(flash_dkv, _DKV, spec, operands)


def _tokens(masks: Masks, spec: AttentionSpec) -> tuple[Tokens, Tokens]:
    q_positions_BT, k_positions_BS = masks.q_positions_BT, masks.k_positions_BS
    if not spec.causal:
        q_positions_BT, k_positions_BS = None, None
    return Tokens(q_positions_BT, masks.q_segments_BT), Tokens(k_positions_BS, masks.k_segments_BS)


def _call(kernel: Callable, tuned: dict[str, int], spec: AttentionSpec, operands: tuple):
    """Runs `kernel` compiled, or interpreted where the platform is a CPU: which one is known when it is lowered."""
    q_BTNH, k_BSKH = operands[:2]
    tuned = _FLOAT32 if q_BTNH.dtype == jnp.float32 else tuned
    rule = Rule(
        causal=spec.causal,
        window=spec.window,
        num_queries=q_BTNH.shape[1],
        num_keys=k_BSKH.shape[1],
        tile_T=_tile(spec.query_block_tokens, tuned["query_tokens"]),
        tile_S=_tile(spec.key_block_tokens, tuned["key_tokens"]),
    )

    def run(interpret: bool):
        launch = KernelParams(num_warps=tuned["num_warps"], num_stages=tuned["num_stages"], interpret=interpret)
        scale = spec.scale_for(q_BTNH.shape[-1])
        return lambda *operands: kernel(*operands, rule=rule, scale=scale, launch=launch)

    return lax.platform_dependent(*operands, cpu=run(interpret=True), default=run(interpret=False))


def _tile(asked: int, tuned: int) -> int:
    """The tuned size; less, but a power of 2, where the spec asks for less."""
    return max(_SMALLEST_TILE, min(tuned, 1 << (asked.bit_length() - 1)))
