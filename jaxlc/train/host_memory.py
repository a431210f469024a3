"""Allocation of the pinned host memory of a step before its first execution."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxlc.core.text import gib
from jaxlc.runtime import watchdog
from jaxlc.train.reports.progress import Progress

_LEAST_BYTES = 1 << 30  # less takes no time worth a line
_PART_BYTES = 64 << 20


def allocate_host_memory(compiled: jax.stages.Compiled, mesh: Mesh, progress: Progress) -> None:
    """Allocates what the temporary buffers of `compiled` take in pinned host memory; the pool of JAX keeps it.

    Pinning takes 0.5 to 0.7 s per GiB (measured on one H100 with 16 CPU cores), which the first step would take longer.
    A program from the compilation cache may lack its sizes; then its first step allocates.
    """
    num_bytes = compiled.memory_analysis().host_temp_size_in_bytes
    if mesh.devices.flat[0].platform != "gpu" or num_bytes < _LEAST_BYTES:
        return
    start_seconds = time.perf_counter()
    progress.log(f"allocating {gib(num_bytes)} GiB of pinned host memory per GPU ...")
    with watchdog.phase("host memory", repeats=False), progress.spinner("allocating pinned host memory"):
        jax.block_until_ready(jitted_allocation(mesh, num_bytes)())
    progress.log(f"allocated pinned host memory in {time.perf_counter() - start_seconds:.1f} s")


def jitted_allocation(mesh: Mesh, num_bytes: int) -> Callable[[], jax.Array]:
    """A program that allocates and writes at least `num_bytes` of pinned host memory per device, and frees them.

    It is one temporary buffer, as in a step: the pool cannot join regions. Its parts are written one by one, as
    offloaded activations are, so that the device needs a buffer for one part only.
    """
    num_parts = -(-num_bytes // _PART_BYTES)

    def write_part(carry: None, number: jax.Array) -> tuple[None, jax.Array]:
        part = jnp.full(_PART_BYTES, number, jnp.uint8)
        return carry, jax.device_put(part, jax.memory.Space.Host)

    def write() -> jax.Array:
        _, parts = lax.scan(write_part, None, jnp.arange(num_parts).astype(jnp.uint8))
        return jax.device_put(parts[-1, -1], jax.memory.Space.Device)

    return jax.jit(jax.shard_map(write, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False))
