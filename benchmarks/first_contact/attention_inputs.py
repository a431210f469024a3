"""Inputs of attention calls, and the kernels that support them on the first device."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.first_contact.sizes import Heads
from jaxlc.attention.contract import (
    AttentionProblem,
    AttentionSpec,
    Kernel,
    KeyRanges,
    QueryResults,
)
from jaxlc.attention.kernels import cudnn
from jaxlc.attention.kernels.choose import KERNELS
from jaxlc.attention.key_ranges import TokenInfo, key_ranges
from jaxlc.core import hardware
from jaxlc.core.errors import is_installed
from jaxlc.core.hardware import Device
from jaxlc.search.measure import seconds_of_calls


def is_main(kernel: str) -> bool:
    """Whether `auto` chooses the kernel, on GPUs and on other devices."""
    return kernel in (
        ("fa3", "cudnn", "pallas") if jax.devices()[0].platform == "gpu" else ("blockwise",)
    )


def supported_kernels(
    heads: Heads, dtype: str, *, window: int | None = None, packed: bool = False
) -> list[str]:
    """Names of the kernels that support the problem on the first device, without the reference.

    mosaic is among them if tokamax is installed. On a CPU the Pallas kernel runs in a slow
    interpreter, so a dry run uses it for packed documents only.
    """
    device = jax.devices()[0]
    problem = AttentionProblem(
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", None),
        dtype=dtype,
        head_dim=heads.head_dim,
        value_dim=heads.head_dim,
        window=window,
        implicit_positions=not packed,
        document_ranges=packed and window is None,
        window_ranges=packed and window is not None,
        cudnn_version=cudnn.version_for(device),
    )
    skipped = {"reference"} if is_installed("tokamax") else {"reference", "mosaic"}
    if device.platform == "cpu" and not packed:
        skipped.add("pallas")
    return [
        name
        for name, kernel in KERNELS.items()
        if name not in skipped and kernel.unsupported(problem) is None
    ]


@functools.partial(jax.jit, static_argnames=("heads", "num_tokens", "dtype"))
def random_inputs(heads: Heads, num_tokens: int, dtype: str) -> tuple[jax.Array, ...]:
    """Random (q, k, v, dout), batch size 1. A GPU computes zeros faster than random numbers."""
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads, heads.num_heads)
    return tuple(
        jax.random.normal(k, (1, num_tokens, n, heads.head_dim), dtype)
        for k, n in zip(keys, counts)
    )


def ranges_for(num_tokens: int, spec: AttentionSpec, *, packed: bool) -> KeyRanges | None:
    """Packed: documents of half the sequence, a quarter and so on, and padding at the end.

    Without a causal mask, as in a ring step: keys have the documents in reverse order, at other
    offsets than queries.
    """
    if not packed:
        return None
    position = jnp.arange(num_tokens)
    segments = (
        jnp.minimum(jnp.floor(jnp.log2(num_tokens / (num_tokens - position))), 5).astype(jnp.int32)
        + 1
    )
    segments = jnp.where(position >= num_tokens - num_tokens // 32, 0, segments)
    tokens = TokenInfo(position.astype(jnp.int32)[None], segments[None])
    return key_ranges(
        tokens, tokens if spec.causal else TokenInfo(None, segments[None, ::-1]), spec
    )


def both_passes(
    kernel: Kernel, spec: AttentionSpec, ranges: KeyRanges | None, q, k, v, dout, dlse=None
):
    """(out, lse, dq, dk, dv) of a kernel; a dlse of None is zero."""
    out, lse = kernel.forward(q, k, v, ranges, spec)
    dlse = jnp.zeros_like(lse) if dlse is None else dlse
    return (
        out,
        lse,
        *kernel.backward(q, k, v, ranges, spec, QueryResults(out.astype(q.dtype), lse, dout, dlse)),
    )


def seconds_per_call(call: Callable, carry, *operands, num_calls: int, repeats: int) -> float:
    """The shortest time of one `call(carry, *operands) -> carry`, from `num_calls` calls inside one
    program.

    Single calls from Python would include the launch and the wait for the result, about 0.1 ms.
    """

    @jax.jit
    def loop(carry, *operands):
        return lax.fori_loop(0, num_calls, lambda _, carry: call(carry, *operands), carry)

    return min(seconds_of_calls(loop, carry, *operands, repeats=repeats)) / num_calls


def device_or_h100() -> Device:
    """The first device; in a dry run on a CPU an H100, so that fractions of the peaks have values."""
    return hardware.find(jax.devices()[0].device_kind) or hardware.find("h100")
