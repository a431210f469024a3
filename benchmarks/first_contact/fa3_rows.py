"""Part fa3: raw variable-length calls of FlashAttention-3 against the reference, and their times.

The kernel relies on what such calls do at gaps between documents: segments with queries and no
keys, or keys and no queries, and segments longer than `max_seqlen`. On a CPU, a stand-in computes
the calls of a dry run.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.first_contact import fa3_stand_in
from benchmarks.first_contact.attention_inputs import (
    both_passes,
    is_main,
    random_inputs,
    supported_kernels,
)
from benchmarks.first_contact.rows import Row
from benchmarks.first_contact.sizes import Sizes
from jaxlc.attention.contract import AttentionSpec, KeyRanges, QueryResults
from jaxlc.attention.kernels import fa3, reference
from jaxlc.attention.kernels.choose import KERNELS
from jaxlc.attention.kernels.packed_check import fill_free_memory_with_nan
from jaxlc.attention.key_ranges import TokenInfo, key_ranges
from jaxlc.search.measure import seconds_of_calls

MAX_ERROR = 1e-2
_DOCUMENTS = 2000


class _Case(NamedTuple):
    """Segments as shares of the tokens of an array, in 32nds: of queries, and of keys."""

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool = True
    window: int | None = None
    max_share: int = 32  # of `max_seqlen`


_CASES = (
    _Case("documents", (10, 2, 20), (10, 2, 20)),
    _Case("queries without keys", (10, 2, 14, 6), (10, 0, 16, 6)),
    _Case("keys without queries", (10, 0, 16, 6), (10, 2, 14, 6), causal=False),
    _Case("gaps longer than max_seqlen", (0, 24, 0, 8, 0), (24, 0, 0, 8, 0), max_share=8),
    _Case("more keys than queries", (4, 12, 0, 16), (8, 16, 0, 8), causal=False),
    _Case("causal, more keys than queries", (4, 8, 18, 2), (6, 8, 18, 0)),
    _Case("window", (12, 20), (12, 20), window=17),
)


def fa3_rows(sizes: Sizes) -> Iterator[Row]:
    """Errors of raw calls, then times of many documents by each kernel."""
    is_available = "fa3" in supported_kernels(sizes.heads, sizes.dtype, packed=True)
    if is_available or sizes.is_dry_run:
        for case in _CASES:
            labels = dict(kernel="fa3 raw", case=case.name, heads=str(sizes.heads))
            measure = functools.partial(_errors, sizes, case)
            yield Row(labels=labels, measure=measure, seconds=20)
    num_tokens = sizes.rate_tokens[-1] if sizes.is_dry_run else 131_072
    count = min(_DOCUMENTS, num_tokens // 4)
    for name in filter(is_main, supported_kernels(sizes.heads, sizes.dtype, packed=True)):
        labels = dict(kernel=name, case=f"{count} documents", tokens=num_tokens)
        measure = functools.partial(_many_documents, sizes, name, num_tokens, count)
        yield Row(labels=labels, measure=measure, seconds=60)


def _stand_in() -> AbstractContextManager:
    """Replaces the FFI calls on a CPU."""
    if jax.devices()[0].platform == "gpu":
        return nullcontext()
    return mock.patch.object(jax.ffi, "ffi_call", fa3_stand_in.ffi_call)


def _errors(sizes: Sizes, case: _Case) -> dict:
    """Relative errors of the rows that have keys or queries, and the values of the others in memory
    that was NaN.
    """
    unit = sizes.oracle_tokens // 32
    q_lengths, kv_lengths = (unit * np.array(x) for x in (case.queries, case.keys))
    offsets = [
        np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (q_lengths, kv_lengths)
    ]
    spec = AttentionSpec(causal=case.causal, window=case.window)
    inputs = random_inputs(sizes.heads, sizes.oracle_tokens, sizes.dtype)
    ranges = _ranges(q_lengths, kv_lengths, spec)
    float32 = (x.astype(jnp.float32) for x in inputs)
    expected = jax.jit(functools.partial(both_passes, reference, spec, ranges))(*float32)
    longest = np.int64(unit * case.max_share)
    call = functools.partial(_raw_results, spec, dict(max_seqlen=longest, max_seqlen_k=longest))
    fill_free_memory_with_nan(jax.devices()[0])
    with _stand_in():
        actual = jax.jit(call)(*(x[0] for x in inputs), *map(jnp.asarray, offsets))
    has_keys, has_queries = (np.repeat(x > 0, y) for x, y in _both(q_lengths, kv_lengths))
    results = {}
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), actual, expected):
        x, y = (np.asarray(part, np.float32) for part in (x, y[0]))
        rows = has_queries if name in ("dk", "dv") else has_keys
        x, y = (part.swapaxes(0, 1) if name == "lse" else part for part in (x, y))
        results[name] = float(np.linalg.norm(x[rows] - y[rows]) / np.linalg.norm(y[rows]))
        results[f"{name} of other rows"] = sorted({str(v) for v in np.unique(x[~rows])[:4]})
    errors = [results[name] for name in ("out", "lse", "dq", "dk", "dv")]
    return results | dict(passed=all(error < MAX_ERROR for error in errors))


def _both(q_lengths: np.ndarray, kv_lengths: np.ndarray):
    return (kv_lengths, q_lengths), (q_lengths, kv_lengths)


def _ranges(q_lengths: np.ndarray, kv_lengths: np.ndarray, spec: AttentionSpec) -> KeyRanges:
    """The mask of the segments: the last query is aligned with the last key."""
    starts, ends = [], []
    for num_queries, num_keys, end in zip(q_lengths, kv_lengths, np.cumsum(kv_lengths)):
        last = np.arange(end - num_queries, end) + 1 if spec.causal else np.full(num_queries, end)
        first = np.full(num_queries, end - num_keys)
        if spec.window is not None:
            first = np.maximum(first, last - spec.window)
        is_empty = first >= last
        starts.append(np.where(is_empty, 0, first))
        ends.append(np.where(is_empty, 0, last))
    return KeyRanges(*(jnp.asarray(np.concatenate(x), jnp.int32)[None] for x in (starts, ends)))


def _raw_results(spec: AttentionSpec, longest: dict, q, k, v, dout, *offsets):
    settings = dict(spec=spec, **longest)
    out, lse = fa3.ffi_forward(q, k, v, *offsets, **settings)
    return out, lse, *fa3.ffi_backward(q, k, v, out, lse, dout, *offsets, **settings)


def _many_documents(sizes: Sizes, name: str, num_tokens: int, count: int) -> dict:
    """Seconds of forward and backward over documents of random lengths."""
    generator = np.random.default_rng(0)
    cuts = np.sort(generator.choice(np.arange(1, num_tokens), count - 1, replace=False))
    lengths = np.diff(np.concatenate([[0], cuts, [num_tokens]]))
    segments = jnp.asarray(np.repeat(np.arange(1, count + 1), lengths), jnp.int32)[None]
    tokens, spec = (
        TokenInfo(jnp.arange(num_tokens, dtype=jnp.int32)[None], segments),
        AttentionSpec(),
    )
    ranges, kernel = key_ranges(tokens, tokens, spec), KERNELS[name]
    q, k, v, dout = random_inputs(sizes.heads, num_tokens, sizes.dtype)
    forward = jax.jit(lambda q, k, v: kernel.forward(q, k, v, ranges, spec))
    out, lse = forward(q, k, v)
    results = QueryResults(out.astype(q.dtype), lse, dout, jnp.zeros_like(lse))
    backward = jax.jit(lambda q, k, v, results: kernel.backward(q, k, v, ranges, spec, results))
    repeats = sizes.repeats
    return dict(
        forward_seconds=min(seconds_of_calls(forward, q, k, v, repeats=repeats)),
        backward_seconds=min(seconds_of_calls(backward, q, k, v, results, repeats=repeats)),
    )
