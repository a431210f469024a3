"""The work of a process that compiles the step of one config (`jaxlc.runtime.worker_processes`).

Imports no jax, so that the process can set the environment before it imports jax.
"""

import os

from jaxlc.config import Config, RuntimeConfig
from jaxlc.runtime.worker_processes import Row


def plan_of(config: Config, topology: str = "", constants: str = "", **options) -> Row:
    """The row {"plan": Plan} of the AOT-compiled training step.

    Args:
      topology: target GPUs; default: config.runtime.topology.
      options: further arguments of `jaxlc.plan.plan`.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # read by jax at import, here and in child processes
    from jaxlc import plan, runtime

    runtime.start(RuntimeConfig(num_processes=1))
    return dict(plan=plan.plan(config, topology or config.runtime.topology, constants=constants, **options))
