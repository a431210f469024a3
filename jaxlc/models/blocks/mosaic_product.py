"""Products of blocks of rows with their experts by JAX's Mosaic kernels for Hopper (config.runtime.expert_kernel).

The kernels multiply the rows of each group by the weights of that group; a group is all blocks of an expert. They copy
no weights for a block, and sum the gradient of the weights of an expert over all of its rows in float32 before it is
rounded once. The groups contain all rows, so no row of a result is left uninitialized.

No GPU has measured these kernels: a run compares them with `expert_blocks.block_product` first (`mosaic_check`).
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jaxlc import _jax_internals
from jaxlc.core.errors import Unsupported

COMPUTE_CAPABILITY = "9.0"  # Hopper: the kernels use its warpgroup instructions
_MAX_ELEMENTS = 2**31 - 1  # of an operand; assumed, since offsets may be int32
_PIPELINE = dict(max_concurrent_steps=4, grid_block_n=1)


@jax.custom_vjp
def mosaic_product(x_nmD: jax.Array, w_EDF: jax.Array, expert_n: jax.Array) -> jax.Array:
    """As `expert_blocks.block_product`, of bfloat16 rows. The gradient of w is rounded to bfloat16.

    Raises:
      Unsupported: an operand has too many elements.
    """
    return _product(x_nmD, w_EDF, expert_n)


def _product(x_nmK, w_EKN, expert_n, *, transposed: bool = False) -> jax.Array:
    """x_nmK times w_EKN, or with `transposed` times w_ENK with its last two dimensions transposed."""
    num_blocks, rows, depth = x_nmK.shape
    width = w_EKN.shape[1 if transposed else 2]
    _check_size(num_blocks * rows, max(depth, width))
    out_SN = _jax_internals.mosaic_ragged_dot(
        x_nmK.reshape(-1, depth),
        w_EKN.astype(x_nmK.dtype),
        _group_sizes(expert_n, len(w_EKN), rows),
        transpose_rhs=transposed,
        block_m=128,
        block_n=_tile(width),
        block_k=64,
        **_PIPELINE,
    )
    return out_SN.reshape(num_blocks, rows, width)


def _forward(x_nmD, w_EDF, expert_n):
    return mosaic_product(x_nmD, w_EDF, expert_n), (x_nmD, w_EDF, expert_n)


def _backward(residuals, dout_nmF):
    x_nmD, w_EDF, expert_n = residuals
    num_experts, D, F = w_EDF.shape
    dx_nmD = _product(dout_nmF, w_EDF, expert_n, transposed=True)
    dw_EDF = _jax_internals.mosaic_ragged_gradient(
        x_nmD.reshape(-1, D),
        dout_nmF.reshape(-1, F),
        _group_sizes(expert_n, num_experts, x_nmD.shape[1]),
        block_m=_tile(D),
        block_n=_tile(F),
        block_k=64,
        **_PIPELINE,
    )
    return dx_nmD, dw_EDF.astype(w_EDF.dtype), None


mosaic_product.defvjp(_forward, _backward)


def check_devices(devices: Iterable[jax.Device]) -> None:
    """Raises Unsupported if a device is not a Hopper GPU."""
    for device in devices:
        capability = getattr(device, "compute_capability", None)  # a string; CPUs have none
        if str(capability) != COMPUTE_CAPABILITY:
            found = f"{device.device_kind} has {capability}" if capability else f"{device.device_kind} is no GPU"
            raise Unsupported(
                f"config.runtime.expert_kernel='mosaic' needs GPUs of compute capability {COMPUTE_CAPABILITY}, and"
                f" {found}; use --config.runtime.expert_kernel=blocks"
            )


def _group_sizes(expert_n: jax.Array, num_experts: int, block_rows: int) -> jax.Array:
    """The rows of each expert, padding included: int32 [E]."""
    return block_rows * jnp.bincount(expert_n, length=num_experts).astype(jnp.int32)


def _tile(dim: int) -> int:
    """The size of tiles of a dimension, which is a multiple of 64 (`config.checks.expert_checks`)."""
    return 128 if dim % 128 == 0 else 64


def _check_size(num_rows: int, width: int) -> None:
    if num_rows * width > _MAX_ELEMENTS:
        raise Unsupported(
            f"config.runtime.expert_kernel='mosaic' with {num_rows:,} rows of {width:,} elements (supported: fewer than"
            " 2^31 elements); use a smaller --config.memory.tile_tokens, or --config.runtime.expert_kernel=blocks"
        )
