"""The work of a process that compiles the step of one config (`jaxlc.runtime.worker_processes`).

Imports no jax, so that the process can set the environment before it imports jax.
"""

import math
import os

from jaxlc.config import Config, RuntimeConfig
from jaxlc.runtime.worker_processes import Row


def plan_of(config: Config, topology: str = "", constants: str = "", devices_per_process: int = 1, **options) -> Row:
    """The row {"plan": Plan} of the AOT-compiled training step.

    Args:
      topology: target GPUs; default: config.runtime.topology.
      devices_per_process: GPUs per process; fewer if they do not divide the GPUs of a domain, as in a part of a node.
      options: further arguments of `jaxlc.plan.plan`.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # read by jax at import, here and in child processes
    from jaxlc import plan, runtime
    from jaxlc.simulate.topology import topology as parse_topology

    runtime.start(RuntimeConfig(num_processes=1))
    name = topology or config.runtime.topology
    options["devices_per_process"] = math.gcd(devices_per_process, parse_topology(name).gpus_per_domain)
    return dict(plan=plan.plan(config, name, constants=constants, **options))
