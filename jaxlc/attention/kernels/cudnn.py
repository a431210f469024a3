"""cuDNN's fused attention: the fastest kernel on NVIDIA GPUs.

Without key ranges, cuDNN's masks are aligned at the first query and the first key ("top left":
cuDNN frontend, graph_properties.h, `set_causal_mask`), so a causal call needs as many keys as
queries. Then no query is fully masked, and no lse is -inf. With key ranges of packed documents,
`cudnn_packed` passes the place and length of each document.

Rounding: cuDNN returns out, dq, dk and dv in the dtype of q. So in a ring each partial result is
rounded once, and all sums over ring steps are float32. The weights of a merge sum to 1, so the
error of the merged out is that of one rounding, for any number of ring steps. The error of dq, dk
and dv is at most 2^-9 (bfloat16) of the sum of the magnitudes of the contributions; twice that if
the lse has a gradient. dq is summed in no fixed order, so its last bits differ between runs.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxlc._jax_internals import (
    changed_cudnn_attention,
    cudnn_attention_backward,
    cudnn_attention_forward,
    cudnn_version,
)
from jaxlc.attention.contract import (
    AttentionProblem,
    AttentionSpec,
    CallResults,
    KernelOfCalls,
    KeyRanges,
    QueryResults,
    add_dlse_term,
)
from jaxlc.attention.kernels import cudnn_packed
from jaxlc.attention.kernels.cudnn_packed import MAX_ELEMENTS, DocumentTable, prepared_table
from jaxlc.core import Unsupported, UserError

_DTYPES = ("bfloat16", "float16")
# For the backward, by major compute capability (cuDNN frontend 1.8 and later,
# scaled_dot_product_flash_attention.h).
_MAX_HEAD_DIM, _OTHER_MAX_HEAD_DIM = {9: 256}, 128
_HEAD_DIM_MULTIPLE = 8
# refused by cuDNN frontend for "known bugs"
_VERSIONS_WITH_WRONG_BACKWARD = ((9, 10, 0), (9, 10, 1))
# The first cuDNN whose packed calls are correct, by major compute capability, and the defect of
# those before.
_FIRST_VERSION_FOR_PACKED = {
    9: (
        (9, 18, 0),
        "gaps between documents may give NaN or wrong gradients: TransformerEngine#2186",
    ),
    12: ((9, 18, 1), "gradients may be wrong: TransformerEngine#3333"),
}
# JAX's `check_is_flash_attention` has 9.10.0, whose backward is refused.
_FIRST_VERSION_FOR_VALUE_DIM = (9, 10, 2)
_FIRST_VERSION_WITH_DETERMINISTIC_BLACKWELL = (9, 18, 0)


def unsupported(problem: AttentionProblem) -> str | None:
    """See `contract.Kernel.unsupported`. The limits are of cuDNN 9.8, the oldest that JAX 0.10
    accepts.
    """
    if problem.platform != "gpu":
        return f"platform {problem.platform} (supported: gpu)"
    if (changed := changed_cudnn_attention()) is not None:
        return f"{changed} (supported: JAX 0.10.1 to 0.12)"
    if problem.major_capability < 8:
        return f"compute capability {problem.compute_capability} (supported: 8.0 and later)"
    if problem.cudnn_version == ():
        return "cuDNN is not installed (supported: 9.8 and later)"
    if problem.cudnn_version in _VERSIONS_WITH_WRONG_BACKWARD:
        return (
            f"cuDNN {version_text(problem.cudnn_version)}, whose backward has known bugs"
            " (supported: 9.10.2 and later)"
        )
    if problem.dtype not in _DTYPES:
        return f"dtype {problem.dtype} (supported: {', '.join(_DTYPES)})"
    max_head_dim = _MAX_HEAD_DIM.get(problem.major_capability, _OTHER_MAX_HEAD_DIM)
    if problem.head_dim > max_head_dim or problem.head_dim % _HEAD_DIM_MULTIPLE:
        return (
            f"head dim {problem.head_dim} on compute capability {problem.compute_capability} (supported: multiples of"
            f" {_HEAD_DIM_MULTIPLE} up to {max_head_dim})"
        )
    if problem.value_dim != problem.head_dim:
        return _value_dim_unsupported(problem)
    return None if problem.implicit_positions else _packed_unsupported(problem)


def _value_dim_unsupported(problem: AttentionProblem) -> str | None:
    """Why calls do not support values that are narrower or wider than queries.

    Packed calls have one array of offsets for keys and values, in elements, so their rows have the
    same width (JAX's `_dot_product_attention_fwd_cuda_lowering`).
    """
    first = _FIRST_VERSION_FOR_VALUE_DIM
    version = problem.cudnn_version
    name = f"head dim {problem.value_dim} of values"
    if not problem.implicit_positions:
        return f"{name} with key ranges (supported: head dim of queries, {problem.head_dim})"
    if problem.major_capability < 9 or (version is not None and version < first):
        needed = f"compute capability 9.0 and cuDNN {version_text(first)}"
        return (
            f"{name} (supported: head dim of queries, {problem.head_dim}; others from {needed} on)"
        )
    if problem.value_dim > problem.head_dim or problem.value_dim % _HEAD_DIM_MULTIPLE:
        return f"{name} (supported: multiples of {_HEAD_DIM_MULTIPLE} up to {problem.head_dim})"
    return None


def _packed_unsupported(problem: AttentionProblem) -> str | None:
    """Why packed calls do not support `problem`."""
    if not problem.document_ranges:
        return "key ranges of all_gather, sliding windows or decoding (supported: packed documents without a window)"
    if problem.major_capability < 9:
        return f"packed documents on compute capability {problem.compute_capability} (supported: 9.0 and later)"
    if problem.num_elements >= MAX_ELEMENTS:
        return (
            f"packed documents with {problem.num_elements} elements of queries or keys per device"
            " (supported: fewer than 2^31, since offsets are int32)"
        )
    first, defect = _FIRST_VERSION_FOR_PACKED.get(problem.major_capability, ((), ""))
    if problem.cudnn_version is not None and problem.cudnn_version < first:
        return (
            f"packed documents with cuDNN {version_text(problem.cudnn_version)} on compute capability"
            f" {problem.compute_capability} (supported: {version_text(first)} and later; before, {defect})"
        )
    return None


def assumption(problem: AttentionProblem) -> str | None:
    """What `unsupported` assumes of the cuDNN of an absent GPU, for calls that older versions
    compute wrongly.
    """
    if problem.cudnn_version is not None:
        return None
    if problem.value_dim != problem.head_dim:
        return f"assumes cuDNN {version_text(_FIRST_VERSION_FOR_VALUE_DIM)} or later"
    if not problem.document_ranges:
        return None
    first, _ = _FIRST_VERSION_FOR_PACKED.get(problem.major_capability, (None, ""))
    return first and f"assumes cuDNN {version_text(first)} or later"


def version_for(device: jax.Device) -> tuple[int, ...] | None:
    """The cuDNN that programs for `device` call; () if none is found, None if the device is absent
    or not a GPU.
    """
    return cudnn_version() if device.platform == "gpu" and device in jax.devices() else None


def version_text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def check_deterministic(device: jax.Device) -> None:
    """Checks that the attached `device` can run cuDNN's deterministic backward.

    Raises:
      UserError: it is a Blackwell GPU, and cuDNN is too old.
    """
    first = _FIRST_VERSION_WITH_DETERMINISTIC_BLACKWELL
    version = cudnn_version()
    if int(device.compute_capability.partition(".")[0]) >= 10 and version < first:
        raise UserError(
            "config.runtime.deterministic=True is unsupported by attention kernel cudnn on compute capability"
            f" {device.compute_capability} with cuDNN {version_text(version)} (supported: {version_text(first)} and"
            " later); upgrade nvidia-cudnn-cu12 or -cu13, or set --config.attention.kernel=pallas"
        )


class CallsByMask(KernelOfCalls):
    """A kernel whose calls for packed documents differ from those with an implicit mask.

    It implements `contract.Kernel`. Key ranges describe packed documents. With a causal spec, a query at index t of k
    has the range [first, t + 1), where first is the index of its document's first query; otherwise all queries of a
    document have the same range.

    The kernel has no gradient of the lse; `contract.add_dlse_term` adds it, rounded to the dtype of q as out is.
    """

    def __init__(
        self, implicit: tuple[Callable, ...], packed: tuple[Callable, ...], min_tokens=None
    ):
        """
        Args:
          implicit, packed: the forward and the backward call. Packed ones return `CallResults`.
          min_tokens: of `cudnn_packed.buckets`.
        """
        self._calls = tuple(zip(implicit, packed, strict=True))
        self.min_tokens = min_tokens

    def prepare(self, ranges: KeyRanges, num_keys: int, spec: AttentionSpec) -> DocumentTable:
        """The table of documents that calls with these ranges need, over num_keys keys; see `contract`.

        Its arrays have a first dimension of 1, so that they can be sharded as the ranges are. `vmap`
        does not support calls with a table.
        """
        table = prepared_table(ranges, num_keys, spec, self.min_tokens)
        return jax.tree.map(lambda x: x[None], table)

    def forward_calls(self, q_BTNH, k_BSKH, v_BSKH, ranges, spec: AttentionSpec) -> CallResults:
        """As `forward`; see `contract`."""
        call, operands = _call_for(*self._calls[0], ranges, spec)
        return call(q_BTNH, k_BSKH, v_BSKH, *operands)

    def backward_calls(
        self, q_BTNH, k_BSKH, v_BSKH, ranges, spec: AttentionSpec, results: QueryResults
    ) -> CallResults:
        """As `backward`; see `contract`."""
        call, operands = _call_for(*self._calls[1], ranges, spec)
        out_BTNH, lse_BNT, dout_BTNH, dlse_BNT = results

        def calls(v_BSKH, out_BTNH, dout_BTNH) -> CallResults:
            out_BTNH, dout_BTNH = (x.astype(q_BTNH.dtype) for x in (out_BTNH, dout_BTNH))
            return call(q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BNT, dout_BTNH, *operands)

        def gradients(*operands) -> tuple[jax.Array, ...]:
            return calls(*operands).values()

        first = calls(v_BSKH, out_BTNH, dout_BTNH)

        def joined(results):
            *dqk, dv_BSKH = first.joined(results)
            return *add_dlse_term(gradients, v_BSKH, dlse_BNT, *dqk), dv_BSKH

        return CallResults(first.results, joined)


def workspace_bytes(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], backward: bool, documents_per_row: int = 1
) -> int:
    """An upper bound of the workspace of one call, in bytes. Programs compiled without a GPU report
    0 for it.

    The backward sums dq in float32 [B, N, T, H] and stores dout . out, float32 [B, N, T] (cuDNN
    frontend 1.x, scaled_dot_product_flash_attention.h: `dQ_accum_size`, `softmax_sum_size`). With
    grouped queries it stores dk and dv for every query head, in a dtype of 2 bytes (`dK_fullhead`,
    `dV_fullhead`), unless the engine that cuDNN selects on the GPU sums them itself. The forward
    needs no workspace that grows with T.

    A packed call stores all of these for each document with the padded lengths T and S: XLA does
    not pass the number of tokens (`max_total_seq_len_q`), with which cuDNN frontend would pack its
    workspace.

    Args:
      q_shape, k_shape: [B, T, N, H] and [B, S, K, H] of one device.
      documents_per_row: of a packed call.
    """
    if not backward:
        return 0
    batch, _, num_heads, head_dim = q_shape
    _, num_keys, num_kv_heads, _ = k_shape
    workspace = 4 * math.prod(q_shape) + 4 * math.prod(q_shape[:-1])
    if num_heads != num_kv_heads:
        workspace += 2 * 2 * batch * num_keys * num_heads * head_dim
    return documents_per_row * workspace


def _call_for(
    implicit: Callable, packed: Callable, ranges, spec: AttentionSpec
) -> tuple[Callable, tuple]:
    """`implicit` for a call without ranges or `packed` for one with them, with the spec, and its
    last operands.

    It returns CallResults. `vmap` supports calls without a table.
    """
    if ranges is not None:
        packed = functools.partial(packed, spec=spec)
        if not isinstance(ranges, KeyRanges):
            return packed, (jax.tree.map(lambda x: x[0], ranges),)
        call = lambda *operands: packed(*operands).values()
        operands = tuple(ranges)
    else:
        call = functools.partial(implicit, spec=spec)
        operands = ()
    foldable = _fold_vmap_into_batch(call)
    return (lambda *operands: CallResults(foldable(*operands), tuple)), operands


def _fold_vmap_into_batch(call: Callable) -> Callable:
    """`call` with a rule for `vmap`, which cuDNN's primitives lack: the new dimension becomes a
    part of B.

    B is the first dimension of all operands and results.
    """
    foldable = jax.custom_batching.custom_vmap(call)

    @foldable.def_vmap
    def rule(axis_size, is_batched, *operands):
        stacked = (
            x if has_axis else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, has_axis in zip(operands, is_batched, strict=True)
        )
        results = foldable(*(x.reshape(-1, *x.shape[2:]) for x in stacked))
        unfolded = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), results)
        return unfolded, jax.tree.map(lambda _: True, results)

    return foldable


def _forward(q_BTNH, k_BSKH, v_BSKH, *, spec: AttentionSpec):
    return cudnn_attention_forward(q_BTNH, k_BSKH, v_BSKH, **_settings(q_BTNH, k_BSKH, spec))


def _backward(q_BTNH, k_BSKH, *operands, spec: AttentionSpec):
    return cudnn_attention_backward(q_BTNH, k_BSKH, *operands, **_settings(q_BTNH, k_BSKH, spec))


def _settings(q_BTNH: jax.Array, k_BSKH: jax.Array, spec: AttentionSpec) -> dict:
    """The static arguments of a call without ranges."""
    num_queries = q_BTNH.shape[1]
    num_keys = k_BSKH.shape[1]
    if spec.causal and num_queries != num_keys:
        raise Unsupported(
            f"unsupported by attention kernel cudnn: causal attention of {num_queries} queries over {num_keys} keys"
            " (supported: equal numbers)"
        )
    # cuDNN counts a window as AttentionSpec does: the query itself and the window - 1 tokens before
    # it.
    return dict(scale=spec.scale_for(q_BTNH.shape[-1]), causal=spec.causal, window=spec.window)


_CALLS = CallsByMask((_forward, _backward), (cudnn_packed.forward, cudnn_packed.backward))
# They raise Unsupported for a causal call without ranges and with T != S, or with ranges for a window or 2^31 elements
# of q or k.
forward = _CALLS.forward
forward_calls = _CALLS.forward_calls
backward = _CALLS.backward
backward_calls = _CALLS.backward_calls
prepare = _CALLS.prepare
