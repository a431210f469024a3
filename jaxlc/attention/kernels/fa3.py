"""FlashAttention-3 (arXiv:2407.08608), CUDA kernels for Hopper, by XLA's foreign function interface (FFI).

The package dew-flash-attn (BSD-3; extras fa3-cuda12 and fa3-cuda13) has the kernels as FFI targets. Of its two
libraries only the one for Hopper is loaded. It needs JAX 0.11.2 or later, whose XLA has no NVSHMEM.

    dew_flash3_mha_fwd(q, k, v) -> out, lse [B, N, T], two unused arrays
    dew_flash3_mha_bwd(dout, q, k, v, out, lse) -> dq, dk, dv, two scratch arrays
    dew_flash3_mha_varlen_fwd(q, k, v, q_offsets, kv_offsets) -> the same; [T, N, H] and lse [N, T]
    dew_flash3_mha_varlen_bwd(dout, q, k, v, out, lse, q_offsets, kv_offsets) -> the same

Masks are causal, aligned to the last key, with a window of `window_size_left` + 1 tokens.

Packed documents
----------------
A variable-length call has offsets only: segment i has the queries q_offsets[i] to q_offsets[i + 1] and the keys
kv_offsets[i] to kv_offsets[i + 1]. `cudnn_packed` decides which calls there are and which documents each has. Before
each document the gap is a segment of queries without keys, and one of keys without queries. Both offsets ascend, but a
ring step may have its documents in another order of keys than of queries. So without a causal mask, the keys of a call
are gathered in the order of its queries.

The number of segments is static, 3 for each document that a call can take. The backward has 128 rows of scratch for
each, so the smallest size of documents is larger than cuDNN's. Gaps may be longer than `max_seqlen`: the kernel need
not write their rows, which are replaced in any case.

Not deterministic: dq is summed in no fixed order. As of cuDNN, gradients are rounded to q's dtype once per call.
"""

import ctypes
import functools
import importlib.metadata
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxlc.attention.contract import AttentionProblem, AttentionSpec, CallResults, OutLse
from jaxlc.attention.kernels import cudnn
from jaxlc.attention.kernels.cudnn_packed import Block, Bucket, DocumentRows, document_of_rows
from jaxlc.core import Unsupported, reason_of
from jaxlc.core.errors import install_hint, is_installed
from jaxlc.runtime.xla_flags import find_library

VERSION = "0.3.6"  # the version that was checked; the extras in pyproject.toml pin it
FIRST_JAX = (0, 11, 2)
HEAD_DIMS = (64, 128, 192, 256)
SCRATCH_ROWS = 128  # of a segment in the backward; see the package's `_backward3`
# The segments of a call for documents of at least this length have at most 3/8 as many rows of
# scratch as the call has queries.
MIN_DOCUMENT_TOKENS = 2048
_PACKAGE = "dew_flash_attn"
_TARGET = "dew_flash3_mha_"
_DTYPES = ("bfloat16", "float16")
# CUDA's runtime, which the library needs: by distribution, its package in NVIDIA's and its name
_RUNTIMES = {
    "dew-flash-attn-cu12": ("cuda_runtime", "libcudart.so.12"),
    "dew-flash-attn-cu13": ("cu13", "libcudart.so.13"),
}


def unsupported(problem: AttentionProblem) -> str | None:
    """See `contract.Kernel.unsupported`."""
    return limit(problem) or unavailable()


def limit(problem: AttentionProblem) -> str | None:
    """As `unsupported`, where the package is installed."""
    if problem.platform != "gpu":
        return f"platform {problem.platform} (supported: gpu)"
    if problem.compute_capability != "9.0":
        return f"compute capability {problem.compute_capability} (supported: 9.0)"
    if problem.deterministic:
        return "config.runtime.deterministic=True (supported: False, since the order of its sums varies)"
    if problem.dtype not in _DTYPES:
        return f"dtype {problem.dtype} (supported: {', '.join(_DTYPES)})"
    if problem.head_dim not in HEAD_DIMS:
        supported = ", ".join(map(str, HEAD_DIMS))
        return f"head dim {problem.head_dim} (supported: {supported}; padded, it is not faster than cudnn)"
    if problem.value_dim != problem.head_dim:
        return f"head dim {problem.value_dim} of values (supported: head dim of queries, {problem.head_dim})"
    if not (problem.implicit_positions or problem.document_ranges or problem.window_ranges):
        return (
            "key ranges of all_gather, decoding, or a window over packed documents with a ring or shared prefixes"
            " (supported: packed documents, windows of one rank's tokens or of one document)"
        )
    return None


def is_candidate(problem: AttentionProblem) -> bool:
    """Whether a package could be installed for this GPU and this JAX."""
    return problem.compute_capability == "9.0" and jax.__version_info__ >= FIRST_JAX


@functools.cache
def unavailable() -> str | None:
    """Why this process cannot compile calls; None if it can, in which case XLA knows the targets."""
    if jax.__version_info__ < FIRST_JAX:
        return f"JAX {jax.__version__} (supported: {'.'.join(map(str, FIRST_JAX))} and later)"
    spec = importlib.util.find_spec(_PACKAGE) if is_installed(_PACKAGE) else None
    if spec is None or spec.origin is None:
        hint = install_hint(_PACKAGE)
        return f"the package {_PACKAGE} is not installed: {hint}, or fa3-cuda13 with CUDA 13"
    distributions = importlib.metadata.packages_distributions().get(_PACKAGE, [])
    name = next((name for name in distributions if name in _RUNTIMES), "")
    if not name or importlib.metadata.version(name) != VERSION:
        return f"{name or _PACKAGE} of another version (supported: {VERSION})"
    runtime = find_library(*_RUNTIMES[name])
    try:
        if runtime is not None:
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(Path(spec.origin).with_name("libdew_flash_attn3.so")))
    except OSError as error:
        return f"cannot load {name}, which needs {_RUNTIMES[name][1]}: {reason_of(error)}"
    for part in ("fwd", "bwd", "varlen_fwd", "varlen_bwd"):
        pointer = jax.ffi.pycapsule(getattr(library, _TARGET + part))
        jax.ffi.register_ffi_target(_TARGET + part, pointer, platform="CUDA")
    return None


def assumption(problem: AttentionProblem) -> str | None:
    """What a choice for an absent GPU assumes."""
    is_absent = problem.cudnn_version is None
    return f"assumes {_PACKAGE} {VERSION} where the run is" if is_absent else None


def workspace_bytes(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], scratch_entries: int
) -> int:
    """The accumulators of one backward call, in bytes, which the kernel allocates while it runs: no compiled program
    has them.

    float32 dq for each row of scratch; with grouped queries, dk and dv for as many rows of padding.

    Args:
      q_shape, k_shape: [..., N, H] and [..., K, H].
      scratch_entries: of a scratch array, rows times heads.
    """
    *tokens, num_heads, head_dim = q_shape
    *num_keys, num_kv_heads, _ = k_shape
    padding = scratch_entries // num_heads - int(np.prod(tokens))
    rows = scratch_entries
    if num_heads != num_kv_heads:
        rows += 2 * num_kv_heads * (int(np.prod(num_keys)) + padding)
    return 4 * rows * head_dim


def _ffi_call(name: str, results: tuple, operands: tuple, spec: AttentionSpec, **settings):
    """The results of a target; `results` are like these arrays or shapes.

    Args:
      operands: the first arrays are queries, or dout and queries.
    """
    has_window = spec.window is not None
    call = jax.ffi.ffi_call(
        _TARGET + name, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results)
    )
    return call(
        *operands,
        softmax_scale=np.float64(spec.scale_for(operands[0].shape[-1])),
        is_causal=spec.causal,
        window_size_left=np.int64(spec.window - 1 if has_window else -1),
        window_size_right=np.int64(0 if has_window else -1),
        **settings,
    )


def ffi_forward(q, k, v, *offsets, spec: AttentionSpec, **settings) -> OutLse:
    """(out, lse float32) of one call; with offsets, of arrays [tokens, heads, H]."""
    *batch, num_tokens, num_heads, _ = q.shape
    shapes = (*batch, num_heads, num_tokens), (1, 1, 1, 1), (1, 1, 1)
    results = q, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    name = "varlen_fwd" if offsets else "fwd"
    out, lse, *_ = _ffi_call(name, results, (q, k, v, *offsets), spec, **settings)
    return out, lse


def ffi_backward(q, k, v, out, lse, dout, *offsets, spec: AttentionSpec, **settings):
    """(dq, dk, dv) in q's dtype of one call; lse of out over all keys."""
    *batch, num_tokens, num_heads, _ = q.shape
    num_sequences = len(offsets[0]) - 1 if offsets else batch[0]
    num_rows = int(np.prod(batch)) * num_tokens + SCRATCH_ROWS * (num_sequences + 1)
    scratch = jax.ShapeDtypeStruct((num_heads * num_rows,), jnp.float32)
    name = "varlen_bwd" if offsets else "bwd"
    operands = (dout, q, k, v, out, lse, *offsets)
    dq, dk, dv, *_ = _ffi_call(name, (q, k, v, scratch, scratch), operands, spec, **settings)
    return dq, dk, dv


def _forward(q_BTNH, k_BSKH, v_BSKH, *, spec: AttentionSpec):
    _check_lengths(q_BTNH, k_BSKH, spec)
    return ffi_forward(q_BTNH, k_BSKH, v_BSKH, spec=spec)


def _backward(q_BTNH, k_BSKH, *operands, spec: AttentionSpec):
    _check_lengths(q_BTNH, k_BSKH, spec)
    return ffi_backward(q_BTNH, k_BSKH, *operands, spec=spec)


def _check_lengths(q_BTNH: jax.Array, k_BSKH: jax.Array, spec: AttentionSpec) -> None:
    num_queries = q_BTNH.shape[1]
    num_keys = k_BSKH.shape[1]
    if spec.causal and num_queries > num_keys:
        raise Unsupported(
            f"unsupported by attention kernel fa3: causal attention of {num_queries} queries over {num_keys} keys"
            " (supported: at least as many keys)"
        )


def _packed_forward(q_BTNH, k_BSKH, v_BSKH, *table, spec: AttentionSpec) -> CallResults:
    block = Block.create(q_BTNH, k_BSKH, table, spec, MIN_DOCUMENT_TOKENS)

    def call(bucket: Bucket, documents: DocumentRows):
        segments = _Segments(block, documents, spec)
        keys = map(segments.gathered, (k_BSKH, v_BSKH))
        out, lse_NT = ffi_forward(
            _rows(q_BTNH), *keys, *segments.offsets, spec=spec, **_longest(bucket)
        )
        lse_BNT = lse_NT.reshape(-1, *q_BTNH.shape[:2]).swapaxes(0, 1)
        return out.reshape(q_BTNH.shape), lse_BNT

    return block.forward(call, lambda results, *_: results)


def _packed_backward(
    q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BNT, dout_BTNH, *table, spec: AttentionSpec
) -> CallResults:
    block = Block.create(q_BTNH, k_BSKH, table, spec, MIN_DOCUMENT_TOKENS)

    def call(bucket: Bucket, documents: DocumentRows):
        segments = _Segments(block, documents, spec)
        keys = map(segments.gathered, (k_BSKH, v_BSKH))
        lse_NT = lse_BNT.swapaxes(0, 1).reshape(lse_BNT.shape[1], -1)
        operands = (_rows(q_BTNH), *keys, _rows(out_BTNH), lse_NT, _rows(dout_BTNH))
        dq, dk, dv = ffi_backward(*operands, *segments.offsets, spec=spec, **_longest(bucket))
        dk, dv = map(segments.scattered, (dk, dv))
        return dq.reshape(q_BTNH.shape), dk.reshape(k_BSKH.shape), dv.reshape(v_BSKH.shape)

    return block.backward(call)


_CALLS = cudnn.CallsByMask(
    (_forward, _backward), (_packed_forward, _packed_backward), MIN_DOCUMENT_TOKENS
)
# With a window, each document's keys ascend with its queries, and no two documents share a key. They raise Unsupported
# for a causal call without ranges that has more queries than keys.
forward = _CALLS.forward
forward_calls = _CALLS.forward_calls
backward = _CALLS.backward
backward_calls = _CALLS.backward_calls
prepare = _CALLS.prepare


def _rows(x_BT: jax.Array) -> jax.Array:
    """[B, T, ...] as [B T, ...]."""
    return x_BT.reshape(-1, *x_BT.shape[2:])


def _longest(bucket: Bucket) -> dict:
    return dict(max_seqlen=np.int64(bucket.num_queries), max_seqlen_k=np.int64(bucket.num_keys))


class _Segments:
    """The segments of a call for some documents: their offsets, and the order of the keys."""

    def __init__(self, block: Block, documents: DocumentRows, spec: AttentionSpec):
        self.num_keys = block.k_shape[0] * block.k_shape[1]
        num_queries = block.q_shape[0] * block.q_shape[1]
        by_query = jnp.argsort(documents.q_start.reshape(-1)[: documents.q_length.size])
        q_length, self.kv_length, q_start, kv_start = (x.reshape(-1)[by_query] for x in documents)
        self.is_gathered = not spec.causal
        self.kv_start = kv_start
        self.begin = jnp.cumsum(self.kv_length) - self.kv_length  # of gathered keys
        begin = self.begin if self.is_gathered else kv_start
        end = begin + self.kv_length
        previous = jnp.pad(end, (1, 0))[:-1]
        gaps = [(q_start, previous)] + ([] if self.is_gathered else [(q_start, begin)])
        columns = [*gaps, (q_start + q_length, end)]
        q_offsets, kv_offsets = (jnp.stack(x, axis=1).reshape(-1) for x in zip(*columns))
        last = jnp.stack([end[-1], jnp.int32(self.num_keys)])
        self.offsets = (
            jnp.pad(jnp.pad(q_offsets, (1, 0)), (0, 2), constant_values=num_queries),
            jnp.concatenate([jnp.zeros(1, jnp.int32), kv_offsets, last]),
        )

    def gathered(self, x_BS: jax.Array) -> jax.Array:
        """The rows of k or v in the order of the segments; then undefined rows."""
        return self._moved(_rows(x_BS), self.begin, self.kv_start)

    def scattered(self, dx: jax.Array) -> jax.Array:
        """The inverse, of gradients; undefined for keys of no document."""
        return self._moved(dx, self.kv_start, self.begin)

    def _moved(self, x: jax.Array, start_D: jax.Array, from_D: jax.Array) -> jax.Array:
        if not self.is_gathered:
            return x
        document = document_of_rows(start_D, self.kv_length, self.num_keys)
        row = jnp.arange(self.num_keys) + (from_D - start_D)[document]
        return jnp.take(x, row, axis=0, mode="clip")
