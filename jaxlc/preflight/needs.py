"""What a config needs of its machines, and the figures of its plan, for comparison with what was found."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from jaxlc.checkpoints.base_model import checkpoint_part
from jaxlc.checkpoints.checkpoint_files import CHECKPOINTS_DIRECTORY, committed_steps
from jaxlc.config import Config, to_dict
from jaxlc.config.differences import differences
from jaxlc.core import hardware
from jaxlc.core.counts import gib
from jaxlc.core.errors import UserError
from jaxlc.hlo.kernel_costs import Product
from jaxlc.plan.memory import Memory
from jaxlc.plan.record import PlanRecord, read_plan_file
from jaxlc.preflight import link_speed
from jaxlc.runtime import memory_pools
from jaxlc.sharding.mesh import make_mesh
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.time_model import TimeModel
from jaxlc.simulate.topology import topology
from jaxlc.step.state import DEVICE, bytes_per_device
from jaxlc.step.step import TrainStep, build_step
from jaxlc.train import stragglers

_PLANNED_SECTIONS = ("model", "lora", "mesh", "attention", "memory", "precision")
_FILES = ("init_from", "name")  # settings of the model that shape no array


class Needs(NamedTuple):
    """Bytes that the largest stage needs."""

    pool_bytes: int  # on each GPU: what is known of JAX's pool
    memory_fraction: float  # of each GPU's memory, which JAX's pool takes at the start
    host_bytes_per_device: int  # on a machine, for each of its devices
    host_bytes_per_process: int
    disk_bytes: int  # checkpoints that the run adds to the workdir
    source: str  # where the numbers come from

    def host_bytes(self, num_devices: int, num_processes: int) -> int:
        """On a machine with this number of devices and processes of the run."""
        return num_devices * self.host_bytes_per_device + num_processes * self.host_bytes_per_process

    def text(self, num_devices: int) -> str:
        """One line, for a process with this number of devices."""
        return (
            f"the config needs {gib(self.pool_bytes)} GiB of each device ({self.source}),"
            f" {gib(self.host_bytes(num_devices, 1))} GiB of host memory per process, and {gib(self.disk_bytes)} GiB of"
            " disk for checkpoints"
        )


class Figures(NamedTuple):
    """Seconds that the plan assumes for what preflight measures."""

    source: str
    seconds: dict[str, float]  # PRODUCT, COPY, UPLOAD, RING, ALL_PAIRS


def needs_of(configs: Sequence[Config], workdir: Path, platform: str, plan_file: str = "") -> Needs:
    """What the stages of a run need: of a plan that `jaxlc plan --json` wrote, or, without one, what is known without
    the compiler: the state, and the pools of pinned host memory.

    Raises:
      UserError: the mesh has another number of devices, or the plan is not of this config.
    """
    steps = [build_step(config, make_mesh(config.mesh)) for config in configs]
    plans = [plan.memory for plan in _read_plans(plan_file, configs)] if plan_file else []
    parts = [
        _needs_of_step(step, platform, plan) for step, plan in zip(steps, plans or [None] * len(steps), strict=True)
    ]
    largest = Needs(*(max(values) for values in zip(*parts)))
    train = configs[0].train
    num_saved = len(committed_steps(workdir / CHECKPOINTS_DIRECTORY))
    num_more = max(1, train.keep_checkpoints + 1 - num_saved)  # the oldest is deleted after the newest is complete
    return largest._replace(disk_bytes=num_more * largest.disk_bytes)


def _needs_of_step(step: TrainStep, platform: str, plan: Memory | None) -> Needs:
    config, state = step.config, step.abstract_state
    saved, state_bytes = checkpoint_part(step, state), bytes_per_device(state, step.memory_spaces, DEVICE)
    host_bytes = bytes_per_device(saved)  # while a checkpoint is written
    if platform == "cpu":  # no pools, and the memory of the devices is that of the host
        pool_bytes, host_bytes = 0, host_bytes + bytes_per_device(state)
    else:
        pool_bytes = memory_pools.host_pool_bytes(config.runtime, memory_pools.pooled_host_bytes(config))
    return Needs(
        pool_bytes=plan.pool_bytes if plan else state_bytes,
        memory_fraction=0.0 if config.runtime.unified_memory else config.runtime.memory_fraction,
        host_bytes_per_device=pool_bytes + host_bytes,
        host_bytes_per_process=memory_pools.pools_per_node_bytes(pool_bytes, 0, 1),
        disk_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(saved)),
        source="from --plan" if plan else "its training state; activations are only in a --plan",
    )


def _read_plans(path: str, configs: Sequence[Config]) -> Iterator[PlanRecord]:
    """The plan of each stage.

    Raises:
      UserError: a plan was made with other settings.
    """
    values = read_plan_file(Path(path))
    plans = [stage["plan"] for stage in values["stages"]] if "stages" in values else [values]
    if len(plans) != len(configs):
        raise UserError(f"the plan {path} has {len(plans)} stages and the config has {len(configs)}; plan it again")
    for plan, config in zip(map(PlanRecord.from_json, plans), configs):
        here = {name: values for name, values in to_dict(config).items() if name in _PLANNED_SECTIONS}
        for section, name, value, planned in differences(here, plan.config):
            if section in _PLANNED_SECTIONS and name not in _FILES:
                raise UserError(
                    f"the plan {path} was made with {section}.{name}={planned}, and the config has {value}; plan it"
                    " again"
                )
        if plan.tokens_per_step != config.tokens_per_step:
            raise UserError(
                f"the plan {path} has {plan.tokens_per_step:,} tokens in a step, and the config"
                f" {config.tokens_per_step:,}; plan it again"
            )
        yield plan


def figures_of(config: Config, roofline: Roofline, device_kind: str, devices_per_machine: int) -> Figures | None:
    """The plan's seconds for the measurements on all devices; None for a device of which it knows no figures.

    Args:
      devices_per_machine: taken as an NVLink domain, unless config.runtime.topology has larger ones.
    """
    device, num_devices = hardware.find(device_kind), jax.device_count()
    if device is None:
        return None
    name, per_domain = device.name, math.gcd(devices_per_machine, num_devices)
    configured = config.runtime.topology
    if configured and (gpus := topology(configured)).device == device and gpus.num_gpus == num_devices:
        per_domain = gpus.gpus_per_domain
    gpus = topology(f"{name}:{num_devices // per_domain}x{per_domain}")
    model = TimeModel(gpus, config, roofline)
    size, dtype = stragglers.operand("gpu")
    product = Product("bf16", size, size, size)
    num_products = stragglers.NUM_PRODUCTS
    products = roofline.matmul_seconds(device, "bf16", num_products * product.flops, [product] * num_products)
    copy = roofline.host_seconds(device, size * size * dtype.itemsize)
    seconds = {stragglers.PRODUCT: products, stragglers.COPY: copy, stragglers.UPLOAD: copy}
    if num_devices > 1:
        for name in (link_speed.RING, link_speed.ALL_PAIRS):
            kind, groups = link_speed.links(name, num_devices)
            seconds[name] = model.group_seconds(kind, groups, link_speed.sent_bytes(name, "gpu", num_devices))[0]
    return Figures(f"{device.name}, NVLink domains of {per_domain}", seconds)
