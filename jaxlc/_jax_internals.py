"""The only module that uses private JAX APIs.

Each function names the private API and the JAX versions on which it was checked;
tests/test_jax_internals.py has one canary test per function, which fails when a new JAX version
changes that API.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import dispatch, distributed, xla_bridge

# Operands of cuDNN's attention, and the arguments that only JAX 0.12 has.
_CUDNN_OPERANDS = (
    "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k",
    "page_table_v",
)  # fmt: skip
_NO_SCORE_MODIFIER = {"score_mod_args": (), "score_mod": None}
_NO_SCORE_MODIFIER_OF_PRIMITIVES = {"score_mod_name": None, "score_mod_jaxpr": None}


def backends_are_initialized() -> bool:
    """Whether JAX has initialized its backends, after which environment variables and XLA_FLAGS
    have no effect.

    Does not initialize them itself; every public function that would answer this does.
    Private: `jax._src.xla_bridge.backends_are_initialized`. Checked: JAX 0.10.1, 0.12.0.1.
    """
    return xla_bridge.backends_are_initialized()


def register_plugins() -> None:
    """Loads the installed plugins of GPUs, as the start of JAX's backends does first. Later calls
    have no effect.

    Private: `jax._src.xla_bridge._discover_and_register_pjrt_plugins`. Checked: JAX 0.10.1,
    0.12.0.1.
    """
    xla_bridge._discover_and_register_pjrt_plugins()


def coordination_client() -> Any:
    """The client of JAX's coordination service: its key-value store and barriers. None in a run of
    one process.

    Private: `jax._src.distributed.global_state`. Checked: JAX 0.10.1, 0.12.0.1.
    """
    return distributed.global_state.client


def kept_argument_indices(lowered: jax.stages.Lowered) -> list[int]:
    """The sorted indices of the flat arguments that the lowered program has; JAX drops the unused
    ones.

    Private: `Lowered._lowering.compile_args`. Checked: JAX 0.10.1, 0.12.0.1.
    """
    return sorted(lowered._lowering.compile_args["kept_var_idx"])


def replace_argument_residuals(vjp: Callable, residuals: Sequence[Any]) -> None:
    """Replaces the residuals of `vjp` that are primal arguments after the first, in place.

    `jax.vjp` stores a primal argument that the backward pass reads apart from the other residuals,
    recognized by the identity of the array. Replacing an argument with None keeps it out of the
    pytree `vjp`, and so out of what `lax.scan` stacks; it must be set again before `vjp` is called.

    Args:
      vjp: the function that `jax.vjp` returns.
      residuals: one per argument after the first, each None or of the structure of that argument.

    Private: `VJP.args_res`. Checked: JAX 0.10.1, 0.12.0.1.
    """
    assert len(residuals) == len(vjp.args_res) - 1
    vjp.args_res[1:] = residuals


def cudnn_version() -> tuple[int, ...]:
    """The version of the cuDNN library that JAX's GPU plugin loads, such as (9, 18, 1); () if it
    finds none.

    Private: `jax._src.lib.cuda_versions`. Checked: JAX 0.10.1, 0.12.0.1.
    """
    from jax._src.lib import cuda_versions

    if cuda_versions is None:  # the plugin is not installed
        return ()
    try:
        code = cuda_versions.cudnn_get_version()
    except RuntimeError:  # "cuDNN not found."
        return ()
    return code // 10_000, code // 100 % 100, code % 100


def cudnn_attention_forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """One call of cuDNN's fused attention: (out_BTNH in q's dtype, lse_BNT float32).

    The public `jax.nn.dot_product_attention` rounds the lse and discards its gradient, so it cannot be used for blocks
    that are merged later.

    Args:
      window: a query attends to itself and the window - 1 tokens before it. None: all earlier tokens.

    Private: `jax._src.cudnn.fused_attention_stablehlo`. Checked: JAX 0.10.1, 0.12.0.1.
    """
    operands = (q_BTNH, k_BSKH, v_BSKH, *_unused_cudnn_operands(q_BTNH))
    settings = _cudnn_settings(scale, causal, window)
    return _call_cudnn("fwd", *operands, **settings, is_training=True)


def cudnn_attention_backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    out_BTNH: jax.Array,
    lse_BNT: jax.Array,
    dout_BTNH: jax.Array,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One call of cuDNN's backward: (dq, dk, dv) in q's dtype, without the gradient of the lse.

    Args:
      out_BTNH, dout_BTNH: in q's dtype. out and lse may be over more keys than k.

    Private: as `cudnn_attention_forward`. Checked: JAX 0.10.1, 0.12.0.1.
    """
    operands = (q_BTNH, k_BSKH, v_BSKH, *_unused_cudnn_operands(q_BTNH))
    settings = _cudnn_settings(scale, causal, window)
    return _call_cudnn("bwd", *operands, lse_BNT, out_BTNH, dout_BTNH, **settings)


def cudnn_packed_forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    packed: tuple[jax.Array, ...],
    *,
    scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """One call of cuDNN's fused attention over B x M documents: (out_BTNH in q's dtype, lse [B x M, N, T] float32).

    Document i has the first T rows at most from element q_offsets[i] of q on, and the first S rows at most from element
    kv_offsets[i] of k and v on. Rows of out and lse that belong to no document are undefined. The primitives are called
    directly: JAX's wrapper computes offsets itself, for grouped queries wrongly in 0.10.1, and in int32.

    Args:
      packed: q_lengths_BM and kv_lengths_BM, int32 [B, M], M > 1: number of queries and of keys of each document, at
        most T and S; q_offsets and kv_offsets, int32 [B, M + 1], in elements. cuDNN reads the first B x M + 1 of them,
        in row-major order.
      causal: query j of a document attends to its first j + 1 keys. False: to all of its keys.

    Private: as `cudnn_attention_forward`. Checked: JAX 0.10.1, 0.12.0.1.
    """
    fmha = _cudnn_fused_attention()
    operands = _packed_cudnn_operands(q_BTNH, k_BSKH, v_BSKH, packed)
    settings = _packed_cudnn_settings(scale, causal)
    return tuple(fmha._dot_product_attention_fwd_p.bind(*operands, **settings, is_training=True))


def cudnn_packed_backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    packed: tuple[jax.Array, ...],
    out_BTNH: jax.Array,
    lse: jax.Array,
    dout_BTNH: jax.Array,
    *,
    scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One call of cuDNN's backward over B x M documents: (dq, dk, dv) in q's dtype, without the gradient of the lse.

    Args:
      lse: [B x M, N, T] float32, of each document. The other arguments and undefined rows as in `cudnn_packed_forward`.

    Private: as `cudnn_attention_forward`. Checked: JAX 0.10.1, 0.12.0.1.
    """
    fmha = _cudnn_fused_attention()
    operands = _packed_cudnn_operands(q_BTNH, k_BSKH, v_BSKH, packed)
    settings = _packed_cudnn_settings(scale, causal)
    return tuple(
        fmha._dot_product_attention_bwd_p.bind(*operands, lse, out_BTNH, dout_BTNH, **settings)
    )


@functools.cache
def changed_cudnn_attention() -> str | None:
    """How the private API of cuDNN's attention differs from the one that is used here; None if it
    does not.

    Private: as `cudnn_attention_forward`. Checked: JAX 0.10.1, 0.12.0.1.
    """
    prefix = f"JAX {jax.__version__} has changed its private cuDNN attention"
    extra = {"fwd": {"is_training"}, "bwd": {"activation", "fwd_output", "grad_output"}}
    try:
        fmha = _cudnn_fused_attention()
        settings = {*_cudnn_settings(1.0, True, None), *_CUDNN_OPERANDS}
        # the parameters of a primitive are those of its abstract evaluation
        for kind in ("impl", "abstract"):
            for name, names in extra.items():
                function = getattr(fmha, f"_dot_product_attention_{name}_{kind}")
                parameters = inspect.signature(function).parameters.values()
                required = {
                    x.name for x in parameters if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
                }
                changed = (required - _NO_SCORE_MODIFIER.keys()) ^ (settings | names)
                if changed:
                    return f"{prefix}: {function.__name__} has other parameters ({', '.join(sorted(changed))})"
    except (ImportError, AttributeError) as error:
        return f"{prefix}: {error}"
    return None


def mosaic_ragged_dot(
    x_SK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array, **settings: Any
) -> jax.Array:
    """Each row of x times the matrix of its group, [S, N] in x's dtype: JAX's Mosaic kernel for
    Hopper.

    Args:
      sizes_E: int32, rows of each group; rows after the last group are undefined in the result.
      settings: `transpose_rhs` (w is [E, N, K]) and the tiles of the kernel.

    Experimental: `jax.experimental.pallas.ops.gpu`. Checked: JAX 0.10.1, 0.12.0.1.
    """
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    return ragged_dot_mgpu.ragged_dot(x_SK, w_EKN, group_sizes=sizes_E, **settings)


def mosaic_ragged_gradient(
    x_SK: jax.Array, dout_SN: jax.Array, sizes_E: jax.Array, **settings: Any
) -> jax.Array:
    """The product of x transposed and dout over the rows of each group, [E, K, N] in x's dtype; 0
    for an empty one.

    The kernel reads the number of multiprocessors of the default device, which fails if the GPU is
    absent, and which is only the size of its grid. Here its module sees that of an H100 and H200.

    Experimental: as `mosaic_ragged_dot`. Checked: JAX 0.10.1, 0.12.0.1.
    """
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    transposed_ragged_dot_mgpu.jax = _JaxOnHopper()  # pyrefly: ignore
    return transposed_ragged_dot_mgpu.transposed_ragged_dot(
        x_SK, dout_SN, group_sizes=sizes_E, **settings
    )


class _JaxOnHopper:
    """The module `jax`, with a default device of 132 multiprocessors."""

    core_count = 132

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def devices(self) -> list[_JaxOnHopper]:
        return [self]


def _cudnn_fused_attention():
    """The private module. Also lets programs with its primitives have more than one mesh.

    JAX allows one mesh only in a program with these primitives, because its own wrapper around them
    splits arrays. Here they are called without the wrapper, inside `shard_map`, where strategy
    hybrid has a mesh with a split context axis. Removing the primitives from the set a second time
    has no effect.

    Private: `jax._src.dispatch.prim_requires_devices_during_lowering`. Checked: JAX 0.10.1,
    0.12.0.1.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fmha

    dispatch.prim_requires_devices_during_lowering.difference_update(
        {fmha._dot_product_attention_fwd_p, fmha._dot_product_attention_bwd_p}
    )
    return fmha


def _cudnn_settings(scale: float, causal: bool, window: int | None) -> dict[str, Any]:
    fmha = _cudnn_fused_attention()
    return dict(
        scale=scale,
        mask_type=fmha.MaskType.CAUSAL if causal else fmha.MaskType.NO_MASK,
        sliding_window_length=window,
        layout=fmha.AttentionLayout.BTNH.value,
        dropout_rate=0.0,
        seed=0,
        variadic_args=(False, False),  # neither a bias nor its gradient
    )


def _packed_cudnn_operands(
    q_BTNH, k_BSKH, v_BSKH, packed: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """The operands of both primitives in their order: no bias before `packed`, no page tables after
    it.
    """
    unused = _unused_cudnn_operands(q_BTNH)[0]
    return (q_BTNH, k_BSKH, v_BSKH, unused, *packed, unused, unused)


def _packed_cudnn_settings(scale: float, causal: bool) -> dict[str, Any]:
    """The parameters of both primitives in this JAX version."""
    fmha = _cudnn_fused_attention()
    mask_type = fmha.MaskType.PADDING_CAUSAL if causal else fmha.MaskType.PADDING
    settings = {**_cudnn_settings(scale, causal, None), "mask_type": mask_type}
    if "score_mod" in inspect.signature(fmha._dot_product_attention_fwd_impl).parameters:
        settings |= _NO_SCORE_MODIFIER_OF_PRIMITIVES
    return settings


def _unused_cudnn_operands(q_BTNH: jax.Array) -> tuple[jax.Array, ...]:
    """Required operands that these calls do not read: bias, lengths, offsets and page tables of k
    and v.
    """
    return (jnp.zeros(0, q_BTNH.dtype),) * 7


def _call_cudnn(kind: str, *operands: jax.Array, **settings) -> tuple[jax.Array, ...]:
    """Calls the implementation of `kind`, "fwd" or "bwd", with the arguments of this JAX version:
    0.12 has score modifiers, 0.10 and 0.11 do not.
    """
    implementation = getattr(_cudnn_fused_attention(), f"_dot_product_attention_{kind}_impl")
    parameters = inspect.signature(implementation).parameters
    extra = {name: value for name, value in _NO_SCORE_MODIFIER.items() if name in parameters}
    return implementation(*operands, **settings, **extra)
