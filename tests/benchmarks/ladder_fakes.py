"""Replacements for the compilation of memory cases. Imports no jax, since every process imports
this module.
"""

from jaxlc.config import Config
from jaxlc.core.errors import UserError

GIB = 2**30


def planned(config: Config) -> dict:
    """GPU memory is 10 GiB plus 40 GiB per 2^20 tokens of a GPU, 5% more per extra layer of a
    group. Host memory holds the layer inputs, one per group."""
    num_gpus, tokens, groups = (
        config.mesh.num_devices,
        config.data.seq_len,
        config.memory.layers_per_remat_group,
    )
    device = 10 * GIB + 40 * GIB * tokens / num_gpus / 2**20 * (1 + 0.05 * (groups - 1))
    host = 90 * GIB + 8192 * 32 / groups * tokens / max(1, num_gpus // 8)
    device_fits, host_fits = device <= 75 * GIB, host + 90 * GIB <= 1843 * GIB
    return dict(
        fits=device_fits and host_fits,
        device_fits=device_fits,
        device_peak_bytes=device,
        device_compiled_bytes=device - 3 * GIB,
        device_usable_bytes=75 * GIB,
        host_bytes_per_node=host,
        staging_bytes_per_node=90 * GIB,
        host_usable_bytes_per_node=1843 * GIB,
        step_seconds=100.0,
        step_seconds_low=50.0,
        step_seconds_high=200.0,
        tokens_per_second_per_device=2.0 if config.memory.remat == "full" else 1.0,
        exposed_host_copy_seconds=1.0,
        recomputed_share=0.3,
        largest="bf16[1,2] 8.00 GiB layer/add; bf16[3] 1.00 GiB layer/mul",
    )


def refuses(config: Config) -> dict:
    raise UserError("too large")
