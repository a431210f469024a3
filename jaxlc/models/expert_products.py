"""Products of tokens with the weights of their experts, on one rank, for any routing.

Each of T tokens has k assignments. The assignments are sorted by expert, and those of each expert
are padded to whole blocks of m rows; a block is multiplied by the weights of one expert. At most (T
k + E (m - 1)) / m blocks are needed, whatever the routing: shapes are static, and nothing is
recompiled. The idea of MegaBlocks (Gale et al. 2022, arXiv:2211.15841) with batched products
instead of sparse ones.

    assignment  (token, number of the choice)            [T, k]
    slot        a row of a block; padding has no token   [n m]

Gradients are gathers, as the forward pass, so they do not depend on the order in which a GPU adds.
Only the sum over the blocks of an expert in its weight gradient is a scatter, in float32.

The kernels of config.runtime.expert_kernel copy no weights for a block, and sum the gradient of the
weights of an expert over all of its rows in float32 before it is rounded once. A run compares them
with `block_product` first, in free memory that is filled with NaN, as cuDNN's calls for packed
documents (`attention.kernels.packed_check`).

    mosaic  JAX's kernels for Hopper: each group, all blocks of an expert, times its weights. The
            groups contain all rows, so no row of a result is left uninitialized.
    pallas  on Triton. A program of `expert_product` owns some columns of one block, and reads the
            weights of its expert. A program of `expert_gradient` owns a tile of the gradient of one
            expert, and adds its blocks one after another.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxlc import _jax_internals
from jaxlc.attention.kernels import pallas
from jaxlc.attention.kernels.packed_check import largest_error, measured_error
from jaxlc.config.kinds.experts import block_rows, num_blocks
from jaxlc.core import MESH_AXES, Unsupported, scopes
from jaxlc.models.matmuls import E4M3, E5M2, scaled_product, to_fp8

COMPUTE_CAPABILITY = "9.0"  # Hopper: the Mosaic kernels use its warpgroup instructions
_MAX_ELEMENTS = 2**31 - 1  # of an operand; assumed, since offsets may be int32
_PIPELINE = dict(max_concurrent_steps=4, grid_block_n=1)
_TRITON_PARAMS = dict(num_warps=8, num_stages=3)
# The largest tile: reads of a smaller one from the L2 cache would take longer than its products. Tiles
# are powers of 2 that divide a dimension, which is a multiple of 64 (`config.kinds.experts`).
_TRITON_TILE = 128, 256
_DEPTH = 64  # of one step of a loop over the dimension that is summed


def _mosaic(x_SK, w_EKN, expert_n, *, transposed: bool = False) -> jax.Array:
    """x_SK times w_EKN, or with `transposed` times w_ENK with its last two dimensions transposed."""
    return _jax_internals.mosaic_ragged_dot(
        x_SK,
        w_EKN,
        _group_sizes(x_SK, expert_n, len(w_EKN)),
        transpose_rhs=transposed,
        block_m=128,
        block_n=math.gcd(w_EKN.shape[1 if transposed else 2], 128),
        block_k=64,
        **_PIPELINE,
    )


def _mosaic_gradient(x_SK, dout_SN, expert_n, num_experts: int, dtype) -> jax.Array:
    return _jax_internals.mosaic_ragged_gradient(
        x_SK,
        dout_SN,
        _group_sizes(x_SK, expert_n, num_experts),
        block_m=math.gcd(x_SK.shape[1], 128),
        block_n=math.gcd(dout_SN.shape[1], 128),
        block_k=64,
        **_PIPELINE,
    ).astype(dtype)


def _pallas(x_SK, w_EKN, expert_n, *, transposed: bool = False) -> jax.Array:
    """As `_mosaic`."""
    num_rows, depth = x_SK.shape
    rows = num_rows // len(expert_n)
    width = w_EKN.shape[1 if transposed else 2]
    columns = math.gcd(width, _TRITON_TILE[1])
    return pallas.run_kernel(
        functools.partial(_product_kernel, transposed=transposed),
        (expert_n, x_SK, w_EKN),
        grid=(width // columns, len(expert_n)),
        in_specs=[
            pl.BlockSpec(expert_n.shape, lambda j, n: (0,)),
            pl.BlockSpec((rows, depth), lambda j, n: (n, 0)),
            pl.BlockSpec(w_EKN.shape, lambda j, n: (0, 0, 0)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda j, n: (n, j)),
        out_shape=jax.ShapeDtypeStruct((num_rows, width), x_SK.dtype),
        name="expert_product",
        **_TRITON_PARAMS,
    )


def _product_kernel(expert_ref, x_ref, w_ref, out_ref, *, transposed: bool):
    expert = expert_ref[pl.program_id(1)]
    rows, width = out_ref.shape
    columns = pl.ds(pl.program_id(0) * width, width)
    block = math.gcd(_DEPTH, x_ref.shape[1])

    def add(i, total):
        depth = pl.ds(i * block, block)
        w = w_ref[expert, columns, depth].T if transposed else w_ref[expert, depth, columns]
        return total + lax.dot(x_ref[:, depth], w, preferred_element_type=jnp.float32)

    total = jnp.zeros((rows, width), jnp.float32)
    total = lax.fori_loop(0, x_ref.shape[1] // block, add, total)
    out_ref[...] = total.astype(out_ref.dtype)


def _pallas_gradient(x_SK, dout_SN, expert_n, num_experts: int, dtype) -> jax.Array:
    num_rows = len(x_SK)
    dims = x_SK.shape[1], dout_SN.shape[1]
    tile = tuple(map(math.gcd, dims, _TRITON_TILE))
    first_block = jnp.searchsorted(expert_n, jnp.arange(num_experts + 1)).astype(jnp.int32)
    return pallas.run_kernel(
        functools.partial(_gradient_kernel, rows=num_rows // len(expert_n)),
        (first_block, x_SK, dout_SN),
        grid=(dims[1] // tile[1], dims[0] // tile[0], num_experts),
        in_specs=[
            pl.BlockSpec(first_block.shape, lambda j, i, e: (0,)),
            pl.BlockSpec((num_rows, tile[0]), lambda j, i, e: (0, i)),
            pl.BlockSpec((num_rows, tile[1]), lambda j, i, e: (0, j)),
        ],
        out_specs=pl.BlockSpec((None, *tile), lambda j, i, e: (e, i, j)),
        out_shape=jax.ShapeDtypeStruct((num_experts, *dims), dtype),
        name="expert_gradient",
        **_TRITON_PARAMS,
    )


def _gradient_kernel(first_ref, x_ref, dout_ref, dw_ref, *, rows: int):
    expert = pl.program_id(2)
    step = min(_DEPTH, rows)

    def add(i, total):
        tokens = pl.ds(i * step, step)
        product = lax.dot(
            x_ref[tokens, :].T, dout_ref[tokens, :], preferred_element_type=jnp.float32
        )
        return total + product

    first, last = (first_ref[expert + i] * (rows // step) for i in range(2))
    total = lax.fori_loop(first, last, add, jnp.zeros(dw_ref.shape, jnp.float32))
    dw_ref[...] = total.astype(dw_ref.dtype)


def _grouped(kernel: str, product: Callable, gradient: Callable) -> Callable:
    """As `block_product`, by the functions of a kernel, whose rows are in one dimension."""

    def run(x_nmK, w_EKN, expert_n, **options):
        *rows, depth = x_nmK.shape
        columns = max(w_EKN.shape[1:])
        if math.prod(rows) * columns > _MAX_ELEMENTS:
            raise Unsupported(
                f"config.runtime.expert_kernel={kernel!r} with {math.prod(rows):,} rows of {columns:,} elements"
                " (supported: fewer than 2^31 elements); use a smaller --config.memory.tile_tokens, or"
                " --config.runtime.expert_kernel=blocks"
            )
        out = product(x_nmK.reshape(-1, depth), w_EKN.astype(x_nmK.dtype), expert_n, **options)
        return out.reshape(*rows, -1)

    @jax.custom_vjp
    def multiply(x_nmD, w_EDF, expert_n):
        return run(x_nmD, w_EDF, expert_n)

    def backward(residuals, dout_nmF):
        x_nmD, w_EDF, expert_n = residuals
        dx_nmD = run(dout_nmF, w_EDF, expert_n, transposed=True)
        x_SD, dout_SF = (x.reshape(-1, x.shape[-1]) for x in (x_nmD, dout_nmF))
        return dx_nmD, gradient(x_SD, dout_SF, expert_n, len(w_EDF), w_EDF.dtype), None

    multiply.defvjp(lambda *operands: (multiply(*operands), operands), backward)
    return multiply


def check_devices(devices: Iterable[jax.Device]) -> None:
    """Raises Unsupported if a device is not a Hopper GPU, which the Mosaic kernels need."""
    for device in devices:
        capability = getattr(device, "compute_capability", None)  # a string; CPUs have none
        if str(capability) != COMPUTE_CAPABILITY:
            found = f"has {capability}" if capability else "is no GPU"
            raise Unsupported(
                f"config.runtime.expert_kernel='mosaic' needs GPUs of compute capability {COMPUTE_CAPABILITY}, and"
                f" {device.device_kind} {found}; use --config.runtime.expert_kernel=blocks"
            )


def _group_sizes(x_SK: jax.Array, expert_n: jax.Array, num_experts: int) -> jax.Array:
    """The rows of each expert, padding included: int32 [E]."""
    rows = len(x_SK) // len(expert_n)
    return rows * jnp.bincount(expert_n, length=num_experts).astype(jnp.int32)


_BLOCKS = (0,), (0,)  # the batch dimensions of products of blocks


class Assignments(NamedTuple):
    """Where the rows of each token are."""

    slot_Tk: jax.Array  # int32: the slot of each assignment
    token_S: jax.Array  # int32 [slots]: the token of each slot; T, out of range, for padding
    expert_n: jax.Array  # int32 [blocks]: the expert of each block, ascending

    @property
    def block_rows(self) -> int:
        return len(self.token_S) // len(self.expert_n)


def assign(chosen_Tk: jax.Array, num_experts: int, kernel: str = "blocks") -> Assignments:
    """Sorts the assignments by expert.

    Args:
      chosen_Tk: int32, the experts of each token.
      kernel: config.runtime.expert_kernel, which determines the size of blocks.
    """
    num_tokens, num_chosen = chosen_Tk.shape
    num_rows = num_tokens * num_chosen
    rows, blocks = (size(num_rows, num_experts, kernel) for size in (block_rows, num_blocks))
    flat = chosen_Tk.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    expert = flat[order]
    sizes_E = jnp.bincount(flat, length=num_experts)
    blocks_E = -(-sizes_E // rows)
    first_block_E = jnp.cumsum(blocks_E) - blocks_E
    first_row_E = jnp.cumsum(sizes_E) - sizes_E
    slot = first_block_E[expert] * rows + jnp.arange(num_rows) - first_row_E[expert]
    unique = dict(unique_indices=True, mode="promise_in_bounds")
    expert_n = jnp.searchsorted(jnp.cumsum(blocks_E), jnp.arange(blocks), side="right")
    return Assignments(
        slot_Tk=jnp.zeros(num_rows, jnp.int32)
        .at[order]
        .set(slot.astype(jnp.int32), **unique)
        .reshape(chosen_Tk.shape),
        token_S=jnp.full(blocks * rows, num_tokens, jnp.int32)
        .at[slot]
        .set((order // num_chosen).astype(jnp.int32), **unique),
        expert_n=jnp.minimum(expert_n, num_experts - 1).astype(jnp.int32),
    )


@jax.custom_vjp
def rows_of(x_TD: jax.Array, assignments: Assignments) -> jax.Array:
    """The tokens of all slots, [blocks, rows, D]; 0 in padding."""
    rows_SD = jnp.take(x_TD, assignments.token_S, axis=0, mode="fill", fill_value=0)
    return rows_SD.reshape(-1, assignments.block_rows, x_TD.shape[1])


def _rows_backward(assignments: Assignments, drows_nmD: jax.Array):
    weights_Tk = jnp.ones(assignments.slot_Tk.shape, jnp.float32)
    return combined(drows_nmD, weights_Tk, assignments), None


rows_of.defvjp(lambda x_TD, assignments: (rows_of(x_TD, assignments), assignments), _rows_backward)


@jax.custom_vjp
def combined(y_nmD: jax.Array, weights_Tk: jax.Array, assignments: Assignments) -> jax.Array:
    """out_TD in the dtype of y: the weighted sum over the assignments of each token, computed in
    float32.
    """
    parts = [
        w_T[:, None] * y_TD.astype(jnp.float32)
        for w_T, y_TD in _by_choice(y_nmD, weights_Tk, assignments)
    ]
    return functools.reduce(jnp.add, parts).astype(y_nmD.dtype)


def _by_choice(y_nmD, weights_Tk, assignments: Assignments):
    """(weight, y) of the tokens, for each number of the choice: no array [T, k, D] is needed."""
    y_SD = y_nmD.reshape(-1, y_nmD.shape[-1])
    for number in range(weights_Tk.shape[1]):
        yield (
            weights_Tk[:, number],
            jnp.take(y_SD, assignments.slot_Tk[:, number], axis=0, mode="clip"),
        )


def _combined_backward(residuals, dout_TD: jax.Array):
    y_nmD, weights_Tk, assignments = residuals
    weight_S = jnp.zeros(len(assignments.token_S), jnp.float32)
    weight_S = weight_S.at[assignments.slot_Tk.reshape(-1)].set(
        weights_Tk.reshape(-1), unique_indices=True
    )
    dy_nmD = rows_of(dout_TD, assignments).astype(jnp.float32) * weight_S.reshape(
        *y_nmD.shape[:2], 1
    )
    dweights = [
        (dout_TD.astype(jnp.float32) * y_TD.astype(jnp.float32)).sum(1)
        for _, y_TD in _by_choice(y_nmD, weights_Tk, assignments)
    ]
    return dy_nmD.astype(y_nmD.dtype), jnp.stack(dweights, 1).astype(weights_Tk.dtype), None


combined.defvjp(lambda *operands: (combined(*operands), operands), _combined_backward)


@jax.custom_vjp
def block_product(x_nmD: jax.Array, w_EDF: jax.Array, expert_n: jax.Array) -> jax.Array:
    """Each block times the weights of its expert, [n, m, F] in the dtype of x. The gradient of w is
    summed in float32."""
    return jnp.einsum("nmD,nDF->nmF", x_nmD, w_EDF.astype(x_nmD.dtype)[expert_n])


def _block_product_backward(residuals, dout_nmF):
    x_nmD, w_EDF, expert_n = residuals
    dx_nmD = jnp.einsum("nmF,nDF->nmD", dout_nmF, w_EDF.astype(x_nmD.dtype)[expert_n])
    dw_nDF = jnp.einsum("nmD,nmF->nDF", x_nmD, dout_nmF, preferred_element_type=jnp.float32)
    return dx_nmD, _sum_of_blocks(dw_nDF, expert_n, len(w_EDF)).astype(w_EDF.dtype), None


block_product.defvjp(
    lambda *operands: (block_product(*operands), operands), _block_product_backward
)


@jax.custom_vjp
def fp8_block_product(x_nmD: jax.Array, w_EDF: jax.Array, expert_n: jax.Array) -> jax.Array:
    """`block_product` in FP8 with current scaling (`models.matmuls`), within `shard_map` over the
    axes of a mesh. The scale of each of x, w and the gradient of the result is that of all ranks;
    padding is 0 and does not change it."""
    return _fp8_forward(x_nmD, w_EDF, expert_n)[0]


def _fp8_forward(x_nmD, w_EDF, expert_n):
    x_8, x_scale, _ = to_fp8(x_nmD, E4M3, axes=MESH_AXES)
    w_8, w_scale, _ = to_fp8(w_EDF, E4M3, axes=MESH_AXES)
    out_nmF = scaled_product(
        x_8, w_8[expert_n], ((2,), (1,)), x_scale * w_scale, x_nmD.dtype, _BLOCKS
    )
    return out_nmF, (x_8, w_8, x_scale, w_scale, expert_n, jnp.zeros((), w_EDF.dtype))


def _fp8_backward(residuals, dout_nmF):
    x_8, w_8, x_scale, w_scale, expert_n, w_like = residuals
    dout_8, dout_scale, _ = to_fp8(dout_nmF, E5M2, axes=MESH_AXES)
    dx_nmD = scaled_product(
        dout_8, w_8[expert_n], ((2,), (2,)), dout_scale * w_scale, dout_nmF.dtype, _BLOCKS
    )
    dw_nDF = scaled_product(x_8, dout_8, ((1,), (1,)), x_scale * dout_scale, jnp.float32, _BLOCKS)
    return dx_nmD, _sum_of_blocks(dw_nDF, expert_n, len(w_8)).astype(w_like.dtype), None


fp8_block_product.defvjp(_fp8_forward, _fp8_backward)


@jax.custom_vjp
def plus_bias(x_nmF: jax.Array, bias_EF: jax.Array, expert_n: jax.Array) -> jax.Array:
    """Each block plus the bias of its expert, float32. Padding gets it too, which `combined` does
    not read.
    """
    return x_nmF.astype(jnp.float32) + bias_EF[expert_n][:, None]


def _bias_backward(residuals, dout_nmF):
    x_like, num_experts, expert_n = residuals
    dbias_EF = _sum_of_blocks(dout_nmF.sum(1), expert_n, num_experts.shape[0])
    return dout_nmF.astype(x_like.dtype), dbias_EF, None


plus_bias.defvjp(
    lambda x_nmF, bias_EF, expert_n: (
        plus_bias(x_nmF, bias_EF, expert_n),
        (jnp.zeros((), x_nmF.dtype), jnp.zeros((len(bias_EF), 0)), expert_n),
    ),
    _bias_backward,
)


def _sum_of_blocks(x_n: jax.Array, expert_n: jax.Array, num_experts: int) -> jax.Array:
    """The sums of x over the blocks of each expert, [E, ..., F].

    The scatter has rows of F entries: XLA's GPU compiler does not finish with matrices (measured on
    JAX 0.10.1).
    """
    *dims, F = x_n.shape[1:]
    num_rows = math.prod(dims)
    row_n = (expert_n[:, None] * num_rows + jnp.arange(num_rows)).reshape(-1)
    sums = jax.ops.segment_sum(
        x_n.reshape(-1, F), row_n, num_experts * num_rows, mode="promise_in_bounds"
    )
    return sums.reshape(num_experts, *dims, F)


PRODUCTS = dict(  # by config.runtime.expert_kernel
    blocks=block_product,
    mosaic=_grouped("mosaic", _mosaic, _mosaic_gradient),
    pallas=_grouped("pallas", _pallas, _pallas_gradient),
)


class LowRank(NamedTuple):
    """The adapters of a projection of all experts (`models.lora`), in use by a layer."""

    a_EDR: jax.Array
    b_ERF: jax.Array


class ExpertWeights(NamedTuple):
    """The weights of all experts, in use by a layer; F may be a part of the width."""

    gate_EDF: jax.Array | None  # None: the experts have no gate
    up_EDF: jax.Array
    down_EFD: jax.Array
    gate_bias_EF: jax.Array | None = None  # float32; None: the experts have no biases
    up_bias_EF: jax.Array | None = None
    down_bias_ED: jax.Array | None = None
    gate_adapter: LowRank | None = None  # None: the projection has no adapters
    up_adapter: LowRank | None = None
    down_adapter: LowRank | None = None


def expert_outputs(
    x_TD: jax.Array,
    chosen_Tk: jax.Array,
    weights_Tk: jax.Array,
    experts: ExpertWeights,
    activation: Callable[[jax.Array | None, jax.Array], jax.Array],
    adapter_scale: float = 1.0,
    fp8_names: Collection[str] = (),
    kernel: str = "blocks",
) -> jax.Array:
    """out_TD in the dtype of x: the sum of the outputs of the chosen experts, times their weights.

    Args:
      weights_Tk: float32.
      activation: of the products with gate and up.
      adapter_scale: factor of the outputs of adapters.
      fp8_names: the products in FP8, of `EXPERT_PROJECTIONS`.
      kernel: config.runtime.expert_kernel, of the other products.
    """
    assignments = assign(chosen_Tk, len(experts.up_EDF), kernel)
    expert_n = assignments.expert_n
    rows_nmD = rows_of(x_TD, assignments)

    def product(name, x, w, bias, adapter):
        out = (fp8_block_product if name in fp8_names else PRODUCTS[kernel])(x, w, expert_n)
        out = lax.optimization_barrier(out)  # for one kernel of the activation, as in `matmuls`
        if adapter is not None:
            out += _adapter_output(x, adapter, expert_n, adapter_scale)
        return out if bias is None else plus_bias(out, bias, expert_n).astype(x.dtype)

    gate_nmF = None
    if experts.gate_EDF is not None:
        gate_nmF = product(
            "expert_gate", rows_nmD, experts.gate_EDF, experts.gate_bias_EF, experts.gate_adapter
        )
    up_nmF = product("expert_up", rows_nmD, experts.up_EDF, experts.up_bias_EF, experts.up_adapter)
    hidden_nmF = activation(gate_nmF, up_nmF)
    down_nmD = product(
        "expert_down", hidden_nmF, experts.down_EFD, experts.down_bias_ED, experts.down_adapter
    )
    return combined(down_nmD, weights_Tk, assignments)


@jax.named_scope(scopes.LORA)
def _adapter_output(
    x_nmD: jax.Array, adapter: LowRank, expert_n: jax.Array, scale: float
) -> jax.Array:
    """scale (x a) b of each block with the adapter of its expert, in the dtype of x; no product a b
    is computed.
    """
    x_nmR = block_product(x_nmD, adapter.a_EDR, expert_n)
    x_nmR = (scale * x_nmR.astype(jnp.float32)).astype(x_nmD.dtype)
    return block_product(x_nmR, adapter.b_ERF, expert_n)


_BLOCK_ROWS = 64  # half a tile of the kernels: tiles have rows of several experts
_ADVICE = "set --config.runtime.expert_kernel=blocks, and report the GPU and the version of JAX"


def check_product(
    kernel: str,
    device: jax.Device,
    *,
    num_experts: int,
    model_dim: int,
    ffn_dim: int,
    dtype=jnp.bfloat16,
) -> str:
    """Compares the products with up, or gate, and with down of some rows.

    Args:
      kernel: config.runtime.expert_kernel.
      ffn_dim: width of an expert on a rank.
    Returns:
      A line with the largest error.
    Raises:
      UserError: a kernel fails, or a result is wrong.
    """

    def error(inputs, actual):
        return largest_error(actual, _results(block_product, *inputs))

    def comparisons():
        for dims in ((model_dim, ffn_dim), (ffn_dim, model_dim)):
            inputs = _inputs(num_experts, *dims, dtype)
            yield (
                functools.partial(_results, PRODUCTS[kernel], *inputs),
                functools.partial(error, inputs),
            )

    messages = tuple(f"the {kernel} kernels of experts {x}" for x in ("fail", "are wrong"))
    measured = measured_error(comparisons(), device, messages, _ADVICE)
    return f"kernel     {kernel} for experts: {measured}"


def _inputs(num_experts: int, depth: int, width: int, dtype) -> tuple[jax.Array, ...]:
    """x, w, the expert of each block, and dout. Experts have 0, 1, 0, 2, 1, 0, 1, .. blocks, and
    the last one more.
    """
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
