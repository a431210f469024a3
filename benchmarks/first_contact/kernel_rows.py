"""Parts env and kernels: versions, and the errors of the attention kernels against float32."""

import functools
import importlib.metadata
import itertools
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.environment import environment_info
from benchmarks.first_contact.attention_inputs import (
    both_passes,
    is_main,
    random_inputs,
    ranges_for,
    supported_kernels,
)
from benchmarks.first_contact.rows import Row
from benchmarks.first_contact.sizes import Heads, Sizes
from jaxlc.attention.contract import AttentionSpec
from jaxlc.attention.kernels import reference
from jaxlc.attention.kernels.choose import KERNELS
from jaxlc.attention.kernels.packed_check import check_packed, fill_free_memory_with_nan

MAX_ERROR = 1e-2  # relative norm of the error; bfloat16 rounds to 2^-9
_PACKAGES = re.compile(r"(jax|jaxlib|flax|optax|orbax|grain|nvidia|ml.collections|triton)", re.I)
_VARIABLES = re.compile(r"(XLA|JAX|CUDA|NCCL|NVSHMEM|SLURM|TF_)")


class _Case(NamedTuple):
    name: str
    heads: Heads
    dtype: str
    causal: bool = True
    window: int | None = None
    packed: bool = False
    has_dlse: bool = False


def environment_rows(sizes: Sizes) -> Iterator[Row]:
    yield Row(labels=dict(name="environment"), measure=_environment, seconds=20)


def _environment() -> dict:
    packages = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    device = jax.devices()[0]
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm,pcie.link.gen.max",
    ]
    try:
        smi = subprocess.run(
            [*query, "--format=csv"], capture_output=True, text=True, check=False
        ).stdout.splitlines()
    except OSError:  # no driver
        smi = []
    return environment_info() | dict(
        packages={
            name: version
            for name, version in sorted(packages.items())
            if _PACKAGES.match(name or "")
        },
        compute_capability=getattr(device, "compute_capability", None),
        memory_stats=device.memory_stats(),
        memories=[memory.kind for memory in device.addressable_memories()],
        nvidia_smi=smi,
        variables={
            name: value for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)
        },
        num_cpus=os.cpu_count(),
        host_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def kernel_rows(sizes: Sizes) -> Iterator[Row]:
    """A run's check of packed calls of fa3 and cuDNN, then the kernels that `auto` chooses, packed documents
    first.
    """
    supported = supported_kernels(sizes.heads, sizes.dtype, packed=True)
    for name, num_tokens in itertools.product(("fa3", "cudnn"), sizes.check_tokens):
        labels = dict(kernel=name, case="packed check", heads=str(sizes.heads), tokens=num_tokens)
        check = functools.partial(_check_packed, name, sizes, num_tokens)
        if name in supported:
            yield Row(labels=labels, measure=check, seconds=60)
    yield from _rows(sizes, _main_cases(sizes), is_main)


def more_kernel_rows(sizes: Sizes) -> Iterator[Row]:
    """Other kernels, heads and types."""
    yield from _rows(sizes, _other_cases(sizes), lambda _: True)
    yield from _rows(sizes, _main_cases(sizes), lambda name: not is_main(name))


def _rows(sizes: Sizes, cases: Iterator[_Case], is_chosen: Callable[[str], bool]) -> Iterator[Row]:
    for case in cases:
        names = supported_kernels(case.heads, case.dtype, window=case.window, packed=case.packed)
        if jax.devices()[0].platform == "gpu" and case.heads.head_dim > 128:
            names = [*names, "cudnn"]  # beyond the limit that `cudnn.unsupported` states
        for name in filter(is_chosen, dict.fromkeys(names)):
            labels = dict(kernel=name, case=case.name, heads=str(case.heads), dtype=case.dtype)
            yield Row(
                labels=labels, measure=functools.partial(_errors, sizes, name, case), seconds=25
            )


def _main_cases(sizes: Sizes) -> Iterator[_Case]:
    case = functools.partial(_Case, heads=sizes.heads, dtype=sizes.dtype)
    yield case("causal, packed documents", packed=True)
    yield case("ring step, packed documents", causal=False, packed=True)
    yield case("causal")
    yield case("full", causal=False)
    yield case("window of implicit positions", window=sizes.oracle_window)
    yield case("window, packed documents", window=sizes.oracle_window, packed=True)
    yield case("causal, gradient of the lse", has_dlse=True)


def _other_cases(sizes: Sizes) -> Iterator[_Case]:
    for heads in sizes.oracle_heads:
        yield _Case("causal", heads, sizes.dtype)
    for dtype in sizes.oracle_dtypes:
        yield _Case("causal", sizes.heads, dtype)


def _check_packed(kernel: str, sizes: Sizes, num_tokens: int) -> dict:
    """The check at the start of a run; its large problem has `num_tokens`, of which it compares
    some rows.
    """
    heads = sizes.heads
    line = check_packed(
        kernel,
        jax.devices()[0],
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=sizes.dtype,
        large_elements=num_tokens * heads.num_heads * heads.head_dim,
    )
    return dict(passed=True, line=line)


def _errors(sizes: Sizes, name: str, case: _Case) -> dict:
    """Norms of the errors of out, lse, dq, dk and dv, divided by the norms of the float32 reference.
    Free memory is NaN.
    """
    spec = AttentionSpec(causal=case.causal, window=case.window)
    ranges = ranges_for(sizes.oracle_tokens, spec, packed=case.packed)
    inputs = random_inputs(case.heads, sizes.oracle_tokens, case.dtype)
    dlse = None
    if case.has_dlse:
        dlse = jax.random.normal(jax.random.key(1), (1, case.heads.num_heads, sizes.oracle_tokens))
    float32 = (x.astype(jnp.float32) for x in inputs)
    expected = jax.jit(functools.partial(both_passes, reference, spec, ranges))(*float32, dlse)
    jax.block_until_ready(expected)
    fill_free_memory_with_nan(jax.devices()[0])
    actual = jax.jit(functools.partial(both_passes, KERNELS[name], spec, ranges))(*inputs, dlse)
    errors = {
        part: _relative_error(a, b)
        for part, a, b in zip(("out", "lse", "dq", "dk", "dv"), actual, expected)
    }
    return errors | dict(passed=max(errors.values()) < MAX_ERROR)


def _relative_error(actual: jax.Array, expected: jax.Array) -> float:
    """The difference of the finite entries; the lse of a fully masked row is -inf in both."""
    is_finite = jnp.isfinite(expected)
    if not bool((jnp.isfinite(actual) == is_finite).all()):
        return float("inf")
    actual, expected = (jnp.where(is_finite, x, 0).astype(jnp.float32) for x in (actual, expected))
    return float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))
