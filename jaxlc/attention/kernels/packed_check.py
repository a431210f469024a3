"""A check of kernels for packed documents on the GPU that is about to train.

Whether cuDNN and fa3 accept the offsets of documents, and compute what they say, depends on their version and on the
GPU; the code that Triton generates for `pallas` depends on its version. So a run compares them with the reference
before it trains:

    - in free memory that is filled with NaN, since memory that no program has used yet is often zero, and an
      uninitialized workspace then has no effect
    - with documents of several calls, gaps between them, and a call whose offsets descend
    - for all rows of a small problem, of a rank's own KV block and of a ring step; and for a few rows of a problem with
      offsets above 2^27 elements, as long sequences have
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlc.attention.contract import AttentionSpec, KeyRanges, QueryResults
from jaxlc.attention.kernels import cudnn, fa3, pallas, reference
from jaxlc.attention.key_ranges import TokenInfo, has_small_shared_memory, key_ranges
from jaxlc.core import UserError, reason_of

MAX_ERROR = 1e-2  # norm of the error relative to the norm of the result; bfloat16 rounds to 2^-9
# Tokens of the documents, negative for gaps. The first call takes the longest one and then the one before it, so its
# offsets descend; the second call takes the others, with gaps. The last one ends with the arrays.
_DOCUMENT_TOKENS = (200, -5, 460, -3, 1, 3, 120, -20, 130, -12, 70)
_LARGE_ELEMENTS = 5 * 2**25  # queries of the large problem; its last document starts above 2^27
_MAX_LARGE_TOKENS = 2**18  # models with few heads have no offsets above 2^27
_LARGE_BYTES_PER_ELEMENT = 64  # an upper bound of the memory of the large problem
# rows that are compared at the start and at the end of each document of the large problem
_SAMPLE_TOKENS = 16
_POISON_BYTES = 2**28  # size of one array
_MAX_POISON_BYTES = 2**37  # with unified memory the pool is larger than the GPU's memory
_KERNELS = {
    "cudnn": (cudnn, "cuDNN", "pallas"),
    "fa3": (fa3, "fa3", "cudnn"),
    "pallas": (pallas, "Triton", "blockwise"),
}


def check_packed(
    kernel: str,
    device: jax.Device,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype,
    document_tokens: tuple[int, ...] = _DOCUMENT_TOKENS,
    large_elements: int = _LARGE_ELEMENTS,
) -> str:
    """Compares packed calls with the reference: out, lse and gradients.

    Args:
      kernel: a key of `_KERNELS`.
      num_heads, num_kv_heads: of the model.
      document_tokens: lengths of the documents of the small problems, negative for gaps between them.
      large_elements: of the queries of the large problem.
    Returns:
      A line with the largest error.
    Raises:
      UserError: a call fails, or a result is wrong.
    """
    module, library, other = _KERNELS[kernel]
    advice = f"set --config.attention.kernel={other}, and report the GPU and the versions of JAX and {library}"
    problems, skipped = _problems(
        device, (num_heads, num_kv_heads), head_dim, document_tokens, large_elements
    )

    def comparisons():
        for problem in problems:
            operands = problem.ranges(), problem.inputs(head_dim, dtype)
            yield (
                functools.partial(problem.results, module, *operands),
                functools.partial(problem.error, *operands),
            )

    messages = f"{library} fails on packed documents", f"{library} is wrong on packed documents"
    error = measured_error(comparisons(), device, messages, advice)
    return f"kernel     {kernel} on packed documents: {error}{skipped}"


class _Problem(NamedTuple):
    """Packed documents and their heads."""

    num_heads: int
    num_kv_heads: int
    lengths: tuple[int, ...]  # documents in tokens; negative for gaps
    causal: bool  # a rank's own KV block, otherwise a ring step
    samples_rows: bool = False  # only some rows are compared
    small_shared_memory: bool = False  # of the GPU

    @property
    def spec(self) -> AttentionSpec:
        """With the loop over further documents in the small own block, and without it in the other
        problems.
        """
        return AttentionSpec(
            causal=self.causal,
            few_documents=self.samples_rows or not self.causal,
            small_shared_memory=self.small_shared_memory,
        )

    @property
    def num_tokens(self) -> int:
        return sum(map(abs, self.lengths))

    def ranges(self) -> KeyRanges:
        lengths = np.array(self.lengths)
        ids = np.where(lengths > 0, np.arange(1, len(lengths) + 1), 0)
        segments = np.repeat(ids, abs(lengths)).astype(np.int32)[None]
        positions = np.arange(self.num_tokens, dtype=np.int32)[None] if self.causal else None
        # In a ring step keys have the documents in the opposite order, so offsets of queries and
        # keys differ.
        k_segments = segments if self.causal else segments[:, ::-1]
        return key_ranges(
            TokenInfo(positions, segments), TokenInfo(positions, k_segments), self.spec
        )

    def inputs(self, head_dim: int, dtype) -> list[jax.Array]:
        """q, k, v and dout."""
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        shapes = [(1, self.num_tokens, num, head_dim) for num in heads]
        return jax.block_until_ready(
            [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)]
        )

    @jax.jit(static_argnums=(0, 1))
    def results(self, kernel, ranges: KeyRanges, inputs) -> tuple[jax.Array, ...]:
        """(out, lse, dq, dk, dv), float32, of a kernel's module."""
        q, k, v, dout = inputs
        out, lse = kernel.forward(q, k, v, ranges, self.spec)
        return (
            out,
            lse,
            *kernel.backward(
                q, k, v, ranges, self.spec, QueryResults(out, lse, dout, jnp.zeros_like(lse))
            ),
        )

    def error(self, ranges: KeyRanges, inputs, results) -> float:
        """The largest error of the results, relative to the reference; infinite if any of them is
        NaN.

        The reference takes out and lse of the results, which are compared themselves.
        """
        if any(bool(jnp.isnan(x).any()) for x in results):
            return np.inf
        return largest_error(*self._compared_rows(ranges, inputs, results))

    @jax.jit(static_argnums=0)
    def _compared_rows(self, ranges: KeyRanges, inputs, results):
        """(rows of the results, the same rows of the reference)."""
        return lax.map(lambda first: self._rows(first, ranges, inputs, results), self._first_rows())

    def _rows(self, first, ranges: KeyRanges, inputs, results):
        """The rows from `first` on of the results, and of the reference."""
        q, k, v, dout = inputs
        out, lse, *gradients = results
        all_results = QueryResults(out, lse, dout, jnp.zeros_like(lse))
        num_rows = self._num_rows

        def rows(x, axis=1):
            return lax.dynamic_slice_in_dim(x, first, num_rows, axis)

        q_rows = rows(q)
        q_ranges = KeyRanges(*map(rows, ranges))
        q_results = QueryResults(*map(rows, all_results, (1, 2, 1, 2)))
        expected = reference.forward(q_rows, k, v, q_ranges, self.spec)
        dq, _, _ = reference.backward(q_rows, k, v, q_ranges, self.spec, q_results)
        kv_ranges = ranges.within(first, num_rows)
        _, dk, dv = reference.backward(q, rows(k), rows(v), kv_ranges, self.spec, all_results)
        return (*q_results[:2], *map(rows, gradients)), (*expected, dq, dk, dv)

    @property
    def _num_rows(self) -> int:
        return _SAMPLE_TOKENS if self.samples_rows else self.num_tokens

    def _first_rows(self) -> jax.Array:
        """The first of each `_num_rows` rows to compare."""
        if not self.samples_rows:
            return jnp.zeros(1, jnp.int32)
        lengths = np.array(self.lengths)
        ends = np.cumsum(abs(lengths))
        firsts = np.concatenate([ends - abs(lengths), ends - _SAMPLE_TOKENS])
        return jnp.asarray(firsts[np.tile(lengths > 0, 2)], jnp.int32)


def _problems(
    device: jax.Device,
    heads: tuple[int, int],
    head_dim: int,
    lengths: tuple[int, ...],
    large_elements: int,
) -> tuple[list[_Problem], str]:
    """The problems that fit the free memory, and a note if the large one does not."""
    num_heads, num_kv_heads = heads
    num_groups = min(2, num_kv_heads)
    make = functools.partial(_Problem, small_shared_memory=has_small_shared_memory(device))
    small = [
        make(num_heads // num_kv_heads * num_groups, num_groups, lengths, causal=causal)
        for causal in (True, False)
    ]
    free_bytes = _free_bytes(device)
    if free_bytes is not None and free_bytes < _LARGE_BYTES_PER_ELEMENT * large_elements:
        return (
            small,
            f"; not for offsets above 2^27 elements: only {free_bytes / 2**30:.1f} GiB are free",
        )
    num_tokens = min(-(-large_elements // (num_heads * head_dim)), _MAX_LARGE_TOKENS)
    factor = -(-num_tokens // small[0].num_tokens)
    large = make(*heads, tuple(factor * x for x in lengths), causal=True, samples_rows=True)
    return [*small, large], ""


def measured_error(
    comparisons: Iterable[tuple[Callable, Callable]],
    device: jax.Device,
    messages: tuple[str, str],
    advice: str,
) -> str:
    """The largest error of some calls, each after free memory was filled with NaN, as a text.

    Args:
      comparisons: pairs of a call, and of a function that returns the error of its results.
      messages: the beginnings of the errors for a call that fails, and for wrong results.
    Raises:
      UserError: a call fails, or an error is above MAX_ERROR.
    """
    largest = 0.0
    failure, wrong = messages
    with jax.default_device(device):
        for call, error_of in comparisons:
            fill_free_memory_with_nan(device)
            try:
                results = jax.block_until_ready(call())
            except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
                raise UserError(f"{failure} on {device} ({reason_of(error)}): {advice}") from error
            largest = np.maximum(largest, error_of(results))  # NaN remains
    if not largest <= MAX_ERROR:
        raise UserError(
            f"{wrong} on {device}: relative error {largest:.2g}, expected at most {MAX_ERROR:g}: {advice}"
        )
    return f"relative error {largest:.1e} on {device.device_kind}, measured now"


def fill_free_memory_with_nan(device: jax.Device) -> None:
    """Writes NaN to most of the free memory of a GPU's pool, and frees it again; elsewhere to
    little memory.

    A repeated bfloat16 NaN is also a NaN in float16 and in float32.
    """
    free_bytes = _free_bytes(device)
    num_arrays = (
        0 if free_bytes is None else int(0.8 * min(free_bytes, _MAX_POISON_BYTES)) // _POISON_BYTES
    )
    arrays = []
    for size in [_POISON_BYTES // 2] * num_arrays or [2**10]:
        try:
            arrays.append(_nan_array(size))
        except jax.errors.JaxRuntimeError:  # the pool is fragmented
            break
    for array in arrays:
        array.delete()


def _nan_array(size: int) -> jax.Array:
    return jax.block_until_ready(jnp.full(size, jnp.nan, jnp.bfloat16))


def _free_bytes(device: jax.Device) -> int | None:
    """Free memory of the GPU's pool; None on other devices, and for allocators without a pool."""
    stats = device.memory_stats() if device.platform == "gpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return None


def largest_error(actual: Sequence[jax.Array], expected: Sequence[jax.Array]) -> float:
    """The largest relative norm of the errors of some arrays; infinite for NaN, and unless the same
    entries are -inf: the lse of fully masked rows.
    """
    return max(float(_error(*pair)) for pair in zip(actual, expected, strict=True))


@jax.jit
def _error(actual: jax.Array, expected: jax.Array) -> jax.Array:
    actual, expected = (x.astype(jnp.float32).reshape(-1) for x in (actual, expected))
    is_masked = jnp.isneginf(expected)
    error, norm = (
        jnp.linalg.norm(jnp.where(is_masked, 0.0, x)) for x in (actual - expected, expected)
    )
    is_valid = (jnp.isneginf(actual) == is_masked).all() & jnp.isfinite(error / norm)
    return jnp.where(is_valid, error / norm, jnp.inf)
