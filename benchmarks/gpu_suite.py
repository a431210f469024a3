"""Validation and measurements on one GPU, under 8 minutes: prints one JSON object.

    python scripts/gpu_suite.py > suite.json
    python scripts/gpu_suite.py --dry_run

It checks kernels against the reference implementation, compares them with jax.nn's cuDNN attention, and measures the
overhead of ring steps, the workspaces of kernels and complete training steps. Needs jax, flax, optax, orbax, numpy,
absl and ml_collections; no data, no network. --dry_run runs the same code on small shapes, on any device.
"""

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from absl import app, flags

from benchmarks import ring_steps
from jaxlc import runtime
from jaxlc.attention import reference
from jaxlc.attention.choose import KERNELS
from jaxlc.attention.contract import AttentionProblem, AttentionSpec, Kernel, Masks
from jaxlc.config import RuntimeConfig, defaults, load
from jaxlc.core import hardware
from jaxlc.sweep import measure
from jaxlc.sweep.timing import environment_info, seconds_of_calls


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Problem sizes. The defaults fit an 80 GB GPU and 8 minutes."""

    heads: tuple[int, int, int] = (32, 8, 128)  # N, K, H of Llama 3 8B
    dtype: str = "bfloat16"
    oracle_tokens: int = 1024
    kernel_tokens: tuple[int, ...] = (4096, 16_384, 65_536, 131_072)
    blockwise_max_tokens: int = 16_384  # kernel blockwise is skipped above this length
    ring_tokens: int = 131_072
    ring_ranks: int = 8
    workspace_tokens: tuple[int, ...] = (16_384, 65_536)
    preset: str = "llama3.2-1b"
    train_tokens: tuple[int, ...] = (8192, 32_768, 131_072)
    repeats: int = 3
    budget_seconds: float = 450.0  # measurements that have not started by then are skipped


DRY_RUN = Sizes(
    heads=(4, 2, 16), dtype="float32", oracle_tokens=64, kernel_tokens=(64,), blockwise_max_tokens=64, ring_tokens=64,
    ring_ranks=4, workspace_tokens=(64,), preset="tiny", train_tokens=(64,), repeats=1,
)  # fmt: skip

_MASKS = {  # name: (causal, window, packed)
    "causal": (True, None, False),
    "full": (False, None, False),
    "causal, packed documents": (True, None, True),
    "window, packed documents": (True, 200, True),
}


def run(sizes: Sizes) -> dict:
    """Runs all parts, the most important first. A measurement that fails gives a row with `error`."""
    deadline = time.monotonic() + sizes.budget_seconds
    parts = dict(
        workspaces=_workspaces,  # first: the device reports only the peak since the start of the process
        correctness=_correctness,
        ring_steps=_ring_steps,
        train_steps=_train_steps,
        kernels=_rates,
    )
    results = dict(environment_info())
    for name, part in parts.items():
        results[name] = [_row(name, labels, measurement, deadline) for labels, measurement in part(sizes)]
    return results


Part = Iterator[tuple[dict, Callable[[], dict]]]  # labels of a row, and the function that measures the rest of it


def _row(part: str, labels: dict, measurement: Callable[[], dict], deadline: float) -> dict:
    if time.monotonic() > deadline:
        return labels | dict(skipped="no time left")
    start_seconds = time.monotonic()
    try:
        row = labels | measurement()
    except Exception as error:  # the other measurements must still run
        row = labels | dict(error=f"{type(error).__name__}: {str(error)[:300]}")
    print(f"{part} ({time.monotonic() - start_seconds:.1f} s): {row}", file=sys.stderr, flush=True)
    return row


def _kernels(sizes: Sizes, num_tokens: int, window: int | None = None, packed: bool = False) -> list[str]:
    """Names of the kernels that support the problem on this device, without the reference."""
    device, (_, _, head_dim) = jax.devices()[0], sizes.heads
    problem = AttentionProblem(
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", None),
        dtype=sizes.dtype,
        head_dim=head_dim,
        value_dim=head_dim,
        window=window,
        implicit_positions=not packed,
    )
    slow = {"reference"} if num_tokens <= sizes.blockwise_max_tokens else {"reference", "blockwise"}
    return [name for name, kernel in KERNELS.items() if name not in slow and kernel.unsupported(problem) is None]


def _inputs(sizes: Sizes, num_tokens: int) -> tuple[jax.Array, ...]:
    """Random (q, k, v, dout), batch size 1. A GPU computes zeros faster than random numbers."""
    num_heads, num_kv_heads, head_dim = sizes.heads
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    return tuple(jax.random.normal(k, (1, num_tokens, n, head_dim), sizes.dtype) for k, n in zip(keys, counts))


def _masks(num_tokens: int, packed: bool) -> Masks:
    """Documents of half the sequence, a quarter and so on, and padding at the end."""
    if not packed:
        return Masks(None, None, None, None)
    position = jnp.arange(num_tokens)
    segments = jnp.minimum(jnp.floor(jnp.log2(num_tokens / (num_tokens - position))), 5).astype(jnp.int32) + 1
    segments = jnp.where(position >= num_tokens - num_tokens // 32, 0, segments)
    return Masks.self_attention(position.astype(jnp.int32)[None], segments[None])


def _both_passes(kernel: Kernel, spec: AttentionSpec, masks: Masks, q, k, v, dout):
    out, lse = kernel.forward(q, k, v, masks, spec)
    return out, *kernel.backward(q, k, v, masks, spec, out.astype(q.dtype), lse, dout, jnp.zeros_like(lse))


def _correctness(sizes: Sizes) -> Part:
    """Largest error of out, dq, dk and dv relative to the largest value, against the float32 reference."""

    def measure(name: str, spec: AttentionSpec, masks: Masks) -> dict:
        inputs = _inputs(sizes, sizes.oracle_tokens)
        float32 = (x.astype(jnp.float32) for x in inputs)
        with jax.default_matmul_precision("highest"):  # the default on GPUs is TF32
            expected = jax.jit(functools.partial(_both_passes, reference, spec, masks))(*float32)
        actual = jax.jit(functools.partial(_both_passes, KERNELS[name], spec, masks))(*inputs)
        errors = [float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(actual, expected)]
        return dict(zip(("out", "dq", "dk", "dv"), errors))

    for mask, (causal, window, packed) in _MASKS.items():
        spec = AttentionSpec(causal=causal, window=window)
        for name in _kernels(sizes, sizes.oracle_tokens, window, packed):
            masks = _masks(sizes.oracle_tokens, packed)
            yield dict(kernel=name, mask=mask), functools.partial(measure, name, spec, masks)


def _rates(sizes: Sizes) -> Part:
    """TFLOP/s of causal attention, forward and forward with backward; for comparison also jax.nn's cuDNN attention."""
    for num_tokens in sizes.kernel_tokens:
        candidates = {
            name: functools.partial(_both_passes, KERNELS[name], AttentionSpec(), _masks(num_tokens, packed=False))
            for name in _kernels(sizes, num_tokens)
        }
        if jax.devices()[0].platform == "gpu":
            candidates["jax.nn cudnn"] = _jax_nn_cudnn
        for name, both_passes in candidates.items():
            yield dict(kernel=name, tokens=num_tokens), functools.partial(_rate, sizes, num_tokens, both_passes)


def _rate(sizes: Sizes, num_tokens: int, both_passes: Callable) -> dict:
    num_heads, _, head_dim = sizes.heads
    inputs = _inputs(sizes, num_tokens)
    forward_flops = 4.0 * num_heads * head_dim * num_tokens * (num_tokens + 1) / 2
    forward = jax.jit(lambda *x: both_passes(*x)[0])  # XLA removes the unused backward
    forward_seconds = min(seconds_of_calls(forward, *inputs, repeats=sizes.repeats))
    both_seconds = min(seconds_of_calls(jax.jit(both_passes), *inputs, repeats=sizes.repeats))
    chip = hardware.find(jax.devices()[0].device_kind)
    return dict(
        forward_seconds=forward_seconds,
        both_seconds=both_seconds,
        forward_tflops=forward_flops / forward_seconds / 1e12,
        both_tflops=3.5 * forward_flops / both_seconds / 1e12,
        peak_tflops=chip.bf16_flops_per_second / 1e12 if chip else None,
    )


def _jax_nn_cudnn(q, k, v, dout):
    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    out, gradients = jax.vjp(attend, q, k, v)
    return out, *gradients(dout)


def _ring_steps(sizes: Sizes) -> Part:
    def measure(name: str) -> dict:
        q, k, v, _ = _inputs(sizes, sizes.ring_tokens)
        return ring_steps.measure(KERNELS[name], AttentionSpec(), q, k, v, sizes.ring_ranks, sizes.repeats)

    for name in _kernels(sizes, sizes.ring_tokens):
        yield dict(kernel=name), functools.partial(measure, name)


def _workspaces(sizes: Sizes) -> Part:
    """Bytes that a kernel's backward allocates in addition to operands, results and the program's temporaries."""

    def measure(name: str, num_tokens: int) -> dict:
        q, k, v, dout = _inputs(sizes, num_tokens)
        forward = jax.jit(lambda q, k, v: KERNELS[name].forward(q, k, v, _masks(num_tokens, False), AttentionSpec()))
        out, lse = forward(q, k, v)
        operands = (q, k, v, out.astype(q.dtype), lse, dout)

        def backward(q, k, v, out, lse, dout):
            rows = (out, lse, dout, jnp.zeros_like(lse))
            return KERNELS[name].backward(q, k, v, _masks(num_tokens, False), AttentionSpec(), *rows)

        compiled = jax.jit(backward).lower(*operands).compile()
        memory, before_bytes = compiled.memory_analysis(), _bytes("bytes_in_use")
        jax.block_until_ready(compiled(*operands))
        known_bytes = memory.temp_size_in_bytes + memory.output_size_in_bytes
        peak_bytes = _bytes("peak_bytes_in_use")
        stated = getattr(KERNELS[name], "workspace_bytes", lambda *_, **__: 0)(q.shape, k.shape, backward=True)
        measured = None if peak_bytes is None else peak_bytes - before_bytes - known_bytes
        return dict(measured_bytes=measured, stated_bytes=stated, known_bytes=known_bytes)

    for num_tokens in sizes.workspace_tokens:
        for name in _kernels(sizes, num_tokens):
            yield dict(kernel=name, tokens=num_tokens), functools.partial(measure, name, num_tokens)


def _bytes(what: str) -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get(what)


def _train_steps(sizes: Sizes) -> Part:
    for num_tokens in sizes.train_tokens:
        config = defaults()
        config.model.preset = sizes.preset
        config.data.seq_len = num_tokens
        config.attention.document_mask = False
        yield dict(tokens=num_tokens), functools.partial(measure.measure_step, load(config), sizes.repeats)


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    flags.DEFINE_bool("dry_run", False, "small shapes, on any device", flag_values=values)


def main(_) -> None:
    runtime.start(RuntimeConfig())
    print(json.dumps(run(DRY_RUN if flags.FLAGS.dry_run else Sizes()), indent=1))


if __name__ == "__main__":
    define_flags()
    app.run(main)
