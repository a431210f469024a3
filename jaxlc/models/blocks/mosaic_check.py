"""A check of the Mosaic products of experts on the GPU that is about to train; see `mosaic_product`.

As cuDNN's calls for packed documents (`attention.kernels.packed_check`), they are compared with the reference in free
memory that is filled with NaN: the result and both gradients, with the number of experts and the sizes of the model.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxlc.attention.kernels.packed_check import check_error, results_among_nan
from jaxlc.models.blocks.expert_blocks import block_product
from jaxlc.models.blocks.mosaic_product import mosaic_product

_BLOCK_ROWS = 64  # half a tile of the kernels: tiles have rows of several experts
_ADVICE = "set --config.runtime.expert_kernel=blocks, and report the GPU and the version of JAX"


def check_mosaic_product(
    device: jax.Device, *, num_experts: int, model_dim: int, ffn_dim: int, dtype=jnp.bfloat16
) -> str:
    """Compares the products with up, or gate, and with down of some rows.

    Args:
      ffn_dim: width of an expert on a rank.
    Returns:
      A line with the largest error.
    Raises:
      UserError: a kernel fails, or a result is wrong.
    """
    largest = 0.0
    with jax.default_device(device):
        for dims in ((model_dim, ffn_dim), (ffn_dim, model_dim)):
            inputs = _inputs(num_experts, *dims, dtype)
            call = functools.partial(_results, mosaic_product, *inputs)
            results = results_among_nan(call, device, "the Mosaic kernels of experts fail", _ADVICE)
            errors = jax.device_get(jax.tree.map(_relative_error, results, _results(block_product, *inputs)))
            largest = max(largest, *(float(error) if np.isfinite(error) else np.inf for error in errors))
    check_error(largest, device, "the Mosaic kernels of experts are wrong", _ADVICE)
    return f"kernel     mosaic for experts: relative error {largest:.1e} on {device.device_kind}, measured now"


def _inputs(num_experts: int, depth: int, width: int, dtype) -> tuple[jax.Array, ...]:
    """x, w, the expert of each block, and dout. Experts have 0, 1, 0, 2, 1, 0, 1, .. blocks, and the last one more."""
    blocks_E = np.arange(num_experts) * 3 % 5 // 2
    blocks_E[-1] += 1
    expert_n = jnp.asarray(np.repeat(np.arange(num_experts), blocks_E), jnp.int32)
    rows = len(expert_n), _BLOCK_ROWS
    shapes = (*rows, depth), (num_experts, depth, width), (*rows, width)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    x, w, dout = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes))
    return x, w, expert_n, dout


def _results(product: Callable, x, w, expert_n, dout) -> tuple[jax.Array, ...]:
    """(out, dx, dw)"""

    def results(x, w, expert_n, dout):
        out, vjp = jax.vjp(lambda x, w: product(x, w, expert_n), x, w)
        return out, *vjp(dout)

    return jax.jit(results)(x, w, expert_n, dout)


@jax.jit
def _relative_error(actual: jax.Array, expected: jax.Array) -> jax.Array:
    actual, expected = (x.astype(jnp.float32) for x in (actual, expected))
    return jnp.linalg.norm((actual - expected).reshape(-1)) / jnp.linalg.norm(expected.reshape(-1))
