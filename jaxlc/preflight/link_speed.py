"""Times the links between all devices of a run: around a ring, and from each device to all others at once."""

import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlc.hlo.collectives import Groups

RING, ALL_PAIRS = "ring", "all pairs"
_NUM_HOPS = 8  # one after the other, in one measurement
_REPEATS = 3
_AXIS = "device"
# Each device sends as much in a hop: on a GPU long enough that latency hardly counts; simulated devices share memory.
_GPU_BYTES, _CPU_BYTES = 2**26, 2**16


def link_seconds(wait: Callable[[str], None]) -> dict[str, float]:
    """Seconds of one hop on each kind of link, as this process sees it; every process calls it. Empty for one device.

    A hop waits for the one before it on the same device only, so a slow link delays the devices behind it.

    Args:
      wait: a barrier of all processes, with a name. A collective fails if a process is late.
    """
    num_devices = jax.device_count()
    if num_devices == 1:
        return {}
    mesh = Mesh(np.array(jax.devices()), (_AXIS,), axis_types=(AxisType.Auto,))
    spec = PartitionSpec(_AXIS)
    # [devices that receive, values], one such block per device
    shape = (num_devices * num_devices, hop_bytes(jax.default_backend(), num_devices) // (4 * num_devices))
    make = jax.jit(partial(jnp.ones, shape, jnp.float32), out_shardings=NamedSharding(mesh, spec))
    seconds = {}
    for name, hop in ((RING, _ring_hop), (ALL_PAIRS, _all_pairs_hop)):
        hops = jax.shard_map(partial(_repeated, hop, num_devices), mesh=mesh, in_specs=spec, out_specs=spec)
        values = make()
        compiled = jax.jit(hops).lower(values).compile()
        best = float("inf")
        for repeat in range(1 + _REPEATS):  # the first one connects the devices
            wait(f"preflight {name} {repeat}")
            start = time.perf_counter()
            jax.block_until_ready(compiled(values))
            if repeat:
                best = min(best, (time.perf_counter() - start) / _NUM_HOPS)
        seconds[name] = best
    return seconds


def hop_bytes(platform: str, num_devices: int) -> int:
    """Bytes of each device in a hop, a multiple of 4 bytes for each device."""
    num_bytes = _CPU_BYTES if platform == "cpu" else _GPU_BYTES
    return 4 * num_devices * max(1, num_bytes // (4 * num_devices))


def sent_bytes(name: str, platform: str, num_devices: int) -> int:
    """Bytes that a device sends to others in a hop."""
    num_bytes = hop_bytes(platform, num_devices)
    return num_bytes if name == RING else num_bytes * (num_devices - 1) // num_devices


def links(name: str, num_devices: int) -> tuple[str, Groups]:
    """XLA's name of the collective, and its pairs or its group of devices."""
    if name == RING:
        return "collective-permute", tuple(_ring_pairs(num_devices))
    return "all-to-all", (tuple(range(num_devices)),)


def _ring_pairs(num_devices: int) -> list[tuple[int, int]]:
    return [(device, (device + 1) % num_devices) for device in range(num_devices)]


def _ring_hop(num_devices: int, values: jax.Array) -> jax.Array:
    return jax.lax.ppermute(values, _AXIS, _ring_pairs(num_devices))


def _all_pairs_hop(num_devices: int, values: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(values, _AXIS, split_axis=0, concat_axis=0, tiled=True)


def _repeated(hop: Callable[[int, jax.Array], jax.Array], num_devices: int, values: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, _NUM_HOPS, lambda _, x: hop(num_devices, x), values)
