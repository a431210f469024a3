"""Replacements for compilation in the sweep's processes. Imports no jax, since every process
imports this module.
"""

import os
import signal
import time
from pathlib import Path

from jaxlc.config import Config
from jaxlc.core.errors import UserError


def figures(config: Config) -> dict:
    """Speed grows with the tensor axis; context=1 does not fit. A call appends to its mesh's file
    in cache_dir.
    """
    mesh, length = config.mesh, config.data.seq_len
    with (Path(config.data.cache_dir) / f"calls-{mesh.context}x{mesh.tensor}").open("a") as file:
        file.write("x")
    rate = 100.0 * mesh.tensor + length / 1024 + (config.runtime.transport == "nvshmem")
    return dict(
        step_seconds=length / rate,
        step_seconds_low=length / rate / 2,
        step_seconds_high=2 * length / rate,
        tokens_per_second_per_device=rate,
        mfu_causal=0.25,
        exposed_communication_seconds=0.5,
        fits=mesh.context > 1,
        host_bytes_per_node=0,
        device_peak_bytes=2**30 * mesh.context,
        device_capacity_bytes=80 * 2**30,
        device_usable_bytes=76 * 2**30,
        warnings="",
    )


def figures_for(config: Config, constants: str) -> dict:
    assert (config.runtime.topology, constants) == ("h100:1x4", "")
    return figures(config)


def killed_at_context_2(config: Config) -> dict:
    if config.mesh.context == 2:
        print("allocating the logits")
        os.kill(os.getpid(), signal.SIGKILL)
    return figures(config)


def raises_at_context_2(config: Config) -> dict:
    if config.mesh.context == 2:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand a long table")
    return figures(config)


def refuses_at_context_2(config: Config) -> dict:
    if config.mesh.context == 2:
        raise UserError("unsupported: kernel cudnn")
    return figures(config)


def exits_at_context_2(config: Config) -> dict:
    if config.mesh.context == 2:
        os._exit(3)
    return figures(config)


def four_devices(config: Config) -> dict:
    return dict(device="fake", num_devices=4)


def hangs_at_context_2(config: Config) -> dict:
    if config.mesh.context == 2:
        (Path(config.data.cache_dir) / "pid").write_text(str(os.getpid()))
        time.sleep(600)
    return figures(config)
