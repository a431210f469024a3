"""Target GPUs for ahead-of-time compilation: `topology("h100:8x8")` is 8 NVLink domains of 8 H100s
each.
"""

import dataclasses
import functools
import importlib.util
import math
import re
import sys
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxlc.config import MeshConfig
from jaxlc.core import UserError, hardware
from jaxlc.sharding import mesh as sharding_mesh

# Compile options in addition to those of runtime/xla_flags.py. Autotuning needs a GPU. The machine code is not run, so
# ptxas need not optimize it.
WITHOUT_GPU = MappingProxyType(
    {"xla_gpu_autotune_level": 0, "xla_gpu_disable_gpuasm_optimizations": True}
)
# Without autotuning XLA uses Triton for all products, also for those of 8 bits, for which a GPU would choose cuBLAS.
# JAX 0.11 and 0.12 then fail on some products of float32: "No supported config found for HLO: %gemm_fusion_dot".
NO_TRITON = MappingProxyType({"xla_gpu_enable_triton_gemm": False})
FAILS_WITH_TRITON = "No supported config found for HLO"  # in the message


class _Chip(NamedTuple):
    """Properties that only the compiler needs; XLA's own figures,
    xla/backends/gpu/target_config/specs.
    """

    core_count: int
    fpus_per_core: int
    l2_cache_bytes: int
    clock_ghz: float
    shared_memory_bytes: int  # per core; a block may use 1 KiB less, on a T4 all of it
    threads: int = 2048  # per core


# The first four: tables of compute capabilities in the CUDA C++ Programming Guide, and NVIDIA's architecture papers.
_CHIPS = {
    "t4": _Chip(40, 64, 4_194_304, 1.59, 65_536, 1024),
    "rtx3090": _Chip(82, 128, 6_291_456, 1.695, 102_400, 1536),
    "l4": _Chip(58, 128, 50_331_648, 2.04, 102_400, 1536),
    "rtx4090": _Chip(128, 128, 75_497_472, 2.52, 102_400, 1536),
    "a100": _Chip(108, 64, 41_943_040, 1.41, 167_936),
    "h100": _Chip(132, 128, 52_428_800, 1.98, 233_472),
    "h200": _Chip(132, 128, 52_428_800, 1.98, 233_472),
    "gh200": _Chip(132, 128, 52_428_800, 1.98, 233_472),  # assumed to be the H100's
    "b200": _Chip(148, 128, 132_644_864, 1.965, 233_472),
    "gb200": _Chip(152, 128, 135_528_448, 2.062, 233_472),
}


class _Node(NamedTuple):
    """A host and all of its GPUs, also if only some of them are used."""

    num_gpus: int  # 0: as many as a domain has; `memory_bytes` is then for each GPU
    memory_bytes: int
    domain_size: int  # GPUs of a full NVLink domain


# A DGX H100 has 2 TB; the others are assumed to have as much. A GB200 compute tray has 2 Grace CPUs of 480 GB, a GH200
# has one. A domain of GPUs without NVLink is one machine, assumed to have for each GPU 12 GiB, as a free Colab, or 32
# GiB, as a desktop.
_NODE = _Node(num_gpus=8, memory_bytes=2 * 2**40, domain_size=8)
_NODES = {
    "t4": _Node(num_gpus=0, memory_bytes=12 * 2**30, domain_size=1),
    **dict.fromkeys(
        ("rtx3090", "l4", "rtx4090"), _Node(num_gpus=0, memory_bytes=32 * 2**30, domain_size=1)
    ),
    "gb200": _Node(num_gpus=4, memory_bytes=960 * 2**30, domain_size=72),
    "gh200": _Node(num_gpus=1, memory_bytes=480 * 2**30, domain_size=1),
}


_MAX_GPUS = 2**20  # the devices of XLA take a minute then


@dataclass(frozen=True, kw_only=True)
class Topology:
    """NVLink domains of equal GPUs, connected by a network."""

    device: hardware.Device
    num_domains: int
    gpus_per_domain: int
    devices_per_process: int
    gpus_per_node: int
    host_memory_bytes_per_node: int

    def __str__(self) -> str:
        return f"{self.device.name}:{self.num_domains}x{self.gpus_per_domain}"

    @property
    def num_gpus(self) -> int:
        return self.num_domains * self.gpus_per_domain

    @property
    def used_gpus_per_node(self) -> int:
        """Fewer than a node has if a domain is a part of one."""
        return min(self.gpus_per_node, self.gpus_per_domain)

    @functools.cached_property
    def devices(self) -> list[jax.Device]:
        """The GPUs, domain by domain: compile targets that cannot run programs.

        Raises:
          UserError: the GPU compiler is not installed.
        """
        if not has_gpu_compiler():
            raise UserError(
                f"ahead-of-time compilation for {self} needs the GPU compiler, which is not installed:"
                f" make plan, or pip install -e '.[plan]', in a checkout of jaxlc"
            )
        processes = self.gpus_per_domain // self.devices_per_process
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            topology=f"{self.num_domains}x{processes}x{self.devices_per_process}",
            target_config=target_config(self.device),
        ).devices


def topology(
    name: str, *, devices_per_process: int = 1, host_memory_gib: float | None = None
) -> Topology:
    """Parses a name such as "h100:8x8": 8 NVLink domains of 8 GPUs each. "gb200:1x64" is a part of
    one NVL72.

    Args:
      devices_per_process: GPUs per process.
      host_memory_gib: of a node. None: the amount that such machines usually have.
    Raises:
      UserError: an unknown GPU or an invalid size.
    """
    gpu, _, size = name.lower().partition(":")
    if gpu not in _CHIPS:
        raise UserError(
            f"invalid topology {name!r}: unknown GPU; expected one of {', '.join(_CHIPS)}, as in h100:8x8"
        )
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", size)
    if match is None:
        one_domain = f"{gpu}:1x{size}" if size.isdecimal() else f"{gpu}:8x8"
        raise UserError(
            f"invalid topology {name!r}: expected GPU:DOMAINSxGPUS_PER_DOMAIN, such as {one_domain}"
        )
    num_domains = int(match[1])
    gpus_per_domain = int(match[2])
    if num_domains * gpus_per_domain > _MAX_GPUS:
        raise UserError(f"invalid topology {name!r}: expected at most {_MAX_GPUS:,} GPUs")
    if devices_per_process < 1 or gpus_per_domain % devices_per_process:
        raise UserError(
            f"devices per process ({devices_per_process}) must divide the {gpus_per_domain} GPUs of a domain of {name}"
        )
    node = _NODES.get(gpu, _NODE)
    if not node.num_gpus:
        memory_bytes = node.memory_bytes * gpus_per_domain
        node = node._replace(num_gpus=gpus_per_domain, memory_bytes=memory_bytes)
    return Topology(
        device=hardware.find(gpu),
        num_domains=num_domains,
        gpus_per_domain=gpus_per_domain,
        devices_per_process=devices_per_process,
        gpus_per_node=node.num_gpus,
        host_memory_bytes_per_node=node.memory_bytes
        if host_memory_gib is None
        else int(min(host_memory_gib * 2**30, sys.maxsize)),
    )


def part_of(gpus: Topology, num_domains: int, gpus_per_domain: int) -> Topology:
    """The same kind of GPUs and nodes in another number."""
    per_process = math.gcd(gpus.devices_per_process, gpus_per_domain)
    return dataclasses.replace(
        gpus,
        num_domains=num_domains,
        gpus_per_domain=gpus_per_domain,
        devices_per_process=per_process,
    )


def full_domain_size(gpus: Topology) -> int:
    """GPUs of a full NVLink domain of this kind, such as 72 of GB200s; `gpus` may have fewer."""
    return _NODES.get(gpus.device.name, _NODE).domain_size


def make_mesh(gpus: Topology, config: MeshConfig) -> Mesh:
    """The mesh of `config` over all `gpus`; its last axes stay within an NVLink domain if they fit.

    Raises:
      UserError: the mesh has a different number of devices, or the GPU compiler is not installed.
    """
    if config.num_devices != gpus.num_gpus:
        raise UserError(
            f"{gpus} has {gpus.num_gpus} GPUs and {config} needs {config.num_devices}; both must be equal"
        )
    return sharding_mesh.make_mesh(config, gpus.devices)


def options_without_gpu(compute: str) -> dict[str, bool | int]:
    """Compile options for AOT compilation of a training step with this config.precision.compute."""
    return {**WITHOUT_GPU, **(NO_TRITON if compute == "fp8" else {})}


def target_config(device: hardware.Device) -> str:
    """Properties of a GPU as a text proto, XLA's GpuTargetConfigProto.

    It has only fields that all versions from 0.10.1 to 0.12 know: an unknown field is a parse
    error.
    """
    chip = _CHIPS[device.name]
    major, minor = device.compute_capability.split(".")
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          core_count: {chip.core_count} fpus_per_core: {chip.fpus_per_core} clock_rate_ghz: {chip.clock_ghz}
          l2_cache_size: {chip.l2_cache_bytes} device_memory_size: {device.memory_bytes}
          memory_bandwidth: {int(device.memory_bandwidth_bytes_per_second)}
          shared_memory_per_core: {chip.shared_memory_bytes}
          shared_memory_per_block_optin: {chip.shared_memory_bytes - 1024} shared_memory_per_block: 49152
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {chip.threads}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        runtime_version {{ major: 12 minor: 9 }}
        device_description_str: "{device.device_kind}"
    """


def has_gpu_compiler() -> bool:
    """Whether the package with XLA's GPU compiler is installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{major}") for major in (12, 13))
