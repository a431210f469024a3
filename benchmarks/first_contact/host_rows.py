"""Parts host and hoststep: pinned host memory, its bandwidth, and training steps whose state is in
it.

One process per row, because the pools of JAX are sized when it starts.
"""

import functools
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.first_contact.attention_inputs import (
    device_or_h100,
    random_inputs,
    supported_kernels,
)
from benchmarks.first_contact.rows import Row
from benchmarks.first_contact.sizes import Sizes
from benchmarks.first_contact.step_rows import planned, step_config
from jaxlc.attention.contract import AttentionSpec
from jaxlc.attention.kernels.choose import KERNELS
from jaxlc.config import MeshConfig, RuntimeConfig
from jaxlc.runtime.start import start
from jaxlc.search.measure import measure_step, random_batch, seconds_of_calls
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.state import DEVICE, PINNED_HOST, lacks_host_memory, memory_kind_of, to_memory_kind
from jaxlc.step.step import build_step

_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_POOL_GIB = 100  # above every row's need, below the memory of a node with 128 GiB
_NUM_STEPS = 3


def host_rows(sizes: Sizes) -> Iterator[Row]:
    for direction in ("from host", "to host", "both"):
        # copies by the copy engines, and by kernels
        for index in ("loop counter", "array element"):
            for with_attention in (False, True):
                labels = dict(
                    name="copy", direction=direction, index=index, with_attention=with_attention
                )
                measure = functools.partial(
                    _copies, sizes, direction, index == "array element", with_attention
                )
                yield Row(labels=labels, measure=measure, seconds=45, environment={_LIMIT: "40"})
    # after the copies: a machine without enough memory ends the process
    for gib in sizes.pinned_gib:
        for limit_gib in (None, max(1, int(gib * 1.1))):
            environment = {} if limit_gib is None else {_LIMIT: str(limit_gib)}
            labels = dict(name="pin", gib=gib, limit_gb=limit_gib)
            yield Row(
                labels=labels,
                measure=functools.partial(_pin, gib),
                seconds=20 + 2 * gib,
                environment=environment,
            )


def _pin(gib: float) -> dict:
    """Allocates pinned host memory in arrays of 1 GiB."""
    start_seconds = time.perf_counter()
    start(RuntimeConfig())
    jax.block_until_ready(jnp.zeros(1))
    times = dict(start_seconds=time.perf_counter() - start_seconds)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=PINNED_HOST)
    count, elements = max(1, round(gib)), min(2**28, round(gib * 2**28))
    part = jax.block_until_ready(jnp.zeros(elements, jnp.float32))
    start_seconds = time.perf_counter()
    arrays = []
    try:
        for _ in range(count):
            arrays.append(jax.block_until_ready(jax.device_put(part, sharding)))
    except jax.errors.JaxRuntimeError as error:
        times["reason"] = str(error)[:300]
    return times | dict(pinned_arrays=len(arrays), seconds=time.perf_counter() - start_seconds)


def _copies(sizes: Sizes, direction: str, by_kernels: bool, with_attention: bool) -> dict:
    """Copies every array of a stack in host memory, alone and next to attention of about the same
    duration.
    """
    start(RuntimeConfig())
    num_arrays, elements = sizes.host_stack
    on_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    has_host_memory = lacks_host_memory(make_mesh(MeshConfig(), jax.devices()[:1])) is None
    sharding = on_device.with_memory_kind(PINNED_HOST) if has_host_memory else on_device
    stack = jax.device_put(jnp.ones((num_arrays, elements), jnp.float32), sharding)
    name = supported_kernels(sizes.heads, sizes.dtype)[0]
    q, k, v, _ = random_inputs(sizes.heads, sizes.overlap_tokens, sizes.dtype)

    def attend(q, k, v):
        if not with_attention:
            return q
        out = KERNELS[name].forward(q, k, v, None, AttentionSpec())[0]
        return (q + 1e-3 * out.astype(q.dtype)).astype(q.dtype)

    copies = jax.jit(
        functools.partial(_copy_loop, direction, by_kernels, attend),
        donate_argnums=0,
        out_shardings=(sharding, on_device, on_device),
    )
    device_array = jnp.ones(elements, jnp.float32)

    def run():
        nonlocal stack
        stack, last, out = copies(stack, device_array, q, k, v)
        return stack, last, out

    seconds = min(seconds_of_calls(run, repeats=sizes.repeats))
    moved = num_arrays * elements * 4 * (2 if direction == "both" else 1)
    peak = device_or_h100().host_bandwidth_bytes_per_second * (2 if direction == "both" else 1)
    return dict(
        seconds=seconds,
        seconds_per_array=seconds / num_arrays,
        gb_per_second=moved / seconds / 1e9,
        share=moved / seconds / peak,
        has_host_memory=has_host_memory,
        kernel=name if with_attention else None,
    )


def _copy_loop(direction: str, by_kernels: bool, attend: Callable, stack, device_array, q, k, v):
    """Returns (stack, the last array from the host, q). In-place writes to the host go to the same
    index.
    """

    def body(carry, index):
        stack, last, q = carry
        new = last
        if direction != "to host":
            new = to_memory_kind(lax.dynamic_index_in_dim(stack, index, keepdims=False), DEVICE)
        if direction != "from host":
            written = to_memory_kind(
                last + 1 if direction == "to host" else last, memory_kind_of(stack)
            )
            stack = lax.dynamic_update_index_in_dim(stack, written, index, 0)
        return stack, new, attend(q, k, v)

    carry = (stack, device_array, q)
    if by_kernels:  # an index that XLA cannot derive from the loop counter
        return lax.scan(
            lambda carry, index: (body(carry, index), None), carry, jnp.arange(stack.shape[0])
        )[0]
    return lax.fori_loop(0, stack.shape[0], lambda index, carry: body(carry, index), carry)


def host_step_rows(sizes: Sizes) -> Iterator[Row]:
    on_host = dict(parameters="host", optimizer="host", remat="full", offload=("residual",))
    tiled = on_host | dict(tile_tokens=sizes.host_tile_tokens)
    environment = {_LIMIT: str(_POOL_GIB)}
    yield Row(labels=dict(name="equality", tokens=sizes.equality_tokens), seconds=150, environment=environment,
              measure=functools.partial(_equality, sizes, on_host))  # fmt: skip
    for preset, num_tokens, seconds in (
        (sizes.preset, sizes.long_host_tokens, 230),
        (sizes.large_preset, sizes.large_host_tokens, 200),
    ):
        labels = dict(name="step", preset=preset, tokens=num_tokens)
        measure = functools.partial(_host_step, sizes, preset, num_tokens, tiled)
        yield Row(labels=labels, measure=measure, seconds=seconds, environment=environment)


def _host_step(sizes: Sizes, preset: str, num_tokens: int, memory: dict) -> dict:
    config = step_config(
        sizes, preset, num_tokens, attention=dict(document_mask=False), memory=memory
    )
    start(config.runtime)
    measured = measure_step(config, 1)
    if sizes.is_dry_run:
        return measured
    names = ("step_seconds", "exposed_host_copy_seconds")
    return measured | planned(config, predicted=names, memory=("host_bytes_per_device",))


def _equality(sizes: Sizes, memory: dict) -> dict:
    """Loss and gradient norm of steps with the state in host memory, and on the device."""
    results = {}
    for name, settings in (("host", memory), ("device", dict(remat="full"))):
        attention = dict(document_mask=False)
        config = step_config(
            sizes, sizes.preset, sizes.equality_tokens, attention=attention, memory=settings
        )
        start(config.runtime)
        step = build_step(config, make_mesh(config.mesh, jax.devices()[:1]))
        compiled, state, batch = step.compile(), step.init(), random_batch(step)
        rows = []
        for _ in range(_NUM_STEPS):
            state, metrics = compiled(state, batch)
            rows.append((float(metrics.loss), float(metrics.grad_norm)))
        results[name] = rows
        del state
    differences = [
        max(abs(a - b) / abs(b) for a, b in zip(host, device))
        for host, device in zip(results["host"], results["device"])
    ]
    return results | dict(relative_differences=differences, passed=max(differences) < 1e-2)
