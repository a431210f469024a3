"""Compiler options by platform: the one place that knows XLA's option names and which versions know them.

An unknown name in XLA_FLAGS kills the process inside C++; as a compile option it is a Python error, and one process
can compile the same step in several ways. So options travel with `.compile(compiler_options=...)`.
"""


def compile_options(platform: str) -> dict[str, bool | int]:
    """Options for `lowered.compile` on devices of `platform`, as `jax.Device.platform` names it.

    Both GPU options are known to the compilers of jax 0.10.1 and 0.12.0.1 (tried on a compile-only H100).
    """
    if platform != "gpu":
        return {}
    return {
        # Schedules by estimated latencies, so that a collective starts early and compute runs until it is done;
        # without it the ring's hops wait in line with the attention that should hide them.
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # By default one collective is in flight at a time. The ring's backward has two (the K/V hop and the dK/dV hop)
        # and FSDP gathers beside them: all should hide behind the same attention call.
        "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    }
