"""XLA compiler options by preset, transport and version. No other module contains names of XLA options.

An unknown name in XLA_FLAGS aborts the process in C++. As a compile option it is a Python error, and one process can
compile the same step with different options. Options are therefore passed to `.compile(compiler_options=...)`.

docs/xla_flags.md shows the effect of each preset on the schedule. JAX 0.10.1, 0.11.2 and 0.12.0.1 accept all options
below, except those that are selected by version.
"""

from collections.abc import Mapping
from types import MappingProxyType

from jaxlc.runtime.plugin import Version, xla_version

Options = dict[str, bool | int | str]

# 0.10.2 accepts the option and ignores it; from 0.11 it is unknown.
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

_OVERLAP: Options = {
    # Schedules by estimated latencies, so that computation runs between start and end of a collective. Without it, ring
    # hops run before or after the attention that should hide them.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # By default one collective is in flight at a time. The ring's backward has two (the K/V hop and the dK/dV hop), and
    # FSDP gathers in addition: all of them should overlap with the same attention call.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    # In percent. The scheduler gives up overlap near an internal limit: 95% of what 80% of the GPU's memory leaves
    # after the arguments. A step that fits easily can then have half of its hops exposed.
    "xla_gpu_memory_limit_slop_factor": 130,
}
_PIPELINED: Options = {
    # The loop over layers gathers the weights of the next layer and reduces the gradients of the previous one while the
    # current layer computes, instead of at the ends of an iteration.
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_pipeline_all_reduce": "COLLECTIVE_PIPELINING_MODE_ON",
}
_UNCOMBINED: Options = {
    # XLA combines small collectives into one, which starts when the last operand is ready. Separate collectives start
    # as soon as their own operand is ready.
    "xla_gpu_all_gather_combine_threshold_bytes": 1,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    "xla_gpu_all_reduce_combine_threshold_bytes": 1,
}
_HOST_MEMORY: Options = {
    # This pass recomputes values of programs that seem not to fit, and counts host memory as GPU memory. Llama 3.1 8B
    # at 1,048,576 tokens on one H100, state and residuals on the host: estimated 2,720 s with the pass and 2,607 s
    # without it, for 0.6 GiB more. The config decides what is recomputed (memory.remat).
    "xla_disable_hlo_passes": "rematerialization",
    # Copies between host and device that may be in flight at a time. The default is two, but a layer has nine weights:
    # the copies of all but the last two would be exposed.
    "xla_gpu_experimental_parallel_async_compute_limit": 16,
}
PRESETS: Mapping[str, Options] = MappingProxyType(
    {
        "default": {},  # XLA's defaults
        "overlap": _OVERLAP,
        "pipelined": _OVERLAP | _PIPELINED,
        # Merges two iterations of the loop over layers, which avoids the copies between them.
        "double_buffered": _OVERLAP | _PIPELINED | {"xla_gpu_enable_while_loop_double_buffering": True},
        "uncombined": _OVERLAP | _UNCOMBINED,
        # Launches kernels one by one instead of as CUDA graphs: slower, but profiles and crash reports name them.
        "no_graphs": _OVERLAP | {"xla_gpu_enable_command_buffer": ""},
    }
)


# In the XLA of JAX 0.10 some options have a different name and are booleans.
_FIRST_XLA_WITH_NEW_NAMES = (0, 11)
_OLD_NAMES = MappingProxyType(
    {
        f"xla_gpu_pipeline_{kind}": f"xla_gpu_enable_pipelined_{kind}"
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
)


def compile_options(
    platform: str, *, preset: str, transport: str | None, uses_host_memory: bool = False, environment: Mapping[str, str]
) -> Options:
    """Options for `lowered.compile`, without those in the user's XLA_FLAGS, which would otherwise be overridden.

    Args:
      platform: `jax.Device.platform` of the devices.
      preset: a name in PRESETS.
      transport: of ring hops, from `jaxlc.runtime.transport`; None selects XLA's default.
      uses_host_memory: whether the program stores anything in host memory.
      environment: contains XLA_FLAGS.
    """
    if platform != "gpu":
        return {}
    options = _for_version(PRESETS[preset], xla_version()) | _TRANSPORTS[transport or "nccl"]
    if uses_host_memory:
        options |= _HOST_MEMORY
    return {name: value for name, value in options.items() if name not in users_options(environment)}


def _for_version(options: Options, version: Version) -> Options:
    if version >= _FIRST_XLA_WITH_NEW_NAMES:
        return options
    return {_OLD_NAMES.get(name, name): True if name in _OLD_NAMES else value for name, value in options.items()}


def users_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Names and values in XLA_FLAGS, "--name=value" or "--name"; the last value of a name counts."""
    flags = (flag.partition("=") for flag in environment.get("XLA_FLAGS", "").split())
    return {name.lstrip("-"): value or "true" for name, _, value in flags}
