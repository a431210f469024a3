"""Compiler options by name and version: the one place that knows XLA's option names and which versions know them.

An unknown name in XLA_FLAGS kills the process inside C++; as a compile option it is a Python error, and one process
can compile the same step in several ways. So options travel with `.compile(compiler_options=...)`.

What each preset does to a schedule is in docs/xla_flags.md. All options here are known to the compilers of jax 0.10.1,
0.11.2 and 0.12.0.1, but for those that are chosen by version.
"""

from collections.abc import Mapping
from types import MappingProxyType

from jaxlc.runtime.plugin import Version, xla_version

Options = dict[str, bool | int | str]

# 0.10.2 still takes the option and does nothing; from 0.11 on it is unknown.
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
    # Schedules by estimated latencies, so that a collective starts early and compute runs until it is done; without it
    # the ring's hops wait in line with the attention that should hide them.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # By default one collective is in flight at a time. The ring's backward has two (the K/V hop and the dK/dV hop) and
    # FSDP gathers beside them: all should hide behind the same attention call.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    # The scheduler gives up overlap where it believes memory to be short: at 95% of what 80% of the GPU's memory leaves
    # beside the arguments. A step that fits with room to spare then has half of its hops exposed; in percent.
    "xla_gpu_memory_limit_slop_factor": 130,
}
_PIPELINED: Options = {
    # The loop over layers gathers the weights of the next layer, and reduces the gradients of the last one, beside the
    # compute of this one, instead of waiting for them at its ends.
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_ON",
    "xla_gpu_pipeline_all_reduce": "COLLECTIVE_PIPELINING_MODE_ON",
}
_UNCOMBINED: Options = {
    # Small collectives are joined into one that waits for all of them; each alone can start as soon as it may.
    "xla_gpu_all_gather_combine_threshold_bytes": 1,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    "xla_gpu_all_reduce_combine_threshold_bytes": 1,
}
_HOST_MEMORY: Options = {
    # Where XLA believes that a program does not fit it computes things again, and it counts what waits in host memory
    # as the GPU's. 8B at 1,048,576 tokens on one H100, state and residuals on the host: predicted 2,720 s with this
    # pass and 2,607 s without it, for 0.6 GiB more. What is computed again is the config's to say (memory.remat).
    "xla_disable_hlo_passes": "rematerialization",
    # Copies between host and device that may be on their way at a time. By default two, and a layer has nine weights:
    # all but the last two would be waited for before anything else starts.
    "xla_gpu_experimental_parallel_async_compute_limit": 16,
}
PRESETS: Mapping[str, Options] = MappingProxyType(
    {
        "default": {},  # as XLA comes
        "overlap": _OVERLAP,
        "pipelined": _OVERLAP | _PIPELINED,
        # Two rounds of the loop over layers in one: no copy from the end of a round to the start of the next.
        "double_buffered": _OVERLAP | _PIPELINED | {"xla_gpu_enable_while_loop_double_buffering": True},
        "uncombined": _OVERLAP | _UNCOMBINED,
        # Kernels launched one by one instead of as CUDA graphs: slower to launch, and profiles and crashes name them.
        "no_graphs": _OVERLAP | {"xla_gpu_enable_command_buffer": ""},
    }
)


# In the XLA of jax 0.10 some options have another name, and are on or off.
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
    """Options for `lowered.compile`. What the user has set in XLA_FLAGS is left out of them, or it would not count.

    Args:
      platform: of the devices, as `jax.Device.platform` names it.
      preset: a name in PRESETS.
      transport: of attention's hops, as `jaxlc.runtime.transport` chooses it; None: XLA's own way.
      uses_host_memory: whether the program keeps anything there.
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
    """Names and values in XLA_FLAGS, "--name=value" or "--name"; the last one of a name counts."""
    flags = (flag.partition("=") for flag in environment.get("XLA_FLAGS", "").split())
    return {name.lstrip("-"): value or "true" for name, _, value in flags}
