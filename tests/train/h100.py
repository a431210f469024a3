"""Compiles for H100s that are not here: needs the extra `plan`, no GPU. Used by heavy tests only."""

import re
from typing import NamedTuple

from jax.experimental import topologies

from jaxlc.config import Config
from jaxlc.core.axes import MESH_AXES
from jaxlc.train.step import build_step

# What XLA must know of the GPU. The fields that every version from 0.10.1 to 0.12 reads; the figures are XLA's own
# for H100 SXM (xla/backends/gpu/target_config/specs).
_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# Nothing can be tried out without a GPU.
_WITHOUT_GPU = {"xla_gpu_autotune_level": 0}


def compile_step(config: Config, num_nodes: int, gpus_per_node: int):
    """The executable of the training step, a process for each GPU."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"{num_nodes}x{gpus_per_node}x1", target_config=_TARGET
    )
    mesh = topologies.make_mesh(topology, tuple(vars(config.mesh)[axis] for axis in MESH_AXES), MESH_AXES)
    return build_step(config, mesh).compile(extra_options=_WITHOUT_GPU)


class Hop(NamedTuple):
    """One ring hop in the scheduled program."""

    computation: str
    is_backward: bool
    num_loops_meanwhile: int  # attention runs in loops over tiles: those between the hop's start and its end


def ring_hops(text: str) -> list[Hop]:
    """The hops of a compiled program, in the order in which it runs them: its text is scheduled."""
    hops, computation, started = [], "", {}
    for line in text.splitlines():
        if line and not line.startswith(" "):
            computation, started, num_loops = line.split(" (")[0], {}, 0
        elif name := re.search(r"(%\S+) = .* collective-permute-start\(", line):
            started[name[1]] = num_loops
        elif name := re.search(r" collective-permute-done\((%\S+?)\)", line):
            hops.append(Hop(computation, "transpose(" in line, num_loops - started[name[1]]))
        elif " while(" in line:
            num_loops += 1
    return hops

