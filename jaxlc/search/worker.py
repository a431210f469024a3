"""The work on one point of a sweep, in its own process (`jaxlc.runtime.worker_processes`).

Imports no jax, so that a worker process can set the environment before it imports jax.
"""

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxlc.config import Config, RuntimeConfig
from jaxlc.runtime.worker_processes import Row
from jaxlc.search.space import departures

if TYPE_CHECKING:
    from jaxlc.plan import Plan
    from jaxlc.plan.memory import Memory

_TIMED_STEPS = 5
_TIMES = (  # columns, of `Prediction` and of `Memory`
    "step_seconds", "tokens_per_second_per_device", "mfu_causal", "recomputed_share", "exposed_communication_seconds",
    "exposed_host_copy_seconds", "bound_by",
)  # fmt: skip
_MEMORY = (
    "fits", "device_fits", "device_peak_bytes", "device_capacity_bytes", "symmetric_used_bytes", "host_bytes_per_node",
    "staging_bytes_per_node",
)  # fmt: skip


def estimate(config: Config, constants: str = "", devices_per_process: int = 1, **options) -> Row:
    """The values of the plan of the training step, AOT-compiled for config.runtime.topology, that a ranking needs.

    Args:
      devices_per_process: GPUs per process; fewer if they do not divide the GPUs of a domain, as in a part of a node.
      options: further arguments of `jaxlc.plan.plan`.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # read by jax at import, here and in child processes
    from jaxlc import plan, runtime
    from jaxlc.simulate.topology import topology as parse_topology

    runtime.start(RuntimeConfig(num_processes=1))
    name = config.runtime.topology
    options["devices_per_process"] = math.gcd(devices_per_process, parse_topology(name).gpus_per_domain)
    return row_of(plan.plan(config, name, constants=constants, **options), config)


def row_of(result: "Plan", config: Config) -> Row:
    """The columns of a compiled step, for its documents if the plan has them; `worker_processes` adds its status."""
    from jaxlc.plan.memory import USABLE_HOST_SHARE

    predicted, memory, ring = result.predicted, result.memory, result.ring
    low, high = predicted.step_seconds_interval
    largest = (f"{array.shape} {array.bytes / 2**30:.2f} GiB {array.made_by}" for array in memory.largest[:3])
    by_resource = predicted.seconds_by_resource.items()
    times, relative = {name: getattr(predicted, name) for name in _TIMES}, 1.0
    if result.packing is not None:
        documents = result.packing.estimates[-1]  # the mean, or the only one
        relative = documents.step_seconds / predicted.step_seconds
        times |= dict(step_seconds=documents.step_seconds, mfu_causal=documents.mfu_documents)
        times["tokens_per_second_per_device"] = documents.tokens_per_second_per_device
    return dict(
        **times,
        step_seconds_low=low * relative,
        step_seconds_high=high * relative,
        time_by_resource=", ".join(f"{name} {seconds / predicted.step_seconds:.2g}" for name, seconds in by_resource),
        **{name: getattr(memory, name) for name in _MEMORY},
        device_compiled_bytes=memory.device_arguments_bytes + memory.device_temp_bytes + memory.symmetric_used_bytes,
        device_usable_bytes=memory.usable_bytes,
        host_usable_bytes_per_node=USABLE_HOST_SHARE * memory.host_capacity_per_node_bytes,
        largest="; ".join(largest),
        hops=ring.hops,
        hops_exposed=ring.exposed,
        hops_by=", ".join(sorted(ring.by_backend)),
        kernel=result.kernel_choice.partition(" ")[0],
        compile_seconds=result.compile_seconds,
        num_devices=result.num_devices,
        departures=len(departures(config)),
        warnings="; ".join(_warnings(result)),
        pools=_pool_settings(memory),
    )


def _warnings(plan: "Plan") -> Iterator[str]:
    """What the page of the plan warns about, except for sizes of pools (`_pool_settings`)."""
    from jaxlc.plan import report

    memory = plan.memory
    yield from plan.hints
    yield from report.warnings(plan)
    if memory.spilled_bytes:
        yield "unified memory: a part of the device memory is in host memory, whose accesses the estimate lacks"
    if plan.ring.exposed and memory.is_at_schedulers_limit:
        yield "temporaries reach the limit of XLA's scheduler, which gives up overlap"


def _pool_settings(memory: "Memory") -> dict[str, float]:
    """Sizes of memory pools that the step needs, as settings."""
    settings = {}
    if memory.is_pool_resized:
        settings["runtime.memory_fraction"] = memory.pool_share
    if memory.is_heap_too_small:
        settings["runtime.nvshmem_heap_bytes"] = memory.sufficient_heap_bytes
    return settings


def local_devices(config: Config) -> Row:
    """The kind and number of the devices of this machine."""
    from jaxlc import runtime

    runtime.start(config.runtime)
    import jax

    return dict(device=jax.devices()[0].device_kind, num_devices=jax.device_count())


def measure(config: Config) -> Row:
    """Times the training step on the devices of this machine. Raises JAX's error if they run out of memory."""
    from jaxlc import runtime

    runtime.import_jax()
    from jaxlc.search.measure import measure_step
    from jaxlc.step.memory import pinned_bytes

    runtime.start(config.runtime, pinned_host_bytes=pinned_bytes(config).pooled)

    figures = measure_step(config, _TIMED_STEPS)
    return dict(
        step_seconds=figures["seconds"],
        tokens_per_second_per_device=figures["tokens_per_second_per_device"],
        mfu_causal=figures["mfu_causal"],
        fits=True,
        device_peak_bytes=figures["peak_bytes"] or figures["arguments_bytes"] + figures["temp_bytes"],
        kernel=figures["kernel"],
        loss=figures["loss"],
    )
