"""A check of cuDNN's calls for packed documents on the GPU that is about to train.

Whether cuDNN accepts their offsets, and computes what they say, depends on its version and on the GPU. So a run
compares them with the reference on a small problem before it trains.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlc.attention.contract import AttentionSpec, Kernel
from jaxlc.attention.kernels import cudnn, reference
from jaxlc.attention.key_ranges import TokenInfo, key_ranges
from jaxlc.core.errors import UserError, reason_of

MAX_ERROR = 1e-2  # norm of the error relative to that of the result; bfloat16 rounds to 2^-9
_DOCUMENT_TOKENS = (460, 1, 3, 120, 130, 70, 200)  # long and short ones: calls of two buckets
_PADDING_TOKENS = 40
_ADVICE = "set --config.attention.kernel=pallas, and report the GPU and the versions of JAX and cuDNN"


def check_packed_cudnn(device: jax.Device, *, num_heads: int, num_kv_heads: int, head_dim: int, dtype) -> str:
    """Compares packed calls with the reference: out, lse and gradients, for a rank's own KV block and for a ring step.

    Args:
      num_heads, num_kv_heads: of the model; one or two groups of heads are used.
    Returns:
      A line with the largest error.
    Raises:
      UserError: a call fails, or a result is wrong.
    """
    num_groups = min(2, num_kv_heads)
    heads = (num_heads // num_kv_heads * num_groups, num_groups, num_groups, num_heads // num_kv_heads * num_groups)
    segments = np.repeat(np.arange(1, len(_DOCUMENT_TOKENS) + 1), _DOCUMENT_TOKENS)
    segments = np.concatenate([segments, np.zeros(_PADDING_TOKENS)]).astype(np.int32)[None]
    keys = jax.random.split(jax.random.key(0), 4)
    largest = 0.0
    with jax.default_device(device):
        inputs = [
            jax.random.normal(key, (1, segments.shape[1], num, head_dim)).astype(dtype) for key, num in zip(keys, heads)
        ]
        # Of a ring step the documents are in the opposite order: offsets of queries and keys differ.
        for causal, k_segments in ((True, segments), (False, segments[:, ::-1])):
            spec = AttentionSpec(causal=causal)
            try:
                actual = jax.device_get(_both_passes(cudnn, spec, segments, k_segments, inputs))
            except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
                raise UserError(
                    f"cuDNN fails on packed documents on {device} ({reason_of(error)}): {_ADVICE}"
                ) from error
            float32 = [x.astype(jnp.float32) for x in inputs]
            expected = jax.device_get(_both_passes(reference, spec, segments, k_segments, float32))
            largest = max(largest, *(_error(a, b) for a, b in zip(actual, expected, strict=True)))
    if not largest <= MAX_ERROR:
        raise UserError(
            f"cuDNN is wrong on packed documents on {device}: relative error {largest:.2g}, expected at most"
            f" {MAX_ERROR:g}: {_ADVICE}"
        )
    return f"kernel     cudnn on packed documents: relative error {largest:.1e} on {device.device_kind}, measured now"


def _both_passes(kernel: Kernel, spec: AttentionSpec, q_segments, k_segments, inputs) -> tuple[jax.Array, ...]:
    """(out, lse, dq, dk, dv), float32."""

    def compute(q, k, v, dout):
        def info(segments):
            positions = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
            return TokenInfo(positions if spec.causal else None, jnp.asarray(segments))

        ranges = key_ranges(info(q_segments), info(k_segments), spec)
        out, lse = kernel.forward(q, k, v, ranges, spec)
        return (
            out,
            lse,
            *kernel.backward(q, k, v, ranges, spec, out, lse, dout.astype(jnp.float32), jnp.zeros_like(lse)),
        )

    return jax.jit(compute)(*inputs)


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Relative norm over finite entries. Infinite unless the same entries are -inf: the lse of fully masked rows."""
    is_finite = np.isfinite(expected)
    if not (np.isfinite(actual) == is_finite).all():
        return np.inf
    difference, expected = (np.where(is_finite, x, 0) for x in (actual - np.where(is_finite, expected, 0), expected))
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))
