"""Parts rates and basics: FLOP/s of attention kernels and matrix products, and the bandwidth of
device memory.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.first_contact.attention_inputs import (
    device_or_h100,
    is_main,
    random_inputs,
    ranges_for,
    seconds_per_call,
    supported_kernels,
)
from benchmarks.first_contact.rows import Row
from benchmarks.first_contact.sizes import Sizes
from jaxlc.attention.contract import AttentionSpec, Kernel, KeyRanges, QueryResults
from jaxlc.attention.kernels.choose import KERNELS
from jaxlc.models.matmuls import fp8_product
from jaxlc.search.measure import seconds_of_calls

_NUM_LAUNCHES = 200
_FP8_HISTORY = None  # current scaling
_VARIANTS = {"pallas 128x64": (128, 64), "pallas 64x64": (64, 64)}  # query and key blocks, tokens


class _Candidate(NamedTuple):
    """One implementation; None if it has no such pass."""

    name: str
    forward: Callable  # (q, k, v) -> out
    backward: Callable | None  # (q, k, v, dout, *statistics) -> (dq, dk, dv)
    # (q, k, v) -> (out, lse). None: the backward computes the forward, too
    statistics: Callable | None = None


def rate_rows(sizes: Sizes) -> Iterator[Row]:
    """The kernels that `auto` chooses, at the first two lengths: packed documents, then causal
    attention.
    """
    first = sizes.rate_tokens[:2]
    yield from _packed_rows(sizes, is_main)
    yield from _rows_of_lengths(sizes, first, causal=True, is_chosen=is_main)


def more_rate_rows(sizes: Sizes) -> Iterator[Row]:
    """Other head dims, other lengths, no mask, and other kernels."""
    first, others = sizes.rate_tokens[:2], sizes.rate_tokens[2:]
    for heads in sizes.rate_heads:
        other_sizes = dataclasses.replace(sizes, heads=heads)
        yield from _rows_of_lengths(other_sizes, first[:1], causal=True, is_chosen=is_main)
    yield from _rows_of_lengths(sizes, others, causal=True)
    yield from _rows_of_lengths(sizes, first, causal=False)
    yield from _rows_of_lengths(sizes, first, causal=True, is_chosen=lambda name: not is_main(name))
    yield from _packed_rows(sizes, lambda name: not is_main(name))


def _rows_of_lengths(
    sizes: Sizes,
    lengths: Sequence[int],
    *,
    causal: bool,
    is_chosen: Callable[[str], bool] = lambda _: True,
) -> Iterator[Row]:
    for num_tokens in lengths:
        for candidate in _candidates(sizes, num_tokens, causal):
            if not is_chosen(candidate.name):
                continue
            for which in ("forward", "backward"):
                if getattr(candidate, which) is not None:
                    labels = dict(
                        kernel=candidate.name,
                        heads=str(sizes.heads),
                        tokens=num_tokens,
                        causal=causal,
                        which=which,
                    )
                    pairs = num_tokens * (num_tokens + 1) / 2 if causal else float(num_tokens) ** 2
                    measure = functools.partial(_rate, sizes, candidate, num_tokens, pairs, which)
                    yield Row(
                        labels=labels, measure=measure, seconds=10 + 8 * (num_tokens / 65_536) ** 2
                    )


def _packed_rows(sizes: Sizes, is_chosen: Callable[[str], bool]) -> Iterator[Row]:
    """Packed documents: of a whole sequence, and of a ring step, where queries and keys have other
    offsets.
    """
    for num_tokens in sizes.rate_tokens[:2]:
        for case, causal in (("causal", True), ("ring step", False)):
            for name in filter(is_chosen, supported_kernels(sizes.heads, sizes.dtype, packed=True)):
                is_too_slow = name == "blockwise" and num_tokens > sizes.blockwise_max_tokens
                if is_too_slow or (name == "pallas" and sizes.is_dry_run):
                    continue
                for which in ("forward", "backward"):
                    labels = dict(kernel=name, tokens=num_tokens, packed=case, which=which)
                    measure = functools.partial(
                        _packed_rate, sizes, name, num_tokens, causal, which
                    )
                    yield Row(
                        labels=labels, measure=measure, seconds=10 + 8 * (num_tokens / 65_536) ** 2
                    )


def _packed_rate(sizes: Sizes, name: str, num_tokens: int, causal: bool, which: str) -> dict:
    spec = AttentionSpec(causal=causal)
    ranges = ranges_for(num_tokens, spec, packed=True)
    pairs = float((ranges.end_BT - ranges.start_BT).astype(jnp.float32).sum())
    return _rate(sizes, _ours(name, KERNELS[name], spec, ranges), num_tokens, pairs, which)


def _candidates(sizes: Sizes, num_tokens: int, causal: bool) -> Iterator[_Candidate]:
    spec = AttentionSpec(causal=causal)
    for name in supported_kernels(sizes.heads, sizes.dtype):
        if name != "blockwise" or num_tokens <= sizes.blockwise_max_tokens:
            yield _ours(name, KERNELS[name], spec)
    if jax.devices()[0].platform != "gpu":
        return
    yield _Candidate("jax.nn cudnn", functools.partial(_jax_nn, causal), None)
    yield _Candidate(
        "jax mosaic", functools.partial(_mosaic, causal), None if causal else _mosaic_backward
    )
    if causal and num_tokens == sizes.rate_tokens[0]:
        for name, (query_block, key_block) in _VARIANTS.items():
            blocks = dict(query_block_tokens=query_block, key_block_tokens=key_block)
            yield _ours(name, KERNELS["pallas"], AttentionSpec(**blocks))


def _ours(
    name: str, kernel: Kernel, spec: AttentionSpec, ranges: KeyRanges | None = None
) -> _Candidate:
    def forward(q, k, v):
        return kernel.forward(q, k, v, ranges, spec)[0]

    def backward(q, k, v, dout, out, lse):
        return kernel.backward(
            q, k, v, ranges, spec, QueryResults(out, lse, dout, jnp.zeros_like(lse))
        )

    return _Candidate(
        name, forward, backward, lambda q, k, v: kernel.forward(q, k, v, ranges, spec)
    )


def _jax_nn(causal: bool, q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def _mosaic(causal: bool, q, k, v):
    """JAX's example kernel for Hopper; scores are not scaled, which costs nothing."""
    mosaic = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
    tuning = mosaic.TuningConfig(block_q=128, block_kv=128, max_concurrent_steps=2, causal=causal)
    return mosaic.attention(q, k, v, tuning)


def _mosaic_backward(q, k, v, dout):
    """Forward and backward together; the kernel has no causal backward."""
    mosaic = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
    blocks = dict(block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64)
    tuning = mosaic.TuningConfig(block_q=128, block_kv=128, max_concurrent_steps=2, **blocks)
    _, vjp = jax.vjp(lambda q, k, v: mosaic.attention(q, k, v, tuning), q, k, v)
    return vjp(dout)


def _rate(sizes: Sizes, candidate: _Candidate, num_tokens: int, pairs: float, which: str) -> dict:
    """FLOP/s of one pass; `pairs` counts the pairs of a query and a key that the mask leaves."""
    q, k, v, dout = random_inputs(sizes.heads, num_tokens, sizes.dtype)
    num_calls = max(
        2, round(sizes.num_calls * min(1.0, (sizes.full_calls_tokens / num_tokens) ** 2))
    )
    timing = dict(num_calls=num_calls, repeats=sizes.repeats)
    flops = 4.0 * sizes.heads.num_heads * sizes.heads.head_dim * pairs
    if which == "forward":

        def call(q, k, v):  # the next call depends on this one
            return (q + 1e-3 * candidate.forward(q, k, v).astype(q.dtype)).astype(q.dtype)

        seconds = seconds_per_call(call, q, k, v, **timing)
    else:
        operands = (q, k, v)
        if candidate.statistics is not None:
            out, lse = jax.jit(candidate.statistics)(q, k, v)
            operands = (*operands, out.astype(q.dtype), lse)

        def call(carry, q, k, v, *statistics):
            dq, dk, dv = candidate.backward(q, k, v, carry[0], *statistics)
            return (
                (carry[0] + 1e-3 * dq.astype(q.dtype)).astype(q.dtype),
                dk.astype(q.dtype),
                dv.astype(q.dtype),
            )

        seconds = seconds_per_call(call, (dout, k, v), *operands, **timing)
        # five products in the backward, two in the forward
        flops *= 2.5 if candidate.statistics is not None else 3.5
    return dict(
        seconds=seconds, tflops=flops / seconds / 1e12, share=flops / seconds / _peak(sizes)
    )


def _peak(sizes: Sizes) -> float:
    return device_or_h100().bf16_flops_per_second


def basic_rows(sizes: Sizes) -> Iterator[Row]:
    yield Row(labels=dict(name="small kernels"), measure=_small_kernels, seconds=20)
    yield Row(labels=dict(name="synchronization"), measure=_synchronization, seconds=20)
    for dtype in ("bf16", "fp8"):
        for shape in sizes.products:
            labels = dict(name="product", dtype=dtype, shape=list(shape))
            yield Row(
                labels=labels, measure=functools.partial(_product, sizes, dtype, shape), seconds=20
            )
    yield Row(
        labels=dict(name="device copy"), measure=functools.partial(_device_copy, sizes), seconds=15
    )


def _product(sizes: Sizes, dtype: str, shape: tuple[int, int, int]) -> dict:
    """x w with jaxlc's own product; x is summed with a part of the result, so that each call
    depends on the last.
    """
    rows, depth, columns = shape
    x = jax.random.normal(jax.random.key(0), (rows, depth), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (depth, columns), jnp.bfloat16)

    def call(carry, w):
        x, _ = carry
        y = fp8_product(x, w, _FP8_HISTORY, 1) if dtype == "fp8" else x @ w
        return x.at[:, 0].add(1e-3 * y[:, 0]), y

    result = jnp.zeros((rows, columns), jnp.bfloat16)
    seconds = seconds_per_call(
        call, (x, result), w, num_calls=sizes.num_calls, repeats=sizes.repeats
    )
    rate, peak = 2.0 * rows * depth * columns / seconds, _peak(sizes) * (2 if dtype == "fp8" else 1)
    return dict(seconds=seconds, tflops=rate / 1e12, share=rate / peak)


def _device_copy(sizes: Sizes) -> dict:
    x = jnp.zeros(sizes.copy_bytes // 4, jnp.float32)
    seconds = seconds_per_call(lambda x: x + 1, x, num_calls=sizes.num_calls, repeats=sizes.repeats)
    rate = 2 * x.nbytes / seconds  # read and written
    return dict(
        seconds=seconds,
        gb_per_second=rate / 1e9,
        share=rate / device_or_h100().memory_bandwidth_bytes_per_second,
    )


def _small_kernels() -> dict:
    """Time of a kernel of 4 KiB with the gap before it, alone and in a CUDA graph, which XLA makes
    of such chains.
    """

    @jax.jit
    def chain(x):
        for _ in range(_NUM_LAUNCHES):
            x = lax.optimization_barrier(x + 1)
        return x

    x = jnp.zeros(1024)
    seconds = {}
    for name, options in (("graph", {}), ("single", {"xla_gpu_enable_command_buffer": ""})):
        on_gpu = jax.devices()[0].platform == "gpu"
        compiled = chain.lower(x).compile(compiler_options=options if on_gpu else {})
        seconds[f"{name}_seconds"] = min(seconds_of_calls(compiled, x, repeats=5)) / _NUM_LAUNCHES
    return seconds


def _synchronization() -> dict:
    """Time by which a round of a loop is longer if its trip count is an argument, so that the host
    reads its condition.

    That includes the kernel of the condition.
    """

    @jax.jit
    def rounds(x, num_rounds):
        return lax.while_loop(lambda state: state[0] < num_rounds, _round, (0, x))[1]

    @jax.jit
    def known_rounds(x):
        return lax.fori_loop(0, _NUM_LAUNCHES, lambda index, x: _round((index, x))[1], x)

    x = jnp.zeros(1024)
    unknown = min(seconds_of_calls(rounds, x, jnp.int32(_NUM_LAUNCHES), repeats=5)) / _NUM_LAUNCHES
    known = min(seconds_of_calls(known_rounds, x, repeats=5)) / _NUM_LAUNCHES
    return dict(
        seconds=unknown - known, unknown_trip_count_seconds=unknown, known_trip_count_seconds=known
    )


def _round(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    index, x = state
    return index + 1, lax.optimization_barrier(x + 1)
