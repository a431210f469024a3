"""XLA compiler options: the only module with their names, and with the differences between XLA versions.

Options are passed to `.compile(compiler_options=...)`. An unknown name is then a Python error, and one process can
compile a step with several sets of options; an unknown name in XLA_FLAGS aborts the process in C++.

docs/xla_flags.md shows the effect of each preset on a schedule. The compilers of JAX 0.10.1, 0.11.2 and 0.12.0.1 know
all options of this module, except for those that depend on the version.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

from jaxlc.core.errors import UserError
from jaxlc.runtime.plugin import Version, xla_version

Options = dict[str, bool | int | str]

# 0.10.2 accepts the option without effect; 0.11 and newer do not know it.
LAST_XLA_WITH_NVSHMEM = (0, 10, 1)
NVSHMEM_OPTION = "xla_gpu_experimental_enable_nvshmem"

_TRANSPORTS: Mapping[str, Options] = MappingProxyType(
    {
        "nccl": {},
        "nvshmem": {NVSHMEM_OPTION: True},
        "symmetric": {"xla_gpu_collective_permute_mode": "COLLECTIVES_SYMMETRIC_MEMORY"},
        "peer": {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"},
    }
)

SLOP_OPTION = "xla_gpu_memory_limit_slop_factor"
SCHEDULED_SHARE = 0.80  # fraction of device memory to which the scheduler's limit refers
_POOL_FILL = 0.98  # fraction of JAX's pool for arguments and temporaries; the rest is lost to fragmentation

_OVERLAP: Options = {
    # Schedules by estimated latencies: a collective starts early, and compute runs until it is done. Without it the
    # ring's sends do not overlap with attention.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # By default one collective is in flight at a time. The ring's backward has two (K/V and dK/dV) in addition to FSDP
    # all-gathers, and all should overlap with the same attention call.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    # The scheduler reduces overlap above its memory limit: this percentage of 80% of the GPU's memory minus the
    # arguments. With the default of 95, half of the ring's sends are exposed in steps that have ample memory.
    # `compile_options` reduces it to what JAX's pool holds.
    SLOP_OPTION: 130,
}
_PIPELINED: Options = {
    # The loop over layers gathers the weights of the next layer and reduces the gradients of the previous one during
    # the compute of the current one, instead of at the ends of an iteration.
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_pipeline_all_reduce": "COLLECTIVE_PIPELINING_MODE_ON",
}
_UNCOMBINED: Options = {
    # XLA combines small collectives into one, which starts when the operands of all are ready. Separate collectives
    # start earlier.
    "xla_gpu_all_gather_combine_threshold_bytes": 1,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    "xla_gpu_all_reduce_combine_threshold_bytes": 1,
}
_HOST_MEMORY: Options = {
    # XLA rematerializes if it estimates that a program does not fit, and its estimate counts host memory as GPU memory.
    # 8B at 1,048,576 tokens on one H100 with state and residuals on the host: estimated 2,720 s with this pass and
    # 2,607 s without it, for 0.6 GiB more. The config selects what is recomputed (memory.remat).
    "xla_disable_hlo_passes": "rematerialization",
    # Copies between host and device in flight at a time. The default is two, but a layer has nine weights: all but the
    # last two copies would be exposed.
    "xla_gpu_experimental_parallel_async_compute_limit": 16,
}
# Every run of one executable then gives the same bits: XLA compiles no scatters with atomic additions, and cuDNN's
# attention backward uses its deterministic algorithm. `xla_gpu_deterministic_ops` would also disable autotuning.
_DETERMINISTIC: Options = {"xla_gpu_exclude_nondeterministic_ops": True}
PRESETS: Mapping[str, Options] = MappingProxyType(
    {
        "default": {},  # XLA's defaults
        "overlap": _OVERLAP,
        "pipelined": _OVERLAP | _PIPELINED,
        # Unrolls the loop over layers by two, which avoids the copy from one iteration to the next.
        "double_buffered": _OVERLAP | _PIPELINED | {"xla_gpu_enable_while_loop_double_buffering": True},
        "uncombined": _OVERLAP | _UNCOMBINED,
        # NCCL communicators of the members of each ring, instead of one of all devices.
        "permute_cliques": _OVERLAP | {"xla_gpu_collective_permute_connected_components": True},
        # Launches kernels separately instead of as CUDA graphs: slower, but profiles and crashes name them.
        "no_graphs": _OVERLAP | {"xla_gpu_enable_command_buffer": ""},
        # All matrix products use cuBLAS. Autotuning of Triton kernels, which can take minutes, is not needed.
        "no_triton_gemm": _OVERLAP | {"xla_gpu_enable_triton_gemm": False},
    }
)


# In the XLA of JAX 0.10 some options have other names and are booleans.
_FIRST_XLA_WITH_NEW_NAMES = (0, 11)
_OLD_NAMES = MappingProxyType(
    {
        f"xla_gpu_pipeline_{kind}": f"xla_gpu_enable_pipelined_{kind}"
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
)


def compile_options(
    platform: str,
    *,
    preset: str,
    transport: str | None,
    uses_host_memory: bool = False,
    is_deterministic: bool = False,
    max_slop_percent: int | None = None,
    environment: Mapping[str, str],
) -> Options:
    """Options for `lowered.compile`, without those in the user's XLA_FLAGS, which they would override.

    Args:
      platform: `jax.Device.platform` of the devices.
      preset: a name in PRESETS.
      transport: the transport that `jaxlc.runtime.transport` selects; None: XLA's default.
      uses_host_memory: whether the program has arrays in host memory.
      is_deterministic: config.runtime.deterministic.
      max_slop_percent: the result of `slop_percent`; None: unknown.
    """
    if platform != "gpu":
        return {}
    options = _for_version(PRESETS[preset], xla_version()) | _TRANSPORTS[transport or "nccl"]
    if uses_host_memory:
        options |= _HOST_MEMORY
    if is_deterministic:
        options |= _DETERMINISTIC
    if max_slop_percent is not None and SLOP_OPTION in options:
        options[SLOP_OPTION] = min(int(options[SLOP_OPTION]), max_slop_percent)
    return {name: value for name, value in options.items() if name not in users_options(environment)}


def slop_percent(pool_bytes: float, device_bytes: int, arguments_bytes: int) -> int | None:
    """The largest value of SLOP_OPTION with which XLA schedules no more than JAX's pool holds; None: any value.

    XLA's limit for temporaries is this percentage of (80% of the device's memory - arguments), for any size of the
    pool (xla/service/gpu/gpu_hlo_schedule.cc, GetSchedulerMemoryLimit).
    """
    scheduled_bytes = SCHEDULED_SHARE * device_bytes - arguments_bytes
    if scheduled_bytes <= 0:
        return None
    return max(1, int(100 * (_POOL_FILL * pool_bytes - arguments_bytes) / scheduled_bytes))


def _for_version(options: Options, version: Version) -> Options:
    if version >= _FIRST_XLA_WITH_NEW_NAMES:
        return options
    return {_OLD_NAMES.get(name, name): True if name in _OLD_NAMES else value for name, value in options.items()}


def check_users_flags(environment: Mapping[str, str]) -> None:
    """Raises UserError for a word in XLA_FLAGS that is no flag, such as the name of a file. XLA ignores such words."""
    for word in re.sub(r"'[^']*'|\"[^\"]*\"", "--", environment.get("XLA_FLAGS", "")).split():
        if not word.startswith("-"):
            raise UserError(f"XLA_FLAGS contains {word}, which is no flag: write --NAME=VALUE")


def users_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Names and values in XLA_FLAGS, "--name=value" or "--name"; the last value of a name takes precedence."""
    flags = (flag.partition("=") for flag in environment.get("XLA_FLAGS", "").split())
    return {name.lstrip("-"): value or "true" for name, _, value in flags}
